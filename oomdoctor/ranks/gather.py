"""A report of each rank, gathered over the store: no collective, so that it comes while one rank is down.

Every rank that is asked says what it has and waits a while for the others; one that says nothing is told as silent.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any, Final

from oomdoctor.ranks.circle import Circle

WAIT_S: Final = 8.0
"""Time for the other ranks to say theirs. A report took up to 4.7 s on a machine that was busy."""
_LOOK_S: Final = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """What one rank holds, as ``Report.to_dict`` tells it; None where it said nothing, and ``why``."""

    rank: int
    report: dict[str, Any] | None
    why: str = ""


def gather(circle: Circle, at: int, own: dict[str, Any], *, wait_s: float = WAIT_S) -> list[RankReport]:
    """Say this rank's report, and return those of all ranks.

    Args:
        at: how many reports were asked for before, on every rank.

    Raises:
        SilentRank: the store does not answer.
    """
    store: Any = circle.store_of(circle.restart)
    circle.owns(f"report/{at}/{circle.rank}")
    store.set(f"report/{at}/{circle.rank}", json.dumps(own))
    found, end = {circle.rank: own}, time.monotonic() + wait_s
    while len(found) < circle.world and time.monotonic() < end:
        for rank in range(circle.world):
            key = f"report/{at}/{rank}"
            if rank not in found and store.check([key]):
                found[rank] = json.loads(store.get(key))
        time.sleep(_LOOK_S)
    why = f"it has said nothing within {wait_s:.0f} s"
    return [
        RankReport(rank=rank, report=found.get(rank), why="" if rank in found else why) for rank in range(circle.world)
    ]


def imbalance(reports: list[RankReport]) -> float | None:
    """Return how many times as much the fullest rank holds as the emptiest; None where that is not known."""
    held = [size for one in reports if (size := held_bytes(one))]
    return max(held) / min(held) if len(held) > 1 else None


def held_bytes(one: RankReport) -> int | None:
    """Return the bytes of tensors on the rank's first device, None where it has said nothing."""
    return None if one.report is None else sum(roles_of(one).values())


def roles_of(one: RankReport) -> dict[str, int]:
    """Return the bytes by role on the rank's first device."""
    evidence = (one.report or {}).get("evidence", one.report or {})
    roles: dict[str, int] = (evidence.get("census") or {}).get("roles", {})
    return {role: size for role, size in roles.items() if size}

"""A report of each rank, gathered over the store: no collective, so that it comes while one rank is down.

Every rank that is asked says what it has and waits a while for the others; one that says nothing is told as silent.

    report/now         name of the gathering that is on, empty where it is over
    report/NAME/RANK   what a rank has to say; report/NAME/read: how many have read that all have said theirs

Limits: where the rank whose process keeps the store is gone, each of the others has its own report alone.
"""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import dataclass
from typing import Any, Final

from oomdoctor.ranks.circle import GATHERING, Circle
from oomdoctor.ranks.presence import SilentRank

WAIT_S: Final = 8.0
"""Time for the other ranks to say theirs. A report took up to 4.7 s on a machine that was busy."""
_ANSWER_S: Final = 2.0
"""Time for the thread of a rank that has said nothing to answer."""
_LOOK_S: Final = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """What one rank holds, as ``Report.to_dict`` tells it; None where it said nothing, and ``why``."""

    rank: int
    report: dict[str, Any] | None
    why: str = ""


def gather(circle: Circle, own: dict[str, Any], *, wait_s: float = WAIT_S) -> list[RankReport]:
    """Say this rank's report, and return those of all ranks."""
    found = {circle.rank: own}
    try:
        why = _gathered(circle, found, wait_s)
    except SilentRank as gone:
        why = dict.fromkeys(range(circle.world), str(gone))
    return [
        RankReport(rank=rank, report=found.get(rank), why="" if rank in found else why[rank])
        for rank in range(circle.world)
    ]


def _gathered(circle: Circle, found: dict[int, dict[str, Any]], wait_s: float) -> dict[int, str]:
    """Add to ``found`` what the other ranks say; return why the rest has said nothing."""
    store: Any = circle.store_of(circle.restart)
    name = circle.gathering = _joined(store, circle.gathering)
    keys = {rank: f"report/{name}/{rank}" for rank in range(circle.world)}
    circle.owns(keys[circle.rank])
    store.set(keys[circle.rank], json.dumps(found[circle.rank]))
    end = time.monotonic() + wait_s
    while (missing := keys.keys() - found.keys()) and time.monotonic() < end:
        for rank in missing:
            if store.check([keys[rank]]):
                found[rank] = json.loads(store.get(keys[rank]))
        time.sleep(_LOOK_S)
    if missing:
        store.compare_set(GATHERING, name, "")  # one that comes later begins another
        silent = circle.presence.not_answering(_ANSWER_S)
        gone, busy = f"silent for {wait_s:.0f} s: killed, or stopped", f"silent for {wait_s:.0f} s: busy, or not asked"
        return {rank: gone if rank in silent else busy for rank in missing}
    if store.add(f"report/{name}/read", 1) == circle.world:
        for key in (*keys.values(), f"report/{name}/read"):
            store.delete_key(key)
    return {}


def _joined(store: Any, last: str) -> str:
    """Return the gathering that is on; a new one where none is, or where this rank had its part in it, the ``last``."""
    now = store.get(GATHERING).decode() if store.check([GATHERING]) else ""
    if now and now != last:
        return str(now)
    # Another rank may begin one at the same time: the first does.
    return str(store.compare_set(GATHERING, now, uuid.uuid4().hex).decode())


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

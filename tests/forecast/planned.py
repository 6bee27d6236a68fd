"""Fixes made up for the tests of plans: each takes a line out of the cell, or makes the number in it smaller."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import reduce
from typing import Any

import torch
from forecast_lab import session

from oomdoctor.model.code import CodeFacts
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Edit, Effect, Fix, Patch, Proposal
from oomdoctor.model.incident import Family, Incident
from oomdoctor.model.memory import Census, DeviceMemory, HostMemory, Role
from oomdoctor.model.session import Session
from oomdoctor.model.unavailable import Refused, Unavailable
from oomdoctor.testing import held_already

MIB = 1 << 20
SEGMENT = 2 * MIB
NONE = Unavailable("not read in this test")
INCIDENT = Incident(is_oom=True, family=Family.CUDA, device="cuda:0", requested=MIB)

CELL = """\
first = torch.zeros(40, 1 << 18)
# between
second = torch.zeros(40, 1 << 18)
third = torch.zeros(10, 1 << 18)
"""
"""Three tensors of 40, 40 and 10 MiB that are alive together at the end: 90 MiB."""


def evidence(allocated: int = 0) -> Evidence:
    numbers = dict.fromkeys(("total", "free", "reserved"), NONE)
    device = DeviceMemory(name="cuda:0", tensor_device="cpu", allocated=allocated, **numbers)
    host = HostMemory(**dict.fromkeys(HostMemory.__dataclass_fields__, NONE))
    census = Census(device="cuda:0", found=0, allocated=NONE, roles=((Role.ACTIVATION, 64 * MIB),))
    return Evidence(devices=(device,), host=host, censuses=(census,), code=CodeFacts())


def besides(budget: int) -> int:
    """Return a budget that leaves so much besides what this process holds, for other tests too, in whole segments."""
    return budget + -(-held_already() // SEGMENT) * SEGMENT


def program(source: str = CELL, **names: Any) -> Session:
    return session({"torch": torch, **names}, source, simulated=True)


def fix(
    fix_id: str,
    change: dict[str, Sequence[str]],
    *,
    effect: Effect = Effect.EXACT,
    saves: Sequence[int] | None = None,
    slowdown: float = 1.0,
    live: bool = False,
    joins: bool = True,
) -> Fix:
    """Return a fix whose dose N puts the Nth text in the place of each key.

    Args:
        change: for each text of the cell, what each dose writes instead.
        live: whether it cannot be written in the source; then it changes nothing.
        joins: see ``Fix``.
    """
    (count,) = {len(texts) for texts in change.values()}
    thought = saves or [(30 * (dose + 1)) * MIB for dose in range(count)]

    # Called in the process that dry runs are forked from, where loops of the users' functions are cut: none here.
    proposals = tuple(
        Proposal(dose=Dose.of(strength=dose), effect=effect, saves=thought[dose], slowdown=slowdown, basis="a guess")
        for dose in range(count)
    )

    def patch(cells: Any, _evidence: Any, dose: Dose) -> Patch | Refused:
        if live:
            return Refused("it cannot be written")
        before = cells.failing.source
        after = reduce(lambda text, one: text.replace(one[0], one[1][dose.number("strength")]), change.items(), before)
        return Patch(edits=(Edit(cell=cells.failing.number, before=before, after=after, replay=after),))

    return Fix(
        id=fix_id,
        title=f"Do {fix_id}",
        effect=effect,
        joins=joins,
        cost="nothing",
        propose=lambda _incident, _evidence: proposals,
        apply=(lambda _session, _dose: nullcontext()) if live else None,
        patch=patch,
    )


def shrinking(fix_id: str, name: str, sizes: Sequence[int], **kwargs: Any) -> Fix:
    """Return a fix that makes the tensor called ``name`` as many MiB large as the dose says."""
    return fix(fix_id, {f"{name} = torch.zeros(40": [f"{name} = torch.zeros({size}" for size in sizes]}, **kwargs)

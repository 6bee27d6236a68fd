"""How far a census is from the truth, storage by storage.

Each holding is evaluated, as a user would type it, and must lead to as many bytes of living storages as it claims, that
no other holding has claimed. Where several storages are there to choose from, the choice is the best for the census.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from truth import Truth
from truth_reach import Frame, evaluated, reach

from oomdoctor.model.memory import Census, Holding


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How far a census is from the truth.

    Attributes:
        live: bytes that live; ``lost``: those of them that nothing leads to which Python knows.
        found_ratio: what the census found, to what lives.
        owned_ratio: share of the live bytes that a holding was found to hold, by storage.
        role_ratio: share of the live bytes whose role is right by the totals; ``owner_role_ratio``: by storage.
        pathless: holdings above 1 % of the memory that no expression leads to, though something does, and why not.
        foreign: bytes that the holdings claim beyond the living storages that they lead to.
        wrong: bytes by the roles that are right and the one that was given, the largest first.
    """

    live: int
    lost: int
    found_ratio: float
    owned_ratio: float
    role_ratio: float
    owner_role_ratio: float
    pathless: tuple[str, ...]
    foreign: int
    wrong: tuple[str, ...] = ()

    def faults(self) -> list[str]:
        """Return what is not as it must be, a line each."""
        faults = []
        if not 0.99 <= self.found_ratio <= 1.01:
            faults.append(f"found {self.found_ratio:.2%} of the live bytes")
        if self.owned_ratio < 0.99:
            faults.append(f"{self.owned_ratio:.2%} of the live bytes have an owner, by storage")
        if self.foreign > 0.01 * self.live:
            faults.append(f"{self.foreign / self.live:.2%} claimed by holdings that do not hold them")
        if self.role_ratio < 0.98:
            faults.append(f"{self.role_ratio:.2%} in the right role, by the totals")
        if self.owner_role_ratio < 0.98:
            faults.append(f"{self.owner_role_ratio:.2%} in the right role, by storage: {'; '.join(self.wrong[:4])}")
        faults += [f"no way to it: {line}" for line in self.pathless]
        return faults


@dataclass(slots=True)
class _Assigned:
    """Living storages, each given to the one holding that claims it."""

    truth: Truth
    free: set[int]
    owned: int = 0
    right: int = 0
    foreign: int = 0
    unseen: set[int] = field(default_factory=set)
    wrong: dict[str, int] = field(default_factory=dict)

    def give(self, holding: Holding, storages: Mapping[int, int]) -> int:
        """Give ``holding`` as many free bytes of ``storages`` as it claims, best those of its role; return the rest."""
        wanted = holding.bytes
        mine = [key for key in storages if key in self.free]
        for key in sorted(mine, key=lambda key: (holding.role not in self.truth[key].roles, -self.truth[key].nbytes)):
            alive = self.truth[key]
            if alive.nbytes > wanted:
                continue
            wanted -= alive.nbytes
            self.free.remove(key)
            self.owned += alive.nbytes
            if holding.role in alive.roles:
                self.right += alive.nbytes
            else:
                label = f"{'/'.join(sorted(alive.roles))} told to be {holding.role}: {holding.path}"
                self.wrong[label] = self.wrong.get(label, 0) + alive.nbytes
        for key in storages.keys() - self.truth.keys() - self.unseen:
            if storages[key] <= wanted:  # made without an operation: states of random number generators
                wanted -= storages[key]
                self.unseen.add(key)
        return wanted


def verdict(census: Census, truth: Truth, namespace: dict[str, Any], frames: Sequence[Frame]) -> Verdict:
    """Compare a census with the truth of the same moment."""
    live = sum(alive.nbytes for alive in truth.values())
    ways = [(holding, evaluated(holding, namespace, frames)) for holding in census.holdings]
    reached = reach([namespace, *(frame.locals for frame in frames)], graph=True).storages
    # After a failed backward the autograd engine keeps gradients in its queue until the next one: no name leads there.
    lost = sum(alive.nbytes for key, alive in truth.items() if key not in reached)
    nameless = lost
    pathless = []
    assigned = _Assigned(truth, set(truth))
    # Those that lead to one storage first: what is left is for those that lead to many.
    for holding, way in sorted(ways, key=lambda item: len(item[1].storages) if item[1] else sys.maxsize):
        rest = assigned.give(holding, way.storages if way else {key: truth[key].nbytes for key in assigned.free})
        assigned.foreign += rest
        if holding.bytes <= 0.01 * live:
            continue
        size = f"{holding.bytes / live:.1%} {holding.role}, {holding.count}, {holding.dtype} {holding.shape}"
        if way is None and holding.expression is None and holding.bytes <= nameless:
            nameless -= holding.bytes
        elif way is None:
            pathless.append(f"{size}: {holding.path} by the expression {holding.expression}")
        elif rest > 0.01 * holding.bytes or (holding.dtype, holding.shape) not in way.kinds:
            pathless.append(f"{size}: {holding.path}: {rest} bytes not there, or no such tensor")
    wrong = sorted(assigned.wrong.items(), key=lambda item: -item[1])
    return Verdict(
        live=live,
        lost=lost,
        found_ratio=census.found / live,
        owned_ratio=assigned.owned / live,
        role_ratio=_right_by_totals(census, truth) / live,
        owner_role_ratio=assigned.right / live,
        pathless=tuple(pathless),
        foreign=assigned.foreign,
        wrong=tuple(f"{nbytes / live:.1%} {label}" for label, nbytes in wrong),
    )


def _right_by_totals(census: Census, truth: Truth) -> int:
    """Return the most bytes that can be in a right role, given the totals by role."""
    room = dict(census.roles)
    right = 0
    for alive in sorted(truth.values(), key=lambda alive: (len(alive.roles), -alive.nbytes)):
        for role in alive.roles:
            if room.get(role, 0) >= alive.nbytes:
                room[role] -= alive.nbytes
                right += alive.nbytes
                break
    return right

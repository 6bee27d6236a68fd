"""What grew between two moments: by the counters alone, or by role and by holder where both were searched."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from oomdoctor.model.absence import Unavailable
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.memory import Census, DeviceMemory, Holding, Measured, Role

_HOST: Final = "cpu"
_INDEX: Final = re.compile(r"\[\d+(?::\d+)?\]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """The counters at one moment, cheap enough to be read at the start of every cell.

    Attributes:
        cell: number of the cell that was about to run.
        rss: resident set of this process, in bytes.
        allocated: bytes in live blocks by the device's name, for each device in use.
        simulated: name, capacity and number of the simulated device, where one is on.
    """

    cell: int
    rss: Measured
    allocated: tuple[tuple[str, int], ...] = ()
    simulated: tuple[str, int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """The simulated device switched on, off, off and on again, or given another capacity, between two moments.

    The tensors of the host are those of the simulated device while it is on, so that neither can be compared with
    before. One that is switched on counts anew, and not what graphs alone hold.

    Attributes:
        device: its name now; that which it had, where it is off.
        before: its capacity then, in bytes, None where it was off; ``after``: its capacity now.
    """

    device: str
    before: int | None
    after: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What one holder has more of now, or less (below zero), in bytes."""

    path: str
    role: Role
    bytes: int
    is_new: bool = False
    is_gone: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceGrowth:
    """The growth on one device, in bytes; each part largest first, without what stayed as it was."""

    device: str
    simulated: bool
    allocated: int | None
    reserved: int | None
    roles: tuple[tuple[Role, int], ...]
    holders: tuple[Change, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """The growth of this process: on each device, and of its resident set.

    Attributes:
        switch: what became of the simulated device; it and the host are not among ``devices`` then.
    """

    devices: tuple[DeviceGrowth, ...]
    rss: int | None
    switch: Switch | None = None


def compare(before: Evidence, after: Evidence) -> Growth:
    """Return what grew from ``before`` to ``after``; a device that was not in use before had nothing on it.

    Holders are matched by their paths. Those that differ in an index alone (``losses[0:64]`` and ``losses[0:128]``)
    are one holder that grew.
    """
    was, now = _simulated(before.devices), _simulated(after.devices)
    switch = switched(was, now)
    other = () if switch is None else {_HOST, *(name for name, *_ in filter(None, (was, now)))}
    return Growth(
        devices=tuple(_on(device, before, after) for device in after.devices if device.name not in other),
        rss=difference(before.host.rss, after.host.rss),
        switch=switch,
    )


def _simulated(devices: Sequence[DeviceMemory]) -> tuple[str, int, int] | None:
    """Return name, capacity and number of the simulated device; there is one at most."""
    for one in devices:
        if one.simulated and isinstance(one.total, int):
            return one.name, one.total, one.switched_on
    return None


def switched(was: tuple[str, int, int] | None, now: tuple[str, int, int] | None) -> Switch | None:
    """Return what became of the simulated device, None where nothing did."""
    named = now or was
    if named is None or was == now:
        return None
    return Switch(device=named[0], before=was[1] if was else None, after=now[1] if now else None)


def _on(device: DeviceMemory, before: Evidence, after: Evidence) -> DeviceGrowth:
    earlier = next((d for d in before.devices if (d.name, d.simulated) == (device.name, device.simulated)), None)
    old = before.census_of(device.name) if earlier is not None else None
    new = after.census_of(device.name)
    roles, holders = _by_role(old, new), _by_holder(old, new)
    return DeviceGrowth(
        device=device.name,
        simulated=device.simulated,
        allocated=difference(earlier.allocated if earlier else 0, device.allocated),
        reserved=difference(earlier.reserved if earlier else 0, device.reserved),
        roles=tuple(sorted(roles.items(), key=lambda item: -abs(item[1]))),
        holders=tuple(sorted(holders, key=lambda change: -abs(change.bytes))),
    )


def difference(before: Measured, after: Measured) -> int | None:
    """Return by how much a figure grew, None where it is not known of both moments."""
    return None if isinstance(before, Unavailable) or isinstance(after, Unavailable) else after - before


def _by_role(old: Census | None, new: Census | None) -> dict[Role, int]:
    before, after = (dict(census.roles) if census else {} for census in (old, new))
    changes = {role: after.get(role, 0) - before.get(role, 0) for role in Role}
    return {role: size for role, size in changes.items() if size}


def _by_holder(old: Census | None, new: Census | None) -> Iterable[Change]:
    before, after = _grouped(old), _grouped(new)
    listed_from = max(_smallest_listed(old), _smallest_listed(new))
    for key in {**after, **before}:
        was, now = before.get(key, ()), after.get(key, ())
        size = sum(holding.bytes for holding in now) - sum(holding.bytes for holding in was)
        # Of what only one side lists, the other may hold as much, just below the end of its list.
        if size and (abs(size) > listed_from or (was and now)):
            holders = now or was
            path = holders[0].path if len(holders) == 1 else _INDEX.sub("[…]", holders[0].path)
            yield Change(path=path, role=key[0], bytes=size, is_new=not was, is_gone=not now)


def _grouped(census: Census | None) -> Mapping[tuple[Role, str], tuple[Holding, ...]]:
    groups: dict[tuple[Role, str], tuple[Holding, ...]] = {}
    for holding in census.holdings if census else ():
        key = (holding.role, _INDEX.sub("[]", holding.path))
        groups[key] = (*groups.get(key, ()), holding)
    return groups


def _smallest_listed(census: Census | None) -> int:
    """Return the size below which a census lists no holders: 0 where all that it found is listed."""
    if census is None or sum(holding.bytes for holding in census.holdings) >= census.found:
        return 0
    return min((holding.bytes for holding in census.holdings), default=0)

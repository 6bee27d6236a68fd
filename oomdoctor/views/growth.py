"""What grew between two moments, by role and by holder, as values."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from oomdoctor.model.evidence import Evidence
from oomdoctor.model.memory import Census, DeviceMemory, Holding, Measured, Role
from oomdoctor.model.unavailable import Unavailable

_HOST: Final = "cpu"
_INDEX: Final = re.compile(r"\[\d+(?::\d+)?\]")


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
        switched: the simulated device that was switched on, off or to another size in between. The tensors of the host
            are its own while it is on, so neither it nor the host is among ``devices`` then.
    """

    devices: tuple[DeviceGrowth, ...]
    rss: int | None
    switched: str | None = None


def compare(before: Evidence, after: Evidence) -> Growth:
    """Return what grew from ``before`` to ``after``; a device that was not in use before had nothing on it.

    Holders are matched by their paths. Those that differ in an index alone (``losses[0:64]`` and ``losses[0:128]``)
    are one holder that grew.
    """
    was, now = _simulated(before.devices), _simulated(after.devices)
    switched = None if was == now else (now or was or ("",))[0]
    other = () if switched is None else {_HOST, *(one[0] for one in (was, now) if one is not None)}
    return Growth(
        devices=tuple(_on(device, before, after) for device in after.devices if device.name not in other),
        rss=difference(before.host.rss, after.host.rss),
        switched=switched,
    )


def _simulated(devices: Sequence[DeviceMemory]) -> tuple[str, Measured, int] | None:
    """Return name, capacity and number of the simulated device; there is one at most."""
    return next(((one.name, one.total, one.switched_on) for one in devices if one.simulated), None)


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

"""A device's memory as one stacked bar: who holds which share, what was asked for, and where the budget ends."""

from __future__ import annotations

from collections.abc import Iterator

from oomdoctor.model.memory import Census, DeviceMemory, HostMemory, Role
from oomdoctor.views import words
from oomdoctor.views.document import Bar


def device_bar(
    device: DeviceMemory, census: Census | None, *, total: int | None = None, asked: int | None = None
) -> Bar | None:
    """Return the bar of ``device``, None where nothing at all is known.

    Args:
        census: who holds what there; None for a device that was not searched.
        total: what a message says about the capacity, used where the device itself cannot say.
        asked: bytes of the request that failed.
    """
    total = words.known(device.total, total)
    pieces = [piece for piece in _held(device, census, total) if piece[2] > 0]
    used = sum(size for _, _, size in pieces)
    if asked:
        within = asked if total is None else max(0, min(asked, total - used))
        inside = "request" if total is None else "request, within the budget"
        pieces += [("asked", inside, within), ("over", "request, beyond the budget", asked - within)]
    if total is not None:
        pieces.append(("free", "free", total - used - (asked or 0)))
    return Bar.of(words.limited_name(device), total, pieces)


def _held(device: DeviceMemory, census: Census | None, total: int | None) -> Iterator[tuple[str, str, int]]:
    """Yield kind, label and bytes of all that is in use, as far as it is known."""
    allocated, reserved, free = words.known(device.allocated), words.known(device.reserved), words.known(device.free)
    found = 0
    if census is not None:
        roles = _roles(census)
        yield from roles
        found = sum(size for *_, size in roles)
        allocated = max(found, allocated or 0)
    if allocated is not None:
        rest_label = "allocated" if census is None else words.ROLES[Role.UNEXPLAINED]
        yield Role.UNEXPLAINED.value, rest_label, allocated - found
    inside = max(allocated or 0, reserved or 0)
    yield "cached", "reserved, not in use", inside - (allocated or 0)
    if total is not None and free is not None:
        yield from _outside(device, total - free - inside)


def _roles(census: Census) -> list[tuple[str, str, int]]:
    """Return kind, label and bytes of what has a holder, the largest first."""
    held = [(role.value, words.ROLES[role], size) for role, size in census.roles if role is not Role.UNEXPLAINED]
    return sorted(held, key=lambda piece: -piece[2])


def _outside(device: DeviceMemory, rest: int) -> Iterator[tuple[str, str, int]]:
    """Yield who has the ``rest`` of what is in use, as far as the driver tells."""
    known = (
        ("context", "CUDA context and libraries", words.known(device.context)),
        ("elsewhere", "other processes", words.known(device.elsewhere)),
    )
    for kind, label, size in known:
        yield kind, label, max(min(size or 0, rest), 0)
        rest -= size or 0
    if device.name == "cpu" and device.basis.startswith("RLIMIT_"):  # which counts nothing of other processes
        yield "process", "this process", rest
    else:
        yield "outside", "in use otherwise" if device.name == "cpu" else "other use of the device", rest


def ceiling(host: HostMemory) -> tuple[int, int, str] | None:
    """Return ``(total, free, which)`` of the machine's memory, or of the memory cgroup where that leaves less."""
    total, free = words.known(host.total), words.known(host.available)
    limit, used = words.known(host.cgroup_limit), words.known(host.cgroup_used)
    if limit is not None and used is not None and (free is None or limit - used < free):
        return limit, max(limit - used, 0), " (memory cgroup)"
    return None if total is None or free is None else (total, free, "")


def host_bar(host: HostMemory) -> Bar | None:
    """Return the host's memory as a bar: this process and those that it started, all else in use, and what is free."""
    whole = ceiling(host)
    if whole is None:
        return None
    total, free, which = whole
    used = total - free
    own = min(words.known(host.rss) or 0, used)
    children = host.children if isinstance(host.children, tuple) else ()
    theirs = min(sum(words.known(child.uss, child.rss) or 0 for child in children), max(used - own, 0))
    pieces = [
        ("process", "this process", own),
        ("children", "processes that it started", theirs),
        ("outside", "in use otherwise", used - own - theirs),
        ("free", "available", free),
    ]
    return Bar.of(f"host memory{which}", total, pieces)


def process_bar(host: HostMemory, census: Census | None, simulated: int = 0) -> Bar | None:
    """Return what this process holds of the host's memory as a bar of its own: a sliver of a large machine's.

    Args:
        census: who holds which tensors there; there is no bar where they were not searched for, or none was found.
        simulated: bytes of tensors that count for a simulated device and lie in this process.
    """
    rss = words.known(host.rss)
    tensors = simulated + (census.found if census is not None else 0)
    if rss is None or not tensors:
        return None
    pieces = [] if census is None else _roles(census)
    pieces.append(("simulated", "tensors of the simulated device", simulated))
    pieces.append(("process", "other than tensors", rss - tensors))
    return Bar.of("this process", rss, pieces)

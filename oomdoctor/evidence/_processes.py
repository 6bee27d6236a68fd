"""The memory of this process and of those that it started.

Resident sets cannot be added up: pages that a worker shares with the process it was forked from are in both. What is
one's alone (USS) and the shared pages divided among their users (PSS) can, but the kernel must walk every page table
entry of the process for them. That takes about 15 ms for each GiB that is resident in pages of 4 KiB (measured on an
AMD EPYC with Linux 6.18), so what may be walked for one reading is bounded, the largest processes after this one first.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import psutil

from oomdoctor.evidence import _process_names
from oomdoctor.model.absence import Unavailable
from oomdoctor.model.memory import HostProcess, Measured
from oomdoctor.model.sizes import GIB

__all__ = ["LEFT_OUT", "Processes", "read", "resident_only"]

_MOST_WALKED: Final = 16 * GIB
LEFT_OUT: Final = Unavailable("it was not read, to save time")
_ENDED: Final = Unavailable("it has ended and holds no memory")
_FORBIDDEN: Final = Unavailable("this process may not read it")
_UNTOLD: Final = Unavailable("the system tells nothing of its processes")
_UNREADABLE: Final = (psutil.Error, OSError, ValueError, LookupError, RuntimeError)
"""What psutil raises where ``/proc`` is missing, or a file there has another form than it knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Processes:
    """The fields of ``HostMemory`` that are of processes, in bytes."""

    rss: Measured
    uss: Measured
    pss: Measured
    children: tuple[HostProcess, ...] | Unavailable


def resident_only() -> Processes:
    """Return the resident set of this process alone."""
    try:
        rss = _resident(psutil.Process())
    except _UNREADABLE:
        rss = _UNTOLD
    return Processes(rss=rss, uss=LEFT_OUT, pss=LEFT_OUT, children=LEFT_OUT)


def read(*, most_walked: int = _MOST_WALKED) -> Processes:
    """Return the memory of this process and of those that it or its children started.

    Args:
        most_walked: resident bytes, summed over processes, that USS and PSS may be read of.
    """
    try:
        own = psutil.Process()
        rss = _resident(own)
    except _UNREADABLE:
        return Processes(rss=_UNTOLD, uss=_UNTOLD, pss=_UNTOLD, children=_UNTOLD)
    left = most_walked - (rss if isinstance(rss, int) else 0)
    try:
        uss, pss = _alone_and_shared(own, rss, most_walked)
    except _UNREADABLE:
        uss = pss = _UNTOLD
    try:
        children: tuple[HostProcess, ...] | Unavailable = tuple(_children(own, left))
    except _UNREADABLE:
        children = Unavailable("the system does not tell which processes this one started")
    return Processes(rss=rss, uss=uss, pss=pss, children=children)


def _children(own: psutil.Process, left: int) -> Iterator[HostProcess]:
    """Yield the processes below ``own``, the largest first."""
    below = own.children(recursive=True)
    if not below:
        return
    known, command = _process_names.names(), _process_names.command(own)
    sized = []
    for child in below:
        with suppress(psutil.NoSuchProcess):
            sized.append((child, _resident(child)))
    for child, rss in sorted(sized, key=lambda one: -one[1] if isinstance(one[1], int) else 0):
        # One that ends while it is looked at is left out.
        with suppress(psutil.NoSuchProcess):
            name = _process_names.label(child, known, command)
            if rss is _ENDED:
                yield HostProcess(pid=child.pid, label=f"{name} (ended)", rss=_ENDED, uss=_ENDED, pss=_ENDED)
                continue
            uss, pss = _alone_and_shared(child, rss, left)
            left -= rss if isinstance(uss, int) and isinstance(rss, int) else 0
            yield HostProcess(pid=child.pid, label=name, rss=rss, uss=uss, pss=pss)


def _resident(process: psutil.Process) -> Measured:
    try:
        return _ENDED if process.status() == psutil.STATUS_ZOMBIE else int(process.memory_info().rss)
    except psutil.ZombieProcess:
        return _ENDED
    except psutil.AccessDenied:
        return _FORBIDDEN


def _alone_and_shared(process: psutil.Process, rss: Measured, left: int) -> tuple[Measured, Measured]:
    """Return USS and PSS of a process.

    Raises:
        psutil.NoSuchProcess: it has ended.
    """
    if isinstance(rss, Unavailable):
        return rss, rss
    if rss > left:
        why = Unavailable("walking that much resident memory would take too long")
        return why, why
    try:
        found = process.memory_full_info()
    except psutil.AccessDenied:
        return _FORBIDDEN, _FORBIDDEN
    return _field(found, "uss"), _field(found, "pss")


def _field(found: object, name: str) -> Measured:
    value = getattr(found, name, None)
    return int(value) if value is not None else Unavailable(f"the system does not tell the {name.upper()} of a process")

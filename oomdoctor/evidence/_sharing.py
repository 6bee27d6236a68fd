"""Who of a device's processes is this one, and what follows: the context's size, and what others use."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Final

from oomdoctor.evidence.driver import Card, pids_agree
from oomdoctor.model.absence import Unavailable
from oomdoctor.model.memory import DeviceProcess, Measured
from oomdoctor.model.sizes import GIB

_MOST_CONTEXT_BYTES: Final = GIB * 3 // 2
"""What a process with torch uses beside its segments, at most.

Source: CUDA's own out-of-memory messages in public reports, where one process had the card to itself: total - free -
reserved is 0.3 to 1.5 GiB.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """What ``DeviceMemory`` says of the same names."""

    processes: tuple[DeviceProcess, ...] | Unavailable
    context: Measured
    elsewhere: Measured


def shares(card: Card | Unavailable, reserved: Measured, *, in_use: bool = True) -> Shares:
    """Share out a card's memory between this process and the others.

    Args:
        reserved: bytes that this process's allocator holds there.
        in_use: torch has a context there; else this process is taken to use what the driver lists for it, or nothing.
    """
    if isinstance(card, Unavailable):
        return Shares(processes=card, context=card, elsewhere=card)
    agree = pids_agree()
    processes = card.processes
    if not isinstance(processes, Unavailable):
        processes = _with_own(processes, reserved, agree)
    own = _own_bytes(processes, in_use)
    return Shares(
        processes=processes, context=_context(own, reserved), elsewhere=_elsewhere(card, processes, own, agree)
    )


def _with_own(processes: tuple[DeviceProcess, ...], reserved: Measured, agree: bool) -> tuple[DeviceProcess, ...]:
    """Mark this process: by its id where the driver counts as it does, else by a size that can be no other's."""
    own = next((process for process in processes if process.pid == os.getpid()), None)
    basis = "by its process id"
    if own is not None and not agree and not _may_hold(own, reserved):
        own = None  # another container's process, by chance of the same number
    if own is None and not agree:
        fitting = [process for process in processes if _has_size_of(process, reserved)]
        own = fitting[0] if len(fitting) == 1 else None
        basis = "by its size alone: it is what this process holds and a CUDA context"
    return tuple(replace(process, is_own=True, basis=basis) if process is own else process for process in processes)


def _may_hold(process: DeviceProcess, reserved: Measured) -> bool:
    return not (isinstance(process.bytes, int) and isinstance(reserved, int)) or process.bytes >= reserved


def _has_size_of(process: DeviceProcess, reserved: Measured) -> bool:
    if not isinstance(process.bytes, int) or not isinstance(reserved, int) or not reserved:
        return False
    return reserved <= process.bytes <= reserved + _MOST_CONTEXT_BYTES


def _own_bytes(processes: tuple[DeviceProcess, ...] | Unavailable, in_use: bool) -> Measured:
    """Return what the driver counts for this process."""
    listed = () if isinstance(processes, Unavailable) else processes
    own = next((process for process in listed if process.is_own), None)
    if own is not None:
        return own.bytes
    if not in_use:
        return 0
    if isinstance(processes, Unavailable):
        return processes
    if not processes:
        return Unavailable("the driver lists no process on this device, not even this one")
    return Unavailable("the driver numbers processes in its own way here, and none can be told to be this one")


def _context(own: Measured, reserved: Measured) -> Measured:
    if isinstance(own, Unavailable):
        return own
    if isinstance(reserved, Unavailable):
        return reserved
    if own < reserved:
        return Unavailable("the driver counts less for this process than its allocator holds")
    return own - reserved


def _elsewhere(card: Card, processes: tuple[DeviceProcess, ...] | Unavailable, own: Measured, agree: bool) -> Measured:
    """Return what others use: what their processes do, else all that is used less what this one does.

    From inside a container the list may lack the processes of others, so that there the totals are taken.
    """
    if isinstance(own, Unavailable):
        return own
    others = [] if isinstance(processes, Unavailable) else [process for process in processes if not process.is_own]
    known = [process.bytes for process in others if isinstance(process.bytes, int)]
    if agree and len(known) == len(others):
        return sum(known)
    return card.used if isinstance(card.used, Unavailable) else max(card.used - own, 0)

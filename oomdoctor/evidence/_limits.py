"""What this process may have beside memory itself: address space, open files and memory mappings.

An allocation fails as well when there is no mapping or descriptor left for it. Source: getrlimit(2), mmap(2).
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import ClassVar, Final

import psutil

from oomdoctor.evidence import _proc
from oomdoctor.model.absence import Unavailable
from oomdoctor.model.memory import Measured

__all__ = ["files_limit", "files_open", "malloc_free", "maps", "maps_limit", "process"]


class _Mallinfo(ctypes.Structure):
    _fields_: ClassVar = [("before", ctypes.c_size_t * 8), ("fordblks", ctypes.c_size_t), ("keepcost", ctypes.c_size_t)]


_COUNTED: Final = {"RLIMIT_DATA": "VmData", "RLIMIT_AS": "VmSize"}
"""What the kernel compares with each limit: private writable memory, of libraries too; all address space."""


def process(root: Path = _proc.ROOT) -> tuple[Measured, Measured, str | Unavailable]:
    """Return ``(limit, used, name)`` of the limit on this process's memory that leaves it the least, in bytes.

    Where none is set, what the first that there is would be compared with is told as used.
    """
    status = _proc.table(root / "proc/self/status")
    found = [(_soft(name), status[field], name) for name, field in _COUNTED.items()]
    told = [one for one in found if isinstance(one[0], int) and isinstance(one[1], int)]
    if told:
        return min(told, key=lambda one: one[0] - one[1])  # type: ignore[operator]
    limit, used, _ = found[0]
    return limit, used, limit if isinstance(limit, Unavailable) else Unavailable("what it limits could not be read")


def malloc_free() -> Measured:
    """Return what ``malloc`` holds free of what the system gave it, in bytes.

    Source: ``fordblks`` of mallinfo2(3), from glibc 2.33 on; it sums all arenas.
    """
    tell = getattr(ctypes.CDLL(None), "mallinfo2", None) if sys.platform == "linux" else None
    if tell is None:
        return Unavailable("this C library does not tell what malloc holds free")
    tell.restype = _Mallinfo
    return int(tell().fordblks)


def files_limit() -> Measured:
    """Return how many descriptors this process may have open."""
    return _soft("RLIMIT_NOFILE")


def files_open() -> Measured:
    """Return how many descriptors this process has open, the one that it looks with included."""
    try:
        return int(psutil.Process().num_fds())
    except (AttributeError, OSError, psutil.Error):
        return Unavailable("the system does not tell how many files are open")


def maps(root: Path = _proc.ROOT) -> Measured:
    """Return how many memory mappings this process has."""
    try:
        with (root / "proc/self/maps").open("rb") as lines:
            return sum(1 for _ in lines)
    except OSError:
        return Unavailable("the system does not list the mappings of a process")


def maps_limit(root: Path = _proc.ROOT) -> Measured:
    """Return how many memory mappings a process may have."""
    return _proc.number(root / "proc/sys/vm/max_map_count")


def _soft(name: str) -> Measured:
    if sys.platform == "win32":
        return Unavailable(f"Windows has no {name}")
    import resource

    soft, _ = resource.getrlimit(getattr(resource, name))
    return Unavailable(f"{name} is not set") if soft == resource.RLIM_INFINITY else soft

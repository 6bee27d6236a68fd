"""The machine's memory as its kernel counts it: what is available, the page cache, swap, and what was promised.

What can be dropped of the page cache is an estimate: the pages of files on the lists that the kernel reclaims from,
without those that wait to be written. Shared memory and locked pages stand on other lists, so they are not in it. It
is the kernel's own basis for ``MemAvailable``, which holds some of the cache back.

Source: ``si_mem_available`` in mm/show_mem.c.

Limits: outside of Linux there is what psutil tells, and nothing about the page cache.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil

from oomdoctor.evidence import _proc
from oomdoctor.model.absence import Unavailable
from oomdoctor.model.memory import Measured, Pressure

__all__ = ["Machine", "pressure", "read"]

_SHARE: Final = re.compile(r"^(some|full) avg10=(\d{1,3}\.\d\d) ", re.MULTILINE | re.ASCII)
_LINUX_ONLY: Final = Unavailable("only Linux tells this")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The fields of ``HostMemory`` that are the machine's, in bytes."""

    total: Measured
    available: Measured
    page_cache: Measured
    swap_total: Measured
    swap_used: Measured
    shm_total: Measured
    shm_free: Measured
    reclaimable: Measured = _LINUX_ONLY
    dirty: Measured = _LINUX_ONLY
    tmpfs: Measured = _LINUX_ONLY
    overcommit: Measured = _LINUX_ONLY
    committed: Measured = _LINUX_ONLY
    commit_limit: Measured = _LINUX_ONLY


def read(root: Path = _proc.ROOT) -> Machine:
    """Return the machine's memory."""
    return _linux(root) if psutil.LINUX else _elsewhere(root)


def _linux(root: Path) -> Machine:
    memory = _proc.table(root / "proc/meminfo")
    dirty = _proc.total(memory["Dirty"], memory["Writeback"])
    return Machine(
        total=memory["MemTotal"],
        available=memory["MemAvailable"],
        # Buffers are pages of block devices; Cached counts tmpfs as well. Source: proc_meminfo(5).
        page_cache=_proc.total(memory["Cached"], memory["Buffers"]),
        reclaimable=_proc.less(_proc.total(memory["Active(file)"], memory["Inactive(file)"]), dirty),
        dirty=dirty,
        tmpfs=memory["Shmem"],
        swap_total=memory["SwapTotal"],
        swap_used=_proc.less(memory["SwapTotal"], memory["SwapFree"]),
        shm_total=_shared(root, "total"),
        shm_free=_shared(root, "free"),
        overcommit=_proc.number(root / "proc/sys/vm/overcommit_memory"),
        committed=memory["Committed_AS"],
        commit_limit=memory["CommitLimit"],
    )


def _elsewhere(root: Path) -> Machine:
    return Machine(
        total=_told(psutil.virtual_memory, "total"),
        available=_told(psutil.virtual_memory, "available"),
        page_cache=_told(psutil.virtual_memory, "cached"),
        swap_total=_told(psutil.swap_memory, "total"),
        swap_used=_told(psutil.swap_memory, "used"),
        shm_total=_shared(root, "total"),
        shm_free=_shared(root, "free"),
    )


def _shared(root: Path, name: str) -> Measured:
    return _told(lambda: psutil.disk_usage(str(root / "dev/shm")), name, "there is no /dev/shm")


def _told(ask: Callable[[], Any], name: str, reason: str = "the system does not tell it") -> Measured:
    try:
        return int(getattr(ask(), name))
    except (AttributeError, OSError, RuntimeError, ValueError, psutil.Error):
        return Unavailable(reason)


def pressure(root: Path, group: Path | None = None) -> Pressure | Unavailable:
    """Return how long tasks waited for memory: those of the cgroup whose folder is ``group``, else all.

    A kernel that was started without this accounting has the files and refuses to read them. Cgroup v1 has none.
    Source: Documentation/accounting/psi.rst.
    """
    own = _pressure(group / "memory.pressure") if group is not None else None
    return own if isinstance(own, Pressure) else _pressure(root / "proc/pressure/memory")


def _pressure(path: Path) -> Pressure | Unavailable:
    found = _proc.text(path)
    if isinstance(found, Unavailable):
        return found
    shares = {kind: float(percent) / 100 for kind, percent in _SHARE.findall(found)}
    if len(shares) < 2 or max(shares.values()) > 1:
        return Unavailable(f"{path} has another form than is known")
    return Pressure(some=shares["some"], full=shares["full"])

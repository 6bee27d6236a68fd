"""The host's memory: what the machine has, what this process may have, and the limit that binds first.

What can be dropped of the page cache is the kernel's own estimate: pages of files on the lists that it reclaims from,
without those that wait to be written. Outside of Linux there is what psutil tells, and nothing about the page cache.

Source: ``si_mem_available`` in mm/show_mem.c, getrlimit(2), mmap(2), Documentation/accounting/psi.rst.
"""

from __future__ import annotations

import ctypes
import mmap
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Final

import psutil

from oomdoctor.evidence import _kernel, _processes
from oomdoctor.model.memory import DeviceMemory, HostMemory, Measured, Pressure, Usage
from oomdoctor.model.unavailable import Unavailable
from oomdoctor.sandbox import data_limit, reserve

_NO_FILES: Final = Unavailable("the system does not tell how many files are open")
_NOT_NOTED: Final = Unavailable("it was not noted while the modules were loaded, as no limit on this process was set")
_LINUX_ONLY: Final = Unavailable("only Linux tells this")
_STRICT: Final = 2
"""``vm.overcommit_memory`` with which the kernel promises no more than it has. Source: overcommit-accounting.rst."""
_SHARE: Final = re.compile(r"^(some|full) avg10=(\d{1,3}\.\d\d) ", re.MULTILINE | re.ASCII)
_COUNTED: Final = {"RLIMIT_DATA": "VmData", "RLIMIT_AS": "VmSize"}
"""What the kernel compares with each limit: private writable memory, of libraries too; all address space."""


def read(root: Path = _kernel.ROOT, *, in_full: bool = True) -> HostMemory:
    """Return the host's memory as this process sees it; ``root`` has ``proc``, ``sys`` and ``dev``.

    In full, it has also what takes the longer the more there is of it: shared pages, the processes that this one
    started, mappings. All that ``binding_limit`` looks at is read in any case.
    """
    machine = _of_linux(root) if psutil.LINUX else _by_psutil()
    group = _kernel.cgroup(root)
    processes = _processes.read(in_full=in_full)
    kept, limit = reserve.resident(), _limit(root)
    own = {"used": _kernel.less(group.used, kept), "anon": _kernel.less(group.anon, kept)}
    return HostMemory(
        **machine | {"available": _kernel.total(machine["available"], kept)},
        **processes._asdict() | {name: _kernel.less(getattr(processes, name), kept) for name in ("rss", "uss", "pss")},
        **{f"cgroup_{name}": value for name, value in (group.figures() | own).items()},
        pressure=pressure(root, group.own),
        process_limit=limit[0],
        process_used=_kernel.less(limit[1], reserve.address_space()),
        process_limit_name=limit[2],
        malloc_free=_held_free(limit[2]),
        bare=_NOT_NOTED,
        kept_back=reserve.released(),
        unfilled=data_limit.unfilled,
        shm_total=_told(lambda: psutil.disk_usage(str(root / "dev/shm")), "total", "there is no /dev/shm"),
        shm_free=_told(lambda: psutil.disk_usage(str(root / "dev/shm")), "free", "there is no /dev/shm"),
        files_open=_told(lambda: psutil.Process().num_fds(), "real", _NO_FILES.reason),
        files_limit=_soft("RLIMIT_NOFILE"),
        maps=maps(root) if in_full else _processes.LEFT_OUT,
        maps_limit=_kernel.number(root / "proc/sys/vm/max_map_count"),
    )


def _of_linux(root: Path) -> dict[str, Any]:
    memory = _kernel.Table(root / "proc/meminfo")
    dirty = _kernel.total(memory["Dirty"], memory["Writeback"])
    return {
        "total": memory["MemTotal"],
        "available": memory["MemAvailable"],
        # Buffers are pages of block devices; Cached counts tmpfs as well. Source: proc_meminfo(5).
        "page_cache": _kernel.total(memory["Cached"], memory["Buffers"]),
        "reclaimable": _kernel.less(_kernel.total(memory["Active(file)"], memory["Inactive(file)"]), dirty),
        "dirty": dirty,
        "tmpfs": memory["Shmem"],
        "swap_total": memory["SwapTotal"],
        "swap_used": _kernel.less(memory["SwapTotal"], memory["SwapFree"]),
        "overcommit": _kernel.number(root / "proc/sys/vm/overcommit_memory"),
        "committed": memory["Committed_AS"],
        "commit_limit": memory["CommitLimit"],
    }


def _by_psutil() -> dict[str, Any]:
    of_linux = ("reclaimable", "dirty", "tmpfs", "overcommit", "committed", "commit_limit")
    return dict.fromkeys(of_linux, _LINUX_ONLY) | {
        "total": _told(psutil.virtual_memory, "total"),
        "available": _told(psutil.virtual_memory, "available"),
        "page_cache": _told(psutil.virtual_memory, "cached"),
        "swap_total": _told(psutil.swap_memory, "total"),
        "swap_used": _told(psutil.swap_memory, "used"),
    }


def _told(ask: Callable[[], Any], name: str, reason: str = "the system does not tell it") -> Measured:
    try:
        return int(getattr(ask(), name))
    except (AttributeError, OSError, RuntimeError, ValueError, psutil.Error):
        return Unavailable(reason)


def pressure(root: Path, group: Path | None = None) -> Pressure | Unavailable:
    """Return how long tasks waited for memory: those of the cgroup whose folder is ``group``, else all.

    A kernel that was started without this accounting has the files and refuses to read them. Cgroup v1 has none.
    """
    if group is not None and isinstance(own := _pressure(group / "memory.pressure"), Pressure):
        return own
    return _pressure(root / "proc/pressure/memory")


def _pressure(path: Path) -> Pressure | Unavailable:
    found = _kernel.text(path)
    if isinstance(found, Unavailable):
        return found
    shares = {kind: float(percent) / 100 for kind, percent in _SHARE.findall(found)}
    if len(shares) < 2 or max(shares.values()) > 1:
        return Unavailable(f"{path} has another form than is known")
    return Pressure(**shares)


def _limit(root: Path) -> tuple[Measured, Measured, str | Unavailable]:
    """Return ``(limit, used, name)`` of the limit on this process's memory that leaves it the least, in bytes.

    Where none is set, what the first that there is would be compared with is told as used.
    """
    status = _kernel.Table(root / "proc/self/status")
    found = [(_soft(name), status[field], name) for name, field in _COUNTED.items()]
    if data_limit.ceiling is not None:
        found.append((data_limit.ceiling.limit, status["VmData"], data_limit.ceiling.name))
    told = [one for one in found if isinstance(one[0], int) and isinstance(one[1], int)]
    if told:
        return min(told, key=lambda one: one[0] - one[1])  # type: ignore[operator]
    limit, used, _ = found[0]
    return limit, used, limit if isinstance(limit, Unavailable) else Unavailable("what it limits could not be read")


def _soft(name: str) -> Measured:
    if sys.platform == "win32":
        return Unavailable(f"Windows has no {name}")
    import resource

    soft, _ = resource.getrlimit(getattr(resource, name))
    if name == data_limit.NAME:
        own = data_limit.soft()
        soft = resource.RLIM_INFINITY if own is None else own
    return Unavailable(f"{name} is not set") if soft == resource.RLIM_INFINITY else soft


class _Mallinfo(ctypes.Structure):
    _fields_: ClassVar = [("before", ctypes.c_size_t * 8), ("fordblks", ctypes.c_size_t), ("keepcost", ctypes.c_size_t)]


def malloc_free() -> Measured:
    """Return what ``malloc`` holds free of what the system gave it. Source: mallinfo2(3), from glibc 2.33 on."""
    tell = getattr(ctypes.CDLL(None), "mallinfo2", None) if sys.platform == "linux" else None
    if tell is None:
        return Unavailable("this C library does not tell what malloc holds free")
    tell.restype = _Mallinfo
    return int(tell().fordblks)


def _held_free(limit: str | Unavailable) -> Measured:
    """Return what ``malloc`` holds free below the limit of this name: of one above a cell, what that cell gave it."""
    found, ceiling = malloc_free(), data_limit.ceiling
    is_of_cell = isinstance(found, int) and ceiling is not None and ceiling.name == limit
    return max(found - ceiling.malloc_free, 0) if is_of_cell else found  # type: ignore[operator, union-attr]


def _resident() -> Measured:
    """Return the resident set of this process. Source: the second column of ``statm``, proc_pid_statm(5)."""
    try:
        with open("/proc/self/statm", "rb", buffering=0) as file:  # noqa: PTH123 - it is read beside each cell
            return int(file.read().split()[1]) * mmap.PAGESIZE - reserve.resident()
    except (OSError, ValueError, LookupError):
        return _processes.read(in_full=False).rss


def maps(root: Path = _kernel.ROOT) -> Measured:
    """Return how many memory mappings this process has."""
    try:
        with (root / "proc/self/maps").open("rb") as lines:
            return sum(1 for _ in lines)
    except OSError:
        return Unavailable("the system does not list the mappings of a process")


def binding_limit(host: HostMemory) -> tuple[int, int, str]:
    """Return ``(capacity, free, which)`` of the limit that leaves this process the least, in bytes.

    Page cache that the kernel can drop counts as free below the limit of a cgroup, as it does in ``available`` of the
    machine: it is charged to the group, and it is reclaimed before anything is killed.

    Memory that ``malloc`` holds free is address space that counts below a limit on the process, and serves a request.

    Source: ``memory.max`` in Documentation/admin-guide/cgroup-v2.rst, by which the OOM killer comes when the usage
    reaches the limit and cannot be reduced; "Reclaim" in cgroup-v1/memory.rst says the same of v1.
    """
    limits = []
    if isinstance(host.total, int) and isinstance(host.available, int):
        limits.append((host.available, host.total, "the machine's memory"))
    if isinstance(host.cgroup_limit, int) and isinstance(host.cgroup_used, int):
        reclaimable = host.cgroup_reclaimable if isinstance(host.cgroup_reclaimable, int) else 0
        free = min(host.cgroup_limit - host.cgroup_used + reclaimable, host.cgroup_limit)
        limits.append((free, host.cgroup_limit, "the limit of the memory cgroup"))
    if isinstance(host.process_limit, int) and isinstance(host.process_used, int):
        held_free = host.malloc_free if isinstance(host.malloc_free, int) else 0
        name = host.process_limit_name if isinstance(host.process_limit_name, str) else "a limit on this process"
        limits.append((host.process_limit - host.process_used + held_free, host.process_limit, name))
    if host.overcommit == _STRICT and isinstance(host.commit_limit, int) and isinstance(host.committed, int):
        limits.append((host.commit_limit - host.committed, host.commit_limit, "what the kernel may promise in all"))
    if not limits:
        return 0, 0, "no limit could be read"
    free, capacity, which = min(limits)
    return capacity, max(free, 0), which


class HostAccelerator:
    """Host memory as the device that tensors live on: read through the operating system.

    Its peak is the growth of the resident set's high-water mark since ``reset_peak``. Pages that were touched before
    and kept by ``malloc`` do not show, so more may have been allocated; pages of mapped files count while they are in
    memory, and are no allocation: the kernel keeps a high-water mark of both together alone.
    """

    name = "cpu"
    measure = "growth of the process's resident set (VmHWM), pages of mapped files included"

    def __init__(self) -> None:
        self._base: int | None = None

    def read(self) -> DeviceMemory:
        """Return the host's memory by the limit that binds first."""
        capacity, free, which = binding_limit(read(in_full=False))
        unknown = Unavailable("the host's allocator keeps no count of tensors")
        peak = _kernel.Table(_kernel.ROOT / "proc/self/status")["VmHWM"]
        grown = isinstance(peak, int) and self._base is not None
        return DeviceMemory(
            name=self.name,
            tensor_device="cpu",
            total=capacity,
            free=free,
            allocated=unknown,
            reserved=unknown,
            peak_allocated=peak - self._base if grown else unknown,  # type: ignore[operator]
            basis=which,
        )

    def usage(self) -> Usage:
        """Return the resident set, without what is kept back: on Linux in some 10 us."""
        return Usage("host", _resident())

    def peak(self) -> Measured:
        """Return the high-water mark of the resident set, without what is kept back."""
        return _kernel.less(_kernel.Table(_kernel.ROOT / "proc/self/status")["VmHWM"], reserve.resident())

    def holds(self, tensor: Any) -> bool:
        """Return whether the memory of ``tensor`` is the host's."""
        return bool(tensor.device.type == "cpu")

    def reset_peak(self) -> None:
        """Begin a new high-water mark of the resident set."""
        try:
            # 5: reset the peak resident set size. Source: proc_pid_clear_refs(5).
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            self._base = None
            return
        rss = _processes.read(in_full=False).rss
        self._base = rss if isinstance(rss, int) else None

    def empty_cache(self) -> None:
        """Return freed heap memory to the operating system, where the C library can."""
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
        if trim is not None:
            trim(0)

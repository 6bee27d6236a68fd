"""The host's memory: what the machine has, what this process may have, and the limit that binds first."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Final

from oomdoctor.evidence import _cgroup, _limits, _machine, _proc, _processes
from oomdoctor.model.absence import Unavailable
from oomdoctor.model.memory import DeviceMemory, HostMemory
from oomdoctor.sandbox import reserve

__all__ = ["HostAccelerator", "binding_limit", "read"]

_NOT_NOTED: Final = Unavailable("it was not noted while the modules were loaded, as no limit on this process was set")
_STRICT: Final = 2
"""``vm.overcommit_memory`` with which the kernel promises no more than it has. Source: overcommit-accounting.rst."""


def read(root: Path = _proc.ROOT, *, in_full: bool = True) -> HostMemory:
    """Return the host's memory as this process sees it.

    Args:
        root: folder in which ``proc``, ``sys`` and ``dev`` are.
        in_full: also read what takes the longer the more there is of it: shared pages, the processes that this one
            started, mappings. All that ``binding_limit`` looks at is read in any case.
    """
    machine, cgroup = _machine.read(root), _cgroup.read(root)
    kept, kept_resident = reserve.address_space(), reserve.resident()
    limit, used, name = _limits.process(root)
    processes = _processes.read() if in_full else _processes.resident_only()
    return HostMemory(
        total=machine.total,
        available=_proc.total(machine.available, kept_resident),
        rss=_proc.less(processes.rss, kept_resident),
        uss=_proc.less(processes.uss, kept_resident),
        pss=_proc.less(processes.pss, kept_resident),
        children=processes.children,
        page_cache=machine.page_cache,
        reclaimable=machine.reclaimable,
        dirty=machine.dirty,
        tmpfs=machine.tmpfs,
        swap_total=machine.swap_total,
        swap_used=machine.swap_used,
        pressure=_machine.pressure(root, cgroup.own),
        cgroup_version=cgroup.version,
        cgroup_limit=cgroup.limit,
        cgroup_used=_proc.less(cgroup.used, kept_resident),
        cgroup_file=cgroup.file,
        cgroup_reclaimable=cgroup.reclaimable,
        cgroup_anon=_proc.less(cgroup.anon, kept_resident),
        cgroup_tmpfs=cgroup.tmpfs,
        cgroup_oom_kills=cgroup.oom_kills,
        cgroup_ooms=cgroup.ooms,
        process_limit=limit,
        process_used=_proc.less(used, kept),
        process_limit_name=name,
        malloc_free=_limits.malloc_free(),
        bare=_NOT_NOTED,
        kept_back=reserve.released(),
        shm_total=machine.shm_total,
        shm_free=machine.shm_free,
        files_open=_limits.files_open(),
        files_limit=_limits.files_limit(),
        maps=_limits.maps(root) if in_full else _processes.LEFT_OUT,
        maps_limit=_limits.maps_limit(root),
        overcommit=machine.overcommit,
        committed=machine.committed,
        commit_limit=machine.commit_limit,
    )


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
        peak = _proc.table(_proc.ROOT / "proc/self/status")["VmHWM"]
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
        rss = _processes.resident_only().rss
        self._base = rss if isinstance(rss, int) else None

    def empty_cache(self) -> None:
        """Return freed heap memory to the operating system, where the C library can."""
        import ctypes

        trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
        if trim is not None:
            trim(0)

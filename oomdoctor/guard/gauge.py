"""Reads what host memory can still be had: below the limit of each memory cgroup, and of the machine.

What counts is what the kernel cannot reclaim: usage less the pages of files. A group whose page cache fills it is not
short of memory. Free swap can be had as well, as far as the group may use it. The files are kept open, so that a look
takes tens of microseconds.

Limits: file pages that wait to be written count as reclaimable, as the kernel writes them before it kills. Of a limit
above everything that is visible, cgroup v1 tells the size alone. Outside of Linux, psutil tells of the machine alone.

Source: Documentation/admin-guide/cgroup-v2.rst, cgroup-v1/memory.rst; ``si_mem_available`` in mm/show_mem.c.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from oomdoctor.evidence import _kernel
from oomdoctor.model.sizes import GIB, MIB
from oomdoctor.model.unavailable import Unavailable

MACHINE: Final = "the machine's memory"
GROUP: Final = "the limit of the memory cgroup"
_MOST: Final = 1 << 14
"""Bytes of a table that are read; ``memory.stat`` and ``meminfo`` have up to 3 KiB."""
_LEAST_MARGIN, _MOST_MARGIN = 64 * MIB, 512 * MIB
_MARGIN_SHARE: Final = 32
_MACHINE_EVERY_S: Final = 1.0
_STAT_EVERY_S: Final = 1.0
_CLOSE: Final = 256 * MIB
"""Room up to which ``memory.stat`` is read each time; farther from the limit the page cache of a second ago will do. To
read it takes 30 to 300 us, as the kernel adds up the counters of all processors and groups."""
_NEAR: Final = 4 * GIB
"""Free memory of the machine below which it is looked at each time."""


class Reading(NamedTuple):
    """What one limit leaves, in bytes.

    Attributes:
        used: what cannot be reclaimed; ``usage``: page cache included.
        swap: what can be had beyond the limit by swapping out.
        name: what sets the limit.
    """

    limit: int
    used: int
    usage: int
    swap: int
    name: str

    @property
    def free(self) -> int:
        """What can still be had, below zero where the limit was lowered under what is in use."""
        return self.limit - self.used + self.swap

    def margin(self, asked: int = 0) -> int:
        """Return what is left free for the failure's own sake: ``asked``, or one part in 32, 64 to 512 MiB."""
        return asked or min(max(self.limit // _MARGIN_SHARE, _LEAST_MARGIN), _MOST_MARGIN)


def _room(reading: Reading) -> int:
    return reading.free - reading.margin()


class Gauge:
    """The limits that hold for this process.

    Args:
        root: folder in which ``proc`` and ``sys`` are.
    """

    def __init__(self, root: Path = _kernel.ROOT) -> None:
        self._root, self._membership = root, b""
        self._groups: list[_Group] = []
        self._machine: _Table | None = None
        self._process = _Table.opened(root / "proc/self/statm")
        self._groups_file = _Table.opened(root / "proc/self/cgroup")
        self._seen_machine: Reading | None = None
        self._seen_machine_s, self._is_group_nearer = -_MACHINE_EVERY_S, False
        self.own_group: Path | None = None
        self._kills: _Table | None = None
        self.refresh()

    def refresh(self) -> bool:
        """Find the groups again where this process was moved to others, and return whether it was."""
        membership = b"" if self._groups_file is None else self._groups_file.read()
        if self._machine is not None and membership == self._membership:
            return False
        self._close_groups()
        self._membership = membership
        self._machine = self._machine or _Table.opened(self._root / "proc/meminfo")
        self._find_groups()
        return True

    def _find_groups(self) -> None:
        found = _kernel.group_folders(self._root) if sys.platform == "linux" else Unavailable("only Linux has groups")
        if isinstance(found, Unavailable):
            self.own_group, self._kills = None, _Table.opened(self._root / "proc/vmstat")
            return
        form, folders = found
        self.own_group = folders[0]
        opened = (_Group.opened(form, folder) for folder in folders)
        self._groups = [group for group in opened if group is not None]
        self._kills = _Table.opened(folders[0] / form.kills)

    def close(self) -> None:
        """Close the files."""
        self._close_groups()
        for table in (self._machine, self._process, self._groups_file):
            if table is not None:
                table.close()
        self._machine = self._process = self._groups_file = None

    def _close_groups(self) -> None:
        for group in self._groups:
            group.close()
        if self._kills is not None:
            self._kills.close()
        self._groups, self._kills, self._membership = [], None, b""

    @property
    def has_group_limit(self) -> bool:
        """Whether a group sets a limit below the machine's memory."""
        machine = self.machine()
        most = sys.maxsize if machine is None else machine.limit
        return any(0 < one.limit < most for one in self._readings() if one.name == GROUP)

    def machine(self) -> Reading | None:
        """Return what the machine leaves; None where it does not tell."""
        return _of_psutil() if self._machine is None else _of_meminfo(self._machine.read())

    def read(self) -> Reading | None:
        """Return the limit that leaves the least; None where none can be read.

        The machine is looked at now and then where a group is nearer to its limit: to read it takes as long.
        """
        now_s = time.monotonic()
        is_old = now_s - self._seen_machine_s > _MACHINE_EVERY_S
        if self._seen_machine is None or is_old or self._is_near(self._seen_machine):
            self._seen_machine, self._seen_machine_s = self.machine(), now_s
        found = min(self._readings(), key=_room, default=None)
        self._is_group_nearer = found is not None and found.name == GROUP
        return found

    def _is_near(self, machine: Reading) -> bool:
        return not self._is_group_nearer or machine.free < _NEAR

    def _readings(self) -> Iterator[Reading]:
        machine = self._seen_machine
        if machine is not None:
            yield machine
        for group in self._groups:
            with suppress(OSError, ValueError):
                if (reading := group.read(0 if machine is None else machine.swap)) is not None:
                    yield reading

    def process(self) -> tuple[int, int] | None:
        """Return ``(data, anon)`` of this process: private writable memory that is mapped, and memory that was touched.

        Source: ``statm``, proc_pid_statm(5), whose data column counts the stack as well.
        """
        if self._process is None:
            return None
        columns = self._process.read().split()
        return int(columns[5]) * _PAGE, (int(columns[1]) - int(columns[2])) * _PAGE

    def threads(self) -> int:
        """Return how many threads this process has, 0 where the system does not tell."""
        try:
            return (self._root / "proc/self/task").stat().st_nlink - 2  # a folder has two links, and one by each in it
        except OSError:
            return 0

    def kills(self) -> int | None:
        """Return how often the kernel has killed a process of this group, of the machine where there is no group."""
        return None if self._kills is None else _value(self._kills.read(), b"oom_kill ")


class _Table:
    """An open file of the kernel's with a number for each key."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @classmethod
    def opened(cls, path: Path) -> _Table | None:
        try:
            return cls(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        except OSError:
            return None

    def read(self) -> bytes:
        return b"\n" + os.pread(self._descriptor, _MOST, 0)

    def close(self) -> None:
        with suppress(OSError):
            os.close(self._descriptor)


class _Group:
    """One memory cgroup with a limit or without."""

    def __init__(self, form: _kernel.Form, folder: Path, usage: _Table, stat: _Table) -> None:
        self._form, self._folder, self._usage, self._stat = form, folder, usage, stat
        self._keys = tuple(key.encode() for key in form.reclaimed_from)
        opened = (_Table.opened(folder / name) for name in form.limits)
        self._limits = [table for table in opened if table is not None]
        self._limit_above = self._above(stat.read())
        self._is_limited_above = self._limit_above < _kernel.UNLIMITED
        self._read_s, self._files = -_STAT_EVERY_S, 0

    @classmethod
    def opened(cls, form: _kernel.Form, folder: Path) -> _Group | None:
        usage, stat = _Table.opened(folder / form.usage), _Table.opened(folder / "memory.stat")
        return None if usage is None or stat is None else cls(form, folder, usage, stat)

    def read(self, swap_free: int) -> Reading | None:
        limit = min((_bound(limit.read()) for limit in self._limits), default=_kernel.UNLIMITED)
        if limit >= _kernel.UNLIMITED and not self._is_limited_above:
            return None
        usage, now_s = int(self._usage.read()), time.monotonic()
        if now_s - self._read_s > _STAT_EVERY_S or min(limit, self._limit_above) - usage < _CLOSE:
            table = self._stat.read()
            self._read_s, self._limit_above = now_s, self._above(table)
            self._files = sum(_value(table, key + b" ") or 0 for key in self._keys)
        limit, files = min(limit, self._limit_above), self._files
        if limit >= _kernel.UNLIMITED:
            return None
        swap = min(swap_free, self._swap_left(limit - usage)) if swap_free else 0
        return Reading(limit=limit, used=max(usage - files, 0), usage=usage, swap=swap, name=GROUP)

    @staticmethod
    def _above(table: bytes) -> int:
        """Return the strictest limit of this group and those above it, which v1 tells."""
        return _value(table, b"hierarchical_memory_limit ") or _kernel.UNLIMITED

    def _swap_left(self, free: int) -> int:
        """Return how much of the swap the group may still use; v1 limits memory and swap together."""
        if self._form.version == 1:
            both = _kernel.number(self._folder / "memory.memsw.limit_in_bytes")
            taken = _kernel.number(self._folder / "memory.memsw.usage_in_bytes")
            if not isinstance(both, int) or not isinstance(taken, int):
                return 0
            return max((both - taken) - free, 0)
        most, taken = (
            _kernel.text(self._folder / "memory.swap.max"),
            _kernel.number(self._folder / "memory.swap.current"),
        )
        if isinstance(most, Unavailable) or not isinstance(taken, int):
            return 0
        return sys.maxsize if most.strip() == "max" else max(int(most) - taken, 0)

    def close(self) -> None:
        for table in (self._usage, self._stat, *self._limits):
            table.close()


_PAGE: Final = os.sysconf("SC_PAGESIZE") if hasattr(os, "sysconf") else 4096


def _bound(text: bytes) -> int:
    return _kernel.UNLIMITED if text.strip() == b"max" else int(text)


def _value(table: bytes, key: bytes) -> int | None:
    at = table.find(b"\n" + key)
    if at < 0:
        return None
    words = table[at : table.find(b"\n", at + 1)].split()
    return int(words[1]) * (1024 if words[2:] == [b"kB"] else 1)


def _of_meminfo(table: bytes) -> Reading | None:
    total, available, free = (_value(table, key) for key in (b"MemTotal:", b"MemAvailable:", b"MemFree:"))
    if total is None or available is None:
        return None
    swap = _value(table, b"SwapFree:") or 0
    usage = total - (available if free is None else free)
    return Reading(limit=total, used=total - available, usage=usage, swap=swap, name=MACHINE)


def _of_psutil() -> Reading | None:
    try:
        import psutil

        found = psutil.virtual_memory()
    except (ImportError, OSError, RuntimeError):
        return None
    used = int(found.total - found.available)
    return Reading(limit=int(found.total), used=used, usage=used, swap=0, name=MACHINE)


def resident() -> int:
    """Return the resident set of this process, where the system has no limit that refuses."""
    import psutil

    return int(psutil.Process().memory_info().rss)

"""Has the kernel refuse what would not fit: the soft ``RLIMIT_DATA`` is what is mapped and what can still be had.

A mapping beyond it fails at once, whatever its size and however fast the program asks, and the library that asked
raises its own error at the user's line. What the cell has mapped and not touched yet is taken for spent: it will be.

Mappings of files that are private and writable count as data, though their pages are the file's until they are written
to: what makes them is done ``apart``, without the limit, and taken for no memory of the cell's. Nor are the stacks of
threads, of which little is ever used.

Limits: free memory inside ``malloc`` counts as mapped. Page-locked memory of a device does not.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from oomdoctor.evidence.host import malloc_free
from oomdoctor.guard.gauge import Gauge
from oomdoctor.model.sizes import MIB, format_size
from oomdoctor.sandbox import data_limit, reserve

LEAST: Final = 16 * MIB
"""Room that each cell has at least, however full the memory: to free what is held takes some as well, and a library
that does not expect to be refused a small request ends the process. ZeroMQ does."""
_MATTERS: Final = 8
"""Share of what is free from which untouched memory is counted exactly."""
_STACK: Final = 2 * MIB
"""What is mapped for a thread where no limit of stacks is set. Source: pthread_create(3), on x86-64."""
LEAST_SHARE: Final = 4
"""One part in so many of what is really left is the most that it may be."""


def ceiling_name(ceiling: int) -> str:
    """Return what a limit of so many bytes above a cell is called."""
    return f"%%memlimit {format_size(ceiling)}"


class Refusal:
    """The limit that is kept while one cell runs, while it is answered, and until the next one.

    Args:
        gauge: reads the process.
        ceiling: bytes that the cell may map beyond what is mapped when it begins, None for no limit of its own.
    """

    def __init__(self, gauge: Gauge, ceiling: int | None) -> None:
        self._gauge = gauge
        self._data, self._anon = self._read()
        self._kept, self._threads = reserve.most_resident(), gauge.threads()
        self._floor = 0
        self._ceiling, self._own = None if ceiling is None else self._data + ceiling, ceiling or 0
        self.untouched = 0

    @property
    def has_ceiling(self) -> bool:
        """Whether the cell has a limit of its own."""
        return self._ceiling is not None

    def _read(self) -> tuple[int, int]:
        """Return what is mapped, without what is kept back for a failure, and what is touched."""
        data, anon = self._gauge.process() or (0, 0)
        return data - reserve.address_space(), anon

    def _untouched(self, data: int, anon: int, free: int) -> int:
        """Return what the cell has mapped and not touched.

        Stacks of threads are none of it. Pages that were kept back and that the kernel has taken since, or that were
        let go, look as if they were: to count them takes 0.3 ms, so they are counted where it matters.
        """
        found = max((data - self._data) - (anon - self._anon), 0)
        if found > free // _MATTERS:
            found = max(found - max(self._gauge.threads() - self._threads, 0) * _stack(), 0)
        if found > free // _MATTERS and self._kept:
            gone, self._kept = max(self._kept - (now := reserve.resident()), 0), now
            found = max(found - gone, 0)
            self._anon -= gone
        return found

    def begin(self, free: int | None, margin: int, *, has_ceiling: bool = True) -> None:
        """Set the limit for the first time, or for what follows; see ``keep``."""
        if free is not None:
            self._floor = self._read()[0] + _least(free, margin)
        if self._ceiling is not None and has_ceiling:
            held_free = malloc_free()
            kept = held_free if isinstance(held_free, int) else 0
            data_limit.ceiling = data_limit.Ceiling(self._ceiling, ceiling_name(self._own), kept)
        self.keep(free, margin, has_ceiling=has_ceiling)

    def keep(self, free: int | None, margin: int, *, has_ceiling: bool = True) -> None:
        """Set the limit by what is free now.

        Args:
            free: bytes that can still be had, None where the cell's own limit is the only one.
            margin: bytes of it that are kept.
            has_ceiling: whether the cell's own limit holds, as it does for code of the cell.
        """
        data, anon = self._read()
        soft = None
        if free is not None:
            self.untouched = self._untouched(data, anon, free)
            least = min(self._floor, data + _least(free, margin))
            soft = max(data + max(free - margin - self.untouched, 0), least)
        if self._ceiling is not None and has_ceiling:
            soft = self._ceiling if soft is None else min(soft, self._ceiling)
        if soft is None:
            data_limit.lift()
        else:
            data_limit.put(soft + reserve.address_space())

    def note(self) -> None:
        """Note what the limit leaves, and what it takes for used though nothing is in it, before it is lifted."""
        data, anon = self._read()
        data_limit.note_room(data + reserve.address_space(), self._untouched(data, anon, 0) if self._floor else 0)

    @contextmanager
    def apart(self, is_file: bool) -> Iterator[None]:
        """Run the body without the limit; a file that it maps is taken for no memory of the cell's."""
        before, _ = self._read()
        data_limit.lift()
        try:
            yield
        finally:
            mapped = self._read()[0] - before if is_file else 0
            self._data += mapped
            self._floor += mapped
            if self._ceiling is not None:
                self._ceiling += mapped


def _least(free: int, margin: int) -> int:
    """Return the room that there is at least: it is of the margin, of which half stays."""
    return max(min(LEAST, free // LEAST_SHARE, margin // 2), 0)


def _stack() -> int:
    """Return how many bytes are mapped for the stack of a thread."""
    soft = data_limit.getrlimit(data_limit.resource.RLIMIT_STACK)[0]
    return threading.stack_size() or (soft if soft > 0 else _STACK)

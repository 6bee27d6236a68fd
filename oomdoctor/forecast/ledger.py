"""The storages that are alive, as a sum, its peak, and a trace of allocations and frees.

A storage is known by the address of its ``StorageImpl`` for as long as it lives; a weak reference to its Python
object, which PyTorch keeps alive as long as the storage, tells of its end. Twins (see ``tracker``) are not counted
again: the real storage and the fake one that stands for it are one entry, which ends when both are gone.
"""

from __future__ import annotations

import sys
import weakref
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import torch

    from oomdoctor.allocator.caching import Event

__all__ = ["CELL", "Ledger"]

CELL: Final = "<oomdoctor: shadow of the cell>"
"""File name under which the shadowed cell is compiled, by which its frames are known."""


class _Entry:
    __slots__ = ("bytes", "number", "watch")

    def __init__(self, number: int, nbytes: int) -> None:
        self.number, self.bytes = number, nbytes
        self.watch: Any = None


class Ledger:
    """Live storages in bytes.

    Attributes:
        events: ``("alloc", id, nbytes)`` and ``("free", id)`` in order, what was alive at the start included.
        live: sum now; ``peak``: highest sum so far.
        peak_line: line of the cell that was running when the peak was reached, None before it ran.
        raised_at: ``clock`` when the peak was last raised.
        clock: operations seen so far; whoever sees them counts them here.
    """

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.live = self.peak = self.clock = self.raised_at = 0
        self.peak_line: int | None = None
        self._entries: dict[int, _Entry] = {}
        self._twins: dict[int, torch.UntypedStorage] = {}
        self._count = 0

    def hold(self, storage: torch.UntypedStorage) -> None:
        """Count ``storage`` from now until its end; again after it was resized in place."""
        key = storage._cdata
        if key in self._twins:
            return
        entry, nbytes = self._entries.get(key), storage.nbytes()
        if entry is None:
            self._count += 1
            entry = self._entries[key] = _Entry(self._count, nbytes)
            entry.watch = weakref.ref(storage, lambda _: self._end(key))
            self._allocate(entry)
        elif entry.bytes != nbytes:
            self._free(entry)
            self._count += 1
            entry.number, entry.bytes = self._count, nbytes
            self._allocate(entry)

    def twin(self, real: torch.UntypedStorage, fake: torch.UntypedStorage) -> None:
        """Count ``real``, and let ``fake`` stand for the same memory: views of either keep it alive."""
        if fake._cdata in self._twins:
            return
        self.hold(real)
        entry = self._entries[real._cdata]
        self._twins[fake._cdata] = fake
        key, heir = real._cdata, fake._cdata
        entry.watch = weakref.ref(real, lambda _: self._inherit(key, heir))

    def is_twin(self, fake: torch.UntypedStorage) -> bool:
        """Whether ``fake`` stands for a real storage."""
        return fake._cdata in self._twins

    def _inherit(self, key: int, heir: int) -> None:
        """The real storage is gone: from now on the fake one alone decides."""
        entry, fake = self._entries.pop(key), self._twins.pop(heir)
        self._entries[heir] = entry
        entry.watch = weakref.ref(fake, lambda _: self._end(heir))

    def _end(self, key: int) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._free(entry)

    def _allocate(self, entry: _Entry) -> None:
        self.events.append(("alloc", entry.number, entry.bytes))
        self.live += entry.bytes
        if self.live > self.peak:
            self.peak, self.raised_at = self.live, self.clock
            self.peak_line = _line_of_cell()

    def _free(self, entry: _Entry) -> None:
        self.events.append(("free", entry.number))
        self.live -= entry.bytes


def _line_of_cell() -> int | None:
    """Return the line that the cell's innermost running frame is at."""
    frame = sys._getframe(1)
    walk: Any = frame
    while walk is not None:
        if walk.f_code.co_filename == CELL:
            return int(walk.f_lineno)
        walk = walk.f_back
    return None

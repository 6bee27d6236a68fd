"""Counts tensor storages through the model allocator, from their first appearance to their death.

A storage is known by a weak reference to its ``UntypedStorage``, which PyTorch keeps as one Python object for as long
as the memory lives: views, tied parameters and tensors saved for backward share it, and the reference dies with the
memory, not with the tensor. Nothing here keeps a tensor alive.

A death is only noted when it happens, and booked before the next allocation or reading: the garbage collector can
strike in the middle of an allocation, and from any thread.

Limits: a storage is seen when an operation returns a tensor that lives in it. One that is resized without an operation
(``storage.resize_``) is corrected at the next operation on it, at the next reading, or before a refusal.
"""

from __future__ import annotations

import weakref
from collections import deque
from threading import RLock
from typing import TYPE_CHECKING, Any, Final

import torch

from oomdoctor.allocator.blocks import Block
from oomdoctor.allocator.caching import OutOfSpace
from oomdoctor.objects.alive import alive_exactly

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from oomdoctor.allocator.caching import CachingAllocator

_PLAIN: Final = frozenset({torch.Tensor, torch.nn.Parameter})
_PARTS: Final = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


class _Counted(weakref.ref[torch.UntypedStorage]):
    """A storage that is counted: its key in the ledger, its size, and the block that stands for it."""

    __slots__ = ("block", "key", "nbytes")

    key: int
    nbytes: int
    block: Block | None


class Ledger:
    """The storages that an allocator's blocks stand for."""

    def __init__(self, allocator: CachingAllocator) -> None:
        self._allocator = allocator
        self._counted: dict[int, _Counted] = {}
        self._dead: deque[_Counted] = deque()
        self._lock = RLock()
        self._busy = False

    def count(self, storage: torch.UntypedStorage) -> None:
        """Count ``storage``, or its new size.

        Raises:
            OutOfSpace: there is no room for it; the count is as it was before.
        """
        key, nbytes = storage._cdata, storage.nbytes()
        known = self._counted.get(key)
        if known is not None and known.nbytes == nbytes and known() is storage:
            return
        self._in_turn(self._book_deaths, lambda: self._book(storage, key, nbytes))

    def settle(self, *, sizes: bool = True) -> None:
        """Book every death that has not been booked, and by a look at each storage every change of size."""
        self._in_turn(self._book_deaths, *([self._book_changed_sizes] if sizes else []))

    def _in_turn(self, *bookings: Callable[[], Any]) -> None:
        with self._lock:
            if self._busy:  # a __del__ runs tensor code in the midst of a booking: counted when it is seen again
                return
            self._busy = True
            try:
                for book in bookings:
                    book()
            finally:
                self._busy = False

    def block_of(self, storage: torch.UntypedStorage) -> Block | None:
        """Return the block that stands for ``storage``; None if it is not counted or empty."""
        known = self._counted.get(storage._cdata)
        return known.block if known is not None and known() is storage else None

    def counted(self) -> Iterator[tuple[torch.UntypedStorage, Block]]:
        """Yield the storages that have a block, each with it."""
        for known in list(self._counted.values()):
            storage = known()
            if storage is not None and known.block is not None:
                yield storage, known.block

    def close(self) -> None:
        """Forget every storage, so that no death is noted any more."""
        with self._lock:
            self._counted.clear()
            self._dead.clear()

    def _book(self, storage: torch.UntypedStorage, key: int, nbytes: int) -> None:
        try:
            block = self._allocator.malloc(nbytes)
        except OutOfSpace:
            if not self._book_changed_sizes():
                raise
            block = self._allocator.malloc(nbytes)
        known = self._counted.get(key)
        if known is not None and known() is storage:  # resized: a device, too, has both copies for a moment
            self._allocator.free(known.block)
            known.block, known.nbytes = block, nbytes
            return
        entry = _Counted(storage, self._dead.append)
        entry.key, entry.nbytes, entry.block = key, nbytes, block
        self._counted[key] = entry

    def _book_deaths(self) -> None:
        while self._dead:
            entry = self._dead.popleft()
            self._allocator.free(entry.block)
            if self._counted.get(entry.key) is entry:
                del self._counted[entry.key]

    def _book_changed_sizes(self) -> bool:
        """Return whether the size of any storage was changed behind the dispatcher's back."""
        changed = False
        for entry in list(self._counted.values()):
            storage = entry()
            if storage is None or storage.nbytes() >= entry.nbytes:  # growth is counted, or refused, at the next use
                continue
            changed = True
            self._allocator.free(entry.block)
            entry.nbytes = storage.nbytes()
            entry.block = self._allocator.malloc(entry.nbytes)
        return changed


def storages_of(value: Any) -> tuple[torch.UntypedStorage, ...]:
    """Return the CPU storages in what an operation returned: a tensor, or tuples and lists of them.

    Fake and meta tensors and tensors of other subclasses own no CPU memory themselves and have none.
    """
    if type(value) in _PLAIN:
        if not value.is_cpu:
            return ()
        if value.layout is torch.strided:
            return (value.untyped_storage(),)
        # A sparse tensor has no storage of its own; of opaque layouts nothing is known.
        return tuple(getattr(value, part)().untyped_storage() for part in _PARTS.get(value.layout, ()))
    if isinstance(value, (tuple, list)):
        return tuple(storage for part in value for storage in storages_of(part))
    return ()


def storages_alive() -> list[torch.UntypedStorage]:
    """Return the CPU storages of the plain tensors that the garbage collector knows, running no user code.

    A tensor that only the autograd graph holds is no Python object, and is not found.
    """
    found: list[torch.UntypedStorage] = []
    with torch._C.DisableTorchFunction():
        for thing in alive_exactly(torch.UntypedStorage, *_PLAIN):
            if type(thing) is not torch.UntypedStorage:
                found.extend(() if _is_wrapper(thing) else storages_of(thing))
            elif thing.device.type == "cpu":
                found.append(thing)
    return found


def _is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether a transform of ``torch.func`` or functionalization wraps another tensor in this one."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor)) or torch._is_functional_tensor(tensor)

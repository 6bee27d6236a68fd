"""The storages that are alive, as a sum, its peak, and a trace of allocations and frees.

A storage is known by the address of its ``StorageImpl`` for as long as it lives; a weak reference to its Python
object, which PyTorch keeps alive as long as the storage, tells of its end. Twins (see ``tracker``) are not counted
again: the real storage and the fake one that stands for it are one entry, which ends when both are gone.

What a storage is there for is often known only after the peak: a gradient is one once it has become ``.grad``. So each
allocation keeps a note of how it came to be, and ``outcome`` reads the notes at the end.

Limits of ``Layout``: memory that restoring the start of the cell takes anew lies wherever the allocator puts it then.
Blocks that nothing in the ledger stands for stay in use to the end.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FunctionType
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from oomdoctor.allocator.settings import AllocatorSettings
from oomdoctor.errors import ForecastError, UsageError
from oomdoctor.model.memory import Role

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from oomdoctor.allocator.blocks import Block
    from oomdoctor.allocator.caching import CachingAllocator
    from oomdoctor.allocator.device import VirtualAccelerator
    from oomdoctor.model.session import Accelerator

CELL: Final = "<oomdoctor: dry run of the cell>"
"""File name under which the cell is compiled, by which its frames are known."""

_Event: TypeAlias = tuple[Literal["alloc"], int, int] | tuple[Literal["free"], int]

_RANKS: Final = {
    role: rank
    for rank, role in enumerate(
        (
            *(Role.PARAMETER, Role.GRADIENT, Role.OPTIMIZER_STATE, Role.BUFFER, Role.KV_CACHE, Role.BATCH),
            *(Role.USER_TENSOR, Role.GRAPH_KEPT_ALIVE, Role.ACTIVATION),
        )
    )
}
"""Of two roles that one storage has, the one that comes first here counts, as it does in a census."""

_MUCH: Final = 0.02
"""Share of the peak from which on something matters."""


@dataclass(slots=True)
class Note:
    """How an allocation came to be, and what became of it.

    Attributes:
        line: that the innermost frame of the cell was at, None outside of the cell.
        statement: line of the statement of the cell that was running, outside of its functions; ``turn``: count of the
            iterations of its loops at the time. Both together tell whether the statement is over.
        role: where something has told it.
        temporary: what it is for, where that is an operation's own need.
        in_graph: whether a tensor that requires grad lay in it; ``detached``: whether one was detached.
        fed: whether it was given to an operation that is differentiated, and is not itself.
        is_bound: whether values decide how large it is, and it was taken for the largest.
        within: the module whose forward made it; ``out_of``: those that gave it out.
    """

    line: int | None
    statement: int | None
    turn: int
    role: Role | None = None
    temporary: str | None = None
    in_graph: bool = False
    detached: bool = False
    fed: bool = False
    is_bound: bool = False
    within: Any = None
    out_of: frozenset[Any] = frozenset()


class _Entry:
    __slots__ = ("bytes", "number", "watch")

    def __init__(self, number: int, nbytes: int) -> None:
        self.number, self.bytes = number, nbytes
        self.watch: Any = None


class Ledger:
    """Live storages in bytes.

    Attributes:
        events: ``("alloc", id, nbytes)`` and ``("free", id)`` in order, what was alive at the start included.
        live: sum now; ``peak``: highest sum so far; ``peak_at``: how many events there were when it was reached.
        peak_line: line of the cell that was running when the peak was reached, None before it ran.
        raised_at: ``clock`` when the peak was last raised.
        clock: operations seen so far; whoever sees them counts them here.
        begun: how many events there were when the cell began, None before that.
        turn: iterations of loops of the cell so far; whoever sees them counts them here.
        making: what whatever is allocated now is an operation's own need of, None for none.
        within: the module whose forward is running.
    """

    def __init__(self) -> None:
        self.events: list[_Event] = []
        self.live = self.peak = self.clock = self.raised_at = self.peak_at = self.turn = 0
        self.begun: int | None = None
        self.making: str | None = None
        self.within: Any = None
        self._notes: list[Note] = []
        self._entries: dict[int, _Entry] = {}
        self._twins: dict[int, tuple[torch.UntypedStorage, int]] = {}

    @property
    def peak_line(self) -> int | None:
        """Line of the cell that was running when the peak was reached, None before it ran."""
        return self.note(self.events[self.peak_at - 1][1]).line if self.peak_at else None

    def note(self, number: int) -> Note:
        """Return the note of the allocation with this number in ``events``."""
        return self._notes[number - 1]

    def note_of(self, storage: torch.UntypedStorage) -> Note | None:
        """Return the note of what ``storage``, or the one that it stands for, is now; None where it is not counted."""
        number = self.number_of(storage)
        return None if number is None else self.note(number)

    def number_of(self, storage: torch.UntypedStorage) -> int | None:
        """Return the number in ``events`` of what ``storage`` is now; None where it is not counted."""
        key = storage._cdata
        twin = self._twins.get(key)
        entry = self._entries.get(key if twin is None else twin[1])
        return None if entry is None else entry.number

    def alive(self) -> Iterator[tuple[int, torch.UntypedStorage]]:
        """Yield the storages that are counted and alive, each with its number in ``events``."""
        for entry in list(self._entries.values()):
            storage = entry.watch()
            if storage is not None:
                yield entry.number, storage

    def alive_after(self, count: int) -> dict[int, int]:
        """Return the sizes of what was alive after so many events, by number."""
        alive: dict[int, int] = {}
        for event in self.events[:count]:
            if event[0] == "alloc":
                alive[event[1]] = event[2]
            else:
                alive.pop(event[1], None)
        return alive

    def mark(self, storage: torch.UntypedStorage, role: Role) -> None:
        """Tell what ``storage`` is there for, unless it is known to be there for something that counts for more."""
        note = self.note_of(storage)
        if note is not None and (note.role is None or _RANKS[role] < _RANKS[note.role]):
            note.role = role

    def begin(self) -> None:
        """Note that the cell begins: what is alive now was there before it."""
        self.begun = len(self.events)

    def hold(self, storage: torch.UntypedStorage) -> None:
        """Count ``storage`` from now until its end; again after it was resized in place."""
        key = storage._cdata
        if key in self._twins:
            return
        entry, nbytes = self._entries.get(key), storage.nbytes()
        if entry is None:
            entry = self._entries[key] = _Entry(0, nbytes)
            entry.watch = weakref.ref(storage, lambda _: self._end(key))
            self._allocate(entry, None)
        elif entry.bytes != nbytes:
            role = self.note(entry.number).role
            self.give_back(entry)
            entry.bytes = nbytes
            self._allocate(entry, role)

    def take(self, nbytes: int, role: Role) -> _Entry:
        """Count memory that nothing in this process stands for, until it is given to ``give_back``."""
        entry = _Entry(0, nbytes)
        self._allocate(entry, role)
        return entry

    def has_risen(self, level: int) -> bool:
        """Whether much more is alive than there was at ``level``."""
        return self.live - level > _MUCH * self.peak

    def twin(self, real: torch.UntypedStorage, fake: torch.UntypedStorage) -> None:
        """Count ``real``, and let ``fake`` stand for the same memory: views of either keep it alive."""
        if fake._cdata in self._twins:
            return
        self.hold(real)
        entry = self._entries[real._cdata]
        key, heir = real._cdata, fake._cdata
        self._twins[heir] = fake, key
        entry.watch = weakref.ref(real, lambda _: self._inherit(key, heir))

    def _inherit(self, key: int, heir: int) -> None:
        """The real storage is gone: from now on the fake one alone decides."""
        entry, (fake, _) = self._entries.pop(key), self._twins.pop(heir)
        self._entries[heir] = entry
        entry.watch = weakref.ref(fake, lambda _: self._end(heir))

    def _end(self, key: int) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.give_back(entry)

    def _allocate(self, entry: _Entry, role: Role | None) -> None:
        line, statement = (None, None) if self.begun is None else _place()
        self._notes.append(Note(line, statement, self.turn, role, self.making, within=self.within))
        number = len(self._notes)
        self.events.append(("alloc", number, entry.bytes))
        entry.number = number  # not before: the time may be up anywhere, and what was not counted is not freed
        self.live += entry.bytes
        if self.live > self.peak:
            self.peak, self.raised_at, self.peak_at = self.live, self.clock, len(self.events)

    def give_back(self, entry: _Entry) -> None:
        """Count an entry no longer."""
        number, entry.number = entry.number, 0
        if number:
            self.events.append(("free", number))
            self.live -= entry.bytes


def _place() -> tuple[int | None, int | None]:
    """Return the line that the cell's innermost running frame is at, and that of its outermost."""
    line: int | None = None
    walk: Any = sys._getframe(1)
    while walk is not None:
        code = walk.f_code
        if code.co_filename == CELL:
            line = line or walk.f_lineno
            if code.co_name == "<module>":
                return line, walk.f_lineno
        walk = walk.f_back
    return line, None


# Where it lies --------------------------------------------------------------------------------------------------------

# An allocator that begins empty packs all of it side by side. The real one has holes where something was freed,
# segments that only a small rest keeps, and a cache; so what the cell will reserve depends on them. A replay that is
# seeded with the real segments cuts its blocks where they would be cut.


class Layout:
    """The real segments, as ``torch.cuda.memory_snapshot()`` tells them, and which allocations lie in which blocks.

    ``ledger`` has those allocations; ``is_emptied`` tells whether the cache is given back before the cell runs.
    """

    def __init__(self, ledger: Ledger, segments: Sequence[Mapping[str, Any]], *, is_emptied: bool) -> None:
        self.ledger, self._segments, self._is_emptied = ledger, segments, is_emptied
        self._addresses: dict[int, int | None] = {}
        self._seen, self._shared = set[int](), set[int]()

    def place(self, storage: torch.UntypedStorage, address: int) -> None:
        """Note where a storage that is counted lies; where no block in use begins there, it is made in the replay."""
        number = self.ledger.number_of(storage)
        if number is None:
            return
        (self._shared if address in self._seen else self._seen).add(address)
        self._addresses[number] = address

    def stay(self, storage: torch.UntypedStorage) -> None:
        """Note that a storage that is counted stands for all blocks that no other does, which stay in use."""
        number = self.ledger.number_of(storage)
        if number is not None:
            self._addresses[number] = None

    def seed(self, allocator: CachingAllocator, *, is_emptied: bool = False) -> dict[Any, Block | None]:
        """Bring ``allocator``, which is new, to the start of the cell.

        What is placed and does not come up in the ledger is what was freed when that start was brought back.

        Returns:
            The blocks of the ledger's allocations by their numbers, None for what is not to be freed.
        """
        in_use = allocator.seed(self._segments)
        alive = {event[1] for event in self.ledger.events if event[0] == "alloc"}
        blocks: dict[Any, Block | None] = {}
        for number, address in self._addresses.items():
            if address is not None and address not in in_use:
                continue
            # What two storages share, such as one that was imported again, is given back by neither alone.
            block = None if address is None or address in self._shared else in_use[address]
            if number in alive:
                blocks[number] = block
            else:
                allocator.free(block)
        capacity = allocator.capacity_bytes
        if is_emptied or self._is_emptied or (capacity is not None and allocator.reserved > capacity):
            allocator.empty_cache()
        return blocks


def is_retry(prepare: Callable[[], None]) -> bool:
    """Return whether a forecast is of a retry, before which the start of the cell and the cache are given back.

    ``prepare`` brings that start back; it is a plain function where there is nothing to bring back.
    """
    return not isinstance(prepare, FunctionType)


def of_virtual(accelerator: Accelerator | None, ledger: Ledger, *, is_emptied: bool) -> Layout | None:
    """Return where what ``ledger`` counts lies on the virtual accelerator that is meant; None where none is.

    The ledger counts what is alive at the start of the cell, and nothing else yet.
    """
    device = _virtual(accelerator)
    if accelerator is None or device is None or not accelerator.read().simulated:
        return None
    layout = Layout(ledger, device.memory_snapshot(), is_emptied=is_emptied)
    for storage, block in device.counted():
        layout.place(storage, block.address)
    return layout


def _virtual(accelerator: Accelerator | None) -> VirtualAccelerator | None:
    from oomdoctor.allocator import virtual
    from oomdoctor.allocator.device import VirtualAccelerator

    return accelerator if isinstance(accelerator, VirtualAccelerator) else virtual.active()


def allocator_settings(accelerator: Accelerator) -> AllocatorSettings:
    """Return those of the simulated device, or those that a real one would have; the budget knows a limit by itself.

    A ``ForecastError`` says that a real device would not start with them either.
    """
    device = _virtual(accelerator)
    try:
        settings = AllocatorSettings.from_environment() if device is None else device.allocator.settings
    except UsageError as error:
        raise ForecastError(str(error)) from error
    return replace(settings, per_process_memory_fraction=1.0)

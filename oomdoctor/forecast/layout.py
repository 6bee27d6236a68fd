"""Where the memory that is alive at the start of the cell lies in the segments of the allocator that is really there.

An allocator that begins empty packs all of it side by side. The real one has holes where something was freed, segments
that only a small rest keeps, and a cache; so what the cell will reserve depends on them. A replay that is seeded with
the real segments cuts its blocks where they would be cut.

Limits: memory that restoring the start of the cell takes anew lies wherever the allocator puts it then. Blocks that
nothing in the ledger stands for stay in use to the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import FunctionType
from typing import TYPE_CHECKING, Any

from oomdoctor.allocator.settings import AllocatorSettings
from oomdoctor.errors import ForecastError, UsageError

if TYPE_CHECKING:
    import torch

    from oomdoctor.allocator.blocks import Block
    from oomdoctor.allocator.caching import CachingAllocator
    from oomdoctor.allocator.device import VirtualAccelerator
    from oomdoctor.forecast.ledger import Ledger
    from oomdoctor.model.session import Accelerator


class Layout:
    """The real segments, and which allocations of a ledger lie in which of their blocks.

    Args:
        segments: in the form of ``torch.cuda.memory_snapshot()``, of one device.
        is_emptied: whether the cache is given back before the cell runs.

    Attributes:
        ledger: the one that is meant.
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

        Args:
            allocator: with its settings, and a capacity or none.
            is_emptied: whether the cache is given back first, although the cell would find it.

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

    Args:
        prepare: brings back the start of the cell; a plain function where there is nothing to bring back.
    """
    return not isinstance(prepare, FunctionType)


def of_virtual(accelerator: Accelerator | None, ledger: Ledger, *, is_emptied: bool) -> Layout | None:
    """Return where what ``ledger`` counts lies on the virtual accelerator that is meant; None where none is.

    Args:
        accelerator: that of the session.
        ledger: counts what is alive at the start of the cell, and nothing else yet.
        is_emptied: see ``Layout``.
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

    Raises:
        ForecastError: a real device would not start with them either.
    """
    device = _virtual(accelerator)
    try:
        settings = AllocatorSettings.from_environment() if device is None else device.allocator.settings
    except UsageError as error:
        raise ForecastError(str(error)) from error
    return replace(settings, per_process_memory_fraction=1.0)

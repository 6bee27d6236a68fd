"""A model of PyTorch's CUDA caching allocator: which blocks it cuts, keeps, joins, and when it has to give up.

It exists because ``reserved`` and fragmentation decide whether a program fits, not the sum of its tensors. The virtual
accelerator counts through it as the program runs; the forecast replays recorded allocations through it.

Limits: one device, the native backend with its default settings. Expandable segments, ``max_split_size_mb``, rounding
to powers of two, private pools of CUDA graphs and ``record_stream`` are not modelled. The driver is taken to grant
every segment that still fits into the capacity.

Source: ``c10/cuda/CUDACachingAllocator.cpp`` of PyTorch 2.x; the names of the constants below are those used there.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from oomdoctor.errors import OomDoctorError
from oomdoctor.model.sizes import MIB, format_size

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator, Mapping

__all__ = [
    *("Block", "CachingAllocator", "Event", "OutOfSpace", "Replay"),
    *("least_asked", "replay", "round_size", "segment_size"),
]

MIN_BLOCK_SIZE: Final = 512
"""Every block is a multiple of this. Source: ``kMinBlockSize``."""
SMALL_SIZE: Final = 1 * MIB
"""Largest request that the small pool serves. Source: ``kSmallSize``."""
SMALL_BUFFER: Final = 2 * MIB
"""Segment of the small pool. Source: ``kSmallBuffer``."""
MIN_LARGE_ALLOC: Final = 10 * MIB
"""Requests from here on get a segment of their own size. Source: ``kMinLargeAlloc``."""
LARGE_BUFFER: Final = 20 * MIB
"""Segment for the requests in between. Source: ``kLargeBuffer``."""
ROUND_LARGE: Final = 2 * MIB
"""Segments of large requests are multiples of this. Source: ``kRoundLarge``."""

_FIRST_ADDRESS: Final = 1 << 40
_ADDRESS_STEP: Final = 1 << 40

Event: TypeAlias = "tuple[Literal['alloc'], Hashable, int] | tuple[Literal['free'], Hashable]"
"""``("alloc", id, nbytes)`` or ``("free", id)``."""


class OutOfSpace(OomDoctorError):
    """A request that does not fit, even with every free segment given back.

    Attributes:
        requested: bytes that were asked for.
        segment: bytes of the segment that the driver refused; CUDA's message calls these "tried to allocate".
    """

    def __init__(self, *, requested: int, segment: int) -> None:
        self.requested, self.segment = requested, segment
        super().__init__(f"no room for a segment of {format_size(segment)}")


def round_size(nbytes: int) -> int:
    """Return the size of the block that serves a request of ``nbytes``. Source: ``round_size``."""
    return max(-(-nbytes // MIN_BLOCK_SIZE), 1) * MIN_BLOCK_SIZE


def segment_size(size: int) -> int:
    """Return the size of a new segment for a block of ``size``. Source: ``get_allocation_size``."""
    if size <= SMALL_SIZE:
        return SMALL_BUFFER
    if size < MIN_LARGE_ALLOC:
        return LARGE_BUFFER
    return -(-size // ROUND_LARGE) * ROUND_LARGE


class Block:
    """A part of a segment, in use or free; ``prev`` and ``next`` are its neighbours in the segment."""

    __slots__ = ("address", "allocated", "next", "pool", "prev", "size", "stream")

    def __init__(self, pool: _Pool, stream: int, address: int, size: int) -> None:
        self.pool, self.stream, self.address, self.size = pool, stream, address, size
        self.allocated = False
        self.prev: Block | None = None
        self.next: Block | None = None

    @property
    def is_split(self) -> bool:
        """Whether it shares its segment with other blocks."""
        return self.prev is not None or self.next is not None


def least_asked(segment: int) -> int:
    """Return the bytes that were asked for at least where a segment of this size could not be had.

    It is the segment that "Tried to allocate" tells, and it can be much larger than the tensor. See ``segment_size``.
    """
    if segment == SMALL_BUFFER:
        return 1
    return SMALL_SIZE + 1 if segment == LARGE_BUFFER else max(segment - ROUND_LARGE + 1, 1)


class _Pool:
    """The free blocks of one kind, ordered by (stream, size, address) as in ``BlockComparatorSize``."""

    __slots__ = ("blocks", "keys", "least_remainder")

    def __init__(self, *, least_remainder: int) -> None:
        self.least_remainder = least_remainder
        self.keys: list[tuple[int, int, int]] = []
        self.blocks: list[Block] = []

    def add(self, block: Block) -> None:
        key = (block.stream, block.size, block.address)
        at = bisect_left(self.keys, key)
        self.keys.insert(at, key)
        self.blocks.insert(at, block)

    def remove(self, block: Block) -> None:
        at = bisect_left(self.keys, (block.stream, block.size, block.address))
        del self.keys[at], self.blocks[at]

    def take(self, size: int, stream: int) -> Block | None:
        """Take out the smallest block of ``stream`` that holds ``size``, of several the lowest."""
        at = bisect_left(self.keys, (stream, size, 0))
        if at == len(self.keys) or self.keys[at][0] != stream:
            return None
        del self.keys[at]
        return self.blocks.pop(at)


class CachingAllocator:
    """The allocator of one device.

    Attributes:
        capacity_bytes: what the driver has to give; None for no limit.
        allocated: bytes of the blocks in use, rounded as the allocator rounds them.
        reserved: bytes of all segments, free or in use.
        peak_allocated: high-water mark of ``allocated`` since ``reset_peak``; likewise ``peak_reserved``.
        retries: requests for which cached segments had to be given back first; ``failures``: those refused.
    """

    def __init__(self, capacity_bytes: int | None = None, *, addresses: Iterator[int] | None = None) -> None:
        """Begin with nothing reserved; ``addresses`` says where the driver puts the next segments."""
        self.capacity_bytes = capacity_bytes
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = 0
        self.retries = self.failures = 0
        self._small = _Pool(least_remainder=MIN_BLOCK_SIZE)
        self._large = _Pool(least_remainder=SMALL_SIZE + MIN_BLOCK_SIZE)
        self._addresses = addresses
        self._next_address = _FIRST_ADDRESS

    def malloc(self, nbytes: int, stream: int = 0) -> Block | None:
        """Return a block in use of at least ``nbytes``; None for nothing, which needs no block.

        Raises:
            OutOfSpace: it does not fit, even with every free segment given back. No block was taken.
        """
        if nbytes <= 0:
            return None
        size = -(-nbytes // MIN_BLOCK_SIZE) * MIN_BLOCK_SIZE
        pool = self._small if size <= SMALL_SIZE else self._large
        block = pool.take(size, stream) or self._new_segment(pool, size, stream)
        if block is None:
            block = self._retry(nbytes, pool, size, stream)
        if block.size - size >= pool.least_remainder:
            self._split(block, size)
        block.allocated = True
        self.allocated += block.size
        if self.allocated > self.peak_allocated:
            self.peak_allocated = self.allocated
        return block

    def free(self, block: Block | None) -> None:
        """Take ``block`` back into its pool, joined with its free neighbours. None is nothing."""
        if block is None:
            return
        block.allocated = False
        self.allocated -= block.size
        pool = block.pool
        before, after = block.prev, block.next
        if before is not None and not before.allocated:
            pool.remove(before)
            block.address, block.prev = before.address, before.prev
            block.size += before.size
            if block.prev is not None:
                block.prev.next = block
        if after is not None and not after.allocated:
            pool.remove(after)
            block.next = after.next
            block.size += after.size
            if block.next is not None:
                block.next.prev = block
        pool.add(block)

    def empty_cache(self) -> None:
        """Give every segment that is wholly free back to the driver. Source: ``release_cached_blocks``."""
        for pool in (self._small, self._large):
            for block in [block for block in pool.blocks if not block.is_split]:
                pool.remove(block)
                self.reserved -= block.size

    def reset_peak(self) -> None:
        """Begin new high-water marks at what is held now."""
        self.peak_allocated, self.peak_reserved = self.allocated, self.reserved

    def free_blocks(self) -> Iterator[Block]:
        """Yield the cached blocks that serve no request, small pool first, ordered by stream and size."""
        yield from self._small.blocks
        yield from self._large.blocks

    @property
    def inactive_split(self) -> int:
        """Bytes of free blocks in segments that are partly in use, which cannot be given back."""
        return sum(block.size for block in self.free_blocks() if block.is_split)

    @property
    def largest_free_block(self) -> int:
        """Bytes of the largest cached block that serves no request."""
        return max((block.size for block in self.free_blocks()), default=0)

    def seed(self, segments: Iterable[Mapping[str, Any]]) -> dict[int, Block]:
        """Take over the segments of a real allocator and return its blocks in use by address.

        Args:
            segments: as ``torch.cuda.memory_snapshot()`` returns them, of one device. Free blocks of private pools
                count as reserved and serve nothing.
        """
        in_use: dict[int, Block] = {}
        for segment in segments:
            pool = self._small if segment["segment_type"] == "small" else self._large
            shared = tuple(segment.get("segment_pool_id", (0, 0))) == (0, 0)
            address, before = segment["address"], None
            for part in segment["blocks"]:
                block = Block(pool, segment.get("stream", 0), address, part["size"])
                block.prev, before, address = before, block, address + block.size
                if block.prev is not None:
                    block.prev.next = block
                if part["state"] == "inactive" and shared:
                    continue
                block.allocated = True
                if part["state"] != "inactive":
                    in_use[block.address] = block
                    self.allocated += block.size
            self.reserved += segment["total_size"]
            _pool_free_blocks(before)
        self.reset_peak()
        return in_use

    def _new_segment(self, pool: _Pool, size: int, stream: int) -> Block | None:
        wanted = segment_size(size)
        if self.capacity_bytes is not None and self.reserved + wanted > self.capacity_bytes:
            return None
        self.reserved += wanted
        if self.reserved > self.peak_reserved:
            self.peak_reserved = self.reserved
        if self._addresses is not None:
            return Block(pool, stream, next(self._addresses), wanted)
        self._next_address += _ADDRESS_STEP
        return Block(pool, stream, self._next_address, wanted)

    def _retry(self, nbytes: int, pool: _Pool, size: int, stream: int) -> Block:
        self.retries += 1
        self.empty_cache()
        block = self._new_segment(pool, size, stream)
        if block is None:
            self.failures += 1
            raise OutOfSpace(requested=nbytes, segment=segment_size(size))
        return block

    @staticmethod
    def _split(block: Block, size: int) -> None:
        """Cut ``block`` down to ``size``; what lies behind becomes a free block."""
        rest = Block(block.pool, block.stream, block.address + size, block.size - size)
        rest.prev, rest.next = block, block.next
        if rest.next is not None:
            rest.next.prev = rest
        block.next, block.size = rest, size
        block.pool.add(rest)


def _pool_free_blocks(last: Block | None) -> None:
    while last is not None:
        if not last.allocated:
            last.pool.add(last)
        last = last.prev


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What a sequence of allocations comes to, in bytes.

    Attributes:
        peak_allocated: high-water mark over the replay, what was allocated before it included.
        failed_at: index of the event that found no room, where the replay ended; None if all of it fits.
        refused: bytes that this event asked for.
    """

    peak_allocated: int
    peak_reserved: int
    allocated: int
    reserved: int
    retries: int
    failed_at: int | None = None
    refused: int | None = None


def replay(
    events: Iterable[Event],
    capacity_bytes: int | None = None,
    *,
    allocator: CachingAllocator | None = None,
    blocks: Mapping[Hashable, Block] | None = None,
) -> Replay:
    """Run ``events`` through an allocator, to their end or to the first request that does not fit.

    Args:
        events: ``("alloc", id, nbytes)`` and ``("free", id)`` in order. A free of an unknown id is passed over.
        capacity_bytes: the limit; None leaves that of ``allocator``, or none.
        allocator: one that already holds what was there before; it is used up. None begins with an empty device.
        blocks: the blocks of ``allocator`` that the events may free, by id.
    """
    model = CachingAllocator(capacity_bytes) if allocator is None else allocator
    if capacity_bytes is not None:
        model.capacity_bytes = capacity_bytes
    model.reset_peak()
    retries, live = model.retries, dict[Any, Any](blocks or {})
    failed_at = refused = None
    for index, event in enumerate(events):
        if event[0] == "free":
            model.free(live.pop(event[1], None))
            continue
        try:
            live[event[1]] = model.malloc(event[2])
        except OutOfSpace as full:
            failed_at, refused = index, full.requested
            break
    return Replay(
        peak_allocated=model.peak_allocated,
        peak_reserved=model.peak_reserved,
        allocated=model.allocated,
        reserved=model.reserved,
        retries=model.retries - retries,
        failed_at=failed_at,
        refused=refused,
    )

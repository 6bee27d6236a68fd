"""A model of PyTorch's CUDA caching allocator: which blocks it cuts, keeps, joins, and when it has to give up.

It exists because ``reserved`` and fragmentation decide whether a program fits, not the sum of its tensors. The virtual
accelerator counts through it as the program runs; the forecast replays recorded allocations through it.

Limits: one device, the native backend. The driver is taken to grant every segment and page that still fits into the
capacity, and every stream to have come so far that what it used is free once the program has freed it. Free segments
are not collected by age (``garbage_collection_threshold``). Private pools of graphs are kept as ``seed`` found them.

Source: ``c10/cuda/CUDACachingAllocator.cpp`` of PyTorch 2.x; functions are named for what they are called there.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from oomdoctor.allocator import snapshot
from oomdoctor.allocator.blocks import (
    ACTIVE,
    FREE,
    UNMAPPED,
    Block,
    BlockPool,
    Segment,
    expandable_space,
    find_expandable,
    map_in,
    unmap,
)
from oomdoctor.allocator.settings import MIN_BLOCK_SIZE, SMALL_BUFFER, SMALL_SIZE, AllocatorSettings
from oomdoctor.errors import OomDoctorError
from oomdoctor.model.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

_DEFAULTS: Final = AllocatorSettings()
_SHARED: Final = (0, 0)
_ADDRESS_STEP: Final = 1 << 40
_UNLIMITED_SPACE: Final = 1 << 39


class OutOfSpace(OomDoctorError):
    """A request that does not fit, even with every free segment given back.

    Attributes:
        requested: bytes that were asked for.
        segment: bytes of the segment that the driver refused; CUDA's message calls these "tried to allocate".
    """

    def __init__(self, *, requested: int, segment: int) -> None:
        self.requested, self.segment = requested, segment
        super().__init__(f"no room for a segment of {format_size(segment)}")


class CachingAllocator:
    """The allocator of one device.

    Attributes:
        capacity_bytes: what the driver has to give; None for no limit.
        allocated: bytes of the blocks in use, rounded as the allocator rounds them.
        reserved: bytes of all segments, free or in use; of expandable ones the pages that are mapped.
        peak_allocated: high-water mark of ``allocated`` since ``reset_peak``; likewise ``peak_reserved``.
        retries: requests for which cached segments had to be given back first; ``failures``: those refused.
    """

    def __init__(
        self,
        capacity_bytes: int | None = None,
        *,
        settings: AllocatorSettings = _DEFAULTS,
        addresses: Iterator[int] | None = None,
    ) -> None:
        """Begin with nothing reserved; ``addresses`` says where the driver puts the next segments."""
        self.capacity_bytes = capacity_bytes
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = 0
        self.retries = self.failures = 0
        self._small: dict[int, BlockPool] = {}
        self._large: dict[int, BlockPool] = {}
        self._private: dict[tuple[int, int, bool, int], BlockPool] = {}
        self._segments: dict[int, Segment] = {}
        self._addresses = addresses
        self._next_address = _ADDRESS_STEP
        self.settings = settings

    @property
    def settings(self) -> AllocatorSettings:
        """The settings in force. Set others, and they hold from the next request on."""
        return self._settings

    @settings.setter
    def settings(self, settings: AllocatorSettings) -> None:
        self._settings = settings
        self._rounds_simply = max(settings.roundup_power2_divisions) <= 1
        self._splits_below = sys.maxsize
        if settings.max_split_size is not None and not settings.expandable_segments:
            self._splits_below = settings.max_split_size
        for pool in self._large.values():
            pool.least_remainder = self._least_remainder(small=False)
        self._note_kinds()

    @property
    def limit_bytes(self) -> int | None:
        """What ``per_process_memory_fraction`` lets this process reserve; None for no such limit."""
        fraction = self._settings.per_process_memory_fraction
        return None if fraction >= 1 or self.capacity_bytes is None else int(fraction * self.capacity_bytes)

    def set_per_process_memory_fraction(self, fraction: float) -> None:
        """Let ``fraction`` of the capacity be reserved from the next segment on, as the function of torch.cuda does."""
        self.settings = replace(self._settings, per_process_memory_fraction=fraction)

    def malloc(self, nbytes: int, stream: int = 0) -> Block | None:
        """Return a block in use of at least ``nbytes``; None for nothing, which needs no block.

        Raises:
            OutOfSpace: it does not fit, even with every free segment given back. No block was taken.
        """
        if nbytes <= 0:
            return None
        size = (
            -(-nbytes // MIN_BLOCK_SIZE) * MIN_BLOCK_SIZE if self._rounds_simply else self._settings.round_size(nbytes)
        )
        pool = (self._small if size <= SMALL_SIZE else self._large).get(stream)
        if pool is None:
            pool = self._pool(size <= SMALL_SIZE, stream)
        block = pool.take(size) if self._plain else self._best_fit(pool, size)
        if block is None:
            block = self._obtain(pool, size, nbytes)
        if block.size - size >= pool.least_remainder and size < self._splits_below:
            pool.add(block.cut(size))
        block.state, block.requested = ACTIVE, nbytes
        self.allocated += block.size
        if self.allocated > self.peak_allocated:
            self.peak_allocated = self.allocated
        return block

    def free(self, block: Block | None) -> None:
        """Take ``block`` back into its pool, joined with its free neighbours. None is nothing."""
        if block is None:
            return
        self.allocated -= block.size
        block.state = FREE
        block.absorb_neighbours()
        block.segment.pool.add(block)

    def empty_cache(self) -> None:
        """Give every segment and page in which nothing lives back to the driver. Source: ``release_cached_blocks``."""
        for pool in (*self._large.values(), *self._small.values()):
            expands = [block for block in pool.blocks if block.segment.page is not None]
            self._release([block for block in pool.blocks if block.segment.page is None and not block.is_split])
            for block in expands:
                self.reserved -= unmap(block)
                head = block.segment.head
                if head.state == UNMAPPED and not head.is_split:
                    pool.remove(head)
                    del self._segments[head.address]

    def reset_peak(self) -> None:
        """Begin new high-water marks at what is held now."""
        self.peak_allocated, self.peak_reserved = self.allocated, self.reserved

    def free_blocks(self) -> Iterator[Block]:
        """Yield the cached blocks that serve no request, small pool first, ordered by stream and size."""
        for pools in (self._small, self._large):
            for stream in sorted(pools):
                yield from pools[stream].blocks

    @property
    def inactive_split(self) -> int:
        """Bytes of free blocks in segments that are partly in use, which cannot be given back.

        Expandable segments are left out, as in ``memory_stats``: their free pages can be given back.
        """
        return sum(block.size for block in self.free_blocks() if block.is_split and block.segment.page is None)

    @property
    def largest_free_block(self) -> int:
        """Bytes of the largest cached block that serves no request."""
        return max((block.size for block in self.free_blocks()), default=0)

    def memory_snapshot(self) -> list[dict[str, Any]]:
        """Return the segments and their blocks in the form of ``torch.cuda.memory_snapshot()``, without frames."""
        return snapshot.of_segments(self._segments.values())

    def seed(self, segments: Iterable[Mapping[str, Any]]) -> dict[int, Block]:
        """Take over the segments of a real allocator and return its blocks in use by address.

        Args:
            segments: as ``torch.cuda.memory_snapshot()`` returns them, of one device. Blocks of private pools that are
                freed go back there, and serve nothing.
        """
        in_use: dict[int, Block] = {}
        freed: list[Block] = []
        for segment in snapshot.rebuild(segments, self._pool, self._page):
            self._segments[segment.address] = segment
            self._next_address = max(self._next_address, _beyond(segment.address + segment.size))
            for block in segment.blocks():
                if block.state in (FREE, UNMAPPED):
                    segment.pool.add(block)
                else:
                    self.allocated += block.size
                    if block.state == ACTIVE:
                        in_use[block.address] = block
                    else:  # the program has freed it, and another stream was still at work with it
                        freed.append(block)
                self.reserved += block.size if block.state != UNMAPPED else 0
        for block in freed:
            self.free(block)
        self._note_kinds()
        self.reset_peak()
        return in_use

    def _note_kinds(self) -> None:
        """Note whether each search is a plain one for the smallest block that fits."""
        settings = self._settings
        expands = settings.expandable_segments or any(one.page is not None for one in self._segments.values())
        self._plain = not expands and settings.max_split_size is None

    def _least_remainder(self, *, small: bool) -> int:
        """Source: ``should_split``."""
        return MIN_BLOCK_SIZE + (0 if small or self._settings.expandable_segments else SMALL_SIZE)

    def _pool(self, small: bool, stream: int, owner: tuple[int, int] = _SHARED) -> BlockPool:
        """Return the pool of a stream, made when it is first asked for."""
        pools: dict[Any, BlockPool] = self._small if small else self._large
        key: Any = stream
        if owner != _SHARED:
            pools, key = self._private, (*owner, small, stream)
        if key not in pools:
            remainder = self._least_remainder(small=small)
            pools[key] = BlockPool(small=small, stream=stream, least_remainder=remainder, owner=owner)
        return pools[key]

    def _best_fit(self, pool: BlockPool, size: int) -> Block | None:
        """Take out the block for a request where settings narrow the choice. Source: ``get_free_block``."""
        blocks, at = pool.blocks, bisect_left(pool.keys, (size, 0))
        if at < len(blocks) and blocks[at].segment.page is not None:
            if self._settings.expandable_segments:
                # What it can grow to counts, so that the block at the end of a segment is taken last.
                while (
                    at + 1 < len(blocks)
                    and blocks[at].segment.page is not None
                    and _reach(blocks[at + 1]) < _reach(blocks[at])
                ):
                    at += 1
            else:
                while at < len(blocks) and blocks[at].segment.page is not None:
                    at += 1
        if at == len(blocks):
            return None
        block, oversize = blocks[at], self._settings.max_split_size
        if oversize is not None:
            if size < oversize <= block.size:
                return None
            if size >= oversize and block.size >= size + self._settings.max_non_split_rounding_size:
                return None
        pool.remove(block)
        return block

    def _obtain(self, pool: BlockPool, size: int, nbytes: int) -> Block:
        """Return new memory for a request that no free block serves, giving back what is cached where need be."""
        block, least = self._new_block(pool, size), self._settings.max_split_size
        if block is None and least is not None:
            blocks = _oversize(pool, size, least)
            self._release(blocks)
            block = self._new_block(pool, size) if sum(one.size for one in blocks) >= max(size, least) else None
        if block is None:
            self.retries += 1
            self.empty_cache()
            block = self._new_block(pool, size)
        if block is None:
            self.failures += 1
            raise OutOfSpace(requested=nbytes, segment=self._settings.segment_size(size))
        return block

    def _new_block(self, pool: BlockPool, size: int) -> Block | None:
        """Source: ``alloc_block``."""
        wanted, limit = self._settings.segment_size(size), self.limit_bytes
        if limit is not None and self.reserved + wanted > limit:
            return None
        if self._settings.expandable_segments:
            return self._expand(pool, size)
        if not self._grant(wanted):
            return None
        segment = Segment(pool, self._place(wanted), wanted)
        self._segments[segment.address] = segment
        return segment.head

    def _expand(self, pool: BlockPool, size: int) -> Block | None:
        first = find_expandable(pool, size)
        if first is None:
            page, space = self._page(pool.small)
            if space < size:
                return None
            segment = Segment(pool, self._place(space), space, page=page)
            self._segments[segment.address], first = segment, segment.head
            pool.add(first)
        return map_in(first, size, self._grant)

    def _page(self, small: bool) -> tuple[int, int]:
        """Return the page of an expandable segment, and the size of its address space."""
        page = SMALL_BUFFER if small else self._settings.large_segment_size
        capacity = _UNLIMITED_SPACE if self.capacity_bytes is None else self.capacity_bytes
        return page, expandable_space(capacity, page)

    def _grant(self, nbytes: int) -> bool:
        """Reserve ``nbytes`` of the driver's; False where it has not as much."""
        if self.capacity_bytes is not None and self.reserved + nbytes > self.capacity_bytes:
            return False
        self.reserved += nbytes
        if self.reserved > self.peak_reserved:
            self.peak_reserved = self.reserved
        return True

    def _place(self, nbytes: int) -> int:
        if self._addresses is not None:
            return next(self._addresses)
        address = self._next_address
        self._next_address = _beyond(address + nbytes)
        return address

    def _release(self, blocks: Iterable[Block]) -> None:
        """Give segments that are one free block each back to the driver. Source: ``release_block``."""
        for block in blocks:
            block.segment.pool.remove(block)
            del self._segments[block.segment.address]
            self.reserved -= block.size


def _oversize(pool: BlockPool, size: int, least: int) -> list[Block]:
    """Return the free blocks of ``least`` bytes or more that are given back to make room for a request.

    The smallest that is large enough, or else the largest, until they are as much as is wanted. Source:
    ``release_available_cached_blocks``.
    """
    wanted = max(size, least)
    at = bisect_left(pool.keys, (wanted, 0))
    if at < len(pool.blocks) and pool.blocks[at].segment.page is None:
        return [pool.blocks[at]]
    chosen: list[Block] = []
    for block in reversed(pool.blocks[:at]):
        if sum(one.size for one in chosen) >= wanted or block.size < least:
            break
        if block.segment.page is None:
            chosen.append(block)
    return chosen


def _reach(block: Block) -> int:
    """Return the size of a free block with the unmapped addresses behind it."""
    after = block.next
    return block.size + (after.size if after is not None and after.state == UNMAPPED else 0)


def _beyond(address: int) -> int:
    return -(-address // _ADDRESS_STEP) * _ADDRESS_STEP

"""Segments, the blocks that they are cut into, and the pools that keep the free ones.

An expandable segment is a range of addresses, larger than the device, into which memory is mapped page by page: at the
lowest addresses where the request fits, beginning with the free block before them. Short of room, every page in which
nothing lives is unmapped.

Source: ``Block``, ``BlockPool`` and ``ExpandableSegment``, ``find_expandable_block``,
``try_allocate_expandable_block``, ``map_block`` and ``unmap_block`` in ``c10/cuda/CUDACachingAllocator.cpp`` of PyTorch
2.x. A pool is of one stream here: there the streams share a set ordered by stream first, which comes to the same.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from operator import attrgetter
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ACTIVE: Final = "active_allocated"
FREE: Final = "inactive"
UNMAPPED: Final = "unmapped"
"""Addresses of an expandable segment without memory behind them. The other names are those of ``memory_snapshot``."""

_ADDRESS: Final = attrgetter("address")


class Segment:
    """A range of addresses from the driver.

    Attributes:
        page: of an expandable segment the bytes that are mapped and unmapped as one; None of another.
        head: its first block.
    """

    __slots__ = ("address", "head", "page", "pool", "size")

    def __init__(self, pool: BlockPool, address: int, size: int, *, page: int | None = None) -> None:
        self.pool, self.address, self.size, self.page = pool, address, size, page
        self.head = Block(self, address, size, FREE if page is None else UNMAPPED)

    def blocks(self) -> Iterator[Block]:
        """Yield its blocks in the order of their addresses."""
        block: Block | None = self.head
        while block is not None:
            yield block
            block = block.next


class Block:
    """A part of a segment; ``prev`` and ``next`` are its neighbours there.

    Attributes:
        requested: bytes that were asked for, while it is in use.
    """

    __slots__ = ("address", "next", "prev", "requested", "segment", "size", "state")

    requested: int

    def __init__(self, segment: Segment, address: int, size: int, state: str) -> None:
        self.segment, self.address, self.size, self.state = segment, address, size, state
        self.prev: Block | None = None
        self.next: Block | None = None

    @property
    def is_split(self) -> bool:
        """Whether it shares its segment with other blocks."""
        return self.prev is not None or self.next is not None

    def cut(self, size: int) -> Block:
        """Keep the first ``size`` bytes and return what lies behind as a block of the same state, in no pool yet."""
        rest = Block(self.segment, self.address + size, self.size - size, self.state)
        rest.prev, rest.next = self, self.next
        if rest.next is not None:
            rest.next.prev = rest
        self.next, self.size = rest, size
        return rest

    def absorb_neighbours(self) -> None:
        """Join the neighbours that are in the same state as this block, which must be in no pool itself."""
        pool, before, after = self.segment.pool, self.prev, self.next
        if before is not None and before.state == self.state:
            pool.remove(before)
            self.address, self.size, self.prev = before.address, self.size + before.size, before.prev
            if self.prev is None:
                self.segment.head = self
            else:
                self.prev.next = self
        if after is not None and after.state == self.state:
            pool.remove(after)
            self.size, self.next = self.size + after.size, after.next
            if self.next is not None:
                self.next.prev = self


class BlockPool:
    """The blocks of one kind and stream that nobody uses.

    Attributes:
        owner: the private pool it belongs to, (0, 0) where it belongs to none.
        keys: (size, address) of the free blocks in order, as in ``BlockComparatorSize``; ``blocks``: those blocks.
        unmapped: the unmapped parts of expandable segments by address.
        least_remainder: what is left of a larger block is cut off where it is this much or more.
    """

    __slots__ = ("blocks", "keys", "least_remainder", "owner", "small", "stream", "unmapped")

    def __init__(self, *, small: bool, stream: int, least_remainder: int, owner: tuple[int, int]) -> None:
        self.small, self.stream, self.least_remainder, self.owner = small, stream, least_remainder, owner
        self.keys: list[tuple[int, int]] = []
        self.blocks: list[Block] = []
        self.unmapped: list[Block] = []

    def add(self, block: Block) -> None:
        """Take in a block that is free or unmapped."""
        if block.state == UNMAPPED:
            insort(self.unmapped, block, key=_ADDRESS)
            return
        key = (block.size, block.address)
        at = bisect_left(self.keys, key)
        self.keys.insert(at, key)
        self.blocks.insert(at, block)

    def remove(self, block: Block) -> None:
        """Take out a block that is in this pool."""
        if block.state == UNMAPPED:
            self.unmapped.remove(block)
            return
        at = bisect_left(self.keys, (block.size, block.address))
        del self.keys[at], self.blocks[at]

    def take(self, size: int) -> Block | None:
        """Take out the smallest block that holds ``size``, of several the lowest; None if none does."""
        at = bisect_left(self.keys, (size, 0))
        if at == len(self.keys):
            return None
        del self.keys[at]
        return self.blocks.pop(at)


def expandable_space(capacity_bytes: int, page: int) -> int:
    """Return the size of a new range: an eighth more than the device has, in whole pages."""
    return -(-(capacity_bytes + capacity_bytes // 8) // page) * page


def find_expandable(pool: BlockPool, size: int) -> Block | None:
    """Return the first of the neighbouring free and unmapped blocks, lowest first, that hold ``size`` together."""
    for hole in pool.unmapped:
        first = hole.prev if hole.prev is not None and hole.prev.state == FREE else hole
        room, block = 0, first
        while room < size and block.state in (FREE, UNMAPPED):
            room += block.size
            if block.next is None:
                break
            block = block.next
        if room >= size:
            return first
    return None


def map_in(first: Block, size: int, grant: Callable[[int], bool]) -> Block | None:
    """Map what ``size`` bytes from ``first`` on lack, and return a free block of at least that size, in no pool.

    Args:
        first: as ``find_expandable`` returned it.
        grant: asks the driver for so many bytes; False: it has none. What was mapped until then stays, as free blocks.
    """
    block = first
    if block.state == UNMAPPED and not _map(block, min(block.size, size), grant):
        return None
    while block.size < size:
        hole = block.next
        assert hole is not None, "the blocks that find returned hold the request together"
        if not _map(hole, min(hole.size, size - block.size), grant):
            return None
        block = hole
    block.segment.pool.remove(block)
    return block


def unmap(block: Block) -> int:
    """Unmap the whole pages within a free block, and return their bytes; what is left on both sides stays free."""
    segment, pool = block.segment, block.segment.pool
    page = segment.page
    assert page is not None
    begin = -(-(block.address - segment.address) // page) * page
    end = (block.address + block.size - segment.address) // page * page
    if begin >= end:
        return 0
    pool.remove(block)
    before = begin - (block.address - segment.address)
    if before:
        rest = block.cut(before)
        pool.add(block)
        block = rest
    if block.size > end - begin:
        pool.add(block.cut(end - begin))
    block.state = UNMAPPED
    block.absorb_neighbours()
    pool.add(block)
    return end - begin


def _map(block: Block, size: int, grant: Callable[[int], bool]) -> bool:
    """Map the pages for ``size`` bytes at the start of an unmapped block, which becomes free, and joins its like."""
    pool, page = block.segment.pool, block.segment.page
    assert page is not None
    mapped = min(-(-size // page) * page, block.size)
    if not grant(mapped):
        return False
    pool.remove(block)
    if mapped < block.size:
        pool.add(block.cut(mapped))
    block.state = FREE
    block.absorb_neighbours()
    pool.add(block)
    return True

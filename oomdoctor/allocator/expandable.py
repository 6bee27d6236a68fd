"""Segments that grow: a range of addresses, larger than the device, into which memory is mapped page by page.

New memory is mapped at the lowest addresses where the request fits, beginning with the free block before them. Short of
room, every page in which nothing lives is unmapped.

Source: ``find_expandable_block``, ``try_allocate_expandable_block``, ``map_block`` and ``unmap_block`` in
``c10/cuda/CUDACachingAllocator.cpp`` of PyTorch 2.x.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from oomdoctor.allocator.blocks import FREE, UNMAPPED

if TYPE_CHECKING:
    from collections.abc import Callable

    from oomdoctor.allocator.blocks import Block, BlockPool


def address_space(capacity_bytes: int, page: int) -> int:
    """Return the size of a new range: an eighth more than the device has, in whole pages."""
    return -(-(capacity_bytes + capacity_bytes // 8) // page) * page


def find(pool: BlockPool, size: int) -> Block | None:
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
        first: as ``find`` returned it.
        size: of the request.
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

"""Which cached segments are given back to make room for a request, beside giving back all of them.

Source: ``garbage_collect_cached_blocks`` and ``release_available_cached_blocks`` in
``c10/cuda/CUDACachingAllocator.cpp`` of PyTorch 2.x.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from oomdoctor.allocator.blocks import Block, BlockPool


def oldest(free: Iterable[Block], now: int, excess: int) -> list[Block]:
    """Return the blocks as old as the average or older, and of the rest again, until they are ``excess`` bytes.

    Args:
        free: free blocks; those that share their segment are passed over.
        now: searches of their pools so far.
        excess: bytes to be given back; nothing is where it is not above zero.
    """
    chosen: list[Block] = []
    left = [(now - block.since, block) for block in free if not block.is_split and block.segment.page is None]
    while excess > 0 and left:
        average = sum(age for age, _ in left) / len(left)
        old = [block for age, block in left if age >= average]
        left = [(age, block) for age, block in left if age < average]
        excess -= sum(block.size for block in old)
        chosen += old
    return chosen


def oversize(pool: BlockPool, size: int, least: int) -> tuple[list[Block], bool]:
    """Return the free blocks of ``least`` bytes or more to give back for a request, and whether they make room for it.

    The smallest that is large enough, or else the largest, until they are as much as is wanted.
    """
    wanted = max(size, least)
    at = bisect_left(pool.keys, (wanted, 0))
    if at < len(pool.blocks) and pool.blocks[at].segment.page is None:
        return [pool.blocks[at]], True
    chosen: list[Block] = []
    found = 0
    for block in reversed(pool.blocks[:at]):
        if found >= wanted or block.size < least:
            break
        if block.segment.page is None:
            chosen.append(block)
            found += block.size
    return chosen, found >= wanted

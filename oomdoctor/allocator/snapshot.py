"""Segments and blocks in the form of ``torch.cuda.memory_snapshot()``, written and read.

An expandable segment is told there as one record for each range of mapped pages. Where its addresses begin and end is
not told: it is taken to begin with its lowest page, and to reach as far as a new one would, or to the next segment.

Source: ``snapshot`` in ``c10/cuda/CUDACachingAllocator.cpp``, ``THCPModule_memorySnapshot`` in
``torch/csrc/cuda/Module.cpp`` of PyTorch 2.x.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import groupby
from typing import TYPE_CHECKING, Any

from oomdoctor.allocator.blocks import FREE, UNMAPPED, Block, Segment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from oomdoctor.allocator.blocks import BlockPool


def of_segments(segments: Iterable[Segment]) -> list[dict[str, Any]]:
    """Return a record for each segment, and for each mapped range of an expandable one, by address."""
    ranges = (mapped for segment in segments for mapped in _mapped(segment))
    return sorted((_record(blocks) for blocks in ranges), key=lambda record: int(record["address"]))


def rebuild(
    records: Iterable[Mapping[str, Any]],
    pool_of: Callable[[bool, int, tuple[int, int]], BlockPool],
    page_of: Callable[[bool], tuple[int, int]],
) -> list[Segment]:
    """Return the segments that the records tell of; their free blocks are in no pool yet.

    Args:
        pool_of: returns the pool of a kind, stream and owner.
        page_of: returns the page of an expandable segment of small blocks, or of large ones, and its address space.
    """
    ordered = sorted(records, key=lambda record: int(record["address"]))
    starts = [record["address"] for record in ordered]
    segments: list[Segment] = []
    growing: dict[BlockPool, list[Mapping[str, Any]]] = {}
    for record in ordered:
        owner = tuple(record.get("segment_pool_id", (0, 0)))
        pool = pool_of(record["segment_type"] == "small", record.get("stream", 0), (owner[0], owner[1]))
        if not record.get("is_expandable", False):
            segment = Segment(pool, record["address"], record["total_size"])
            _lay_out(segment.head, record)
            segments.append(segment)
            continue
        page, space = page_of(pool.small)
        ranges = growing.setdefault(pool, [])
        if ranges and not _same_segment(ranges[0], record, page, space):
            segments.append(_expandable(pool, ranges, page, space, starts))
            ranges.clear()
        ranges.append(record)
    for pool, ranges in growing.items():
        segments.append(_expandable(pool, ranges, *page_of(pool.small), starts))
    return segments


def _mapped(segment: Segment) -> Iterator[list[Block]]:
    for is_mapped, blocks in groupby(segment.blocks(), lambda block: block.state != UNMAPPED):
        if is_mapped:
            yield list(blocks)


def _record(blocks: Sequence[Block]) -> dict[str, Any]:
    segment = blocks[0].segment
    active = [block for block in blocks if block.state != FREE]
    return {
        "device": 0,
        "address": blocks[0].address,
        "total_size": sum(block.size for block in blocks),
        "allocated_size": sum(block.size for block in active),
        "active_size": sum(block.size for block in active),
        "requested_size": sum(block.requested for block in active),
        "stream": segment.pool.stream,
        "segment_type": "small" if segment.pool.small else "large",
        "segment_pool_id": segment.pool.owner,
        "is_expandable": segment.page is not None,
        "frames": [],
        "blocks": [
            {
                "address": block.address,
                "size": block.size,
                "requested_size": block.requested if block.state != FREE else 0,
                "state": block.state,
                "frames": [],
            }
            for block in blocks
        ],
    }


def _lay_out(block: Block, record: Mapping[str, Any]) -> Block:
    """Cut ``block`` into those of a record, which begins where it does, and return the last one cut."""
    last = len(record["blocks"]) - 1
    for index, part in enumerate(record["blocks"]):
        rest = block.cut(part["size"]) if part["size"] < block.size else block
        block.state = part["state"]
        block.requested = part.get("requested_size", part["size"])
        if index == last:
            break
        block = rest
    return block


def _same_segment(first: Mapping[str, Any], record: Mapping[str, Any], page: int, space: int) -> bool:
    distance = int(record["address"]) - int(first["address"])
    return distance % page == 0 and distance + int(record["total_size"]) <= space


def _expandable(
    pool: BlockPool, ranges: Sequence[Mapping[str, Any]], page: int, space: int, starts: Sequence[int]
) -> Segment:
    """Return a segment with these mapped ranges; ``starts`` are the addresses of all records."""
    base, end = ranges[0]["address"], ranges[-1]["address"] + ranges[-1]["total_size"]
    following = bisect_right(starts, ranges[-1]["address"])
    room = min(space, starts[following] - base) if following < len(starts) else space
    segment = Segment(pool, base, max(room // page * page, end - base), page=page)
    block = segment.head
    for record in ranges:
        if block.address < record["address"]:
            block = block.cut(record["address"] - block.address)
        last = _lay_out(block, record)
        if last.next is not None:
            block = last.next
    return segment

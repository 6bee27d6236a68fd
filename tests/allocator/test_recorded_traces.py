"""The model against what real GPUs did: recorded traces, replayed to the same addresses."""

import gzip
import json
from bisect import bisect_left
from pathlib import Path

import pytest

from oomdoctor.allocator.caching import CachingAllocator, round_size
from oomdoctor.model.sizes import MIB

TRACES = Path(__file__).parents[3] / "shared" / "corpus" / "cuda_traces"
NAMES = ["a1", "a2", "a3", "a4", "b1", "c1", "c2", "c3", "d1", "d2", "d3", "d4"]

pytestmark = pytest.mark.skipif(not TRACES.is_dir(), reason=f"the recorded traces are not at {TRACES}")


def first_state(trace):
    """Undo the events backwards and return the segments with their blocks as they stood before the first event."""
    segments = {part["address"]: (part["size"], part["type"], part["stream"]) for part in trace["segments_at_end"]}
    live = {
        block["address"]: block["size"]
        for part in trace["segments_at_end"]
        for block in part["blocks"]
        if block["state"] != "inactive"
    }
    starts = set(live)
    for action, address, size, stream in reversed(trace["events"]):
        if action == "alloc":
            starts.add(address)
            del live[address]
        elif action == "free_completed":
            live[address] = size
            starts.add(address)
        elif action == "segment_alloc":
            del segments[address]
        elif action == "segment_free":
            segments[address] = (size, "small" if size == 2 * MIB else "large", stream)
    ordered = sorted({*starts, *(address + size for address, (size, _, _) in segments.items())})
    snapshots = []
    for address in sorted(segments):
        size, kind, stream = segments[address]
        inside = [start for start in sorted(live) if address <= start < address + size]
        whole = {start: whole_block(start, live[start], kind, ordered) for start in inside}
        snapshots.append(as_snapshot(address, size, kind, stream, whole))
    return snapshots


def whole_block(start, requested, kind, ordered):
    """Return the size of the block behind a request, which a trace does not tell of blocks older than itself.

    The large pool cuts off a remainder only above 1 MiB, so that none of its free blocks is smaller: a lesser gap up to
    the next block that was ever seen to begin there belongs to this one.
    """
    size = round_size(requested)
    after = ordered[bisect_left(ordered, start + size)]
    return after - start if kind == "large" and after - start - size <= MIB else size


def as_snapshot(address, size, kind, stream, live):
    blocks, at = [], address
    for start in sorted(start for start in live if address <= start < address + size):
        if start > at:
            blocks.append({"size": start - at, "state": "inactive"})
        blocks.append({"size": live[start], "state": "active_allocated"})
        at = start + live[start]
    if at < address + size:
        blocks.append({"size": address + size - at, "state": "inactive"})
    return {"address": address, "total_size": size, "segment_type": kind, "stream": stream, "blocks": blocks}


@pytest.mark.parametrize("name", NAMES)
def test_every_allocation_lands_where_it_did(name):
    trace = json.loads(gzip.decompress((TRACES / f"{name}.json.gz").read_bytes()))
    events = trace["events"]
    granted = iter([address for action, address, _, _ in events if action == "segment_alloc"])
    allocator = CachingAllocator(addresses=granted)
    live = allocator.seed(first_state(trace))
    landed = allocations = 0
    for index, (action, address, size, stream) in enumerate(events):
        if action == "alloc":
            block = allocator.malloc(size, stream)
            allocations += 1
            landed += block.address == address
            live[address] = block
        elif action == "free_completed":
            allocator.free(live.pop(address))
        elif action == "segment_free" and (index == 0 or events[index - 1][0] != "segment_free"):
            allocator.empty_cache()
    assert landed == allocations
    assert allocator.reserved == sum(part["size"] for part in trace["segments_at_end"])

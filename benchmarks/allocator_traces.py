"""Allocator traces recorded on real GPUs, replayed through the model.

What they hold is told in the README beside them. Each is replayed from the state before its first
event, which is found by undoing the events from the end.
"""

from __future__ import annotations

import gc
import gzip
import json
import time
from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oomdoctor.allocator.caching import CachingAllocator
from oomdoctor.allocator.settings import AllocatorSettings
from oomdoctor.model.sizes import MIB

__all__ = ["TRACES", "Outcome", "read", "run"]

TRACES = Path(__file__).parents[2] / "shared" / "corpus" / "cuda_traces"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one replay came to: ``expected`` is what the trace ends with, ``granted`` the segments that it was given."""

    events: int
    allocations: int
    identical: int
    segments: int
    taken: int
    reserved: int
    expected: int
    seconds: float


def read(path: Path) -> dict[str, Any]:
    trace: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    trace["begin"] = first_state(trace)
    return trace


def run(trace: dict[str, Any]) -> Outcome:
    """Replay a trace; the time is that of the model's calls and the loop around them."""
    events = trace["events"]
    granted = [address for action, address, _, _ in events if action == "segment_alloc"]
    taken = iter(granted)
    allocator = CachingAllocator(addresses=taken, settings=settings_of(trace))
    live = allocator.seed(trace["begin"])
    gives_back = {
        index
        for index, event in enumerate(events)
        if event[0] == "segment_free" and (index == 0 or events[index - 1][0] != "segment_free")
    }
    landed = allocations = frees = 0
    gc.collect()
    began = time.process_time()
    for index, (action, address, size, stream) in enumerate(events):
        if action == "alloc":
            block = allocator.malloc(size, stream)
            allocations += 1
            landed += block is not None and block.address == address
            live[address] = block  # type: ignore[assignment]
        elif action == "free_completed":
            allocator.free(live.pop(address))
            frees += 1
        elif index in gives_back:
            allocator.empty_cache()
    seconds = time.process_time() - began
    return Outcome(
        events=allocations + frees,
        allocations=allocations,
        identical=landed,
        segments=len(granted),
        taken=len(granted) - sum(1 for _ in taken),
        reserved=allocator.reserved,
        expected=sum(part["size"] for part in trace["segments_at_end"]),
        seconds=seconds,
    )


def settings_of(trace: dict[str, Any]) -> AllocatorSettings:
    return AllocatorSettings.parse(trace["settings"].get("PYTORCH_CUDA_ALLOC_CONF", ""))


def first_state(trace: dict[str, Any]) -> list[dict[str, Any]]:
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
    records = []
    for address in sorted(segments):
        size, kind, stream = segments[address]
        inside = [start for start in sorted(live) if address <= start < address + size]
        whole = {start: whole_block(start, live[start], kind, ordered) for start in inside}
        records.append(as_record(address, size, kind, stream, whole))
    return records


def whole_block(start: int, requested: int, kind: str, ordered: list[int]) -> int:
    """Return the size of the block behind a request, which a trace does not tell of blocks older than itself.

    The large pool cuts off a remainder only above 1 MiB, so that none of its free blocks is smaller: a lesser gap up to
    the next block that was ever seen to begin there belongs to this one.
    """
    size = AllocatorSettings().round_size(requested)
    after = ordered[bisect_left(ordered, start + size)]
    return after - start if kind == "large" and after - start - size <= MIB else size


def as_record(address: int, size: int, kind: str, stream: int, live: dict[int, int]) -> dict[str, Any]:
    blocks, at = [], address
    for start in sorted(live):
        if start > at:
            blocks.append({"size": start - at, "state": "inactive"})
        blocks.append({"size": live[start], "state": "active_allocated"})
        at = start + live[start]
    if at < address + size:
        blocks.append({"size": address + size - at, "state": "inactive"})
    return {"address": address, "total_size": size, "segment_type": kind, "stream": stream, "blocks": blocks}

"""The counters and the snapshot of a caching allocator, read into the words of ``DeviceMemory``.

Pure: what ``memory_stats`` and ``memory_snapshot`` returned goes in, so that a recording is read as a device is. The
format is the same for CUDA, ROCm and XPU. Source: ``torch.cuda.memory._snapshot`` and ``SegmentInfo`` in
c10/core/CachingDeviceAllocator.h, torch 2.13.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, TypeAlias

from oomdoctor.model.absence import Unavailable
from oomdoctor.model.memory import Measured, PrivatePool

__all__ = ["Segments", "counters", "largest_free_block", "private_pools", "workspaces"]

Segments: TypeAlias = list[dict[str, Any]] | Unavailable

_KEYS: Final = {
    "allocated": "allocated_bytes.all.current",
    "reserved": "reserved_bytes.all.current",
    "inactive_split": "inactive_split_bytes.all.current",
    "peak_allocated": "allocated_bytes.all.peak",
    "peak_reserved": "reserved_bytes.all.peak",
    "retries": "num_alloc_retries",
    "ooms": "num_ooms",
}
_KEPT_BY_THE_DRIVER: Final = frozenset({"allocated", "reserved", "peak_allocated", "peak_reserved"})
"""What ``cudaMallocAsync`` counts; the others it reports as zero. Source: c10/cuda/CUDAMallocAsyncAllocator.cpp."""

_ORDINARY: Final = (0, 0)


def counters(stats: Mapping[str, Any] | Unavailable, backend: str = "native") -> dict[str, Measured]:
    """Return the counters of one device, by their names in ``DeviceMemory``.

    Args:
        stats: what ``memory_stats`` returned.
        backend: what ``get_allocator_backend`` said.
    """

    def counter(name: str, key: str) -> Measured:
        if isinstance(stats, Unavailable):
            return stats
        if backend == "cudaMallocAsync" and name not in _KEPT_BY_THE_DRIVER:
            return Unavailable("the cudaMallocAsync allocator keeps no such count")
        return int(stats[key]) if key in stats else Unavailable(f"this allocator's memory_stats has no {key}")

    return {name: counter(name, key) for name, key in _KEYS.items()}


def largest_free_block(segments: Segments, index: int) -> Measured:
    """Return the size of the largest cached block that an ordinary request could take, 0 where none is free.

    Blocks of private pools serve no other request. Whether a block belongs to another stream is not looked at.
    """
    if isinstance(segments, Unavailable):
        return segments
    return max(
        (
            int(block["size"])
            for segment in _of_device(segments, index)
            if _pool(segment) == _ORDINARY
            for block in segment["blocks"]
            if block["state"] == "inactive"
        ),
        default=0,
    )


def workspaces(segments: Segments, index: int, size: int) -> tuple[int, ...]:
    """Return the size of each live block that was asked for with the size of a workspace."""
    if isinstance(segments, Unavailable) or not size:
        return ()
    blocks = (block for segment in _of_device(segments, index) for block in segment["blocks"])
    live = (block for block in blocks if block["state"].startswith("active"))
    return tuple(size for block in live if block.get("requested_size", block["size"]) == size)


def private_pools(segments: Segments, index: int) -> tuple[PrivatePool, ...]:
    """Return the private pools with segments on a device, the largest first."""
    if isinstance(segments, Unavailable):
        return ()
    sizes: dict[tuple[int, int], list[int]] = {}
    for segment in _of_device(segments, index):
        if (pool := _pool(segment)) != _ORDINARY:
            size = sizes.setdefault(pool, [0, 0])
            size[0] += int(segment["total_size"])
            size[1] += int(segment["allocated_size"])
    pools = (PrivatePool(name=_title(pool), reserved=size[0], allocated=size[1]) for pool, size in sizes.items())
    return tuple(sorted(pools, key=lambda pool: -pool.reserved))


def _of_device(segments: Iterable[dict[str, Any]], index: int) -> Iterable[dict[str, Any]]:
    return (segment for segment in segments if segment.get("device", index) == index)


def _pool(segment: dict[str, Any]) -> tuple[int, int]:
    first, second = segment.get("segment_pool_id", _ORDINARY)
    return int(first), int(second)


def _title(pool: tuple[int, int]) -> str:
    """Return who made a pool: a graph numbers the first place of its id, a handle or ``MemPool`` the second.

    Source: ``MempoolId_t`` in c10/core/Allocator.h.
    """
    made_by_capture, made_by_handle = pool
    if made_by_capture:
        return f"pool {made_by_capture} of a captured graph"
    return f"pool {made_by_handle} of a MemPool or a graph_pool_handle"

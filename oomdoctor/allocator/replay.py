"""A recorded sequence of allocations and frees, run through the model of the allocator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from oomdoctor.allocator.caching import CachingAllocator, OutOfSpace

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping

    from oomdoctor.allocator.blocks import Block

Event: TypeAlias = "tuple[Literal['alloc'], Hashable, int] | tuple[Literal['free'], Hashable]"
"""``("alloc", id, nbytes)`` or ``("free", id)``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What a sequence of allocations comes to.

    Attributes:
        peak_allocated: bytes, the high-water mark with what was allocated before it; likewise ``peak_reserved``.
        failed_at: index of the event that found no room, where the replay ended; None if all of it fits.
    """

    peak_allocated: int
    peak_reserved: int
    failed_at: int | None


def replay(
    events: Iterable[Event], allocator: CachingAllocator, blocks: Mapping[Hashable, Block | None] | None = None
) -> Replay:
    """Run ``events`` through an allocator, to their end or to the first request that does not fit.

    Args:
        events: in order. A free of an unknown id is passed over.
        allocator: may hold what was there before; it is used up.
        blocks: those of ``allocator`` that the events may free, by id; None for what is not to be freed. An allocation
            of one of these ids is passed over: it is there.
    """
    allocator.reset_peak()
    live, failed_at = dict[Any, Any](blocks or {}), None
    there = frozenset(live)
    for index, event in enumerate(events):
        if event[0] == "free":
            allocator.free(live.pop(event[1], None))
        elif event[1] not in there:
            try:
                live[event[1]] = allocator.malloc(event[2])
            except OutOfSpace:
                failed_at = index
                break
    return Replay(peak_allocated=allocator.peak_allocated, peak_reserved=allocator.peak_reserved, failed_at=failed_at)

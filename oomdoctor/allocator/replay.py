"""A recorded sequence of allocations and frees, run through the model of the allocator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from oomdoctor.allocator.caching import CachingAllocator, OutOfSpace

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping

    from oomdoctor.allocator.blocks import Block
    from oomdoctor.allocator.settings import AllocatorSettings

Event: TypeAlias = "tuple[Literal['alloc'], Hashable, int] | tuple[Literal['free'], Hashable]"
"""``("alloc", id, nbytes)`` or ``("free", id)``."""


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
    blocks: Mapping[Hashable, Block | None] | None = None,
    settings: AllocatorSettings | None = None,
) -> Replay:
    """Run ``events`` through an allocator, to their end or to the first request that does not fit.

    Args:
        events: ``("alloc", id, nbytes)`` and ``("free", id)`` in order. A free of an unknown id is passed over.
        capacity_bytes: the limit; None leaves that of ``allocator``, or none.
        allocator: one that already holds what was there before; it is used up. None begins with an empty device.
        blocks: the blocks of ``allocator`` that the events may free, by id; None for what is not to be freed. An
            allocation of one of these ids is passed over: it is there.
        settings: those of the new allocator, or to change ``allocator`` to. None leaves its own, or the defaults.
    """
    model = CachingAllocator(capacity_bytes) if allocator is None else allocator
    if capacity_bytes is not None:
        model.capacity_bytes = capacity_bytes
    if settings is not None:
        model.settings = settings
    model.reset_peak()
    retries, live = model.retries, dict[Any, Any](blocks or {})
    there = frozenset(live)
    failed_at = refused = None
    for index, event in enumerate(events):
        if event[0] == "free":
            model.free(live.pop(event[1], None))
            continue
        if event[1] in there:
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

"""What a device held at one moment of a CUDA memory snapshot, by the lines that allocated it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Moment(StrEnum):
    """When it was: memory ran out, most was allocated, or the snapshot was taken."""

    REFUSED = "refused"
    PEAK = "peak"
    END = "end"


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """A line of Python on the way to an allocation."""

    path: str
    line: int
    function: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocations:
    """Live blocks that one line of the user's allocated.

    Attributes:
        size: bytes that were asked for; ``count``: in how many blocks.
        caller: the user's innermost line, else a library's; null where the allocation has no such line.
        innermost: the line of a library that most of it went through, where it is another.
        is_traced: whether the allocations have frames at all.
    """

    size: int
    count: int
    caller: Caller | None
    innermost: Caller | None = None
    is_traced: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """What one device held.

    Attributes:
        device: its name.
        allocated: bytes of live blocks, as they were asked for; ``reserved``: bytes of segments.
        requested: the request that was refused, null where none was.
        free: bytes that the driver had free then, null where it is not told.
        events: how many events of the device the snapshot has.
        holders: what was live, the largest first.
    """

    device: str
    moment: Moment
    allocated: int
    reserved: int
    requested: int | None = None
    free: int | None = None
    events: int = 0
    holders: tuple[Allocations, ...] = ()

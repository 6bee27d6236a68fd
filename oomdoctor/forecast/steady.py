"""The iterations that a shadow run left out, put back into its trace of allocations.

A shadow cuts a loop once its iterations are alike. What the allocator holds may still rise in those that follow: small
blocks lie elsewhere each time, and a list may keep something of every one. So the last iteration that was followed is
replayed again, until the allocator asks for nothing more or the loop is at its end.

Limits: an iteration is taken to free of the one before it what the last one freed of its own. A loop whose last
iteration holds a loop that was cut itself is left as it is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from oomdoctor.allocator.caching import CachingAllocator
    from oomdoctor.allocator.replay import Event

__all__ = ["Cut", "Lengthened"]

_ALIKE: Final = 3
"""So many iterations in a row that raise nothing are followed by others that do not."""
_MOST_EVENTS: Final = 200_000
"""What is put in is limited: an event takes some microseconds."""


class Cut(NamedTuple):
    """A loop that was cut: its last iteration lies in the trace from ``begin`` to ``end``.

    Attributes:
        left: iterations that it would still have, None where that is not known.
    """

    begin: int
    end: int
    left: int | None


class Lengthened:
    """The events of a shadow run with the iterations that were left out, to be gone through once.

    Args:
        events: the trace.
        cuts: the loops that were cut.
        allocator: the one that the events are replayed in; it tells when nothing changes any more.

    Attributes:
        is_steady: whether all was gone through that may change what is reserved. Where a loop was left as it is, or
            is too long for what it keeps in each iteration, this is False.
        growth: bytes that iterations which were not gone through will keep, by what the last one kept.
    """

    def __init__(self, events: Sequence[Event], cuts: Sequence[Cut], allocator: CachingAllocator) -> None:
        self._events, self._allocator = events, allocator
        self._cuts = [cut for cut in cuts if not any(_holds(cut, other) for other in cuts)]
        self.is_steady = len(self._cuts) == len(cuts)
        self.growth = 0
        self._sizes: dict[Hashable, int] = {event[1]: event[2] for event in events if event[0] == "alloc"}
        self._names: dict[Hashable, Hashable] = {}
        self._added = 0

    def __iter__(self) -> Iterator[Event]:
        at = 0
        for cut in sorted(self._cuts, key=lambda one: one.end):
            yield from self._named(at, cut.end)
            yield from self._repeated(cut)
            at = cut.end
        yield from self._named(at, len(self._events))

    def _named(self, begin: int, end: int) -> Iterator[Event]:
        """Yield a part of the trace; what was kept through iterations put in goes by its name of the last one."""
        for event in self._events[begin:end]:
            yield ("free", self._names.pop(event[1], event[1])) if event[0] == "free" else event

    def _repeated(self, cut: Cut) -> Iterator[Event]:
        last = self._events[cut.begin : cut.end]
        own = {event[1] for event in last if event[0] == "alloc"}
        freed = {event[1] for event in last if event[0] == "free"}
        kept: dict[int, list[Hashable]] = defaultdict(list)
        for event in last:
            if event[0] == "alloc" and event[1] not in freed:
                kept[event[2]].append(event[1])
        first = {size: list(numbers) for size, numbers in kept.items()}
        turn = alike = rise = 0
        while alike < _ALIKE and (cut.left is None or turn < cut.left):
            if self._added > _MOST_EVENTS:
                self.is_steady = False
                self.growth += max(rise, 0) * ((cut.left or turn) - turn)
                break
            allocated, reserved = self._allocator.allocated, self._allocator.peak_reserved
            yield from self._again(last, own, freed, kept, turn)
            turn, self._added = turn + 1, self._added + len(last)
            rise = self._allocator.allocated - allocated
            alike = 0 if rise or self._allocator.peak_reserved > reserved else alike + 1
        for size, numbers in first.items():
            heirs = kept[size][-len(numbers) :]
            self._names.update(zip(numbers[-len(heirs) :], heirs, strict=True) if heirs else ())

    def _again(
        self,
        last: Sequence[Event],
        own: set[Any],
        freed: set[Any],
        kept: dict[int, list[Hashable]],
        turn: int,
    ) -> Iterator[Event]:
        """Yield the last iteration once more, and note in ``kept`` what lives on after it, by size."""
        new: list[tuple[int, Hashable]] = []
        for event in last:
            name: Hashable = (event[1], turn)
            if event[0] == "alloc":
                if event[1] not in freed:
                    new.append((event[2], name))
                yield "alloc", name, event[2]
            elif event[1] in own:
                yield "free", name
            elif before := kept[self._sizes.get(event[1], 0)]:
                yield "free", before.pop(0)
        for size, name in new:
            kept[size].append(name)


def _holds(outer: Cut, inner: Cut) -> bool:
    """Whether the last iteration of one loop holds that of another one, which may well end where it does."""
    within = outer.begin <= inner.begin < inner.end <= outer.end
    return within and (outer.begin, outer.end) != (inner.begin, inner.end)

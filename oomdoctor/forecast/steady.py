"""The iterations that a shadow run left out, put back into its trace of allocations.

A shadow cuts a loop once its iterations are alike. What is alive, or what the allocator holds, may still rise in those
that follow: small blocks lie elsewhere each time, and a list may keep something of every one. So the last iteration
that was followed is replayed again, with the loops in it as long as they are, until nothing rises any more or the loop
is at its end.

Limits: an iteration is taken to free of the one before it what the last one freed of its own; where iterations are of
other sizes, that which is nearest in size. A loop that was cut in its first iteration is left as it is.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from oomdoctor.allocator.caching import CachingAllocator
    from oomdoctor.allocator.replay import Event

_ALIKE: Final = 3
"""So many iterations in a row that raise nothing are followed by others that do not; so many that do, by more."""
_SCALES: Final = 4
"""So many times as large may what an iteration frees be as what stands for it in another one, of a longer batch."""
_MOST_EVENTS: Final = 200_000
"""What is put in is limited: an event takes some microseconds."""


class Cut(NamedTuple):
    """A loop that was cut: its last iteration lies in the trace from ``begin`` to ``end``.

    Attributes:
        left: iterations that it would still have, None where that is not known.
        turns: iterations that it had.
    """

    begin: int
    end: int
    left: int | None
    turns: int


class Tally:
    """What is alive, in bytes, where no caching allocator lies in between.

    Attributes:
        allocated: sum now; ``peak_reserved``: highest sum so far, by the name that an allocator has for it.
    """

    def __init__(self) -> None:
        self.allocated = self.peak_reserved = 0
        self._sizes: dict[Hashable, int] = {}

    def take(self, event: Event) -> None:
        """Count one event."""
        if event[0] == "alloc":
            self._sizes[event[1]] = event[2]
            self.allocated += event[2]
            self.peak_reserved = max(self.peak_reserved, self.allocated)
        else:
            self.allocated -= self._sizes.pop(event[1], 0)


class Lengthened:
    """The events of a shadow run with the iterations that were left out, to be gone through once.

    Args:
        events: the trace.
        cuts: the loops that were cut, in the order in which they were: what lies in a loop comes before it.
        allocator: the one that the events are replayed in; it tells when nothing changes any more.

    Attributes:
        is_steady: whether all was gone through that may change what is reserved. Where a loop was left as it is, or
            is too long for what it keeps in each iteration, this is False.
        growth: bytes that iterations which were not gone through will keep, by what the last one kept.
        over: iterations put in that keep something, of the loop that has most of them.
        endless: bytes that each iteration of a loop of unknown length keeps, 0 where there is none that does.
    """

    def __init__(self, events: Sequence[Event], cuts: Sequence[Cut], allocator: CachingAllocator | Tally) -> None:
        self._events, self._allocator = events, allocator
        # The first iteration makes what is then there for all of them, as optimizers make their state.
        nested = [(at, cut) for at, cut in enumerate(cuts) if cut.begin < cut.end]
        self._cuts = [one for one in nested if one[1].turns > 1]
        self.is_steady = len(self._cuts) == len(nested)
        self.growth = self.over = self.endless = 0
        self._sizes: dict[Hashable, int] = {event[1]: event[2] for event in events if event[0] == "alloc"}
        self._levels: list[dict[Hashable, _Kept]] = []
        self._added = self._turns = 0

    def __iter__(self) -> Iterator[Event]:
        return self._part(0, len(self._events), self._cuts)

    def _part(self, begin: int, end: int, cuts: Sequence[tuple[int, Cut]]) -> Iterator[Event]:
        """Yield a part of the trace with the iterations that were left out of its loops."""
        outer = [one for one in cuts if not any(_holds(other, one) for other in cuts)]
        for at, cut in sorted(outer, key=lambda one: one[1].end):
            yield from self._named(begin, cut.begin)
            grown = self.growth
            last: list[Event] = []
            for event in self._part(cut.begin, cut.end, [one for one in cuts if _holds((at, cut), one)]):
                last.append(event)
                yield event
            yield from self._repeated(cut, last, self.growth - grown)
            begin = cut.end
        yield from self._named(begin, end)

    def _named(self, begin: int, end: int) -> Iterator[Event]:
        """Yield a part of the trace; what was kept through iterations put in goes with what they kept."""
        for event in self._events[begin:end]:
            if event[0] == "alloc":
                yield event
            else:
                names: list[Hashable] = [event[1]]
                for kept in self._levels:
                    names = [heir for name in names for heir in (kept[name].pop() if name in kept else (name,))]
                for name in names:
                    yield "free", name

    def _repeated(self, cut: Cut, last: Sequence[Event], unseen: int) -> Iterator[Event]:
        """Yield the last iteration as often as it is left, and not more often than it takes to know what comes of it.

        Args:
            cut: the loop.
            last: the iteration.
            unseen: bytes that it keeps besides.
        """
        own = {event[1] for event in last if event[0] == "alloc"}
        freed = {event[1] for event in last if event[0] == "free"}
        kept: dict[int, list[Hashable]] = defaultdict(list)
        for event in last:
            if event[0] == "alloc" and event[1] not in freed:
                kept[event[2]].append(event[1])
        first = {size: list(names) for size, names in kept.items()}
        passing = Counter(self._sizes.get(event[1], 0) for event in last if event[0] == "free" and event[1] not in own)
        stands_for = _nearest(passing, Counter({size: len(names) for size, names in kept.items()}))
        for partners in stands_for.values():
            passing.update(partners)
        turn = alike = rising = rise = 0
        while alike < _ALIKE and (cut.left is None or turn < cut.left):
            if (turn and self._added > _MOST_EVENTS) or (cut.left is None and rising == _ALIKE):
                self.is_steady = False
                self.growth += max(rise, 0) * ((cut.left or turn) - turn)
                self.endless = max(self.endless, rise if cut.left is None else 0)
                break
            allocated, reserved = self._allocator.allocated, self._allocator.peak_reserved
            yield from self._again(last, own, freed, kept, stands_for)
            turn, self._added, self.growth = turn + 1, self._added + len(last), self.growth + unseen
            rise = self._allocator.allocated - allocated + unseen
            alike = 0 if rise or self._allocator.peak_reserved > reserved else alike + 1
            rising = rising + 1 if rise > 0 else 0
        if rise > 0 and cut.left is not None:
            self.over = max(self.over, cut.left)
        self._levels.append({})
        for size, names in first.items():
            group = _Kept(kept[size], min(passing[size], len(names)), len(names))
            self._levels[-1].update(dict.fromkeys(names, group))

    def _again(
        self,
        last: Sequence[Event],
        own: set[Any],
        freed: set[Any],
        kept: dict[int, list[Hashable]],
        stands_for: Mapping[int, Sequence[int]],
    ) -> Iterator[Event]:
        """Yield the last iteration once more, and note in ``kept`` what lives on after it, by size."""
        self._turns += 1
        others = {size: list(partners) for size, partners in stands_for.items()}
        new: list[tuple[int, Hashable]] = []
        for event in last:
            name: Hashable = (event[1], self._turns)
            if event[0] == "alloc":
                if event[1] not in freed:
                    new.append((event[2], name))
                self._sizes[name] = event[2]
                yield "alloc", name, event[2]
            elif event[1] in own:
                yield "free", name
            else:
                size = self._sizes.get(event[1], 0)
                if before := kept[others[size].pop() if others.get(size) else size]:
                    yield "free", before.pop(0)
        for size, name in new:
            kept[size].append(name)


def _nearest(freed: Counter[Any], kept: Counter[int]) -> dict[int, list[int]]:
    """Return, for each size that was freed of the iteration before and is not kept, those that stand for it now."""
    left, found = sorted((kept - freed).elements()), defaultdict[int, list[int]](list)
    for size in sorted((freed - kept).elements(), reverse=True):
        near = [one for one in left if size / _SCALES <= one <= size * _SCALES]
        if size and near:
            found[size].append(min(near, key=lambda one: max(one / size, size / one)))
            left.remove(found[size][-1])
    return dict(found)


class _Kept:
    """What a loop has kept of one size: what its next iteration would have let go of, and what it piles up.

    Which is which cannot be seen. What is let go of first is taken to be the former, and what is piled up to go when
    what the last iteration added to it does.
    """

    def __init__(self, names: list[Hashable], passing: int, count: int) -> None:
        self._names, self._passing, self._left = names, passing, count

    def pop(self) -> list[Hashable]:
        """Return what goes when the trace lets go of one of those that the last iteration has kept."""
        count = 1 if self._passing > 0 else -(-len(self._names) // max(self._left, 1))
        self._passing, self._left = self._passing - 1, self._left - 1
        gone = self._names[-count:] if count else []
        del self._names[len(self._names) - len(gone) :]
        return gone


def _holds(one: tuple[int, Cut], other: tuple[int, Cut]) -> bool:
    """Whether the last iteration of one loop holds that of another one, which was cut before it."""
    (at, outer), (before, inner) = one, other
    return before < at and outer.begin <= inner.begin and inner.end <= outer.end

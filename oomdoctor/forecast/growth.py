"""What the iterations that a dry run left out keep, put into its trace of allocations.

A dry run cuts a loop once its iterations are alike (see ``loop_model``). What the last one that was followed keeps
beyond what it lets go of, each of the others keeps as well: outputs in a list, the graphs of losses. So every such
allocation is put in again, once for each iteration that is left, before that last one, which is taken to be the last of
the loop. They go where the trace lets go of the one that was seen.

Limits: an iteration is taken to let go of the one before it what the last one let go of; where iterations are of other
sizes, that which is nearest in size. A loop that was cut in its first iteration, which makes what is then there for all
of them, is left as it is. What the others only pass through is not followed: their blocks may lie less well.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Final, Literal, NamedTuple, TypeAlias

Event: TypeAlias = tuple[Literal["alloc"], Hashable, int] | tuple[Literal["free"], Hashable]
"""``("alloc", id, nbytes)`` or ``("free", id)``."""
_SCALES: Final = 4
"""So many times as large may what an iteration frees be as what stands for it in another one, of a longer batch."""
_MOST_BLOCKS: Final = 20_000
"""Where a loop keeps more than so many, those of one allocation are put in as a single one: each takes some time."""


class Cut(NamedTuple):
    """A loop that was cut: its last iteration lies in the trace from ``begin`` to ``end``.

    Attributes:
        left: iterations that it would still have, None where that is not known; ``turns``: that it had.
        earlier: where the iteration before the last one began, if there was one.
    """

    begin: int
    end: int
    left: int | None
    turns: int
    earlier: int


class _Kept(NamedTuple):
    """What the last iteration of a loop has kept of one size.

    Its next iteration would have let go of ``passing`` of these; which ones cannot be seen, and those that are let go
    of first are taken to be they. ``heirs`` is what was put in for each of the others, and goes with it.
    """

    passing: int
    heirs: list[list[Hashable]]


class Growth:
    """The trace of a dry run with what was left out.

    Args:
        cuts: the loops that were cut, in the order in which they were: what lies in a loop comes before it.

    Attributes:
        over: iterations put in that keep something, of the loop that has most of them.
        endless: bytes that each iteration of a loop of unknown length keeps.
    """

    def __init__(self, events: Sequence[Event], cuts: Sequence[Cut]) -> None:
        self._events = events
        self._sizes: dict[Hashable, int] = {event[1]: event[2] for event in events if event[0] == "alloc"}
        self._put_in: dict[int, list[Event]] = defaultdict(list)
        self._kept: dict[Hashable, list[_Kept]] = defaultdict(list)
        self.over = self.endless = 0
        for cut in cuts:
            if cut.turns > 1:
                self._grow(cut)

    def events(self) -> Iterator[Event]:
        """Yield the events of the trace with those that were put in."""
        for _, event in self._walk(len(self._events)):
            yield event

    def _walk(self, end: int) -> Iterator[tuple[int, Event]]:
        gone = Counter[int]()

        def freed(name: Hashable) -> Iterator[Event]:
            yield "free", name
            for kept in self._kept.get(name, ()):
                at = gone[id(kept)] - kept.passing
                gone[id(kept)] += 1
                for heir in kept.heirs[at] if 0 <= at < len(kept.heirs) else ():
                    yield from freed(heir)

        for at, event in enumerate(self._events[:end]):
            for put_in in self._put_in.get(at, ()):
                yield at, put_in
            if event[0] == "alloc":
                yield at, event
            else:
                for free in freed(event[1]):
                    yield at, free

    def _grow(self, cut: Cut) -> None:
        # Some is let go of in every other iteration alone, such as what ``enumerate`` holds.
        begin, span = (cut.earlier, 2) if cut.turns > 2 else (cut.begin, 1)
        names, passing, piled = self._kept_from(begin, cut.end)
        piled = {size: -(-count // span) for size, count in piled.items()}
        if piled and cut.left is None:
            self.endless = max(self.endless, sum(size * count for size, count in piled.items()))
        elif piled and cut.left is not None:
            self.over = max(self.over, cut.left)
            blocks = cut.left if cut.left * sum(piled.values()) <= _MOST_BLOCKS else 1
            before = self._put_in.pop(cut.begin, [])
            for size, count in piled.items():
                heirs = [[(size, at, turn, cut) for turn in range(blocks)] for at in range(count)]
                for heir in (heir for each in heirs for heir in each):
                    self._sizes[heir] = size * cut.left // blocks
                    self._put_in[cut.begin].append(("alloc", heir, self._sizes[heir]))
                kept = _Kept(passing[size], [list[Hashable](each) for each in heirs])
                for name in names[size]:
                    self._kept[name].append(kept)
            self._put_in[cut.begin] += before

    def _kept_from(self, begin: int, end: int) -> tuple[dict[int, list[Hashable]], Counter[int], dict[int, int]]:
        """Return what a stretch keeps, by size: its names, how many stand for what it has freed, how many do not."""
        stretch = [event for at, event in self._walk(end) if at >= begin]
        freed = {event[1] for event in stretch if event[0] == "free"}
        own = {event[1] for event in stretch if event[0] == "alloc"}
        names: dict[int, list[Hashable]] = defaultdict(list)
        for event in stretch:
            if event[0] == "alloc" and event[2] and event[1] not in freed:
                names[event[2]].append(event[1])
        sizes = Counter(self._sizes.get(name, 0) for name in freed - own)
        passing = _passing({size: len(of_size) for size, of_size in names.items()}, sizes)
        piled = {size: len(of_size) - passing[size] for size, of_size in names.items() if len(of_size) > passing[size]}
        return names, passing, piled


def _passing(kept: Mapping[int, int], freed: Counter[int]) -> Counter[int]:
    """Return how many of what an iteration has kept stand for what it has freed of the one before, by size."""
    passing = Counter({size: min(count, freed[size]) for size, count in kept.items()})
    for size in sorted((freed - passing).elements(), reverse=True):
        ratios = {near: max(near, size) / max(min(near, size), 1) for near in kept if kept[near] > passing[near]}
        nearest = min(ratios, key=ratios.__getitem__, default=0)
        if ratios and ratios[nearest] <= _SCALES:
            passing[nearest] += 1
    return passing

"""One model of a loop: it asks before each iteration, is cut once iterations are alike, and its lists are lengthened.

The first optimizer step allocates the optimizer's state, the second runs with it; after that every iteration is
alike. A loop that can be followed (one of the user's code, see ``loop_hooks``, or one over a ``DataLoader``) asks
before each iteration whether to go on; when it is cut, the code after it is still seen, and each loop around it is cut
in its turn. A loop of a library over anything else is left by ``StopForecast``, and the cell with it. Code without an
optimizer is followed for a few backward passes.

What the iterations that are left out keep alive is reckoned with elsewhere (see ``growth``). What comes after the loop
puts it together: ``torch.cat(outputs)``, ``np.concatenate(scores)``, ``torch.tensor(losses)``. So where a loop is cut,
the last items of each list that every iteration adds to are put into it again, once for each iteration that is left.

Limits: what comes after a training loop of a library is not seen where that loop is not over a ``DataLoader``, or goes
over one for more than one epoch. Lists that a name leads to, of the cell or of a running function of the user's, at
most through one dict or object; loops whose length is known, and that add as many items each time. What NumPy would
make of them is made for real here, so of much no more is put in.
"""

from __future__ import annotations

import inspect
import itertools
import math
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from traceback import walk_stack
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.utils._pytree import tree_iter

from oomdoctor.forecast.growth import Cut
from oomdoctor.objects.kinds import module_of, plain_dict

if TYPE_CHECKING:
    from oomdoctor.forecast.live_storages import Ledger

_STEPS: Final = 2
_STEPS_OF_ONE: Final = 6
"""Steps of one optimizer after which the others, which step less often, are no longer waited for."""
_IDLE_BATCHES: Final = 3
"""Batches without a backward after which a loop is taken to be an evaluation in its steady state."""
_IDLE_WHOLE: Final = 8
_IDLE_PILED: Final = 32
"""One of so many batches is followed to its end, more of them where each leaves something behind: what comes after it
often puts together what each batch gave."""
_BACKWARDS: Final = 4
"""Backward passes that are followed where no optimizer exists to step."""

_MOST_UNLIKE: Final = 64
_MOST_UNLIKE_KNOWN: Final = 8
"""Steps that are followed while each makes tensors of sizes that none before it made; fewer where it is known what the
loop goes over, and so which step is the largest."""
_UNLIKE: Final = 0.005
"""Share of the bytes that a step allocates from which on such sizes matter."""
_RESTS_S: Final = 0.5
"""Time that code after a training is followed at least; it gets as long as the training took to be seen."""
_FEW_MORE: Final = 2
"""Iterations that tell whether memory that rises goes on to rise: tuples of ``zip`` keep every other batch."""


class StopForecast(BaseException):
    """Leaves the cell. Not an ``Exception``, so that the user's handlers do not catch it."""


class Asker(Enum):
    """Who wants the next item: a loop that asks itself, code whose loops ask, or a library, whose loops do not."""

    LOOP = auto()
    CODE = auto()
    LIBRARY = auto()


@dataclass(slots=True, eq=False)
class Loop:
    """One run of a loop that asks before each of its iterations.

    Attributes:
        total: how many iterations it would have, None where that is not known.
        loader: identity of the loader that it goes over, None for other loops.
        turns: how many iterations it has had; ``at``: where in the trace of allocations the last one began, ``level``:
            what was alive there; ``earlier``: where the one before it began.
        steps: steps of each optimizer, loops inside of it included; ``backwards``: backward passes.
        more: iterations that it was given beyond those, because memory was rising.
        varies: whether the last iteration made much of sizes that none before it had made; ``sizes``: those so far,
            and how many.
        is_known: whether it can be told what it would still go over.
        branches: whether a counter decides in it what its iterations do.
        lengths: those of the lists that a name leads to, where each of the last two iterations began.
    """

    total: int | None
    loader: int | None = None
    turns: int = 0
    backwards: int = 0
    at: int = 0
    earlier: int = 0
    level: int = 0
    more: int = 0
    varies: bool = False
    is_known: bool = False
    branches: bool = False
    steps: Counter[int] = field(default_factory=Counter)
    sizes: Counter[int] = field(default_factory=Counter)
    lengths: tuple[dict[int, int], dict[int, int]] = field(default_factory=lambda: ({}, {}))


class LoopModel:
    """Counts optimizer steps, backward passes and iterations.

    Attributes:
        optimizers: optimizers known to exist.
        ended_early: whether a loader was ended before its time.
        has_trained: whether a training loop was followed to its steady state.
        cuts: the loops that were cut.
        lists: those that iterations add to.
        is_counted_on: whether such a thing may have been full before the end of a loop that was cut.
        until: when steps that are unlike each other are followed no longer, by ``time.monotonic``.
        missed: whether a loop was left whose steps were still unlike each other, and it is not known which is largest.
        searches: whether an LBFGS stepped: values decide how far it searches, and so how much it remembers.
        is_partial: whether a loop was cut in which a counter decides, so that other steps may do what none has done.
    """

    def __init__(self, optimizers: int, asker: Callable[[], Asker], ledger: Ledger, lists: KeptLists) -> None:
        """Begin to count; ``asker`` tells who calls, past torch, and ``ledger`` what is alive."""
        self.optimizers = optimizers
        self.ended_early = self.has_trained = False
        self.cuts: list[Cut] = []
        self._asker, self._ledger, self.lists = asker, ledger, lists
        self._running: list[Loop] = []
        self._steps: Counter[int] = Counter()  # those of libraries since a loop asked
        self._backwards = self._all_steps = 0
        self._trained_on: set[int] = set()
        self._first: Loop | None = None
        self._depth = 0
        self._trains_from = self._rests_from = math.inf
        self.is_counted_on = False
        self.until, self.missed = math.inf, False
        self.is_partial = self.searches = False

    @property
    def trains(self) -> bool:
        """Whether there is an optimizer that may yet step, and no training was followed to its steady state."""
        return self.optimizers > 0 and not self.has_trained

    @property
    def rests(self) -> bool:
        """Whether no backward pass has come since a training was seen, for as long as that took."""
        return time.monotonic() - self._rests_from > max(self._rests_from - self._trains_from, _RESTS_S)

    @property
    def share(self) -> float:
        """How many times the followed part of the training loop the whole of it is; 0 where loops were cut without one.

        Of those it is not known how much of them two programs have followed, so that what both cost is not compared.
        """
        if self._first is None:
            return 0.0 if self.cuts else 1.0
        # Of epochs one counts, however many were followed.
        whole = (self._first.total or 0) / self._first.turns
        return whole * self._first.steps.total() / self._all_steps

    def stepped(self, optimizer: object) -> None:
        """Count a finished optimizer step; ``StopForecast`` where nothing new is to be expected of such a loop."""
        self._all_steps += 1
        self.searches = self.searches or type(optimizer) is torch.optim.LBFGS
        for loop in self._running:
            loop.steps[id(optimizer)] += 1
        if self._asker() is Asker.LIBRARY:
            self._steps[id(optimizer)] += 1
            if _is_steady(self._steps):
                raise StopForecast

    def backward_begins(self) -> None:
        """Count a backward pass; those inside another, as reentrant checkpoints make them, are part of it."""
        self._depth += 1
        self._trains_from = min(self._trains_from, time.monotonic())

    def backward_ended(self) -> None:
        """End what ``backward_begins`` began; ``StopForecast`` where a loop that does not ask has no optimizer."""
        self._depth -= 1
        if self._depth:
            return
        self._rests_from = math.inf
        for loop in self._running:
            loop.backwards += 1
        if not self.optimizers and self._asker() is Asker.LIBRARY:
            self._backwards += 1
            if self._backwards >= _BACKWARDS:
                raise StopForecast

    def begins(self, total: int | None = None, loader: int | None = None) -> Loop:
        """Return a new run of a loop that will ask.

        Raises:
            StopForecast: a library goes over a loader again after its training on it was followed: the next epoch.
        """
        if loader in self._trained_on and self._asker() is Asker.LIBRARY:
            raise StopForecast
        return Loop(total, loader)

    def wants_more(self, loop: Loop) -> bool:
        """Whether another iteration of ``loop`` would show anything new.

        A loop over a loader that has no backward is an evaluation, and ends after a few batches; any other may be
        anything, and goes on. A loader whose batches are taken one by one ends with the loop in which they are.
        """
        self._steps.clear()
        self._backwards = 0
        if loop not in self._running:
            self._running.append(loop)
        loop.varies = self._is_unlike(loop)
        asker = Asker.LOOP if loop.loader is None else self._asker()
        if asker is not Asker.CODE and self._is_seen(loop):
            left = None if loop.total is None else loop.total - loop.turns
            self.ended_early = self.ended_early or loop.loader is not None
            self.missed = self.missed or (loop.varies and left != 0 and not loop.is_known)
            if loop.turns and left != 0:
                if self._ledger.live > loop.level and not self.is_counted_on:
                    self.is_counted_on = self.lists.may_be_full()
                self.is_partial = self.is_partial or loop.branches
                self.cuts.append(Cut(loop.at, len(self._ledger.events), left, loop.turns, loop.earlier))
                if left is not None:
                    self.lists.lengthen(loop, left)
            return False
        if loop.turns < _STEPS or loop.loader is not None or loop.steps or loop.backwards:
            self.lists.note(loop)  # of others, which are many and short, none is cut
        loop.turns, loop.earlier, loop.at = loop.turns + 1, loop.at, len(self._ledger.events)
        loop.level = self._ledger.live
        return True

    def branches(self) -> None:
        """Note that a counter decides what the innermost loop of the user's code does."""
        loop = next((loop for loop in reversed(self._running) if loop.loader is None), None)
        if loop is not None:
            loop.branches = True

    def ended(self, loop: Loop) -> None:
        """Note that a loop is over: it has come to its end, was cut or was left."""
        if loop in self._running:
            self._running.remove(loop)
        if self._first is None and loop.steps and loop.total and loop.turns:
            self._first = loop

    def _is_seen(self, loop: Loop) -> bool:
        if _is_steady(loop.steps):
            self.has_trained, self._rests_from = True, min(self._rests_from, time.monotonic())
            if self._rises(loop):
                loop.more += 1
                return False
            if self._goes_on(loop):
                return False
            if loop.loader is not None:
                self._trained_on.add(loop.loader)
            return True
        if not self.optimizers and loop.backwards >= _BACKWARDS:
            return True
        piles_up = loop.turns > 1 and self._ledger.has_risen(loop.level)
        is_short = loop.total is not None and loop.total <= (_IDLE_PILED if piles_up else _IDLE_WHOLE)
        return loop.loader is not None and not loop.backwards and not is_short and loop.turns >= _IDLE_BATCHES

    def _goes_on(self, loop: Loop) -> bool:
        """Whether steps unlike those before them are still to be followed."""
        most = _MOST_UNLIKE_KNOWN if loop.is_known else _MOST_UNLIKE
        return loop.varies and loop.turns < most and time.monotonic() < self.until

    def _is_unlike(self, loop: Loop) -> bool:
        """Whether the last iteration allocated much in sizes of which no iteration before it had as many."""
        if not loop.turns or not (loop.steps or loop.backwards):
            return False
        sizes = Counter(event[2] for event in self._ledger.events[loop.at :] if event[0] == "alloc")
        new = sum(size * count for size, count in (sizes - loop.sizes).items())
        loop.sizes |= sizes
        return loop.turns > 1 and new > _UNLIKE * sum(size * count for size, count in sizes.items())

    def _rises(self, loop: Loop) -> bool:
        """Whether the last iteration left something behind, so that the next may need more; or may let go of it.

        In a loop of unknown length little counts as well: ``enumerate`` lets go of an item with the next but one.
        """
        if loop.more == _FEW_MORE or loop.turns == loop.total:
            return False
        is_open = loop.total is None and not loop.more
        return self._ledger.has_risen(loop.level) or (is_open and self._ledger.live > loop.level)


def _is_steady(steps: Counter[int]) -> bool:
    """Return whether each optimizer that steps has stepped often enough."""
    counts = steps.values()
    return bool(counts) and (min(counts) >= _STEPS or max(counts) >= _STEPS_OF_ONE)


# Lists that iterations add to -----------------------------------------------------------------------------------------


_MOST_ITEMS: Final = 1 << 17
_MOST_BYTES: Final = 1 << 28
_NUMBER_BYTES: Final = 8
"""Of a number in a list of numbers, once it is in an array."""


class KeptLists:
    """Watches the lists that the user's code can name, by their length."""

    def __init__(self, namespace: dict[str, Any], is_users: Callable[[FrameType], bool]) -> None:
        """Begin with none; ``is_users`` tells whether a frame runs code that the user has written."""
        self._namespace, self._is_users = namespace, is_users

    def note(self, loop: Loop) -> None:
        """Take down how long they are where an iteration of ``loop`` begins."""
        loop.lengths = loop.lengths[1], {id(items): len(items) for items in self._of(list)}

    def lengthen(self, loop: Loop, left: int) -> None:
        """Make those to which each of the last two iterations has added as many items as long as they would get."""
        first, second = loop.lengths
        for items in list({id(items): items for items in self._of(list)}.values()):
            begun = second.get(id(items), 0)
            added = len(items) - begun
            if 0 < added == begun - first.get(id(items), 0):
                _extend(items, added, left)

    def complete(self, made: list[Any], cuts: Sequence[Cut]) -> None:
        """Make what a comprehension has made as long as it would get; its own loop was cut last."""
        if made and cuts and cuts[-1].turns == len(made) and cuts[-1].left is not None:
            _extend(made, 1, cuts[-1].left)

    def may_be_full(self) -> bool:
        """Whether a deque of tensors that has a greatest length is not full yet, or there is an ``itertools.cycle``."""
        return any(type(found) is itertools.cycle or _fills_up(found) for found in self._of(deque, itertools.cycle))

    def _of(self, *kinds: type) -> Iterator[Any]:
        """Yield the containers of some types that a name leads to, at most through one dict or object."""
        for value in self._named():
            if type(value) in kinds:
                yield value
            else:
                yield from (item for item in _within(value, self._namespace) if type(item) in kinds)

    def _named(self) -> Iterator[Any]:
        yield from list(self._namespace.values())
        for frame, _ in walk_stack(sys._getframe(1)):
            if frame.f_code.co_flags & inspect.CO_OPTIMIZED and self._is_users(frame):
                found = frame.f_locals
                yield from list(found.values())
                if type(found) is dict:  # before Python 3.13 the frame keeps this copy, and so what its variables were
                    found.clear()


def _fills_up(items: deque[Any]) -> bool:
    has_room = items.maxlen is not None and 0 < len(items) < items.maxlen
    return has_room and any(isinstance(leaf, torch.Tensor) for leaf in tree_iter(items[-1]))


def _extend(items: list[Any], added: int, times: int) -> None:
    last = items[-added:]
    if added * times <= _MOST_ITEMS and sum(map(_real_bytes, last)) * times <= _MOST_BYTES:
        items.extend(last * times)


def _within(value: Any, namespace: dict[str, Any]) -> Iterator[Any]:
    """Yield what a dict holds, or an object of a class of the user's, itself or in its dicts."""
    if type(value) is dict:
        yield from value.values() if value is not namespace else ()
    elif module_of(type(value)) == namespace.get("__name__", "__main__"):
        for item in (plain_dict(value) or {}).values():
            yield item
            yield from item.values() if type(item) is dict else ()


def _real_bytes(item: Any) -> int:
    """Return how much memory an item would take once it is put together with others outside of torch."""
    if type(item) is list:
        return sum(map(_real_bytes, item)) if item and type(item[0]) is list else _NUMBER_BYTES * len(item)
    arrays = sys.modules.get("numpy")
    return int(item.nbytes) if arrays is not None and isinstance(item, arrays.ndarray) else 0

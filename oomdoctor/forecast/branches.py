"""Branches that a loop takes only every so many steps, or from some step on: what is in them is seen once.

A shadow follows the first few steps of a loop. ``if step % 100 == 0`` and ``if epoch >= 5`` decide by a counter alone,
so it can be told beforehand that they will go the other way, and after its last step the loop is given one more in
which they do. Limits: a chain of ``elif`` is seen as far as one such step goes; a counter moves by the same amount each
time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from oomdoctor.forecast.pace import Loop

__all__ = ["Branches"]

_MOST_AHEAD: Final = 50_000
"""Values of a counter that are looked at beforehand; each takes a tenth of a microsecond or two."""
_TWICE: Final = 2
"""What a branch leaves behind is there when it is taken for the second time."""
_MOST_GIVEN: Final = 4
"""Steps that a loop is given: a test may stand in a branch that is not taken in the first of them."""


class _Test:
    """What one ``if`` has answered so far, and how to find out what it will.

    Attributes:
        at: turn of the loop in which it last answered so by itself, by the answer; ``usual``: the later of the two.
        moves: whether the counter has changed since the loop began.
        ahead: how often it will answer otherwise, from when it was first made to, None before that; ``times``: how
            often it was made to in this run of the loop.
        is_own: whether that is in this run of the loop alone, and so again in the next; ``is_last``: whether it does so
            in the last step of all.
    """

    __slots__ = (
        *("ahead", "at", "by", "is_last", "is_own", "is_target", "loop", "moves", "seen", "times", "turns", "usual"),
        "value",
    )

    def __init__(self, loop: Loop, is_target: bool) -> None:
        self.loop, self.is_target = loop, is_target
        self.at: dict[bool, int] = {}
        self.usual = self.moves = self.is_own = self.is_last = False
        self.value, self.by, self.seen, self.times = 0, 1, 0, 0
        self.ahead: int | None = None
        self.turns: Callable[[int], Any] = bool

    def saw(self, value: int, outcome: bool) -> None:
        """Note what it answered by itself."""
        if self.at:
            self.moves = self.moves or value != self.value
            self.by = (value - self.value) // max(self.loop.turns - self.seen, 1) or self.by
        self.value, self.seen = value, self.loop.turns
        self.at[outcome] = self.seen

    def looks_ahead(self, running: Sequence[Loop]) -> int:
        """Return how often it will answer otherwise, and keep that from now on.

        Args:
            running: its loop, after those around it.
        """
        if self.ahead is None:
            self.usual = max(self.at, key=lambda outcome: self.at[outcome])
            self.is_own = self.is_target and (self.moves or len(running) == 1)
            if self.is_own:
                self.ahead = self._turns_within(_left(self.loop))
            elif self.is_target:  # that of the loop around it
                self.ahead = self._turns_within(_left(running[-2])) * (self.loop.total or 1)
            else:
                steps = 0
                for one in running:
                    steps = min(steps * (one.total or _MOST_AHEAD) + _left(one), _MOST_AHEAD)
                self.ahead = self._turns_within(steps)
        return self.ahead

    def _turns_within(self, steps: int) -> int:
        ahead = range(self.value + self.by, self.value + self.by * (steps + 1), self.by)
        try:
            found = [bool(self.turns(value)) is not self.usual for value in ahead]
        except Exception:  # noqa: BLE001  what the user's expression raises for another value is none of ours
            return 0
        self.is_last = found[-1:] == [True]
        return sum(found)

    @property
    def left(self) -> int:
        """How often it will answer otherwise beside the times that it was made to."""
        return 0 if self.ahead is None else max(self.ahead - self.times, 0)


class Branches:
    """The tests of the code that is followed."""

    def __init__(self) -> None:
        self._tests: dict[str, _Test] = {}
        self._forced: dict[str, bool] = {}
        self._last: dict[Loop, set[str]] = {}
        self._times: Counter[str] = Counter()
        self._given: Counter[Loop] = Counter()
        self._piling: set[str] = set()

    def answer(
        self, outcome: Any, key: str, turns: Callable[[int], Any], value: Any, is_target: bool, loop: Loop | None
    ) -> Any:
        """Return what the test answers: what it does by itself, or the other thing in the one step that is for it.

        Args:
            outcome: by itself.
            key: tells tests apart.
            turns: what it answers for another value of its counter.
            value: that of the counter.
            is_target: whether a ``for`` sets it, so that it begins anew with its loop.
            loop: the innermost one that is running.
        """
        if type(value) is not int or type(outcome) is not bool or loop is None:
            return outcome
        test = self._tests.get(key)
        if test is None or test.loop is not loop:
            test = self._tests[key] = _Test(loop, is_target)
        test.turns = turns
        test.saw(value, outcome)
        if key not in self._forced:
            return outcome
        self._times[key] += 1
        test.times += 1
        return self._forced.pop(key)

    def force(self, running: Sequence[Loop], leaves: Callable[[int, int], bool]) -> bool:
        """Begin a step of the innermost loop in which tests go the other way; return whether there is any that will.

        Args:
            running: that loop, after those around it.
            leaves: whether what the loop left behind in this turn, so many times, matters.
        """
        loop = running[-1]
        if self._given[loop] == _MOST_GIVEN:
            return False
        mine = {key: test for key, test in self._tests.items() if test.loop is loop}
        found = {key for key, test in mine.items() if self._wants(key, test, test.looks_ahead(running), leaves)}
        self._given[loop] += bool(found)
        return self._force(loop, found)

    def _wants(self, key: str, test: _Test, ahead: int, leaves: Callable[[int, int], bool]) -> bool:
        """Whether what a test decides is to be seen once more."""
        if key in self._piling:
            return test.is_own and not test.times and ahead > 0
        by_itself, times = test.at.get(not test.usual), self._times[key]
        if times >= ahead or times + (by_itself is not None) >= _TWICE:
            return False
        return by_itself is None or leaves(by_itself, ahead)

    def _force(self, loop: Loop, found: set[str]) -> bool:
        others = {key: answer for key, answer in self._forced.items() if self._tests[key].loop is not loop}
        self._forced = others | {key: not self._tests[key].usual for key in found}
        if found:
            self._last[loop] = found
        return bool(found)

    def left(self, loop: Loop) -> int:
        """Return how many more steps there are in which all go the other way that still will."""
        return min((self._tests[key].left for key in self._to_go(loop)), default=0)

    def _to_go(self, loop: Loop) -> set[str]:
        return {key for key, test in self._tests.items() if test.loop is loop and test.times and test.left}

    def were_all(self, loop: Loop) -> bool:
        """Whether those that were forced last are all that still go the other way."""
        return self._last.get(loop) == self._to_go(loop)

    def every(self, loop: Loop) -> float:
        """Return how many steps there are to one of these, where it is not known how many there are."""
        return _MOST_AHEAD / min((self._tests[key].ahead or 1 for key in self._to_go(loop)), default=1)

    def piles_up(self, loop: Loop) -> None:
        """Note that such steps leave something behind: those of the next run of the loop will, too."""
        self._piling |= self._last.get(loop, set())

    def reckon(self, loop: Loop) -> None:
        """Note that so many such steps are reckoned with."""
        left = self.left(loop)
        for key in self._to_go(loop):
            self._tests[key].times += left

    def force_all(self, loop: Loop) -> bool:
        """Begin a step in which all go the other way that still will; return whether there are any."""
        return self._force(loop, self._to_go(loop))

    def are_last(self, loop: Loop) -> bool:
        """Whether the last step of the loop is one in which they go the other way."""
        return any(test.is_last and test.times for test in self._tests.values() if test.loop is loop)

    def of_run(self, loop: Loop) -> int:
        """Return how many steps of this run of a loop, from its cut on, are other than the usual one."""
        return max((test.ahead or 0 for test in self._tests.values() if test.loop is loop and test.is_own), default=0)

    def ended(self, loop: Loop) -> None:
        """Forget the tests of a loop that is over, and what they hold."""
        del self._given[loop]
        self._last.pop(loop, None)
        for key in [key for key, test in self._tests.items() if test.loop is loop]:
            del self._tests[key]
            self._forced.pop(key, None)


def _left(loop: Loop) -> int:
    return _MOST_AHEAD if loop.total is None else min(loop.total - loop.turns, _MOST_AHEAD)

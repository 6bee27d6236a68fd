"""Finds the mildest dose that fits, with as few forecasts as there need be.

A forecast costs seconds, and doses come in order of strength, so the first that fits is closed in on from both sides:
where an estimate points at first, at the middle of what is left once that has missed twice. This needs the peak to fall
from each dose to the next; where it does not, what is found fits all the same, but may not be the mildest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

_POINTED: Final = 3
"""Questions that go where the estimate points; those after them halve what is left."""


class Search:
    """The search among the doses of one change: it says what to ask next and is told the answers.

    Args:
        count: how many doses there are, mildest first.

    Attributes:
        asked: the dose that an answer is awaited for, None where there is none.
    """

    def __init__(self, count: int) -> None:
        self._low, self._high, self._count = -1, count, count
        self._answers = 0
        self._ended = False
        self.asked: int | None = None

    @property
    def found(self) -> int | None:
        """The mildest dose that is known to fit."""
        return self._high if self._high < self._count else None

    @property
    def open(self) -> range:
        """The doses that may yet be the mildest that fits, apart from the one that was found."""
        return range(self._low + 1, self._high)

    @property
    def over(self) -> bool:
        """Whether nothing is left to ask."""
        return self._ended or not self.open

    def ask(self, points_at: Callable[[range], int | None]) -> int | None:
        """Return the dose to forecast next, None where the search is over or waits for an answer.

        Args:
            points_at: returns the one of some doses that is likely to be the mildest that fits, None where none is.
        """
        if self.over or self.asked is not None:
            return None
        self.asked = self._pointed(points_at) if self._answers < _POINTED else self.open[len(self.open) // 2]
        return self.asked

    def _pointed(self, points_at: Callable[[range], int | None]) -> int:
        # Where none is thought to fit, the strongest is asked: it settles whether there is one, or that the one below
        # what was found does not fit either.
        pointed = points_at(self.open)
        return self.open[-1] if pointed is None else pointed

    def answer(self, fits: bool) -> None:
        """Take the answer for the dose that was asked."""
        assert self.asked is not None
        self._answers += 1
        if fits:
            self._high = self.asked
        else:
            self._low = self.asked
        self.asked = None

    def leave_out_from(self, dose: int) -> None:
        """Leave out this dose and all stronger ones: they cannot be made."""
        self._count = min(self._count, dose)
        self._high = min(self._high, dose)
        self.asked = None

    def end(self) -> None:
        """Ask nothing more."""
        self.asked, self._ended = None, True

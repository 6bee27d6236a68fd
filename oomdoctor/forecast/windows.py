"""Loops that pile something up, followed for a while to see whether they let go of it again.

A list that is cut to its last items, a dictionary that is written over, a queue that is emptied when it is full: what a
loop keeps rises for some iterations, and then no more. Which it is cannot be seen from outside, so such a loop is
followed until nothing rises. Where all is let go of at once, the next time that it is so is waited for: what came of it
is still there then. Limits: a shadow may spend so many operations on this; what is let go of later is reckoned with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from oomdoctor.forecast.ledger import Ledger
    from oomdoctor.forecast.pace import Loop

_MOST_OPERATIONS: Final = 6_000
"""A tenth of a millisecond each, or two."""
_UNKNOWN: Final = 100
"""Iterations that a loop of unknown length is taken to have left where it is asked whether a rise matters."""


class _Watch:
    """What is known of a loop: operations before its last iteration, which one let go of much, how many were alike."""

    __slots__ = ("clock", "fell", "still")

    def __init__(self, clock: int) -> None:
        self.clock, self.fell, self.still = clock, 0, 0


class Windows:
    """Tells which loops are to be followed further."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger, self._left = ledger, _MOST_OPERATIONS
        self._watched: WeakKeyDictionary[Loop, _Watch] = WeakKeyDictionary()

    def may_close(self, loop: Loop, left: int | None) -> bool:
        """Whether what the loop piles up may yet be let go of.

        Args:
            loop: one that is about to be cut.
            left: iterations that it would still have, None where that is not known.
        """
        ledger, watch = self._ledger, self._watched.get(loop)
        if watch is not None:
            self._left -= ledger.clock - watch.clock
        if left == 0 or self._left <= 0:
            return False
        rises = ledger.is_much((ledger.live - loop.level) * (_UNKNOWN if left is None else left))
        if watch is None:
            if rises:
                self._watched[loop] = _Watch(ledger.clock)
            return rises
        watch.clock = ledger.clock
        if ledger.is_much(loop.level - ledger.live):
            fell_before, watch.fell = watch.fell, loop.turns
            return not fell_before
        watch.still = 0 if rises else watch.still + 1
        return watch.still < 2 or loop.turns <= 2 * watch.fell

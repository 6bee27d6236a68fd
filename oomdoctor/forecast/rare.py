"""The steps of a loop in which its branches go the other way: what they leave behind is there once for each of them.

They are followed until they are alike, as the usual steps are, and then reckoned with as often as they will come. Where
several branches are taken each so often, they are taken together as often as the rarest of them, the others without it
as often as the rarest of these, and so on. Limits: what is left behind by each is taken to add up; branches that are
never taken in the same step are reckoned as if they were.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from oomdoctor.forecast.steady import Cut

if TYPE_CHECKING:
    from oomdoctor.forecast.branches import Branches
    from oomdoctor.forecast.ledger import Ledger
    from oomdoctor.forecast.pace import Loop
    from oomdoctor.forecast.windows import Windows

__all__ = ["Rare"]


class Rare:
    """Gives loops that are cut such steps.

    Args:
        branches: those that are followed.
        windows: tells whether what piles up may yet be let go of.
        cuts: where it is noted what is left out.
        fills: fills what piles up only so far, and returns whether there was anything.
    """

    def __init__(
        self,
        branches: Branches,
        ledger: Ledger,
        windows: Windows,
        cuts: list[Cut],
        fills: Callable[[Loop, int], bool],
    ) -> None:
        self._branches, self._ledger, self._windows, self._cuts = branches, ledger, windows, cuts
        self._fills = fills

    def goes_on(self, steps: Loop, running: Sequence[Loop], *, is_over: bool) -> bool:
        """Whether the loop is to have one more step, in which branches go the other way.

        Args:
            steps: stands for those that it was given.
            running: the loop, after those around it.
            is_over: whether it has no more.
        """
        loop, branches = running[-1], self._branches
        begins = not is_over and branches.force(running, partial(self._leaves, loop))
        if not begins and steps.turns:
            begins = self._piles_up(steps, loop, is_over)
            if not begins and steps.rise and not steps.more and not is_over and not branches.are_last(loop):
                begins, steps.more = True, 1  # what was piled up last is there in the usual step that follows
        if begins:
            steps.turns, steps.at, steps.level = steps.turns + 1, len(self._ledger.events), self._ledger.live
        elif loop.cut is not None and self._cuts[loop.cut].left is not None:
            usual = self._cuts[loop.cut]
            self._cuts[loop.cut] = usual._replace(left=max((usual.left or 0) - branches.of_run(loop), 0))
        return begins

    def _piles_up(self, steps: Loop, loop: Loop, is_over: bool) -> bool:
        """Reckon with what these steps leave behind; return whether another one is begun."""
        branches, ledger = self._branches, self._ledger
        left, rise = branches.left(loop), ledger.live - steps.level
        if steps.more or not ledger.is_much(rise * (left + 1)):
            return False
        branches.piles_up(loop)
        steps.rise = rise
        were_all = branches.were_all(loop)
        if were_all and (is_over or not (self._fills(steps, left) or self._windows.may_close(steps, left))):
            every = 1.0 if loop.total is not None else branches.every(loop)
            known = left if loop.total is not None else None
            self._cuts.append(Cut(steps.at, len(ledger.events), known, steps.turns + 1, every))
            branches.reckon(loop)
        return not is_over and branches.force_all(loop)

    def _leaves(self, loop: Loop, turn: int, times: int) -> bool:
        """Whether what a step of the loop left behind, and the usual one does not, matters so many times."""
        if not 0 < turn < len(loop.begins):
            return False
        kept = self._ledger.kept(loop.begins[turn - 1], loop.begins[turn])
        return self._ledger.is_much(abs(kept - loop.rise) * times)

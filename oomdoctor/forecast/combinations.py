"""Changes put together: settings of the allocator beside a dose, and two changes that save most.

Two are put together only where no single one fits: none that keeps the result, for two that keep it, and none at all,
for others. Before that, settings of the allocator are put beside what is known already: the trace of each dry run tells
what it needs with them.
"""

from __future__ import annotations

import math
from itertools import combinations
from typing import Final

from oomdoctor.forecast.dose_search import Change, Part, Parts
from oomdoctor.forecast.dry_run_result import Reading
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.plan import Forecast
from oomdoctor.model.session import Session
from oomdoctor.model.unavailable import Refused

_SAVES: Final = 0.98
"""A fix that leaves more than this share of the peak is none to put beside another."""
_PAIRED: Final = 4
"""So many of the fixes that save most are put together by twos."""
_STEPS: Final = 4
"""So many doses of two together are asked about, the strongest: no single one was enough in its own strongest."""


class Combinations:
    """What is put together of the changes of a plan, and added to them.

    Attributes:
        settings: of the allocator, to be put beside changes.
        evidence: what changes are written from.
    """

    def __init__(self, changes: list[Change], session: Session, evidence: Evidence) -> None:
        self._changes, self._session, self.evidence = changes, session, evidence
        self.settings: list[Part] = []
        self._readings: list[tuple[Change, int, Reading]] = []
        self._pairs: list[tuple[Change, Change]] | None = None

    def note(self, change: Change, index: int, reading: Reading) -> None:
        """Note the dry run of a dose."""
        self._readings.append((change, index, reading))

    def put_together(self, peak: int) -> bool:
        """Put changes together, as no single one was enough; return whether there is something new to ask.

        ``peak`` is what the unchanged cell needs, in bytes.
        """
        self.set_allocator_beside()
        if self._pairs is None:
            self._pairs = self._possible_pairs(peak)
        while self._pairs:
            pair = self._pairs.pop(0)
            if any(_beats(done, pair) for done in self._changes):
                continue
            change = self._of_two(pair, _STEPS, peak)
            if not isinstance(change.attempt(len(change.doses) - 1), Refused):
                self._changes.append(change)
                return True
        return False

    def offer_unpriced(self, peak: int, why: str) -> None:
        """Offer two changes that keep the results in their strongest doses, which ``why`` have no forecast."""
        for pair in self._possible_pairs(peak):
            change = self._of_two(pair, 1, peak)
            alike = [done for done in self._changes if done.fixes == change.fixes]
            is_known = any(done.told or done.breaks or done.refused is not None for done in alike)
            if change.effect.keeps_results and not is_known and not isinstance(change.attempt(0), Refused):
                change.why, change.is_last = why, True
                self._changes.append(change)
                return

    def set_allocator_beside(self) -> None:
        """Put settings of the allocator beside the mildest dose for which they are enough, if nothing is without."""
        if any(change.search.found is not None and change.effect.keeps_results for change in self._changes):
            return
        for change, index, reading in sorted(self._readings, key=lambda one: (one[0].place, one[1])):
            if change.effect.keeps_results and index in change.told:
                self.set_allocator(change.doses[index], reading, change.told[index])
        self._readings.clear()

    def set_allocator(self, parts: Parts, reading: Reading, told: Forecast) -> None:
        """Offer settings of the allocator beside a dose, where the trace of its dry run fits with them.

        The dose is empty for the unchanged cell; ``told`` is its forecast without them.
        """
        for part in self.settings:
            forecast = reading.with_settings(part.fix.allocates, told)
            change = Change(len(self._changes), [(*parts, part)], self._session, self.evidence)
            there = next((done for done in self._changes if done.fixes == change.fixes), None)
            if there is not None and not there.told:
                there.take(forecast or told)
            elif there is None and forecast and forecast.fits and not isinstance(change.attempt(0), Refused):
                change.take(forecast)
                self._changes.append(change)

    def _of_two(self, pair: tuple[Change, Change], steps: int, peak: int) -> Change:
        """Return two changes together in their strongest doses, each thought to leave its share of what is left."""
        left = math.prod(change.least_told() / peak for change in pair)
        return Change(len(self._changes), _steps_of_two(*pair)[-steps:], self._session, self.evidence, left)

    def _possible_pairs(self, peak: int) -> list[tuple[Change, Change]]:
        """Return the pairs to try, those that keep the result and save most first."""
        left = {
            change.place: change.least_told() / peak
            for change in self._changes
            if change.refused is None and change.is_single and change.told and not change.breaks and change.joins
        }
        saving = [change for change in self._changes if left.get(change.place, 1.0) < _SAVES]
        saving.sort(key=lambda one: left[one.place])
        keeping = [change for change in saving if change.effect.keeps_results][:_PAIRED]
        pairs = dict.fromkeys([*combinations(keeping, 2), *combinations(saving[:_PAIRED], 2)])

        def order(pair: tuple[Change, Change]) -> tuple[bool, float]:
            return not all(one.effect.keeps_results for one in pair), left[pair[0].place] * left[pair[1].place]

        return sorted(pairs, key=order)


def _beats(done: Change, pair: tuple[Change, Change]) -> bool:
    keeps = all(one.effect.keeps_results for one in pair)
    return done.search.found is not None and (done.effect.keeps_results or not keeps)


def _steps_of_two(first: Change, second: Change) -> list[Parts]:
    """Return the doses of two changes together: each step makes the one stronger that has the more steps left."""
    at, ends = [0, 0], (len(first.doses) - 1, len(second.doses) - 1)
    doses = [(*first.doses[0], *second.doses[0])]
    while at != list(ends):
        which = 0 if ends[0] - at[0] >= ends[1] - at[1] else 1
        at[which] += 1
        doses.append((*first.doses[at[0]], *second.doses[at[1]]))
    return doses

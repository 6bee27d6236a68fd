"""Decides which forecasts to make, and makes the plan of what they say.

The change that is likeliest to be the best is searched first, by the order in which the plan ranks what is known of
them. See ``dose_search`` for the doses of one, and ``combinations`` for what is put together where no single one fits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from oomdoctor.errors import ForecastError
from oomdoctor.forecast.attempts import unfixed
from oomdoctor.forecast.combinations import Combinations
from oomdoctor.forecast.dose_search import Change, Part, Supposed, taken_at_its_word
from oomdoctor.forecast.dry_run_result import Reading, late
from oomdoctor.forecast.live_storages import allocator_settings
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Effect, Fix
from oomdoctor.model.incident import Incident
from oomdoctor.model.memory import LASTING, Role
from oomdoctor.model.plan import Candidate, Forecast, Plan, Verdict
from oomdoctor.model.session import Attempt, Session
from oomdoctor.model.unavailable import Refused, Unavailable

if TYPE_CHECKING:
    from oomdoctor.forecast.dry_runs import DryRuns

_VERDICTS: Final = (Verdict.FITS, Verdict.BORDERLINE, Verdict.UNKNOWN, Verdict.TOO_LARGE)
_EFFECTS: Final = tuple(Effect)
PENDING: Final = "its dry run is still running"
_ENOUGH: Final = "a fix that keeps the results fits already"
_SEEN: Final = 0.95
"""A dry run that needs less than this share of what was held and asked for has not seen what fills the memory."""
_UNCHANGED_UNSEEN: Final = 0.3
"""How far off a forecast of a changed cell is taken to be where the unchanged one could not be forecast."""
_PASSES: Final = 2
"""How many times what passed when it failed is supposed to pass, where no dry run tells it."""
_KEPT: Final = 4
"""How many times its parameters a training is supposed to keep: with gradients and the two states of Adam."""
_MUCH: Final = 4 / 3
"""Ratio of times from which on a retry waits for the forecast of the change that promises the shorter one."""


class Planner:
    """Decides what to forecast next, and makes the plan of what is known."""

    def __init__(
        self,
        session: Session,
        incident: Incident,
        evidence: Evidence,
        fixes: Sequence[Fix],
        budget: int | None,
        leaks: frozenset[str],
        time_budget_s: float,
        *,
        is_hurried: bool = False,
    ) -> None:
        self._session, self._incident, self._evidence, self._fixes = session, incident, evidence, fixes
        self._budget, self._leaks, self.time_budget_s = budget, leaks, time_budget_s
        self._is_hurried = is_hurried
        self._changes: list[Change] = []
        self._refusals: list[tuple[str, str]] = []
        self._unchanged: Forecast | None = None
        self._cost: float | None = None
        self._is_blind = False
        self._waiting: list[tuple[Change, int, Reading]] = []
        self._combinations = Combinations(self._changes, session, evidence)

    # How it goes ------------------------------------------------------------------------------------------------

    def plans(self, dry_runs: DryRuns) -> Iterator[Plan]:
        """Yield the plan as it stands, again and again, while dry runs are made."""
        dry_runs.others = [fix.allocates for fix in self._fixes if fix.allocates]
        dry_runs.begin(None, unfixed(self._session))
        self._propose()
        yield self.plan()
        while True:
            while dry_runs.has_room and (asked := self._ask()) is not None:
                change, index, attempt = asked
                dry_runs.begin((change.place, index, change.search), attempt)
            if not dry_runs.busy:
                break
            answer = dry_runs.next()
            if answer is None:
                break
            self._answer(*answer)
            yield self.plan()
            if self._is_hurried and self._has_healer():
                break
        self._end()
        yield self.plan()

    def estimated(self, why: str) -> Plan:
        """Return the plan by estimates alone."""
        if not self._changes:
            self._propose()
        self._unchanged = self.least(why)
        return self.plan()

    def plan(self) -> Plan:
        """Return the plan by what is known."""
        unchanged = self._unchanged_so_far
        scale, supposed = self._scale(unchanged), self._supposed(unchanged)
        offered = [
            change.candidate(*change.settled(unchanged, scale, supposed))
            for change in self._changes
            if change.is_offered
        ]
        refusals = [(one.fixes[0], one.refused) for one in self._changes if one.refused is not None and one.is_single]
        made = {fix for change in self._changes for fix in change.fixes}
        refusals += [
            (part.fix.id, part.proposal.basis) for part in self._combinations.settings if part.fix.id not in made
        ]
        return Plan(
            unchanged=unchanged,
            candidates=tuple(sorted(offered, key=self._rank)),
            refusals=(*self._refusals, *refusals),
        )

    def _rank(self, candidate: Candidate) -> tuple[object, ...]:
        """Order by: fits, frees a leak, keeps the result, is known by more than an estimate, costs least, is least.

        Last is what failed in its dry run, though it may be for what only such a run has.

        Of those that nobody can say it of, what would fit if no more were needed than is known of comes first, and
        last an estimate that would not fit even if it were as far too high as such estimates are.
        """
        keeps = candidate.effect.keeps_results
        return (
            candidate.breaks,
            _VERDICTS.index(candidate.forecast.verdict),
            taken_at_its_word(candidate.forecast).fits is not True,
            candidate.forecast.is_hopeless,
            not self._frees_leak(candidate),
            0 if keeps else _EFFECTS.index(candidate.effect),
            candidate.forecast.estimated is not None,
            self._doubted(candidate.forecast),
            candidate.forecast.slowdown or 1.0,
            len(candidate.made_of),
        )

    def _doubted(self, forecast: Forecast) -> int:
        """Return the bytes of an estimate that is in doubt, 0 for others.

        Of those, what needs least is likeliest to be enough. Where a dry run told more than what was held at the
        failure, one that would fit even if it were off as such are is not in doubt.
        """
        has_run = self._unchanged is not None and self._unchanged.refused is None
        if not (forecast.estimated and forecast.at_least) or (has_run and taken_at_its_word(forecast).fits):
            return 0
        return forecast.peak or 0

    # What is asked ----------------------------------------------------------------------------------------------

    def _propose(self) -> None:
        for fix in self._fixes:
            proposals = fix.propose(self._incident, self._evidence)
            if isinstance(proposals, Refused):
                self._refusals.append((fix.id, proposals.reason))
                continue
            doses = [(Part(fix=fix, proposal=proposal),) for proposal in proposals]
            if fix.allocates:
                self._combinations.settings += [part for part, *_ in doses]
            if fix.allocates and not any(proposal.saves for proposal in proposals):
                continue  # offered only where a dry run tells that it is enough
            change = Change(len(self._changes), doses, self._session, self._evidence)
            self._changes.append(change)
            change.attempt(0)

    def _ask(self) -> tuple[Change, int, Attempt] | None:
        """Return what to forecast next: of the change that is likeliest to be the best, what its search asks."""
        unchanged = self._unchanged_so_far
        scale = self._scale(unchanged)
        known = self._supposed(unchanged) or (unchanged, scale)
        while True:
            # Before a retry, those that keep the results come first, also where they wait for what is measured.
            waits = self._is_hurried and any(one.effect.keeps_results and one.is_open for one in self._changes)
            for change in sorted(self._changes, key=self._promise):
                if waits and not change.effect.keeps_results:
                    continue
                if not self._is_settled(change) and (asked := change.ask(*known)) is not None:
                    return change, *asked
            are_asked = self._unchanged is not None and all(map(self._is_settled, self._changes))
            if not (are_asked and unchanged.peak is not None and self._combinations.put_together(unchanged.peak)):
                return self._ask_ahead()

    def _ask_ahead(self) -> tuple[Change, int, Attempt] | None:
        """Return a dose to forecast beside the one that is awaited, where a processor would wait with the user."""
        is_early = self._unchanged is None or not self._is_hurried
        for change in () if is_early else sorted(self._changes, key=self._promise):
            if change.refused is None and change.effect.keeps_results and (asked := change.ask_ahead()) is not None:
                return change, *asked
        return None

    def _has_healer(self) -> bool:
        """Return whether a change that keeps the results was seen to fit in its mildest dose.

        No leak is open then, and nothing that keeps them too, may fit, and promises much less time.
        """
        keeping = [one for one in self._changes if one.effect.keeps_results]
        found = [one for one in keeping if one.search.found is not None and self._is_mildest(one)]
        if not found or any(not self._is_settled(one) and self._leaks.intersection(one.fixes) for one in keeping):
            return False
        times = [self._known(one).forecast.slowdown or 1.0 for one in found]
        others = [self._known(one).forecast for one in keeping if one.is_open and one not in found]
        return min(times) <= _MUCH * min((one.slowdown or 1.0 for one in others if _may_fit(one)), default=math.inf)

    def _is_mildest(self, change: Change) -> bool:
        """Return whether the dose that was found to fit is the mildest that does, for all that is known."""
        unchanged = self._unchanged
        if change.search.over or unchanged is None:
            return change.search.over
        return change.points_at(change.search.open, unchanged, self._scale(unchanged)) is None

    def _is_settled(self, change: Change) -> bool:
        is_early = self._unchanged is None and any(part.fix.is_measured for part in change.doses[0])
        is_told_by_others = all(part.fix.allocates for part in change.doses[0])
        is_unasked = change.refused is not None or change.effect is Effect.ADVICE or is_told_by_others
        return is_unasked or change.search.over or is_early

    def _frees_leak(self, candidate: Candidate) -> bool:
        return any(fix in self._leaks for fix, _ in candidate.made_of)

    def _known(self, change: Change) -> Candidate:
        """Return a change as it would be offered by what is known so far, nothing supposed."""
        unchanged = self._unchanged_so_far
        return change.candidate(*change.settled(unchanged, self._scale(unchanged), None))

    def _promise(self, change: Change) -> tuple[object, ...]:
        """Order by what may be enough and keeps the results, then as the plan ranks what is known."""
        if change.refused is not None:
            return (True,)
        candidate = self._known(change)
        is_first = _may_fit(candidate.forecast) and (candidate.effect.keeps_results or self._frees_leak(candidate))
        return (not is_first, *self._rank(candidate), change.place)

    # What is answered -------------------------------------------------------------------------------------------

    def _answer(self, key: Any, reading: Reading) -> None:
        if key is None:
            self._unchanged = self._judged(reading)
            self._measure(reading)
            self._combinations.set_allocator((), reading, self._unchanged)
            waiting, self._waiting = self._waiting, []
            for one in waiting:
                self._tell(*one)
            return
        place, index, search = key
        change = self._changes[place]
        if change.search is not search:  # it is written in another way since
            return
        if self._unchanged is None:
            self._waiting.append((change, index, reading))
        else:
            self._tell(change, index, reading)

    def _measure(self, reading: Reading) -> None:
        """Make the doses anew of those changes that choose by what each module keeps."""
        self._evidence = self._combinations.evidence = replace(self._evidence, modules=reading.modules)
        for change in self._changes:
            fix = change.doses[0][0].fix
            if reading.modules and change.is_single and fix.is_measured and change.refused is None:
                proposals = fix.propose(self._incident, self._evidence)
                if isinstance(proposals, Refused):
                    continue  # graphs may lie otherwise than that tells: a dry run does
                doses = [(Part(fix=fix, proposal=one),) for one in proposals]
                self._changes[change.place] = Change(change.place, doses, self._session, self._evidence)
                self._changes[change.place].attempt(0)

    def _tell(self, change: Change, index: int, reading: Reading) -> None:
        if change.refused is not None or change.search.over or index not in change.search.open:
            return  # another answer has told it since
        unchanged = self._unchanged
        assert unchanged is not None
        forecast = reading.priced(self._budget, self._cost)
        has_run = self._cost is not None  # unchanged, for all that it may have seen too little
        if reading.is_unfit or (reading.breaks and has_run):
            change.find_unfit(index, forecast.refused or "")
            return
        if forecast.refused is not None:
            change.why = late(self.time_budget_s) if reading.is_late else forecast.refused
            change.breaks = has_run and not reading.is_late
            change.search.end()
            return
        if unchanged.refused is not None:
            forecast = replace(forecast, error_ratio=_UNCHANGED_UNSEEN)
        if self._is_blind:
            # A dry run that did not see what fills the memory unchanged does not see it with the fix either.
            estimate = change.estimate(index, unchanged, self._scale(unchanged))
            peak = max(filter(None, (forecast.peak, estimate.peak)), default=None)
            told = replace(estimate, peak=peak, at_least=True, refused=unchanged.refused)
            forecast = replace(told, slowdown=forecast.slowdown)
        change.told[index] = forecast
        self._combinations.note(change, index, reading)
        # What comes after the training is not seen with any dose.
        seen = replace(forecast, at_least=forecast.at_least and not reading.left_early)
        change.search.answer(index, fits=seen.verdict is Verdict.FITS)

    def _judged(self, reading: Reading) -> Forecast:
        """Return the forecast of the unchanged cell; where it saw too little, what it held and asked for."""
        forecast = reading.priced(self._budget, reading.cost)
        if forecast.refused is not None:
            return self.least(late(self.time_budget_s) if reading.is_late else forecast.refused)
        self._cost = reading.cost
        least = self.least("").peak
        if least is None or (forecast.peak or 0) >= _SEEN * least:
            return forecast
        self._is_blind = True
        unseen = "memory grows over later steps, or is not that of tensors"
        return self.least(f"a dry run of a few steps stays below what was seen: {unseen}")

    def _end(self) -> None:
        if self._unchanged is None:
            self._unchanged = self.least(late(self.time_budget_s))
        for one in self._waiting:
            self._tell(*one)
        for change in self._changes:
            if not change.search.over and change.refused is None and change.why is None:
                change.why = _ENOUGH if self._has_healer() and self._is_hurried else late(self.time_budget_s)
        self._combinations.set_allocator_beside()
        known = ((one, self._known(one).forecast) for one in self._changes if one.is_offered)
        may_heal = any(one.effect.keeps_results and _may_fit(forecast) for one, forecast in known)
        if self._unchanged.peak is not None and not may_heal:
            self._combinations.offer_unpriced(self._unchanged.peak, late(self.time_budget_s))

    # What the cell needs unchanged ------------------------------------------------------------------------------

    @property
    def _unchanged_so_far(self) -> Forecast:
        return self._unchanged or self.least(PENDING)

    def least(self, why: str) -> Forecast:
        """Return what the cell held and asked for when it failed, where it cannot be known how it goes on."""
        allocated, asked = self._evidence.device.allocated, self._incident.requested or 0
        if asked and self._evidence.device.name != "cpu":
            with suppress(ForecastError):
                asked = allocator_settings(self._session.accelerator).least_asked(asked)
        return Forecast(
            basis="lower bound: held plus requested when it failed",
            budget=self._budget,
            peak=None if isinstance(allocated, Unavailable) else allocated + asked,
            at_least=True,
            refused=why,
        )

    def _supposed(self, unchanged: Forecast) -> Supposed:
        """Return what is supposed to be needed, and its scale, where no dry run tells more than the least.

        What was there when it failed was full, by gaps as well.
        """
        allocated = self._evidence.device.allocated
        if not unchanged.refused or unchanged.peak is None or isinstance(allocated, Unavailable) or self._is_blind:
            return None
        bytes_of = self._evidence.census.bytes_of
        stays = max(allocated - self._seen + (self._incident.requested or 0), 0)
        passing = _PASSES * (max(unchanged.peak, self._budget or 0) - stays)
        stays += max(_KEPT * bytes_of(Role.PARAMETER) - sum(map(bytes_of, LASTING)), 0)
        return replace(unchanged, peak=stays + passing, at_least=False), passing / max(self._seen, 1)

    @property
    def _seen(self) -> int:
        """Bytes that estimates are made of: activations and batch that were held, and what was asked for."""
        bytes_of = self._evidence.census.bytes_of
        return bytes_of(Role.ACTIVATION) + bytes_of(Role.BATCH) + (self._incident.requested or 0)

    def _scale(self, unchanged: Forecast) -> float:
        """Return how much larger the activations at the peak are than those held and asked for at the failure."""
        allocated, seen = self._evidence.device.allocated, self._seen
        if unchanged.peak is None or isinstance(allocated, Unavailable) or not seen:
            return 1.0
        return max(1.0, (unchanged.peak - allocated + seen - (self._incident.requested or 0)) / seen)


def _may_fit(forecast: Forecast) -> bool:
    return taken_at_its_word(forecast, 0.0).fits is not False

"""One change in all its doses: what each is estimated to need, how the cell is run with it, what forecasts have said.

An estimate of what a dose saves comes from the census alone. Once a dry run of one dose is known, the estimates of
the others are measured by it: what that dose really saved over what it was thought to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Final

from oomdoctor.forecast.attempts import attempt_with_all
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Effect, Fix, Patch, Proposal
from oomdoctor.model.memory import LASTING
from oomdoctor.model.plan import FROM_FAILURE, FROM_PEAK, Candidate, Forecast, Verdict
from oomdoctor.model.session import Attempt, Session
from oomdoctor.model.unavailable import Refused

_CAUTION: Final = 0.3
"""How far off an estimate is taken to be where it decides what to forecast or to try first."""
_POINTED: Final = 3
"""Questions that go where the estimate points; those after them halve what is left."""
_WAYS: Final = 3
"""Ways to write one change that have a dry run, where it breaks in each before."""
_EFFECTS: Final = tuple(Effect)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One fix in one dose; a change is made of one or several."""

    fix: Fix
    proposal: Proposal


Parts = tuple[Part, ...]
"""A dose of the whole change: a part for each of its fixes."""
Supposed = tuple[Forecast, float] | None
"""What the unchanged cell is supposed to need, and how much larger the activations are than those held."""


class Search:
    """The search for the mildest dose of one change that fits: it says what to ask next and is told the answers.

    The first that fits is closed in on from both sides: where an estimate points at first, at the middle of what is
    left once that has missed. This needs the peak to fall from each dose to the next; where it does not, what is found
    fits all the same, but may not be the mildest.

    Args:
        count: how many doses there are, mildest first.

    Attributes:
        asked: the dose that an answer is awaited for, None where there is none.
        ahead: a stronger one that is asked about meanwhile, None where none is. Answers may come for doses that are
            no longer awaited: they are not ``open``, and tell nothing.
    """

    def __init__(self, count: int) -> None:
        self._low, self._high, self._count = -1, count, count
        self._answers = 0
        self._ended = False
        self.asked: int | None = None
        self.ahead: int | None = None

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

        ``points_at`` returns the one of some doses that is likely to be the mildest that fits, None where none is.
        """
        if self.over or self.asked is not None:
            return None
        pointed = points_at(self.open) if self._answers < _POINTED else self.open[len(self.open) // 2]
        # Where none is thought to fit, the strongest is asked: it settles whether there is one, or that the one below
        # what was found does not fit either.
        self.asked = self.open[-1] if pointed is None else pointed
        return self.asked

    def ask_ahead(self) -> int | None:
        """Return the dose to ask about beside the one that is awaited, should that not fit; None for none."""
        if self.asked is None or self.ahead is not None or self.asked + 1 not in self.open:
            return None
        self.ahead = self.asked + 1
        return self.ahead

    def answer(self, dose: int, fits: bool) -> None:
        """Take the answer for a dose that was asked."""
        self._answers += 1
        if fits:
            self._high = min(self._high, dose)
        else:
            self._low = max(self._low, dose)
        self._await_open()

    def leave_out_from(self, dose: int) -> None:
        """Leave out this dose and all stronger ones: they cannot be made."""
        self._count = min(self._count, dose)
        self._high = min(self._high, dose)
        self._await_open()

    def _await_open(self) -> None:
        awaited = [dose for dose in (self.asked, self.ahead) if dose is not None and dose in self.open]
        self.asked, self.ahead = (*awaited, None, None)[:2]

    def end(self) -> None:
        """Ask nothing more."""
        self.asked, self.ahead, self._ended = None, None, True


class Change:
    """A change with its doses, mildest first, and the search among them.

    Attributes:
        place: where it comes by what the findings suggest; it decides between equals.
        search: what is asked about it.
        told: the forecast of each dose that had a dry run.
        why: why there is no dry run of it, None where there is one or may yet be.
        breaks: whether its dry run failed where that of the unchanged cell did not: no estimate is given then.
        refused: why it cannot be made at all, None where it can.
        is_last: whether it is offered though there was no time for a dry run of it, as nothing else may be enough.
    """

    def __init__(
        self, place: int, doses: Sequence[Parts], session: Session, evidence: Evidence, left: float = 1.0
    ) -> None:
        self.place, self.doses, self._left = place, doses, left
        self.search = Search(len(doses))
        self.told: dict[int, Forecast] = {}
        self.why: str | None = None
        self.refused: str | None = None
        self.breaks = self.is_last = self._is_doubted = False
        self._session, self._evidence = session, evidence
        self._made: dict[int, tuple[Patch | Refused, Attempt | Refused]] = {}
        self._offered: dict[int, Candidate] = {}
        self._all, self._ways = doses, iter(doses[0][0].fix.ways if len(doses[0]) == 1 else ())
        self._unfit, self._whys = list[Attempt](), list[str]()

    @property
    def fixes(self) -> tuple[str, ...]:
        """Ids of the fixes that it is made of."""
        return tuple(part.fix.id for part in self.doses[0])

    @property
    def joins(self) -> bool:
        """Whether it may be made beside another one."""
        return all(part.fix.joins for part in self.doses[0])

    @property
    def is_single(self) -> bool:
        """Whether it is made of one fix."""
        return len(self.doses[0]) == 1

    @property
    def is_offered(self) -> bool:
        """Whether it is one fix that can be made, or several that were seen to fit or are the last that may."""
        return self.refused is None and (self.is_single or self.search.found is not None or self.is_last)

    @property
    def is_open(self) -> bool:
        """Whether there may yet be something to ask."""
        return self.refused is None and not self.search.over

    @property
    def effect(self) -> Effect:
        """What it does to the results."""
        return max((part.proposal.effect for part in self.doses[0]), key=_EFFECTS.index)

    def ask(self, unchanged: Forecast, scale: float) -> tuple[int, Attempt] | None:
        """Return the dose to forecast next and how to run the cell with it, None where there is none for now."""

        def points_at(doses: range) -> int | None:
            return doses[0] if self._is_doubted else self.points_at(doses, unchanged, scale)

        while (index := self.search.ask(points_at)) is not None:
            if isinstance(attempt := self.attempt(index), Attempt):
                return index, attempt
        return None

    def ask_ahead(self) -> tuple[int, Attempt] | None:
        """Return a stronger dose to forecast beside the one that is awaited, None where there is none."""
        index = self.search.ask_ahead()
        attempt = None if index is None else self.attempt(index)
        return (index, attempt) if index is not None and isinstance(attempt, Attempt) else None

    def attempt(self, index: int) -> Attempt | Refused:
        """Return how to run the cell with a dose. Where that cannot be, it and the stronger ones are left out."""
        _, attempt = self._attempt(index)
        if isinstance(attempt, Refused):
            self._leave_out_from(index, attempt.reason)
        return attempt

    def take(self, forecast: Forecast) -> None:
        """Take the forecast of the one dose that there is as the answer."""
        self.told[0] = forecast
        self.search.ask(lambda _: 0)
        self.search.answer(0, fits=forecast.verdict is Verdict.FITS)

    def find_unfit(self, index: int, why: str) -> None:
        """Take it that a dose found itself unfit in its dry run; the mildest is asked next, whether any is fit."""
        self._is_doubted = True
        self._leave_out_from(index, why)

    def _leave_out_from(self, index: int, why: str) -> None:
        if index == 0:
            self._whys.append(why)
            if self._is_written_otherwise():
                return
            self.refused = self._whys[0]
        self.search.leave_out_from(index)
        self.doses = self.doses[:index] or self.doses

    def _is_written_otherwise(self) -> bool:
        """Write the change in the next way that is not known to be unfit; return whether there is one."""
        if isinstance(unfit := self._attempt(0)[1], Attempt):
            self._unfit.append(unfit)
        while len(self._unfit) < _WAYS and (way := next(self._ways, None)) is not None:
            self._made, self._offered, self.told = {}, {}, {}
            self.doses, self.search, self._is_doubted = (
                [_with(one, way) for one in self._all],
                Search(len(self._all)),
                False,
            )
            written = self._attempt(0)[1]
            if isinstance(written, Attempt) and written not in self._unfit:
                return True
        return False

    def _attempt(self, index: int) -> tuple[Patch | Refused, Attempt | Refused]:
        if index not in self._made:
            parts = [(part.fix, part.proposal.dose) for part in self.doses[index]]
            self._made[index] = attempt_with_all(parts, self._session, self._evidence)
        return self._made[index]

    # What the doses need ----------------------------------------------------------------------------------------

    def least_told(self) -> int:
        """Return the least peak that a dry run of a dose has told."""
        return min(told.peak for told in self.told.values() if told.peak is not None)

    def estimate(self, index: int, unchanged: Forecast, scale: float) -> Forecast:
        """Return what a dose is thought to need, where activations at the peak are ``scale`` times the known."""
        parts = self.doses[index]
        basis, peak = "; ".join(part.proposal.basis for part in parts), None
        if unchanged.peak is not None and not self.breaks:
            ratio = self._truth(unchanged)
            if ratio is None and self._left < 1.0:
                peak = int(unchanged.peak * self._left)
            else:
                peak = unchanged.peak - int(_saves(parts) * (scale if ratio is None else ratio))
            peak = max(peak, min(self._lasting(unchanged), unchanged.peak))
        return Forecast(
            basis=basis,
            budget=unchanged.budget,
            peak=peak,
            slowdown=_slowdown(parts),
            estimated=FROM_FAILURE if unchanged.at_least else FROM_PEAK,
            at_least=unchanged.at_least,
            refused=self.why,
        )

    def _lasting(self, unchanged: Forecast) -> int:
        """Return what parameters, gradients and optimizer state take that the change leaves as they are."""
        seen = self._evidence.census.roles if unchanged.course is None else unchanged.course.lasting
        left = set(LASTING).difference(*(part.fix.frees for part in self.doses[0]))
        return sum(nbytes for role, nbytes in seen if role in left)

    def _truth(self, unchanged: Forecast) -> float | None:
        """Return what the strongest dose that had a dry run saved over what it was thought to."""
        seen = [(index, told.peak) for index, told in self.told.items() if told.peak is not None]
        if not seen or unchanged.peak is None or unchanged.refused is not None:
            return None
        index, peak = max(seen)
        thought = _saves(self.doses[index])
        return max(unchanged.peak - peak, 0) / thought if thought else None

    def points_at(self, doses: range, unchanged: Forecast, scale: float) -> int | None:
        """Return the mildest of some doses that fits by its estimate, where no more is needed than is known of."""
        error = _CAUTION if self._truth(unchanged) is None else 0.0
        for index in doses:
            if taken_at_its_word(self.estimate(index, unchanged, scale), error).verdict is Verdict.FITS:
                return index
        return None

    def settled(self, unchanged: Forecast, scale: float, supposed: Supposed) -> tuple[int, Forecast]:
        """Return the dose to offer, and its price: the mildest that fits, the strongest where none is known to.

        Where no more is known of the unchanged cell than what it held when it failed, an estimate cannot tell which
        dose is enough. A retry that fails costs much, and so does one that is too slow: it goes by what is ``supposed``
        then, and is the strongest where nothing is.
        """
        if self.search.found is not None:
            return self.search.found, self.told[self.search.found]
        if self.search.over and self.told and self.why is None:
            strongest = max(self.told)
            return strongest, self.told[strongest]
        index = self._pointed(unchanged, scale, supposed)
        while index and isinstance(self.attempt(index), Refused):
            index = self._pointed(unchanged, scale, supposed)
        return index, self.told.get(index) or self.estimate(index, unchanged, scale)

    def _pointed(self, unchanged: Forecast, scale: float, supposed: Supposed) -> int:
        """Return the dose that its estimate speaks for, the strongest where none does."""
        known = supposed if unchanged.at_least and unchanged.refused else (unchanged, scale)
        pointed = None if known is None else self.points_at(self.search.open, *known)
        return (self.search.open or range(len(self.doses)))[-1] if pointed is None else pointed

    # What is offered --------------------------------------------------------------------------------------------

    def candidate(self, index: int, forecast: Forecast) -> Candidate:
        """Return a dose as it is offered."""
        if index not in self._offered:
            self._offered[index] = self._candidate(index, forecast)
        parts = self.doses[index]
        slowdown = forecast.slowdown or _slowdown(parts)
        if crossing := [part for part in parts if part.proposal.crosses]:
            slowdown = max(slowdown, _slowdown(crossing))
        peak = forecast.peak or None  # an estimate that leaves nothing is too rough to be a number
        shown = replace(forecast, peak=peak, slowdown=slowdown)
        return replace(self._offered[index], forecast=shown, breaks=self.breaks)

    def _candidate(self, index: int, forecast: Forecast) -> Candidate:
        parts = self.doses[index]
        caveats = dict.fromkeys(filter(None, (part.proposal.caveat for part in parts)))
        return Candidate(
            fix=" + ".join(self.fixes),
            title=_title([part.fix.title for part in parts]),
            dose=Dose(tuple(value for part in parts for value in part.proposal.dose.values)),
            effect=max((part.proposal.effect for part in parts), key=_EFFECTS.index),
            forecast=forecast,
            patch=self._attempt(index)[0],
            applies_live=len(parts) > 1 or parts[0].fix.apply is not None,
            is_tried=any(part.fix.is_tried for part in parts),
            caveat="; ".join(caveats) or None,
            parts=tuple((part.fix.id, part.proposal.dose) for part in parts) if len(parts) > 1 else (),
            stronger=tuple(one.proposal for one, *others in self.doses[index + 1 :] if not others),
        )


def _with(parts: Parts, way: Dose) -> Parts:
    return tuple(replace(part, proposal=replace(part.proposal, dose=part.proposal.dose | way)) for part in parts)


def taken_at_its_word(forecast: Forecast, caution: float = _CAUTION) -> Forecast:
    """Return a forecast as if no more were needed than is known of, and an estimate were off by no more than this."""
    error = forecast.error_ratio if forecast.estimated is None else caution
    return replace(forecast, estimated=None, at_least=False, error_ratio=error)


def _saves(parts: Parts) -> int:
    return sum(part.proposal.saves for part in parts)


def _title(titles: Sequence[str]) -> str:
    first, *others = titles
    return "; ".join([first, *(text[:1].lower() + text[1:] for text in others)])


def _slowdown(parts: Sequence[Part]) -> float:
    return prod(part.proposal.slowdown for part in parts)

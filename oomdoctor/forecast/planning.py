"""Makes the plan: which fixes in which dose, each with its price, best first.

Fixes come as values. Each proposes doses, and the mildest that fits by a shadow run is taken: the one that the analytic
estimate points at is priced first, its neighbours after it. Where no shadow run can be had, or time runs out, the
estimate is the price, and says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from oomdoctor.allocator.caching import least_asked
from oomdoctor.forecast.search import mildest
from oomdoctor.forecast.shadow import Pricer
from oomdoctor.model.absence import Refused, Unavailable
from oomdoctor.model.evidence import Evidence, Role
from oomdoctor.model.fix import Dose, Effect, Fix, Patch, Proposal
from oomdoctor.model.incident import Incident
from oomdoctor.model.plan import Candidate, Forecast, Plan, Verdict
from oomdoctor.model.session import Attempt, Session

__all__ = ["attempt_with", "make_plan", "stronger"]

_ESTIMATE_ERROR: Final = 0.3
"""How far off an analytic estimate may be; a guess on the safe side, and shown as an estimate."""
_ORDER_OF_VERDICTS: Final = (Verdict.FITS, Verdict.BORDERLINE, Verdict.UNKNOWN, Verdict.TOO_LARGE)
_ORDER_OF_EFFECTS: Final = (Effect.EXACT, Effect.EQUIVALENT, Effect.CHANGES_RESULT, Effect.ADVICE)
_AT_ONCE: Final = 2
_SEEN: Final = 0.95
"""A shadow run that needs less than this share of what was held and asked for has not seen what fills the memory."""
_LEAST_S: Final = 0.2
"""Less time than this is not enough for a shadow run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Option:
    """One dose of one fix, ready to be run."""

    fix: Fix
    proposal: Proposal
    patch: Patch | Refused
    attempt: Attempt


def make_plan(
    session: Session,
    incident: Incident,
    evidence: Evidence,
    fixes: Sequence[Fix],
    *,
    budget: int | None,
    prepare: Callable[[], None],
    time_budget_s: float,
) -> Plan:
    """Return what is worth trying, best first.

    Args:
        fixes: in the order in which the findings suggest them; it decides between equals.
        budget: bytes that tensors may take.
        prepare: restores the start of the cell; runs in the shadow's process alone.
        time_budget_s: for all forecasts together; 0 makes no shadow run.
    """
    refusals: list[tuple[str, str]] = []
    options = [found for fix in fixes if (found := _options(fix, session, incident, evidence, refusals))]
    pricer = Pricer(session, budget=budget, prepare=prepare)
    end = time.monotonic() + time_budget_s
    unchanged = _unchanged(pricer, session, evidence, incident, budget, time_budget_s)

    scale = _scale(unchanged, evidence, incident)

    def price(some: Sequence[_Option]) -> list[Forecast]:
        left_s = end - time.monotonic()
        forecasts = {id(option): _estimate(option, unchanged, scale) for option in some}
        tried = [option for option in some if option.proposal.effect is not Effect.ADVICE] if left_s >= _LEAST_S else []
        priced = pricer.price([option.attempt for option in tried], timeout_s=left_s) if tried else []
        for option, forecast in zip(tried, map(careful, priced), strict=True):
            if forecast.refused is None:
                forecasts[id(option)] = forecast
        return [forecasts[id(option)] for option in some]

    def careful(forecast: Forecast) -> Forecast:
        """Widen the error where the shadow run of the unchanged cell did not see what fills the memory."""
        return replace(forecast, error_ratio=_ESTIMATE_ERROR) if unchanged.refused is not None else forecast

    guesses = [_guess(doses, unchanged, scale) for doses in options]
    priced = price([doses[guess] for doses, guess in zip(options, guesses, strict=True)])
    candidates = [
        _candidate(*_settle(doses, guess, forecast, price))
        for doses, guess, forecast in zip(options, guesses, priced, strict=True)
    ]
    candidates.sort(key=_rank)
    return Plan(unchanged=unchanged, candidates=tuple(candidates), refusals=tuple(refusals))


def attempt_with(
    fix: Fix, dose: Dose, session: Session, evidence: Evidence
) -> tuple[Patch | Refused, Attempt | Refused]:
    """Return how to run the failing cell with one fix: by its patch where there is one, else on the live objects."""
    failing = session.cells.failing
    patch = fix.patch(session.cells, evidence, dose)
    if isinstance(patch, Patch):
        edits = {edit.cell: edit for edit in patch.edits}
        source = edits[failing.number].after if failing.number in edits else failing.source
        replays = tuple(edit.replay for edit in patch.edits if edit.cell != failing.number)
        guards = (partial(fix.guard, session, dose),) if fix.guard is not None else ()
        return patch, Attempt(source=source, replays=replays, live=guards)
    # What is told to the loop of a library by its settings is not done to its objects behind its back.
    if fix.apply is None or "through" in dict(dose.values):
        return patch, Refused(patch.reason)
    return patch, Attempt(source=failing.source, live=(partial(fix.apply, session, dose),))


def stronger(fix: Fix, dose: Dose, incident: Incident, evidence: Evidence) -> tuple[Dose, ...]:
    """Return the doses of ``fix`` that are stronger than ``dose``, mildest first."""
    proposals = fix.propose(incident, evidence)
    if isinstance(proposals, Refused):
        return ()
    doses = [proposal.dose for proposal in proposals]
    return tuple(doses[doses.index(dose) + 1 :]) if dose in doses else ()


def _options(
    fix: Fix, session: Session, incident: Incident, evidence: Evidence, refusals: list[tuple[str, str]]
) -> list[_Option]:
    proposals = fix.propose(incident, evidence)
    if isinstance(proposals, Refused):
        refusals.append((fix.id, proposals.reason))
        return []
    options = []
    for proposal in proposals:
        patch, attempt = attempt_with(fix, proposal.dose, session, evidence)
        if isinstance(attempt, Refused):
            refusals.append((fix.id, attempt.reason))
            break
        options.append(_Option(fix=fix, proposal=proposal, patch=patch, attempt=attempt))
    return options


def _scale(unchanged: Forecast, evidence: Evidence, incident: Incident) -> float:
    """Return how much larger the activations at the peak are than those held and asked for at the failure."""
    census, allocated = evidence.census, evidence.device.allocated
    passing = census.bytes_of(Role.ACTIVATION) + census.bytes_of(Role.BATCH)
    seen = passing + (incident.requested or 0)
    if unchanged.peak is None or isinstance(allocated, Unavailable) or not seen:
        return 1.0
    return max(1.0, (unchanged.peak - allocated + passing) / seen)


def _guess(doses: list[_Option], unchanged: Forecast, scale: float) -> int:
    """Return the mildest dose that fits by its estimate, the strongest if none does."""
    for index, option in enumerate(doses):
        if _estimate(option, unchanged, scale).fits:
            return index
    return len(doses) - 1


def _settle(
    doses: list[_Option], guess: int, forecast: Forecast, price: Callable[[Sequence[_Option]], list[Forecast]]
) -> tuple[_Option, Forecast]:
    """Return the mildest dose that fits, going from the guess: milder as long as that fits, else stronger."""
    if forecast.verdict is Verdict.FITS:
        milder = price([doses[guess - 1]])[0] if guess else forecast
        if guess == 0 or milder.verdict is not Verdict.FITS:
            return doses[guess], forecast
        choice, below = mildest(doses[: guess - 1], price, at_once=_AT_ONCE), (doses[guess - 1], milder)
        if choice is None or choice.forecast.verdict is not Verdict.FITS:
            return below
        return doses[choice.index], choice.forecast
    choice = mildest(doses[guess + 1 :], price, at_once=_AT_ONCE)
    return (doses[guess], forecast) if choice is None else (doses[guess + 1 + choice.index], choice.forecast)


def _unchanged(
    pricer: Pricer, session: Session, evidence: Evidence, incident: Incident, budget: int | None, time_budget_s: float
) -> Forecast:
    """Forecast the cell as it is; where that cannot be, what it held and asked for is the least that it needs."""
    allocated = evidence.device.allocated
    asked = incident.requested or 0
    if asked and evidence.device.name != "cpu":
        asked = least_asked(asked)
    least = None if isinstance(allocated, Unavailable) else allocated + asked
    refused = "forecasts are switched off"
    if time_budget_s > 0:
        forecast = pricer.price([Attempt(source=session.cells.failing.source)], timeout_s=time_budget_s)[0]
        if forecast.refused is None and (least is None or (forecast.peak or 0) >= _SEEN * least):
            return forecast
        refused = (
            forecast.refused or "a shadow run of a few steps stays below what was seen: memory grows over the loop"
        )
    basis = "held and asked for when it failed: the least that it needs"
    return Forecast(basis=basis, budget=budget, peak=least, error_ratio=_ESTIMATE_ERROR, refused=refused)


def _estimate(option: _Option, unchanged: Forecast, scale: float) -> Forecast:
    peak = None if unchanged.peak is None else max(unchanged.peak - int(option.proposal.saves * scale), 0)
    return Forecast(
        basis=option.proposal.basis,
        budget=unchanged.budget,
        peak=peak,
        slowdown=option.proposal.slowdown,
        error_ratio=_ESTIMATE_ERROR,
    )


def _candidate(option: _Option, forecast: Forecast) -> Candidate:
    effect, caveat = option.proposal.effect, option.proposal.caveat
    if isinstance(option.patch, Refused) and option.fix.live_caveat is not None:
        effect, caveat = Effect.CHANGES_RESULT, "; ".join(filter(None, [option.fix.live_caveat, caveat]))
    return Candidate(
        fix=option.fix.id,
        title=option.fix.title,
        dose=option.proposal.dose,
        effect=effect,
        forecast=replace(forecast, slowdown=forecast.slowdown or option.proposal.slowdown),
        patch=option.patch,
        applies_live=option.fix.apply is not None,
        caveat=caveat,
    )


def _rank(candidate: Candidate) -> tuple[int, int, float]:
    """Order by: fits, keeps the result, costs the least time. Freeing a leak costs none, so it comes first."""
    keeps = candidate.effect in (Effect.EXACT, Effect.EQUIVALENT)
    return (
        _ORDER_OF_VERDICTS.index(candidate.forecast.verdict),
        0 if keeps else _ORDER_OF_EFFECTS.index(candidate.effect),
        candidate.forecast.slowdown or 1.0,
    )

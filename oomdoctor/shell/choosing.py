"""What a user puts together in the panel: another dose than the plan's, or two changes at once.

Neither has a shadow run: of another dose there is an estimate that says what it is made of, of two changes a bound.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from oomdoctor.model.absence import Refused
from oomdoctor.model.fix import Dose, Effect
from oomdoctor.model.plan import FROM_PEAK, Candidate, Forecast, Plan

if TYPE_CHECKING:
    from oomdoctor.model.case import Case
    from oomdoctor.model.session import Session

__all__ = ["at_dose", "doses", "joins", "together", "with_candidate"]

_EFFECTS: Final = tuple(Effect)


def doses(case: Case, candidate: Candidate) -> tuple[tuple[Dose, Forecast], ...]:
    """Return the doses that a fix may be had in, mildest first, each with its price.

    The one in the plan has its forecast there. Of the others it is estimated: what they were thought to save, measured
    by what that one is forecast to save over what it was thought to.
    """
    from oomdoctor import fixes

    if candidate.parts or candidate.effect is Effect.ADVICE or candidate.fix not in fixes.ids():
        return ()
    proposals = fixes.get(candidate.fix).propose(case.incident, case.evidence)
    own = [] if isinstance(proposals, Refused) else [one for one in proposals if one.dose == candidate.dose]
    if isinstance(proposals, Refused) or not own or len(proposals) < 2:
        return ()
    peak, before = candidate.forecast.peak, case.plan.unchanged.peak
    ratio = None if peak is None or before is None else max(before - peak, 0) / max(own[0].saves, 1)
    found = []
    for proposal in proposals:
        priced = candidate.forecast
        if proposal.dose != candidate.dose:
            needs = None if before is None or ratio is None else max(before - int(proposal.saves * ratio), 0)
            priced = Forecast(
                basis=f"analytic estimate, by the price of {candidate.dose}",
                budget=priced.budget,
                peak=needs,
                slowdown=proposal.slowdown,
                estimated=FROM_PEAK,
            )
        found.append((proposal.dose, priced))
    return tuple(found)


def at_dose(case: Case, session: Session, candidate: Candidate, dose: Dose) -> Candidate | Refused:
    """Return ``candidate`` in one of its other ``doses``, or why it cannot be had in that one."""
    from oomdoctor import fixes
    from oomdoctor.forecast.planning import attempt_with

    if candidate.refuted is not None:
        return Refused(candidate.refuted)
    if dose == candidate.dose:
        return candidate
    fix = fixes.get(candidate.fix)
    proposals = fix.propose(case.incident, case.evidence)
    proposal = next((one for one in proposals if one.dose == dose), None) if isinstance(proposals, tuple) else None
    if proposal is None:
        return Refused(f"{candidate.fix} is not proposed with {dose}")
    patch, attempt = attempt_with(fix, dose, session, case.evidence)
    if isinstance(attempt, Refused):
        return attempt
    return replace(
        candidate,
        dose=dose,
        patch=patch,
        effect=max(proposal.effect, candidate.effect, key=_EFFECTS.index),
        caveat=proposal.caveat or candidate.caveat,
        forecast=dict(doses(case, candidate))[dose],
    )


def joins(candidate: Candidate) -> bool:
    """Return whether a change can be made beside another one at all."""
    from oomdoctor.forecast.planner import JOINING

    return candidate.fix in JOINING and candidate.refuted is None


def together(case: Case, session: Session, chosen: tuple[Candidate, ...]) -> Candidate | Refused:
    """Return two changes as one, or why they cannot be made at once."""
    from oomdoctor import fixes
    from oomdoctor.forecast.planner import JOINING
    from oomdoctor.forecast.planning import attempt_with_all

    if len(chosen) != 2:
        return Refused("choose two changes")
    for one in chosen:
        if one.refuted is not None:
            return Refused(f"{one.fix}: {one.refuted}")
        if one.parts:
            return Refused(f"{one.fix} is two changes already")
        if one.fix not in JOINING:
            return Refused(f"{one.fix} is not proven to keep its promise beside another change")
    parts = tuple((one.fix, one.dose) for one in chosen)
    patch, attempt = attempt_with_all([(fixes.get(fix), dose) for fix, dose in parts], session, case.evidence)
    if isinstance(attempt, Refused):
        return attempt
    first, second = chosen
    return Candidate(
        fix=f"{first.fix} + {second.fix}",
        title=f"{first.title}; {second.title[:1].lower()}{second.title[1:]}",
        dose=Dose((*first.dose.values, *second.dose.values)),
        effect=max((one.effect for one in chosen), key=_EFFECTS.index),
        forecast=_both(first.forecast, second.forecast),
        patch=patch,
        applies_live=True,
        is_tried=any(one.is_tried for one in chosen),
        caveat="; ".join(dict.fromkeys(filter(None, (one.caveat for one in chosen)))) or None,
        parts=parts,
    )


def _both(first: Forecast, second: Forecast) -> Forecast:
    """Return what both need at most: no more than that of them which needs less.

    What they need at least is not known from what each needs: both may save the same memory.
    """
    bounds = [one for one in (first, second) if one.peak is not None and not one.at_least]
    less = min(bounds, key=lambda one: one.peak or 0) if bounds else Forecast(basis="not known of either")
    times = [one.slowdown for one in (first, second) if one.slowdown is not None]
    return replace(
        less,
        basis=f"at most, as with one of the two alone: {less.basis}",
        at_most=True,
        peak_line=None,
        slowdown=times[0] * times[1] if len(times) == 2 else None,
        course=None,
    )


def with_candidate(plan: Plan, candidate: Candidate) -> tuple[Plan, int]:
    """Return the plan with ``candidate`` in the place of its fix, or at the end, and its number there."""
    places = [at for at, one in enumerate(plan.candidates) if one.fix == candidate.fix]
    at = places[0] if places else len(plan.candidates)
    candidates = (*plan.candidates[:at], candidate, *plan.candidates[at + 1 :])
    return replace(plan, candidates=candidates), at + 1

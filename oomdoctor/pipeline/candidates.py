"""What of a plan may be tried, in which order, and in which doses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from oomdoctor import fixes
from oomdoctor.model.case import Case, Cause, Outcome, OutcomeKind
from oomdoctor.model.fix import Dose, Effect
from oomdoctor.model.incident import Family
from oomdoctor.model.plan import Candidate, Forecast, MeasuredPeak, Plan
from oomdoctor.model.session import Session
from oomdoctor.model.unavailable import Refused
from oomdoctor.retry import Choice


def admitted(case: Case, auto: str) -> tuple[Candidate, ...]:
    """Return the candidates that an automatic retry may use under this setting: those seen to fit, the others.

    What other processes hold comes and goes: beside them, a dry run of the change must fit. What broke in its dry run,
    where the unchanged cell did not, is left to the user.
    """
    if beyond_cure(case) is not None:
        return ()
    must_fit = _is_held_by_others(case)
    effects = {Effect.EXACT, Effect.EQUIVALENT} | ({Effect.CHANGES_RESULT} if auto == "any" else set())
    found = [
        candidate
        for candidate in case.plan.candidates
        if auto != "off"
        and candidate.effect in effects
        and candidate.forecast.fits is not False
        and not candidate.breaks
        and candidate.refuted is None
        and (was_seen_to_fit(candidate) or not must_fit)
        and not any(fixes.get(fix).asks for fix, _ in candidate.made_of)
    ]
    return tuple(sorted(found, key=was_seen_to_fit, reverse=True))


def beyond_cure(case: Case) -> str | None:
    """Return why no change of the cell cures this failure, None where one may. It is not retried by itself then."""
    incident = case.incident
    why = _BEYOND_CURE.get(incident.format or "") or _BEYOND_CURE.get(incident.family)
    if why is not None:
        return why
    if _is_held_by_others(case) and not any(was_seen_to_fit(one) for one in case.plan.candidates):
        return "other processes use the device; no fix fits into what they leave free"
    return None


_BEYOND_CURE: Final[dict[str, str]] = {
    "onednn_create": "oneDNN creates no primitives in this thread until the kernel restarts",
    Family.CUDA_INIT: "the device had no room for this process; no fix of the cell changes that",
    Family.WORKER_KILLED: "a worker process died, and no fix is known to prevent it",
    Family.RANK_KILLED: "another process was killed; no fix of the cell brings it back",
    Family.KERNEL_KILLED: "the kernel was killed; no fix of the cell brings it back",
}


def _is_held_by_others(case: Case) -> bool:
    """Return whether the likeliest cause is that other processes hold the device."""
    return bool(case.findings) and case.findings[0].cause is Cause.OTHER_PROCESS


def was_seen_to_fit(candidate: Candidate) -> bool:
    """Return whether a dry run fits: an estimate goes by what the cell held, and it may have only begun."""
    return candidate.forecast.fits is True and candidate.forecast.course is not None


def choices_of(case: Case, session: Session, chosen: Sequence[Candidate]) -> Iterator[tuple[Candidate, Choice]]:
    """Yield what may be tried: each candidate with its stronger doses after it, those first that were seen to fit.

    A stronger dose has no forecast, so the stronger doses of these come after the last of them. Each is written when
    it is asked for.
    """
    from oomdoctor.forecast.attempts import attempt_with_all

    fitting = [candidate for candidate in chosen if was_seen_to_fit(candidate)]
    others = [candidate for candidate in chosen if candidate not in fitting]
    made = [*fitting, *(dose for one in fitting for dose in stronger_of(one))]
    made += [dose for one in others for dose in (one, *stronger_of(one))]
    for candidate in made:
        parts = [(fixes.get(fix), dose) for fix, dose in candidate.made_of]
        patch, attempt = attempt_with_all(parts, session, case.evidence)
        if not isinstance(attempt, Refused):
            choice = Choice(fix=candidate.fix, label=candidate.label, attempt=attempt)
            yield replace(candidate, patch=patch), choice


def stronger_of(candidate: Candidate) -> list[Candidate]:
    """Return the candidate in every other of its stronger doses; two fixes together have none."""
    steps = [one for at, one in enumerate(candidate.stronger, 1) if at % 2 == 0 or at == len(candidate.stronger)]
    unpriced = Forecast(basis="not priced: a stronger dose after a failure", budget=candidate.forecast.budget)
    stronger = replace(candidate, forecast=unpriced, follows=candidate.label)
    return [replace(stronger, dose=one.dose, caveat=one.caveat) for one in steps]


def besides(first: Candidate, second: Candidate) -> Candidate:
    """Return two changes as one, the second of which was planned for the program with the first."""
    return replace(
        second,
        fix=f"{first.fix} + {second.fix}",
        title=f"{first.title}; {second.title[:1].lower()}{second.title[1:]}",
        dose=Dose((*first.dose.values, *second.dose.values)),
        effect=max(first.effect, second.effect, key=[*Effect].index),
        is_tried=first.is_tried or second.is_tried,
        parts=(*first.made_of, *second.made_of),
        stronger=(),
        follows=first.label,
    )


def with_made(plan: Plan, made: Candidate | None, outcome: Outcome) -> Plan:
    """Return the plan with what healed the cell in the place of its milder dose, whatever refuted that."""
    if made is None:
        return plan
    if outcome.kind is OutcomeKind.HEALED and outcome.peak is not None:
        took = MeasuredPeak(tensors=outcome.peak, reserved=outcome.peak_reserved, measure=outcome.measure)
        made = replace(made, measured=took)
    others = [one for one in plan.candidates if one.fix != made.fix]
    known = [one.fix for one in plan.candidates]
    at = next((known.index(fix) for fix in (made.fix, made.made_of[0][0]) if fix in known), 0)
    refusals = tuple(told for told in plan.refusals if told[0] != made.fix)
    return replace(plan, candidates=(*others[:at], made, *others[at:]), refusals=refusals)

"""From a plan to an outcome: the cell run again with a change in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from oomdoctor.model.absence import Refused
from oomdoctor.model.case import Case, Outcome, OutcomeKind, State
from oomdoctor.model.finding import Cause
from oomdoctor.model.fix import Effect
from oomdoctor.model.incident import Family
from oomdoctor.model.plan import Candidate, Forecast, Plan
from oomdoctor.model.session import Session
from oomdoctor.pipeline.checks import Checks

if TYPE_CHECKING:
    from oomdoctor.retry import Choice, Transaction
    from oomdoctor.retry.heal import Run


async def heal(
    case: Case,
    session: Session,
    transaction: Transaction,
    chosen: Sequence[Candidate],
    run: Run,
    *,
    most_attempts: int,
    time_budget_s: float,
    anyway: bool = False,
    failed: set[str] | None = None,
    by_itself: bool = False,
) -> tuple[Case, BaseException | None]:
    """Run the cell again with ``chosen`` in their order, each escalated if it must be. See ``retry.heal``.

    Args:
        by_itself: whether nobody asked for these changes by name: what could not be tried out is left alone then.
    """
    from oomdoctor.incident import find_oom
    from oomdoctor.retry import heal as retry

    lost = (*transaction.losses(), *(f"{call} cannot be taken back" for call in case.evidence.code.not_repeatable))
    ranks = case.evidence.code.world_size or 1
    alone = f"this process is one of {ranks} ranks, and the others would wait for it" if ranks > 1 else None
    if alone or (lost and not anyway):
        why = alone or "; ".join(lost)
        refused = Outcome(kind=OutcomeKind.REFUSED, state=State.UNVERIFIED, why=why, anyway=alone is None)
        return replace(case, outcome=refused), None
    choices, unfit = _choices(case, session, chosen), dict[str, str]()
    checks = Checks(case.evidence, session, transaction, choices, unfit, by_itself=by_itself)
    outcome, error = await retry(
        transaction,
        [choice for _, choice in choices],
        run,
        accelerator=session.accelerator,
        is_oom=lambda exc: find_oom(exc) is not None,
        most_attempts=1 if case.evidence.code.not_reached else most_attempts,
        time_budget_s=time_budget_s,
        failed=failed,
        unfit=unfit,
        shell=session.shell,
        admit=checks.admit,
    )
    if outcome.kind is OutcomeKind.HEALED:
        outcome = replace(outcome, checked=checks.told)
    if outcome.kind is OutcomeKind.FAILED and error is not None and (fault := _device_fault(error)):
        outcome = replace(outcome, state=State.UNVERIFIED, why=f"{outcome.why}; {fault}")
    if outcome.attempts and outcome.kind is not OutcomeKind.HEALED:  # it may have come further than the cell did
        lost = (*lost, *(f"{call} may have been made by the attempt" for call in case.evidence.code.not_reached))
    if lost:
        outcome = replace(outcome, state=State.UNVERIFIED, why="; ".join([*filter(None, [outcome.why]), *lost]))
    made = next((candidate for candidate, _ in choices if candidate.label in outcome.fixes), None)
    if made is not None:
        made = replace(made, patch=checks.patches.get(made.label, made.patch))
    return replace(case, plan=_with(case.plan, made).without(unfit), outcome=outcome), error


def _choices(case: Case, session: Session, chosen: Sequence[Candidate]) -> list[tuple[Candidate, Choice]]:
    """Return what may be tried: each candidate with its stronger doses after it, those first that were seen to fit.

    A stronger dose has no forecast, so the stronger doses of these come after the last of them.
    """
    from oomdoctor import fixes
    from oomdoctor.forecast.attempts import attempt_with_all
    from oomdoctor.retry import Choice

    fitting = [candidate for candidate in chosen if _was_seen_to_fit(candidate)]
    others = [candidate for candidate in chosen if candidate not in fitting]
    made = [*fitting, *(dose for one in fitting for dose in _stronger(one))]
    made += [dose for one in others for dose in (one, *_stronger(one))]
    choices = []
    for candidate in made:
        parts = [(fixes.get(fix), dose) for fix, dose in candidate.made_of]
        patch, attempt = attempt_with_all(parts, session, case.evidence)
        if not isinstance(attempt, Refused):
            choice = Choice(fix=candidate.fix, label=candidate.label, attempt=attempt)
            choices.append((replace(candidate, patch=patch), choice))
    return choices


def _stronger(candidate: Candidate) -> list[Candidate]:
    """Return the candidate in its stronger doses; two fixes together have none."""
    unpriced = Forecast(basis="not priced: a stronger dose after a failure", budget=candidate.forecast.budget)
    return [replace(candidate, dose=dose, forecast=unpriced) for dose in candidate.stronger]


def _with(plan: Plan, made: Candidate | None) -> Plan:
    """Return the plan with ``made`` in the place of the milder dose of the same fix."""
    if made is None:
        return plan
    return replace(plan, candidates=tuple(made if one.fix == made.fix else one for one in plan.candidates))


def admitted(case: Case, auto: str) -> tuple[Candidate, ...]:
    """Return the candidates that an automatic retry may use under this setting: those seen to fit, the others.

    What other processes hold comes and goes: beside them, a shadow run of the change must fit. What broke in its shadow
    run, where the unchanged cell did not, is left to the user.
    """
    from oomdoctor import fixes

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
        and (_was_seen_to_fit(candidate) or not must_fit)
        and not any(fixes.get(fix).asks for fix, _ in candidate.made_of)
    ]
    return tuple(sorted(found, key=_was_seen_to_fit, reverse=True))


def beyond_cure(case: Case) -> str | None:
    """Return why no change of the cell cures this failure, None where one may. It is not retried by itself then."""
    incident = case.incident
    why = _BEYOND_CURE.get(incident.format or "") or _BEYOND_CURE.get(incident.family)
    if why is not None:
        return why
    if _is_held_by_others(case) and not any(_was_seen_to_fit(one) for one in case.plan.candidates):
        return "other processes hold the device, and no change was forecast to fit into what they leave"
    return None


_BEYOND_CURE: Final[dict[str, str]] = {
    "onednn_create": "oneDNN makes no new primitive in this thread any more, until the kernel is restarted",
    Family.CUDA_INIT: "there was no room for this process on the device at all, which no change of the cell makes",
    Family.WORKER_KILLED: "a worker process died, and no change of the cell is known to have kept it alive",
    Family.RANK_KILLED: "another process was killed, and no change of the cell brings it back",
    Family.KERNEL_KILLED: "a kernel was killed, and no change of the cell brings it back",
}


def _is_held_by_others(case: Case) -> bool:
    """Return whether the likeliest cause is that other processes hold the device."""
    return bool(case.findings) and case.findings[0].cause is Cause.OTHER_PROCESS


def _was_seen_to_fit(candidate: Candidate) -> bool:
    """Return whether a shadow run fits: an estimate goes by what the cell held, and it may have only begun."""
    return candidate.forecast.fits is True and candidate.forecast.course is not None


def _device_fault(error: BaseException) -> str | None:
    """Return what a fault of the device means for the state on it, None where ``error`` is none."""
    from oomdoctor.incident import describe, from_exception

    incident = from_exception(error, {})
    if incident.is_oom or incident.format not in ("device_assert", "illegal_access", "misaligned", "device_fault"):
        return None
    return f"{describe(incident)} What was on the device can be neither read nor put back until the kernel is restarted"

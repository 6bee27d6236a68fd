"""The way of the data, from a failure to a healed cell.

    exception ─► incident ─► evidence ─► findings ─► plan ─► retry ─► outcome

Each step takes values of ``model`` and returns one. What is live travels in a ``Session``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from oomdoctor.errors import Fault, NotAvailable, UsageError
from oomdoctor.model.absence import Refused, Unavailable
from oomdoctor.model.case import Case, Outcome, OutcomeKind, State
from oomdoctor.model.explanation import Explanation
from oomdoctor.model.finding import Cause
from oomdoctor.model.fix import Effect, Proposal
from oomdoctor.model.incident import Family, Incident
from oomdoctor.model.kinds import spelled
from oomdoctor.model.plan import Candidate, Forecast, Plan
from oomdoctor.model.session import Accelerator, Cell, Cells, Session
from oomdoctor.model.sizes import format_size

if TYPE_CHECKING:
    from oomdoctor.forecast.calibration import Calibration
    from oomdoctor.forecast.planning import Planning
    from oomdoctor.model.evidence import Evidence
    from oomdoctor.model.fix import Fix
    from oomdoctor.model.memplan import MemPlan
    from oomdoctor.retry import Transaction, Trial
    from oomdoctor.retry.heal import Run
    from oomdoctor.retry.remedies import Remedy
    from oomdoctor.rulebook import RuleBook
    from oomdoctor.views.displayed import Report

__all__ = [
    "beyond_cure",
    "calibration_of",
    "cases",
    "check_snapshot",
    "diagnose",
    "explain",
    "forecasts_kept",
    "foresee",
    "heal",
    "last_case",
    "observe",
    "open_session",
    "plan",
    "planning",
    "recall",
    "record",
    "report",
    "snapshot",
]

_cases: list[Case] = []


def open_session(namespace: dict[str, Any], cells: Cells, accelerator: Accelerator, shell: Any = None) -> Session:
    """Bind the user's namespace and cells into a session."""
    from oomdoctor.evidence.objects import find

    return Session(namespace=namespace, cells=cells, accelerator=accelerator, find=find, shell=shell)


def observe(
    exc: BaseException, open_on: Callable[[Accelerator], Session], filenames: Mapping[str, int]
) -> tuple[Case, Session]:
    """Recognise a failure and collect the evidence. What only the frames of ``exc`` hold is seen while they do.

    Args:
        open_on: makes the session for the device that ran out.
        filenames: number of the cell by the file name of its code.
    """
    from oomdoctor.evidence import collect
    from oomdoctor.incident import from_exception

    incident = from_exception(exc, filenames)
    session = open_on(accelerator_of(incident.device))
    cell = incident.cell
    line = cell.line if cell is not None and cell.number == session.cells.failing.number else None
    with _uncounted():
        evidence = collect(session, exc, filenames, line=line)
    incident = replace(incident, device=incident.device or evidence.device.name)
    unpriced = Plan(unchanged=Forecast(basis="not priced yet"))
    case = Case(number=len(_cases) + 1, incident=incident, evidence=evidence, findings=(), plan=unpriced)
    return case, session


def diagnose(case: Case, rules: RuleBook) -> Case:
    """Find the causes."""
    return replace(case, findings=rules.match(case.incident, case.evidence))


def plan(
    case: Case,
    session: Session,
    prepare: Callable[[], None],
    *,
    time_budget_s: float,
    reserve: int,
    keep_forecasts: bool = False,
) -> Case:
    """Price the fixes. The frames of the failure should be released by now.

    Args:
        prepare: restores the start of the cell, in the process of a shadow run.
        reserve: bytes of the budget that something else will take.
        keep_forecasts: whether the error that is told comes from the forecasts kept, where there are enough.
    """
    from oomdoctor.forecast.calibration import applied
    from oomdoctor.forecast.planning import make_plan

    with _uncounted(), applied(calibration_of(session, keep_forecasts=keep_forecasts)):
        priced = make_plan(
            session,
            case.incident,
            case.evidence,
            _fixes_in_order(case),
            budget=_budget(case.evidence, reserve),
            prepare=prepare,
            time_budget_s=time_budget_s,
            leaks=_freeing(case),
        )
    return replace(case, plan=priced)


def planning(
    case: Case,
    session: Session,
    prepare: Callable[[], None],
    *,
    time_budget_s: float,
    reserve: int,
    keep_forecasts: bool = False,
) -> Planning:
    """Begin to price the fixes while the user's process goes on. For the arguments see ``plan``."""
    from oomdoctor.forecast.calibration import applied
    from oomdoctor.forecast.planning import Planning

    with _uncounted(), applied(calibration_of(session, keep_forecasts=keep_forecasts)):
        return Planning(
            *(session, case.incident, case.evidence, _fixes_in_order(case)),
            budget=_budget(case.evidence, reserve),
            prepare=prepare,
            time_budget_s=time_budget_s,
            leaks=_freeing(case),
        )


def _freeing(case: Case) -> frozenset[str]:
    """Return the fixes of what was found to be a leak: they free what should not be there."""
    leaks = [finding for finding in case.findings if finding.cause is Cause.LEAK_OR_PINNED_GRAPH]
    return frozenset(fix for finding in leaks for fix in finding.fixes)


def recall(case: Case, session: Session, remedy: Remedy, *, reserve: int) -> Case | None:
    """Plan with what healed this failure before at the head, in the dose that did, and with no forecast made.

    Returns:
        The case with its plan; None where that dose is no longer proposed, or needed more then than there is now.
    """
    from oomdoctor import fixes
    from oomdoctor.forecast.planning import make_plan

    if remedy.fix not in fixes.ids():
        return None  # two together, which are found anew
    healer = fixes.get(remedy.fix)

    def propose(incident: Incident, evidence: Evidence) -> tuple[Proposal, ...] | Refused:
        found = healer.propose(incident, evidence)
        alike = () if isinstance(found, Refused) else tuple(one for one in found if one.dose == remedy.dose)
        return alike or Refused("the dose that healed the cell before is not proposed any more")

    in_order = [replace(one, propose=propose) if one.id == remedy.fix else one for one in _fixes_in_order(case)]
    budget = _budget(case.evidence, reserve)
    with _uncounted():
        estimated = make_plan(
            session, case.incident, case.evidence, in_order, budget=budget, prepare=lambda: None, time_budget_s=0
        )
    known = next((one for one in estimated.candidates if one.fix == remedy.fix), None)
    if known is None:
        return None
    basis = f"measured when it healed {'the cell' if remedy.cell is None else f'In[{remedy.cell}]'}"
    measured = Forecast(basis=basis, budget=budget, peak=remedy.peak, slowdown=known.forecast.slowdown)
    if measured.fits is False:
        return None
    others = [one for one in estimated.candidates if one is not known]
    unchanged = replace(estimated.unchanged, refused="what healed the cell before comes before any new forecast")
    candidates = (replace(known, forecast=measured), *others)
    return replace(case, plan=replace(estimated, unchanged=unchanged, candidates=candidates))


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
    keep_forecasts: bool = False,
) -> tuple[Case, BaseException | None]:
    """Run the cell again with ``chosen`` in their order, each escalated if it must be. See ``retry.heal``.

    Args:
        keep_forecasts: whether the forecast and the measured peak of a healed cell are kept for the next ones.
    """
    from oomdoctor.incident import find_oom
    from oomdoctor.retry import heal as retry

    lost = (*transaction.losses(), *(f"{call} cannot be taken back" for call in case.evidence.code.not_repeatable))
    ranks = case.evidence.code.world_size or 1
    alone = f"this process is one of {ranks} ranks, and the others would wait for it" if ranks > 1 else None
    if alone or (lost and not anyway):
        refused = Outcome(kind=OutcomeKind.REFUSED, state=State.UNVERIFIED, why=alone or "; ".join(lost))
        return replace(case, outcome=refused), None
    trials = _trials(case, session, chosen)
    outcome, error = await retry(
        transaction,
        [trial for _, trial in trials],
        run,
        accelerator=session.accelerator,
        is_oom=lambda exc: find_oom(exc) is not None,
        most_attempts=most_attempts,
        time_budget_s=time_budget_s,
        failed=failed,
        shell=session.shell,
    )
    if outcome.kind is OutcomeKind.FAILED and error is not None and (fault := _device_fault(error)):
        outcome = replace(outcome, state=State.UNVERIFIED, why=f"{outcome.why}; {fault}")
    if lost:
        outcome = replace(outcome, state=State.UNVERIFIED, why="; ".join([*filter(None, [outcome.why]), *lost]))
    made = next((candidate for candidate, _ in trials if candidate.label in outcome.fixes), None)
    if made is not None and outcome.kind is OutcomeKind.HEALED and isinstance(made.patch, Refused) and made.caveat:
        outcome = replace(outcome, state=State.UNVERIFIED, why=made.caveat)
    if keep_forecasts and made is not None and outcome.kind is OutcomeKind.HEALED:
        _keep_forecast(made.forecast, outcome, session)
    return replace(case, plan=_with(case.plan, made), outcome=outcome), error


def calibration_of(session: Session, *, keep_forecasts: bool = True) -> Calibration:
    """Return what the forecasts kept say of the error of those for this program on this device."""
    from oomdoctor.forecast import calibration

    kept = calibration.rows() if keep_forecasts else ()
    if isinstance(kept, Unavailable) or not kept:
        return calibration.Calibration()
    return calibration.calibration(kept, **_terms(session))


def forecasts_kept() -> str:
    """Say how many forecasts are kept beside what was measured, and how far off they were."""
    from oomdoctor.forecast import calibration

    return calibration.summary(calibration.rows())


def _keep_forecast(forecast: Forecast, outcome: Outcome, session: Session) -> None:
    """Keep a forecast beside what was measured. What was not forecast, or is measured otherwise, says nothing.

    The host's memory is measured as the growth of the process, not as what its tensors take.
    """
    from oomdoctor.forecast import calibration

    terms = _terms(session)
    is_forecast = forecast.refused is None and forecast.basis.partition(",")[0] == terms["basis"]
    if is_forecast and forecast.peak and outcome.peak and terms["device"] != "cpu":
        calibration.keep(calibration.Row(forecast=forecast.peak, measured=outcome.peak, **terms))


def _terms(session: Session) -> dict[str, str]:
    """Return what tells which forecasts are alike."""
    import torch

    from oomdoctor.forecast.calibration import hash_of
    from oomdoctor.forecast.pricing import BASIS

    device = session.accelerator
    kind = "virtual" if device.read().simulated else device.name.partition(":")[0]
    models = hash_of(type(module).__qualname__ for _, module in session.modules)
    return {"basis": BASIS, "models": models, "torch": str(torch.__version__), "device": kind}


def _trials(case: Case, session: Session, chosen: Sequence[Candidate]) -> list[tuple[Candidate, Trial]]:
    """Return the trials: each candidate, and its stronger doses after it."""
    from oomdoctor import fixes
    from oomdoctor.forecast.planning import attempt_with_all, stronger
    from oomdoctor.retry import Trial

    trials = []
    for candidate in chosen:
        parts = [(fixes.get(fix), dose) for fix, dose in candidate.made_of]
        tried = [(candidate, parts)]
        if len(parts) == 1:
            unpriced = Forecast(basis="not priced: a stronger dose after a failure", budget=candidate.forecast.budget)
            fix = parts[0][0]
            for dose in stronger(fix, candidate.dose, case.incident, case.evidence):
                tried.append((replace(candidate, dose=dose, forecast=unpriced), [(fix, dose)]))
        for made, of in tried:
            patch, attempt = attempt_with_all(of, session, case.evidence)
            if not isinstance(attempt, Refused):
                trial = Trial(fix=made.fix, label=made.label, attempt=attempt)
                trials.append((replace(made, patch=patch), trial))
    return trials


def _with(plan: Plan, made: Candidate | None) -> Plan:
    """Return the plan with ``made`` in the place of the milder dose of the same fix."""
    if made is None:
        return plan
    return replace(plan, candidates=tuple(made if one.fix == made.fix else one for one in plan.candidates))


def _fixes_in_order(case: Case) -> list[Fix]:
    """Return every fix, those that the findings suggest first, in the findings' order."""
    from oomdoctor import fixes

    suggested = dict.fromkeys(fix for finding in case.findings for fix in finding.fixes)
    catalogue = fixes.catalogue()
    return [catalogue[fix_id] for fix_id in dict.fromkeys([*suggested, *catalogue]) if fix_id in catalogue]


def beyond_cure(case: Case) -> str | None:
    """Return why no change of the cell cures this failure, None where one may. It is not retried by itself then."""
    if case.incident.family in _BEYOND_CURE:
        return _BEYOND_CURE[case.incident.family]
    if _is_held_by_others(case) and not any(_was_seen_to_fit(one) for one in case.plan.candidates):
        return "other processes hold the device, and no change was forecast to fit into what they leave"
    return None


_BEYOND_CURE: Final = {
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


def admitted(case: Case, auto: str) -> tuple[Candidate, ...]:
    """Return the candidates that an automatic retry may use under this setting, best first.

    What other processes hold comes and goes: beside them, a shadow run of the change must fit. What broke in its shadow
    run, where the unchanged cell did not, is left to the user.
    """
    from oomdoctor import fixes

    if beyond_cure(case) is not None:
        return ()
    must_fit = _is_held_by_others(case)
    effects = {Effect.EXACT, Effect.EQUIVALENT} | ({Effect.CHANGES_RESULT} if auto == "any" else set())
    return tuple(
        candidate
        for candidate in case.plan.candidates
        if auto != "off"
        and candidate.effect in effects
        and candidate.forecast.fits is not False
        and (candidate.forecast.peak is not None or case.plan.unchanged.peak is None)
        and (_was_seen_to_fit(candidate) or not must_fit)
        and not any(fixes.get(fix).asks for fix, _ in candidate.made_of)
    )


def _budget(evidence: Evidence, reserve: int) -> int | None:
    """Return what tensors may take: what the allocator holds, and what the driver or the system can and may give."""
    held, free, cap = evidence.device.reserved, evidence.device.free, evidence.device.cap
    if isinstance(held, Unavailable) or isinstance(free, Unavailable):
        return None
    room = held + free if isinstance(cap, Unavailable) else min(held + free, cap)
    return max(room - reserve, 0)


def accelerator_of(name: str | None) -> Accelerator:
    """Return the device of this name: the virtual accelerator where it is on and so called, else a real one."""
    from oomdoctor.allocator import virtual
    from oomdoctor.evidence import devices

    simulated = virtual.active()
    if simulated is not None and (name is None or simulated.name.startswith(name)):
        return simulated
    return devices.of_name(name)


def _uncounted() -> Any:
    from oomdoctor.allocator import virtual

    return virtual.uncounted()


def rulebook(folders: tuple[Path, ...] | None = None) -> RuleBook:
    """Return the rules of oomdoctor, of packages and of ``folders``; what has faults is left out and told there.

    Args:
        folders: those that the settings of the notebook name by default.
    """
    from oomdoctor import fixes
    from oomdoctor.rulebook import everything, of_notebook

    return everything(of_notebook() if folders is None else folders, known_fixes=fixes.ids())


def explain(text_or_exception: str | BaseException, *, rules: RuleBook | None = None) -> Explanation:
    """Say what a failure means, from its text or its exception alone. Loads no torch.

    Args:
        rules: those of the notebook's settings by default.

    Raises:
        UsageError: it is neither.
    """
    from oomdoctor.incident import all_from_exception, describe, from_text
    from oomdoctor.views.explained import Explained

    given: Any = text_or_exception  # callers without a type checker give anything
    if not issubclass(type(given), (str, BaseException)):
        kind = type(given).__name__
        raise UsageError(f"explain takes the text of a failure (str) or an exception, and was given {kind}")
    if issubclass(type(given), BaseException):  # not isinstance: an exception may lie about its class, or raise
        first, *others = all_from_exception(given)
    else:
        first, *others = from_text(given)
    meanings = {incident: describe(incident) for incident in (first, *others)}
    book = rulebook() if rules is None else rules
    return Explained(
        incident=first,
        findings=book.match(first, None),
        others=tuple(others),
        meanings=meanings,
        notes=tuple(_left_out(book.faults)),
    )


def _left_out(faults: Sequence[Fault]) -> Iterator[str]:
    """Yield a line for each file that was left out, with its first fault."""
    for path, of_file in groupby(faults, key=lambda fault: fault.path):
        first, *others = of_file
        more = f" (and {len(others)} more: oomdoctor rules check {path})" if others else ""
        yield f"rule left out: {first}{more}"


def report(
    namespace: dict[str, Any] | None = None, cells: Cells | None = None, filenames: Mapping[str, int] | None = None
) -> Report:
    """Tell what holds memory now, by role and by name: the device first, where one is in use.

    Args:
        namespace: where to look for names; what the caller sees by default, its locals and its globals.
        filenames: number of the cell by the file name of its code.
    """
    from oomdoctor.allocator import virtual
    from oomdoctor.evidence import collect, devices
    from oomdoctor.evidence.frames import locals_of
    from oomdoctor.views.displayed import Report

    if namespace is None:
        caller = sys._getframe(1)
        namespace = {**caller.f_globals, **locals_of(caller)}
    run = cells or Cells(history=(Cell(number=0, source=_source_of(namespace)),))
    with _uncounted():
        session = open_session(spelled(namespace), run, virtual.active() or devices.in_use()[0])
        return Report(collect(session, None, filenames or {}), devices.absent())


def foresee(
    namespace: dict[str, Any],
    cells: Cells,
    *,
    device: str | None = None,
    memory: int | None = None,
    shell: Any = None,
    time_s: float = 10.0,
) -> MemPlan:
    """Find out what the last of ``cells`` needs, without running it.

    Args:
        device: the name, or the beginning of it, of the device to plan for: the one in use by default.
        memory: bytes of another card to plan for.
        time_s: for each part of the work: the forecast, the cards, the fixes, the batch.

    Raises:
        UsageError: no device in use is called so.
    """
    from oomdoctor.allocator import virtual
    from oomdoctor.evidence import devices
    from oomdoctor.forecast.foresee import another_card

    simulated = virtual.active()
    in_use = [*([simulated] if simulated is not None else []), *devices.in_use()]
    chosen = next((one for one in in_use if device is None or one.name == device), None)
    chosen = chosen or next((one for one in in_use if device and one.name.startswith(device)), None)
    if chosen is None:
        names = " and ".join(dict.fromkeys(one.name for one in in_use))
        raise UsageError(f"no device {device!r} is in use: there is {names}; --device-memory SIZE plans for another")
    with _uncounted():
        if memory is None:
            return _foreseen(open_session(spelled(namespace), cells, chosen, shell), None, time_s)
        with another_card() as card:
            return _foreseen(open_session(spelled(namespace), cells, card, shell), memory, time_s)


def _foreseen(session: Session, memory: int | None, time_s: float) -> MemPlan:
    from oomdoctor import fixes
    from oomdoctor.evidence import collect, devices
    from oomdoctor.fixes import _batch_at
    from oomdoctor.forecast.foresee import Batches, foresee
    from oomdoctor.model.memplan import Place
    from oomdoctor.views.words import device_name, known

    def observed(line: int | None = None) -> Evidence:
        found = collect(session, None, {}, line=line)
        if memory is None:
            return found
        held = known(found.device.reserved) or 0
        return replace(found, devices=(replace(found.device, total=memory, free=memory - held), *found.devices[1:]))

    found = observed()
    device = found.device
    if memory is None:
        total = None if isinstance(device.total, Unavailable) else device.total
        here = Place(name=device_name(device), total=total, budget=_budget(found, 0), source=device.basis)
    else:
        name = f"a device of {format_size(memory)}"
        here = Place(name=name, total=memory, budget=memory, source="as it was asked for")
    return foresee(
        session,
        here,
        lambda line: found if line is None else observed(line),
        list(fixes.catalogue().values()),
        Batches(now=_batch_at.batch_size, at=_batch_at.at_batch),
        host=devices.in_use()[-1],
        time_s=time_s,
    )


def _source_of(namespace: dict[str, Any]) -> str:
    """Return the text of the script or module whose globals these are, nothing where it cannot be had."""
    from linecache import getlines

    path = spelled(namespace).get("__file__")
    return "".join(getlines(path)) if type(path) is str else ""


def check_snapshot() -> None:
    """Refuse where torch has no CUDA allocator to take a snapshot of.

    Raises:
        NotAvailable: the line to show.
    """
    from oomdoctor.allocator import virtual
    from oomdoctor.evidence import cuda_snapshot

    if virtual.active() is not None:
        raise NotAvailable("there is no snapshot: the virtual accelerator has no CUDA allocator")
    cuda_snapshot.check()


def snapshot(path: Path) -> str:
    """Write the snapshot of torch's CUDA allocator; return in one line what it has."""
    from oomdoctor.evidence import cuda_snapshot

    check_snapshot()
    return cuda_snapshot.dump(path)


def record(case: Case) -> None:
    """Keep a case, or replace the record of the same number."""
    if case.number <= len(_cases):
        _cases[case.number - 1] = case
    else:
        _cases.append(case)


def cases() -> tuple[Case, ...]:
    """Return the cases of this process, oldest first."""
    return tuple(_cases)


def last_case() -> Case | None:
    """Return the case of the last failure, None if there was none."""
    return _cases[-1] if _cases else None

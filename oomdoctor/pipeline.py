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
from typing import TYPE_CHECKING, Any

from oomdoctor.errors import Fault, NotAvailable, UsageError
from oomdoctor.model.absence import Refused, Unavailable
from oomdoctor.model.case import Case, Outcome, OutcomeKind, State
from oomdoctor.model.explanation import Explanation
from oomdoctor.model.fix import Effect
from oomdoctor.model.kinds import spelled
from oomdoctor.model.plan import Candidate, Forecast, Plan
from oomdoctor.model.session import Accelerator, Cell, Cells, Session

if TYPE_CHECKING:
    from oomdoctor.model.evidence import Evidence
    from oomdoctor.model.fix import Fix
    from oomdoctor.retry import Transaction, Trial
    from oomdoctor.retry.heal import Run
    from oomdoctor.rulebook import RuleBook
    from oomdoctor.views.displayed import Report

__all__ = [
    "cases",
    "check_snapshot",
    "diagnose",
    "explain",
    "heal",
    "last_case",
    "observe",
    "open_session",
    "plan",
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
    with _uncounted():
        evidence = collect(session, exc, filenames, line=incident.cell.line if incident.cell else None)
    incident = replace(incident, device=incident.device or evidence.device.name)
    unpriced = Plan(unchanged=Forecast(basis="not priced yet"))
    case = Case(number=len(_cases) + 1, incident=incident, evidence=evidence, findings=(), plan=unpriced)
    return case, session


def diagnose(case: Case, rules: RuleBook) -> Case:
    """Find the causes."""
    return replace(case, findings=rules.match(case.incident, case.evidence))


def plan(case: Case, session: Session, prepare: Callable[[], None], *, time_budget_s: float, reserve: int) -> Case:
    """Price the fixes. The frames of the failure should be released by now.

    Args:
        prepare: restores the start of the cell, in the process of a shadow run.
        reserve: bytes of the budget that something else will take.
    """
    from oomdoctor.forecast.planning import make_plan

    with _uncounted():
        priced = make_plan(
            session,
            case.incident,
            case.evidence,
            _fixes_in_order(case),
            budget=_budget(case.evidence, reserve),
            prepare=prepare,
            time_budget_s=time_budget_s,
        )
    return replace(case, plan=priced)


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
) -> tuple[Case, BaseException | None]:
    """Run the cell again with ``chosen`` in their order, each escalated if it must be. See ``retry.heal``."""
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
        shell=session.shell,
    )
    if lost:
        outcome = replace(outcome, state=State.UNVERIFIED, why="; ".join([*filter(None, [outcome.why]), *lost]))
    made = next((candidate for candidate, _ in trials if candidate.label in outcome.fixes), None)
    if made is not None and outcome.kind is OutcomeKind.HEALED and isinstance(made.patch, Refused) and made.caveat:
        outcome = replace(outcome, state=State.UNVERIFIED, why=made.caveat)
    return replace(case, plan=_with(case.plan, made), outcome=outcome), error


def _trials(case: Case, session: Session, chosen: Sequence[Candidate]) -> list[tuple[Candidate, Trial]]:
    """Return the trials: each candidate, and its stronger doses after it."""
    from oomdoctor import fixes
    from oomdoctor.forecast.planning import attempt_with, stronger
    from oomdoctor.retry import Trial

    trials = []
    for candidate in chosen:
        fix = fixes.get(candidate.fix)
        for dose in (candidate.dose, *stronger(fix, candidate.dose, case.incident, case.evidence)):
            patch, attempt = attempt_with(fix, dose, session, case.evidence)
            if isinstance(attempt, Refused):
                continue
            made = candidate
            if dose != candidate.dose:
                unpriced = Forecast(
                    basis="not priced: a stronger dose after a failure", budget=candidate.forecast.budget
                )
                made = replace(candidate, dose=dose, patch=patch, forecast=unpriced)
            trials.append((made, Trial(fix=made.fix, label=made.label, attempt=attempt)))
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


def admitted(case: Case, auto: str) -> tuple[Candidate, ...]:
    """Return the candidates that an automatic retry may use under this setting, best first."""
    from oomdoctor import fixes

    effects = {Effect.EXACT, Effect.EQUIVALENT} | ({Effect.CHANGES_RESULT} if auto == "any" else set())
    return tuple(
        candidate
        for candidate in case.plan.candidates
        if auto != "off"
        and candidate.effect in effects
        and candidate.forecast.fits is not False
        and not fixes.get(candidate.fix).asks
    )


def _budget(evidence: Evidence, reserve: int) -> int | None:
    """Return what tensors may take: what the allocator holds, and what the driver or the system can still give."""
    held, free = evidence.device.reserved, evidence.device.free
    if isinstance(held, Unavailable) or isinstance(free, Unavailable):
        return None
    return max(held + free - reserve, 0)


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


def report(namespace: dict[str, Any] | None = None, cells: Cells | None = None) -> Report:
    """Tell what holds memory now, by role and by name: the device first, where one is in use.

    Args:
        namespace: where to look for names; what the caller sees by default, its locals and its globals.
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
        return Report(collect(session, None, {}), devices.absent())


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

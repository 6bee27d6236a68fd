"""What follows when memory ran out: diagnose, release, price, show or retry.

A failure outside of every cell, in a callback of a widget or in a thread, is diagnosed where it is shown. There is no
cell that could be run again for it, and it says so.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from oomdoctor import pipeline
from oomdoctor.model.case import Case, OutcomeKind
from oomdoctor.model.incident import CellLine
from oomdoctor.model.session import Session
from oomdoctor.retry.release import release, uncollected
from oomdoctor.shell.borders import quietly
from oomdoctor.shell.cells import as_in_the_cell, cells_until, filenames, run_lines, runs_apart
from oomdoctor.shell.retrying import OpenCase, Request, heal
from oomdoctor.shell.showing import Filling, Shown, comes_later
from oomdoctor.shell.stragglers import Beside

if TYPE_CHECKING:
    from oomdoctor.shell.extension import Extension

LOADED_LATE: Final = "oomdoctor was loaded by this very cell, so the state at its start is not known: run it again"


def ran_in(where: str) -> str:
    """Return why what ran in ``where``, and in no cell, cannot be run again."""
    return f"it ran in {where} and not in a cell, so there is nothing to run again: call the same function in a cell"


@dataclass(frozen=True, slots=True, kw_only=True)
class CellRun:
    """A cell that was run.

    Attributes:
        kwargs: that the shell was asked to run it with.
        transaction: takes it back; None where there is no snapshot.
        beside: what went on beside it when it began.
    """

    source: str
    kwargs: dict[str, Any]
    transaction: Any
    beside: Beside


async def answer(extension: Extension, failure: BaseException, result: Any, run: CellRun) -> None:
    """Answer a failure of a cell: run the cell again where that is to be done by itself, and tell what is found."""
    guarded, auto = extension.borders.guarded, extension.config.auto
    later, shown = auto == "off" and comes_later(extension.shell, extension.config.forecasts), Shown(extension)
    with uncollected():
        found = _looked_at(extension, failure, lambda: _observe(extension, failure, result, run), later=later)
        if found is not None and found.plan.pending:
            pending = found
            guarded("display", lambda: shown.show(pending))
    if found is not None and found.plan.pending:
        _fill_in(extension, failure, found, shown)
        return
    if found is not None:
        try:
            planned: Case | None = guarded("forecast", lambda: _plan(extension, found, later=False))
            case = planned or pipeline.last_case() or found
        except BaseException:  # an interrupt: what is known by then is shown all the same
            extension.tracebacks.send_held()
            guarded("display", lambda: Shown(extension).show(pipeline.last_case() or found))
            raise
        chosen = guarded("choice", lambda: pipeline.admitted(case, auto)) or ()
        # Where a magic or a widget has shown the error and gone on, the cell has ended well without having run.
        was_shown = bool(result.success)
        may_retry = extension.open is not None and chosen and (was_shown or result.error_in_exec is failure)
        anyway = bool(getattr(extension.shell, "anyway", False))
        request = Request(case=case, chosen=chosen, anyway=anyway, by_itself=True)
        if may_retry and await heal(extension, request, result, run, tells=True):
            if was_shown and extension.healed is None:  # it answers as it would have
                result.error_in_exec, extension.shell.last_execution_succeeded = None, True
            return
    extension.tracebacks.send_held()
    if found is not None:
        guarded("display", lambda: Shown(extension).show(case))
        guarded("notice", lambda: _tell_why_not(extension, case))


def answer_outside(extension: Extension, failure: BaseException, why: str, source: str) -> None:
    """Diagnose a failure outside of every cell that was seen to begin, after it was shown.

    Args:
        why: nothing can be run again.
        source: the text of the cell, nothing where it was in none.
    """

    def observe() -> Case:
        number = extension.shell.execution_count - bool(source)  # the shell counts a cell when it begins
        return pipeline.record(pipeline.refused(_observed(extension, failure, number, source)[0], why))

    guarded, case = extension.borders.guarded, _looked_at(extension, failure, observe)
    if case is not None:
        guarded("display", lambda: Shown(extension).show(case))
        guarded("notice", lambda: _tell_why_not(extension, case))


def _fill_in(extension: Extension, failure: BaseException, found: Case, shown: Shown) -> None:
    """Let go of what the failure holds, and begin with the forecasts for what is ``shown`` already."""
    guarded = extension.borders.guarded
    _let_go(extension, failure)
    unpriced = replace(found, plan=pipeline.unpriced())
    case: Case = guarded("forecast", lambda: _plan(extension, unpriced, later=True)) or unpriced
    if extension.filling is not None:
        extension.filling.begin(shown.update)
    else:
        guarded("display", lambda: shown.update(case))


def _looked_at(
    extension: Extension, failure: BaseException, observe: Callable[[], Case], *, later: bool = False
) -> Case | None:
    """Collect the evidence, let go of what the failure holds, and find the causes.

    Args:
        later: whether the rest may come after the display. Then the plan of what is returned is pending, and the
            failure not let go of yet, unless the memory that it holds is what the display needs itself.
    """
    guarded = extension.borders.guarded
    if guarded("reserve", lambda: _lacks_room(extension, failure)):
        return None
    # The failure holds the memory that ran out. Where that leaves no room to look, it is let go of first, and the
    # census is without what it held.
    observed = quietly(observe)
    later = later and observed is not None and extension.open is not None and observed.incident.device != "cpu"
    if not later:
        _let_go(extension, failure)
    case: Case | None = observed or guarded("evidence", observe)
    case = case or guarded("message", lambda: _by_message(extension, failure))
    if case is None:
        return None
    found = case
    diagnosed: Case = guarded("diagnosis", lambda: _diagnose(extension, found))
    diagnosed = diagnosed or quietly(lambda: _diagnose(extension, found, by_message=True)) or case
    return replace(diagnosed, plan=pipeline.unpriced(pending=True)) if later else diagnosed


def _lacks_room(extension: Extension, failure: BaseException) -> bool:
    """Return whether there is no room to load a diagnosis, also without what the failure holds; then it says so.

    To load what fits would take the last of the room, and find nothing.
    """
    if not extension.warming.lacks_room():
        return False
    if not extension.config.keep_frames:
        quietly(lambda: release(failure, extension.shell))
    why = extension.warming.lacks_room()
    if why:
        extension.close("a cell has run out of memory that there was no room to diagnose")
        print(f"oomdoctor makes no diagnosis: {why}. Free memory, and run the cell again.", file=sys.stderr)
    return bool(why)


def _let_go(extension: Extension, failure: BaseException) -> None:
    if not extension.config.keep_frames:
        extension.borders.guarded("release", lambda: release(failure, extension.shell))


def _observe(extension: Extension, failure: BaseException, result: Any, run: CellRun) -> Case:
    shell = extension.shell
    number = result.execution_count or shell.execution_count
    is_kept = run.transaction is not None and run.transaction.is_kept
    case, session = _observed(extension, failure, number, run.source, is_kept=is_kept)
    case = _of_cell(case, number, run.source)
    if (line := runs_apart(run.source)) is not None:
        script = "the script has a namespace of its own, in which nothing is changed from outside"
        hint = "`oomdoctor run` heals a script, `%run -i` lets it share the names of the notebook"
        why = f"`{line}` cannot be run with a change in place: {script}; {hint}"
        return pipeline.record(pipeline.refused(case, why))
    if run.transaction is not None:
        kept = failure if extension.config.keep_frames else None
        extension.open = OpenCase(session, run.transaction, run.beside, failure=kept, changed=dict(extension.changed))
    return pipeline.record(case)


def _of_cell(case: Case, number: int, source: str) -> Case:
    """Return the case as one of its cell, where no line of the cell is in the traceback: it runs a script by `%run`."""
    cell, ran = case.incident.cell, run_lines(source)
    if not ran or (cell is not None and cell.number == number):
        return case
    own = CellLine(number=number, line=None, source_line=ran[0])
    return replace(case, incident=replace(case.incident, cell=own, inner=case.incident.inner or cell))


def _observed(
    extension: Extension, failure: BaseException, number: int, source: str, *, is_kept: bool = False
) -> tuple[Case, Session]:
    shell = extension.shell
    open_session = partial(pipeline.open_session, shell=shell, is_kept=is_kept)
    cells = cells_until(shell, number, source)
    known, is_script = filenames(shell, number), hasattr(shell, "script")  # whose lines are the file's
    with nullcontext(known) if is_script else as_in_the_cell(failure, cells.failing, known) as names:
        case, session = pipeline.observe(failure, partial(open_session, shell.user_ns, cells), names)
    extension.close()
    extension.failed_cell = cells.failing
    return pipeline.record(case), session


def _by_message(extension: Extension, failure: BaseException) -> Case:
    """Return the case of a failure that could not be looked at."""
    extension.close()
    why = "the memory could not be looked at, so nothing is known of a change that would fit"
    known = filenames(extension.shell, extension.shell.execution_count)
    return pipeline.record(pipeline.by_message(failure, known, why))


def _diagnose(extension: Extension, case: Case, *, by_message: bool = False) -> Case:
    rules = pipeline.rulebook(tuple(map(Path, extension.config.rule_paths)))
    for fault in rules.faults:
        extension.borders.tell(f"rule left out: {fault}")
    return pipeline.record(pipeline.diagnose(case, rules, by_message=by_message))


def _plan(extension: Extension, case: Case, *, later: bool) -> Case:
    """Return the case with its plan; where that comes ``later``, with what is known of it so far."""
    if extension.open is None:
        return case
    transaction, session = extension.open.transaction, extension.open.session
    warming, is_host = extension.warming, session.accelerator.name == "cpu"
    reserve = transaction.bytes_to_copy + warming.kept + warming.to_load if is_host else 0
    terms: dict[str, Any] = {"time_budget_s": extension.config.forecast_time_s, "reserve": reserve}
    priced = _recalled(extension, case, session, reserve)
    if priced is None and later:
        planning = pipeline.planning(case, session, transaction.restore, **terms)
        extension.filling = Filling(case, planning, extension.borders, pipeline.record)
        priced = extension.filling.case
    is_hurried = extension.config.auto != "off"
    priced = priced or pipeline.plan(case, session, transaction.restore, **terms, is_hurried=is_hurried)
    return pipeline.record(priced)


def planned_within(extension: Extension, case: Case, opened: OpenCase, reserve: int) -> Case:
    """Return the case with its fixes priced anew, for so many bytes less than there are."""
    terms: dict[str, Any] = {"time_budget_s": extension.config.forecast_time_s, "reserve": reserve}
    return pipeline.record(pipeline.plan(case, opened.session, opened.transaction.restore, **terms))


def _recalled(extension: Extension, case: Case, session: Session, reserve: int) -> Case | None:
    """Return the case planned with what healed it before; None where there is nothing, or `auto` may not use it."""
    auto, remedy = extension.config.auto, extension.remedies.of(case, session.cells.failing.source)
    planned = None if remedy is None else pipeline.recall(case, session, remedy, reserve=reserve)
    if planned is None or auto == "off":
        return planned
    return planned if planned.plan.candidates[0] in pipeline.admitted(planned, auto) else None


def _tell_why_not(extension: Extension, case: Case) -> None:
    """Say why there is no retry: of a cell that cannot be run again, or one by itself that could cure nothing."""
    if case.outcome.kind is not OutcomeKind.REFUSED:
        why = pipeline.beyond_cure(case) if extension.config.auto != "off" else None
        if why is None:
            return
        case = pipeline.record(pipeline.refused(case, why))
    extension.notice(case)

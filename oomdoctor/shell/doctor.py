"""What follows when memory ran out: observe, release, diagnose, price, then run the cell again or tell what was found.

A retry runs the failed cell as the shell runs cells, and its cell answers as the retry did. A failure outside of every
cell, in a callback of a widget or in a thread, is diagnosed where it is shown. There is no cell that could be run again
for it, and it says so.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from oomdoctor import pipeline
from oomdoctor.language import say
from oomdoctor.model.case import Case, OutcomeKind
from oomdoctor.model.incident import CellLine
from oomdoctor.model.plan import Candidate
from oomdoctor.model.session import Session
from oomdoctor.retry.release import release, uncollected
from oomdoctor.shell.background_work import Beside, end_since, left_since, threads_at_work
from oomdoctor.shell.cells import (
    as_in_the_cell,
    cells_until,
    filenames,
    run_lines,
    runs_apart,
)
from oomdoctor.shell.error_boundary import quietly
from oomdoctor.shell.open_case import Attempts, Filling, OpenCase, may_fill_in
from oomdoctor.shell.showing import Shown

if TYPE_CHECKING:
    from oomdoctor.shell.extension import Extension

LOADED_LATE: Final = "oomdoctor was loaded in this cell, so its starting state is unknown: run the cell again"


def ran_in(where: str) -> str:
    """Return why what ran in ``where``, and in no cell, cannot be run again."""
    return f"it ran in {where} and not in a cell, so there is nothing to run again: call the same function in a cell"


@dataclass(frozen=True, slots=True, kw_only=True)
class CellRun:
    """A cell that was run, with what the shell was asked to run it with.

    Attributes:
        transaction: takes it back; None where there is no snapshot.
        beside: what went on beside it when it began.
        shown: where the answer to its failure stands; None where it has no place yet.
    """

    source: str
    kwargs: dict[str, Any]
    transaction: Any
    beside: Beside
    shown: Shown | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A retry that a magic or a button asked for; it runs when their cell is done.

    ``anew``: also with what ran out of memory before, because the user named it; ``by_itself``: nobody asked for it.
    """

    case: Case
    chosen: tuple[Candidate, ...]
    anyway: bool = False
    anew: bool = False
    by_itself: bool = False


async def answer(extension: Extension, failure: BaseException, result: Any, run: CellRun) -> None:
    """Answer a failure of a cell: run the cell again where that is to be done by itself, and tell what is found."""
    guarded, auto, shown = extension.borders.guarded, extension.config.auto, run.shown or Shown(extension)
    with uncollected():
        found = looked_at(extension, failure, lambda: observe_cell(extension, failure, result, run))
        # On the host what comes with the diagnosis is made first.
        comes_later = found is not None and _comes_later(extension, found)
        if found is not None and comes_later:
            pending = pipeline.record(replace(found, plan=pipeline.unpriced(pending=True)))
            guarded("display", lambda: shown.show(pending))
            gc.collect()  # what the failure held in cycles: the forecasts begin without it
    if found is None:
        extension.tracebacks.send_held()
        guarded("display", shown.withdraw)
        return
    if comes_later:
        _fill_in(extension, found, shown)
        return
    try:
        planned: Case | None = guarded(
            "forecast", lambda: plan(extension, found, is_hurried=extension.config.auto != "off")
        )
        case = planned or pipeline.last_case() or found
    except BaseException as exc:  # an interrupt: what is known by then is shown all the same
        shown.show_with(extension.tracebacks.send_held, pipeline.last_case() or found)
        if isinstance(exc, KeyboardInterrupt):  # the cell has failed already, and ends here
            print("oomdoctor: interrupted: the fixes are as far as they are known", file=sys.stderr)
            return
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
    shown.show_with(extension.tracebacks.send_held, case)
    guarded("notice", lambda: _tell_why_not(extension, case))


def _comes_later(extension: Extension, case: Case) -> bool:
    """Return whether forecasts follow while the diagnosis is shown: not of what ran out on the host, which needs it."""
    return case.incident.device != "cpu" and _may_fill_in(extension)


def answer_outside(extension: Extension, failure: BaseException, why: str, source: str) -> None:
    """Diagnose a failure outside of every cell that was seen to begin, after it was shown; nothing can be run again.

    ``source`` is the text of the cell, nothing where it was in none.
    """

    def observe() -> Case:
        number = extension.shell.execution_count - bool(source)  # the shell counts a cell when it begins
        return pipeline.record(pipeline.refused(_observed(extension, failure, number, source)[0], why))

    guarded, case = extension.borders.guarded, looked_at(extension, failure, observe)
    if case is not None:
        guarded("display", lambda: Shown(extension).show(case))
        if _comes_later(extension, case):  # else it was collected before the diagnosis
            gc.collect()
        guarded("notice", lambda: _tell_why_not(extension, case))


def looked_at(extension: Extension, failure: BaseException, observe: Callable[[], Case]) -> Case | None:
    """Collect the evidence, let go of what the failure holds, and find the causes."""
    guarded = extension.borders.guarded

    def let_go() -> None:
        if not extension.config.keep_frames:
            release(failure, extension.shell, collects=False)

    if guarded("reserve", lambda: _lacks_room(extension, let_go)):
        return None
    case: Case | None = extension.borders.observed(observe, let_go)
    case = case or guarded("message", lambda: _by_message(extension, failure))
    if case is None:
        return None
    found = case
    if not _comes_later(extension, case):  # on the host it is the diagnosis that needs the memory
        gc.collect()
    diagnosed: Case = guarded("diagnosis", lambda: _diagnose(extension, found))
    return diagnosed or quietly(lambda: _diagnose(extension, found, by_message=True)) or case


def _lacks_room(extension: Extension, let_go: Callable[[], None]) -> bool:
    """Return whether there is no room to load a diagnosis, also without what the failure holds; then it says so.

    To load what fits would take the last of the room, and find nothing.
    """
    if not extension.warming.lacks_room():
        return False
    quietly(let_go)
    gc.collect()
    why = extension.warming.lacks_room()
    if why:
        extension.close("a cell has run out of memory that there was no room to diagnose")
        print(say(f"oomdoctor makes no diagnosis: {why}. Free memory, and run the cell again."), file=sys.stderr)
    return bool(why)


def observe_cell(extension: Extension, failure: BaseException, result: Any, run: CellRun) -> Case:
    """Return the case of a failure of a cell, which can be run again from here on where it has a snapshot."""
    shell = extension.shell
    number = result.execution_count or shell.execution_count
    is_kept = run.transaction is not None and run.transaction.is_kept
    case, session = _observed(extension, failure, number, run.source, is_kept=is_kept)
    case = _of_cell(case, number, run.source)
    if (line := runs_apart(run.source)) is not None:
        script = "the script runs in its own namespace"
        hint = "`oomdoctor run` heals a script, `%run -i` lets it share the names of the notebook"
        why = f"`{line}` cannot be retried with a fix: {script}; {hint}"
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
    why = "memory could not be inspected, so no fix was looked for"
    known = filenames(extension.shell, extension.shell.execution_count)
    return pipeline.record(pipeline.by_message(failure, known, why))


def _diagnose(extension: Extension, case: Case, *, by_message: bool = False) -> Case:
    rules = pipeline.rulebook(tuple(map(Path, extension.config.rule_paths)))
    for fault in rules.faults:
        extension.borders.tell(f"rule left out: {fault}")
    url = extension.config.docs_url
    return pipeline.record(pipeline.diagnose(case, rules, by_message=by_message, docs_url=url))


def plan(extension: Extension, case: Case, **terms: Any) -> Case:
    """Return the case with its plan; for the terms see ``pipeline.plan``."""
    opened = extension.open
    if opened is None:
        return case
    return pipeline.record(pipeline.plan(case, opened.session, opened.transaction, **_terms(extension, case), **terms))


def _may_fill_in(extension: Extension) -> bool:
    return extension.config.auto == "off" and extension.open is not None and may_fill_in(extension.shell)


def _fill_in(extension: Extension, case: Case, shown: Shown) -> None:
    """Begin with the forecasts for what is ``shown`` already."""
    opened, borders = extension.open, extension.borders

    def begin() -> Filling | None:
        if opened is None:
            return None
        planning = pipeline.planning(case, opened.session, opened.transaction, **_terms(extension, case))
        return Filling(case, planning, borders, shown)

    extension.filling = borders.guarded("forecast", begin)
    if extension.filling is None:
        borders.guarded("display", lambda: shown.update(pipeline.record(case)))


def _terms(extension: Extension, case: Case) -> dict[str, Any]:
    warming, free = extension.warming, case.evidence.device.free
    kept = warming.kept + warming.to_load + extension.guard.margin(free if isinstance(free, int) else None)
    return {"time_budget_s": extension.config.forecast_time_s, "set_aside": kept}


def _tell_why_not(extension: Extension, case: Case) -> None:
    """Say why there is no retry: of a cell that cannot be run again, or one by itself that could cure nothing."""
    if case.outcome.kind is not OutcomeKind.REFUSED:
        why = pipeline.beyond_cure(case) if extension.config.auto != "off" else None
        if why is None:
            return
        case = pipeline.record(pipeline.refused(case, why))
    extension.notice(case)


# The retry ------------------------------------------------------------------------------------------------------------


async def heal(extension: Extension, request: Request, result: Any, cell: CellRun, *, tells: bool = False) -> bool:
    """Heal; whatever goes wrong in ours leaves the state of the cell's start and the user's own error.

    The shell's ``result``, of the cell that fails or that asks for the retry, answers as the retry does. ``tells``:
    whether the diagnosis is shown where it was not healed.
    """
    opened = extension.open
    if opened is None:
        return False
    failing, own = opened.session.cells.failing, opened.failure
    attempts = Attempts(extension, opened, cell.kwargs, extension.is_source_awaited(failing), request.anyway, tells)
    try:
        ended = await extension.borders.retried(_heal(extension, request, attempts), opened.transaction.restore)
    except KeyboardInterrupt as exc:  # beside an attempt: the state is that of the cell's start by now
        ended = pipeline.record(pipeline.interrupted(request.case, opened.transaction)), exc.with_traceback(None)
    if ended is None:
        return False
    case, error = ended
    is_healed = case.outcome.kind is OutcomeKind.HEALED
    if tells and case.outcome.kind is OutcomeKind.ROLLED_BACK:
        error = own  # the cell has failed as it is: what its retries ran into is told with the outcome
    if is_healed or error is not None:  # the cell answers as its retry did
        result.error_in_exec = error
    if is_healed:
        result.result = getattr(attempts.last, "result", None)
    extension.shell.last_execution_succeeded, extension.shell.last_execution_result = result.success, result
    if is_healed:
        extension.tracebacks.drop_held()
        extension.open, extension.healed = None, opened
        extension.changed.update(attempts.changes)
    else:
        if case.outcome.interrupted or (error is None and not tells):
            extension.tracebacks.drop_held(error)  # the user's interrupt, or ours: a guard that stopped the attempt
        if tells:
            shown_of = own if case.outcome.interrupted else error
            Shown(extension).show_with(partial(extension.tracebacks.send_held, shown_of), case)
        else:
            extension.tracebacks.send_held(error)
    extension.borders.guarded("notice", lambda: extension.notice(case))
    shown, before = extension.shown, [one.fix for one in request.case.plan.candidates]
    if shown is not None:
        extension.borders.guarded("display", lambda: shown.tell_end(case))
    is_another = before != [one.fix for one in case.plan.candidates] or any(one.refuted for one in case.plan.candidates)
    if shown is not None and is_another:
        extension.borders.guarded("display", lambda: shown.offer(case))
    return True


async def _heal(extension: Extension, request: Request, attempts: Attempts) -> tuple[Case, BaseException | None]:
    opened = attempts.opened
    still = "; ".join((*threads_at_work(), *left_since(opened.beside))) if not request.anyway else ""
    passable = bool(still) and extension.in_flight <= 1
    if extension.in_flight > 1:
        still = "another cell is running meanwhile"
    still = still or await end_since(opened.beside, waits=attempts.waits) or ""
    if still:
        return pipeline.record(pipeline.refused(request.case, still, anyway=passable)), None
    if opened.failure is not None:
        release(opened.failure, extension.shell)
        opened.failure = None
    case, error = await pipeline.heal(
        request.case,
        opened.session,
        opened.transaction,
        request.chosen,
        attempts.run,
        anyway=request.anyway,
        failed=set() if request.anew else opened.failed,
        by_itself=request.by_itself,
        places=lambda: filenames(extension.shell, opened.session.cells.failing.number),
        **extension.config.limits,
    )
    return pipeline.record(case), error

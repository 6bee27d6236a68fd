"""The retry in a shell: the failed cell is run again as the shell runs cells, and its cell answers as the retry did."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from oomdoctor.errors import UsageError
from oomdoctor.model.case import Case, Outcome, OutcomeKind, State
from oomdoctor.model.plan import Candidate
from oomdoctor.model.session import Attempt, Cell, Session
from oomdoctor.program.compiled import on_their_lines
from oomdoctor.shell.changed import as_cell, texts_of
from oomdoctor.shell.running import Run
from oomdoctor.shell.script_watch import left_alone
from oomdoctor.shell.showing import Shown
from oomdoctor.shell.stragglers import Beside, beside, end_since, pools_since, processes_since, threads_at_work

if TYPE_CHECKING:
    from oomdoctor.shell.extension import Extension
    from oomdoctor.shell.failing import CellRun


@dataclass(slots=True)
class OpenCase:
    """A failure that can still be retried: its live side, kept until the user's state moves on.

    Attributes:
        failed: labels of the changes that it ran out of memory with as well.
        beside: what went on beside its cell when that began.
        failure: what ended it, where its frames are kept: a retry lets go of them, as it needs their memory.
        attempts: how many attempts the retry that is running, or that ran last, has begun.
        changed: the text of each cell that earlier retries had changed.
    """

    session: Session
    transaction: Any
    failed: set[str] = field(default_factory=set)
    beside: Beside = field(default_factory=Beside)
    failure: BaseException | None = None
    attempts: int = 0
    changed: Mapping[int, str] = field(default_factory=dict)


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


@dataclass(slots=True)
class _Attempts:
    """Runs attempts of the open case in a shell.

    Attributes:
        waits: whether the loop awaits the cell, so that what it leaves behind can be awaited.
        anyway: whether another attempt may follow what cannot be taken back.
        last: the shell's result of the one that ran last; ``changes``: the text of each cell that it changed.
    """

    extension: Extension
    failing: Cell
    kwargs: dict[str, Any]
    waits: bool
    anyway: bool = False
    last: Any = None
    changes: dict[int, str] = field(default_factory=dict)

    async def run(self, attempt: Attempt) -> BaseException | None:
        """Run redefined functions and the cell's text the way the shell runs cells; return what the code raised."""
        run, before = Run(self.extension, is_retry=True), beside()
        if self.extension.open is not None:
            self.extension.open.attempts += 1
        self.extension.warming.keep_back()
        run_source = functools.partial(self.extension.run_source, run)
        with left_alone():
            for replay, cell in zip_longest(attempt.replays, attempt.cells):
                text, number = (on_their_lines(replay, cell.source), cell.number) if cell else (replay, None)
                with as_cell(self.extension.shell, number):
                    answer = await run_source(text, {**self.kwargs, "silent": True})
                if error := _error_of(answer):
                    return error
            if attempt.replays and self.extension.open is not None:
                self.extension.open.transaction.set_aside()
            with as_cell(self.extension.shell, self.failing.number):
                self.last = await run_source(attempt.source, self.kwargs)
            self.changes = texts_of(attempt, self.failing)
        # What a magic or a widget has shown has not run to its end either, whatever the cell answers.
        error = _error_of(self.last) or run.take_failure()
        if error is not None:
            left = () if self.anyway else (*processes_since(before), *pools_since(before))
            why = await end_since(before, waits=self.waits) or "; ".join(left)
            if why:
                raise RuntimeError(why)
        return error


async def heal(extension: Extension, request: Request, result: Any, cell: CellRun, *, tells: bool = False) -> bool:
    """Heal; whatever goes wrong in ours leaves the state of the cell's start and the user's own error.

    Args:
        result: the shell's, of the cell that fails or that asks for the retry; it answers as the retry does.
        cell: that cell.
        tells: whether the diagnosis is shown where it was not healed.
    """
    opened = extension.open
    failing = Cell(number=0, source="") if opened is None else opened.session.cells.failing
    attempts = _Attempts(extension, failing, cell.kwargs, extension.is_awaited(cell), request.anyway)
    own = None if opened is None else opened.failure
    try:
        case, error = await _heal(extension, request, attempts)
    except Exception as exc:  # noqa: BLE001 - border: the user's result must stand whatever fails here
        extension.borders.fault("retry", exc)
        if opened is not None:
            extension.borders.guarded("rollback", opened.transaction.restore)
        return False
    except BaseException:  # an interrupt, which may have come in the midst of anything
        if opened is not None:
            extension.borders.guarded("rollback", opened.transaction.restore)
        raise
    is_healed = case.outcome.kind is OutcomeKind.HEALED
    if tells and case.outcome.kind is OutcomeKind.ROLLED_BACK:
        error = own  # the cell has failed as it is: what its retries ran into is told with the outcome
    _take_over(extension.shell, result, error, attempts.last if is_healed else None)
    if is_healed:
        extension.tracebacks.drop_held()
        extension.open, extension.healed = None, opened
        extension.changed.update(attempts.changes)
    else:
        extension.tracebacks.send_held(error)
        if tells:
            extension.borders.guarded("display", lambda: Shown(extension).show(case))
    extension.borders.guarded("notice", lambda: extension.notice(case))
    shown = extension.shown
    if shown is not None and any(one.refuted for one in case.plan.candidates):
        extension.borders.guarded("display", lambda: shown.offer(case))
    return True


async def _heal(extension: Extension, request: Request, attempts: _Attempts) -> tuple[Case, BaseException | None]:
    from oomdoctor import pipeline

    opened, config = extension.open, extension.config
    if opened is None:
        raise UsageError("the case can no longer be retried: run its cell again")
    meanwhile = (*threads_at_work(), *processes_since(opened.beside), *pools_since(opened.beside))
    still = "; ".join(meanwhile) if not request.anyway else ""
    passable = bool(still) and extension.in_flight <= 1
    if extension.in_flight > 1:
        still = "another cell is running meanwhile"
    still = still or await end_since(opened.beside, waits=attempts.waits) or ""
    if still:
        refused = Outcome(kind=OutcomeKind.REFUSED, state=State.UNVERIFIED, why=still, anyway=passable)
        case, error = replace(request.case, outcome=refused), None
    else:
        _let_go(opened, extension.shell)
        case, error = await pipeline.heal(
            request.case,
            opened.session,
            opened.transaction,
            request.chosen,
            attempts.run,
            most_attempts=config.attempts,
            time_budget_s=config.retry_time_s,
            anyway=request.anyway,
            failed=set() if request.anew else opened.failed,
            by_itself=request.by_itself,
        )
        extension.remedies.note(case, opened.session.cells.failing.source, request.chosen[0].label)
    pipeline.record(case)
    return case, error


def _let_go(opened: OpenCase, shell: Any) -> None:
    failure, opened.failure = opened.failure, None
    if failure is not None:
        from oomdoctor.retry.release import release

        release(failure, shell)


def _take_over(shell: Any, result: Any, error: BaseException | None, healed: Any) -> None:
    """Let the cell answer as its retry did.

    Args:
        healed: the shell's result of the attempt that healed it, None where none did.
    """
    if healed is not None:
        result.error_in_exec = error
        result.result = getattr(healed, "result", None)
    elif error is not None:
        result.error_in_exec = error
    shell.last_execution_succeeded = result.success
    shell.last_execution_result = result


def _error_of(result: Any) -> BaseException | None:
    error: BaseException | None = result.error_before_exec or result.error_in_exec
    return error

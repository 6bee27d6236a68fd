"""The retry in a shell: the failed cell is run again as the shell runs cells, and its cell answers as the retry did.

And what is left of it in the notebook: its source for the next cell, and the way back from a healed one.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from oomdoctor import pipeline
from oomdoctor.errors import UsageError
from oomdoctor.model.case import Case, Outcome, OutcomeKind, State
from oomdoctor.model.fix import Patch
from oomdoctor.model.plan import Candidate
from oomdoctor.model.session import Attempt, Session
from oomdoctor.program.compiled import on_their_lines
from oomdoctor.retry.release import release
from oomdoctor.shell.borders import Run, left_alone
from oomdoctor.shell.cells import as_cell, filenames, texts_of
from oomdoctor.shell.showing import Shown
from oomdoctor.shell.stragglers import Beside, beside, clear_away, end_since, left_since, threads_at_work

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
    beside: Beside
    failed: set[str] = field(default_factory=set)
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
        opened: whose cell is run again.
        waits: whether the loop awaits the cell, so that what it leaves behind can be awaited.
        anyway: whether another attempt may follow what cannot be taken back.
        last: the shell's result of the one that ran last; ``changes``: the text of each cell that it changed.
    """

    extension: Extension
    opened: OpenCase
    kwargs: dict[str, Any]
    waits: bool
    anyway: bool = False
    last: Any = None
    changes: dict[int, str] = field(default_factory=dict)

    async def run(self, attempt: Attempt) -> BaseException | None:
        """Run redefined functions and the cell's text the way the shell runs cells; return what the code raised."""
        run, before, failing = Run(self.extension, is_retry=True), beside(), self.opened.session.cells.failing
        self.opened.attempts += 1
        self.extension.warming.keep_back()
        run_source = functools.partial(self.extension.run_source, run)
        with left_alone():
            for replay, cell in zip_longest(attempt.replays, attempt.cells):
                text, number = (on_their_lines(replay, cell.source), cell.number) if cell else (replay, None)
                with as_cell(self.extension.shell, number):
                    answer = await run_source(text, {**self.kwargs, "silent": True})
                if error := _error_of(answer):
                    return error
            if attempt.replays:
                self.opened.transaction.set_aside()
            with as_cell(self.extension.shell, failing.number):
                self.last = await run_source(attempt.source, self.kwargs)
            self.changes = texts_of(attempt, failing)
        # What a magic or a widget has shown has not run to its end either, whatever the cell answers.
        error = _error_of(self.last) or run.take_failure()
        if error is not None:
            await clear_away(before, waits=self.waits, anyway=self.anyway)
        return error


async def heal(extension: Extension, request: Request, result: Any, cell: CellRun, *, tells: bool = False) -> bool:
    """Heal; whatever goes wrong in ours leaves the state of the cell's start and the user's own error.

    Args:
        result: the shell's, of the cell that fails or that asks for the retry; it answers as the retry does.
        tells: whether the diagnosis is shown where it was not healed.
    """
    opened = extension.open
    if opened is None:
        return False
    failing, own = opened.session.cells.failing, opened.failure
    attempts = _Attempts(extension, opened, cell.kwargs, extension.is_source_awaited(failing), request.anyway)
    ended = await extension.borders.retried(_heal(extension, request, attempts), opened.transaction.restore)
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
        if error is None and not tells:  # what was held back is ours: a guard that stopped the attempt
            extension.tracebacks.drop_held()
        extension.tracebacks.send_held(error)
        if tells:
            extension.borders.guarded("display", lambda: Shown(extension).show(case))
    extension.borders.guarded("notice", lambda: extension.notice(case))
    shown = extension.shown
    if shown is not None and any(one.refuted for one in case.plan.candidates):
        extension.borders.guarded("display", lambda: shown.offer(case))
    return True


async def _heal(extension: Extension, request: Request, attempts: _Attempts) -> tuple[Case, BaseException | None]:
    opened = attempts.opened
    meanwhile = (*threads_at_work(), *left_since(opened.beside))
    still = "; ".join(meanwhile) if not request.anyway else ""
    passable = bool(still) and extension.in_flight <= 1
    if extension.in_flight > 1:
        still = "another cell is running meanwhile"
    still = still or await end_since(opened.beside, waits=attempts.waits) or ""
    if still:
        case, error = pipeline.refused(request.case, still, anyway=passable), None
    else:
        if opened.failure is not None:
            release(opened.failure, extension.shell)
            opened.failure = None
        case, error = await pipeline.heal(
            request.case,
            opened.session,
            opened.transaction,
            request.chosen,
            attempts.run,
            most_attempts=extension.config.attempts,
            time_budget_s=extension.config.retry_time_s,
            anyway=request.anyway,
            failed=set() if request.anew else opened.failed,
            by_itself=request.by_itself,
            places=lambda: filenames(extension.shell, opened.session.cells.failing.number),
            plan_s=extension.config.forecast_time_s,
        )
        extension.remedies.note(case, opened.session.cells.failing.source, request.chosen[0].label)
    return pipeline.record(case), error


def _error_of(result: Any) -> BaseException | None:
    error: BaseException | None = result.error_before_exec or result.error_in_exec
    return error


def insert(extension: Extension, case: Case, candidate: Candidate, patch: Patch) -> None:
    """Put the failing cell as the fix has it into the next cell, and print the changes of earlier cells as a diff."""
    failing = extension.failed_cell
    if failing is None:
        raise UsageError("the text of the failed cell is not known any more")
    own = [edit for edit in patch.edits if edit.cell == failing.number]
    earlier = tuple(edit for edit in patch.edits if edit.cell != failing.number)
    extension.shell.set_next_input(own[-1].after if own else failing.source, replace=False)
    if earlier:
        print(replace(patch, edits=earlier).diff(), end="")
    changed = f"In[{failing.number}] with {candidate.label}" if own else f"In[{failing.number}] as it is"
    print(f"the next cell has {changed}; nothing was run")
    if earlier:
        cells, files = ([one.name for one in earlier if (one.file is None) is is_cell] for is_cell in (True, False))
        if files:
            print(f"first change {', '.join(files)} as the diff above says, and import it again")
        if cells:
            print(f"first change and run {', '.join(cells)} as the diff above says")
    if case.outcome.kind is OutcomeKind.HEALED:
        healers = ", ".join(case.outcome.fixes)
        print(f"to run it now would be to run it a second time: it was run with {healers} when it was healed")


def undo(extension: Extension) -> str:
    """Put the state of the healed cell's start back for good; return what was taken back, and what could not be.

    Raises:
        UsageError: there is nothing that can be undone; nothing was changed.
    """
    case, opened = pipeline.last_case(), extension.healed
    if case is None or opened is None:
        raise UsageError(why_not_undone(case, extension.passed))
    code = case.evidence.code
    calls = (f"{call} cannot be taken back" for call in (*code.not_repeatable, *code.not_reached, *code.written_anew))
    transaction = opened.transaction
    lost = tuple(dict.fromkeys((*transaction.losses(), *transaction.settle(), *transaction.doubts(), *calls)))
    fixes = ", ".join(case.outcome.fixes)
    extension.remedies.drop(case, opened.session.cells.failing.source)
    why = "; ".join([f"{fixes} healed it, and was taken back by `%oomdoctor undo`", *lost])
    state = State.UNVERIFIED if lost else State.RESTORED
    taken_back = replace(case, outcome=Outcome(state=state, why=why))
    pipeline.record(taken_back)
    extension.open, extension.healed = opened, None
    extension.changed = dict(opened.changed)
    if extension.shown is not None:
        extension.shown.tell_end(taken_back)
    return f"{fixes} was taken back; the state is that from before the cell{_except(lost)}"


def why_not_retried(extension: Extension, outcome: Outcome) -> str:
    """Return why the failed cell cannot be run again by a command or a button.

    Args:
        outcome: how it ended.
    """
    if outcome.kind is OutcomeKind.HEALED:
        healed = f"{', '.join(outcome.fixes)} healed it"
        if extension.healed is not None:
            return f"{healed}: `%oomdoctor undo` takes it back"
        return f"{healed}, and {extension.passed or 'its start is no longer kept'}: to try another change, run it again"
    if extension.passed:
        return f"{extension.passed}: run it again"
    if not extension.config.snapshot:
        return "OomDoctor.snapshot is off, so nothing was kept of the state before it: switch it on and run it again"
    return outcome.why or "of the state before it nothing is kept in this shell: run it again"


def why_not_undone(case: Case | None, passed: str) -> str:
    """Return why there is nothing to undo, and what the state is.

    Args:
        passed: what a later cell has done that moved the state on, empty where none has.
    """
    if case is None:
        return "there is nothing to undo: no cell that ran out of memory was diagnosed so far"
    outcome, cell = case.outcome, case.incident.cell
    what = "the cell" if cell is None or cell.number is None else f"In[{cell.number}]"
    if outcome.kind is OutcomeKind.HEALED:
        if not passed:
            return f"{what} can no longer be undone: of the state before it nothing is kept in this shell"
        return f"{what} can no longer be undone: {passed}"
    if outcome.attempts:
        lost = [outcome.why] if outcome.state is State.UNVERIFIED else []
        before = f"its changes were undone at once, and the state is that from before it{_except(lost)}"
        return f"there is nothing to undo: {what} was not healed, {before}"
    why = f": {outcome.why}" if outcome.why else ""
    return f"there is nothing to undo: no change of {what} is in place{why}"


def _except(lost: Iterable[str]) -> str:
    told = "; ".join(lost)
    return f", except: {told}" if told else ", all of it"

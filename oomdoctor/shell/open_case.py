"""A failure that can still be retried, or whose change can be undone, and what is left of it in the notebook.

That is attempts with the change that is chosen, its source for the next cell, and the way back from a healed one; and
its forecasts, made while the kernel goes on, and shown as they come. A copy of the kernel makes them, so there are none
where processes cannot be forked.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Final

from oomdoctor import fixes as catalogue
from oomdoctor import pipeline
from oomdoctor.errors import UsageError
from oomdoctor.language import say
from oomdoctor.model.case import Case, Outcome, OutcomeKind, State
from oomdoctor.model.fix import Effect, Patch
from oomdoctor.model.plan import Candidate, Forecast
from oomdoctor.model.session import Attempt, Session, Simulated
from oomdoctor.model.unavailable import Refused
from oomdoctor.program.compiled import on_their_lines
from oomdoctor.shell.background_work import Beside, beside, clear_away
from oomdoctor.shell.cells import as_cell, forget_results, texts_of
from oomdoctor.shell.error_boundary import Run, left_alone
from oomdoctor.shell.outputs import shown
from oomdoctor.shell.warm_up import is_watched

if TYPE_CHECKING:
    from oomdoctor.forecast.ranking import Planning
    from oomdoctor.model.plan import Plan
    from oomdoctor.shell.error_boundary import Borders
    from oomdoctor.shell.extension import Extension
    from oomdoctor.shell.showing import Shown


STOPPED: Final = "Interrupted. The forecasts were stopped."
_DOSE: Final = re.compile(r"\w+=[^(),\s]+")


@dataclass(slots=True)
class OpenCase:
    """A failure that can still be retried: its live side, kept until the user's state moves on.

    Attributes:
        beside: what went on beside its cell when that began.
        failed: labels of the changes that it ran out of memory with as well.
        failure: what ended it, where its frames are kept: a retry lets go of them, as it needs their memory.
        changed: the text of each cell that earlier retries had changed.
    """

    session: Session
    transaction: Any
    beside: Beside
    failed: set[str] = field(default_factory=set)
    failure: BaseException | None = None
    changed: Mapping[int, str] = field(default_factory=dict)

    @property
    def gone(self) -> str:
        """Why its cell cannot be run again though its state is kept; nothing while it can."""
        device = self.session.accelerator
        is_off = isinstance(device, Simulated) and device is not pipeline.simulated()
        return "the simulated device that it ran on is off or another one: run the cell again" if is_off else ""


@dataclass(slots=True)
class Attempts:
    """Runs attempts of the open case in a shell.

    Attributes:
        waits: whether the loop awaits the cell, so that what it leaves behind can be awaited.
        anyway: whether another attempt may follow what cannot be undone.
        in_its_place: whether its output takes the place of that of the run that failed, in the same cell.
        last: the shell's result of the one that ran last; ``changes``: the text of each cell that it changed.
    """

    extension: Extension
    opened: OpenCase
    kwargs: dict[str, Any]
    waits: bool
    anyway: bool = False
    in_its_place: bool = False
    last: Any = None
    changes: dict[int, str] = field(default_factory=dict)

    async def run(self, attempt: Attempt) -> BaseException | None:
        """Run redefined functions and the cell's text the way the shell runs cells; return what the code raised."""
        run, before, failing = Run(self.extension, is_retry=True), beside(), self.opened.session.cells.failing
        self.extension.warming.keep_back()
        run_source = partial(self.extension.run_source, run)
        with left_alone():
            for replay, cell in zip_longest(attempt.replays, attempt.cells):
                text, number = (on_their_lines(replay, cell.source), cell.number) if cell else (replay, None)
                with as_cell(self.extension.shell, number):
                    answer = await run_source(text, {**self.kwargs, "silent": True})
                if error := _error_of(answer):
                    return error
            if attempt.replays:
                self.opened.transaction.set_aside()
            if self.in_its_place and hasattr(self.extension.shell, "kernel"):
                self.extension.shell.display_pub.clear_output(wait=True)
            with as_cell(self.extension.shell, failing.number):
                self.last = await run_source(attempt.source, self.kwargs)
            self.changes = texts_of(attempt, failing)
        # What a magic or a widget has shown has not run to its end either, whatever the cell answers.
        error = _error_of(self.last) or run.take_failure()
        if error is not None:
            await clear_away(before, waits=self.waits, anyway=self.anyway)
        return error


def _error_of(result: Any) -> BaseException | None:
    error: BaseException | None = result.error_before_exec or result.error_in_exec
    return error


def failed_case() -> Case:
    """Return the case of the last failure; a ``UsageError`` where there was none."""
    case = pipeline.last_case()
    if case is None:
        raise UsageError("no cell that ran out of memory was diagnosed so far")
    return case


def chosen_by(extension: Extension, words: list[str]) -> tuple[Case, Candidate]:
    """Return the candidate that a number or an id names, else the first, in the dose that is named."""
    case, asked = failed_case(), [word for word in words if _DOSE.fullmatch(word)]
    words = [word for word in words if word not in asked]
    candidates, numbered = case.plan.candidates, case.plan.numbered
    named = " ".join(words) or (candidates[0].fix if candidates else "1")  # two together have an id of several words
    accepted = ", ".join(f"{case.plan.number(one)} ({one.fix})" for one in candidates) or "none"
    for candidate in candidates:
        if named in (str(case.plan.number(candidate)), candidate.fix, candidate.label):
            if candidate.refuted is not None:
                raise UsageError(f"{candidate.label} was tried and is not right for this program: {candidate.refuted}")
            return case, _at_dose(extension, case, candidate, asked) if asked else candidate
    if (gone := {str(number): fix for number, fix in enumerate(numbered, 1)}.get(named)) is not None:
        raise UsageError(f"fix {named} ({gone}) is not in the plan any more. Available: {accepted}")
    if len(words) > 1:
        raise UsageError(f"one fix at a time, not {shown(named)}. Available: {accepted}")
    raise UsageError(f"unknown fix {shown(named)}. Available: {accepted}")


def _at_dose(extension: Extension, case: Case, candidate: Candidate, asked: list[str]) -> Candidate:
    """Return the fix in another of its doses, which has no forecast."""
    from oomdoctor.forecast.attempts import attempt_with

    chosen = " ".join(asked)
    if str(candidate.dose).replace(", ", " ") == chosen:
        return candidate
    if candidate.parts:
        raise UsageError(f"{candidate.fix} are two changes, which come in the doses of the plan")
    opened = retryable(extension)
    fix = catalogue.get(candidate.fix)
    proposed = fix.propose(case.incident, case.evidence)
    doses = {} if isinstance(proposed, Refused) else {str(one.dose).replace(", ", " "): one for one in proposed}
    if chosen not in doses:
        raise UsageError(f"{candidate.fix} does not come with {shown(*asked)}: {', '.join(filter(None, doses))}")
    proposal = doses[chosen]
    patch, attempt = attempt_with(fix, proposal.dose, opened.session, case.evidence)
    if isinstance(attempt, Refused):
        raise UsageError(f"{candidate.fix} cannot be had with {chosen}: {attempt.reason}")
    return replace(
        candidate,
        dose=proposal.dose,
        stronger=tuple([*doses.values()][[*doses].index(chosen) + 1 :]),
        patch=patch,
        effect=max(proposal.effect, candidate.effect, key=tuple(Effect).index),
        caveat=proposal.caveat,
        forecast=Forecast(basis="not priced: a dose that was asked for", budget=candidate.forecast.budget),
    )


def retryable(extension: Extension) -> OpenCase:
    """Return the open case; a ``UsageError`` says why its cell cannot be run again."""
    if extension.interrupted:
        raise UsageError(f"{STOPPED} Nothing was run.")
    opened = extension.open
    if opened is None or opened.gone:
        why = why_not_retried(extension, failed_case().outcome) if opened is None else opened.gone
        raise UsageError(f"the failed cell can no longer be retried: {why}")
    return opened


def insert(extension: Extension, case: Case, candidate: Candidate, patch: Patch) -> None:
    """Put the cells as the fix has them into the next cell, and print the changes of files as a diff."""
    failing = extension.failed_cell
    if failing is None:
        raise UsageError("the text of the failed cell is not known any more")
    cells = [edit for edit in patch.edits if edit.file is None]
    files = tuple(edit for edit in patch.edits if edit.file is not None)
    texts = {edit.name: edit.after for edit in cells} or {f"In[{failing.number}]": failing.source}
    labelled = (f"# {name}, changed\n{text}" for name, text in texts.items())
    extension.shell.set_next_input("\n\n".join(labelled if len(texts) > 1 else texts.values()), replace=False)
    if files:
        print(replace(patch, edits=files).diff(), end="")
    how = f"with {candidate.label}" if cells else "as it is"
    print(say(f"the next cell has {' and '.join(texts)} {how}; nothing was run"))
    if files:
        names = ", ".join(one.name for one in files)
        print(say(f"first change {names} as the diff above says, and import it again"))
    if case.outcome.kind is OutcomeKind.HEALED:
        healers = ", ".join(case.outcome.fixes)
        print(say(f"running it now runs it a second time: the healed run used {healers} when it was healed"))


def undo(extension: Extension) -> str:
    """Put the state of the healed cell's start back for good; return what was taken back, and what could not be.

    Raises:
        UsageError: there is nothing that can be undone; nothing was changed.
    """
    case, opened = pipeline.last_case(), extension.healed
    if case is None or opened is None:
        raise UsageError(_why_not_undone(case, extension.passed))
    code = case.evidence.code
    calls = (f"{call} cannot be undone" for call in (*code.not_repeatable, *code.not_reached, *code.written_anew))
    transaction = opened.transaction
    lost = tuple(dict.fromkeys((*transaction.losses(), *transaction.settle(), *transaction.doubts(), *calls)))
    number = opened.session.cells.failing.number
    forget_results(extension.shell, number)
    extension.memreport.forget(number)
    fixes = ", ".join(case.outcome.fixes)
    why = "; ".join([f"{fixes} healed it, and was taken back by `%oomdoctor undo`", *lost])
    state = State.UNVERIFIED if lost else State.RESTORED
    taken_back = replace(case, outcome=Outcome(state=state, why=why))
    pipeline.record(taken_back)
    extension.open, extension.healed = opened, None
    extension.changed = dict(opened.changed)
    if extension.shown is not None:
        extension.shown.tell_end(taken_back)
    extension.tell_undone(taken_back)
    return f"Undone: {fixes}. Everything is as before the cell ran{_except(lost)}"


def why_not_retried(extension: Extension, outcome: Outcome) -> str:
    """Return why the failed cell, which ended so, cannot be run again by a command or a button."""
    if outcome.kind is OutcomeKind.HEALED:
        healed = f"{', '.join(outcome.fixes)} healed it"
        if extension.healed is not None:
            return f"{healed}: `%oomdoctor undo` takes it back"
        return f"{healed}, and {extension.passed or 'its start is no longer kept'}: to try another change, run it again"
    if extension.passed:
        return f"{extension.passed}: run it again"
    if not extension.config.snapshot:
        return "OomDoctor.snapshot is off, so no state was saved: turn it on and run the cell again"
    return outcome.why or "the state before it was not kept: run it again"


def _why_not_undone(case: Case | None, passed: str) -> str:
    """Return why there is nothing to undo, and what the state is; ``passed`` what a later cell has done to that."""
    if case is None:
        return "there is nothing to undo: no cell that ran out of memory was diagnosed so far"
    outcome, cell = case.outcome, case.incident.cell
    what = "the cell" if cell is None or cell.number is None else f"In[{cell.number}]"
    if outcome.kind is OutcomeKind.HEALED:
        return f"{what} can no longer be undone: {passed or 'the state before it was not kept'}"
    if outcome.attempts:
        lost = [outcome.why] if outcome.state is State.UNVERIFIED else []
        before = f"its changes were undone, and everything is as before it ran{_except(lost)}"
        return f"there is nothing to undo: {what} was not healed, {before}"
    why = f": {outcome.why}" if outcome.why else ""
    return f"there is nothing to undo: no change of {what} is in place{why}"


def _except(lost: Iterable[str]) -> str:
    told = "; ".join(lost)
    return f", except: {told}" if told else ""


_SOON_S: Final = 0.3
"""Until it is looked again whether the kernel has nothing to do."""


def may_fill_in(shell: Any) -> bool:
    """Return whether the forecasts of a failure can be filled in after it was shown."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return is_watched(shell) and hasattr(os, "fork")


class Filling:
    """The plan of one failure in the making, while the kernel goes on; ``shown`` shows it in the place of the last."""

    def __init__(self, case: Case, planning: Planning, borders: Borders, shown: Shown) -> None:
        self._case: Case | None = case
        self._planning, self._borders, self._shown = planning, borders, shown
        self._begun_s = time.monotonic()
        self._handler: Any = None
        self._heed()
        self._task = asyncio.get_running_loop().create_task(self._listen())

    def settle(self) -> bool:
        """Wait for the rest of the plan; return whether it came, and the user did not interrupt it."""
        why = ""
        try:
            for plan in self._planning.wait():
                self._tell(plan)
        except KeyboardInterrupt:
            why = pipeline.INTERRUPTED
        finally:
            self.end(why)
        return not why

    def _tell(self, plan: Plan) -> None:
        if self._case is not None:
            elapsed_s = time.monotonic() - self._begun_s
            self._borders.guarded("display", partial(self._shown.show_progress, plan, elapsed_s))

    def _heed(self) -> None:
        """Let an interrupt end the forecasts. Between cells the kernel ignores it, and so do the copies."""
        if self._case is None or self._handler is not None:
            return
        loop = asyncio.get_running_loop()
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # a cell is still running, which it would end
            loop.call_later(_SOON_S, self._heed)
            return
        self._handler = lambda *_: loop.call_soon_threadsafe(self.end, pipeline.INTERRUPTED)
        with suppress(ValueError):  # of a thread that is not the main one
            signal.signal(signal.SIGINT, self._handler)

    def end(self, why: str = "") -> None:
        """Forecast nothing more; what has no forecast says so, and ``why``."""
        if self._case is not None:
            self._planning.cancel(why or "the forecasts were skipped")
            if self._handler is not None and signal.getsignal(signal.SIGINT) is self._handler:
                signal.signal(signal.SIGINT, signal.SIG_IGN)
            case, self._case = pipeline.record(replace(self._case, plan=self._planning.plan)), None
            self._borders.guarded("display", lambda: self._shown.update(case))

    async def _listen(self) -> None:
        try:
            async for plan in self._planning.listen():
                self._tell(plan)
        except Exception as exc:  # noqa: BLE001 - border: nobody awaits this task
            self._borders.fault("forecast", exc)
        self.end()

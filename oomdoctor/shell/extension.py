"""The wiring: what happens around each cell.

    begin: snapshot ─► the cell runs ─► if it ran out of memory: see ``doctor``, as for a retry that was asked for

The cell runs in the shell's own ``run_cell_async``, which this wraps; a retry runs there as well, so that cells which
await are retried on the loop that they belong to. Each stage stands behind a border (see ``error_boundary``).
"""

from __future__ import annotations

import atexit
import re
import sys
import threading
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from oomdoctor import pipeline
from oomdoctor.errors import OomDoctorError
from oomdoctor.guard.watch import Watch
from oomdoctor.language import choose, say
from oomdoctor.model.case import Case
from oomdoctor.model.session import Cell, Cells
from oomdoctor.objects.named import own_modules
from oomdoctor.program.definitions import read
from oomdoctor.program.modules import with_modules
from oomdoctor.program.names import calls_only
from oomdoctor.program.repeatability import unseen_write
from oomdoctor.retry.transaction import Transaction
from oomdoctor.sandbox import reserve
from oomdoctor.shell.background_work import beside
from oomdoctor.shell.cells import cells_until, has_verb, is_own, planned
from oomdoctor.shell.config import OomDoctor
from oomdoctor.shell.doctor import LOADED_LATE, CellRun, Request, answer, answer_outside, heal, ran_in
from oomdoctor.shell.error_boundary import (
    Borders,
    Run,
    TracebackWatch,
    Wrapped,
    current,
    find_oom,
    is_left_alone,
    quietly,
    ran_out,
    source_begun_before,
)
from oomdoctor.shell.host_guard import as_it_runs, begin_record, ceiling_of, terms_of
from oomdoctor.shell.job import abandon_run, begin_run, follow_job, join_group, join_job
from oomdoctor.shell.magics import register, unregister
from oomdoctor.shell.mempeak import PeakWatch, measured
from oomdoctor.shell.memreport import MemReport
from oomdoctor.shell.open_case import OpenCase
from oomdoctor.shell.showing import Shown, output_place
from oomdoctor.shell.warm_up import Warming, is_watched

if TYPE_CHECKING:
    from oomdoctor.pipeline.job import Job
    from oomdoctor.ranks.groups import Groups
    from oomdoctor.shell.open_case import Filling

_PAST_AUTOGRAD: Final = re.compile(r"\.(data\b|numpy\(\)).*(_\(|=|\.(fill|sort|partition|put|itemset)\()")
"""A line that may write to a tensor past autograd; what is not like it needs no reading."""
_LOADS: Final = ".load_state_dict("
"""Writes weights before any forward or step: a cell that has it gets its copies before it begins."""


_may_write_unseen = lru_cache(maxsize=4096)(_PAST_AUTOGRAD.search)
"""Tells whether a cell may have such a line; asked of the whole history before each cell."""


def _file_may_write_unseen(file: str | None) -> bool:
    """Whether the text of a module has a write past autograd."""
    try:
        return _has_write(path := Path(str(file)), path.stat().st_mtime_ns)
    except (OSError, UnicodeDecodeError):
        return True


@lru_cache(maxsize=4096)
def _has_write(path: Path, _changed_ns: int) -> bool:
    return _PAST_AUTOGRAD.search(path.read_text(encoding="utf-8")) is not None


_INTERRUPTED: Final = "oomdoctor: interrupted: the failure was not diagnosed"
_LOOKING: Final = frozenset({"print", "len", "type", "repr", "str", "list", "dict", "sum", "sorted", "display"})
"""Functions that take no time and no memory beside the forecasts of a failure."""


class Extension:
    """oomdoctor in one shell.

    Attributes:
        job: this rank's part in a job of several, None where it is alone.
        groups: the process groups that cells make, None as long as ``torch.distributed`` is not loaded.
        in_flight: how many cells are running: a callback may run one while another awaits, and so may a subshell.
        to_run: the cell that `%%memplan --run` asks for, nothing where it does not.
        changed: the text, by its number, of each cell that a retry has changed since it was run.
        interrupted: whether the user ended the forecasts that the cell which runs has waited for.
        magics_before: what had the names of our magics before, by name and kind.
    """

    def __init__(self, shell: Any) -> None:
        self.shell = shell
        self.config = OomDoctor(parent=shell)
        self.open: OpenCase | None = None
        self.shown: Shown | None = None
        self._healed: OpenCase | None = None
        self._notice: Any = None
        self.request: Request | None = None
        self.failed_cell: Cell | None = None
        self.filling: Filling | None = None
        self.guard = Watch(lambda: terms_of(self.config), shell.user_global_ns)
        self.warming = Warming(shell, self.config, self.guard.is_on, self.guard.at_work)
        self.passed = ""
        self.changed: dict[int, str] = {}
        self.interrupted = False
        self.magics_before: dict[str, dict[str, Any]] = {}
        self._number = 0
        self.borders = Borders()
        self.in_flight, self._answers = 0, threading.RLock()
        self.job: Job | None = None
        self.groups: Groups | None = None
        self.memreport, self.to_run = MemReport(shell), ""

    # Coming and going -----------------------------------------------------------------------------------------

    def install(self) -> None:
        """Wrap the shell's methods; register the magics and the configuration."""
        self.tracebacks = TracebackWatch(
            self.shell, self._saw, self._was_shown, self._holds, self._announce, self._in_room
        )
        self._cells = Wrapped(self.shell, "run_cell_async", self._run_cell_async)
        self._awaited = Wrapped(self.shell, "should_run_async", self._should_run_async)
        self._threads = Wrapped(threading, "excepthook", self._thread_failed)
        self.shell.configurables.append(self.config)
        choose(self.config.language)
        register(self)
        self.guard.begin()
        self.borders.guarded("black box", lambda: begin_record(self.shell, self.guard))
        atexit.register(self.guard.end)
        self.warming.begin()
        if getattr(self.shell, "joins_job", False):
            self.borders.guarded("ranks", lambda: join_job(self))

    def remove(self) -> None:
        """Put everything back."""
        self.guard.end()
        atexit.unregister(self.guard.end)
        self.tracebacks.remove()
        for wrapped in (self._cells, self._awaited, self._threads):
            wrapped.remove()
        if self.config in self.shell.configurables:
            self.shell.configurables.remove(self.config)
        unregister(self)
        choose("auto")
        self.memreport.end_live()
        self.close()
        if self.job is not None:
            self.job.leave()
        if self.groups is not None:
            self.groups.remove()
        self.warming.end()
        if pipeline.simulated() is not None:
            sys.modules["oomdoctor.allocator.virtual"].switch_off()

    # Around each cell -----------------------------------------------------------------------------------------

    async def _run_cell_async(self, raw_cell: str, *args: Any, **kwargs: Any) -> Any:
        run = current(self)
        if run is not None or kwargs.get("silent") or (len(args) > 1 and args[1]):
            try:
                return await self._run_within(run or Run(self), raw_cell, *args, **kwargs)
            finally:
                if run is None and not self.in_flight:
                    self.borders.guarded("guard", self.guard.settle)
        self.in_flight += 1
        try:
            return await self._run_cell(raw_cell, *args, **kwargs)
        except BaseException:  # past IPython's own handling, which needs room to tell it
            reserve.let_go()
            raise
        finally:
            self.in_flight -= 1
            self.borders.guarded("guard", lambda: self.guard.settle(has_others=self.in_flight > 0))

    async def _run_cell(self, raw_cell: str, *args: Any, **kwargs: Any) -> Any:
        if self.shell.execution_count < self._number:  # the history was reset, and numbers begin anew
            self.changed.clear()
        self._number = self.shell.execution_count
        self.borders.guarded("forecast", lambda: self._tend_filling(raw_cell))
        self.borders.guarded("reserve", lambda: self.warming.keep_back(raw_cell))
        self.memreport.number = self._number
        transaction = self.borders.guarded("snapshot", lambda: self._begin(raw_cell))
        in_job = self.borders.guarded("ranks", lambda: begin_run(self, raw_cell)) or False
        run = Run(self)
        kept = partial(getattr, transaction, "kept_bytes", 0)
        below = quietly(lambda: self._transformed(raw_cell)) if as_it_runs(raw_cell) is not None else None
        watch = PeakWatch(self.shell, kept) if below and measured(raw_cell) is not None else None
        kwargs = {**kwargs, **(below or {})}
        cell = CellRun(source=raw_cell, kwargs=kwargs, transaction=transaction, beside=beside())
        before, asked = quietly(self.memreport.reading), self._number
        try:
            with watch or nullcontext():
                result = await self._run_within(run, raw_cell, *args, **kwargs)
        except BaseException as exc:  # an interrupt while the traceback was shown: there is no answer to come
            self._withdraw(run.shown)
            if in_job:
                abandon_run(self, exc)
            raise
        finally:
            if transaction is not None:
                transaction.disarm()
        self._let_through(run, result)
        failure = run.take_failure()
        if failure is None:
            self._withdraw(run.shown)
        if watch is not None and result.success:
            self.borders.guarded("mempeak", watch.tell)
        self.warming.note_end(raw_cell, failed=failure is not None)
        is_run_again = failure is not None or self.request is not None or in_job
        if self.request is not None and self.open is not None:  # what it leaves is of the cell that it runs again
            asked = self.open.session.cells.failing.number
        note = partial(quietly, partial(self.memreport.note, before, kept(), asked))
        if not is_run_again and not is_own(raw_cell):
            note()
        try:
            cell = replace(cell, shown=run.shown)
            self.borders.guarded("ranks", lambda: join_group(self))
            if in_job and await follow_job(self, failure, result, cell):
                return result
            return await self._follow(failure, raw_cell, result, cell, *args, **kwargs)
        finally:
            if is_run_again:  # what counts is what the retry leaves
                note()
            if failure is not None:
                reserve.let_go()
                self.borders.guarded("history", self.warming.begin_history)

    async def _follow(
        self, failure: BaseException | None, raw_cell: str, result: Any, cell: CellRun, *args: Any, **kwargs: Any
    ) -> Any:
        """Do what a cell asks for by its end: answer its failure, run the retry or the cell that it asks for."""
        transaction = cell.transaction
        if failure is None and self.request is None:
            self.borders.guarded("loading", self.warming.after_cell)
        if failure is not None:
            try:
                self.tracebacks.heed()
                await answer(self, failure, result, cell)
            except BaseException as exc:  # the failure is the user's to see all the same
                self.tracebacks.send_held()
                self._withdraw(cell.shown)
                if not isinstance(exc, KeyboardInterrupt):
                    raise
                print(say(_INTERRUPTED), file=sys.stderr)  # the cell has failed already, and ends here
            if (late := self.borders.take_signalled()) is not None:
                self._show_traceback(late)
                self._outside(late, "it came while another failure was looked at", raw_cell)
        elif self.request is not None:
            request, self.request = self.request, None
            if is_own(raw_cell):
                if not await heal(self, request, result, cell):
                    self.tracebacks.send_held()
            else:
                why = say("oomdoctor: a retry needs a cell of its own, because it restores an earlier state")
                print(why, file=sys.stderr)
        elif transaction is not None:
            self.borders.guarded("bookkeeping", lambda: self._expire(transaction, result))
        source, self.to_run = self.to_run, ""
        if source and result.success:
            return await self._run_cell_async(source, *args, **{**kwargs, **self._transformed(source)})
        return result

    def _withdraw(self, shown: Shown | None) -> None:
        if shown is not None:
            self.borders.guarded("display", shown.withdraw)

    def _let_through(self, run: Run, result: Any) -> None:
        """Let the cell fail with what the handler of a signal has raised in a stage of ours; see ``Borders``."""
        came = self.borders.take_signalled()
        if came is not None:
            with run.entered():
                self._show_traceback(came)
            if result.success:
                result.error_in_exec, self.shell.last_execution_succeeded = came, False

    def _show_traceback(self, exc: BaseException) -> None:
        self.shell.showtraceback((type(exc), exc, exc.__traceback__))

    async def _run_within(self, run: Run, raw_cell: str, *args: Any, **kwargs: Any) -> Any:
        with run.entered():
            is_guarded = run.depth == 1 and not is_own(raw_cell) and self._arm(raw_cell)
            try:
                return await self._cells.original(raw_cell, *args, **kwargs)
            finally:
                if is_guarded:
                    self.guard.end_cell()

    def _arm(self, raw_cell: str) -> bool:
        number, ceiling = self.shell.execution_count, ceiling_of(raw_cell)
        return self.borders.guarded("guard", lambda: self.guard.arm(number, raw_cell, ceiling)) or False

    def _in_room(self, is_of_code: bool) -> AbstractContextManager[None]:
        """Return the context in which a traceback is shown: with all the room there is, for good where a cell ends."""
        run = current(self)
        if run is None or not is_of_code or run.depth > 1:
            return self.guard.at_work()
        self.guard.raised()
        return nullcontext()

    async def run_source(self, run: Run, source: str, kwargs: dict[str, Any]) -> Any:
        """Run a text as the cell that was asked for with ``kwargs``, without a place in the history."""
        return await self._run_within(run, source, **{**kwargs, "store_history": False, **self._transformed(source)})

    def _transformed(self, source: str) -> dict[str, Any]:
        """Return what the shell is to be told of a text besides the text itself."""
        text = self.shell.transform_cell(as_it_runs(source) or source)
        return {"transformed_cell": text, "preprocessing_exc_tuple": None}

    def _should_run_async(self, raw_cell: str, *args: Any, **kwargs: Any) -> Any:
        """Have a cell that asks for the run of another one, which awaits, be awaited as that one is."""
        asked = quietly(lambda: as_it_runs(raw_cell) or planned(raw_cell))
        if self.open is not None and has_verb(raw_cell, "fix", "retry"):
            asked = self.open.session.cells.failing.source
        if asked is not None and (transformed := quietly(lambda: self._transformed(asked))) is not None:
            raw_cell, args, kwargs = asked, (), transformed
        return self._awaited.original(raw_cell, *args, **kwargs)

    def _tend_filling(self, raw_cell: str) -> None:
        """Wait for the forecasts where a cell looks at them; end them where it does more than to look at something."""
        self.interrupted = False
        if self.filling is None:
            return
        if has_verb(raw_cell, "fix", "retry", "diff", "undo", "why", "cases"):
            self.interrupted = not self.filling.settle()
        elif not is_own(raw_cell) and not calls_only(raw_cell, _LOOKING):
            self.filling.end()

    def close(self, passed: str = "") -> None:
        """Let go of the last failure, which can be retried no more; ``passed`` says what has moved the state on."""
        self.passed = passed
        filling, self.filling = self.filling, None
        if filling is not None:
            filling.end()
        self.open = self.healed = None

    def is_source_awaited(self, cell: Cell) -> bool:
        """Return whether a cell with this text is one that the loop awaits."""
        return bool(self._awaited.original(cell.source, **self._transformed(cell.source)))

    def _begin(self, raw_cell: str) -> Any:
        """Take the snapshot of a cell of the user's; None for a cell of our own magics."""
        if not self.config.snapshot or is_own(raw_cell):
            return None
        transaction = Transaction(self.shell.user_ns, raw_cell, self.config.room)
        if _LOADS in raw_cell or quietly(lambda: self._writes_unseen(raw_cell)):
            transaction.keep_all()
        transaction.arm()
        return transaction

    def _writes_unseen(self, raw_cell: str) -> bool:
        """Whether a cell writes to tensors past autograd, by itself or by functions that it calls.

        Those are of earlier cells, or of modules of the user's own.
        """
        texts, own = (raw_cell, *getattr(self.shell.history_manager, "input_hist_raw", ())), own_modules()
        if not any(map(_may_write_unseen, texts)) and not any(_file_may_write_unseen(one.__file__) for one in own):
            return False
        cells = cells_until(self.shell, self.shell.execution_count, raw_cell)
        return unseen_write(read(with_modules(cells, own))) is not None

    def _expire(self, transaction: Any, result: Any) -> None:
        """Let go of a case that can no longer be retried or undone, because a later cell may have moved the state."""
        case = self.open or self.healed
        if case is None:
            return
        done = case.transaction.moved_on_by(transaction, is_healed=self.open is None)
        if done is None:
            later = Cell(number=result.execution_count or 0, source=transaction.source)
            unseen = unseen_write(read(Cells(history=(*case.session.cells.history, later))))
            done = None if unseen is None else f"run `{unseen}`, which may have changed the state"
        if done is not None:
            cell = f"In[{result.execution_count}]" if result.execution_count else "a later cell"
            self.close(f"{cell} has {done}")

    # What passes by -------------------------------------------------------------------------------------------

    def _saw(self, exc: BaseException) -> None:
        """Note an exception that is about to be shown: one that memory ran out with, and of a retry any."""
        run = current(self)
        if run is not None and (run.is_retry or self.borders.guarded("recognition", lambda: find_oom(exc))):
            run.failure = exc

    def _announce(self, exc: BaseException) -> None:
        """Hold a place for the answer above the traceback of a cell that ran out of memory."""
        run = current(self)
        is_first = run is not None and run.failure is exc and run.shown is None and run.depth == 1 and not run.is_retry
        if run is not None and is_first and is_watched(self.shell):
            run.shown = self.borders.guarded("display", lambda: Shown.announced(self))

    def _holds(self, exc: BaseException) -> bool:
        """Whether the display of ``exc`` waits for the outcome of a retry."""
        run = current(self)
        if run is None:
            return False
        if (job := self.job) is not None and job.running is job and (run.is_retry or run.depth == 1):
            self.borders.guarded("ranks", lambda: job.note(exc))
            # Until it is known how the others have ended; the user's interrupt of an attempt is told with its outcome.
            return isinstance(exc, (Exception, KeyboardInterrupt) if run.is_retry else Exception)
        if run.is_retry and isinstance(exc, (OomDoctorError, KeyboardInterrupt)):
            return True
        return ran_out(exc) and (
            run.is_retry or (run.depth == 1 and self.config.auto != "off" and self.config.snapshot)
        )

    def _was_shown(self, exc: BaseException) -> None:
        """Answer a failure that was shown outside of every cell that was seen to begin."""
        if current(self) is None:
            from IPython.core.interactiveshell import InteractiveShell

            runs_cells = InteractiveShell.run_cell_async.__code__
            loading = source_begun_before(runs_cells, Extension._run_within.__code__, self)
            if loading is None:
                self._outside(exc, ran_in("a callback"))
            else:
                self._outside(exc, LOADED_LATE, loading)

    def _thread_failed(self, given: Any) -> Any:
        """Answer a failure that ended a thread."""
        with self._answers, self.guard.at_work():  # one at a time: there is no room for more
            reserve.let_go()
            result = self._threads.original(given)
            if given.exc_value is not None:
                self._outside(given.exc_value, ran_in(f"the thread {threading.current_thread().name}"))
        return result

    def _outside(self, exc: BaseException, why: str, source: str = "") -> None:
        try:
            if not is_left_alone() and self.borders.guarded("recognition", lambda: find_oom(exc)):
                answer_outside(self, exc, why, source)
        except KeyboardInterrupt:
            print(say(_INTERRUPTED), file=sys.stderr)

    # What is shown --------------------------------------------------------------------------------------------

    @property
    def healed(self) -> OpenCase | None:
        """The case that was healed and can be taken back; the panel shows whether it can, and what can be retried."""
        return self._healed

    @healed.setter
    def healed(self, case: OpenCase | None) -> None:
        self._healed = case
        if self.shown is not None:
            self.borders.guarded("display", self.shown.refresh)

    @property
    def names(self) -> dict[int, str] | None:
        """What the cells are called: by their numbers, unless the shell runs a script."""
        script = getattr(self.shell, "script", None)
        return None if script is None else {1: script.name}

    def notice(self, case: Case) -> None:
        """Show how a case ended."""
        from oomdoctor.views import notice_bundle

        if self.shown is not None and self.shown.tells_end:
            return
        self._notice = output_place(notice_bundle(case, self.names))

    def tell_undone(self, case: Case) -> None:
        """Say in the place of the last notice that what it tells of was undone."""
        from oomdoctor.views import notice_bundle

        notice, self._notice = self._notice, None
        if notice is not None and hasattr(self.shell, "kernel"):  # a terminal cannot take back what it has printed
            self.borders.guarded("display", lambda: notice.update(notice_bundle(case, self.names), raw=True))

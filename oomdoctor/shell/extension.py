"""The wiring: what happens around each cell.

    begin: snapshot ─► the cell runs ─► if it ran out of memory: diagnose, release, price, show or retry

The cell runs in the shell's own ``run_cell_async``, which this wraps; a retry runs there as well, so that cells which
await are retried on the loop that they belong to. Each stage stands behind a border: a failure of ours prints one
line, and the user's result and traceback stay as they were.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oomdoctor.errors import OomDoctorError, UsageError
from oomdoctor.model.case import Case, OutcomeKind
from oomdoctor.model.plan import Candidate
from oomdoctor.model.session import Attempt, Session
from oomdoctor.shell.cells import cells_until, filenames, is_own, only_looks
from oomdoctor.shell.config import OomDoctor
from oomdoctor.shell.magics import register, unregister
from oomdoctor.shell.memreport import MemReport
from oomdoctor.shell.script_watch import is_told, left_alone
from oomdoctor.shell.tracebacks import TracebackWatch
from oomdoctor.shell.wrapping import Wrapped

__all__ = ["Extension", "OpenCase", "Request"]


@dataclass(slots=True)
class OpenCase:
    """A failure that can still be retried: its live side, kept until the user's state moves on."""

    session: Session
    transaction: Any
    candidates: tuple[Candidate, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A retry that a magic or a button asked for; it runs when their cell is done."""

    case: Case
    chosen: tuple[Candidate, ...]
    anyway: bool = False


class Extension:
    """oomdoctor in one shell."""

    def __init__(self, shell: Any) -> None:
        self.shell = shell
        self.config = OomDoctor(parent=shell)
        self.open: OpenCase | None = None
        self.healed: OpenCase | None = None
        self.request: Request | None = None
        self.faults: list[str] = []
        self.memreport = MemReport(shell)
        self._depth = 0
        self._is_retrying = False
        self._failure: BaseException | None = None
        self._last_result: Any = None

    # Coming and going -----------------------------------------------------------------------------------------

    def install(self) -> None:
        """Wrap the shell's methods; register the magics and the configuration."""
        self._tracebacks = TracebackWatch(self.shell, self._saw, self._holds)
        self._cells = Wrapped(self.shell, "run_cell_async", self._run_cell_async)
        self.shell.configurables.append(self.config)
        register(self)

    def remove(self) -> None:
        """Put everything back."""
        self._tracebacks.remove()
        self._cells.remove()
        if self.config in self.shell.configurables:
            self.shell.configurables.remove(self.config)
        unregister(self)
        self.open = self.healed = None
        virtual = sys.modules.get("oomdoctor.allocator.virtual")
        if virtual is not None and virtual.active() is not None:
            virtual.switch_off()

    # Around each cell -----------------------------------------------------------------------------------------

    async def _run_cell_async(self, raw_cell: str, *args: Any, **kwargs: Any) -> Any:
        if self._depth or kwargs.get("silent") or (len(args) > 1 and args[1]):
            return await self._nested(raw_cell, *args, **kwargs)
        self._guarded("counters", lambda: self.memreport.mark(raw_cell))
        transaction = self._guarded("snapshot", lambda: self._begin(raw_cell))
        self._failure = None
        try:
            result = await self._nested(raw_cell, *args, **kwargs)
        finally:
            if transaction is not None:
                transaction.disarm()
        failure = self._take_failure()
        if failure is not None:
            try:
                await self._failed(failure, result, raw_cell, transaction, (args, kwargs))
            except BaseException:  # an interrupt: the failure is the user's to see all the same
                self._tracebacks.send_held()
                raise
        elif self.request is not None:
            request, self.request = self.request, None
            if is_own(raw_cell):
                await self._retry_on_request(request, result, (args, kwargs))
            else:
                print("oomdoctor: a retry needs a cell of its own, because it goes back in time", file=sys.stderr)
        elif transaction is not None:
            self._guarded("bookkeeping", lambda: self._expire(transaction))
        return result

    def _take_failure(self) -> BaseException | None:
        failure, self._failure = self._failure, None
        return failure

    async def _nested(self, raw_cell: str, *args: Any, **kwargs: Any) -> Any:
        self._depth += 1
        try:
            return await self._cells.original(raw_cell, *args, **kwargs)
        finally:
            self._depth -= 1

    def _begin(self, raw_cell: str) -> Any:
        """Take the snapshot of a cell of the user's; None for a cell of our own magics."""
        if not self.config.snapshot or is_own(raw_cell):
            return None
        from oomdoctor.retry.transaction import Transaction

        transaction = Transaction(self.shell.user_ns, raw_cell, self._room)
        transaction.arm()
        return transaction

    def _room(self) -> int:
        from oomdoctor.evidence import host

        _, free, _ = host.binding_limit(host.read(in_full=False))
        return int(free * self.config.snapshot_share)

    def _expire(self, transaction: Any) -> None:
        """Let go of a case that can no longer be retried or undone, because a later cell may have moved the state."""
        if (self.open or self.healed) is None:
            return
        if not only_looks(transaction.source) or transaction.changed_anything():
            self.open = self.healed = None

    # What passes by -------------------------------------------------------------------------------------------

    def _saw(self, exc: BaseException) -> None:
        """Note an exception that is about to be shown, if memory ran out."""
        found = self._guarded("recognition", lambda: _find_oom(exc))
        if found is None:
            return
        if self._depth or self._is_retrying:
            self._failure = exc

    def _holds(self, exc: BaseException) -> bool:
        """Whether the display of ``exc`` waits for the outcome of a retry."""
        if self._is_retrying and isinstance(exc, OomDoctorError):
            return True
        if _quietly(lambda: _find_oom(exc)) is None:
            return False
        return self._is_retrying or (self._depth == 1 and self.config.auto != "off" and self.config.snapshot)

    # When memory ran out --------------------------------------------------------------------------------------

    async def _failed(
        self, failure: BaseException, result: Any, raw_cell: str, transaction: Any, call: tuple[Any, Any]
    ) -> None:
        def observe() -> Case:
            return self._observe(failure, result, raw_cell, transaction)

        # The failure holds the memory that ran out. Where that leaves no room to look, it is let go of first, and
        # the census is without what it held.
        observed = _quietly(observe)
        if not self.config.keep_frames:
            self._guarded("release", lambda: _release(failure, self.shell))
        case = observed or self._guarded("evidence", observe)
        if case is not None:
            case = self._guarded("diagnosis", lambda: self._diagnose(case)) or case
            case = self._guarded("forecast", lambda: self._plan(case)) or case
            chosen = self._guarded("choice", lambda: _admitted(case, self.config.auto)) or ()
            may_retry = self.open is not None and chosen and result.error_in_exec is failure
            if may_retry and await self._guarded_heal(Request(case=case, chosen=chosen), result, call):
                return
        self._tracebacks.send_held()
        if case is not None:
            self._guarded("display", lambda: self._show(case))

    def _observe(self, failure: BaseException, result: Any, raw_cell: str, transaction: Any) -> Case:
        from oomdoctor import pipeline

        number = result.execution_count or self.shell.execution_count
        cells = cells_until(self.shell, number, raw_cell)
        case, session = pipeline.observe(
            failure,
            lambda accelerator: pipeline.open_session(self.shell.user_ns, cells, accelerator, self.shell),
            filenames(self.shell),
        )
        self.open = self.healed = None
        if transaction is not None:
            self.open = OpenCase(session=session, transaction=transaction, candidates=())
        pipeline.record(case)
        return case

    def _diagnose(self, case: Case) -> Case:
        from oomdoctor import pipeline

        rules = pipeline.rulebook(tuple(map(Path, self.config.rule_paths)))
        for fault in rules.faults:
            self._tell(f"rule left out: {fault}")
        diagnosed = pipeline.diagnose(case, rules)
        pipeline.record(diagnosed)
        return diagnosed

    def _plan(self, case: Case) -> Case:
        from oomdoctor import pipeline

        if self.open is None:
            return case
        transaction = self.open.transaction
        priced = pipeline.plan(
            case,
            self.open.session,
            transaction.restore,
            time_budget_s=self.config.forecast_time_s,
            reserve=transaction.bytes_to_copy if self.open.session.accelerator.name == "cpu" else 0,
        )
        self.open.candidates = priced.plan.candidates
        pipeline.record(priced)
        return priced

    def _show(self, case: Case) -> None:
        from IPython.display import display

        from oomdoctor.views import bundle, panel

        display(bundle(case, self._names), raw=True)
        if self.config.panel and hasattr(self.shell, "kernel"):
            controls = panel.build(case, self._act)
            if controls is not None:
                display(controls)

    @property
    def _names(self) -> dict[int, str] | None:
        """What the cells are called: by their numbers, unless the shell runs a script."""
        script = getattr(self.shell, "script", None)
        return None if script is None else {1: script.name}

    def _act(self, verb: str, candidate: Candidate | None) -> None:
        """Do what a button of the panel asks for, as if the user had typed it."""
        from oomdoctor.shell.anywhere import run_cell_anywhere

        if verb == "fix" and candidate is not None and self.open is not None:
            number = self.open.candidates.index(candidate) + 1
            run_cell_anywhere(self.shell, f"%oomdoctor fix {number}")
        else:
            run_cell_anywhere(self.shell, f"%oomdoctor {verb}")

    # Retries --------------------------------------------------------------------------------------------------

    async def _retry_on_request(self, request: Request, result: Any, call: tuple[Any, Any]) -> None:
        if not await self._guarded_heal(request, result, call):
            self._tracebacks.send_held()

    async def _guarded_heal(self, request: Request, result: Any, call: tuple[Any, Any]) -> bool:
        """Heal; whatever goes wrong in ours leaves the state of the cell's start and the user's own error."""
        opened = self.open
        self._is_retrying = True
        try:
            case, error = await self._heal(request, call)
        except Exception as exc:  # noqa: BLE001 - border: the user's result must stand whatever fails here
            self._fault("retry", exc)
            if opened is not None:
                self._guarded("rollback", opened.transaction.restore)
            return False
        except BaseException:  # an interrupt, which may have come in the midst of anything
            if opened is not None:
                self._guarded("rollback", opened.transaction.restore)
            raise
        finally:
            self._is_retrying = False
            self._failure = None
        is_healed = case.outcome.kind is OutcomeKind.HEALED
        self._take_over(result, error, is_healed)
        if is_healed:
            self._tracebacks.drop_held()
            self.open, self.healed = None, opened
        else:
            self._tracebacks.send_held(error)
        self._guarded("notice", lambda: self._notice(case))
        return True

    async def _heal(self, request: Request, call: tuple[Any, Any]) -> tuple[Case, BaseException | None]:
        from oomdoctor import pipeline

        if self.open is None:
            raise UsageError("the case can no longer be retried: run its cell again")
        case, error = await pipeline.heal(
            request.case,
            self.open.session,
            self.open.transaction,
            request.chosen,
            functools.partial(self._run_attempt, call=call),
            most_attempts=self.config.attempts,
            time_budget_s=self.config.retry_time_s,
            anyway=request.anyway,
        )
        pipeline.record(case)
        return case, error

    async def _run_attempt(self, attempt: Attempt, call: tuple[Any, Any]) -> BaseException | None:
        """Run redefined functions and the cell's text the way the shell runs cells."""
        _, kwargs = call
        with left_alone():
            for replay in attempt.replays:
                if error := _error_of(await self._run_source(replay, {**kwargs, "silent": True})):
                    return error
            self._last_result = await self._run_source(attempt.source, kwargs)
        return _error_of(self._last_result)

    async def _run_source(self, source: str, kwargs: dict[str, Any]) -> Any:
        given = {
            **kwargs,
            "store_history": False,
            "transformed_cell": self.shell.transform_cell(source),
            "preprocessing_exc_tuple": None,
        }
        return await self._nested(source, **given)

    def _take_over(self, result: Any, error: BaseException | None, is_healed: bool) -> None:
        """Let the cell answer as its retry did."""
        if is_healed:
            result.error_in_exec = error
            result.result = getattr(self._last_result, "result", None)
        elif error is not None:
            result.error_in_exec = error
        self.shell.last_execution_succeeded = result.success
        self.shell.last_execution_result = result
        self._last_result = None

    def _notice(self, case: Case) -> None:
        from IPython.display import display

        from oomdoctor.views import notice_bundle

        display(notice_bundle(case, self._names), raw=True)

    # Borders --------------------------------------------------------------------------------------------------

    def _guarded(self, stage: str, do: Callable[[], Any]) -> Any:
        try:
            return do()
        except Exception as exc:  # noqa: BLE001 - border: a failure of ours never hides or changes the user's
            self._fault(stage, exc)
            return None

    def _fault(self, stage: str, exc: BaseException) -> None:
        line = f"{stage}: {type(exc).__name__}: {exc}".splitlines()[0]
        self.faults.append(line)
        print(f"oomdoctor could not finish ({line})", file=sys.stderr)

    def _tell(self, fault: str) -> None:
        """Print a fault that is not ours the first time that it is met."""
        if fault not in self.faults:
            self.faults.append(fault)
            print(f"oomdoctor: {fault}", file=sys.stderr)


def _find_oom(exc: BaseException) -> BaseException | None:
    if isinstance(exc, (SyntaxError, KeyboardInterrupt)):
        return None
    from oomdoctor.incident import find_oom

    found = find_oom(exc)
    return None if found is None or is_told(exc) or is_told(found) else found


def _quietly(do: Callable[[], Any]) -> Any:
    try:
        return do()
    except Exception:  # noqa: BLE001 - border: what is done so is done twice, and the other time tells the fault
        return None


def _release(exc: BaseException, shell: Any) -> None:
    from oomdoctor.retry.release import release

    release(exc, shell)


def _admitted(case: Case, auto: str) -> tuple[Candidate, ...]:
    from oomdoctor import pipeline

    return pipeline.admitted(case, auto)


def _error_of(result: Any) -> BaseException | None:
    error: BaseException | None = result.error_before_exec or result.error_in_exec
    return error

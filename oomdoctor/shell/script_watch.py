"""One run of a part of a script, watched: what happens when it runs out of memory.

    snapshot ─► the part runs ─► if it ran out: diagnose, release, price, tell, run the part again with a change

Each stage stands behind a border: a failure of ours prints one line, and the user's error stays as it was.
"""

from __future__ import annotations

import functools
import inspect
import linecache
import sys
import threading
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from itertools import count
from types import FunctionType, TracebackType
from typing import Any, Final, TypeVar

from oomdoctor.model import baseline
from oomdoctor.model.absence import Refused
from oomdoctor.model.case import Case, Outcome, OutcomeKind, State
from oomdoctor.model.plan import Candidate
from oomdoctor.model.session import Attempt, Cell, Cells, Session
from oomdoctor.objects.frames import chained, set_traceback, traceback_of
from oomdoctor.program.compiled import compile_python
from oomdoctor.program.names import bound_names
from oomdoctor.sandbox import reserve
from oomdoctor.sandbox.malloc import large_blocks_apart
from oomdoctor.shell.borders import Borders, quietly
from oomdoctor.shell.script_call import RESULT, begun
from oomdoctor.shell.stragglers import (
    beside,
    end_since,
    pools_since,
    processes_since,
    tasks_at_work,
    threads_at_work,
)

_MARK: Final = "__oomdoctor_told__"
_MODULE, _PART = 1, 2
"""Numbers of the cells that a script is taken for: the module's text, and the part of it that ran."""

_is_left_alone: ContextVar[bool] = ContextVar("_is_left_alone", default=False)
_binding = threading.RLock()
_numbers = count(1)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What ``heal`` was told. For the values see there."""

    auto: str
    attempts: int
    time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of a script that may be run again.

    Attributes:
        name: what it is called in messages: ``the call of `train```.
        module: what the text around it is called: ``train.py``.
        filename: of the code; ``text``: what stands there; ``flags``: the compiler's, for its futures.
        source: the part as a cell.
        bound: what has to be among the globals for it.
        refused: why it cannot be run again, None if it can.
    """

    name: str
    module: str
    filename: str
    namespace: dict[str, Any]
    text: str = ""
    flags: int = 0
    source: str = ""
    bound: dict[str, Any] = field(default_factory=dict)
    refused: str | None = None
    is_async: bool = False

    @property
    def cells(self) -> Cells:
        """The script as cells, the part last; where it cannot be run again, the text around it is all there is."""
        module = Cell(number=_MODULE, source=self.text)
        if self.refused is not None:
            return Cells(history=(module,))
        return Cells(history=(module, Cell(number=_PART, source=self.source)))

    @property
    def own_filename(self) -> str:
        """The file name of the part as a cell."""
        return f"<oomdoctor: {self.name} in {self.module}>"

    @property
    def names(self) -> dict[int, str]:
        """What the cells are called in messages."""
        return {_MODULE: self.module, _PART: self.name}

    @contextmanager
    def spelled(self) -> Iterator[None]:
        """Have what the part names among the globals for a while."""
        self.namespace.update(self.bound)
        try:
            yield
        finally:
            for name in self.bound:
                self.namespace.pop(name, None)


class Watch:
    """Watches one run. What the run changes can be taken back as long as this is kept."""

    def __init__(self, part: Part, settings: Settings) -> None:
        self._part, self._settings, self._borders = part, settings, Borders()
        self._refused = part.refused or self._at_work()
        self._beside = beside()
        self._transaction: Any = None
        self._made: tuple[str, ...] = ()
        if self._refused is None:
            from oomdoctor.retry.transaction import Transaction

            with _binding, part.spelled():
                self._transaction = Transaction(part.namespace, part.source, _room)

    @property
    @contextmanager
    def armed(self) -> Iterator[None]:
        """Makes copies just in time while the part runs, and keeps memory back for its failure."""
        if (limit := reserve.of_process()) is not None and not reserve.address_space():
            _make_ready()
            baseline.note(limit[1] - limit[0])
            reserve.take(*limit, populated=False)
        try:
            with large_blocks_apart(), nullcontext() if self._transaction is None else self._transaction.armed():
                yield
        finally:
            reserve.let_go()

    async def answer(self, failure: BaseException) -> tuple[bool, BaseException | None]:
        """Diagnose a failure, and run the part again with a change where that is right.

        To be called outside of every ``except`` clause that handles the failure.

        Returns:
            Whether it was healed, and the error of the user's code that ended the last attempt.
        """
        _mark(failure)
        self._part = replace(self._part, text=begun(self._part.text, self._part.filename))
        self._refused = self._refused or self._at_work() or self._left_behind()
        with left_alone(), self._part.spelled():
            return await self._answer(failure)

    def _at_work(self) -> str | None:
        """Return what else of the program may change its state beside the part, None if there is nothing."""
        tasks = tasks_at_work() if self._part.is_async else ()
        return "; ".join((*threads_at_work(), *tasks)) or None

    def _left_behind(self) -> str | None:
        """Return what the part has set going that cannot be taken back, None if there is nothing."""
        return "; ".join((*processes_since(self._beside), *pools_since(self._beside))) or None

    async def _answer(self, failure: BaseException) -> tuple[bool, BaseException | None]:
        # The failure holds the memory that ran out. Where that leaves no room to look, it is let go of first, and
        # the census is without what it held.
        observed = quietly(lambda: self._observe(failure))
        self._borders.guarded("release", lambda: _release(failure))
        found = observed or self._borders.guarded("evidence", lambda: self._observe(failure))
        if found is None:
            return False, None
        case, session = found
        case = self._borders.guarded("diagnosis", lambda: _recorded(self._diagnose(case))) or case
        case = self._borders.guarded("forecast", lambda: _recorded(self._plan(case, session))) or case
        self._borders.guarded("display", lambda: self._show("bundle", case))
        if self._settings.auto == "off":
            return False, None
        case, error = await self._guarded_heal(case, session)
        _recorded(case)
        self._borders.guarded("notice", lambda: self._show("notice_bundle", case))
        return case.outcome.kind is OutcomeKind.HEALED, error

    def _observe(self, failure: BaseException) -> tuple[Case, Session]:
        from oomdoctor import pipeline

        part = self._part
        linecache.cache[part.own_filename] = _listed(part.source, part.own_filename)
        numbers = {part.filename: _MODULE} | ({part.own_filename: _PART} if part.refused is None else {})
        case, session = pipeline.observe(
            failure, lambda accelerator: pipeline.open_session(part.namespace, part.cells, accelerator), numbers
        )
        cell = case.incident.cell
        if cell is not None:  # the name that the result is bound to is ours
            spelled = replace(cell, source_line=cell.source_line.removeprefix(f"{RESULT} = "))
            case = replace(case, incident=replace(case.incident, cell=spelled))
        pipeline.record(case)
        return case, session

    def _diagnose(self, case: Case) -> Case:
        from oomdoctor import pipeline

        return pipeline.diagnose(case, pipeline.rulebook())

    def _plan(self, case: Case, session: Session) -> Case:
        """Price the changes: by estimates alone where the part cannot be run again, not even in a shadow."""
        from oomdoctor import pipeline

        transaction, is_host = self._transaction, session.accelerator.name == "cpu"
        return pipeline.plan(
            case,
            session,
            transaction.restore if transaction is not None else lambda: None,
            time_budget_s=_config().forecast_time_s if transaction is not None else 0.0,
            reserve=transaction.bytes_to_copy if transaction is not None and is_host else 0,
            unforecast=None if transaction is not None else "what cannot be run again has no shadow run",
        )

    async def _guarded_heal(self, case: Case, session: Session) -> tuple[Case, BaseException | None]:
        """Heal; whatever goes wrong in ours leaves the state of the part's start and the user's own error."""
        try:
            return await self._heal(case, session)
        except Exception as exc:  # noqa: BLE001 - border: the user's error must stand whatever fails here
            self._borders.fault("retry", exc)
            self._borders.guarded("rollback", lambda: self._transaction.restore())
            return replace(case, outcome=_refusal("oomdoctor itself failed")), None
        except BaseException:  # an interrupt, which may have come in the midst of anything
            self._borders.guarded("rollback", lambda: self._transaction.restore())
            raise

    async def _heal(self, case: Case, session: Session) -> tuple[Case, BaseException | None]:
        from oomdoctor import pipeline

        if self._refused is not None:
            return replace(case, outcome=_refusal(self._refused)), None
        chosen: Sequence[Candidate] = pipeline.admitted(case, self._settings.auto)
        if not chosen:
            kind = "no change" if self._settings.auto == "any" else "no change that keeps the result"
            why = pipeline.beyond_cure(case) or f"{kind} is likely to fit"
            return replace(case, outcome=_refusal(why)), None
        await end_since(self._beside, waits=False)
        before = _healers(self._part.namespace)
        case, error = await pipeline.heal(
            case,
            session,
            self._transaction,
            chosen,
            self._run,
            most_attempts=self._settings.attempts,
            time_budget_s=self._settings.time_s,
            by_itself=True,
        )
        if case.outcome.kind is OutcomeKind.HEALED:
            _adopt(self._part.namespace, before)
        return case, error

    async def _run(self, attempt: Attempt) -> BaseException | None:
        """Run redefined functions and the part; return what the user's code raised."""
        part, handled, before = self._part, sys.exc_info()[1], beside()
        self._made = tuple(sorted(name for replay in attempt.replays for name in bound_names(replay)))
        texts = [(replay, f"<oomdoctor: {part.module} changed, {next(_numbers)}>") for replay in attempt.replays]
        for source, filename in [*texts, (attempt.source, part.own_filename)]:
            if texts and filename == part.own_filename:
                self._transaction.set_aside()
            linecache.cache[filename] = _listed(source, filename)
            try:
                code = compile_python(source, filename, part.flags, awaits=part.is_async)
                if code.co_flags & inspect.CO_COROUTINE:
                    await eval(code, part.namespace)
                else:
                    exec(code, part.namespace)
            except (Exception, SystemExit) as exc:  # noqa: BLE001 - border: the user's error is what is asked for
                _of_the_users(exc, filename)
                failed = exc
            else:
                continue
            await end_since(before, waits=False)
            # A call may be made while another error is handled, which is no reason of what it raises now.
            for one in chained(failed):
                if handled is not None and one.__context__ is handled:
                    one.__context__ = None
            return failed
        return None

    def _show(self, what: str, case: Case) -> None:
        from oomdoctor import views

        print(getattr(views, what)(case, self._part.names)["text/plain"], file=sys.stderr)
        if what != "notice_bundle" or case.outcome.kind is not OutcomeKind.HEALED:
            return
        made = next((one for one in case.plan.candidates if one.label in case.outcome.fixes), None)
        if made is not None and not isinstance(made.patch, Refused):
            for edit in made.patch.edits:
                name = self._part.names.get(edit.cell, edit.name)
                print(replace(made.patch, edits=(edit,)).diff(name), file=sys.stderr)
        if self._made:
            names = ", ".join(f"`{name}`" for name in self._made)
            print(f"From now on {names} in {self._part.module} is what the change made of it.\n", file=sys.stderr)


@functools.cache
def _make_ready() -> None:
    """Load what a failure needs while there is memory."""
    from oomdoctor.shell.warming import steps

    for step in steps(_config()):
        quietly(step)


def drive(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return what a coroutine that never waits returns. A loop may be running."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        found: T = done.value
        return found
    coroutine.close()
    raise AssertionError("it waited")


@contextmanager
def left_alone() -> Iterator[None]:
    """Leave what runs out of memory within the body to whoever runs the body."""
    token = _is_left_alone.set(True)
    try:
        yield
    finally:
        _is_left_alone.reset(token)


def is_left_alone() -> bool:
    """Return whether a retry or a forecast is under way, which what it runs is left to."""
    return _is_left_alone.get()


@contextmanager
def apart_from(handled: BaseException | None, exc: BaseException) -> Iterator[None]:
    """Let ``exc`` be seen without the exception that was being handled when what raised it began."""
    link = next((one for one in chained(exc) if one.__context__ is handled), None) if handled is not None else None
    if link is not None:
        link.__context__ = None
    try:
        yield
    finally:
        if link is not None:
            link.__context__ = handled


def is_oom(exc: BaseException) -> bool:
    """Return whether ``exc`` says that memory ran out."""
    return _found(exc) is not None


def ran_out(exc: BaseException) -> bool:
    """Return whether ``exc`` says that memory ran out, and nobody was told so far."""
    found = _found(exc)
    return found is not None and not is_told(exc) and not is_told(found)


def is_told(exc: BaseException) -> bool:
    """Return whether this failure was diagnosed before, nearer to where it arose."""
    return _MARK in (getattr(exc, "__dict__", None) or {})


def _found(exc: BaseException) -> BaseException | None:
    """Return the exception in a chain that memory ran out with."""
    if isinstance(exc, SyntaxError) or not isinstance(exc, Exception):
        return None
    from oomdoctor.incident import find_oom

    found: BaseException | None = quietly(lambda: find_oom(exc))
    return found


def _mark(exc: BaseException) -> None:
    for one in (exc, _found(exc)):
        attributes = getattr(one, "__dict__", None)
        if attributes is not None:
            attributes[_MARK] = True


def entered(part: Part, line: int, traceback: TracebackType | None) -> TracebackType:
    """Return ``traceback`` as it would be had the part been a cell: with the line of it that was running on top."""
    code = compile("\n" * (line - 1) + "raise RuntimeError", part.own_filename, "exec")
    try:
        exec(code, {"__name__": part.namespace.get("__name__")})
    except RuntimeError as exc:
        own = traceback_of(exc)
        if own is not None and own.tb_next is not None:
            return TracebackType(traceback, own.tb_next.tb_frame, own.tb_next.tb_lasti, line)
    raise AssertionError("a statement that raises did not raise")


def _healers(namespace: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in namespace.items() if _healer(value) is not None}


def _healer(value: Any) -> Any:
    return vars(value).get("__oomdoctor__") if type(value) is FunctionType else None


def _adopt(namespace: dict[str, Any], before: dict[str, Any]) -> None:
    """Let the functions that a change redefined be called by whoever holds the old ones under ``heal``."""
    for name, wrapper in before.items():
        now, healer = namespace.get(name), _healer(wrapper)
        changed = _healer(now)
        if changed is not None and changed is not healer:
            healer.take(changed.function)
            namespace[name] = wrapper


def _refusal(why: str) -> Outcome:
    return Outcome(kind=OutcomeKind.REFUSED, state=State.UNVERIFIED, why=why)


def _recorded(case: Case) -> Case:
    from oomdoctor import pipeline

    pipeline.record(case)
    return case


def _release(failure: BaseException) -> None:
    from oomdoctor.retry.release import release

    release(failure)


def _of_the_users(exc: BaseException, filename: str) -> None:
    """Cut what is ours off the beginning of a traceback."""
    step = traceback_of(exc)
    while step is not None and step.tb_frame.f_code.co_filename != filename:
        step = step.tb_next
    set_traceback(exc, step or traceback_of(exc))


def _listed(source: str, filename: str) -> tuple[int, None, list[str], str]:
    return len(source), None, source.splitlines(keepends=True), filename


@functools.cache
def _config() -> Any:
    from oomdoctor.shell.config import OomDoctor

    return OomDoctor()


def _room() -> int:
    from oomdoctor.evidence import host

    _, free, _ = host.binding_limit(host.read(in_full=False))
    return int(free * _config().snapshot_share)

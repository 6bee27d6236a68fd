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
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from traceback import walk_stack
from types import FunctionType
from typing import Any, Final, TypeVar

from oomdoctor import pipeline
from oomdoctor.language import say
from oomdoctor.model import baseline
from oomdoctor.model.case import Case, OutcomeKind
from oomdoctor.model.plan import Candidate
from oomdoctor.model.session import Attempt, Cell, Cells, Session
from oomdoctor.model.unavailable import Refused
from oomdoctor.objects.frames import chained, set_traceback, steps_of, traceback_of
from oomdoctor.program.compiled import compile_python, statement_end
from oomdoctor.program.names import bound_names
from oomdoctor.retry.release import release
from oomdoctor.retry.transaction import Transaction
from oomdoctor.sandbox import reserve
from oomdoctor.sandbox.reserve import large_blocks_apart
from oomdoctor.shell.background_work import beside, clear_away, end_since, left_since, threads_at_work
from oomdoctor.shell.config import OomDoctor
from oomdoctor.shell.error_boundary import Borders, left_alone, mark_told, quietly
from oomdoctor.shell.job_calls import JobCall, alone

RESULT: Final = "_oomdoctor_result"
_MODULE, _PART = 1, 2
"""Numbers of the cells that a script is taken for: the module's text, and the part of it that ran."""

_binding = threading.RLock()
_numbers = count(1)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of a script that may be run again.

    Attributes:
        name: what it is called in messages: ``the call of `train```; ``module``: what the text around it is called.
        filename: of the code; ``text``: what stands there; ``flags``: the compiler's, for its futures.
        source: the part as a cell; ``bound``: what has to be among the globals for it.
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
    """Watches one run of ``part``. What the run changes can be taken back as long as this is kept."""

    def __init__(self, part: Part, config: OomDoctor) -> None:
        self.part, self._config, self._borders = part, config, Borders()
        self._refused = part.refused or "; ".join(threads_at_work()) or None
        self._beside = beside()
        self._transaction: Any = None
        self._made: tuple[str, ...] = ()
        if self._refused is None:
            with _binding, part.spelled():
                self._transaction = Transaction(part.namespace, part.source, config.room)

    @property
    @contextmanager
    def armed(self) -> Iterator[None]:
        """Makes copies just in time while the part runs, and keeps memory back for its failure."""
        if (limit := reserve.of_process()) is not None and not reserve.address_space():
            _make_ready(self._config)
            baseline.note(limit[1] - limit[0])
            reserve.take(*limit, populated=False)
        try:
            with large_blocks_apart(), nullcontext() if self._transaction is None else self._transaction.armed():
                yield
        finally:
            reserve.let_go()

    def answer(self, failure: BaseException, ranks: JobCall) -> tuple[bool, BaseException | None]:
        """Diagnose a failure, and run the part again with a change where that is right.

        To be called outside of every ``except`` clause that handles the failure. ``ranks`` is the run as one of a job.

        Returns:
            Whether it was healed, and the error of the user's code that ended the last attempt.
        """
        mark_told(failure)
        self.part = replace(self.part, text=_begun(self.part.text, self.part.filename))
        self._refused = self._refused or "; ".join((*threads_at_work(), *left_since(self._beside))) or None
        with left_alone(), self.part.spelled():
            return self._answer(failure, ranks)

    def _answer(self, failure: BaseException, ranks: JobCall) -> tuple[bool, BaseException | None]:
        found, guarded = self._observed(failure, ranks), self._borders.guarded
        if found is None:
            return False, None
        case, session = found
        if ranks.word is not None:
            return self._answer_together(case, session, ranks)
        case = guarded("diagnosis", lambda: pipeline.record(pipeline.diagnose(case, pipeline.rulebook()))) or case
        case = guarded("forecast", lambda: pipeline.record(self._plan(case, session))) or case
        guarded("display", lambda: self._show("bundle", case))
        if self._config.auto == "off":
            return False, None
        ended = drive(self._borders.retried(self._heal(case, session), lambda: self._transaction.restore()))
        case, error = ended or (pipeline.refused(case, "oomdoctor itself failed"), None)
        guarded("notice", lambda: self._show("notice_bundle", pipeline.record(case)))
        return case.outcome.kind is OutcomeKind.HEALED, error

    def _observed(self, failure: BaseException, ranks: JobCall) -> tuple[Case, Session] | None:
        found = self._borders.observed(lambda: self._observe(failure), lambda: release(failure))
        why = "memory could not be inspected" if found is None else self._refused if self._transaction is None else None
        if ranks.word is not None and why is not None:
            self._borders.guarded("ranks", lambda: ranks.leave_talk(str(why)))
            return found and self._borders.guarded("notice", lambda: self._refuse(found[0], str(why)))
        return found

    def _refuse(self, case: Case, why: str) -> None:
        self._show("notice_bundle", pipeline.record(pipeline.refused(case, why)))

    def _answer_together(self, case: Case, session: Session, ranks: JobCall) -> tuple[bool, BaseException | None]:
        guarded, shown = self._borders.guarded, partial(self._show, "bundle")
        is_own = case.incident.is_oom
        diagnosed = guarded("diagnosis", lambda: pipeline.diagnose(case, pipeline.rulebook())) if is_own else None
        known = pipeline.record(diagnosed or ranks.of_peer(case))

        def planned() -> tuple[Case, Sequence[Candidate]]:
            case = guarded("forecast", lambda: pipeline.record(self._plan(known, session))) or known
            guarded("display", lambda: shown(case))
            return case, pipeline.admitted(case, self._config.auto)

        losses = filter(None, (self._refused, drive(end_since(self._beside, waits=False))))
        before = self._healers()
        together = ranks.together(
            case=known,
            session=session,
            transaction=self._transaction,
            plan=planned,
            losses=tuple(losses),
            **self._config.limits,
            program=f"{self.part.name}: {self.part.text}",
        )
        ended = drive(self._borders.retried(together.heal(self._run), lambda: self._transaction.restore()))
        case, error = ended or (pipeline.refused(together.case, "oomdoctor itself failed"), None)
        is_healed = case.outcome.kind is OutcomeKind.HEALED
        if is_healed:
            _adopt(self.part.namespace, before)
        elif not together.is_silent:
            guarded("ranks", together.job.mend)
        guarded("notice", lambda: self._show("notice_bundle", pipeline.record(case)))
        return is_healed, error

    def _healers(self) -> dict[str, Any]:
        return {name: value for name, value in self.part.namespace.items() if _healer(value) is not None}

    def _observe(self, failure: BaseException) -> tuple[Case, Session]:
        part = self.part
        _list(part.source, part.own_filename)
        numbers = {part.filename: _MODULE} | ({part.own_filename: _PART} if part.refused is None else {})
        case, session = pipeline.observe(
            failure, lambda accelerator: pipeline.open_session(part.namespace, part.cells, accelerator), numbers
        )
        cell = case.incident.cell
        if cell is not None:  # the name that the result is bound to is ours
            spelled = replace(cell, source_line=cell.source_line.removeprefix(f"{RESULT} = "))
            case = replace(case, incident=replace(case.incident, cell=spelled))
        return pipeline.record(case), session

    def _plan(self, case: Case, session: Session) -> Case:
        return pipeline.plan(
            case,
            session,
            self._transaction,
            time_budget_s=self._config.forecast_time_s,
            is_hurried=self._config.auto != "off",
        )

    async def _heal(self, case: Case, session: Session) -> tuple[Case, BaseException | None]:
        if self._refused is not None:
            return pipeline.refused(case, self._refused), None
        chosen: Sequence[Candidate] = pipeline.admitted(case, self._config.auto)
        if not chosen:
            kind = "no change" if self._config.auto == "any" else "no change that keeps the result"
            return pipeline.refused(case, pipeline.beyond_cure(case) or f"{kind} is likely to fit"), None
        if (why := await end_since(self._beside, waits=False)) is not None:
            return pipeline.refused(case, why), None
        before = self._healers()
        case, error = await pipeline.heal(
            case,
            session,
            self._transaction,
            chosen,
            self._run_alone,
            by_itself=True,
            **self._config.limits,
        )
        if case.outcome.kind is OutcomeKind.HEALED:
            _adopt(self.part.namespace, before)
        return case, error

    async def _run_alone(self, attempt: Attempt) -> BaseException | None:
        with alone("the ranks of a job meet in it, and one rank alone would run it changed"):
            return await self._run(attempt)

    async def _run(self, attempt: Attempt) -> BaseException | None:
        """Run redefined functions and the part; return what the user's code raised."""
        part, handled, before = self.part, sys.exc_info()[1], beside()
        self._made = tuple(sorted(name for replay in attempt.replays for name in bound_names(replay)))
        texts = [(replay, f"<oomdoctor: {part.module} changed, {next(_numbers)}>") for replay in attempt.replays]
        for source, filename in [*texts, (attempt.source, part.own_filename)]:
            if texts and filename == part.own_filename:
                self._transaction.set_aside()
            _list(source, filename)
            try:
                exec(compile_python(source, filename, part.flags), part.namespace)
            except (Exception, SystemExit) as exc:  # noqa: BLE001 - border: the user's error is what is asked for
                _of_the_users(exc, filename)
                failed = exc
            else:
                continue
            await clear_away(before, waits=False)
            # A call may be made while another error is handled, which is no reason of what it raises now.
            for one in chained(failed):
                if handled is not None and one.__context__ is handled:
                    one.__context__ = None
            return failed
        return None

    def _show(self, what: str, case: Case) -> None:
        from oomdoctor import views

        print(getattr(views, what)(case, self.part.names)["text/plain"], file=sys.stderr)
        if what != "notice_bundle" or case.outcome.kind is not OutcomeKind.HEALED:
            return
        made = next((one for one in case.plan.candidates if one.label in case.outcome.fixes), None)
        if made is not None and not isinstance(made.patch, Refused):
            for edit in made.patch.edits:
                name = self.part.names.get(edit.cell, edit.name)
                print(replace(made.patch, edits=(edit,)).diff(name), file=sys.stderr)
        if self._made:
            names = ", ".join(f"`{name}`" for name in self._made)
            told = say(f"From now on {names} in {self.part.module} is what the change made of it.")
            print(f"{told}\n", file=sys.stderr)


def _begun(text: str, filename: str) -> str:
    """Return ``text`` up to the end of the statement that its top level is running, all of it where that has ended."""
    own = (frame for frame, _ in walk_stack(sys._getframe(1)) if frame.f_code.co_filename == filename)
    outside = next((frame for frame in own if not frame.f_code.co_flags & inspect.CO_OPTIMIZED), None)
    if outside is None or outside.f_code.co_name != "<module>":
        return text
    end = statement_end(text, outside.f_lineno)
    return text if end is None else "".join(f"{one}\n" for one in text.split("\n")[:end])


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


def _of_the_users(exc: BaseException, filename: str) -> None:
    """Cut what is ours off the beginning of a traceback."""
    steps = steps_of(traceback_of(exc))
    own = next((step for step in steps if step.tb_frame.f_code.co_filename == filename), None)
    set_traceback(exc, own or traceback_of(exc))


def _list(source: str, filename: str) -> None:
    """Let lines of a file be found in ``source``."""
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)


@functools.cache
def _make_ready(config: OomDoctor) -> None:
    """Load what a failure needs while there is memory."""
    from oomdoctor.shell.warm_up import steps

    for step in steps(config):
        quietly(step)

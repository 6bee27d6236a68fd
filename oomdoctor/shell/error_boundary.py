"""The border between what is ours and what is the user's: failures of ours, tracebacks of theirs, and whose run it is.

A failure of ours prints one line, and the user's result and traceback stay. Their traceback is held back only while an
automatic retry may still heal it. A failure is the cell's where it is shown in the cell's own context: by its code, its
tasks, the cells that it runs. Callbacks of widgets and threads have contexts of their own, while a cell runs as well.
A cell that loads the extension has begun before it and has no run: it is known by its frame.
"""

from __future__ import annotations

import functools
import gc
import signal
import sys
import traceback
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any, Final, TypeVar

from oomdoctor.language import say
from oomdoctor.objects.frames import chained, is_of_signal, steps_of, traceback_of
from oomdoctor.sandbox import reserve
from oomdoctor.sandbox.fork import signals_held_back

T = TypeVar("T")

_EACH_CELL: Final = frozenset({"guard", "loading", "reserve"})
"""Stages beside each cell: what a full memory does to them is told once."""


class Borders:
    """The borders of one shell; ``faults`` has what was printed, a line each."""

    def __init__(self) -> None:
        self.faults: list[str] = []
        self._signalled: BaseException | None = None

    def guarded(self, stage: str, do: Callable[[], Any]) -> Any:
        """Return what ``do`` returns; None where it fails, which is printed."""
        try:
            return do()
        except Exception as exc:  # noqa: BLE001 - border: a failure of ours never hides or changes the user's
            self.fault(stage, exc)
            return None

    def observed(self, observe: Callable[[], T], let_go: Callable[[], object]) -> T | None:
        """Return what ``observe`` returns, and let go of what the failure holds; None where it cannot be looked at.

        The failure holds the memory that ran out. Where that leaves no room to look, it is let go of first, and the
        census is without what it held.
        """
        observed: T | None = quietly(observe)
        self.guarded("release", let_go)
        if observed is not None:
            return observed
        gc.collect()
        seen: T | None = self.guarded("evidence", observe)
        return seen

    async def retried(self, retry: Awaitable[T], restore: Callable[[], None]) -> T | None:
        """Return what ``retry`` returns; None where ours fails, which leaves the state of the cell's start."""
        try:
            return await retry
        except Exception as exc:  # noqa: BLE001 - border: the user's error must stand whatever fails here
            self.fault("retry", exc)
        except BaseException:  # an interrupt, which may have come in the midst of anything
            self.guarded("rollback", restore)
            raise
        self.guarded("rollback", restore)
        return None

    def fault(self, stage: str, exc: BaseException) -> None:
        """Print that a stage failed; what the handler of a signal raised in it is the program's, and kept."""
        with suppress(MemoryError):  # then there is none to tell it with either
            if is_of_signal(exc):
                self._signalled = exc
                return
            line = f"{stage}: {type(exc).__name__}: {exc}".splitlines()[0].rstrip(": ")
            is_told = stage in _EACH_CELL and isinstance(exc, MemoryError) and line in self.faults
            self.faults.append(line)
            if is_told:
                return
            print(say(f"oomdoctor could not finish ({line})"), file=sys.stderr)

    def take_signalled(self) -> BaseException | None:
        """Return what the handler of a signal has raised in a stage of ours, once."""
        found, self._signalled = self._signalled, None
        return found

    def tell(self, fault: str) -> None:
        """Print a fault that is not ours the first time that it is met."""
        if fault not in self.faults:
            self.faults.append(fault)
            print(f"oomdoctor: {say(fault)}", file=sys.stderr)


def quietly(do: Callable[[], Any]) -> Any:
    """Return what ``do`` returns, None where it fails. It is to be done again, which tells the fault."""
    try:
        return do()
    except Exception as exc:
        with suppress(MemoryError):
            if not is_of_signal(exc):
                return None
            raise  # there is no other time
        return None


@dataclass(slots=True, eq=False)
class Run:
    """One run of a cell.

    Attributes:
        owner: the extension that saw it begin.
        is_retry: whether it is a further attempt of ours.
        depth: how many cells are running within one another, 1 where the cell runs its own code.
        failure: what was shown of it last: of an attempt any error, of the user's own run one that memory ran out with.
        shown: where the answer to it will stand, above its traceback; None where that comes first.
    """

    owner: Any
    is_retry: bool = False
    depth: int = 0
    failure: BaseException | None = None
    shown: Any = None

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Have what runs in the body, and what the body starts, belong to this run."""
        token = _current.set(self)
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1
            _current.reset(token)

    def take_failure(self) -> BaseException | None:
        """Return the failure, and forget it: it holds frames."""
        failure, self.failure = self.failure, None
        return failure


_WRAPPERS: Final = (__file__, str(Path(__file__).with_name("extension.py")))
_MARK: Final = "__oomdoctor_told__"
_is_left_alone: ContextVar[bool] = ContextVar("_is_left_alone", default=False)
_current: ContextVar[Run | None] = ContextVar("_current", default=None)


def current(owner: Any) -> Run | None:
    """Return the run that the caller belongs to and ``owner`` saw begin; None outside of it, or after its end."""
    run = _current.get()
    return run if run is not None and run.owner is owner and run.depth else None


def source_begun_before(runs_cells: CodeType, ours: CodeType, owner: Any) -> str | None:
    """Return the text of the cell that is running the caller and began before ``owner`` was there; None outside of one.

    The code is that of the shell's method that runs a cell, and ``ours`` of the method of ``owner`` around it.
    """
    source: str | None = None
    for frame, _ in traceback.walk_stack(sys._getframe(1)):
        if frame.f_code is ours and frame.f_locals.get("self") is owner:
            return None
        if frame.f_code is runs_cells:
            source = str(frame.f_locals.get("raw_cell", ""))
    return source


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


def find_oom(exc: BaseException) -> BaseException | None:
    """Return the exception that memory ran out with; None where there is none, or where it was diagnosed before."""
    if isinstance(exc, (SyntaxError, KeyboardInterrupt)):
        return None
    try:
        from oomdoctor.incident import find_oom
    except (ImportError, MemoryError, OSError, SystemError):  # there is no room to load it
        return exc if isinstance(exc, MemoryError) else None
    found = find_oom(exc)
    return None if found is None or any(_MARK in getattr(one, "__dict__", ()) for one in (exc, found)) else found


def ran_out(exc: BaseException) -> bool:
    """Return whether memory ran out, and nobody was told so far; no failure of ours tells otherwise."""
    return quietly(lambda: find_oom(exc)) is not None


def mark_told(exc: BaseException) -> None:
    """Note that a failure is diagnosed, nearer to where it arose than others will look at it."""
    for one in (exc, quietly(lambda: find_oom(exc))):
        getattr(one, "__dict__", {})[_MARK] = True


def leave_out_wrappers(exc: BaseException) -> None:
    """Take what stands around the user's shell out of a traceback: the shell's own failures pass through it."""
    for link in chained(exc):
        for step in steps_of(traceback_of(link)):
            while step.tb_next is not None and step.tb_next.tb_frame.f_code.co_filename in _WRAPPERS:
                step.tb_next = step.tb_next.tb_next


class Wrapped:
    """Calls ``around`` in place of the method ``name`` of ``owner``; ``original`` is the method as it was.

    Where somebody else has wrapped ours when it is removed, theirs stays, and ours only passes on from then.
    """

    def __init__(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        self._owner, self._name = owner, name
        self._was_on_instance = name in vars(owner)
        self.original: Callable[..., Any] = getattr(owner, name)
        self._active = True

        @functools.wraps(self.original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return (around if self._active else self.original)(*args, **kwargs)

        self._wrapper = wrapper
        setattr(owner, name, wrapper)

    def remove(self) -> None:
        """Put the method back."""
        self._active = False
        if vars(self._owner).get(self._name) is not self._wrapper:
            return
        if self._was_on_instance:
            setattr(self._owner, self._name, self.original)
        else:
            delattr(self._owner, self._name)


class TracebackWatch:
    """Wraps ``shell.showtraceback``.

    Not ``set_custom_exc``: that has one slot, which the next extension takes over in silence.

    Args:
        seen: called with every exception that is shown, before it is shown. It must not raise.
        shown: called with it after it was shown, unless its display is held back. It must not raise.
        holds: asked with the exception whether its display is to be held back for now.
        announces: called before the traceback of a cell's own code is shown. It must not raise.
        in_room: asked first of all, with whether code of a cell has raised it, for the context in which it is shown.
    """

    def __init__(
        self,
        shell: Any,
        seen: Callable[[BaseException], None],
        shown: Callable[[BaseException], None],
        holds: Callable[[BaseException], bool],
        announces: Callable[[BaseException], None],
        in_room: Callable[[bool], AbstractContextManager[None]],
    ) -> None:
        self._shell, self._seen, self._shown, self._holds = shell, seen, shown, holds
        self._announces, self._in_room = announces, in_room
        self._held: list[tuple[BaseException, Callable[..., Any], tuple[Any, ...]]] = []
        self._came: set[int] = set()
        self._wrapped = Wrapped(shell, "showtraceback", self._showtraceback)

    def remove(self) -> None:
        """Put the method back."""
        self._wrapped.remove()

    def _showtraceback(self, *args: Any, **kwargs: Any) -> Any:
        # Code of a cell alone: what %run and widgets show goes on at once, because their cell goes on. The callers are
        # run_code and the wrapper.
        is_of_code = sys._getframe(2).f_code.co_name == "run_code"
        with self._in_room(is_of_code):  # first of all: whatever follows takes memory
            reserve.let_go(keep=reserve.FOR_MESSAGES)
            return self._show(is_of_code, *args, **kwargs)

    def _show(self, is_of_code: bool, *args: Any, **kwargs: Any) -> Any:
        given = args[0] if args else kwargs.get("exc_tuple")
        exc = (given or sys.exc_info())[1]
        given = None
        if isinstance(exc, BaseException):
            leave_out_wrappers(exc)
            self._seen(exc)
            if is_of_code:
                if self._holds(exc):
                    return self._render_only(exc, *args, **kwargs)
                self._announces(exc)
        result = self._rendered(exc, *args, **kwargs)
        if isinstance(exc, BaseException):
            self._shown(exc)
        return result

    def _rendered(self, exc: Any, *args: Any, **kwargs: Any) -> Any:
        """Let the shell show the traceback; where it has no memory to, show it as Python itself prints it."""
        try:
            return self._wrapped.original(*args, **kwargs)
        except (MemoryError, SystemError):
            if not isinstance(exc, BaseException):
                raise
        try:
            lines = traceback.format_exception(exc)
        except (MemoryError, SystemError):
            lines = traceback.format_exception_only(exc)
        return self._shell._showtraceback(type(exc), exc, [line.rstrip("\n") for line in lines])

    def _render_only(self, exc: BaseException, *args: Any, **kwargs: Any) -> Any:
        """Let the shell render the traceback as always, and keep the rendering instead of sending it.

        IPython takes an interrupt that comes meanwhile for the end of the rendering alone: it is heeded after it.
        """
        sender = Wrapped(
            self._shell, "_showtraceback", lambda *rendered: self._held.append((exc, sender.original, rendered))
        )
        try:
            with signals_held_back() as self._came:
                return self._rendered(exc, *args, **kwargs)
        finally:
            sender.remove()

    def heed(self) -> None:
        """Handle the signals that came while a traceback was rendered."""
        came, self._came = self._came, set()
        for number in came:
            signal.raise_signal(number)

    def send_held(self, exc: BaseException | None = None) -> None:
        """Show what was held back of ``exc`` as it would have been shown; without one, what was held back first.

        An ``exc`` of which nothing was held back was shown already.
        """
        held, self._held = self._held, []
        for holder, send, rendered in [one for one in held if one[0] is exc] if exc is not None else held[:1]:
            del holder
            send(*rendered)

    def drop_held(self, exc: BaseException | None = None) -> None:
        """Forget what was held back, as it was healed; of ``exc`` alone, where one is given."""
        self._held = [] if exc is None else [one for one in self._held if one[0] is not exc]

"""``oomdoctor.heal`` for scripts: a function, or a block at the top level, that is healed should memory run out.

    @oomdoctor.heal                           with oomdoctor.heal():
    def train(model, optimizer): ...              train(model, optimizer)

What runs out of memory is taken back and run again with a change in place, as a cell of a notebook is; what cannot be
is diagnosed, and raises the error that it raised.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import PurePath
from threading import get_ident
from types import FrameType, FunctionType, TracebackType
from typing import Any, Final, Literal, TypeVar, overload

from oomdoctor.errors import UsageError
from oomdoctor.model.absence import Refused
from oomdoctor.objects.chain import set_traceback, traceback_of
from oomdoctor.shell.script_call import RESULT, home_of, spell, unreadable
from oomdoctor.shell.script_source import body_of, future_flags, text_of
from oomdoctor.shell.script_watch import (
    Part,
    Settings,
    Watch,
    apart_from,
    drive,
    entered,
    is_left_alone,
    is_oom,
    ran_out,
)

__all__ = ["Heal", "heal"]

_AUTOS: Final = ("exact", "any", "off")

F = TypeVar("F", bound=Callable[..., Any])


@overload
def heal(function: F, /) -> F: ...


@overload
def heal(*, auto: Literal["exact", "any", "off"] = "exact", attempts: int = 3, time_s: float = 3600) -> Heal: ...


def heal(function: Any = None, /, *, auto: str = "exact", attempts: int = 3, time_s: float = 3600) -> Any:
    """Heal a function, or a block, that runs out of memory.

    As a decorator: what a call that ran out of memory did is taken back, and the call is made again with a change in
    place. As a context manager at the top level of a script or a notebook: the same for the block. The diagnosis, and
    what was changed, go to the standard error. What cannot be healed raises what it raised.

    Args:
        auto: ``exact``: with changes that keep the result, up to rounding; ``any``: with any change; ``off``: diagnose
            only.
        attempts: how many attempts one retry may make.
        time_s: no further attempt is begun after this time, in seconds.

    Raises:
        UsageError: an argument is not one of these, or the function is one that cannot be called again.
    """
    if auto not in _AUTOS:
        raise UsageError(f"auto takes one of {', '.join(_AUTOS)}, not {auto!r}")
    if type(attempts) is not int or attempts < 1:
        raise UsageError(f"attempts takes a whole number from 1 on, not {attempts!r}")
    if isinstance(time_s, bool) or not isinstance(time_s, int | float) or not time_s >= 0:
        raise UsageError(f"time_s takes a number of seconds, not {time_s!r}")
    made = Heal(Settings(auto=auto, attempts=attempts, time_s=float(time_s)))
    return made if function is None else made(function)


class Heal:
    """What ``heal(...)`` returns: decorates functions, and stands in ``with``."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._open: list[_Block] = []

    def __call__(self, function: F) -> F:
        """Return ``function``, healed."""
        _check(function)
        healer = _Healer(function, self._settings)
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def wrapper(*args: Any, **kwargs: Any) -> Any:
                return await healer.call_async(args, kwargs)
        else:

            @functools.wraps(function)
            def wrapper(*args: Any, **kwargs: Any) -> Any:
                return healer.call(args, kwargs)

        healer.wrapper = wrapper
        vars(wrapper)["__oomdoctor__"] = healer
        return wrapper  # type: ignore[return-value]

    def __enter__(self) -> None:
        """Watch the block that begins."""
        self._open.append(_Block(sys._getframe(1), self._settings))

    def __exit__(self, kind: Any, exc: BaseException | None, traceback: TracebackType | None) -> bool:
        """Run the block again with a change in place, if it ran out of memory; return whether that healed it."""
        # One object may stand in blocks of several threads and tasks at a time. An ``ExitStack`` leaves from another
        # frame than it entered from.
        place, thread = _place_of(sys._getframe(1)), get_ident()
        same = [block for block in self._open if block.place == place]
        block = (same or [block for block in self._open if block.place[0] == thread])[-1]
        self._open.remove(block)
        block.leave()
        return isinstance(exc, Exception) and block.heals(exc)


class _Healer:
    """One function, healed.

    Attributes:
        function: what is called: after a change of the function, the changed one.
        wrapper: what stands in its place.
    """

    def __init__(self, function: Callable[..., Any], settings: Settings) -> None:
        self._settings = settings
        self.wrapper: Any = None
        self.function = function
        self._read()

    def take(self, function: Callable[..., Any]) -> None:
        """Call another function from now on."""
        self.function = self.wrapper.__wrapped__ = function
        self._read()

    def _read(self) -> None:
        home = home_of(self.function)
        self._text = text_of(home.__code__, home.__globals__)  # now: the file may be edited while the program runs
        self._refused = unreadable(self.function, self._text)

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make the call, and heal it."""
        if is_left_alone():
            return self.function(*args, **kwargs)
        part, handled = self._part(args, kwargs), sys.exc_info()[1]
        watch = Watch(part, self._settings)
        try:
            with watch.armed:
                return self.function(*args, **kwargs)
        except Exception as exc:
            with apart_from(handled, exc):
                if not ran_out(exc):
                    raise
            failure = exc
        try:
            with apart_from(handled, failure):
                _enter(part, failure)
                raised, result = self._ended(part, failure, *drive(watch.answer(failure)))
            if raised is not None:
                raise raised
            return result
        finally:
            # The frame is part of the traceback of what is raised, and would keep them.
            del failure, watch, part
            raised = handled = None

    async def call_async(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make the call, and heal it."""
        if is_left_alone():
            return await self.function(*args, **kwargs)
        part, handled = self._part(args, kwargs), sys.exc_info()[1]
        watch = Watch(part, self._settings)
        try:
            with watch.armed:
                return await self.function(*args, **kwargs)
        except Exception as exc:
            with apart_from(handled, exc):
                if not ran_out(exc):
                    raise
            failure = exc
        try:
            with apart_from(handled, failure):
                _enter(part, failure)
                raised, result = self._ended(part, failure, *await watch.answer(failure))
            if raised is not None:
                raise raised
            return result
        finally:
            # The frame is part of the traceback of what is raised, and would keep them.
            del failure, watch, part
            raised = handled = None

    def _part(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Part:
        home = home_of(self.function)
        part = Part(
            name=f"the call of `{home.__name__}`",
            module=PurePath(home.__code__.co_filename).name,
            filename=home.__code__.co_filename,
            namespace=home.__globals__,
            text=self._text,
            flags=future_flags(home.__code__),
            refused=self._refused,
            is_async=inspect.iscoroutinefunction(self.function),
        )
        if part.refused is None:
            try:
                call = spell(self.wrapper, self.function, args, kwargs, self._text)
            except Exception as exc:  # noqa: BLE001 - border: arguments of all kinds are looked at; the call must be made
                call = Refused(f"its arguments could not be looked at ({type(exc).__name__})")
            if not isinstance(call, Refused):
                return replace(part, source=call.source, bound=call.bound)
            part = replace(part, refused=call.reason)
        return replace(part, refused=f"`{home.__name__}` cannot be called again: {part.refused}")

    def _ended(
        self, part: Part, failure: BaseException, healed: bool, error: BaseException | None
    ) -> tuple[BaseException | None, Any]:
        """Return what the call is to raise, and else what it is to return."""
        result = part.namespace.pop(RESULT, None)
        if part.refused is None:
            _leave(failure)
        if error is not None and (healed or not is_oom(error)):
            return error, None
        if not healed:
            return failure, None
        # What a change made of it, where it stands in its module without ``heal``.
        home = home_of(self.function)
        now = part.namespace.get(home.__name__)
        if type(now) is FunctionType and now not in (self.wrapper, self.function) and "." not in home.__qualname__:
            self.take(now)
        return None, result


class _Block:
    """One ``with`` block, from where it was entered to where it is left.

    Attributes:
        place: tells it from others.
    """

    def __init__(self, frame: FrameType, settings: Settings) -> None:
        self.place, self._handled = _place_of(frame), sys.exc_info()[1]
        self._armed = ExitStack()
        self._watch: Watch | None = None
        if not is_left_alone():
            self._part = _part_of(frame)
            self._watch = Watch(self._part, settings)
            self._armed.enter_context(self._watch.armed)

    def leave(self) -> None:
        """Make no more copies."""
        self._armed.close()

    def heals(self, failure: Exception) -> bool:
        """Run the block again, if ``failure`` says that it ran out of memory; return whether that healed it."""
        with apart_from(self._handled, failure):
            return self._watch is not None and ran_out(failure) and self._run_again(failure, self._watch)

    def _run_again(self, failure: Exception, watch: Watch) -> bool:
        traceback = traceback_of(failure)
        if traceback is None or self._part.refused is not None:
            drive(watch.answer(failure))
            return False
        own = traceback.tb_frame, traceback.tb_lasti, traceback.tb_lineno
        set_traceback(failure, entered(self._part, traceback.tb_lineno, traceback.tb_next))
        del traceback
        healed, error = drive(watch.answer(failure))
        _leave(failure)
        set_traceback(failure, TracebackType(traceback_of(failure), *own))
        if error is not None and (healed or not is_oom(error)):
            raise error
        return healed


def _part_of(frame: FrameType) -> Part:
    """Return the block that ``frame`` is about to enter."""
    code, namespace = frame.f_code, frame.f_globals
    text, file = text_of(code, namespace), PurePath(code.co_filename).name
    name = f"the `with` block on line {frame.f_lineno}"
    part = Part(
        name=name,
        module=file,
        filename=code.co_filename,
        namespace=namespace,
        text=text,
        flags=future_flags(code),
    )
    if code.co_flags & inspect.CO_OPTIMIZED or frame.f_locals is not namespace:
        reason = "it does not stand at the top level: write its lines as a function under `@oomdoctor.heal`"
        return replace(part, refused=f"{name} cannot be run again: {reason}")
    body = body_of(frame, text)
    if isinstance(body, Refused):
        return replace(part, refused=f"{name} cannot be run again: {body.reason}")
    return replace(part, text=body.before, source=body.source, indent=body.indent)


def _place_of(frame: FrameType) -> tuple[int, int]:
    return get_ident(), id(frame)


def _enter(part: Part, failure: BaseException) -> None:
    """Let the traceback of a call begin with the call itself, and not with what is ours."""
    traceback = traceback_of(failure)
    inner = traceback.tb_next if traceback is not None else None
    set_traceback(failure, inner if part.refused is not None else entered(part, 1, inner))


def _leave(failure: BaseException) -> None:
    traceback = traceback_of(failure)
    set_traceback(failure, traceback.tb_next if traceback is not None else None)


def _check(function: object) -> None:
    """Refuse what cannot be healed by calling it again.

    Raises:
        UsageError: the line to show.
    """
    if isinstance(function, staticmethod | classmethod):
        raise UsageError(f"heal takes a function: write `@oomdoctor.heal` below `@{type(function).__name__}`")
    home = inspect.unwrap(function) if callable(function) else None
    if not isinstance(function, FunctionType) or not isinstance(home, FunctionType):
        raise UsageError(f"heal takes a function, and was given {type(function).__name__}")
    for one in (function, home):
        if inspect.isgeneratorfunction(one) or inspect.isasyncgenfunction(one):
            raise UsageError(f"heal takes no generator: `{home.__name__}` has handed out values before it runs out")
    if inspect.iscoroutinefunction(home) != inspect.iscoroutinefunction(function):
        raise UsageError(f"heal does not see that `{home.__name__}` is awaited: write `@oomdoctor.heal` right above it")

"""``oomdoctor.heal`` for scripts: a function whose calls are healed should memory run out.

    @oomdoctor.heal
    def train(model, optimizer): ...

What runs out of memory is taken back and run again with a change in place, as a cell of a notebook is; what cannot be
is diagnosed, and raises the error that it raised.
"""

from __future__ import annotations

import functools
import inspect
import keyword
import linecache
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path, PurePath
from types import FunctionType, TracebackType
from typing import Any, Final, Literal, TypeVar, overload

from traitlets import TraitError

from oomdoctor.errors import UsageError
from oomdoctor.model.unavailable import Refused
from oomdoctor.objects.frames import set_traceback, traceback_of
from oomdoctor.objects.named import is_users
from oomdoctor.program.compiled import decorators_of, defines, future_flags, global_names, is_compiled_from
from oomdoctor.retry.release import empty_frame
from oomdoctor.shell.config import OomDoctor
from oomdoctor.shell.error_boundary import is_left_alone, ran_out
from oomdoctor.shell.job_calls import JobCall, is_in_job, watch_groups
from oomdoctor.shell.script_watch import RESULT, Part, Watch, apart_from

F = TypeVar("F", bound=Callable[..., Any])


@overload
def heal(function: F, /) -> F: ...


@overload
def heal(
    *, auto: Literal["exact", "any", "off"] = "exact", attempts: int = 3, time_s: float = 3600
) -> Callable[[F], F]: ...


def heal(function: Any = None, /, *, auto: str = "exact", attempts: int = 3, time_s: float = 3600) -> Any:
    """Heal a function whose call runs out of memory: a decorator, with arguments or without.

    What the call did is taken back, and the call is made again with a change in place. The diagnosis, and what was
    changed, go to the standard error. What cannot be healed raises what it raised.

    Args:
        auto: ``exact``: with changes that keep the result, up to rounding; ``any``: with any change; ``off``: diagnose
            only.
        attempts: how many attempts one retry may make.
        time_s: no further attempt is begun after this time, in seconds.

    Raises:
        UsageError: an argument is not one of these, or the function is one that cannot be called again.
    """
    try:
        config = OomDoctor(auto=auto, attempts=attempts, retry_time_s=time_s)
    except TraitError as exc:
        raise UsageError(str(exc)) from None
    return functools.partial(_healed, config=config) if function is None else _healed(function, config)


def _healed(function: F, config: OomDoctor) -> F:
    _check(function)
    healer = _Healer(function, config)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return healer.call(args, kwargs)

    healer.wrapper = wrapper
    vars(wrapper)["__oomdoctor__"] = healer
    return wrapper  # type: ignore[return-value]


class _Healer:
    """One function, healed, with the ``wrapper`` in its place; ``function`` is the changed one after a change."""

    def __init__(self, function: Callable[..., Any], config: OomDoctor) -> None:
        self._config = config
        self._takes_part = config.auto != "off"
        if self._takes_part:
            watch_groups()
        self.wrapper: Any = None
        self.function = function
        self._read()

    def take(self, function: Callable[..., Any]) -> None:
        """Call another function from now on."""
        self.function = self.wrapper.__wrapped__ = function
        self._read()

    def _read(self) -> None:
        home = _home_of(self.function)
        # Now: the file may be edited while the program runs.
        self._text = "".join(linecache.getlines(home.__code__.co_filename, home.__globals__))
        self._refused = _unreadable(self.function, self._text)

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make the call, and heal it."""
        if is_left_alone() or is_in_job():
            return self.function(*args, **kwargs)
        watch, handled = Watch(self._part(args, kwargs), self._config), sys.exc_info()[1]
        ranks = JobCall(takes_part=self._takes_part)
        failure: BaseException | None = None
        try:
            with watch.armed:
                ranks.begin()
                result = self.function(*args, **kwargs)
            if not ranks.goes_back(None):
                return result
            del result
        except Exception as exc:
            with apart_from(handled, exc):
                if not ranks.goes_back(exc) and not ran_out(exc):
                    raise
            failure = exc
        except BaseException as exc:
            ranks.goes_back(exc)
            raise
        failure = ranks.failure(failure)
        try:
            raised, result = self._answered(watch, failure, handled, ranks)
            if raised is not None:
                raise raised
            return result
        finally:
            # The frame is part of the traceback of what is raised, and would keep them.
            del failure, watch, ranks
            raised = handled = None

    def _part(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Part:
        home, refused = _home_of(self.function), self._refused
        source, bound = "", dict[str, Any]()
        if refused is None:
            try:
                call = _spell(self.wrapper, self.function, args, kwargs, self._text)
            except Exception as exc:  # noqa: BLE001 - border: arguments of all kinds are looked at; the call must be made
                call = Refused(f"its arguments could not be looked at ({type(exc).__name__})")
            if isinstance(call, Refused):
                refused = call.reason
            else:
                source, bound = call
        return Part(
            name=f"the call of `{home.__name__}`",
            module=PurePath(home.__code__.co_filename).name,
            filename=home.__code__.co_filename,
            namespace=home.__globals__,
            text=self._text,
            flags=future_flags(home.__code__),
            source=source,
            bound=bound,
            refused=None if refused is None else f"`{home.__name__}` cannot be called again: {refused}",
        )

    def _answered(
        self, watch: Watch, failure: BaseException, handled: BaseException | None, ranks: JobCall
    ) -> tuple[BaseException | None, Any]:
        part = watch.part
        with apart_from(handled, failure):
            _enter(part, failure)
            healed, error = watch.answer(failure, ranks)
            result = part.namespace.pop(RESULT, None)
            if part.refused is None:
                _leave(failure)
            if error is not None and (healed or not ran_out(error)):
                return error, None
        if not healed:
            return failure, None
        # What a change made of it, where it stands in its module without ``heal``.
        home = _home_of(self.function)
        now = part.namespace.get(home.__name__)
        if type(now) is FunctionType and now not in (self.wrapper, self.function) and "." not in home.__qualname__:
            self.take(now)
        return None, result


def _enter(part: Part, failure: BaseException) -> None:
    """Let the traceback of a call begin with the call itself, and not with what is ours."""
    _leave(failure)
    if part.refused is None:
        frame, instruction = empty_frame(part.own_filename, 1, {"__name__": part.namespace.get("__name__")})
        set_traceback(failure, TracebackType(traceback_of(failure), frame, instruction, 1))


def _leave(failure: BaseException) -> None:
    traceback = traceback_of(failure)
    set_traceback(failure, traceback.tb_next if traceback is not None else None)


def _check(function: object) -> None:
    """Refuse what cannot be healed by calling it again."""
    if isinstance(function, staticmethod | classmethod):
        raise UsageError(f"heal takes a function: write `@oomdoctor.heal` below `@{type(function).__name__}`")
    home = inspect.unwrap(function) if callable(function) else None
    if not isinstance(function, FunctionType) or not isinstance(home, FunctionType):
        raise UsageError(f"heal takes a function, and was given {type(function).__name__}")
    for one in (function, home):
        if inspect.isgeneratorfunction(one) or inspect.isasyncgenfunction(one):
            raise UsageError(f"heal takes no generator: `{home.__name__}` has handed out values before it runs out")
        if inspect.iscoroutinefunction(one):
            raise UsageError(f"heal takes no coroutine function: write what `{home.__name__}` computes as a plain one")


_LONGEST: Final = 60


def _home_of(function: Callable[..., Any]) -> FunctionType:
    """Return the function under the decorators that it has."""
    found = inspect.unwrap(function)
    assert isinstance(found, FunctionType)
    return found


def _spell(
    wrapper: Callable[..., Any], function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], text: str
) -> tuple[str, dict[str, Any]] | Refused:
    """Return a line that calls ``wrapper`` and binds ``RESULT``, and what has to be bound among the globals for it.

    ``function`` is what it calls in its turn, ``text`` that of the file or the cell that this stands in.
    """
    home = _home_of(function)
    names = _Names(home.__globals__, global_names(text))
    try:
        parameters = list(inspect.signature(home).bind(*args, **kwargs).signature.parameters.values())
    except TypeError:
        return Refused("it was called with other arguments than it takes")
    positional = [_parameter_name(parameters, at) for at in range(len(args))]
    called, given = home.__name__, list(zip(positional, args, strict=True))
    if "." in home.__qualname__:
        if not args or inspect.getattr_static(type(args[0]), home.__name__, None) is not wrapper:
            return Refused("it is reached in another way than as a method of its first argument")
        called = f"{names.spelled(*given.pop(0))}.{home.__name__}"
    elif not any(home.__globals__.get(home.__name__) is one for one in (wrapper, function)):
        return Refused(f"the name `{home.__name__}` stands for something else in its module: what is called is not it")
    words = [names.spelled(name, value) for name, value in given]
    if all(name.isidentifier() and not keyword.iskeyword(name) for name in kwargs):
        words += [f"{name}={names.spelled(name, value)}" for name, value in kwargs.items()]
    else:
        words.append(f"**{names.spelled('keywords', kwargs)}")
    return f"{RESULT} = {called}({', '.join(words)})\n", names.bound | _own_decorator(home, text)


def _unreadable(function: Callable[..., Any], text: str) -> str | None:
    """Return why a function cannot be run again from its text, None if it can."""
    home = _home_of(function)
    if home.__name__ == "<lambda>":
        return "it is a lambda: write it as a function of the module's top level"
    if "<locals>" in home.__qualname__:
        return "it is defined within another function: write it at the module's top level, and hand it what it needs"
    if not text:
        return "its source cannot be read"
    code = home.__code__
    # Of a cell of a notebook there is no file: its text is kept as it was run.
    if Path(code.co_filename).exists() and not is_compiled_from((code,), text):
        return "its file was changed after it was loaded"
    is_found = defines(text, home.__name__, code.co_firstlineno)
    return None if is_found else "its definition was not found in the text of its module"


def _own_decorator(home: FunctionType, text: str) -> dict[str, Any]:
    """Return what ``heal`` is written with above a function, where the globals of that lack it.

    A function that was sent to another process by value, as Ray does, has there what it reads itself and nothing else.
    """
    written = decorators_of(text, home.__name__, home.__code__.co_firstlineno) or []
    first, *rest = written[0].partition("(")[0].split(".") if len(written) == 1 else [""]
    if not first.isidentifier() or first in home.__globals__:
        return {}
    return {first: sys.modules[__name__.partition(".")[0]] if rest else heal}


def _parameter_name(parameters: list[inspect.Parameter], at: int) -> str:
    found = parameters[at] if at < len(parameters) else parameters[-1]
    plain = [one for one in parameters[: at + 1] if one.kind is not inspect.Parameter.VAR_POSITIONAL]
    if len(plain) == at + 1:
        return found.name
    several = next(one for one in parameters if one.kind is inspect.Parameter.VAR_POSITIONAL)
    return f"{several.name}_{at - parameters.index(several)}"


@dataclass(slots=True)
class _Names:
    namespace: dict[str, Any]
    taken: Collection[str]
    bound: dict[str, Any] = field(default_factory=dict)

    def spelled(self, name: str, value: Any) -> str:
        """Return how to write ``value``, the argument for the parameter ``name``."""
        if _is_literal(value):
            return repr(value)
        if name in self.namespace and self.namespace[name] is value:
            return name
        while name in self.namespace or name in self.taken or name in self.bound or not is_users(name):
            name = f"{name}_given"
        self.bound[name] = value
        return name


def _is_literal(value: Any) -> bool:
    if type(value) is float:
        return isfinite(value)
    if type(value) is int:
        return value.bit_length() <= _LONGEST
    return value is None or type(value) is bool or (type(value) is str and len(value) <= _LONGEST)

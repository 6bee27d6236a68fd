"""One call of a function, written down so that it can be made again: ``result = train(model, optimizer, 3)``.

An argument is written as itself where it is a short literal, as the global that it is where there is one, and as the
parameter's name otherwise, which is then bound among the globals while the call is made again.
"""

from __future__ import annotations

import inspect
import keyword
import linecache
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any, Final

from oomdoctor.model.absence import Refused
from oomdoctor.objects.named import is_users
from oomdoctor.program.compiled import defines, global_names, is_compiled_from, statement_end

RESULT: Final = "_oomdoctor_result"
_LONGEST: Final = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call as a cell.

    Attributes:
        source: a line that makes the call and binds ``RESULT``.
        bound: what has to be bound among the globals for it.
    """

    source: str
    bound: dict[str, Any]


def home_of(function: Callable[..., Any]) -> FunctionType:
    """Return the function under the decorators that it has."""
    found = inspect.unwrap(function)
    assert isinstance(found, FunctionType)
    return found


def spell(
    wrapper: Callable[..., Any],
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    text: str,
) -> Call | Refused:
    """Write a call of ``wrapper`` down.

    Args:
        wrapper: what is called.
        function: what it calls in its turn.
        text: of the file or the cell that the function stands in.
    """
    home = home_of(function)
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
    awaits = "await " if inspect.iscoroutinefunction(function) else ""
    return Call(source=f"{RESULT} = {awaits}{called}({', '.join(words)})\n", bound=names.bound)


def unreadable(function: Callable[..., Any], text: str) -> str | None:
    """Return why a function cannot be run again from its text, None if it can."""
    home = home_of(function)
    if home.__name__ == "<lambda>":
        return "it is a lambda: write it as a function of the module's top level"
    if "<locals>" in home.__qualname__:
        return "it is defined within another function: write it at the module's top level, and hand it what it needs"
    if not text:
        return "its source cannot be read"
    code = home.__code__
    # Of a cell of a notebook there is no file: its text is kept as it was run.
    if Path(code.co_filename).exists() and not is_compiled_from(code, text):
        return "its file was changed after it was loaded"
    is_found = defines(text, home.__name__, code.co_firstlineno)
    return None if is_found else "its definition was not found in the text of its module"


def text_of(code: CodeType, namespace: dict[str, Any]) -> str:
    """Return the text of the file or the cell that ``code`` comes from, nothing where it cannot be had."""
    return "".join(linecache.getlines(code.co_filename, namespace))


def begun(text: str, filename: str) -> str:
    """Return ``text`` up to the end of the statement that its top level is running, all of it where that has ended."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (frame.f_code.co_filename != filename or frame.f_code.co_flags & inspect.CO_OPTIMIZED):
        frame = frame.f_back
    if frame is None or frame.f_code.co_name != "<module>":
        return text
    end = statement_end(text, frame.f_lineno)
    return text if end is None else "".join(f"{one}\n" for one in text.split("\n")[:end])


def _parameter_name(parameters: list[inspect.Parameter], at: int) -> str:
    found = parameters[at] if at < len(parameters) else parameters[-1]
    plain = [one for one in parameters[: at + 1] if one.kind is not inspect.Parameter.VAR_POSITIONAL]
    if len(plain) == at + 1:
        return found.name
    several = next(one for one in parameters if one.kind is inspect.Parameter.VAR_POSITIONAL)
    return f"{several.name}_{at - parameters.index(several)}"


@dataclass(slots=True)
class _Names:
    """Finds a way to write each argument down."""

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

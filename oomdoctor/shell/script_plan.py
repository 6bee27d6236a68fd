"""``oomdoctor.plan`` for scripts: what a call, or a piece of source, would need, found out without running it."""

from __future__ import annotations

import functools
import inspect
import linecache
import sys
from collections.abc import Callable
from math import inf
from pathlib import PurePath
from textwrap import dedent
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

from oomdoctor.errors import UsageError
from oomdoctor.model.session import Cell, Cells
from oomdoctor.model.sizes import parse_size
from oomdoctor.objects.kinds import spelled
from oomdoctor.shell.memplan import check_source

if TYPE_CHECKING:
    from oomdoctor.views.displayed import Planned

_PLANNED: Final = "_oomdoctor_planned"


def plan(
    callable_or_source: Callable[[], Any] | str,
    *,
    device_memory: str | int | None = None,
    namespace: dict[str, Any] | None = None,
    time_s: float = 10.0,
) -> Planned:
    """Find out what a call, or a piece of source, needs, and where that fits, without running it.

    Args:
        callable_or_source: called without arguments (``functools.partial`` gives some), and awaited where it is a
            coroutine function; or run as a cell is.
        device_memory: plans for a device of that size, all of it for tensors; for the one in use by default.
        namespace: where names are looked up; what the caller sees by default, its locals and its globals.
        time_s: for each part of the plan: the forecast, the cards, the fixes, the batch.

    Raises:
        UsageError: it is neither of the two, the source is not Python, or the size or the time is none.
    """
    memory = _size(device_memory)
    _check_time(time_s)
    if namespace is not None and not isinstance(namespace, dict):
        raise UsageError(f"namespace takes a dictionary of names, and was given {type(namespace).__name__}")
    found = _seen(sys._getframe(1)) if namespace is None else dict(spelled(namespace))
    given: Any = callable_or_source  # callers without a type checker give anything
    if isinstance(given, str):
        source = dedent(given)
        if not source.strip():
            raise UsageError("plan takes a callable or source, and the source has nothing in it")
        check_source(source, "the source")
    elif callable(given):
        source = _call(given, found)
    else:
        raise UsageError(f"plan takes a callable or source (str), and was given {type(given).__name__}")
    from oomdoctor import pipeline
    from oomdoctor.views.displayed import Planned

    cells = Cells(history=(Cell(number=0, source=_script_of(given, found)), Cell(number=1, source=source)))
    file = PurePath(str(found.get("__file__") or "the module")).name
    names = {0: file, 1: "the source" if isinstance(given, str) else _named(given)}
    return Planned(pipeline.foresee(found, cells, memory=memory, time_s=time_s), names)


def _size(given: Any) -> int | None:
    """Return the bytes of the device to plan for.

    Raises:
        UsageError: that is no size, or a number that stands for another unit.
    """
    if given is None or isinstance(given, str):
        return None if given is None else parse_size(given)
    if type(given) is not int:
        raise UsageError(f"device_memory takes a text such as '16GiB', or bytes, and was given {type(given).__name__}")
    return parse_size(str(given))  # 16 means another unit here as well


def _check_time(given: Any) -> None:
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 <= given < inf:
        raise UsageError(f"time_s takes seconds, 0 or more, and was given {given!r:.80}")


def _seen(caller: FrameType) -> dict[str, Any]:
    from oomdoctor.objects.frames import locals_of

    return {**caller.f_globals, **locals_of(caller)}


def _call(function: Callable[[], Any], namespace: dict[str, Any]) -> str:
    """Return the source of the call, by the name that the function has where that stands for it.

    Raises:
        UsageError: a call of it runs nothing of it.
    """
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        told = _named(function)
        raise UsageError(f"{told} runs nothing until it is iterated over: plan a function that does, or the source")
    awaits = "await " if inspect.iscoroutinefunction(function) else ""
    name = getattr(function, "__name__", None)
    if type(name) is str and name.isidentifier() and namespace.get(name) is function:
        return f"{awaits}{name}()\n"
    namespace[_PLANNED] = function
    return f"{awaits}{_PLANNED}()\n"


def _named(function: Any) -> str:
    """Return what a call is called in sentences."""
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__name__", None)
    return f"{name}()" if type(name) is str and name.isidentifier() else "the call"


def _script_of(given: Any, namespace: dict[str, Any]) -> str:
    """Return the text of the script or module that the function, or else the namespace, is of."""
    while isinstance(given, functools.partial):
        given = given.func
    path = getattr(getattr(given, "__code__", None), "co_filename", None) or spelled(namespace).get("__file__")
    return "".join(linecache.getlines(path, namespace)) if type(path) is str else ""

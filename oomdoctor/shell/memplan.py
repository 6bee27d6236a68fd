"""``%%memplan`` and ``oomdoctor.plan``: what a cell or a call would need, found out without running it.

With ``--run`` a cell that fits runs as one of its own after the magic's cell is done: it has its number, its snapshot,
its diagnosis and its retries, as if it had been typed without the first line.
"""

from __future__ import annotations

import inspect
import json
import linecache
import sys
from collections.abc import Callable
from functools import partial
from math import inf
from pathlib import PurePath
from textwrap import dedent
from typing import TYPE_CHECKING, Any, Final

from oomdoctor import pipeline
from oomdoctor.errors import UsageError
from oomdoctor.language import say
from oomdoctor.model.plan import Forecast, Verdict
from oomdoctor.model.session import Cell, Cells
from oomdoctor.model.sizes import format_size, parse_size
from oomdoctor.objects.frames import locals_of
from oomdoctor.objects.kinds import spelled
from oomdoctor.program.compiled import fault_in
from oomdoctor.shell.cells import cells_until
from oomdoctor.shell.outputs import FLAG, HELP, JSON, PRINTED, Options, one_line, put

if TYPE_CHECKING:
    from oomdoctor.views.displayed import Planned


USAGE: Final = """Forecast the cell below without running it: peak memory, where it fits, and what to change.

    %%memplan [--run] [--device-memory SIZE] [--device D] [--json [PATH]]

    --run                   run the cell if it is forecast to fit
    --device-memory SIZE    plan for a device of that size, all of it for tensors: 16GiB, 512MiB
    --device D              plan for a device that is in use: cuda, cuda:1, cpu
    --json [PATH]           the plan as JSON, printed where no path is given, and for -
    --help                  this text, with `%memplan --help` where there is no cell
"""

_OPTIONS: Final = Options("%%memplan", run=FLAG, device_memory={}, device={}, json=JSON)


def read_options(words: list[str]) -> Any:
    """Return the options among ``words``, the memory in bytes."""
    options = _OPTIONS.parse_args(words)
    if options.device_memory is not None and options.device is not None:
        raise UsageError("--device and --device-memory are two answers to one question: give one of them")
    if options.device_memory is not None:
        options.device_memory = parse_size(options.device_memory)
    return options


def answer(shell: Any, words: list[str], cell: str | None, number: int, *, time_s: float) -> str | None:
    """Plan what stands below the magic as ``words`` ask for; None where it has one sign.

    Returns:
        The cell, where it is to be run when the magic's is done.

    Raises:
        UsageError: they ask for what is not there, or the cell cannot be planned; nothing is written then.
    """
    if HELP.intersection(words):
        print(say(USAGE), end="")
        return None
    if cell is None:
        why = "write %%memplan above the cell; `%memplan --help` tells more"
        raise UsageError(f"%memplan has no cell below it: {why}")
    options = read_options(words)
    if not cell.strip():
        raise UsageError("%%memplan forecasts the cell below its line, and there is nothing below it")
    from IPython.core.inputtransformer2 import leading_indent
    from IPython.display import display

    from oomdoctor.objects.storages import unobserved
    from oomdoctor.views.displayed import Planned

    cell = "".join(leading_indent(cell.splitlines(keepends=True)))  # as IPython does before it runs one
    check_source(cell, "the cell below %%memplan")
    foresee = partial(pipeline.foresee, device=options.device, memory=options.device_memory)
    with unobserved():
        cells = cells_until(shell, number, cell)
        planned = Planned(foresee(shell.user_ns, cells, shell=shell, time_s=time_s))
    if options.json is not None:
        put(json.dumps(planned.to_dict(), indent=1), options.json)
        if options.json != PRINTED:
            print(say(f"{one_line(options.json)}: the plan as JSON"))
    else:
        display(planned)
    if not options.run:
        return None
    if (reason := _why_not(planned.forecast, planned.plan.here.verdict)) is not None:
        raise UsageError(f"not run: {reason}")
    return cell


def _why_not(forecast: Forecast, verdict: Verdict) -> str | None:
    from oomdoctor.forecast.dry_run_result import is_of_card
    from oomdoctor.views.labels import about, clean

    if forecast.peak is None:
        return f"no forecast: {clean(forecast.refused or '')}"
    if is_of_card(forecast):
        return "this machine has no such device"
    if forecast.budget is None:
        return "the available memory is unknown"
    if verdict is Verdict.FITS:
        return None
    need = max(forecast.peak, forecast.reserved or 0)
    told = {Verdict.BORDERLINE: "too close to say"}.get(verdict, verdict.value)
    return f"it needs {about(need)} of {format_size(forecast.budget)}, {told}"


def check_source(text: str, what: str) -> None:
    """Refuse what is not Python, magics aside; ``what`` it is called."""
    fault = fault_in(text)
    if fault is not None:
        line = f" (line {fault.line} of it)" if fault.line else ""
        raise UsageError(f"{what} is not Python: {one_line(fault.message)}{line}")


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
        callable_or_source: called without arguments (``partial`` gives some), and awaited where it is a
            coroutine function; or run as a cell is.
        device_memory: plans for a device of that size, all of it for tensors; for the one in use by default.
        namespace: where names are looked up; what the caller sees by default, its locals and its globals.
        time_s: for each part of the plan: the forecast, the cards, the fixes, the batch.

    Raises:
        UsageError: it is neither of the two, the source is not Python, or the size or the time is none.
    """
    given: Any = device_memory  # callers without a type checker give anything
    if given is not None and type(given) is not int and not isinstance(given, str):
        raise UsageError(f"device_memory takes a text such as '16GiB', or bytes, and was given {type(given).__name__}")
    memory = None if given is None else parse_size(str(given))
    given = time_s
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 <= given < inf:
        raise UsageError(f"time_s takes seconds, 0 or more, and was given {given!r:.80}")
    if namespace is not None and not isinstance(namespace, dict):
        raise UsageError(f"namespace takes a dictionary of names, and was given {type(namespace).__name__}")
    caller = sys._getframe(1)
    found = {**caller.f_globals, **locals_of(caller)} if namespace is None else dict(spelled(namespace))
    given = callable_or_source
    if isinstance(given, str):
        source = dedent(given)
        if not source.strip():
            raise UsageError("plan takes a callable or source, and the source has nothing in it")
        check_source(source, "the source")
    elif callable(given):
        source = _call(given, found)
    else:
        raise UsageError(f"plan takes a callable or source (str), and was given {type(given).__name__}")
    from oomdoctor.views.displayed import Planned

    cells = Cells(history=(Cell(number=0, source=_script_of(given, found)), Cell(number=1, source=source)))
    file = PurePath(str(found.get("__file__") or "the module")).name
    names = {0: file, 1: "the source" if isinstance(given, str) else _named(given)}
    return Planned(pipeline.foresee(found, cells, memory=memory, time_s=time_s), names)


def _call(function: Callable[[], Any], namespace: dict[str, Any]) -> str:
    """Return the source of the call, by the name that the function has where that stands for it."""
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
    while isinstance(function, partial):
        function = function.func
    name = getattr(function, "__name__", None)
    return f"{name}()" if type(name) is str and name.isidentifier() else "the call"


def _script_of(given: Any, namespace: dict[str, Any]) -> str:
    """Return the text of the script or module that the function, or else the namespace, is of."""
    while isinstance(given, partial):
        given = given.func
    path = getattr(getattr(given, "__code__", None), "co_filename", None) or spelled(namespace).get("__file__")
    return "".join(linecache.getlines(path, namespace)) if type(path) is str else ""

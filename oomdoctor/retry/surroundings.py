"""What a cell changes beside its own objects: settings of the process and of torch, functions of modules, log files.

Settings and functions are put back; what was written to a log file is told.
"""

from __future__ import annotations

import builtins
import gc
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from operator import itemgetter
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, Final

from oomdoctor.objects.homes import is_installed, own_modules
from oomdoctor.retry.loggers import Loggers
from oomdoctor.retry.modes import Modes
from oomdoctor.retry.settings import UNTOLD, Setting, read, settings

__all__ = ["Surroundings"]

_PATCHED: Final = frozenset({FunctionType, BuiltinFunctionType, type})


def _streams() -> dict[str, Any]:
    return {"stdin": sys.stdin, "stdout": sys.stdout, "stderr": sys.stderr}


def _handlers() -> tuple[Any, ...]:
    return tuple(map(_handler_of, _SIGNALS))


def _put_handlers(before: tuple[Any, ...]) -> None:
    for number, handler in zip(_SIGNALS, before, strict=True):
        # None is a handler that was set by C. Not the main thread: told by ``lost``.
        if handler is not None and _handler_of(number) != handler and _is_main_thread():
            signal.signal(number, handler)


def _is_users(handler: Any) -> bool:
    """Return whether a handler is one that no library sets around what it runs, as asyncio does."""
    if isinstance(handler, int):
        return True
    function = getattr(handler, "__func__", handler)
    return type(function) is FunctionType and not is_installed(function.__globals__.get("__name__"))


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


_handler_of: Final[Callable[[int], Any]] = vars(sys.modules["_signal"])["getsignal"]
"""Without the names that ``signal.getsignal`` looks up: asked for each signal before each cell."""
_SIGNALS: Final = tuple(sorted(set(map(int, signal.valid_signals())) - {signal.SIGINT}))
"""Those whose handlers are put back. SIGINT's is exchanged by the kernel around a cell, and by us around a restore."""


class _Functions:
    """The names of the functions and classes of a module. They are asked for before each cell.

    Only what is put back: whatever else a module holds, as ``sys`` does a traceback, must not live on for this.
    """

    def __init__(self, names: dict[str, Any]) -> None:
        self.of, self.length = names, len(names)
        self.names = tuple(name for name, value in names.items() if type(value) in _PATCHED)
        self.get = itemgetter(*self.names) if len(self.names) > 1 else lambda held: tuple(map(held.get, self.names))

    def is_of(self, names: dict[str, Any]) -> bool:
        """Return whether they are of this module, and it has as many names as it had."""
        return self.of is names and self.length == len(names)


_known: Final[dict[int, _Functions]] = {}


def _functions(module: ModuleType) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    """Return the names of the functions and classes of a module, and what they are now."""
    names, known = vars(module), _known.get(id(module))
    for _ in range(2):
        if known is None or not known.is_of(names):
            known = _known[id(module)] = _Functions(names)
        try:
            return known.names, known.get(names)
        except KeyError:  # one has gone, and another one has come
            known = None
    return (), ()


class _Environment:
    """The environment, as the system has it: to decode each variable before each cell would take time.

    Args:
        environ: ``os.environ``.
    """

    def __init__(self, environ: Any) -> None:
        self._variables: dict[Any, Any] = getattr(environ, "_data", environ)
        self._is_systems = self._variables is not environ  # and not what a test has put in its place
        self._before = self._variables.copy()

    def leave(self, later: _Environment) -> None:
        """Have those variables stay as they are that a later cell has set or deleted."""
        now, then = self._variables, later._before
        for key in [key for key in now.keys() | then.keys() if now.get(key) != then.get(key)]:
            self._before.pop(key, None)
            if key in now:
                self._before[key] = now[key]

    def restore(self) -> None:
        """Put all variables back."""
        now, before = self._variables, self._before
        if now == before:
            return
        if self._is_systems:
            for key in now.keys() - before.keys():
                os.unsetenv(key)
            for key, value in before.items():
                if now.get(key) != value:
                    os.putenv(key, value)
            if hasattr(time, "tzset"):  # Windows has none
                time.tzset()
        now.clear()
        now.update(before)


class Surroundings:
    """What was set when it was taken.

    Args:
        modules: those that names of the user's lead to. own: those of the user's own.
        collects: whether the garbage collector was on. source: the cell's text.
    """

    def __init__(
        self, modules: Iterable[ModuleType], own: Iterable[ModuleType], source: str, *, collects: bool
    ) -> None:
        self._environ = _Environment(os.environ)
        self._filters = list(warnings.filters)
        self._path = list(sys.path)
        self._modules = [(module, *_functions(module)) for module in (builtins, *modules)]
        torch = sys.modules.get("torch")
        self._own = {module.__name__ for module in own}
        self._settings = list(read(settings()))
        self._modes = None if torch is None else Modes(torch)
        self._handlers, self._on_interrupt = _handlers(), _handler_of(signal.SIGINT)
        self._collects = collects
        self._streams = self._left = _streams()
        self._loggers = Loggers(source)

    def end(self) -> None:
        """Note the streams that the cell leaves. Those of a later cell may be exchanged for reasons of its own."""
        self._left = _streams()

    def chosen(self) -> Iterator[Setting]:
        """Yield the settings that are not what they were."""
        yield from (setting for setting, value in self._settings if not setting.is_still(value))

    def leave(self, later: Surroundings) -> None:
        """Have all that a later cell has changed stay as it is."""
        exchanged = {name: now for name, now in later._left.items() if now is not later._streams[name]}
        self._streams = {**self._streams, **exchanged}
        chosen = {setting.name for setting in later.chosen()}
        self._settings = [one for one in self._settings if one[0].name not in chosen]
        self._environ.leave(later._environ)
        self._loggers.leave(later._loggers)
        if warnings.filters != later._filters:
            self._filters = _merged(self._filters, later._filters, list(warnings.filters))
        if sys.path != later._path:
            self._path = _merged(self._path, later._path, sys.path)
        if gc.isenabled() is not later._collects:
            self._collects = gc.isenabled()
        self._own |= {module.__name__ for module in own_modules()} - later._own
        now, before = _handlers(), self._handlers
        self._handlers = tuple(
            new if new != old else own for own, old, new in zip(before, later._handlers, now, strict=True)
        )
        changed = {
            (id(module), name): value
            for module, names, values in later._modules
            for name, old in zip(names, values, strict=True)
            if (value := vars(module).get(name)) is not old
        }
        self._modules = [
            (
                module,
                names,
                tuple(changed.get((id(module), name), value) for name, value in zip(names, values, strict=True)),
            )
            for module, names, values in self._modules
        ]

    def lost(self) -> Iterator[str]:
        """Yield a sentence for each log file that was written to, and for what cannot be set back."""
        yield from self._loggers.lost()
        if self._modes is not None:
            yield from self._modes.lost()
        now = _handler_of(signal.SIGINT)
        if now is not self._on_interrupt and _is_users(now):
            yield "the handler of SIGINT was changed, and interrupts need it now"
        if _handlers() != self._handlers and not _is_main_thread():
            yield "handlers of signals were changed, and the main thread alone can put them back"

    def pieces(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """Yield what puts each setting back, and functions and classes of modules that others stand in for now."""
        yield "the environment", self._environ.restore
        yield "filters of warnings and the path of modules", self._restore_lists
        for module, names, values in self._modules:
            yield f"`{module.__name__}`", partial(_put_names, vars(module), names, values)
        for module in own_modules():
            if module.__name__ not in self._own:
                yield f"`{module.__name__}`", partial(_forget, module.__name__)
        for setting, value in self._settings:
            yield f"the setting {setting.name}", partial(_put_setting, setting, value)
        yield "loggers", self._loggers.restore
        yield "the garbage collector", gc.enable if self._collects else gc.disable
        yield "handlers of signals", partial(_put_handlers, self._handlers)
        for name, before in self._streams.items():
            if self._left[name] is not before and getattr(sys, name) is self._left[name]:
                yield f"`sys.{name}`", partial(setattr, sys, name, before)
        if self._modes is not None:
            yield "modes of torch", self._modes.restore

    def _restore_lists(self) -> None:
        if warnings.filters != self._filters:
            warnings.resetwarnings()  # tells those who remember what was filtered; the list itself stays
            list.extend(vars(warnings)["filters"], self._filters)
        if sys.path != self._path:
            sys.path[:] = self._path


def _put_names(now: dict[str, Any], names: tuple[str, ...], values: tuple[Any, ...]) -> None:
    now.update({name: value for name, value in zip(names, values, strict=True) if now.get(name) is not value})


def _put_setting(setting: Setting, value: Any) -> None:
    if not setting.is_still(value):
        with suppress(*UNTOLD):
            setting.put(value)


def _merged(before: list[Any], then: list[Any], now: list[Any]) -> list[Any]:
    """Return what a later cell has left, without what was added between ``before`` and ``then``."""
    return [one for one in now if one in before or one not in then]


def _forget(name: str) -> None:
    """Take back the first import of a module of the user's: to import it is to run it."""
    module = sys.modules.pop(name, None)
    parent, _, own = name.rpartition(".")
    holder = vars(sys.modules[parent]) if parent in sys.modules else {}
    if module is not None and holder.get(own) is module:
        del holder[own]

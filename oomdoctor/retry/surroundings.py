"""What a cell changes beside its own objects: settings of the process and of torch, functions of modules, log files.

Settings and functions are put back; what was written to a log file is told.
"""

from __future__ import annotations

import builtins
import gc
import logging
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
from typing import Any, Final, NamedTuple

from oomdoctor.objects.named import is_installed, own_modules
from oomdoctor.retry.settings import UNTOLD, Setting, is_of_users, read, settings

_PATCHED: Final = frozenset({FunctionType, BuiltinFunctionType, type})


def _streams() -> dict[str, Any]:
    return {"stdin": sys.stdin, "stdout": sys.stdout, "stderr": sys.stderr}


def _handlers() -> dict[int, Any]:
    return dict(zip(_SIGNALS, map(_handler_of, _SIGNALS), strict=True))


def _put_handlers(before: dict[int, Any]) -> None:
    for number, handler in before.items():
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


class _Names:
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


_known: Final[dict[int, _Names]] = {}


class _Functions(NamedTuple):
    """The functions and classes of a module, by their names."""

    names: tuple[str, ...]
    values: tuple[Any, ...]


def _functions(module: ModuleType) -> _Functions:
    names, known = vars(module), _known.get(id(module))
    for _ in range(2):
        if known is None or not known.is_of(names):
            known = _known[id(module)] = _Names(names)
        try:
            return _Functions(known.names, known.get(names))
        except KeyError:  # one has gone, and another one has come
            known = None
    return _Functions((), ())


def _put_functions(module: ModuleType, before: Any) -> None:
    now = vars(module)
    now.update({name: value for name, value in _by_name(before).items() if now.get(name) is not value})


def _environment(environ: Any) -> Setting:
    """Return the environment, as the system has it: to decode each variable before each cell would take time."""
    variables: dict[Any, Any] = getattr(environ, "_data", environ)

    def put(before: dict[Any, Any]) -> None:
        if variables is not environ:  # and not what a test has put in its place
            for key in variables.keys() - before.keys():
                os.unsetenv(key)
            for key, value in before.items():
                if variables.get(key) != value:
                    os.putenv(key, value)
            if hasattr(time, "tzset"):  # Windows has none
                time.tzset()
        variables.clear()
        variables.update(before)

    return Setting("environment", variables.copy, put)


def _put_filters(before: list[Any]) -> None:
    warnings.resetwarnings()  # tells those who remember what was filtered; the list itself stays
    list.extend(vars(warnings)["filters"], before)


def _put_path(before: list[str]) -> None:
    sys.path[:] = before


def _own() -> set[str]:
    return {module.__name__ for module in own_modules()}


def _forget(before: set[str]) -> None:
    """Take back the first imports of modules of the user's: to import one is to run it."""
    for name in [module.__name__ for module in own_modules() if module.__name__ not in before]:
        module = sys.modules.pop(name, None)
        parent, _, own = name.rpartition(".")
        holder = vars(sys.modules[parent]) if parent in sys.modules else {}
        if module is not None and holder.get(own) is module:
            del holder[own]


def _collect(is_on: bool) -> None:
    (gc.enable if is_on else gc.disable)()


_OF_CELL: Final = (
    Setting("filters of warnings", lambda: list(warnings.filters), _put_filters),
    Setting("path of modules", lambda: list(sys.path), _put_path),
    Setting("modules of the user's", _own, _forget),
)
_OF_PROCESS: Final = (Setting("handlers of signals", _handlers, _put_handlers),)
_COLLECTS: Final = Setting("garbage collector", gc.isenabled, _collect)
_ABSENT: Final = object()


class Surroundings:
    """What was set when it was taken.

    Args:
        modules: those that names of the user's lead to. source: the cell's text.
        collects: whether the garbage collector was on.
    """

    def __init__(self, modules: Iterable[ModuleType], source: str, *, collects: bool) -> None:
        functions = (
            Setting(f"functions of {module.__name__}", partial(_functions, module), partial(_put_functions, module))
            for module in (builtins, *modules)
        )
        self._loggers = _Loggers(source)
        found = (_environment(os.environ), *_OF_CELL, *functions, *settings(), self._loggers.setting, *_OF_PROCESS)
        self._settings = {setting.name: (setting, value) for setting, value in read(found)}
        self._settings[_COLLECTS.name] = _COLLECTS, collects
        self._on_interrupt = _handler_of(signal.SIGINT)
        self._streams = self._left = _streams()

    def end(self) -> None:
        """Note the streams that the cell leaves. Those of a later cell may be exchanged for reasons of its own."""
        self._left = _streams()

    def chosen(self) -> Iterator[Setting]:
        """Yield the settings that are not what they were."""
        yield from (setting for setting, value in self._settings.values() if not setting.is_still(value))

    def leave(self, later: Surroundings) -> None:
        """Have all that a later cell has changed stay as it is."""
        exchanged = {name: now for name, now in later._left.items() if now is not later._streams[name]}
        self._streams = {**self._streams, **exchanged}
        for setting in later.chosen():
            if setting.name in self._settings:
                own, before = self._settings[setting.name]
                self._settings[setting.name] = own, _merged(before, later._settings[setting.name][1], setting.read())

    def lost(self) -> Iterator[str]:
        """Yield a sentence for each log file that was written to, and for what cannot be set back."""
        yield from self._loggers.lost()
        for setting, before in self._settings.values():
            if setting.put is None and not setting.is_still(before) and is_of_users(before, setting.read()):
                yield f"the {setting.name} were changed, and are not put back"
        now = _handler_of(signal.SIGINT)
        if now is not self._on_interrupt and _is_users(now):
            yield "the handler of SIGINT was changed, and interrupts need it now"
        handlers, known = self._settings["handlers of signals"]
        if not handlers.is_still(known) and not _is_main_thread():
            yield "handlers of signals were changed, and the main thread alone can put them back"

    def pieces(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """Yield what puts each setting back, and functions and classes of modules that others stand in for now."""
        for setting, value in self._settings.values():
            yield f"the setting {setting.name}", partial(_put_setting, setting, value)
        for name, before in self._streams.items():
            if self._left[name] is not before and getattr(sys, name) is self._left[name]:
                yield f"`sys.{name}`", partial(setattr, sys, name, before)


def _put_setting(setting: Setting, value: Any) -> None:
    if setting.put is not None and not setting.is_still(value):
        with suppress(*UNTOLD):
            setting.put(value)


def _by_name(value: Any) -> Any:
    return dict(zip(value.names, value.values, strict=True)) if type(value) is _Functions else value


def _merged(before: Any, then: Any, now: Any) -> Any:
    """Return what is to be put back when a later cell has made ``now`` of ``then``: what it has changed stays."""
    before, then, now = _by_name(before), _by_name(then), _by_name(now)
    if isinstance(now, dict):
        is_left = {key for key in now.keys() | then.keys() if now.get(key, _ABSENT) != then.get(key, _ABSENT)}
        kept = {key: value for key, value in before.items() if key not in is_left}
        return kept | {key: now[key] for key in now if key in is_left}
    if isinstance(now, list):
        return [one for one in now if one in before or one not in then]
    return before | (now - then) if isinstance(now, set) else now


_Stand = tuple[Any, ...]
_NEW: Final[_Stand] = (logging.NOTSET, True, False, [], [])


class _Loggers:
    """All loggers but the root, as a setting, and the sizes of log files.

    No name of the user's needs to lead to one: they are asked for by their own names, and a handler that a cell adds is
    there twice when the cell has run twice.

    Args:
        source: the cell's text.
    """

    def __init__(self, source: str) -> None:
        self._source, self._loaded = source, len(sys.modules)
        self._names = set(logging.root.manager.loggerDict)
        self._files = dict(_sizes())
        self.setting = Setting("loggers", _stands, self._put)

    def lost(self) -> Iterator[str]:
        """Yield a sentence for each log file that was written to."""
        for path, size in _sizes():
            if self._files.get(path, size) != size:
                yield f"the log file {path} was written to"

    def _put(self, before_all: dict[str, _Stand]) -> None:
        """Put back what was changed; one of the user's own that is new is as if nobody had touched it.

        Handlers of a library's logger are left alone: it may have added them itself, and does so once.
        """
        stands = _stands()
        for name in stands.keys() | before_all.keys():
            is_librarys, now = self._is_librarys(name), stands.get(name, _NEW)
            before = before_all.get(name, now if is_librarys and name not in self._names else _NEW)
            if now == before:
                continue
            logger = logging.getLogger(name)
            level, logger.propagate, logger.disabled, handlers, filters = before
            logger.setLevel(level)
            if not is_librarys:
                logger.handlers[:], logger.filters[:] = handlers, filters

    def _is_librarys(self, name: str) -> bool:
        """Return whether a library may have made a logger: it bears its name, or was loaded by the cell."""
        package = name.partition(".")[0]
        if package in sys.modules:
            return is_installed(package)
        is_told = f'"{name}"' in self._source or f"'{name}'" in self._source
        return not is_told and name not in self._names and len(sys.modules) != self._loaded


def _stands() -> dict[str, _Stand]:
    """Return how each logger stands that is not as it was made."""
    return {
        name: (one.level, one.propagate, one.disabled, one.handlers[:], one.filters[:])
        for name, one in logging.root.manager.loggerDict.items()
        if not isinstance(one, logging.PlaceHolder)
        and (one.level or one.handlers or not one.propagate or one.disabled or one.filters)
    }


def _sizes() -> Iterator[tuple[str, int]]:
    for handler in [reference() for reference in list(vars(logging)["_handlerList"])]:
        if isinstance(handler, logging.FileHandler):
            with suppress(OSError):
                yield handler.baseFilename, os.stat(handler.baseFilename).st_size  # noqa: PTH116 - asked before each cell

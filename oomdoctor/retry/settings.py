"""What was set when a cell began: settings of the process and of libraries, functions of modules, loggers and streams.

All are read before every cell. Those that a training program changes are set again when the cell is taken back: random
draws and tensors depend on them. The exotic ones are only compared, and told where they are others: options of pandas,
magics, decimals, abstract classes and the like.

What a cell puts in another's place in modules, classes and functions of libraries (``F.relu = mine``) is found in its
text, and in the code of the functions that a look at the state has met: all attributes of all libraries are too many to
be kept. What is put there by way of an attribute, an item or an argument is not seen.
"""

from __future__ import annotations

import abc
import builtins
import gc
import logging
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import compress
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, Final, TypeAlias

from oomdoctor.objects.containers import refill
from oomdoctor.objects.named import is_installed, own_modules
from oomdoctor.program.code_names import ANY_NAME, AttributeWrite, attributes_written, names_of
from oomdoctor.retry.library_settings import UNTOLD, Setting, of_libraries

_PATCHED: Final = frozenset({FunctionType, BuiltinFunctionType, type})
_ABSENT: Final = object()


def _environment() -> Setting:
    """Return the environment, as the system has it: to decode each variable before each cell would take time."""
    environ: Any = os.environ
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
        refill(variables, before)

    return Setting("environment", variables.copy, put)


def _put_filters(before: list[Any]) -> None:
    warnings.resetwarnings()  # tells those who remember what was filtered; the list itself stays
    list.extend(vars(warnings)["filters"], before)


def _own() -> set[str]:
    return {module.__name__ for module in own_modules()}


def _forget(before: set[str]) -> None:
    """Take back the first imports of modules of the user's: to import one is to run it."""
    for name in _own() - before:
        module = sys.modules.pop(name, None)
        parent, _, own = name.rpartition(".")
        holder = vars(sys.modules[parent]) if parent in sys.modules else {}
        if module is not None and holder.get(own) is module:
            del holder[own]


def _functions(module: ModuleType) -> Setting:
    """Return the functions and classes of a module; what else it holds must not live on."""
    names = vars(module)

    def read() -> dict[str, Any]:
        values = list(names.values())  # in C, as a module may have thousands
        return dict(compress(list(names.items()), map(_PATCHED.__contains__, map(type, values))))

    def put(before: dict[str, Any]) -> None:
        names.update({name: value for name, value in before.items() if names.get(name) is not value})

    return Setting(f"functions of {module.__name__}", read, put)


def _put_handlers(before: dict[int, Any]) -> None:
    for number, handler in before.items():
        # None is a handler that was set by C. Not the main thread: told by ``lost``.
        if handler is not None and _handler_of(number) != handler and _is_main_thread():
            signal.signal(number, handler)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


_handler_of: Final[Callable[[int], Any]] = vars(sys.modules["_signal"])["getsignal"]
"""Without the names that ``signal.getsignal`` looks up: asked for each signal before each cell."""
_SIGNALS: Final = tuple(sorted(set(map(int, signal.valid_signals())) - {signal.SIGINT}))
"""Those whose handlers are put back. SIGINT's is exchanged by the kernel around a cell, and by us around a restore."""
_HANDLERS: Final = Setting("handlers of signals", lambda: {one: _handler_of(one) for one in _SIGNALS}, _put_handlers)
REGISTERED: Final = Setting("the classes that are registered with abstract ones", abc.get_cache_token)
"""Changed by libraries too when they are loaded: told of a cell that registers something."""
_OF_PROCESS: Final = (
    Setting("filters of warnings", lambda: list(warnings.filters), _put_filters),
    Setting("path of modules", lambda: list(sys.path), lambda before: refill(sys.path, before)),
    Setting("modules of the user's", _own, _forget),
    Setting("logging disabled", lambda: logging.root.manager.disable, logging.disable),
    # An alarm that goes off when its handler was taken back would end the process.
    Setting(
        "alarm",
        lambda: signal.getitimer(signal.ITIMER_REAL)[0] > 0,
        lambda was_set: was_set or signal.setitimer(signal.ITIMER_REAL, 0),
    ),
    _HANDLERS,
    Setting("the handler of SIGINT", lambda: [_handler_of(signal.SIGINT)]),
    REGISTERED,
)

_Stand = tuple[Any, ...]
_NEW: Final[_Stand] = (logging.NOTSET, True, False, [], [])


def _stands() -> dict[str, _Stand]:
    """Return how each logger stands that is not as it was made."""
    named = [*logging.root.manager.loggerDict.items(), (logging.root.name, logging.root)]
    return {
        name: (one.level, one.propagate, one.disabled, one.handlers[:], one.filters[:])
        for name, one in named
        if isinstance(one, logging.Logger)
        and (one.level or one.handlers or not one.propagate or one.disabled or one.filters)
    }


def _loggers(source: str) -> Setting:
    """Return all loggers. No name of the user's needs to lead to one: they are asked for by their own names.

    Handlers of a library's logger are left alone: it may have added them itself, and does so once.
    """
    known, loaded = {*logging.root.manager.loggerDict, logging.root.name}, len(sys.modules)

    def is_librarys(name: str) -> bool:
        """Return whether a library may have made a logger: it bears its name, or was loaded by the cell."""
        package = name.partition(".")[0]
        if package in sys.modules:
            return is_installed(package)
        is_told = f'"{name}"' in source or f"'{name}'" in source
        return not is_told and name not in known and len(sys.modules) != loaded

    def put(before_all: dict[str, _Stand]) -> None:
        stands = _stands()
        for name in stands.keys() | before_all.keys():
            now = stands.get(name, _NEW)
            before = before_all.get(name, now if name not in known and is_librarys(name) else _NEW)
            if now != before:
                logger = logging.getLogger(name)
                level, logger.propagate, logger.disabled, handlers, filters = before
                logger.setLevel(level)
                if not is_librarys(name):
                    logger.handlers[:], logger.filters[:] = handlers, filters

    return Setting("loggers", _stands, put)


def _log_files() -> dict[str, int]:
    """Return the sizes of the files that handlers write to."""
    sizes = {}
    for handler in [reference() for reference in list(vars(logging)["_handlerList"])]:
        if isinstance(handler, logging.FileHandler):
            with suppress(OSError):
                sizes[handler.baseFilename] = os.stat(handler.baseFilename).st_size  # noqa: PTH116 - asked before each cell
    return sizes


class Settings:
    """What was set when it was taken.

    Args:
        modules: those that names of the user's lead to.
        source: the cell's text.
        collects: whether the garbage collector was on.
    """

    def __init__(self, modules: Iterable[ModuleType], source: str, *, collects: bool) -> None:
        found = (
            *(_environment(), *map(_functions, (builtins, *modules))),
            *(*_OF_PROCESS, *of_libraries(), _loggers(source)),
        )
        self._settings: dict[str, tuple[Setting, Any]] = {}
        for setting in found:
            with suppress(*UNTOLD):
                self._settings[setting.name] = setting, setting.read()
        collector = Setting("garbage collector", gc.isenabled, lambda is_on: gc.enable() if is_on else gc.disable())
        self._settings[collector.name] = collector, collects
        self._files = _log_files()

    def chosen(self) -> Iterator[Setting]:
        """Yield the settings that are not what they were."""
        yield from (setting for setting, value in self._settings.values() if not setting.is_still(value))

    def leave(self, later: Settings) -> None:
        """Have all that a later cell has changed stay as it is."""
        for setting in later.chosen():
            if setting.name in self._settings:
                own, before = self._settings[setting.name]
                self._settings[setting.name] = own, _merged(before, later._settings[setting.name][1], setting.read())

    def lost(self) -> Iterator[str]:
        """Yield a sentence for each log file that was written to, and for what cannot be set back and is needed."""
        for path, size in _log_files().items():
            if self._files.get(path, size) != size:
                yield f"the log file {path} was written to"
        for setting in self.chosen():
            if setting.put is None and setting.is_torchs:
                yield f"the {setting.name} were changed, and are not put back"
            elif setting is _HANDLERS and not _is_main_thread():
                yield f"{setting.name} were changed, and the main thread alone can put them back"

    def doubts(self) -> Iterator[Setting]:
        """Yield the exotic settings that were changed: no result depends on them, and they are not put back."""
        return (setting for setting in self.chosen() if setting.put is None and not setting.is_torchs)

    def pieces(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """Yield what puts each setting back, and functions and classes of modules that others stand in for now."""
        for setting, value in self._settings.values():
            yield f"the setting {setting.name}", partial(setting.put_back, value)


def _merged(before: Any, then: Any, now: Any) -> Any:
    """Return what is to be put back when a later cell has made ``now`` of ``then``: what it has changed stays."""
    if isinstance(now, dict):
        is_left = {key for key in now.keys() | then.keys() if now.get(key, _ABSENT) != then.get(key, _ABSENT)}
        kept = {key: value for key, value in before.items() if key not in is_left}
        return kept | {key: now[key] for key in now if key in is_left}
    if isinstance(now, list):
        return [one for one in now if one in before or one not in then]
    return before | (now - then) if isinstance(now, set) else now


_STREAMS: Final = ("stdin", "stdout", "stderr")
_OF_FUNCTIONS: Final = frozenset(
    {"__code__", "__defaults__", "__kwdefaults__", "__doc__", "__name__", "__qualname__", "__module__"}
)

_Write: TypeAlias = tuple[AttributeWrite, Mapping[str, Any]]
"""An assignment, and the globals that its code reads."""


class Patches:
    """The attributes of modules, classes and functions that a cell assigns to.

    Args:
        source: the cell's text. namespace: its globals.
        codes: of functions that it may call, each with its globals.
    """

    def __init__(
        self, source: str, namespace: Mapping[str, Any], codes: Iterable[tuple[CodeType, Mapping[str, Any]]]
    ) -> None:
        self._namespace = namespace
        self._kept: list[tuple[Any, str, Any]] = [(sys, name, getattr(sys, name)) for name in _STREAMS]
        self._later: list[_Write] = []
        self._whole: list[Any] = []
        self._left: dict[tuple[int, str], Any] | None = None
        writes = attributes_written(source)
        of_codes = ((write, names) for code, names in codes for write in names_of(code).written)
        for write, names in (*((one, namespace) for one in writes), *of_codes):
            path, name, known = write
            owner = _found(path, known, names)
            if name == ANY_NAME:  # which the code makes up
                is_new = all(owner is not one for one in self._whole)
                if is_new and isinstance(owner, (ModuleType, type)) and _is_librarys(owner):
                    self._whole.append(owner)
                    self._kept += [(owner, each, value) for each, value in list(vars(owner).items())]
            elif isinstance(owner, (ModuleType, type)) or (type(owner) is FunctionType and _is_librarys(owner)):
                self._kept.append((owner, name, _attribute(owner, name)))
            elif owner is None:
                self._later.append((write, names))

    def end(self) -> None:
        """Note what the cell leaves. What a later cell has put there since is left alone."""
        self._add_new()
        self._left = {(id(owner), name): _attribute(owner, name) for owner, name, _ in self._kept}

    def _add_new(self) -> None:
        """Take in the attributes that there were not, parts apart that have been imported since."""
        for owner in self._whole if self._left is None else ():
            known = {name for one, name, _ in self._kept if one is owner}
            new = (name for name, value in vars(owner).items() if name not in known and type(value) is not ModuleType)
            self._kept += [(owner, name, _ABSENT) for name in new]

    def leave(self, later: Patches) -> None:
        """Have all that a later cell has exchanged stay as it is."""
        left, kept = later._left or {}, later._kept
        exchanged = {(id(owner), name) for owner, name, old in kept if left.get((id(owner), name), old) is not old}
        self._kept = [(owner, name, old) for owner, name, old in self._kept if (id(owner), name) not in exchanged]

    def lost(self) -> Iterator[str]:
        """Yield a sentence for each attribute of what was not loaded yet when the cell began."""
        for (path, name, known), names in self._later:
            owner = _found(path, known, names)
            if isinstance(owner, (ModuleType, type)) and _is_librarys(owner):
                yield f"`{path}.{name}` was replaced, and what it was before is not known"

    def restore(self) -> None:
        """Put back what was there."""
        self._add_new()
        for owner, name, old in self._kept:
            now = _attribute(owner, name)
            if now is old or (self._left is not None and now is not self._left[id(owner), name]):
                continue
            with suppress(AttributeError, TypeError):
                delattr(owner, name) if old is _ABSENT else setattr(owner, name, old)


def _is_librarys(owner: Any) -> bool:
    return is_installed(owner.__name__ if isinstance(owner, ModuleType) else getattr(owner, "__module__", None))


def _attribute(owner: Any, name: str) -> Any:
    if type(owner) is FunctionType and name in _OF_FUNCTIONS:
        return getattr(owner, name)
    return vars(owner).get(name, _ABSENT)


def _found(path: str, imports: Mapping[str, str], namespace: Mapping[str, Any]) -> Any:
    """Return the module, class or value that a dotted path stands for; None where nothing is there yet."""
    root, *names = path.split(".")
    if root in imports:
        root, *inner = imports[root].split(".")
        value, names = sys.modules.get(root), [*inner, *names]
    else:
        value = namespace.get(root)
    for name in names:
        if not isinstance(value, (ModuleType, type)):
            return value
        if name not in vars(value):
            return None if isinstance(value, ModuleType) else _ABSENT
        value = vars(value)[name]
    return value

"""What was set when a cell began: settings of the process and of libraries, functions of modules, loggers and streams.

All are read before every cell. Those that a training program changes are set again when the cell is taken back: random
draws and tensors depend on them. The exotic ones are only compared, and told where they are others: options of pandas,
magics, decimals, handlers of signals, abstract classes and the like.

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
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import compress
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, Final

from oomdoctor.objects.containers import refill
from oomdoctor.objects.kinds import module_of, name_of
from oomdoctor.objects.named import is_installed, own_modules
from oomdoctor.program.code_names import ANY_NAME, AttributeWrite, attributes_written, names_of
from oomdoctor.retry.library_settings import UNTOLD, Setting, of_libraries

_PATCHED: Final = frozenset({FunctionType, BuiltinFunctionType, type})
_STREAMS: Final = frozenset({"stdin", "stdout", "stderr"})
_OF_FUNCTIONS: Final = frozenset(
    {"__code__", "__defaults__", "__kwdefaults__", "__doc__", "__name__", "__qualname__", "__module__"}
)
_ABSENT: Final = object()


_environ: Final[Any] = os.environ


def _put_environment(before: dict[Any, Any]) -> None:
    for key in _environ._data.keys() - before.keys():
        del _environ[_environ.decodekey(key)]
    for key, value in before.items():
        if _environ._data.get(key) != value:
            _environ[_environ.decodekey(key)] = _environ.decodevalue(value)
    if hasattr(time, "tzset"):  # Windows has none
        time.tzset()


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


_handler_of: Final[Callable[[int], Any]] = vars(sys.modules["_signal"])["getsignal"]
"""Without the names that ``signal.getsignal`` looks up: asked for each signal before each cell."""
_SIGNALS: Final = tuple(sorted(set(map(int, signal.valid_signals())) - {signal.SIGINT}))
REGISTERED: Final = Setting("the classes that are registered with abstract ones", abc.get_cache_token)
"""Changed by libraries too when they are loaded: told of a cell that registers something."""
_OF_PROCESS: Final = (
    # As the system has it: to decode each variable before each cell would take time.
    Setting("environment", lambda: dict(_environ._data), _put_environment),
    Setting("filters of warnings", lambda: list(warnings.filters), _put_filters),
    Setting("path of modules", lambda: list(sys.path), lambda before: refill(sys.path, before)),
    Setting("modules of the user's", _own, _forget),
    Setting("logging disabled", lambda: logging.root.manager.disable, logging.disable),
    # An alarm of the failed attempt would go off in a later cell.
    Setting(
        "alarm",
        lambda: signal.getitimer(signal.ITIMER_REAL)[0] > 0,
        lambda was_set: was_set or signal.setitimer(signal.ITIMER_REAL, 0),
    ),
    Setting("the handlers of signals", lambda: list(map(_handler_of, _SIGNALS))),
    Setting("the handler of SIGINT", lambda: [_handler_of(signal.SIGINT)]),
    REGISTERED,
)

_Stand = tuple[Any, ...]
_NEW: Final[_Stand] = (logging.NOTSET, True, False, [], [])


def _stands() -> dict[str, _Stand]:
    """Return how each logger stands that is not as it was made."""
    named = [*logging.root.manager.loggerDict.items(), (logging.root.name, logging.root)]
    return {
        name: (logger.level, logger.propagate, logger.disabled, logger.handlers[:], logger.filters[:])
        for name, logger in named
        if isinstance(logger, logging.Logger)
        and (logger.level or logger.handlers or not logger.propagate or logger.disabled or logger.filters)
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
        source: the cell's text. namespace: its globals.
        codes: of functions that it may call, each with its globals.
        collects: whether the garbage collector was on.
    """

    def __init__(
        self,
        modules: Iterable[ModuleType],
        source: str,
        namespace: Mapping[str, Any],
        codes: Iterable[tuple[CodeType, Mapping[str, Any]]],
        *,
        collects: bool,
    ) -> None:
        self._patches, self._unknown = _patches(source, namespace, codes)
        found = (
            *map(_functions, (builtins, *modules)),
            *(*_OF_PROCESS, *of_libraries(), _loggers(source), *self._patches),
        )
        self._settings: dict[str, tuple[Setting, Any]] = {}
        for setting in found:
            try:  # a hundred before each cell, where a context manager would cost as much as the reading
                self._settings[setting.name] = setting, setting.read()
            except UNTOLD:
                continue
        collector = Setting("garbage collector", gc.isenabled, lambda is_on: gc.enable() if is_on else gc.disable())
        self._settings[collector.name] = collector, collects
        self._files = _log_files()
        self._left: dict[str, dict[str, Any]] = {}

    def end(self) -> None:
        """Note what the cell leaves of what it assigns to. What a later cell has put there since is left alone."""
        self._left = {setting.name: setting.read() for setting in self._patches}

    def chosen(self) -> Iterator[Setting]:
        """Yield the settings that are not what they were."""
        yield from (setting for setting, value in self._settings.values() if not setting.is_still(value))

    def leave(self, later: Settings) -> None:
        """Have all that a later cell has changed stay as it is."""
        for setting in later.chosen():
            if setting.name in self._settings:
                own, before = self._settings[setting.name]
                now = later._left.get(setting.name) or setting.read()
                self._settings[setting.name] = own, _merged(before, later._settings[setting.name][1], now)

    def lost(self) -> Iterator[str]:
        """Yield a sentence for each log file that was written to, and for what cannot be set back and is needed."""
        for path, size in _log_files().items():
            if self._files.get(path, size) != size:
                yield f"the log file {path} was written to"
        for setting in self.chosen():
            if setting.put is None and setting.is_torchs:
                yield f"the {setting.name} were changed, and are not put back"
        for (path, name, known), names in self._unknown:
            owner = _found(path, known, names)
            if _is_librarys(owner):
                yield f"`{path}.{name}` was replaced, and what it was before is not known"

    def doubts(self) -> Iterator[Setting]:
        """Yield the exotic settings that were changed: no result depends on them, and they are not put back."""
        return (setting for setting in self.chosen() if setting.put is None and not setting.is_torchs)

    def pieces(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """Yield what puts each setting back, and functions and classes of modules that others stand in for now."""
        for setting, value in self._settings.values():
            left = self._left.get(setting.name)
            before = value if left is None else _merged(value, left, setting.read())
            yield f"the setting {setting.name}", partial(setting.put_back, before)


def _merged(before: Any, then: Any, now: Any) -> Any:
    """Return what is to be put back when another cell has made ``now`` of ``then``: what it has changed stays."""
    if isinstance(now, dict):
        is_left = {key for key in now.keys() | then.keys() if now.get(key, _ABSENT) != then.get(key, _ABSENT)}
        kept = {key: value for key, value in before.items() if key not in is_left}
        return kept | {key: now[key] for key in now if key in is_left}
    if isinstance(now, list):
        return [item for item in now if item in before or item not in then]
    return before | (now - then) if isinstance(now, set) else now


class _Itself:
    """A value that is equal to itself alone, as long as it is compared in this box."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return type(other) is _Itself and other.value is self.value

    __hash__ = None  # type: ignore[assignment]


_Write = tuple[AttributeWrite, Mapping[str, Any]]
"""An assignment, and the globals that its code reads."""


def _patches(
    source: str, namespace: Mapping[str, Any], codes: Iterable[tuple[CodeType, Mapping[str, Any]]]
) -> tuple[list[Setting], list[_Write]]:
    """Return what a cell may assign to in modules, classes and functions, and the assignments to what is not loaded."""
    chosen: dict[int, tuple[Any, set[str]]] = {id(sys): (sys, {*_STREAMS})}
    unknown: list[_Write] = []
    of_codes = ((write, names) for code, names in codes for write in names_of(code).written)
    for write, names in (*((write, namespace) for write in attributes_written(source)), *of_codes):
        owner = _found(write.path, write.imports, names)
        is_named = write.name != ANY_NAME
        if owner is None and is_named:
            unknown.append((write, names))
        elif (is_named and isinstance(owner, (ModuleType, type))) or _is_librarys(owner):
            chosen.setdefault(id(owner), (owner, set()))[1].add(write.name)
    return [_patched(owner, frozenset(names)) for owner, names in chosen.values()], unknown


def _patched(owner: Any, names: frozenset[str]) -> Setting:
    """Return these attributes of a module, class or function; all of them where code makes up the names."""
    is_any = ANY_NAME in names

    def read() -> dict[str, _Itself]:
        if is_any:  # but for parts, which are imported
            return {name: _Itself(value) for name, value in list(vars(owner).items()) if type(value) is not ModuleType}
        values = {name: _attribute(owner, name) for name in names}
        return {name: _Itself(value) for name, value in values.items() if value is not _ABSENT}

    def put(before: dict[str, _Itself]) -> None:
        now = read()
        for name in now.keys() | (before if is_any else before.keys() & names):
            if now.get(name) != (old := before.get(name)):
                with suppress(AttributeError, TypeError):
                    delattr(owner, name) if old is None else setattr(owner, name, old.value)

    name = name_of(owner) if isinstance(owner, type) else owner.__name__
    return Setting(f"attributes of {name} at {id(owner):#x}", read, put)


def _is_librarys(owner: Any) -> bool:
    """Return whether it is a module, a class or a function of a library's."""
    if not isinstance(owner, (ModuleType, type, FunctionType)):
        return False
    if isinstance(owner, type):
        return is_installed(module_of(owner))
    return is_installed(owner.__name__ if isinstance(owner, ModuleType) else owner.__module__)


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

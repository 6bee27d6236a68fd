"""What the code of a cell can get at: from the names that it reads, through objects, closures and their methods' code.

And which objects a cell that does not mention them may get at all the same: by way of a library, or of what holds them.
Errs towards yes. Asked only after a failure, but for ``shares``.
"""

from __future__ import annotations

import gc
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from itertools import islice
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any, Final
from weakref import ReferenceType

from oomdoctor.objects.containers import LIGHT_TYPES
from oomdoctor.objects.kinds import members_of, module_of, mro_of
from oomdoctor.objects.named import is_installed, is_ours, is_shell, is_users
from oomdoctor.program.code_names import last_name, names_of, names_written_by, written_names
from oomdoctor.program.names import FirstUse, first_uses, read_names

_MOST: Final = 300_000
_ANYTHING: Final = frozenset({"exec", "eval", "globals", "vars", "locals", "get_ipython", "run_line_magic"})


class Reach:
    """What a cell can get at.

    Args:
        source: its text.
        namespace: its globals, which are not gone through as a whole.
        lookup: returns what a name stood for before the cell and what it stands for now.

    Attributes:
        names: the globals that the code reads.
        is_all: whether it may get at anything.
    """

    def __init__(self, source: str, namespace: dict[str, Any], lookup: Callable[[str], Iterable[Any]]) -> None:
        self.names: set[str] = set()
        self._seen: dict[int, Any] = {id(namespace): namespace}
        self._namespace, self._lookup = namespace, lookup
        self._todo: list[Any] = []
        self._source, self._codes = source, list[CodeType]()
        reads = read_names(source)
        self.is_all = bool(reads & _ANYTHING) or "%run" in source or "%load" in source
        rebound = {name for name, use in first_uses(source).items() if use is FirstUse.BINDS}
        self._read(reads - rebound)
        self.names |= reads
        self._walk()

    def reaches(self, value: Any) -> bool:
        """Return whether the code can get at ``value``."""
        return self.is_all or id(value) in self._seen

    def writes(self, path: str) -> bool:
        """Return whether the code writes items into what a path leads to, told by its last name."""
        return last_name(path) in self._written

    def mentions(self, names: frozenset[str]) -> bool:
        """Return whether the code has one of these names, as a global, an attribute or an import."""
        if not names.isdisjoint(re.findall(r"\w+", self._source)):
            return True
        return any(not names.isdisjoint(names_of(code).names) for code in self._codes)

    @cached_property
    def _written(self) -> frozenset[str]:
        return written_names(self._source).union(*map(names_written_by, self._codes))

    def _read(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self.names:
                self.names.add(name)
                self._todo += self._lookup(name)

    def _walk(self) -> None:
        while self._todo:
            value = self._todo.pop()
            if type(value) in LIGHT_TYPES or id(value) in self._seen:
                continue
            if len(self._seen) > _MOST:
                self.is_all = True
                return
            self._seen[id(value)] = value
            self._todo += self._leads_to(value)

    def _leads_to(self, value: Any) -> Iterator[Any]:
        kind = type(value)
        if is_shell(kind):
            self.is_all = True  # it holds the names, and runs what it is told
        if self.is_all or is_ours(module_of(kind)) or module_of(kind).startswith("ipykernel."):
            return  # a stream that a cell writes to leads to the shell, by way of those
        if issubclass(kind, ModuleType):
            if not is_installed(value.__name__):
                yield from vars(value).values()
        elif issubclass(kind, type):
            if not is_installed(module_of(value)):
                yield from members_of(value).values()
        elif type(value) is FunctionType:
            yield from self._code(value)
        else:
            if type(value) is MethodType:
                yield value.__func__
            for base in mro_of(type(value)):
                if not is_installed(module_of(base)):
                    yield base
            yield from islice(gc.get_referents(value), _MOST)

    def _code(self, function: FunctionType) -> Iterator[Any]:
        """Yield what a function holds, and take note of the globals that it and the functions in it mention."""
        if str(function.__module__).startswith(("IPython.", "ipykernel.")):
            return
        yield from function.__defaults__ or ()
        yield from (function.__kwdefaults__ or {}).values()
        yield function.__dict__
        yield from (cell for cell in function.__closure__ or ())
        if is_installed(function.__module__):
            return
        self._codes.append(function.__code__)
        names = names_of(function.__code__).loaded
        if function.__globals__ is self._namespace:
            self._read(names)
        else:
            yield from (function.__globals__[name] for name in names if name in function.__globals__)


_MOST_LOOKED_AT: Final = 400
_MOST_HELD: Final = 3_000_000


def shares(value: Any) -> bool:
    """Return whether an object of a library's may lead to the user's code, or to a container that others hold too."""
    held: Counter[int] = Counter()
    seen: dict[int, Any] = {}
    containers: list[Any] = []
    fresh: dict[int, Any] = {}
    inner: list[Any] = []
    wave = gc.get_referents(value)
    while wave:
        held.update(map(id, wave))
        fresh = {id(item): item for item in wave if type(item) not in LIGHT_TYPES and id(item) not in seen}
        seen |= fresh
        if len(seen) > _MOST_LOOKED_AT:
            return True
        inner.clear()
        for item in fresh.values():
            kind = type(item)
            if issubclass(kind, ReferenceType) or _is_users_own(item):
                return True
            if not issubclass(kind, (ModuleType, type, FunctionType)):  # those are a library's, and everybody's
                inner.append(item)
                if kind in (dict, list, set):
                    containers.append(item)
        wave = gc.get_referents(*inner)
    fresh.clear()
    inner.clear()
    # Our own: ``seen``, ``containers``, the name of the loop and the argument.
    return any(len(item) and sys.getrefcount(item) > held[id(item)] + 4 for item in containers)


def is_fixed(value: Any) -> bool:
    """Return whether a cell that does not mention a value leaves it as it is: numbers, text, what a library defines."""
    kind = type(value)
    if kind in LIGHT_TYPES or kind is BuiltinFunctionType:
        return True
    return issubclass(kind, (ModuleType, type, FunctionType)) and not _is_users_own(value)


def _is_users_own(value: Any) -> bool:
    if type(value) is FunctionType:
        return not is_installed(value.__globals__.get("__name__"))
    if issubclass(type(value), type):
        return not is_installed(module_of(value))
    return not is_installed(value.__name__ if issubclass(type(value), ModuleType) else module_of(type(value)))


def held_elsewhere(namespace: dict[str, Any], snapshots: Iterable[Any], unread: frozenset[str]) -> set[str]:
    """Return those of ``unread`` that code mentions which something beside the namespace holds: a hook of a library's.

    Goes through all objects of the process, so it is for after a failure. What widgets call runs between cells: a cell
    that runs it itself mentions the widget, or awaits. ``snapshots`` hold functions as well, and are ours.
    """
    functions = [function for function in gc.get_referrers(namespace) if type(function) is FunctionType]
    named = (value for name, value in namespace.items() if is_users(name) or name == "Out")
    inside = _inside([*named, *_widgets()], snapshots)
    classes = [
        holder for holder in inside.values() if issubclass(type(holder), type) and not is_installed(module_of(holder))
    ]
    mention: dict[int, frozenset[str]] = {}
    for holder in (*functions, *classes):
        if names := _mentioned_by_own(holder, namespace) & unread:
            mention[id(holder)] = names
    objects = [holder for holder in inside.values() if id(type(holder)) in mention]
    mention |= {id(holder): mention[id(type(holder))] for holder in objects}
    targets = [holder for holder in (*functions, *classes, *objects) if id(holder) in mention]
    outside = (id(function) for function in functions if id(function) not in inside)
    found = set().union(*(mention.get(key, ()) for key in outside))
    passed = {id(holder) for holder in (namespace, functions, classes, objects, targets, inside)}
    for holder in gc.get_referrers(*targets) if targets else ():
        if id(holder) not in inside and id(holder) not in passed and type(holder) is not FrameType:
            found |= set().union(*(mention.get(id(held), ()) for held in gc.get_referents(holder)))
    return found


def _widgets() -> list[Any]:
    """Return the widgets that are open. Source: ``widget.py`` of ipywidgets 8 and 7."""
    module: Any = sys.modules.get("ipywidgets.widgets.widget")
    if module is None:
        return []
    return list((module._instances if hasattr(module, "_instances") else module.Widget.widgets).values())


def _mentioned_by_own(value: Any, namespace: dict[str, Any]) -> frozenset[str]:
    """Return which globals in ``namespace`` a function mentions, or the methods of a class that have it for theirs."""
    held = [value] if type(value) is FunctionType else vars(value).values()
    own = (item for item in held if type(item) is FunctionType and item.__globals__ is namespace)
    return frozenset[str]().union(*(names_of(function.__code__).mentioned for function in own))


def _inside(values: list[Any], snapshots: Iterable[Any]) -> dict[int, Any]:
    """Return by their ``id`` the objects that the values lead to, but not by way of a library."""
    seen: dict[int, Any] = {}
    wave = [*values, *snapshots]
    while wave and len(seen) < _MOST_HELD:
        fresh = {id(item): item for item in wave if type(item) not in LIGHT_TYPES and id(item) not in seen}
        seen |= fresh
        wave = gc.get_referents(*(item for item in fresh.values() if not _is_a_librarys(item)))
        for item in fresh.values():
            if type(item) is FunctionType and _is_a_librarys(item):
                wave += [*(item.__closure__ or ()), item.__dict__]
    return seen


def _is_a_librarys(value: Any) -> bool:
    """Return whether a value is a library's, told by its type: the proxy of what is gone answers nothing."""
    kind = type(value)
    if issubclass(kind, (ModuleType, type, FunctionType)):
        return not _is_users_own(value)
    return module_of(kind).startswith(("IPython", "ipykernel", "traitlets"))

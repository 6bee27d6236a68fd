"""What a cell puts in another's place in modules, classes and functions of libraries: ``F.relu = mine`` and the like.

Found in the cell's text, and in the code of the functions that it mentions, because all attributes of all libraries are
too many to be kept. What is put there by way of an attribute, an item or an argument is not seen.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from types import FunctionType, MethodType, ModuleType
from typing import Any, Final, TypeAlias

from oomdoctor.objects.containers import LIGHT_TYPES
from oomdoctor.objects.kinds import members_of, module_of, mro_of
from oomdoctor.objects.named import is_installed
from oomdoctor.objects.places import functions_in
from oomdoctor.program.code_names import ANY_NAME, AttributeWrite, attributes_written, names_of
from oomdoctor.program.names import read_names

_ABSENT: Final = object()
_STREAMS: Final = ("stdin", "stdout", "stderr")
"""What ``settings`` puts back of ``sys``."""
_MOST: Final = 500
"""Functions that are followed from one cell."""
_OF_FUNCTIONS: Final = (
    "__code__",
    "__defaults__",
    "__kwdefaults__",
    "__doc__",
    "__name__",
    "__qualname__",
    "__module__",
)

_Write: TypeAlias = tuple[AttributeWrite, Mapping[str, Any]]
"""An assignment, and the globals that its code reads."""


class Patches:
    """The attributes of modules, classes and functions that a cell assigns to.

    Args:
        source: the cell's text. namespace: its globals.
    """

    def __init__(self, source: str, namespace: Mapping[str, Any]) -> None:
        self._namespace = namespace
        self._kept: list[tuple[Any, str, Any]] = []
        self._later: list[_Write] = []
        self._unnamed: list[str] = []
        self._left: list[Any] | None = None
        writes = attributes_written(source)
        mentioned = [namespace[name] for name in read_names(source) if name in namespace]
        for write, names in (*((one, namespace) for one in writes), *_written_by(mentioned)):
            path, name, known = write
            owner = _found(path, known, names)
            if name == ANY_NAME:
                self._unnamed += [path] if isinstance(owner, (ModuleType, type)) and _is_librarys(owner) else []
            elif isinstance(owner, (ModuleType, type)) or (type(owner) is FunctionType and _is_librarys(owner)):
                if owner is not sys or name not in _STREAMS:
                    self._kept.append((owner, name, _attribute(owner, name)))
            elif owner is None:
                self._later.append((write, names))

    def end(self) -> None:
        """Note what the cell leaves. What a later cell has put there since is left alone."""
        self._left = [_attribute(owner, name) for owner, name, _ in self._kept]

    def lost(self) -> Iterator[str]:
        """Yield a sentence for each attribute of what was not loaded yet when the cell began, or that has no name."""
        for path in self._unnamed:
            yield f"attributes of `{path}` may have been set by names that the cell makes up"
        for (path, name, known), names in self._later:
            owner = _found(path, known, names)
            if isinstance(owner, (ModuleType, type)) and _is_librarys(owner):
                yield f"`{path}.{name}` was replaced, and what it was before is not known"

    def restore(self) -> None:
        """Put back what was there."""
        for at, (owner, name, old) in enumerate(self._kept):
            now = _attribute(owner, name)
            if now is old or (self._left is not None and now is not self._left[at]):
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


def _written_by(values: Iterable[Any]) -> Iterator[_Write]:
    """Yield what functions, and those that they mention, assign to, with the globals that they read.

    Args:
        values: functions, classes, their objects and anything else, of which the user's own are looked into.
    """
    waiting = [function for value in values if type(value) not in LIGHT_TYPES for function in _functions_of(value)]
    seen: set[int] = set()
    while waiting and len(seen) < _MOST:
        function = waiting.pop()
        if id(function) in seen:
            continue
        seen.add(id(function))
        names, own = function.__globals__, names_of(function.__code__)
        yield from ((write, names) for write in own.written)
        for name in own.names:
            if name in names and type(value := names[name]) not in LIGHT_TYPES:
                waiting += _functions_of(value)


def _functions_of(value: Any) -> list[FunctionType]:
    """Return a function, or those of a class or of the class of an object, as far as they are the user's."""
    kind: Any = type(value)
    if kind is MethodType:
        value, kind = value.__func__, FunctionType
    if kind is FunctionType:
        return [] if is_installed(value.__globals__.get("__name__")) else [value]
    cls = value if isinstance(value, type) else kind
    if is_installed(module_of(cls)):  # and so is what it derives from
        return []
    items = [item for one in mro_of(cls) if not is_installed(module_of(one)) for item in members_of(one).values()]
    found = [item if type(item) is FunctionType else inner for item in items for inner in functions_in(item) or (item,)]
    return [one for one in found if type(one) is FunctionType and not is_installed(one.__globals__.get("__name__"))]

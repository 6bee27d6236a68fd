"""What a cell puts in another's place in modules, classes and functions of libraries: ``F.relu = mine`` and the like.

Found in the cell's text, and in the code of the functions that a look at the state has met: all attributes of all
libraries are too many to be kept. What is put there by way of an attribute, an item or an argument is not seen.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from types import CodeType, FunctionType, ModuleType
from typing import Any, Final, TypeAlias

from oomdoctor.objects.named import is_installed
from oomdoctor.program.code_names import ANY_NAME, AttributeWrite, attributes_written, names_of

_ABSENT: Final = object()
_STREAMS: Final = ("stdin", "stdout", "stderr")
"""What ``settings`` puts back of ``sys``."""
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
        codes: of functions that it may call, each with its globals.
    """

    def __init__(
        self, source: str, namespace: Mapping[str, Any], codes: Iterable[tuple[CodeType, Mapping[str, Any]]]
    ) -> None:
        self._namespace = namespace
        self._kept: list[tuple[Any, str, Any]] = []
        self._later: list[_Write] = []
        self._unnamed: list[str] = []
        self._left: list[Any] | None = None
        writes = attributes_written(source)
        of_codes = ((write, names) for code, names in codes for write in names_of(code).written)
        for write, names in (*((one, namespace) for one in writes), *of_codes):
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

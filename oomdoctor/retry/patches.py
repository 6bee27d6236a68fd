"""What a cell puts in another's place in modules, classes and functions of libraries: ``F.relu = mine`` and the like.

Found in the cell's text, and in the code of the functions that it mentions, because all attributes of all libraries are
too many to be kept. What is put there by way of an attribute, an item or an argument is not seen.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from types import FunctionType, ModuleType
from typing import Any, Final

from oomdoctor.objects.homes import is_installed
from oomdoctor.objects.kinds import members_of
from oomdoctor.objects.places import REGISTRY
from oomdoctor.program.magics import parsed
from oomdoctor.program.names import call_name, read_names
from oomdoctor.retry.patching import Assigned, assigned_by

__all__ = ["Patches"]

_ABSENT: Final = object()
_STREAMS: Final = ("stdin", "stdout", "stderr")
"""What ``surroundings`` puts back of ``sys``."""
_ANY: Final = "*"
"""Stands for a name that the text does not tell."""
_OF_FUNCTIONS: Final = (
    "__code__",
    "__defaults__",
    "__kwdefaults__",
    "__doc__",
    "__name__",
    "__qualname__",
    "__module__",
)


class Patches:
    """The attributes of modules, classes and functions that a cell assigns to.

    Args:
        source: the cell's text. namespace: its globals.
    """

    def __init__(self, source: str, namespace: Mapping[str, Any]) -> None:
        self._namespace = namespace
        self._kept: list[tuple[Any, str, Any]] = []
        self._later: list[Assigned] = []
        self._unnamed: list[str] = []
        self._left: list[Any] | None = None
        self._registries: list[tuple[type, dict[str, Any]]] = []
        targets, imports, registering = _assigned(source)
        for path in registering:
            owner = _found(path, imports, namespace)
            if isinstance(owner, type) and "_abc_impl" in members_of(owner):
                self._registries.append((owner, REGISTRY.read(owner)))
        mentioned = [namespace[name] for name in read_names(source) if name in namespace]
        assigned = [Assigned(path, name, imports, namespace) for path, name in targets]
        for one in (*assigned, *assigned_by(mentioned)):
            path, name, known, names = one
            owner = _found(path, known, names)
            if name == _ANY:
                self._unnamed += [path] if isinstance(owner, (ModuleType, type)) and _is_librarys(owner) else []
            elif isinstance(owner, (ModuleType, type)) or (type(owner) is FunctionType and _is_librarys(owner)):
                if owner is not sys or name not in _STREAMS:
                    self._kept.append((owner, name, _attribute(owner, name)))
            elif owner is None:
                self._later.append(one)

    def end(self) -> None:
        """Note what the cell leaves. What a later cell has put there since is left alone."""
        self._left = [_attribute(owner, name) for owner, name, _ in self._kept]

    def lost(self) -> Iterator[str]:
        """Yield a sentence for each attribute of what was not loaded yet when the cell began, or that has no name."""
        for path in self._unnamed:
            yield f"attributes of `{path}` may have been set by names that the cell makes up"
        for path, name, known, names in self._later:
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
        for cls, before in self._registries:
            for name, classes in before.items():
                REGISTRY.write(cls, name, classes)


def _is_librarys(owner: Any) -> bool:
    return is_installed(owner.__name__ if isinstance(owner, ModuleType) else getattr(owner, "__module__", None))


def _attribute(owner: Any, name: str) -> Any:
    if type(owner) is FunctionType and name in _OF_FUNCTIONS:
        return getattr(owner, name)
    return vars(owner).get(name, _ABSENT)


@lru_cache(maxsize=64)
def _assigned(source: str) -> tuple[tuple[tuple[str, str], ...], dict[str, str], frozenset[str]]:
    """Return ``(path of the owner, name)`` of attributes that are assigned to, what the cell imports as what.

    And the paths of what it registers something with, which may be abstract classes.
    """
    nodes = list(ast.walk(parsed(source) or ast.Module(body=[], type_ignores=[])))
    found: list[tuple[str, str]] = []
    imports: dict[str, str] = {}
    registering = {
        call_name(node.value) for node in nodes if isinstance(node, ast.Attribute) and node.attr == "register"
    }
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            found.append((call_name(node.value), node.attr))
        elif isinstance(node, ast.Call) and call_name(node) in ("setattr", "delattr") and len(node.args) > 1:
            name = node.args[1].value if isinstance(node.args[1], ast.Constant) else _ANY
            if type(name) is str:
                found.append((call_name(node.args[0]), name))
        elif isinstance(node, ast.Import):
            imports |= {(one.asname or one.name): one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            imports |= {(one.asname or one.name): f"{node.module}.{one.name}" for one in node.names}
    return tuple(dict.fromkeys((path, name) for path, name in found if path)), imports, frozenset(registering)


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

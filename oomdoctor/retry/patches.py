"""What a cell puts in another's place in modules and classes of libraries: ``F.relu = mine`` and the like.

Found in the cell's text, because all attributes of all libraries are too many to be kept. One that a function of an
earlier cell puts there is seen where a name leads to its module, and not otherwise.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from types import ModuleType
from typing import Any, Final

from oomdoctor.model.kinds import members_of
from oomdoctor.model.magics import mask
from oomdoctor.model.names import call_name
from oomdoctor.retry.installed import is_installed
from oomdoctor.retry.places import REGISTRY

__all__ = ["Patches"]

_ABSENT: Final = object()


class Patches:
    """The attributes of modules and classes that a cell assigns to.

    Args:
        source: the cell's text. namespace: its globals.
    """

    def __init__(self, source: str, namespace: Mapping[str, Any]) -> None:
        self._namespace = namespace
        self._kept: list[tuple[Any, str, Any]] = []
        self._later: list[tuple[str, str]] = []
        self._registries: list[tuple[type, dict[str, Any]]] = []
        targets, imports, registering = _assigned(source)
        for path in registering:
            owner = _found(path, imports, namespace)
            if isinstance(owner, type) and "_abc_impl" in members_of(owner):
                self._registries.append((owner, REGISTRY.read(owner)))
        for path, name in targets:
            owner = _found(path, imports, namespace)
            if isinstance(owner, (ModuleType, type)):
                self._kept.append((owner, name, vars(owner).get(name, _ABSENT)))
            elif owner is None:
                self._later.append((path, name))

    def lost(self) -> Iterator[str]:
        """Yield a sentence for each attribute of what was not loaded yet when the cell began."""
        for path, name in self._later:
            owner = _found(path, {}, self._namespace)
            home = owner.__name__ if isinstance(owner, ModuleType) else getattr(owner, "__module__", None)
            if isinstance(owner, (ModuleType, type)) and is_installed(home):
                yield f"`{path}.{name}` was replaced, and what it was before is not known"

    def restore(self) -> None:
        """Put back what was there."""
        for owner, name, old in self._kept:
            if vars(owner).get(name, _ABSENT) is old:
                continue
            with suppress(AttributeError, TypeError):
                delattr(owner, name) if old is _ABSENT else setattr(owner, name, old)
        for cls, before in self._registries:
            for name, classes in before.items():
                REGISTRY.write(cls, name, classes)


@lru_cache(maxsize=64)
def _assigned(source: str) -> tuple[tuple[tuple[str, str], ...], dict[str, str], frozenset[str]]:
    """Return ``(path of the owner, name)`` of attributes that are assigned to, what the cell imports as what.

    And the paths of what it registers something with, which may be abstract classes.
    """
    try:
        nodes = list(ast.walk(ast.parse(mask(source).text)))
    except (SyntaxError, ValueError, RecursionError):
        return (), {}, frozenset()
    found: list[tuple[str, str]] = []
    imports: dict[str, str] = {}
    registering = {
        call_name(node.value) for node in nodes if isinstance(node, ast.Attribute) and node.attr == "register"
    }
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            found.append((call_name(node.value), node.attr))
        elif isinstance(node, ast.Call) and call_name(node) in ("setattr", "delattr") and len(node.args) > 1:
            if isinstance(node.args[1], ast.Constant) and type(node.args[1].value) is str:
                found.append((call_name(node.args[0]), node.args[1].value))
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

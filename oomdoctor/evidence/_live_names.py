"""What the names of the namespace stand for, for who reads the cells: modules, functions, classes and iterators."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Mapping
from functools import partial
from inspect import getattr_static
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

from oomdoctor.objects.kinds import Kind, kind_of

__all__ = ["NamespaceNames"]


class NamespaceNames:
    """The live names of a namespace; only types and definitions of its values are looked at."""

    def __init__(self, namespace: Mapping[str, Any]) -> None:
        self._namespace = namespace

    def homes(self, name: str) -> tuple[str, ...]:
        """Return the dotted name by which a module, function or class is defined that a name stands for."""
        return _home(self._namespace.get(name))

    def is_function(self, dotted: str) -> bool:
        """Return whether an imported module, or Python itself, has a function or class of this name, not an error."""
        root, *rest = dotted.split(".")
        if not rest:
            return hasattr(builtins, root)
        value: Any = sys.modules.get(root)
        for part in rest:
            value = getattr_static(value, part, None)
        return callable(value) and not (type(value) is type and issubclass(value, BaseException))

    def is_iterator(self, name: str) -> bool:
        """Return whether a name stands for what can be gone through once."""
        return kind_of(type(self._namespace.get(name))) is Kind.ITERATOR


def _home(value: object) -> tuple[str, ...]:
    if type(value) is partial:
        return _home(value.func)
    if type(value) is ModuleType:
        name = vars(value).get("__name__")
        return (name,) if type(name) is str else ()
    if any(type(value) is kind for kind in (FunctionType, BuiltinFunctionType, type)):
        module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
        return (f"{module}.{name}",) if type(module) is str else ()
    return ()

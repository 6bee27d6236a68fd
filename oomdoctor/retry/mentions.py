"""Which objects a cell that does not mention them may get at all the same: by way of a library, or of what holds them.

What no text and no function mentions that a cell leads to needs no look before the cell, however large it is.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Iterable
from types import BuiltinFunctionType, FrameType, FunctionType, ModuleType
from typing import Any, Final
from weakref import ReferenceType

from oomdoctor.objects.containers import LIGHT_TYPES
from oomdoctor.objects.homes import is_installed
from oomdoctor.objects.kinds import module_of
from oomdoctor.objects.named import is_users
from oomdoctor.program.code_names import names_of

__all__ = ["held_elsewhere", "is_fixed", "shares"]

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
        fresh = {id(one): one for one in wave if type(one) not in LIGHT_TYPES and id(one) not in seen}
        seen |= fresh
        if len(seen) > _MOST_LOOKED_AT:
            return True
        inner.clear()
        for one in fresh.values():
            kind = type(one)
            if issubclass(kind, ReferenceType) or _is_users_own(one):
                return True
            if not _is_end(one):
                inner.append(one)
                if kind in (dict, list, set):
                    containers.append(one)
        wave = gc.get_referents(*inner)
    fresh.clear()
    inner.clear()
    # Our own: ``seen``, ``containers``, the name of the loop and the argument.
    return any(len(one) and sys.getrefcount(one) > held[id(one)] + 4 for one in containers)


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


def _is_end(value: Any) -> bool:
    """Return whether what a value leads to is not followed: it is a library's, and everybody's."""
    return issubclass(type(value), (ModuleType, type, FunctionType))


def held_elsewhere(namespace: dict[str, Any], snapshots: Iterable[Any], unread: frozenset[str]) -> set[str]:
    """Return those of ``unread`` that code mentions which something beside the namespace holds: a hook of a library's.

    Goes through all objects of the process, so it is for after a failure. What widgets call runs between cells: a cell
    that runs it itself mentions the widget, or awaits.

    Args:
        namespace: the globals of the functions.
        snapshots: what of ours holds functions. unread: names.
    """
    functions = [one for one in gc.get_referrers(namespace) if type(one) is FunctionType]
    named = (value for name, value in namespace.items() if is_users(name) or name == "Out")
    inside = _inside([*named, *_widgets()], snapshots)
    classes = [one for one in inside.values() if issubclass(type(one), type) and not is_installed(module_of(one))]
    mention: dict[int, frozenset[str]] = {}
    for one in (*functions, *classes):
        if names := _mentioned_by_own(one) & unread:
            mention[id(one)] = names
    objects = [one for one in inside.values() if id(type(one)) in mention]
    mention |= {id(one): mention[id(type(one))] for one in objects}
    targets = [one for one in (*functions, *classes, *objects) if id(one) in mention]
    found = set().union(*(mention[id(one)] for one in functions if id(one) in mention and id(one) not in inside))
    passed = {id(one) for one in (namespace, functions, classes, objects, targets, inside)}
    for holder in gc.get_referrers(*targets) if targets else ():
        if id(holder) not in inside and id(holder) not in passed and type(holder) is not FrameType:
            found |= set().union(*(mention.get(id(one), ()) for one in gc.get_referents(holder)))
    return found


def _widgets() -> list[Any]:
    """Return the widgets that are open. Source: ``widget.py`` of ipywidgets 8 and 7."""
    module: Any = sys.modules.get("ipywidgets.widgets.widget")
    if module is None:
        return []
    return list((module._instances if hasattr(module, "_instances") else module.Widget.widgets).values())


def _mentioned_by_own(value: Any) -> frozenset[str]:
    """Return what a function mentions, or the methods of a class. Its own frame holds neither when it has returned."""
    own = [value] if type(value) is FunctionType else [one for one in vars(value).values() if type(one) is FunctionType]
    return frozenset[str]().union(*(names_of(one.__code__).mentioned for one in own))


def _inside(values: list[Any], snapshots: Iterable[Any]) -> dict[int, Any]:
    """Return by their ``id`` the objects that the values lead to, but not by way of a library."""
    seen: dict[int, Any] = {}
    wave = [*values, *snapshots]
    while wave and len(seen) < _MOST_HELD:
        fresh = {id(one): one for one in wave if type(one) not in LIGHT_TYPES and id(one) not in seen}
        seen |= fresh
        wave = gc.get_referents(*(one for one in fresh.values() if not _is_a_librarys(one)))
        for one in fresh.values():
            if type(one) is FunctionType and _is_a_librarys(one):
                wave += [*(one.__closure__ or ()), one.__dict__]
    return seen


def _is_a_librarys(value: Any) -> bool:
    """Return whether a value is a library's, told by its type: the proxy of what is gone answers nothing."""
    kind = type(value)
    if issubclass(kind, (ModuleType, type, FunctionType)):
        return not _is_users_own(value)
    return module_of(kind).startswith(("IPython", "ipykernel", "traitlets"))

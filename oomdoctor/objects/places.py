"""Where objects keep what can be put back, beside their ``__dict__``: one table of readers and writers by class.

Each place is read by the names of its parts, and written past any ``__setattr__`` of the user's.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, MappingView
from dataclasses import dataclass
from functools import partial
from types import FunctionType, GetSetDescriptorType, MemberDescriptorType, MethodDescriptorType
from typing import Any, Final

from oomdoctor.objects.containers import LIGHT_TYPES, attribute_path
from oomdoctor.objects.kinds import (
    PerType,
    closure_of,
    has_slots,
    is_made_in_c,
    members_of,
    module_of,
    mro_of,
    name_of,
    plain_dict,
    slots_of,
)
from oomdoctor.objects.named import is_installed

_DESCRIPTORS: Final = frozenset({GetSetDescriptorType, MemberDescriptorType})
_WRAPPED: Final = frozenset({FunctionType, staticmethod, classmethod, property})


@dataclass(frozen=True, slots=True)
class Place:
    """One place: how to tell what is there, by name, how to put it there, and the path of a part.

    ``grows``: whether there may be more than is there now.
    """

    read: Callable[[Any], dict[Any, Any]]
    write: Callable[[Any, Any, Any], None] = object.__setattr__
    delete: Callable[[Any, Any], None] = object.__delattr__
    path: Callable[[str, Any], str] = attribute_path
    grows: bool = True


def _cell(function: FunctionType, name: str) -> Any:
    return (function.__closure__ or ())[function.__code__.co_freevars.index(name)]


def _class_attributes(cls: type) -> dict[str, Any]:
    """Read what a program may change in a class: its functions and its attributes, but not what Python keeps."""
    return {
        name: item
        for name, item in members_of(cls).items()
        if type(item) not in _DESCRIPTORS and name != "_abc_impl" and (name[:2] != "__" or type(item) in _WRAPPED)
    }


def functions_in(item: Any) -> list[Any]:
    """Return the functions behind an attribute of a class: of a property, of a static method and the like."""
    if type(item) is staticmethod or type(item) is classmethod:
        return [item.__func__]
    if type(item) is property:
        return [one for one in (item.fget, item.fset, item.fdel) if one is not None]
    return []


ATTRIBUTES: Final = Place(_class_attributes, type.__setattr__, type.__delattr__)
ITEMS: Final = Place(
    lambda array: dict(enumerate(array.flat)),
    lambda array, at, value: array.flat.__setitem__(at, value),
    path="{}[{}]".format,
)
_SLOTS: Final = Place(lambda value: dict(slots_of(value)))
_FUNCTION: Final = Place(
    lambda function: {name: getattr(function, name) for name in ("__code__", "__defaults__", "__kwdefaults__")}
)
_CLOSURE: Final = Place(
    closure_of,
    lambda function, name, value: setattr(_cell(function, name), "cell_contents", value),
    lambda function, name: delattr(_cell(function, name), "cell_contents"),
    "{} → {}".format,
    grows=False,
)


def _of_exception(exc: BaseException) -> dict[str, Any]:
    """Read the arguments, and what some classes keep beside them: ``errno``, ``value``, ``code``."""
    found: dict[str, Any] = {"args": BaseException.args.__get__(exc)}  # type: ignore[attr-defined]
    for base in mro_of(type(exc)):
        for name, member in members_of(base).items() if module_of(base) == "builtins" else ():
            if type(member) is MemberDescriptorType and name[:2] != "__":
                found[name] = member.__get__(exc)
    return found


_LOCAL: Final[Any] = mro_of(threading.local)[0]
_THIS_THREADS: Final = Place(
    lambda local: dict(_LOCAL.__getattribute__(local, "__dict__")), _LOCAL.__setattr__, _LOCAL.__delattr__
)
"""What this thread keeps; of other threads nothing is known."""


def _of_script(module: Any) -> dict[str, Any]:
    """Read the numbers, texts and containers of them that a scripted module keeps in C++: ``training`` is one."""
    held, kept = (plain_dict(module) or {}).get("_c"), (plain_dict(module) or {}).get("_concrete_type")
    if held is None or kept is None:
        return {}
    found = {name: held.getattr(name) for name in kept.get_attributes()}
    return {name: value for name, value in found.items() if type(value) in {*LIGHT_TYPES, list, dict, tuple}}


_SCRIPT: Final = Place(_of_script, lambda module, name, value: module._c.setattr(name, value))


def _of_state(value: Any) -> dict[str, Any]:
    """Read what an object made in C gives to be pickled, and takes back: the tag and the children of an XML element."""
    state = value.__getstate__()
    return state if type(state) is dict else {"state": state}


def _set_state(value: Any, name: str, item: Any) -> None:
    state = value.__getstate__()
    value.__setstate__({**state, name: item} if type(state) is dict else item)


def _changes(cls: type) -> bool:
    """Return whether objects of a class that is made in C may change, and keep elsewhere what changes.

    What compares by value does not, nor what has no methods, nor a view of another's items or attribute.
    """
    members = dict[str, Any]()
    for base in mro_of(cls)[-2::-1]:
        members |= members_of(base)
    has_methods = any(type(item) is MethodDescriptorType and name[:1] != "_" for name, item in members.items())
    is_view = "__get__" in members or issubclass(cls, MappingView)
    is_value = members.get("__hash__") is not None
    return is_made_in_c(cls) and has_methods and not is_view and not is_value


_may_change: Final = PerType(_changes)
STATE: Final = Place(_of_state, _set_state)


def has_state(value: Any) -> bool:
    """Return whether an object that is made in C lets itself be put into a state."""
    return _may_change(type(value)) and hasattr(type(value), "__setstate__")


def is_closed(value: Any) -> bool:
    """Return whether nothing tells the state of an object that is made in C: Python refuses to pickle it."""
    if not _may_change(type(value)):
        return False
    try:
        value.__reduce_ex__(4)
    except Exception:  # noqa: BLE001 - border: any class may refuse in any way
        return not _is_own_copy(value)
    return False


def _is_own_copy(value: Any) -> bool:
    try:
        return copy.copy(value) is value
    except Exception:  # noqa: BLE001 - border: any class may refuse in any way
        return False


_keywords: Final[Any] = vars(partial)["keywords"].__get__
_KEYWORDS: Final = Place(
    lambda function: dict(_keywords(function)),
    lambda function, name, value: _keywords(function).__setitem__(name, value),
    lambda function, name: _keywords(function).__delitem__(name),
)


def _is_memory(cls: type) -> bool:
    names = {name_of(base) for base in mro_of(cls) if module_of(base) == "_ctypes"}
    return "_CData" in names and "CFuncPtr" not in names


is_memory: Final = PerType(_is_memory)
"""Return whether a class is one of ctypes' for pieces of memory."""


def _places(cls: type) -> tuple[Place, ...]:
    if cls is FunctionType:
        return _FUNCTION, _CLOSURE
    names = {(module_of(base), name_of(base)) for base in mro_of(cls)}
    table = (
        (not is_installed(module_of(cls)) and has_slots(cls), _SLOTS),
        (issubclass(cls, BaseException), Place(_of_exception)),
        (issubclass(cls, threading.local), _THIS_THREADS),
        (("torch.jit._script", "RecursiveScriptModule") in names, _SCRIPT),
        (issubclass(cls, partial), _KEYWORDS),
    )
    return tuple(place for applies, place in table if applies)


places_of: Final = PerType(_places)
"""Return where objects of a class keep what is to be put back."""

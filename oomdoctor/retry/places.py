"""Where objects keep what is neither in their ``__dict__`` nor in slots: a table of readers and writers by class."""

from __future__ import annotations

import _abc  # type: ignore[import-not-found]
import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import MemberDescriptorType
from typing import Any, Final

from oomdoctor.model.kinds import PerType, members_of, module_of, mro_of, name_of, plain_dict
from oomdoctor.retry.light import LIGHT_TYPES

__all__ = ["REGISTRY", "Place", "is_memory", "places_of"]


@dataclass(frozen=True, slots=True)
class Place:
    """One place: how to tell what is there, by name, and how to put it there."""

    read: Callable[[Any], dict[Any, Any]]
    write: Callable[[Any, Any, Any], None] = object.__setattr__
    delete: Callable[[Any, Any], None] = object.__delattr__


def _of_exception(exc: BaseException) -> dict[str, Any]:
    """Read the arguments, and what some classes keep beside them: ``errno``, ``value``, ``code``."""
    found: dict[str, Any] = {"args": BaseException.args.__get__(exc)}  # type: ignore[attr-defined]
    for base in mro_of(type(exc)):
        for name, member in members_of(base).items() if module_of(base) == "builtins" else ():
            if type(member) is MemberDescriptorType and name[:2] != "__":
                found[name] = member.__get__(exc)
    return found


_LOCAL: Final[Any] = mro_of(threading.local)[0]


def _of_local(local: Any) -> dict[str, Any]:
    """Read what this thread keeps; of other threads nothing is known."""
    return dict(_LOCAL.__getattribute__(local, "__dict__"))


def _of_script(module: Any) -> dict[str, Any]:
    """Read the numbers, texts and containers of them that a scripted module keeps in C++: ``training`` is one."""
    held, kept = (plain_dict(module) or {}).get("_c"), (plain_dict(module) or {}).get("_concrete_type")
    if held is None or kept is None:
        return {}
    found = {name: held.getattr(name) for name in kept.get_attributes()}
    return {name: value for name, value in found.items() if type(value) in {*LIGHT_TYPES, list, dict, tuple}}


def _set_in_script(module: Any, name: str, value: Any) -> None:
    module._c.setattr(name, value)


def _of_memory(value: Any) -> dict[str, Any]:
    return {"memory": ctypes.string_at(ctypes.addressof(value), ctypes.sizeof(value))}


def _set_memory(value: Any, name: str, contents: bytes) -> None:
    del name
    ctypes.memmove(ctypes.addressof(value), contents, len(contents))


def _registered(cls: type) -> dict[str, Any]:
    """Read the classes that were registered as subclasses of an abstract one, each weakly."""
    return {"registry": frozenset(_abc._get_dump(cls)[0])}


def _set_registered(cls: type, name: str, before: frozenset[Any]) -> None:
    if _registered(cls)[name] == before:
        return
    _abc._reset_registry(cls)
    for one in before:
        if (alive := one()) is not None:
            _abc._abc_register(cls, alive)
    for base in mro_of(cls):  # those answer from what they remember
        if "_abc_impl" in members_of(base):
            _abc._reset_caches(base)


REGISTRY: Final = Place(_registered, _set_registered)
_NUMBERS: Final = frozenset("cbBhHiIlLqQfdg?u")
"""What ctypes calls numbers and characters. Pointers are none: what they point to may be gone."""


_keywords: Final[Any] = vars(partial)["keywords"].__get__


def _of_partial(function: Any) -> dict[str, Any]:
    return dict(_keywords(function))


def _set_keyword(function: Any, name: str, value: Any) -> None:
    _keywords(function)[name] = value


def _delete_keyword(function: Any, name: str) -> None:
    del _keywords(function)[name]


def _is_memory(cls: type) -> bool:
    names = {name_of(base) for base in mro_of(cls) if module_of(base) == "_ctypes"}
    return "_CData" in names and "CFuncPtr" not in names


is_memory: Final = PerType(_is_memory)
"""Return whether a class is one of ctypes' for pieces of memory."""


def _is_flat(cls: Any) -> bool:
    """Return whether a piece of memory has no pointers in it."""
    bases = {name_of(base) for base in mro_of(cls) if module_of(base) == "_ctypes"}
    if "_SimpleCData" in bases:
        return cls._type_ in _NUMBERS
    if "Array" in bases:
        return _is_flat(cls._type_)
    fields = [field for base in mro_of(cls) for field in members_of(base).get("_fields_", ())]
    return bool(bases & {"Structure", "Union"}) and all(_is_flat(field[1]) for field in fields)


def _places(cls: type) -> tuple[Place, ...]:
    names = {(module_of(base), name_of(base)) for base in mro_of(cls)}
    table = (
        (issubclass(cls, BaseException), Place(_of_exception)),
        (issubclass(cls, threading.local), Place(_of_local, _LOCAL.__setattr__, _LOCAL.__delattr__)),
        (("torch.jit._script", "RecursiveScriptModule") in names, Place(_of_script, _set_in_script)),
        (issubclass(cls, partial), Place(_of_partial, _set_keyword, _delete_keyword)),
        (is_memory(cls) and _is_flat(cls), Place(_of_memory, _set_memory)),
    )
    return tuple(place for applies, place in table if applies)


places_of: Final = PerType(_places)
"""Return where objects of a class keep what is to be put back."""

"""What an object holds, with the part of a path that leads to each; how it is looked up is told once for each type.

Nothing of the user's is run: containers are read by the methods of their builtin base, objects by their ``__dict__``
and slots, and what is made in C by descriptors made in C or by what it tells the garbage collector.
"""

from __future__ import annotations

import gc
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum, auto
from functools import cache, partial
from itertools import compress
from types import (
    AsyncGeneratorType,
    BuiltinFunctionType,
    CoroutineType,
    FrameType,
    FunctionType,
    GeneratorType,
    MemberDescriptorType,
    ModuleType,
    TracebackType,
)
from typing import Any, Final, NamedTuple

from oomdoctor.model.memory import Role
from oomdoctor.objects.containers import CONTAINERS, items_of
from oomdoctor.objects.frames import holds_the_users, leads_nowhere, locals_of, traceback_of
from oomdoctor.objects.kinds import (
    BUILTIN,
    Kind,
    PerType,
    has_slots,
    held_by,
    is_made_in_c,
    is_plain_key,
    kind_of,
    kinds_of,
    members_of,
    module_of,
    mro_of,
    name_of,
    plain_dict,
    registered,
    slots_of,
)
from oomdoctor.objects.named import is_home_of_users, of_class
from oomdoctor.objects.paths import ARROW, is_attribute, member

_SIMPLE: Final = frozenset(map(id, (bool, int, float, str, type(None))))
_BARE: Final = frozenset(map(id, (dict, list, set, frozenset, tuple, deque)))
"""Containers that hold their items alone: they have no attributes."""
_CLAIMED_APART: Final = {
    Kind.MODULE: frozenset({"_parameters", "_buffers", "_modules"}),
    Kind.OPTIMIZER: frozenset({"state", "param_groups"}),
}
"""Attributes that the census claims by itself."""
_SUSPENDED: Final = {
    id(GeneratorType): ("gi_frame", "gi_yieldfrom"),
    id(CoroutineType): ("cr_frame", "cr_await"),
    id(AsyncGeneratorType): ("ag_frame", "ag_await"),
}
_SCRIPTED: Final = "._actual_script_module"
"""What a module that was traced asks for its parts in its place. Source: torch/jit/_script.py (``ScriptModule``)."""
_dict_at: Final = vars(type)["__dictoffset__"].__get__


class Apart(Enum):
    """Objects that are more than what they hold."""

    STORAGE = auto()
    NODE = auto()
    """One of the autograd graph."""
    UNWOUND = auto()
    """A frame, or the traceback that leads through some: their locals."""


class Sort(NamedTuple):
    """How objects of a type are looked into.

    Attributes:
        kind: as the census takes it: what cannot be changed may hold memory all the same.
        role: what tensors are there for that one of them holds, where its type tells.
        is_users: whether the program defines the class, or one of its bases; ``is_bare``: it has items alone.
    """

    kind: Kind
    apart: Apart | None
    role: Role | None
    is_users: bool
    is_bare: bool


def _sort(cls: type) -> Sort:
    kind = kind_of(cls)
    if issubclass(cls, frozenset):
        kind = Kind.SET
    elif cls is BuiltinFunctionType:
        kind = Kind.CALLABLE
    elif issubclass(cls, (partial, property)) or (
        kind is Kind.ATOM and issubclass(cls, (int, float, complex, str, bytes)) and not is_made_in_c(cls)
    ):  # what a ``class`` statement derives from a number or a text may have attributes
        kind = Kind.OBJECT
    elif kind is Kind.OBJECT and leads_nowhere(cls):
        kind = Kind.ATOM
    apart = _apart(cls) if kind is Kind.OBJECT else None
    is_users = kind is not Kind.ATOM and any(map(is_users_class, mro_of(cls)))
    return Sort(kind, apart, _role(cls, apart), is_users, id(cls) in _BARE)


def _role(cls: type, apart: Apart | None) -> Role | None:
    """Return the role that follows from a type. Source: transformers.cache_utils (``DynamicCache`` and its like)."""
    if any(module_of(base) == "transformers.cache_utils" for base in mro_of(cls)):
        return Role.KV_CACHE
    return Role.TRACEBACK if apart is Apart.UNWOUND else None


def _apart(cls: type) -> Apart | None:
    names = {(module_of(base), name_of(base)) for base in mro_of(cls)}
    if ("torch.storage", "UntypedStorage") in names:
        return Apart.STORAGE
    if cls is FrameType or cls is TracebackType:
        return Apart.UNWOUND
    # Nodes that are made in C++ have no base in common.
    is_node = any(name == "next_functions" for base in mro_of(cls) for name in members_of(base) if type(name) is str)
    return Apart.NODE if is_node and not is_users_class(cls) else None


def is_users_class(cls: type) -> bool:
    """Return whether the program defines a class."""
    return not leads_nowhere(cls) and is_home_of_users(module_of(cls))


sort_of: Final = PerType(_sort)
"""Return how objects of a class are looked into."""


def held_in(value: Any, sort: Sort, which: Iterable[bool] | None = None) -> Iterator[tuple[str, Any]]:
    """Yield what ``value`` holds with the part of a path for each.

    Of a container, ``which`` tells the items as ``items_of`` and then ``keys_in`` have them: None for all, () for none.
    """
    kind, cls = sort.kind, type(value)
    if kind in CONTAINERS:
        if which != ():
            yield from _items(value, kind) if which is None else compress(_items(value, kind), which)
        if not sort.is_bare:
            yield from attributes(value)
    elif kind is Kind.CALLABLE:
        yield from held_by(value)
        if cls is FunctionType:
            yield from attributes(value)
        elif cls is BuiltinFunctionType and type(value.__self__) is not ModuleType:
            yield ".__self__", value.__self__
    elif kind is Kind.ARRAY:
        yield ".base", base_of(value)
        has_fields = _array_of(cls)["dtype"].__get__(value).kind != "O"
        items = enumerate(objects_of(value))
        yield from ((f"{ARROW}item" if has_fields else f".flat[{at}]", item) for at, item in items)
    elif id(cls) in _SUSPENDED:
        yield from _suspended(value)
    elif sort.apart is Apart.UNWOUND:
        yield from _unwound(value)
    elif kind is Kind.MODULE:
        own = plain_dict(value)
        modules = registered(value, "_modules", own)
        yield from ((member(value, name, "_modules", at), child) for at, (name, child) in enumerate(modules))
        if not issubclass(cls, sys.modules["torch"].jit.ScriptModule):
            yield from attributes(value, own)
        else:
            yield from (("" if suffix == _SCRIPTED else suffix, item) for suffix, item in attributes(value, own))
    elif kind is not Kind.GENERATOR_STATE:
        shown = [*attributes(value), *(_of_exception(value) if issubclass(cls, BaseException) else ())]
        yield from shown
        if _is_of_c(cls):
            known = {id(plain_dict(value)), *(id(item) for _, item in shown)}
            inner = (item for item in gc.get_referents(value) if id(item) not in known and not _has_gaps(item))
            yield from ((f"{ARROW}held", item) for item in inner)


def _has_gaps(value: Any) -> bool:
    """Return whether places of a container are still empty, as code in C may leave them: to read one is a crash."""
    return type(value) in (list, tuple) and len(gc.get_referents(value)) < len(value)


def keys_in(mapping: Any) -> list[Any]:
    """Return the keys of a mapping that may hold something."""
    if _SIMPLE.issuperset(map(id, map(type, dict.keys(mapping)))):
        return []
    return [key for key in dict.keys(mapping) if id(type(key)) not in _SIMPLE and not _is_atom(key)]


def _is_atom(key: Any) -> bool:
    kind = sort_of(type(key)).kind
    return kind is Kind.ATOM or (kind is Kind.TUPLE and all(map(_is_atom, tuple.__iter__(key))))


def _items(value: Any, kind: Kind) -> Iterator[tuple[str, Any]]:
    if kind is Kind.MAPPING:
        for key, item in list(dict.items(value)):
            yield f"[{key!r}]" if is_plain_key(key) else f"{ARROW}value", item
        yield from ((f"{ARROW}key", key) for key in keys_in(value))
    elif kind is Kind.SET:
        yield from ((f"{ARROW}element", item) for item in items_of(value, kind))
    else:
        yield from ((f"[{index}]", item) for index, item in enumerate(items_of(value, kind)))


def attributes(value: Any, own: dict[str, Any] | None = None) -> Iterator[tuple[str, Any]]:
    """Yield what the ``__dict__`` and slots of an object hold, with the part of a path for each."""
    apart = _CLAIMED_APART.get(kind_of(type(value)), frozenset())
    for name, item in list((own or plain_dict(value) or {}).items()):
        key = id(type(item))
        if key in _SIMPLE or (key in BUILTIN and not item):
            continue
        if name not in apart:
            yield f".{name}" if is_attribute(name) else f"{ARROW}{name!r}", item
    yield from ((f".{name}", item) for name, item in slots_of(value))


def _holds_in_c(cls: type) -> bool:
    """Return whether only the collector knows what objects of a class hold: it was made in C, or one of its bases."""
    return any(map(is_made_in_c, mro_of(cls)[:-1])) or not (_dict_at(cls) or has_slots(cls))


_is_of_c: Final = PerType(_holds_in_c)


def class_members(cls: type) -> Iterator[tuple[str, Any]]:
    """Yield what a class itself holds, with the part of a path from the class; what only Python reads is left out."""
    for name, item in list(members_of(cls).items()):
        if type(name) is str and name[:2] + name[-2:] != "____" and type(item) is not MemberDescriptorType:
            yield of_class(cls, name), item


def hangs_on(tensor: Any) -> Iterator[tuple[str, Any]]:
    """Yield what was set on a tensor, and what its hooks hold; what torch's own stand-ins hold is no memory."""
    if module_of(type(tensor)).startswith("torch._subclasses."):
        return
    yield from attributes(tensor)
    for suffix, read in _hooks():
        hooks = read(tensor)
        if hooks is not None:
            yield suffix, hooks


@cache
def _hooks() -> tuple[tuple[str, Any], ...]:
    from torch import _C

    names = "_backward_hooks", "_post_accumulate_grad_hooks"
    return tuple((f".{name}", vars(_C.TensorBase)[name].__get__) for name in names)


def _suspended(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the locals of a generator or a coroutine that waits, and what it waits for."""
    frame_name, awaited_name = _SUSPENDED[id(type(value))]
    frame, awaited = getattr(value, frame_name), getattr(value, awaited_name)
    if frame is not None:
        yield from ((f".{frame_name}.f_locals[{name!r}]", item) for name, item in locals_of(frame).items())
    if awaited is not None:
        yield f".{awaited_name}", awaited


def _of_exception(value: BaseException) -> Iterator[tuple[str, Any]]:
    for name in ("__traceback__", "__cause__", "__context__", "args"):
        yield f".{name}", traceback_of(value) if name == "__traceback__" else vars(BaseException)[name].__get__(value)


def _unwound(value: TracebackType | FrameType) -> Iterator[tuple[str, Any]]:
    """Yield the locals of a frame, or of the first one of a traceback and its rest."""
    way, frame = ("", value) if isinstance(value, FrameType) else (".tb_frame", value.tb_frame)
    if holds_the_users(frame):
        yield from ((f"{way}.f_locals[{name!r}]", item) for name, item in locals_of(frame).items())
    if isinstance(value, TracebackType):
        yield ".tb_next", value.tb_next


def _array(cls: type) -> Mapping[str, Any]:
    return next(members_of(base) for base in mro_of(cls) if (module_of(base), name_of(base)) == ("numpy", "ndarray"))


_array_of: Final = PerType(_array)


def base_of(array: Any) -> Any:
    """Return what the memory of a NumPy array belongs to, None where that is the array itself."""
    return _array_of(type(array))["base"].__get__(array)


def bounds_of(array: Any) -> tuple[int, int]:
    """Return the addresses between which the memory lies that is an array's own; they are equal where it has none."""
    getters = _array_of(type(array))
    if base_of(array) is not None:
        return 0, 0
    begin = int(getters["__array_interface__"].__get__(array)["data"][0])
    return begin, begin + int(getters["nbytes"].__get__(array))


def objects_of(array: Any) -> Sequence[Any]:
    """Return the objects that a NumPy array holds, if some of them may lead to memory."""
    items = elements_of(array)
    return items if not kinds_of(items) <= {Kind.ATOM} else ()


def elements_of(array: Any) -> Sequence[Any]:
    """Return the objects that a NumPy array holds, of one with fields those of one field after another."""
    getters = _array_of(type(array))
    dtype = getters["dtype"].__get__(array)
    if dtype.kind == "O":
        return list(getters["flat"].__get__(array))
    if not dtype.hasobject:
        return ()
    plain = getters["view"](array, getters["view"].__objclass__)  # a class of the user's would be told of each field
    return [item for name in dtype.names or () for item in elements_of(plain[name])]

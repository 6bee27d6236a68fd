"""What kind of object a type makes, told from the names in its MRO: nothing is imported and no user code is run.

With one exception: types are keys of dictionaries here, so a metaclass's own ``__hash__`` and ``__eq__`` are asked.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from enum import Enum, auto
from functools import partial
from itertools import islice
from math import isfinite
from types import FunctionType, GetSetDescriptorType, MemberDescriptorType, MethodType
from typing import Any, Final
from weakref import WeakKeyDictionary

__all__ = [
    "Kind",
    "child_path",
    "held_by",
    "is_plain_key",
    "items_of",
    "kind_of",
    "members_of",
    "module_of",
    "mro_of",
    "name_of",
    "pairs_of",
    "plain_dict",
    "qualname_of",
    "registered",
    "submodules",
]

_KEY_BITS: Final = 256
_of_types: Final = vars(type)
# What a class is, asked past its metaclass.
mro_of: Final[Callable[[type], tuple[type, ...]]] = _of_types["__mro__"].__get__
name_of: Final[Callable[[type], str]] = _of_types["__name__"].__get__
qualname_of: Final[Callable[[type], str]] = _of_types["__qualname__"].__get__
module_of: Final[Callable[[type], str]] = _of_types["__module__"].__get__
flags_of: Final[Callable[[type], int]] = _of_types["__flags__"].__get__
_MADE_AT_RUN_TIME: Final = 1 << 9
"""Source: ``Py_TPFLAGS_HEAPTYPE`` in CPython's Include/object.h."""
members_of: Final[Callable[[type], Mapping[str, Any]]] = _of_types["__dict__"].__get__


class Kind(Enum):
    """The kinds that the census and the snapshot treat each in its own way."""

    ATOM = auto()
    """Immutable, or code: holds no memory worth a look and no state of the run."""
    TENSOR = auto()
    MODULE = auto()
    OPTIMIZER = auto()
    SCHEDULER = auto()
    LOADER = auto()
    GENERATOR_STATE = auto()
    """A random number generator: ``torch.Generator``, ``numpy.random.Generator``, ``random.Random``."""
    ARRAY = auto()
    MAPPING = auto()
    SEQUENCE = auto()
    SET = auto()
    TUPLE = auto()
    CALLABLE = auto()
    """A function, a bound method or a partial: what it holds is in its closure, its defaults and its arguments."""
    ITERATOR = auto()
    """Advances when it is used and cannot be wound back: generators, iterators, open files."""
    OBJECT = auto()
    """Anything else; what it holds is looked for in its ``__dict__``."""


_BY_NAME: Final = {
    ("torch", "Tensor"): Kind.TENSOR,
    ("torch._tensor", "Tensor"): Kind.TENSOR,
    ("torch.nn.modules.module", "Module"): Kind.MODULE,
    ("torch.optim.optimizer", "Optimizer"): Kind.OPTIMIZER,
    ("torch.optim.lr_scheduler", "LRScheduler"): Kind.SCHEDULER,
    ("torch.optim.lr_scheduler", "_LRScheduler"): Kind.SCHEDULER,
    ("torch.optim.lr_scheduler", "ReduceLROnPlateau"): Kind.SCHEDULER,
    ("torch.utils.data.dataloader", "DataLoader"): Kind.LOADER,
    ("torch.utils.data.dataloader", "_BaseDataLoaderIter"): Kind.ITERATOR,
    ("torch._C", "Generator"): Kind.GENERATOR_STATE,
    ("numpy.random._generator", "Generator"): Kind.GENERATOR_STATE,
    ("random", "Random"): Kind.GENERATOR_STATE,
    ("numpy.random.mtrand", "RandomState"): Kind.GENERATOR_STATE,
    ("numpy", "ndarray"): Kind.ARRAY,
    ("builtins", "dict"): Kind.MAPPING,
    ("builtins", "list"): Kind.SEQUENCE,
    ("collections", "deque"): Kind.SEQUENCE,
    ("builtins", "set"): Kind.SET,
    ("builtins", "tuple"): Kind.TUPLE,
    ("builtins", "coroutine"): Kind.ITERATOR,
    ("_io", "_IOBase"): Kind.ITERATOR,
    ("builtins", "function"): Kind.CALLABLE,
    ("builtins", "method"): Kind.CALLABLE,
    ("functools", "partial"): Kind.CALLABLE,
    **{
        ("builtins", name): Kind.ATOM
        for name in (
            *("int", "float", "complex", "bool", "str", "bytes", "NoneType", "ellipsis", "range", "slice", "type"),
            *("builtin_function_or_method", "module", "code", "frozenset", "property"),
        )
    },
}


# Weak, so that a class which a re-run cell has defined anew is not kept.
_known: WeakKeyDictionary[type, Kind] = WeakKeyDictionary()


def kind_of(cls: type) -> Kind:
    """Return what kind of object ``cls`` makes."""
    known = _known.get(cls)
    if known is None:
        known = _known[cls] = _classify(cls)
    return known


def _classify(cls: type) -> Kind:
    mro = mro_of(cls)
    for base in mro:
        names = module_of(base), name_of(base)
        # A class of the program's may call itself what it likes, but what is built in is made in C.
        if type(names[0]) is str and not (names[0] == "builtins" and flags_of(base) & _MADE_AT_RUN_TIME):
            kind = _BY_NAME.get(names)
            if kind is not None:
                return kind
    advances = any("__next__" in members_of(base) for base in mro)
    return Kind.ITERATOR if advances else Kind.OBJECT


def plain_dict(value: object) -> dict[str, Any] | None:
    """Return the instance ``__dict__`` of ``value`` without running a property, None where it has none."""
    for base in mro_of(type(value)):
        slot: Any = members_of(base).get("__dict__")
        # Made in C; a class of the user's may have a property of this name.
        if type(slot) in (GetSetDescriptorType, MemberDescriptorType):
            found = slot.__get__(value)
            return found if type(found) is dict else None
    return None


def pairs_of(container: Any, kind: Kind, most: int | None = None) -> list[tuple[Any, Any]]:
    """Return ``(key, value)`` of a mapping, ``(index, item)`` of a sequence or a set; the first ``most`` of them.

    Read by the methods of the builtin base: a subclass may answer itself.
    """
    if kind is Kind.MAPPING:
        return list(islice(dict.items(container), most))
    return list(enumerate(items_of(container, kind, most)))


def items_of(container: Any, kind: Kind, most: int | None = None) -> Sequence[Any]:
    """Return what a container holds, of a mapping its values, read by the methods of its builtin base."""
    if kind is Kind.TUPLE:
        return tuple.__getitem__(container, slice(most))
    if kind is Kind.MAPPING:
        return list(islice(dict.values(container), most))
    if kind is Kind.SET:
        return list(islice(set.__iter__(container), most))
    if issubclass(type(container), list):
        return list.__getitem__(container, slice(most))
    return list(islice(deque.__iter__(container), most))


def held_by(function: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a function, a bound method or a partial holds beside its globals, with the part of a path for it."""
    if type(function) is MethodType:
        yield ".__self__", function.__self__
        function = function.__func__
    if type(function) is FunctionType:
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
            with suppress(ValueError):  # an empty cell
                yield f" → {name}", cell.cell_contents
        yield from ((".__defaults__", value) for value in function.__defaults__ or ())
        yield from ((".__kwdefaults__", value) for value in (function.__kwdefaults__ or {}).values())
    elif type(function) is partial:
        yield ".func", function.func
        yield from ((".args", value) for value in function.args)
        yield from ((".keywords", value) for value in function.keywords.values())


def submodules(module: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield ``module`` and every module below it once, parents first, with the expression for each.

    Numbered children are written as an index, ``model.layers[3]``, as a user would.
    """
    seen: set[int] = set()
    todo = [(path, module)]
    while todo:
        path, module = todo.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield path, module
        children = reversed(registered(module, "_modules"))
        todo += [(child_path(path, name), child) for name, child in children if child is not None]


def registered(module: Any, register: str) -> list[tuple[str, Any]]:
    """Return what a module holds in ``_parameters``, ``_buffers`` or ``_modules``, by name.

    A scripted module holds them in C++. Source: ``OrderedDictWrapper``, ``OrderedModuleDict`` in torch/jit/_script.py.
    """
    table: Any = (plain_dict(module) or {}).get(register)
    if kind_of(type(table)) is not Kind.MAPPING:
        wrapped = plain_dict(table) or {}
        if type(wrapped.get("_python_modules")) is dict:
            return list(wrapped["_python_modules"].items())
        in_c = sys.modules.get("torch._C")
        held = wrapped.get("_c")
        of_scripts = (getattr(in_c, name, None) for name in ("ParameterDict", "BufferDict", "ModuleDict"))
        return list(held.items()) if held is not None and type(held) in of_scripts else []
    return list(dict.items(table))


def child_path(path: str, name: str) -> str:
    """Return the expression for the child ``name`` of the module at ``path``."""
    if type(name) is not str:
        return f"{path}._modules[...]"
    return f"{path}[{name}]" if name.isdigit() else f"{path}.{name}"


def is_plain_key(key: object) -> bool:
    """Return whether ``repr`` of a key is short, is what stands for it in code, and runs no code of the user's."""
    if type(key) is int:
        return key.bit_length() <= _KEY_BITS
    return type(key) in (str, bool) or (type(key) is float and isfinite(key))

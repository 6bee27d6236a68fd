"""What kind of object a type makes, told from the names in its MRO: nothing is imported and no user code is run.

Types are told apart by their ``id``: as keys of a dictionary they would ask a metaclass for ``__hash__``, ``__eq__``,
and so does ``type(x) in (int, str)``. Names that are no plain ``str`` are copied into one before they are compared.
"""

from __future__ import annotations

import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import isfinite
from struct import calcsize
from types import FunctionType, GetSetDescriptorType, MemberDescriptorType, MethodType
from typing import Any, Final, Generic, TypeVar
from weakref import ref

from oomdoctor.model.session import Kind as Kind

_KEY_BITS: Final = 256
_STR: Final = frozenset({id(str)})
BUILTIN: Final = frozenset(map(id, (dict, OrderedDict, list, set, tuple)))
"""Containers that answer for themselves; a module has a dozen of them, and most are empty."""
_of_types: Final = vars(type)
# What a class is, asked past its metaclass.
mro_of: Final[Callable[[type], tuple[type, ...]]] = _of_types["__mro__"].__get__
members_of: Final[Callable[[type], Mapping[str, Any]]] = _of_types["__dict__"].__get__
_name: Final[Callable[[type], Any]] = _of_types["__name__"].__get__
_qualname: Final[Callable[[type], Any]] = _of_types["__qualname__"].__get__
_module: Final[Callable[[type], Any]] = _of_types["__module__"].__get__
_flags_of: Final[Callable[[type], int]] = _of_types["__flags__"].__get__
_base_of: Final[Callable[[type], type]] = _of_types["__base__"].__get__
_size_of: Final[Callable[[type], int]] = _of_types["__basicsize__"].__get__
_POINTERS: Final = frozenset({"__dict__", "__weakref__"})
_MADE_AT_RUN_TIME: Final = 1 << 9
"""Source: ``Py_TPFLAGS_HEAPTYPE`` in CPython's Include/object.h, and ``Py_TPFLAGS_IMMUTABLETYPE``."""
_IMMUTABLE: Final = 1 << 8

_attribute: Final = object.__getattribute__
_of_partials: Final = tuple(vars(partial)[name].__get__ for name in ("func", "args", "keywords"))

T = TypeVar("T")


def name_of(cls: type) -> str:
    """Return the ``__name__`` of a class."""
    return _plain(_name(cls))


def qualname_of(cls: type) -> str:
    """Return the ``__qualname__`` of a class."""
    return _plain(_qualname(cls))


def module_of(cls: type) -> str:
    """Return the ``__module__`` of a class, nothing where that is no name or was deleted."""
    try:
        return _plain(_module(cls))
    except AttributeError:
        return ""


def is_made_in_c(cls: type) -> bool:
    """Return whether a class was made in C: nothing can be set on it, or it has room that no slot stands for."""
    flags = _flags_of(cls)
    if not flags & _MADE_AT_RUN_TIME or flags & _IMMUTABLE:
        return True
    told = sum(type(item) is MemberDescriptorType or name in _POINTERS for name, item in _members(cls))
    return _size_of(cls) - _size_of(_base_of(cls)) > told * calcsize("P")


def _plain(name: Any) -> str:
    """Return ``name`` as a ``str`` that answers for itself, nothing where it is no text."""
    if type(name) is str:
        return name
    return str.__str__(name) if issubclass(type(name), str) else ""


class PerType(Generic[T]):
    """What ``make`` tells of each type, told once: by identity, and forgotten when a re-run cell defines it anew.

    What it tells must not lead to the type, as the descriptors of its members do: it would never be let go of.
    """

    def __init__(self, make: Callable[[type], T]) -> None:
        self._make = make
        self.known: dict[int, T] = {}
        self._alive: dict[int, ref[type]] = {}

    def __call__(self, cls: type) -> T:
        """Return what is known of ``cls``."""
        key = id(cls)
        if key not in self.known:
            self._alive[key] = ref(cls, lambda _: self._forget(key))
            self.known[key] = self._make(cls)
        return self.known[key]

    def _forget(self, key: int) -> None:
        del self.known[key], self._alive[key]


_NAMES: Final = {
    Kind.TENSOR: ("torch.Tensor", "torch._tensor.Tensor"),
    Kind.MODULE: ("torch.nn.modules.module.Module",),
    Kind.OPTIMIZER: ("torch.optim.optimizer.Optimizer",),
    Kind.SCHEDULER: tuple(
        f"torch.optim.lr_scheduler.{name}" for name in ("LRScheduler", "_LRScheduler", "ReduceLROnPlateau")
    ),
    Kind.LOADER: ("torch.utils.data.dataloader.DataLoader",),
    Kind.ITERATOR: ("torch.utils.data.dataloader._BaseDataLoaderIter", "builtins.coroutine", "_io._IOBase"),
    Kind.GENERATOR_STATE: (
        *("torch._C.Generator", "random.Random"),
        *("numpy.random._generator.Generator", "numpy.random.mtrand.RandomState"),
    ),
    Kind.ARRAY: ("numpy.ndarray",),
    Kind.MAPPING: ("builtins.dict",),
    Kind.SEQUENCE: ("builtins.list", "collections.deque"),
    Kind.SET: ("builtins.set",),
    Kind.TUPLE: ("builtins.tuple",),
    Kind.CALLABLE: ("builtins.function", "builtins.method", "functools.partial"),
    Kind.ATOM: tuple(
        f"builtins.{name}"
        for name in (
            *("int", "float", "complex", "bool", "str", "bytes", "NoneType", "ellipsis", "range", "slice", "type"),
            *("builtin_function_or_method", "module", "code", "frozenset", "property"),
        )
    ),
}
_BY_NAME: Final = {tuple(name.rsplit(".", 1)): kind for kind, names in _NAMES.items() for name in names}


def _classify(cls: type) -> Kind:
    mro = mro_of(cls)
    for base in mro:
        home, name = module_of(base), name_of(base)
        kind = _BY_NAME.get((home, name))
        if kind is not None and _is_what_it_says(base, home, name):
            return kind
    advances = any(name == "__next__" for base in mro for name, _ in _members(base))
    return Kind.ITERATOR if advances else Kind.OBJECT


def _is_what_it_says(cls: type, home: str, name: str) -> bool:
    """Return whether a class is the one of its name: a class of the program's may call itself what it likes."""
    if home == "builtins":  # not all of them are there by name, but they are made in C
        return not _flags_of(cls) & _MADE_AT_RUN_TIME
    module = sys.modules.get(home)
    return module is not None and object.__getattribute__(module, "__dict__").get(name) is cls


kind_of: Final = PerType(_classify)
"""Return what kind of object a class makes."""


def kinds_of(items: Collection[Any]) -> set[Kind]:
    """Return the kinds that objects are of, told in bulk."""
    keys = set(map(id, map(type, items)))
    if not kind_of.known.keys() >= keys:
        deque(map(kind_of, map(type, items)), maxlen=0)
    return {kind_of.known[key] for key in keys}


def _members(cls: type) -> Iterator[tuple[str, Any]]:
    """Yield what a class itself defines. A key that is no plain ``str`` would be asked by a lookup, and is left out."""
    return ((name, value) for name, value in members_of(cls).items() if type(name) is str)


def _dict_by(at: int, value: Any) -> Any:
    """Return what the ``__dict__`` says that the class at that place of the MRO defines."""
    return next(slot for name, slot in _members(mro_of(type(value))[at]) if name == "__dict__").__get__(value)


def _reader(cls: type) -> Callable[..., Any] | None:
    """Return what reads the ``__dict__`` of an object, None where it has none: mostly that of ``object``."""
    mro = mro_of(cls)
    found = [(at, slot) for at, base in enumerate(mro) for name, slot in _members(base) if name == "__dict__"]
    for at, slot in found:
        # Made in C; a class of the user's may have a property of this name.
        if type(slot) is GetSetDescriptorType or type(slot) is MemberDescriptorType:
            are_names_plain = all(_STR.issuperset(map(id, map(type, members_of(base)))) for base in mro)
            # The slot itself would keep its class alive.
            return _attribute if at == found[0][0] and are_names_plain else partial(_dict_by, at)
    return None


_reader_of: Final = PerType(_reader)


def plain_dict(value: object) -> dict[str, Any] | None:
    """Return the instance ``__dict__`` of ``value`` without running a property, None where it has none.

    It is the one that the object has, unless names in it are no plain ``str``: then see ``spelled``.
    """
    read = _reader_of(type(value))
    if read is None:
        return None
    found = _attribute(value, "__dict__") if read is _attribute else read(value)
    return spelled(found) if type(found) is dict else None


def spelled(namespace: Mapping[Any, Any]) -> dict[str, Any]:
    """Return a dict that a lookup by name asks nobody: the one given, or a copy with names that answer for themselves.

    A key that is no text is named by its place. The namespace is a dict or of a class derived from it.
    """
    names: dict[Any, Any] = namespace  # type: ignore[assignment]
    if type(names) is dict and _STR.issuperset(map(id, map(type, names))):  # in C, as other threads may add to it
        return names
    pairs = list(dict.items(names))
    copied = {_plain(name) or f"attribute {at}": value for at, (name, value) in enumerate(pairs)}
    return copied | {name: value for name, value in pairs if type(name) is str}


def _slots(cls: type) -> tuple[tuple[str, int], ...]:
    """Return the ``__slots__`` of a class and its bases, each with its place in the MRO: the slot would keep the class.

    They are descriptors made in C, which run nothing of the user's. Where names of a class are no plain ``str``, a
    lookup would ask them, and they are left out.
    """
    return tuple(
        (name, at)
        for at, base in enumerate(mro_of(cls))
        if all(type(name) is str for name in members_of(base))
        for name, slot in members_of(base).items()
        if type(slot) is MemberDescriptorType and name[:2] + name[-2:] != "____"
    )


_slots_of: Final = PerType(_slots)


def has_slots(cls: type) -> bool:
    """Return whether a class or one of its bases has ``__slots__``."""
    return bool(_slots_of(cls))


def slots_of(value: object) -> Iterator[tuple[str, Any]]:
    """Yield name and value of the slots of an object that are set."""
    slots = _slots_of(type(value))
    mro = mro_of(type(value)) if slots else ()
    for name, at in slots:
        with suppress(AttributeError):  # never set
            yield name, members_of(mro[at])[name].__get__(value)


def closure_of(function: FunctionType) -> dict[str, Any]:
    """Return the variables of outer functions that a function holds, as far as they are bound."""
    found: dict[str, Any] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        with suppress(ValueError):  # an empty cell
            found[name] = cell.cell_contents
    return found


def held_by(function: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a function, a bound method or a partial holds beside its globals, with the part of a path for it."""
    is_bound = type(function) is MethodType
    if is_bound:
        yield ".__self__", function.__self__
        function = function.__func__
    if type(function) is FunctionType:
        yield from ((f" → {name}", item) for name, item in closure_of(function).items())
        # Both may be of classes derived from these.
        defaults, by_name = function.__defaults__, function.__kwdefaults__
        yield from ((".__defaults__", value) for value in (() if defaults is None else tuple.__iter__(defaults)))
        yield from ((".__kwdefaults__", value) for value in (() if by_name is None else dict.values(by_name)))
    elif issubclass(type(function), partial):
        func, args, keywords = (read(function) for read in _of_partials)
        yield ".func", func
        yield from ((".args", value) for value in tuple.__iter__(args))
        yield from ((".keywords", value) for value in dict.values(keywords))
    elif is_bound:
        yield ".__func__", function


def parts_of(modules: Collection[Any]) -> set[int]:
    """Return by their ``id`` the modules that are parts of another one of ``modules``."""
    if len(modules) < 2:
        return set()
    return {id(part) for module in modules for _, part in list(submodules(module))[1:]}


def submodules(module: Any, path: str = "", join: Callable[[str, str], str] | None = None) -> Iterator[tuple[str, Any]]:
    """Yield ``module`` and every module below it once, parents first, with the expression for each.

    Numbered children are written as an index, ``model.layers[3]``, as a user would; ``join`` makes paths otherwise.
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
        todo += [((join or child_path)(path, name), child) for name, child in children if child is not None]


def registered(module: Any, register: str, own: dict[str, Any] | None = None) -> Sequence[tuple[Any, Any]]:
    """Return what a module holds in ``_parameters``, ``_buffers`` or ``_modules``, by name (None for odd ones).

    A scripted module holds them in C++. ``own`` is the module's ``__dict__``, where that was read before. Source:
    ``OrderedDictWrapper``, ``OrderedModuleDict`` in torch/jit/_script.py.
    """
    table: Any = (own or plain_dict(module) or {}).get(register)
    if id(type(table)) in BUILTIN and not table:
        return ()
    if kind_of(type(table)) is not Kind.MAPPING:
        wrapped = plain_dict(table) or {}
        modules: Any = wrapped.get("_python_modules")  # an ``OrderedDict`` in older versions of torch
        if kind_of(type(modules)) is Kind.MAPPING:
            return list(dict.items(modules))
        in_c = sys.modules.get("torch._C")
        held = wrapped.get("_c")
        of_scripts = (getattr(in_c, name, None) for name in ("ParameterDict", "BufferDict", "ModuleDict"))
        return list(held.items()) if held is not None and any(type(held) is one for one in of_scripts) else []
    return [(_plain(name) or (name if is_plain_key(name) else None), value) for name, value in list(dict.items(table))]


def child_path(path: str, name: str) -> str:
    """Return the expression for the child ``name`` of the module at ``path``."""
    if type(name) is not str:
        return f"{path}._modules[...]"
    return f"{path}[{name}]" if name.isdigit() else f"{path}.{name}"


def is_plain_key(key: object) -> bool:
    """Return whether ``repr`` of a key is short, is what stands for it in code, and runs no code of the user's."""
    if type(key) is int:
        return key.bit_length() <= _KEY_BITS
    return type(key) is str or type(key) is bool or (type(key) is float and isfinite(key))

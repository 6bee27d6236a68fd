"""The way from what a user can name to the tensors that hang on it, breadth first: the shortest path is the one given.

Nothing of the user's is run: containers are read by the methods of their builtin base, objects by their ``__dict__``
and slots. Large containers are looked over in bulk first, and those that can hold no tensor are passed over.
"""

from __future__ import annotations

import gc
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import compress, repeat
from types import CoroutineType, FunctionType, GeneratorType, MemberDescriptorType
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary

from oomdoctor.evidence.frames import leads_nowhere, locals_of
from oomdoctor.evidence.paths import ARROW, Found, Path, Root, is_attribute, member
from oomdoctor.model.kinds import (
    Kind,
    held_by,
    is_plain_key,
    items_of,
    kind_of,
    members_of,
    module_of,
    mro_of,
    name_of,
    plain_dict,
    registered,
)

__all__ = ["CACHE_NAMES", "Walk", "attributes", "tensors_in"]

_MOST_OBJECTS: Final = 100_000
"""From one set of roots."""
_FEW: Final = 3
"""Up to so many tensors of one container are named one by one."""
_LARGE: Final = 200
"""Containers of more items are looked into last, and in bulk first: so many items at a time, so deep."""
_BULK: Final = 1000
_BARREN_DEPTH: Final = 12
_MOST_BELOW: Final = 16
"""They are told in bulk unless they lead to more than so many objects each."""
CACHE_NAMES: Final = frozenset(
    {"past_key_values", "past_key_value", "kv_cache", "k_cache", "v_cache", "cache_k", "cache_v"}
)
"""Names that hold keys and values of a decoder. Source: transformers, gpt-fast, llama (``cache_k``)."""

_CONTAINERS: Final = frozenset({Kind.MAPPING, Kind.SEQUENCE, Kind.SET, Kind.OBJECT})
_PLAIN_CONTAINERS: Final = _CONTAINERS | {Kind.TUPLE, Kind.ARRAY, Kind.ATOM}
_SIMPLE: Final = frozenset({bool, int, float, str, type(None)})
_REGISTERS: Final = frozenset({dict, OrderedDict, list, set, tuple})
"""A module has a dozen of them, and most are empty."""
_CLAIMED_APART: Final = {
    Kind.MODULE: frozenset({"_parameters", "_buffers", "_modules"}),
    Kind.OPTIMIZER: frozenset({"state", "param_groups"}),
}
"""Attributes that the census claims by itself."""


class _Todo(NamedTuple):
    value: Any
    path: Path
    contained: bool
    is_cache: bool


@dataclass(slots=True)
class Walk:
    """What was met on walks from several sets of roots; an object that two of them reach is the first one's.

    Args:
        passed_over: objects by their ``id`` that lead nowhere here.

    Attributes:
        modules: every ``nn.Module`` once, with its path, until it is taken from here; likewise ``optimizers``.
        stopped: whether there were more objects than are looked at.
        later: large containers that were not looked into yet.
        shared: modules met again from another root, with the path from there.
        aliases: names of an object beside the first, by its ``id``.
    """

    passed_over: frozenset[int] = frozenset()
    modules: deque[tuple[Path, Any]] = field(default_factory=deque)
    optimizers: deque[tuple[Path, Any]] = field(default_factory=deque)
    stopped: bool = False
    later: list[_Todo] = field(default_factory=list)
    shared: list[tuple[Path, Any]] = field(default_factory=list)
    aliases: dict[int, list[str]] = field(default_factory=dict)
    _seen: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._seen |= self.passed_over

    def run(self, roots: Iterable[tuple[Root, Any]]) -> list[Found]:
        """Return the tensors that hang on ``roots``, as far as large containers of other things are not on the way."""
        return self._down(
            _Todo(value, Path(root, None, root.name), False, root.name in CACHE_NAMES) for root, value in roots
        )

    def resume(self) -> list[Found]:
        """Return the tensors that hang on the large containers that were left for later."""
        found: list[Found] = []
        while self.later and not self.stopped:
            todo = self.later.pop()
            items = items_of(todo.value, kind_of(type(todo.value)))
            found += self._down(self._below(todo, _fruitful(items)))
        return found

    def _down(self, todos: Iterable[_Todo]) -> list[Found]:
        found: list[Found] = []
        level, most = list(todos), len(self._seen) + _MOST_OBJECTS
        while level and len(self._seen) < most:
            below: list[_Todo] = []
            for todo in level:
                kind = kind_of(type(todo.value))
                if kind is Kind.ATOM:
                    continue
                if id(todo.value) in self._seen:
                    self._met_again(todo, kind, found)
                    continue
                self._seen.add(id(todo.value))
                if kind is Kind.TENSOR:
                    found.append(Found((todo.value,), todo.path, contained=todo.contained, is_cache=todo.is_cache))
                else:
                    self._look_into(todo, kind, found, below)
            level = below
        self.stopped = self.stopped or bool(level)
        return found

    def _met_again(self, todo: _Todo, kind: Kind, found: list[Found]) -> None:
        """Note that another root leads to what one before it led to: to let go of it, both must go."""
        if kind is Kind.TENSOR:
            found.append(Found((todo.value,), todo.path, contained=todo.contained, is_cache=todo.is_cache))
        elif kind is Kind.MODULE and todo.path.root.name:
            self.shared.append((todo.path, todo.value))
        elif todo.path.parent is None and not todo.path.root.place:
            self.aliases.setdefault(id(todo.value), []).append(todo.path.root.name)

    def _look_into(self, todo: _Todo, kind: Kind, found: list[Found], below: list[_Todo]) -> None:
        value, path = todo.value, todo.path
        if kind is Kind.MODULE:
            self.modules.append((path, value))
        elif kind is Kind.OPTIMIZER:
            self.optimizers.append((path, value))
        if kind in (Kind.SEQUENCE, Kind.TUPLE, Kind.SET, Kind.MAPPING):
            items = items_of(value, kind)
            kinds = set(map(kind_of, set(map(type, items))))
            if kinds <= {Kind.ATOM}:
                return
            if len(items) > _FEW and kinds == {Kind.TENSOR} and self._are_fresh(items):
                found.append(_found_together(items, todo, kind))
                return
            if len(items) > _LARGE:
                self.later.append(todo)
                return
        below += self._below(todo)

    def _below(self, todo: _Todo, which: Iterable[bool] = repeat(True)) -> Iterator[_Todo]:
        """Yield what a value holds, of a container the items that ``which`` says."""
        value, path, kind = todo.value, todo.path, kind_of(type(todo.value))
        inside = todo.contained or kind in _CONTAINERS
        is_cache = todo.is_cache or (kind is Kind.OBJECT and _is_cache(type(value)))
        for suffix, child in compress(_children(value, kind), which):
            if kind_of(type(child)) is not Kind.ATOM:
                yield _Todo(child, path.child(suffix), inside, is_cache or suffix.strip(".['\"]") in CACHE_NAMES)

    def _are_fresh(self, items: Sequence[Any]) -> bool:
        """Return whether none of ``items`` was met before, and note them."""
        known = set(map(id, items))
        if len(known) < len(items) or not known.isdisjoint(self._seen):
            return False
        self._seen |= known
        return True


def _found_together(tensors: Sequence[Any], todo: _Todo, kind: Kind) -> Found:
    if kind is Kind.MAPPING:
        return Found(tensors, todo.path.child(".values()"), contained=True, is_cache=todo.is_cache)
    sliceable = kind is Kind.TUPLE or issubclass(type(todo.value), list)
    return Found(tensors, todo.path, 0, sliceable, todo.contained or kind is not Kind.TUPLE, todo.is_cache)


def tensors_in(value: Any, depth: int = 3) -> Iterator[Any]:
    """Yield the tensors in a value, through a few levels of containers and plain objects."""
    kind = kind_of(type(value))
    if kind is Kind.TENSOR:
        yield value
    elif depth and kind in _CONTAINERS | {Kind.TUPLE}:
        for _, child in _children(value, kind):
            yield from tensors_in(child, depth - 1)


def _children(value: Any, kind: Kind) -> Iterator[tuple[str, Any]]:
    """Yield what ``value`` holds with the part of a path for each."""
    if kind is Kind.MAPPING:
        for key, item in list(dict.items(value)):
            yield f"[{key!r}]" if is_plain_key(key) else f"{ARROW}value", item
    elif kind is Kind.SET:
        yield from ((f"{ARROW}element", item) for item in items_of(value, kind))
    elif kind in (Kind.SEQUENCE, Kind.TUPLE):
        yield from ((f"[{index}]", item) for index, item in enumerate(items_of(value, kind)))
    elif kind is Kind.CALLABLE:
        yield from held_by(value)
        if type(value) is FunctionType:
            yield from attributes(value)
    elif type(value) in (GeneratorType, CoroutineType):
        yield from _suspended(value)
    elif kind is Kind.MODULE:
        modules = enumerate(registered(value, "_modules"))
        yield from ((member(value, name, "_modules", at), child) for at, (name, child) in modules)
        yield from attributes(value)
    elif kind is not Kind.GENERATOR_STATE and not leads_nowhere(type(value)):
        yield from attributes(value)


def attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what an object's ``__dict__`` and slots hold, with the part of a path for each."""
    held, slots = plain_dict(value), _slots(type(value))
    if (held is None and not slots) or name_of(type(value)) == "_lru_cache_wrapper":
        # Made in C, as iterators and the cache of ``lru_cache`` are: only the collector knows what they hold.
        yield from ((f"{ARROW}held", item) for item in gc.get_referents(value))
    apart = _CLAIMED_APART.get(kind_of(type(value)), frozenset())
    for name, item in list((held or {}).items()):
        if type(item) in _SIMPLE or (type(item) in _REGISTERS and not item):
            continue
        if type(name) is not str:
            yield f"{ARROW}attribute", item
        elif name not in apart:
            yield f".{name}" if is_attribute(name) else f"{ARROW}{name!r}", item
    for name, slot in slots:
        try:
            yield f".{name}", slot.__get__(value)
        except AttributeError:  # never set
            continue


_slots_of: WeakKeyDictionary[type, tuple[tuple[str, MemberDescriptorType], ...]] = WeakKeyDictionary()


def _slots(cls: type) -> tuple[tuple[str, MemberDescriptorType], ...]:
    """Return the ``__slots__`` of a class and its bases: descriptors made in C, which run nothing of the user's."""
    if cls not in _slots_of:
        mro = mro_of(cls)
        _slots_of[cls] = tuple(
            (name, slot)
            for base in mro
            for name, slot in members_of(base).items()
            if type(slot) is MemberDescriptorType and name[:2] + name[-2:] != "____"
        )
    return _slots_of[cls]


def _suspended(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the locals of a generator or a coroutine that waits."""
    prefix = "gi" if type(value) is GeneratorType else "cr"
    frame = value.gi_frame if prefix == "gi" else value.cr_frame
    if frame is not None:
        yield from ((f".{prefix}_frame.f_locals[{name!r}]", item) for name, item in locals_of(frame).items())


def _is_cache(cls: type) -> bool:
    """Return whether a class is a decoder's cache. Source: transformers.cache_utils (``DynamicCache`` and its like)."""
    mro = mro_of(cls)
    return any(module_of(base) == "transformers.cache_utils" for base in mro)


def _fruitful(items: Sequence[Any]) -> Iterator[bool]:
    """Yield for each item whether it may lead to a tensor, told in bulk."""
    for first in range(0, len(items), _BULK):
        some = items[first : first + _BULK]
        yield from repeat(not _is_barren(some), len(some))


def _is_barren(items: Sequence[Any]) -> bool:
    """Return whether many items can be told to lead to no tensor."""
    level, most = items, _MOST_BELOW * len(items)
    for _ in range(_BARREN_DEPTH):
        kinds = {cls: kind_of(cls) for cls in set(map(type, level))}
        holders = {cls for cls, kind in kinds.items() if kind is not Kind.ATOM}
        if not holders:
            return True
        if not _PLAIN_CONTAINERS.issuperset(kinds.values()) or len(level) > most:
            return False
        level = gc.get_referents(*compress(level, map(holders.__contains__, map(type, level))))
    return False

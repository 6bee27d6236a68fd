"""The way from what a user can name to the tensors that hang on it, breadth first: the shortest path is the one given.

Large containers are looked into last, and in bulk first: those that can hold no tensor are passed over, and of those
that hold very many the tensors are told together.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, compress, islice, repeat
from typing import Any, Final, NamedTuple

from oomdoctor.model.memory import Role
from oomdoctor.objects.children import (
    Apart,
    Sort,
    base_of,
    class_members,
    hangs_on,
    held_in,
    is_users_class,
    keys_in,
    objects_of,
    sort_of,
)
from oomdoctor.objects.containers import CONTAINERS, items_of
from oomdoctor.objects.kinds import Kind, mro_of
from oomdoctor.objects.paths import ARROW, Found, Holder, Path, Root, Ways

_MOST_OBJECTS: Final = 100_000
"""From one set of roots; from large containers so many times as much, shared among them."""
_SHARES: Final = 5
_FEW: Final = 3
"""Up to so many tensors of one container are named one by one."""
_LARGE: Final = 200
"""Containers of more items are looked into last, and in bulk first: so many items at a time, so deep."""
_BULK: Final = 1000
_BULK_DEPTH: Final = 12
_MOST_BELOW: Final = 16
"""They are told in bulk unless they lead to more than so many objects each."""
_MOST_NAMED: Final = 1000
"""Of a large container that leads to more tensors, the tensors are told together."""
CACHE_NAMES: Final = frozenset(
    {"past_key_values", "past_key_value", "kv_cache", "k_cache", "v_cache", "cache_k", "cache_v"}
)
"""Names that hold keys and values of a decoder. Source: transformers, gpt-fast, llama (``cache_k``)."""
_HANGING: Final = {".main_grad": Role.GRADIENT, ".grad_sample": Role.GRADIENT}
"""What libraries set on a parameter. Source: Megatron-LM (``main_grad``), opacus (``grad_sample``)."""

_OWNING: Final = frozenset({Kind.MAPPING, Kind.SEQUENCE, Kind.SET, Kind.OBJECT})
_PLAIN: Final = CONTAINERS | {Kind.OBJECT, Kind.ARRAY, Kind.ATOM, Kind.TENSOR}


class _Todo(NamedTuple):
    value: Any
    path: Path
    contained: bool
    role: Role | None


@dataclass(slots=True)
class Walk:
    """What was met on walks from several sets of roots; an object that two of them reach is the first one's.

    Args:
        passed_over: objects by their ``id`` that lead nowhere here.
        classes: names of classes by their ``id``.

    Attributes:
        modules: every ``nn.Module`` once, with its path, until it is taken from here; likewise ``optimizers``.
        stopped: names below which there were more objects than are looked at.
        ways: the other paths by which objects were met again.
        arrays: those of NumPy with their paths, but for those in bulk.
    """

    passed_over: frozenset[int] = frozenset()
    classes: Mapping[int, str] = field(default_factory=dict)
    modules: deque[tuple[Path, Any]] = field(default_factory=deque)
    optimizers: deque[tuple[Path, Any]] = field(default_factory=deque)
    stopped: dict[str, None] = field(default_factory=dict)
    ways: Ways = field(default_factory=Ways)
    arrays: list[tuple[Path, Any]] = field(default_factory=list)
    _later: deque[_Todo | list[_Todo]] = field(default_factory=deque)
    """Large containers, and what hangs on a root of which there was too much."""
    _unwound: list[_Todo] = field(default_factory=list)
    _seen: dict[int, Path | None] = field(default_factory=dict)
    _asked: dict[int, Path] = field(default_factory=dict)
    """Where tensors were met on which something hangs."""
    _looked: int = 0

    def __post_init__(self) -> None:
        self._seen.update(dict.fromkeys(self.passed_over))

    @property
    def has_more(self) -> bool:
        """Whether large containers were met that were not looked into yet."""
        return bool(self._later)

    @property
    def has_unwound(self) -> bool:
        """Whether tracebacks were met that were not looked into yet."""
        return bool(self._unwound)

    def run(self, roots: Iterable[tuple[Root, Any]]) -> list[Found]:
        """Return the tensors that hang on ``roots``, as far as large containers of other things are not on the way."""
        found: list[Found] = []
        todos = (_Todo(value, Path(root, None, root.name), False, _cached(root.name)) for root, value in roots)
        by_root: dict[int, list[_Todo]] = {}
        for todo in self._down(todos, _MOST_OBJECTS, found):
            by_root.setdefault(id(todo.path.root), []).append(todo)
        self._later += by_root.values()
        return found

    def unwind(self) -> list[Found]:
        """Return the tensors that tracebacks hold, of exceptions that the program kept."""
        found: list[Found] = []
        while self._unwound:
            todo = self._unwound.pop()
            self._note_stop(self._down(self._below(todo, sort_of(type(todo.value))), _MOST_OBJECTS, found))
        return found

    def beside(self, known: Sequence[Found]) -> list[Found]:
        """Return the tensors that hang on those in ``known``: as attributes, or in their hooks."""
        found: list[Found] = []
        self._note_stop(self._down(self._beside(known), _MOST_OBJECTS, found))
        return found

    def resume(self) -> list[Found]:
        """Return the tensors that hang on the large containers that were left for later."""
        found: list[Found] = []
        left = _SHARES * _MOST_OBJECTS
        while self._later:
            share, before = left // len(self._later), self._looked
            later = self._later.popleft()
            todos = self._large(later, found) if isinstance(later, _Todo) else iter(later)
            self._note_stop(self._down(todos, share, found))
            left = max(left - (self._looked - before), 0)
        return found

    def _note_stop(self, rest: Iterator[_Todo]) -> None:
        self.stopped |= dict.fromkeys(todo.path.root.name for todo in islice(rest, 1))

    def _down(self, todos: Iterable[_Todo], budget: int, found: list[Found]) -> Iterator[_Todo]:
        """Add to ``found`` what ``todos`` lead to, as far as ``budget`` objects go; return what remains to be done."""
        most, waiting = self._looked + budget, iter(todos)
        while True:
            below: list[_Todo] = []
            for todo in waiting:
                sort = sort_of(type(todo.value))
                if sort.kind is Kind.ATOM:
                    continue
                if id(todo.value) in self._seen:
                    self._met_again(todo, sort.kind, found)
                    continue
                self._looked += 1
                if self._looked > most:
                    return chain((todo,), waiting, below)
                self._seen[id(todo.value)] = todo.path
                if sort.kind is Kind.TENSOR:
                    found.append(Found((todo.value,), todo.path, contained=todo.contained, role=todo.role))
                else:
                    self._look_into(todo, sort, found, below)
            if not below:
                return iter(())
            waiting = iter(below)

    def _met_again(self, todo: _Todo, kind: Kind, found: list[Found]) -> None:
        """Note that another path leads to what one before it led to: to let go of it, both must be cut."""
        first = self._seen[id(todo.value)]
        if kind is Kind.TENSOR:
            found.append(Found((todo.value,), todo.path, contained=todo.contained, role=todo.role))
        elif first is not None:
            self.ways.add(Holder(first), Holder(todo.path))

    def _look_into(self, todo: _Todo, sort: Sort, found: list[Found], below: list[_Todo]) -> None:
        value, path, kind = todo.value, todo.path, sort.kind
        if kind is Kind.MODULE:
            self.modules.append((path, value))
        elif kind is Kind.OPTIMIZER:
            self.optimizers.append((path, value))
        elif kind is Kind.ARRAY:
            self.arrays.append((path, value))
        elif sort.apart is Apart.UNWOUND:
            self._unwound.append(todo)  # what the program holds by other names is theirs
            return
        elif sort.apart is Apart.NODE:
            found.append(Found((), path, contained=todo.contained, role=todo.role, node=value))
        elif sort.apart is Apart.STORAGE:
            found.append(Found((), path, contained=todo.contained, role=todo.role, storage=value))
        which: Iterable[bool] | None = None
        if kind in CONTAINERS:
            items = items_of(value, kind)
            if self._are_done(items, todo, kind, found):
                has_keys = kind is Kind.MAPPING and keys_in(value)
                which = chain(repeat(False, len(items)), repeat(True)) if has_keys else ()
            elif len(items) > _LARGE:
                self._later.append(todo)
                return
        below += self._below(todo, sort, which)

    def _are_done(self, items: Sequence[Any], todo: _Todo, kind: Kind, found: list[Found]) -> bool:
        """Return whether the items of a container need not be looked into one by one."""
        kind_of_all = _kind_of_all(items)
        if kind_of_all is Kind.ATOM:
            return True
        if len(items) > _FEW and kind_of_all is Kind.TENSOR and self._are_fresh(items):
            found.append(_found_together(items, todo, kind))
            return True
        return False

    def _below(self, todo: _Todo, sort: Sort, which: Iterable[bool] | None = None) -> Iterator[_Todo]:
        """Yield what a value holds, of a container the items that ``which`` says."""
        path, role = todo.path, todo.role or sort.role
        inside = todo.contained or sort.kind in _OWNING
        for suffix, child in held_in(todo.value, sort, which):
            if sort_of(type(child)).kind is not Kind.ATOM:
                yield _Todo(child, path.child(suffix), inside, role or _cached(suffix.strip(".['\"]")))
        if sort.is_users:
            yield from self._of_class(type(todo.value), path)

    def _of_class(self, cls: type, path: Path) -> Iterator[_Todo]:
        """Yield what classes of the program hold that what stands at ``path`` is an instance of, each class once."""
        for at, base in enumerate(mro_of(cls)):
            if id(base) not in self._seen and is_users_class(base):
                self._seen[id(base)] = None
                here = path.child(f".__class__.__mro__[{at}]" if at else ".__class__")
                of = self.classes.get(id(base)) or here.exact()
                for suffix, item in class_members(base):
                    if sort_of(type(item)).kind is not Kind.ATOM:
                        root = Root(f"{of}{suffix}", ident=id(item))
                        own = Path(root, None, root.name) if of else here.child(suffix)
                        yield _Todo(item, own, True, None)

    def _beside(self, known: Sequence[Found]) -> Iterator[_Todo]:
        """Yield what hangs on tensors; most have nothing, which is told in bulk."""
        if _are_atoms(gc.get_referents(*chain.from_iterable(one.tensors for one in known))):
            return
        for one in known:
            for at, tensor in enumerate(one.tensors):
                if id(tensor) in self._asked:
                    self.ways.add(Holder(self._asked[id(tensor)]), Holder(one.path_of(at)))
                elif not _are_atoms(gc.get_referents(tensor)):
                    path = self._asked[id(tensor)] = one.path_of(at)
                    for suffix, item in hangs_on(tensor):
                        if sort_of(type(item)).kind is not Kind.ATOM:
                            role = one.role or _HANGING.get(suffix)
                            yield _Todo(item, path.child(suffix), one.contained, role)

    def _large(self, todo: _Todo, found: list[Found]) -> Iterator[_Todo]:
        """Return what of a large container is to be looked into one by one; add what is told in bulk to ``found``."""
        sort = sort_of(type(todo.value))
        items = items_of(todo.value, sort.kind)
        if sort.kind is Kind.MAPPING and (keys := keys_in(todo.value)):
            items = [*items, *keys]
        chunks = [items[first : first + _BULK] for first in range(0, len(items), _BULK)]
        classes: dict[int, type] = {}
        below = [_tensors_below(chunk, classes) for chunk in chunks]
        told = {id(tensor): tensor for tensors in below if tensors for tensor in tensors}
        is_one = len(told) > _MOST_NAMED
        if is_one:
            self._seen.update(dict.fromkeys(told))
            path = todo.path.child(f"{ARROW}items")
            found.append(Found([*told.values()], path, contained=True, role=todo.role or sort.role))
        which = [tensors is None or (bool(tensors) and not is_one) for tensors in below]
        each = chain.from_iterable(repeat(one, len(chunk)) for one, chunk in zip(which, chunks, strict=True))
        of_classes = (self._of_class(cls, todo.path.child(f"{ARROW}item")) for cls in classes.values())
        return chain(self._below(todo, sort, each if any(which) else ()), chain.from_iterable(of_classes))

    def _are_fresh(self, items: Sequence[Any]) -> bool:
        """Return whether none of ``items`` was met before, and note them."""
        known = set(map(id, items))
        if len(known) < len(items) or not self._seen.keys().isdisjoint(known):
            return False
        self._seen.update(dict.fromkeys(known))
        return True


def _cached(name: str) -> Role | None:
    return Role.KV_CACHE if name in CACHE_NAMES else None


def _found_together(tensors: Sequence[Any], todo: _Todo, kind: Kind) -> Found:
    if kind is Kind.MAPPING:
        return Found(tensors, todo.path.child(".values()"), contained=True, role=todo.role)
    sliceable = kind is Kind.TUPLE or issubclass(type(todo.value), list)
    return Found(tensors, todo.path, 0, sliceable, todo.contained or kind is not Kind.TUPLE, todo.role)


def tensors_in(value: Any, depth: int = 3) -> Iterator[Any]:
    """Yield the tensors in a value, through a few levels of containers and plain objects."""
    sort = sort_of(type(value))
    if sort.kind is Kind.TENSOR:
        yield value
    elif depth and sort.kind in _OWNING | {Kind.TUPLE}:
        for _, child in held_in(value, sort):
            yield from tensors_in(child, depth - 1)


def _sorts(items: Sequence[Any]) -> dict[int, Sort]:
    """Return how objects of each type among ``items`` are looked into, by the ``id`` of the type; told in bulk."""
    keys = set(map(id, map(type, items)))
    if not sort_of.known.keys() >= keys:
        deque(map(sort_of, map(type, items)), maxlen=0)
    return {key: sort_of.known[key] for key in keys}


def _kind_of_all(items: Sequence[Any]) -> Kind | None:
    """Return the kind of all of ``items``, None where they differ; none at all are atoms."""
    kinds = {Kind.ATOM} if not items else set[Kind]()
    for first in range(0, len(items), _BULK):
        kinds |= {sort.kind for sort in _sorts(items[first : first + _BULK]).values()}
        if len(kinds) > 1 or not kinds <= {Kind.ATOM, Kind.TENSOR}:
            return None
    return next(iter(kinds))


def _are_atoms(held: Sequence[Any]) -> bool:
    """Return whether what tensors refer to is nothing but their type and dicts in which nothing is."""
    some = {key for key, sort in _sorts(held).items() if sort.kind is not Kind.ATOM}
    return not some or not any(id(type(one)) in some and (type(one) is not dict or one) for one in held)


def _tensors_below(items: Sequence[Any], classes: dict[int, type]) -> list[Any] | None:
    """Return the tensors that many items lead to, None where that cannot be told in bulk; add the program's classes."""
    level, most = items, _MOST_BELOW * len(items)
    found: list[Any] = []
    for _ in range(_BULK_DEPTH):
        sorts = _sorts(level)
        kinds = {sort.kind for sort in sorts.values()}
        if not kinds <= _PLAIN or any(sort.apart for sort in sorts.values()) or len(level) > most:
            return None
        for key in (key for key, sort in sorts.items() if sort.is_users and key not in classes):
            classes[key] = next(cls for cls in map(type, level) if id(cls) == key)
        keys = list(map(id, map(type, level)))
        if Kind.TENSOR in kinds:
            found += compress(
                level, map({key for key, sort in sorts.items() if sort.kind is Kind.TENSOR}.__contains__, keys)
            )
        holders = {key for key, sort in sorts.items() if sort.kind not in (Kind.ATOM, Kind.TENSOR)}
        if not holders:
            return found
        arrays = {key for key, sort in sorts.items() if sort.kind is Kind.ARRAY}
        views = list(compress(level, map(arrays.__contains__, keys))) if arrays else []
        level = gc.get_referents(*compress(level, map(holders.__contains__, keys)))
        level += chain(map(base_of, views), chain.from_iterable(map(objects_of, views)))
    return None

"""How a snapshot holds values: heavy ones weakly, containers by a recipe, everything else as it is.

Were a snapshot to hold a container, it would hold what the container holds, and a cell that replaces a list of
outputs would no longer free the old ones. So a container with heavy items is known by its ``id`` and by what was in
it; when it is brought back, the original is filled in place where it still stands where it stood, and made anew
where it does not.
"""

from __future__ import annotations

import operator
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, Final
from weakref import ref

from oomdoctor.objects.kinds import Kind, items_of, kind_of, module_of

__all__ = [
    "GONE",
    "Gone",
    "Recipe",
    "Weak",
    "fill",
    "length_of",
    "living",
    "mapped_by",
    "revive",
    "still_holds",
    "weak",
]


class Gone:
    """Stands for a value that was held weakly and died."""

    def __repr__(self) -> str:
        return "<released>"


GONE: Final = Gone()


class Weak:
    """A value that its owner alone keeps alive."""

    __slots__ = ("_ref",)

    def __init__(self, value: Any) -> None:
        self._ref = ref(value)

    def get(self) -> Any:
        """Return the value, ``GONE`` if it died."""
        value = self._ref()
        return GONE if value is None else value


def weak(value: Any) -> Any:
    """Return ``value`` held weakly, or as it is where its class allows no weak references."""
    try:
        return Weak(value)
    except TypeError:
        return value


def living(held: Any) -> Any:
    """Return the value that is held weakly or as it is, ``GONE`` if it died."""
    return held.get() if type(held) is Weak else held


def mapped_by(container: Any) -> type[dict[Any, Any]]:
    """Return the builtin base of a mapping, whose methods are asked in place of its own."""
    return OrderedDict if isinstance(container, OrderedDict) else dict


def length_of(container: Any, kind: Kind) -> int:
    """Return how many items a container has; a class of the user's may answer itself, and is not asked."""
    if kind is Kind.MAPPING:
        return dict.__len__(container)
    if kind is Kind.SET:
        return set.__len__(container)
    return (_sequence_base(container) if kind is Kind.SEQUENCE else tuple).__len__(container)


def _sequence_base(container: Any) -> Any:
    return list if issubclass(type(container), list) else deque


class Recipe:
    """What a container held.

    Attributes:
        original: the container itself; where it has heavy items a ``Weak``, or None if it can be made anew and is
            known by ``ident`` alone.
        keys, values: those of a mapping, indices and items of the others, held in their turn. Two lists: the garbage
            collector would go through a tuple for each.
        is_long: whether it is too long for them; see ``bulk``.
        item_path: makes the path of an item from ``path`` and its key.
        factory: of a ``defaultdict``.
    """

    __slots__ = ("cls", "factory", "ident", "is_long", "item_path", "keys", "original", "path", "values")

    def __init__(self, container: Any, path: str, item_path: Callable[[str, Any], str] | None = None) -> None:
        self.item_path = item_path or _item_path
        self.cls = type(container)
        self.factory = container.default_factory if self.cls is defaultdict else None
        self.ident = id(container)
        self.path = path
        self.original: Any = None
        self.keys: Sequence[Any] = ()
        self.values: list[Any] = []
        self.is_long = False

    @property
    def pairs(self) -> Iterator[tuple[Any, Any]]:
        """Each key with its value."""
        return zip(self.keys, self.values, strict=True)

    @property
    def is_heavy(self) -> bool:
        """Whether holding the container would keep something heavy alive."""
        return any(
            type(held) is Weak or (type(held) is Recipe and (held.original is None or type(held.original) is Weak))
            for held in chain(self.keys, self.values)
        )

    def standing(self) -> Any:
        """Return the container itself if it is held and alive, else None."""
        if type(self.original) is not Weak:
            return self.original
        value = self.original.get()
        return None if value is GONE else value

    def gone(self) -> Iterator[str]:
        """Yield the paths of items that died."""
        for key, held in self.pairs:
            if revive(key) is GONE or revive(held) is GONE:
                yield self.item_path(self.path, key)


def revive(held: Any, current: Any = None, memo: dict[int, Any] | None = None) -> Any:
    """Return the value that ``held`` stands for, containers brought back to what they held.

    Args:
        current: what stands now where the value stood; the original container, if nothing replaced it.
        memo: containers brought back so far, by ``id``. Without it nothing is changed: a container is returned as is.
    """
    if type(held) is Weak:
        return held.get()
    if type(held) is not Recipe:
        return held
    target = held.standing()
    if target is None and held.original is not None:
        return GONE
    if memo is None:
        return held
    if held.ident not in memo:
        if target is None and id(current) == held.ident and type(current) is held.cls:
            target = current
        if issubclass(held.cls, tuple):
            items = (revive(item, None, memo) for _, item in held.pairs)
            memo[held.ident] = tuple.__new__(held.cls, items) if target is None else target
        else:
            memo[held.ident] = target = _empty(held) if target is None else target
            fill(target, held, memo)
    return memo[held.ident]


def still_holds(container: Any, recipe: Recipe) -> bool:
    """Return whether a container holds the very items that ``recipe`` says; of long ones it is not asked."""
    if recipe.is_long:
        return True
    if kind_of(type(container)) is Kind.MAPPING:
        now = list(mapped_by(container).items(container))
    else:
        now = list(enumerate(items_of(container, kind_of(type(container)))))
    return len(now) == len(recipe.values) and all(
        _is_what(held, item) and (type(key) is str or _is_what(key, own) or type(own) is int)
        for (own, item), (key, held) in zip(now, recipe.pairs, strict=True)
    )


def _is_what(held: Any, item: Any) -> bool:
    if type(held) is Recipe:
        return held.ident == id(item) and still_holds(item, held)
    return living(held) is item


def fill(target: Any, recipe: Recipe, memo: dict[int, Any]) -> None:
    """Bring ``target`` back, in place, to what ``recipe`` says; a container that has it already is not touched."""
    if recipe.is_long:
        return
    if kind_of(type(target)) is Kind.MAPPING:
        _fill_mapping(target, recipe, memo)
    elif kind_of(type(target)) is Kind.SET:
        items = [item for _, held in recipe.pairs if (item := revive(held, None, memo)) is not GONE]
        if set.__len__(target) != len(items) or not all(map(operator.is_, set.__iter__(target), items)):
            set.clear(target)
            set.update(target, items)
    else:
        base, now = _sequence_base(target), items_of(target, Kind.SEQUENCE)
        items = [revive(held, now[at] if at < len(now) else None, memo) for at, held in recipe.pairs]
        if len(now) != len(items) or any(a is not b for a, b in zip(now, items, strict=True)):
            base.clear(target)
            base.extend(target, items)


def _fill_mapping(target: Any, recipe: Recipe, memo: dict[int, Any]) -> None:
    base = mapped_by(target)
    now = dict(base.items(target))
    values = [
        (key, revive(held, now.get(key), memo)) for key, held in ((revive(k, None, memo), v) for k, v in recipe.pairs)
    ]
    values = [(key, value) for key, value in values if key is not GONE]
    if len(now) == len(values) and all(a is c and b is d for (a, b), (c, d) in zip(now.items(), values, strict=True)):
        return
    base.clear(target)
    for key, value in values:
        base.__setitem__(target, key, value)


def _item_path(path: str, key: Any) -> str:
    return f"{path}[{key!r}]" if type(key) in (str, int) else f"{path}[...]"


def _empty(recipe: Recipe) -> Any:
    cls = recipe.cls
    if cls is defaultdict:
        return defaultdict(recipe.factory)
    return cls() if module_of(cls) in ("builtins", "collections") else {} if issubclass(cls, dict) else []

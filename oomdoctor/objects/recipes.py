"""How a snapshot holds values: heavy ones weakly, containers by a recipe, everything else as it is.

Were a snapshot to hold a container, it would hold what the container holds, and a cell that replaces a list of
outputs would no longer free the old ones. So a container with heavy items is known by its ``id`` and by what was in
it; when it is brought back, the original is filled in place where it still stands where it stood, and made anew
where it does not.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, Final
from weakref import ref

from oomdoctor.objects.containers import builtin_of, items_of, refill
from oomdoctor.objects.kinds import Kind, kind_of, module_of


class _Gone:
    """Stands for a value that was held weakly and died."""

    def __repr__(self) -> str:
        return "<released>"


GONE: Final = _Gone()


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


class Recipe:
    """What a container held.

    Attributes:
        original: the container itself; where it has heavy items a ``Weak``, or None if it can be made anew and is
            known by ``ident`` alone.
        keys, values: those of a mapping, indices and items of the others, held in their turn. Two lists: the garbage
            collector would go through a tuple for each.
        is_long: whether it is too long for them; see ``Long``.
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
        value = living(self.original)
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
            items = (revive(item, None, memo) for item in held.values)
            memo[held.ident] = tuple.__new__(held.cls, items) if target is None else target
        else:
            memo[held.ident] = target = _empty(held) if target is None else target
            fill(target, held, memo)
    return memo[held.ident]


def still_holds(container: Any, recipe: Recipe) -> bool:
    """Return whether a container holds the very items that ``recipe`` says; of long ones it is not asked."""
    if recipe.is_long:
        return True
    now = _pairs(container)
    return len(now) == len(recipe.values) and all(
        _is_what(held, item) and (type(key) is str or _is_what(key, own) or type(own) is int)
        for (own, item), (key, held) in zip(now, recipe.pairs, strict=True)
    )


def _is_what(held: Any, item: Any) -> bool:
    if type(held) is Recipe:
        return held.ident == id(item) and still_holds(item, held)
    return living(held) is item


def _pairs(container: Any) -> list[tuple[Any, Any]]:
    """Return key or index and item of each, of an ordered mapping in its own order."""
    kind = kind_of(type(container))
    if kind is Kind.MAPPING:
        return list(builtin_of(container).items(container))
    return list(enumerate(items_of(container, kind)))


def fill(target: Any, recipe: Recipe, memo: dict[int, Any]) -> None:
    """Bring ``target`` back, in place, to what ``recipe`` says; a container that has it already is not touched."""
    if recipe.is_long:
        return
    kind = kind_of(type(target))
    is_mapping, now = kind is Kind.MAPPING, _pairs(target)
    stood = {} if kind is Kind.SET else dict(now)
    pairs = [
        (key, revive(held, stood.get(key), memo))
        for key, held in ((revive(own, None, memo) if is_mapping else own, held) for own, held in recipe.pairs)
    ]
    if is_mapping:
        pairs = [(key, value) for key, value in pairs if key is not GONE]
    elif kind is Kind.SET:
        pairs = [(at, value) for at, value in pairs if value is not GONE]
    are_keys_same = not is_mapping or all(map(operator.is_, (key for key, _ in now), (key for key, _ in pairs)))
    items = [value for _, value in pairs]
    if len(now) != len(items) or not are_keys_same or not all(map(operator.is_, (item for _, item in now), items)):
        refill(target, dict(pairs) if is_mapping else items)


def attribute_path(path: str, name: object) -> str:
    """Return the path of an attribute."""
    return f"{path}.{name}"


def _item_path(path: str, key: Any) -> str:
    return f"{path}[{key!r}]" if type(key) in (str, int) else f"{path}[...]"


def _empty(recipe: Recipe) -> Any:
    cls = recipe.cls
    if cls is defaultdict:
        return defaultdict(recipe.factory)
    return cls() if module_of(cls) in ("builtins", "collections") else {} if issubclass(cls, dict) else []

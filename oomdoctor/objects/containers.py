"""Builtin containers: how each kind is read, compared and filled again, by the methods of its builtin base.

A class of the user's that is derived from one may answer itself, and is not asked. Mappings are read in the order of
their ``dict``; where the order of an ``OrderedDict`` matters its own methods are asked, which may hash a key.

A snapshot holds heavy values weakly and containers by a recipe. Were it to hold a container, it would hold what the
container holds, and a cell that replaces a list of outputs would no longer free the old ones. So a container with heavy
items is known by its ``id`` and by what was in it; when it is brought back, the original is filled in place where it
still stands where it stood, and made anew where it does not.
"""

from __future__ import annotations

import inspect
import operator
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from types import FrameType, FunctionType, GeneratorType
from typing import Any, Final, cast
from weakref import ref

from oomdoctor.objects.kinds import Kind, kind_of, module_of

CONTAINERS: Final = frozenset({Kind.MAPPING, Kind.SEQUENCE, Kind.SET, Kind.TUPLE})
LIGHT_TYPES: Final = frozenset({int, float, str, bool, bytes, complex, type(None)})
"""Of values that lead to nothing else."""
REFILLED: Final = frozenset({dict, list, OrderedDict})
"""Containers that are as they were when they hold the same again."""
PLAIN_CONTAINERS: Final = REFILLED | {set}
_BASES: Final = (OrderedDict, dict, list, deque, set, frozenset, tuple)
_EXACT: Final[dict[int, Any]] = {id(base): base for base in _BASES}


def builtin_of(container: Any) -> Any:
    """Return the builtin base of a container, whose methods are asked in place of its own."""
    cls = type(container)
    return _EXACT.get(id(cls)) or next(base for base in _BASES if issubclass(cls, base))


def length_of(container: Any) -> int:
    """Return how many items a container has."""
    length: int = builtin_of(container).__len__(container)
    return length


def items_of(container: Any, kind: Kind, most: int | None = None) -> Sequence[Any]:
    """Return what a container holds, of a mapping its values; the first ``most`` of them."""
    if kind is Kind.TUPLE:
        return tuple.__getitem__(container, slice(most))
    if kind is Kind.MAPPING:
        return list(islice(dict.values(container), most))
    if kind is Kind.SET:
        base: Any = frozenset if issubclass(type(container), frozenset) else set
        return list(islice(base.__iter__(container), most))
    if issubclass(type(container), list):
        return list.__getitem__(container, slice(most))
    return list(islice(deque.__iter__(container), most))


def pairs_of(container: Any, kind: Kind, most: int | None = None) -> list[tuple[Any, Any]]:
    """Return ``(key, value)`` of a mapping, ``(index, item)`` of the others; the first ``most`` of them."""
    if kind is Kind.MAPPING:
        return list(islice(dict.items(container), most))
    return list(enumerate(items_of(container, kind, most)))


class SetCopy:
    """What a set held, in its order, and how large its table was: both tell in which order it goes on."""

    def __init__(self, original: set[Any]) -> None:
        self.items, self.size = tuple(set.__iter__(original)), set.__sizeof__(original)

    def lost(self) -> Iterator[str]:
        """Yield a sentence if a set that is filled anew has another order, or goes on in another."""
        anew = set(self.items) if not self.items else {*self.items}
        if tuple(anew) != self.items or set.__sizeof__(anew) != self.size:
            yield f"a set of {len(self.items)} items was changed, and its order cannot be brought back"


def copied(container: Any) -> Any:
    """Return what a container that can be changed holds, as ``holds`` and ``refill`` take it: no copy of its class."""
    base = builtin_of(container)
    if base is set:
        return SetCopy(container)
    if issubclass(base, dict):  # not ``dict.copy``, which asks a class of the user's that iterates by itself
        return dict(base.items(container))
    return list(base.__iter__(container))


def holds(container: Any, copy: Any) -> bool:
    """Return whether a container holds the very things that a copy says, in the same order."""
    base = builtin_of(container)
    before = copy.items if type(copy) is SetCopy else copy
    if base.__len__(container) != len(before) or not all(map(operator.is_, base.__iter__(container), before)):
        return False
    return not isinstance(copy, dict) or all(map(operator.is_, base.values(container), copy.values()))


def refill(container: Any, copy: Any) -> None:
    """Have a container hold what a copy says, in place."""
    base = builtin_of(container)
    base.clear(container)
    if isinstance(copy, dict):
        for key, value in copy.items():
            base.__setitem__(container, key, value)
    elif base is set:
        set.update(container, copy.items if type(copy) is SetCopy else copy)
    else:
        base.extend(container, copy)


def is_light(container: Any) -> bool:
    """Return whether a plain container holds nothing but numbers and text."""
    if isinstance(container, dict) and not LIGHT_TYPES.issuperset(map(type, container.values())):
        return False
    return LIGHT_TYPES.issuperset(map(type, container))


GONE: Final[Any] = object()
"""Stands for a value that was held weakly and died."""


class Weak(ref[Any]):
    """A value that its owner alone keeps alive."""

    __slots__ = ()
    is_light = False

    def get(self) -> Any:
        """Return the value, ``GONE`` if it died."""
        value = self()
        return GONE if value is None else value


def weak(value: Any) -> Any:
    """Return ``value`` held weakly, or as it is where its class allows no weak references."""
    try:
        return Weak(value)
    except TypeError:
        return value


class Remade:
    """A value that may be made anew where it is gone, or is not as it was; if it is light its holder may be held."""

    __slots__ = ()
    is_light = False

    def get(self) -> Any:
        """Return what stands for it now, ``GONE`` if there is nothing."""
        raise NotImplementedError

    def revive(self, memo: dict[int, Any] | None) -> Any:
        """Return it as it was, made anew if it must be; ``memo`` has what was brought back so far."""
        del memo
        return self.get()


class Unbegun(Remade):
    """A generator that has not begun: it can be made anew from its code and its arguments, held in their turn.

    Where it was advanced, the containers and objects that held it are given another one; so nothing else may hold it.
    """

    __slots__ = ("_code", "_globals", "_ident", "_name", "_others", "_weak", "arguments", "path", "uses")

    def __init__(self, generator: GeneratorType[Any, Any, Any], path: str) -> None:
        self._weak, self._ident, self.path, self.uses = Weak(generator), id(generator), path, 1
        self._code, self._globals = generator.gi_code, cast("FrameType", generator.gi_frame).f_globals
        self._name, self._others = generator.__name__, 0
        self.arguments: dict[str, Any] = {}

    def count(self) -> None:
        """Note, when all was looked at, how many references there are that were not met."""
        self._others = sys.getrefcount(self.get()) - self.uses - 1

    def get(self) -> Any:
        """Return the generator that stands for it now, ``GONE`` if it died."""
        return self._weak.get()

    def revive(self, memo: dict[int, Any] | None) -> Any:
        """Return it as it was, made anew if it has begun."""
        value = self.get()
        if memo is None or is_unbegun(value):
            return value
        if -self._ident not in memo:
            given = {name: revive(held, None, memo) for name, held in self.arguments.items()}
            if any(one is GONE for one in given.values()):
                return GONE
            plain = [given.pop(name) for name in self._code.co_varnames[: self._code.co_argcount]]
            memo[-self._ident] = FunctionType(self._code, self._globals, self._name)(*plain, **given)
        made = memo[-self._ident]
        self._weak, self._ident = Weak(made), id(made)
        memo[-self._ident] = made
        return made

    def lost(self) -> Iterator[str]:
        """Yield why it cannot be made anew."""
        if self._others and not is_unbegun(self.get()):
            yield f"`{self.path}` is a generator that the cell has advanced, and that something unseen holds as well"


def is_unbegun(value: Any) -> bool:
    """Return whether it is a generator that has not begun, of a function that can be called again as it was.

    What it is given to go through may advance, as of an expression: then it cannot.
    """
    if type(value) is not GeneratorType or inspect.getgeneratorstate(value) != inspect.GEN_CREATED:
        return False
    code = value.gi_code
    is_plain = not code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS) and not code.co_freevars
    given = cast("FrameType", value.gi_frame).f_locals.values()
    return is_plain and not code.co_cellvars and all(kind_of(type(one)) is not Kind.ITERATOR for one in given)


LIGHT_BYTES: Final = 64 << 10
"""Contents of so many bytes are copied before every cell."""


def is_small_array(value: Any) -> bool:
    """Return whether a value is an array that no more than ``LIGHT_BYTES`` live or die with, its own or another's."""
    owner = value if kind_of(type(value)) is not Kind.ARRAY or value.base is None else value.base
    return kind_of(type(owner)) is Kind.ARRAY and owner.base is None and owner.nbytes <= LIGHT_BYTES


_HOLDERS: Final = (Weak, Remade)


def living(held: Any) -> Any:
    """Return the value that is held weakly or as it is, ``GONE`` if it died."""
    return held.get() if issubclass(type(held), _HOLDERS) else held


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
            (issubclass(type(held), _HOLDERS) and not held.is_light)
            or (type(held) is Recipe and (held.original is None or type(held.original) is Weak))
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

    ``current`` stands now where the value stood. ``memo`` has the containers brought back so far, by ``id``; without it
    nothing is changed, and a container is returned as is.
    """
    if type(held) is Weak:
        return held.get()
    if issubclass(type(held), Remade):
        return held.revive(memo)
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


attribute_path: Final[Callable[[str, Any], str]] = "{}.{}".format
"""Return the path of an attribute."""


def _item_path(path: str, key: Any) -> str:
    return f"{path}[{key!r}]" if type(key) in (str, int) else f"{path}[...]"


def _empty(recipe: Recipe) -> Any:
    cls = recipe.cls
    if cls is defaultdict:
        return defaultdict(recipe.factory)
    return cls() if module_of(cls) in ("builtins", "collections") else {} if issubclass(cls, dict) else []

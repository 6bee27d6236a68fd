"""Builtin containers: how each kind is read, compared and filled again, by the methods of its builtin base.

A class of the user's that is derived from one may answer itself, and is not asked. Mappings are read in the order of
their ``dict``; where the order of an ``OrderedDict`` matters its own methods are asked, which may hash a key.
"""

from __future__ import annotations

import operator
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Final

from oomdoctor.model.session import Kind

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

    __slots__ = ("items", "size")

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


class Light:
    """Plain containers of numbers and text, copied as they are: what they hold leads to nothing else of any size."""

    def __init__(self) -> None:
        # Two lists: the garbage collector would go through a tuple for each.
        self._containers: list[Any] = []
        self._copies: list[Any] = []

    def add(self, container: Any) -> None:
        """Add a container of which ``is_light`` is true."""
        self._containers.append(container)
        self._copies.append(SetCopy(container) if type(container) is set else container.copy())

    def absorb(self, other: Light) -> None:
        """Take the containers of another one as well."""
        self._containers += other._containers
        self._copies += other._copies

    def changed(self) -> Iterator[tuple[Any, Any]]:
        """Yield each container that holds something else now, or in another order, with its copy."""
        both = zip(self._containers, self._copies, strict=True)
        return ((container, copy) for container, copy in both if not holds(container, copy))

    def lost(self) -> Iterator[str]:
        """Yield a sentence for each set that cannot be filled again as it was."""
        for _, copy in self.changed():
            yield from copy.lost() if type(copy) is SetCopy else ()

"""Containers of numbers and text: copied as they are before every cell, and filled again in place.

What they hold leads to nothing else, so a copy keeps nothing alive that is of any size.
"""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain, islice
from typing import Any, Final

__all__ = ["LIGHT_TYPES", "REFILLED", "Light", "SetCopy", "is_light"]

LIGHT_TYPES: Final = frozenset({int, float, str, bool, bytes, complex, type(None)})
"""Of values that lead to nothing else."""
REFILLED: Final = frozenset({dict, list, OrderedDict})
"""Containers that are as they were when they hold the same again."""


def is_light(container: Any) -> bool:
    """Return whether a plain container holds nothing but numbers and text."""
    if isinstance(container, dict) and not LIGHT_TYPES.issuperset(map(type, container.values())):
        return False
    return LIGHT_TYPES.issuperset(map(type, container))


class SetCopy:
    """What a set held, in its order, and how large its table was: both tell in which order it goes on."""

    __slots__ = ("items", "size")

    def __init__(self, original: set[Any]) -> None:
        self.items, self.size = tuple(set.__iter__(original)), set.__sizeof__(original)

    def is_rebuilt_alike(self) -> bool:
        """Return whether a set that is filled anew has the same order, and goes on in the same."""
        anew = set(self.items) if not self.items else {*self.items}
        return tuple(anew) == self.items and set.__sizeof__(anew) == self.size


class Light:
    """Plain containers of numbers and text, and what each of them held when it was added."""

    def __init__(self) -> None:
        self._empty: list[Any] = []
        self._containers: list[Any] = []
        self._copies: list[Any] = []
        self._lists: list[list[Any]] = []
        self._items: list[Any] = []
        self._lengths: list[int] = []

    def add_lists(self, lists: list[list[Any]]) -> list[list[Any]]:
        """Add those lists that are light; return the others.

        All are copied into one: a copy of each, and to ask each for its types, takes three times as long, and the
        garbage collector goes through copies of their own.
        """
        items = list(chain.from_iterable(lists))
        heavy: list[list[Any]] = []
        if not LIGHT_TYPES.issuperset(map(type, items)):
            heavy = [one for one in lists if not is_light(one)]
            others = set(map(id, heavy))
            lists = [one for one in lists if id(one) not in others]
            items = list(chain.from_iterable(lists))
        self._lists += lists
        self._items += items
        self._lengths += map(len, lists)
        return heavy

    def absorb(self, other: Light) -> None:
        """Take the containers of another one as well."""
        for name, own in vars(self).items():
            own += vars(other)[name]

    def add_empty(self, container: Any) -> None:
        """Add a container of one of ``REFILLED`` that holds nothing: every module has a dozen of them."""
        self._empty.append(container)

    def add(self, container: Any) -> None:
        """Add a container of which ``is_light`` is true."""
        self._containers.append(container)
        if type(container) is set:
            self._copies.append(SetCopy(container))
        else:
            self._copies.append(container.copy() if type(container) in REFILLED else container[:])

    def changed(self) -> Iterator[Any]:
        """Yield each container that holds something else now, or in another order."""
        return (container for container, _ in self._changed())

    def lost(self) -> Iterator[str]:
        """Yield a sentence for each set that cannot be filled again as it was."""
        for _, copy in self._changed():
            if type(copy) is SetCopy and not copy.is_rebuilt_alike():
                yield f"a set of {len(copy.items)} items was changed, and its order cannot be brought back"

    def pieces(self) -> Iterator[tuple[Any, Callable[[], None]]]:
        """Yield each container that holds something else now, with what fills it with what it held."""
        yield from ((container, partial(_fill, container, copy)) for container, copy in self._changed())

    def _changed(self) -> Iterator[tuple[Any, Any]]:
        both = zip(self._containers, self._copies, strict=True)
        yield from ((one, copy) for one, copy in chain(self._pairs(), both) if not _is_same(one, copy))
        yield from ((one, type(one)()) for one in self._empty if one)

    def _pairs(self) -> Iterable[tuple[list[Any], list[Any]]]:
        items = iter(self._items)
        return ((one, list(islice(items, n))) for one, n in zip(self._lists, self._lengths, strict=True))


def _fill(container: Any, copy: Any) -> None:
    if isinstance(container, (dict, set)):
        container.clear()
        container.update(copy.items if type(copy) is SetCopy else copy)
    else:
        container[:] = copy


def _is_same(container: Any, copy: Any) -> bool:
    """Return whether a container holds what it held when it was copied, in the same order."""
    if type(copy) is SetCopy:
        return len(container) == len(copy.items) and all(map(operator.is_, container, copy.items))
    if isinstance(container, dict):
        return len(container) == len(copy) and all(
            a is c and b is d for (a, b), (c, d) in zip(container.items(), copy.items(), strict=True)
        )
    return len(container) == len(copy) and all(map(operator.is_, container, copy))

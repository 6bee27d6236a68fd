"""What is alive of some classes, as the garbage collector knows it, and tensors that are not the program's.

Those are oomdoctor's own, such as copies for the way back.
"""

from __future__ import annotations

import gc
from itertools import chain, compress, repeat, starmap
from typing import Any, Final
from weakref import ref

_MOST_TYPES: Final = 40
"""To search for what refers to one of so many types costs less than a list of all objects; to more, more."""
_MADE_AT_RUN_TIME: Final = 1 << 9
"""``Py_TPFLAGS_HEAPTYPE``. Source: Include/object.h of CPython."""
_flags: Final = vars(type)["__flags__"].__get__


def alive(*roots: type) -> list[Any]:
    """Return every object of the classes ``roots`` and of those below them; none is asked."""
    return alive_exactly(*{id(cls): cls for root in roots for cls in classes_below(root)}.values())


def alive_exactly(*classes: type) -> list[Any]:
    """Return every object of exactly these classes; none is asked."""
    # By their ``id``: as members of a set, types ask their metaclass for ``__hash__``.
    keys = frozenset(map(id, classes))
    # An object refers to its class if that was made at run time, as those of tensors were.
    is_told = len(classes) <= _MOST_TYPES and all(_flags(cls) & _MADE_AT_RUN_TIME for cls in classes)
    # Among all objects are tuples that other threads are making, which nobody else may hold. The interpreter lets those
    # threads run on between any two calls, so from the list of all to its end this is a single one.
    listed = starmap(gc.get_referrers, [classes]) if is_told else starmap(gc.get_objects, [()])
    twice = chain.from_iterable(map(repeat, listed, [2]))
    kinds = map(map, [id], map(map, [type], twice))
    return list(chain.from_iterable(map(compress, twice, map(map, [keys.__contains__], kinds))))


def classes_below(root: type) -> tuple[type, ...]:
    """Return ``root`` and every class below it that exists now, so that objects can be told by their exact type."""
    found: dict[int, type] = {}
    todo: list[type] = [root]
    while todo:
        cls = todo.pop()
        if id(cls) not in found:
            found[id(cls)] = cls
            todo += type.__subclasses__(cls)
    return tuple(found.values())


_kept: dict[int, ref[Any]] = {}


def keep_apart(tensor: Any) -> None:
    """Have ``tensor`` left out of every count of the program's memory, as long as it lives."""
    key, kept = id(tensor), _kept  # a name of this module is None already when tensors die with the interpreter
    kept[key] = ref(tensor, lambda _: kept.pop(key, None))


def is_apart(tensor: Any) -> bool:
    """Return whether ``tensor`` is kept apart."""
    return id(tensor) in _kept


def without_apart(tensors: list[Any]) -> list[Any]:
    """Return those of ``tensors`` that are the program's."""
    return [tensor for tensor in tensors if id(tensor) not in _kept] if _kept else tensors

"""Objects of other libraries: what the cell changed in their attributes is put back, or told where it cannot be.

Their attributes are held weakly and compared by identity. What they keep in C is not seen, but for the few kinds that
are copied here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, Final, NamedTuple

from oomdoctor.objects.containers import CONTAINERS, LIGHT_TYPES, is_light, items_of, length_of
from oomdoctor.objects.kinds import Kind, kind_of, module_of, plain_dict
from oomdoctor.objects.mementos import Code, Memento
from oomdoctor.objects.recipes import GONE, Weak, living, weak

_COPIED: Final = (list, dict, set)
_FEW: Final = 20_000
_SHORT: Final = 256
_FRAME_CELLS: Final = 1 << 22


class _Standing(NamedTuple):
    """A container known by where it stood and how long it was: to hold it would keep alive what it holds."""

    ident: int
    length: int
    items: tuple[int, ...] | None


def _standing(value: Any) -> _Standing | None:
    kind = kind_of(type(value))
    if kind not in CONTAINERS:
        return None
    length = -1 if kind is Kind.TUPLE else length_of(value)
    return _Standing(id(value), length, tuple(map(id, items_of(value, kind))) if 0 <= length <= _SHORT else None)


class Foreign(Memento):
    """The attributes of one object.

    Args:
        value: the object. attributes: its ``__dict__``.
        path: what the user calls it.
    """

    __slots__ = ("_held", "_values")

    def __init__(self, value: Any, attributes: dict[str, Any], path: str) -> None:
        self.path = path
        self._held = _held(value)
        self._values = {name: _held(item) for name, item in attributes.items()}

    def _changes(self) -> Iterator[tuple[dict[str, Any], str, Any]]:
        """Yield the ``__dict__``, and name and old value of each attribute that is another one now."""
        owner = living(self._held)
        now = plain_dict(owner) if owner is not GONE else None
        if now is None:
            return
        for name, held in self._values.items():
            item = now.get(name, GONE)
            if type(held) is _Standing:
                if _standing(item) != held:
                    yield now, name, GONE
            elif item is not (old := living(held)):
                yield now, name, old

    def lost(self, code: Code) -> Iterator[str]:
        """Yield a sentence for each attribute that cannot be put back."""
        for _, name, old in self._changes():
            if old is GONE:
                yield f"`{self.path}.{name}` was changed by the cell, and cannot be put back"

    def restore(self, memo: dict[int, Any]) -> None:
        """Put the attributes back that can be, and take away those that are new."""
        for now, name, old in list(self._changes()):
            if old is not GONE:
                now[name] = old
        owner = living(self._held)
        now = (plain_dict(owner) if owner is not GONE else None) or {}
        for name in [name for name in now if name not in self._values]:
            del now[name]


def _held(value: Any) -> Any:
    if type(value) in LIGHT_TYPES:
        return value
    if kind_of(type(value)) in CONTAINERS:
        is_copied = type(value) in _COPIED and len(value) <= _FEW and is_light(value)
        return value if is_copied else _standing(value)
    return weak(value)


class Frame(Memento):
    """A pandas frame or series: one that shares its columns until either is written to (copy on write)."""

    __slots__ = ("_attrs", "_copy", "_held")

    def __init__(self, value: Any, path: str) -> None:
        self._held, self.path = Weak(value), path
        self._copy = value.copy(deep=False)
        self._attrs = dict(value.attrs)

    def objects(self) -> Iterator[Any]:
        """Yield what a column of objects holds, beside numbers and text."""
        for block in self._copy._mgr.blocks:
            values = block.values
            if getattr(values.dtype, "kind", "") == "O" and hasattr(values, "flat"):
                yield from (item for item in values.flat if type(item) not in LIGHT_TYPES)

    def restore(self, memo: dict[int, Any]) -> None:
        """Let the frame have the columns that it had."""
        value = self._held.get()
        if value is not GONE:
            object.__setattr__(value, "_mgr", self._copy.copy(deep=False)._mgr)
            value.attrs.clear()
            value.attrs.update(self._attrs)


class Cached(Memento):
    """A function of the user's that remembers results by ``lru_cache``: what it remembers is not seen."""

    __slots__ = ("_function", "_info")

    def __init__(self, function: Any, path: str) -> None:
        self._function, self.path = function, path
        self._info = _LRU.cache_info(function)

    def lost(self, code: Code) -> Iterator[str]:
        """Yield a sentence if results were added or dropped that it cannot be rid of."""
        now = _LRU.cache_info(self._function)
        moved = (now.misses, now.currsize) != (self._info.misses, self._info.currsize)
        if self._info.currsize and (moved or (now.hits != self._info.hits and now.currsize == now.maxsize)):
            yield f"`{self.path}` remembers other results than before, and cannot be wound back"

    def restore(self, memo: dict[int, Any]) -> None:
        """Let it remember nothing again, if it remembered nothing."""
        if not self._info.currsize and _LRU.cache_info(self._function) != self._info:
            _LRU.cache_clear(self._function)


def is_cached(cls: type) -> bool:
    """Return whether a class is that of ``functools.lru_cache``, made in C."""
    return cls is _LRU


_LRU: Final[Any] = type(lru_cache(abs))


def is_frame(value: Any) -> bool:
    """Return whether it is a pandas frame or series, not too large, of a pandas that copies on write: 3 and later."""
    cls = type(value)
    if module_of(cls) not in ("pandas", "pandas.core.frame", "pandas.core.series"):
        return False
    if cls.__name__ not in ("DataFrame", "Series") or value.size > _FRAME_CELLS:
        return False
    return int(vars(sys.modules["pandas"])["__version__"].split(".")[0]) >= 3

"""Objects of other libraries: what the cell changed in their attributes is put back, or told where it cannot be.

Their attributes are held weakly and compared by identity. What they keep in C is not seen, but for the few kinds that
are copied here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, Final

from oomdoctor.model.kinds import Kind, kind_of, plain_dict
from oomdoctor.retry.held import GONE, LIGHT_TYPES, Weak, is_light, living

__all__ = ["Foreign", "Frame", "is_frame"]

_CONTAINERS: Final = frozenset({Kind.MAPPING, Kind.SEQUENCE, Kind.SET, Kind.TUPLE})
_LENGTHS: Final = (list, dict, set)
_FEW: Final = 20_000
_FRAME_CELLS: Final = 1 << 22


class _Standing:
    """A container known by where it stood and how long it was: to hold it would keep alive what it holds."""

    __slots__ = ("ident", "length")

    def __init__(self, value: Any) -> None:
        self.ident = id(value)
        self.length = len(value) if type(value) in _LENGTHS else -1

    def is_still(self, value: Any) -> bool:
        return id(value) == self.ident and (self.length < 0 or len(value) == self.length)


class Foreign:
    """The attributes of one object.

    Args:
        value: the object. attributes: its ``__dict__``.
        path: what the user calls it.
    """

    __slots__ = ("_held", "_path", "_values")

    def __init__(self, value: Any, attributes: dict[str, Any], path: str) -> None:
        self._path = path
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
                if not held.is_still(item):
                    yield now, name, GONE
            elif item is not (old := living(held)):
                yield now, name, old

    def lost(self) -> Iterator[str]:
        """Yield a sentence for each attribute that cannot be put back."""
        for _, name, old in self._changes():
            if old is GONE:
                yield f"`{self._path}.{name}` was changed by the cell, and cannot be put back"

    def restore(self) -> None:
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
    if kind_of(type(value)) in _CONTAINERS:
        is_copied = type(value) in _LENGTHS and len(value) <= _FEW and is_light(value)
        return value if is_copied else _Standing(value)
    try:
        return Weak(value)
    except TypeError:  # its class allows no weak references: slots, or made in C
        return value


class Frame:
    """A pandas frame or series: one that shares its columns until either is written to (copy on write)."""

    __slots__ = ("_copy", "_held")

    def __init__(self, value: Any) -> None:
        self._held = Weak(value)
        self._copy = value.copy(deep=False)

    def restore(self) -> None:
        """Let the frame have the columns that it had."""
        value = self._held.get()
        if value is not GONE:
            object.__setattr__(value, "_mgr", self._copy.copy(deep=False)._mgr)


def is_frame(value: Any) -> bool:
    """Return whether it is a pandas frame or series, not too large, of a pandas that copies on write: 3 and later."""
    cls = type(value)
    if cls.__module__ not in ("pandas", "pandas.core.frame", "pandas.core.series"):
        return False
    if cls.__name__ not in ("DataFrame", "Series") or value.size > _FRAME_CELLS:
        return False
    return int(vars(sys.modules["pandas"])["__version__"].split(".")[0]) >= 3

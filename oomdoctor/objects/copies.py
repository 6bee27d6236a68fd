"""Copies of what is too large to be looked into before every cell, long containers and large arrays, and of buffers.

A long container is copied, not what lies in its items, while there are not too many of them together, or where the
cell's text writes into it. Of its items a trace is kept: attributes, lengths and versions. A large array is copied, or
a checksum of it taken. Of the rest it is told when code that the cell reaches writes into a thing of that name.
"""

from __future__ import annotations

import operator
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from oomdoctor.errors import StateError
from oomdoctor.objects.containers import (
    GONE,
    LIGHT_BYTES,
    LIGHT_TYPES,
    REFILLED,
    Remade,
    SetCopy,
    Weak,
    copied,
    holds,
    items_of,
    length_of,
    living,
    refill,
)
from oomdoctor.objects.kinds import Kind, kind_of, plain_dict
from oomdoctor.objects.mementos import Code, Memento

LONG: Final = 20_000
_MOST_COPIED: Final = 1 << 18
"""How many items of long containers are copied before a cell, whatever it writes into."""
_SUMMED_BYTES: Final = 4 << 20
"""An array of so many bytes is looked at as a whole whatever the cell writes into, a larger one where it may."""
_MOST_SUMMED_BYTES: Final = 256 << 20
_MOST_COPIED_BYTES: Final = 8 << 20
"""How much of larger arrays is copied before a cell, of those that are looked at as a whole."""
_COPIED_KINDS: Final = frozenset("biufcSUmM")
"""Sorts of NumPy's dtypes that have no gaps between their fields."""
_SAMPLES: Final = 4096
_LOOKED_AT: Final = 64
_HEAVY: Final = frozenset({Kind.TENSOR, Kind.MODULE, Kind.OPTIMIZER, Kind.ARRAY})


@dataclass(slots=True)
class Allowance:
    """How much of what is large may be copied before a cell, whose text ``may_write`` into what a path leads to."""

    may_write: Callable[[str], bool]
    _left: int = _MOST_COPIED
    _bytes_left: int = _MOST_COPIED_BYTES

    def copies(self, path: str, length: int) -> bool:
        """Return whether a container of this length is copied, and count it."""
        if length <= self._left:
            self._left -= length
            return True
        return self.may_write(path)

    def copies_bytes(self, size: int) -> bool:
        """Return whether an array of this many bytes that is looked at as a whole is copied, and count it."""
        if size > self._bytes_left:
            return False
        self._bytes_left -= size
        return True

    def sums(self, path: str, size: int) -> bool:
        """Return whether the whole of an array of this many bytes is looked at."""
        return size <= _SUMMED_BYTES or (size <= _MOST_SUMMED_BYTES and self.may_write(path))


class Long(Memento):
    """A container, or an array of objects, of more than ``LONG`` items."""

    def __init__(self, container: Any, path: str, allowance: Allowance) -> None:
        self._container, self.path = container, path
        self._kind = kind_of(type(container))
        self._length = self._size()
        first = items_of(container, self._kind, _LOOKED_AT) if not self._is_array else container.flat[:_LOOKED_AT]
        # A copy of those would keep alive what the cell replaces to make room.
        is_heavy = any(kind_of(type(item)) in _HEAVY for item in first)
        is_copied = not is_heavy and allowance.copies(path, self._length)
        self._copy: Any = None if not is_copied else container.copy() if self._is_array else copied(container)
        self._trace = _trace(self._items()) if self._length <= _MOST_COPIED else None

    @property
    def _is_array(self) -> bool:
        return self._kind is Kind.ARRAY

    def _size(self) -> int:
        return int(self._container.size) if self._is_array else length_of(self._container)

    def lost(self, code: Code) -> Iterator[str]:
        """Yield a sentence if it was changed and cannot be put back, or if what lies in its items may have been."""
        is_same, length, writes = self._is_same(), self._size(), code.writes(self.path)
        has_only_grown = self._kind is Kind.SEQUENCE and length >= self._length
        if self._copy is None and (writes or not (has_only_grown or length == self._length)):
            yield f"`{self.path}` has more than {LONG} items, and the cell may have changed them"
        elif is_same and self._trace is not None and _trace(self._items()) != self._trace:
            yield f"`{self.path}` has more than {LONG} items, and the cell has changed what lies in them"
        elif self._copy is not None and writes and not all(map(_is_fixed, self._items_before())):
            yield f"`{self.path}` has more than {LONG} items, and the cell may have changed what lies in them"
        elif type(self._copy) is SetCopy and not is_same:
            yield from self._copy.lost()

    def _items(self) -> Iterable[Any]:
        if self._is_array:
            return self._container.flat  # type: ignore[no-any-return]
        return () if self._kind is Kind.SET else items_of(self._container, self._kind)

    def _items_before(self) -> Iterable[Any]:
        if self._is_array:
            return self._copy.flat  # type: ignore[no-any-return]
        if self._kind is Kind.MAPPING:
            return self._copy.values()  # type: ignore[no-any-return]
        return () if type(self._copy) is SetCopy else self._copy

    def _is_same(self) -> bool:
        """Return whether it holds what it held, as far as was kept."""
        if self._copy is None:
            return self._is_array or self._size() == self._length
        if self._is_array:
            return all(map(operator.is_, self._container.flat, self._copy.flat))
        return holds(self._container, self._copy)

    def changed(self) -> str | None:
        """Return whether it holds other things."""
        return None if self._is_same() else f"changed `{self.path}`"

    def restore(self, memo: dict[int, Any]) -> None:
        """Put back what was kept; what was added to a list that was not copied is taken away."""
        if self._is_same():
            return
        if self._is_array:
            self._container[...] = self._copy
        elif self._copy is not None:
            refill(self._container, self._copy)
        elif self._kind is Kind.SEQUENCE:
            refill(self._container, items_of(self._container, self._kind, self._length))


def _is_fixed(item: Any) -> bool:
    """Return whether nothing lies in an item that may change."""
    return type(item) in LIGHT_TYPES or (type(item) is tuple and all(map(_is_fixed, item)))


def _trace(items: Iterable[Any]) -> int:
    """Return a number that is another one where attributes of items, their length or a tensor's version changed."""
    trace = 0
    for item in items:
        cls = type(item)
        if cls in LIGHT_TYPES:
            continue
        if cls in REFILLED:
            sign: Any = len(item)
        elif (kind := kind_of(cls)) is Kind.TENSOR:
            sign = item._version
        elif kind is Kind.TUPLE or (attributes := plain_dict(item)) is None:
            continue
        else:
            sign = tuple([value if type(value) in LIGHT_TYPES else id(value) for value in attributes.values()])
        trace = hash((trace, sign))
    return trace


class Copied(Remade):
    """A plain array of numbers that a copy stands for where it is gone: nothing held it that could tell them apart.

    To hold the array itself would be seen by what refers to it weakly, such as a cache.
    """

    __slots__ = ("_made", "_weak", "copy")
    is_light = True

    def __init__(self, array: Any) -> None:
        self._weak, self.copy, self._made = Weak(array), array.copy(order="K"), None

    def get(self) -> Any:
        """Return the array that stands for it now, ``GONE`` if it died."""
        value = self._weak.get()
        return value if value is not GONE or self._made is None else self._made

    def revive(self, memo: dict[int, Any] | None) -> Any:
        """Return it, made anew if it died."""
        value = self.get()
        if value is not GONE or memo is None:
            return self.copy if value is GONE else value
        self._made = self.copy.copy(order="K")
        return self._made


class Contents(Memento):
    """What an array, a ``bytearray`` or an ``array.array`` holds: a copy, or a checksum where there is too much.

    Of what is too large for that, some of the contents are looked at. ``held`` tells how it is held.
    """

    def __init__(self, value: Any, held: Any, path: str, allowance: Allowance) -> None:
        self._held, self.path = held, path
        self._form, self._copy, self._sample = _form(value), None, b""
        is_array = hasattr(value, "flags")
        size = value.nbytes if is_array else memoryview(value).nbytes
        self._is_summed = not is_array or (
            allowance.sums(path, size) and (size <= _SUMMED_BYTES or value.flags.c_contiguous)
        )
        if type(held) is Copied:
            self._copy = held.copy
            return
        if size <= LIGHT_BYTES:
            is_copied = not (is_array and value.dtype.hasobject)
        else:
            is_copied = self._is_summed and _is_plain(value) and allowance.copies_bytes(size)
        if is_copied:
            self._copy = value.copy() if is_array else value[:]
        else:
            self._sample = _sample(value, is_whole=self._is_summed)

    def lost(self, code: Code) -> Iterator[str]:
        """Yield a sentence if it was given another form in place, or was written to without a copy."""
        value = living(self._held)
        if value is GONE:
            return
        if hasattr(value, "flags") and _form(value)[:-1] != self._form[:-1]:
            yield f"`{self.path}` is an array that was given another shape or type in place"
        elif self._copy is not None:
            return
        elif _sample(value, is_whole=self._is_summed) != self._sample:
            yield f"`{self.path}` is a large array that was written to, and no copy was kept"
        elif not self._is_summed and code.writes(self.path):
            yield f"`{self.path}` is a large array that the cell may have written to, and no copy was kept"

    def restore(self, memo: dict[int, Any]) -> None:
        """Put its items back where a copy was kept, and whether it may be written to."""
        value = living(self._held)
        if value is GONE or self._copy is None:
            return
        if not hasattr(value, "flags"):
            if self._was_written(value):
                value[:] = self._copy
        elif _form(value)[:-1] == self._form[:-1]:
            if self._was_written(value):
                with suppress(ValueError):  # its memory is another's, which has it back by itself
                    value.flags.writeable = True
                if value.flags.writeable:
                    value[...] = self._copy
                elif self._form[-1]:
                    raise StateError(f"`{self.path}` is an array that cannot be written to any more")
            if value.flags.writeable != self._form[-1]:
                with suppress(ValueError):
                    value.flags.writeable = self._form[-1]

    def changed(self) -> str | None:
        """Return whether what is copied was written to."""
        value = living(self._held)
        is_same = value is GONE or self._copy is None or not self._was_written(value)
        return None if is_same else f"changed a {type(value).__name__}"

    def _was_written(self, value: Any) -> bool:
        return _bytes(value) != _bytes(self._copy)


def may_be_copied(array: Any) -> bool:
    """Return whether a copy can stand for an array: it is plain, and its memory is its own."""
    return type(array).__name__ == "ndarray" and array.base is None and _is_plain(array)


def _is_plain(value: Any) -> bool:
    """Return whether a copy of an array, and what is written to it, is what its memory holds and nothing else."""
    if not hasattr(value, "flags"):
        return type(value).__module__ in ("builtins", "array")
    return _is_own(value) and value.flags.writeable and value.dtype.kind in _COPIED_KINDS


def _is_own(array: Any) -> bool:
    """Return whether an array is of NumPy's own kinds, which show all that they hold."""
    return type(array).__module__ == "numpy" and type(array).__name__ in ("ndarray", "memmap")


def _bytes(value: Any) -> bytes:
    return bytes(value.tobytes() if hasattr(value, "flags") else value)


def _form(value: Any) -> tuple[Any, ...]:
    """Return how the items of an array are laid out, and whether it may be written to; of others, nothing."""
    return (value.dtype, value.shape, value.strides, value.flags.writeable) if hasattr(value, "flags") else ()


def _sample(array: Any, *, is_whole: bool) -> bytes:
    """Return a checksum of an array, or some of its contents from its beginning to its end."""
    if not hasattr(array, "flags"):  # no array of numpy's
        return zlib.crc32(array).to_bytes(4)
    if not _is_own(array):  # what its own methods show may be less
        cls: Any = next(one for one in type(array).__mro__ if one.__name__ == "ndarray")
        mask = getattr(array, "_mask", None)
        masked = _sample(mask, is_whole=is_whole) if type(mask) is cls else b""
        return _sample(cls.view(array, cls), is_whole=is_whole) + masked
    if is_whole:
        is_in_one_piece = array.flags.c_contiguous and not array.dtype.hasobject
        return zlib.crc32(array.view("u1") if is_in_one_piece else array.tobytes()).to_bytes(4)
    flat = array.reshape(-1) if array.flags.c_contiguous else array.ravel("K") if array.flags.forc else array.flat
    return bytes(flat[:: max(1, array.size // _SAMPLES)].tobytes())

"""Where host memory goes that no tensor holds: NumPy arrays, byte strings, texts and the Python objects around them.

What a name of the program leads to is gone through breadth first, by what the garbage collector says that an object
refers to, so that tables of pandas and objects with slots are seen through as well. Each thing counts once, for the
first name that leads to it. No code of the user's is run: sizes are asked of builtin types and of arrays alone.

Limits: at most ``_MOST_OBJECTS`` are looked at. Memory that only C holds (PIL images, Arrow tables) has no size here;
that of a file which an array maps is page cache; that of a tensor is counted with the tensors.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable
from itertools import chain, compress, islice
from typing import Any, Final

from oomdoctor.model.memory import HostHolding
from oomdoctor.model.sizes import MIB
from oomdoctor.objects.frames import leads_nowhere
from oomdoctor.objects.held import elements_of
from oomdoctor.objects.kinds import Kind, kind_of

_MOST_OBJECTS: Final = 300_000
_AT_ONCE: Final = 10_000
_LISTED: Final = 5
_SIZED: Final = frozenset(map(id, (bytes, bytearray, str, int, float, complex, list, tuple, dict, set, frozenset)))
"""By their ``id``: builtin types whose size is told by the interpreter itself."""
_LEAVES: Final = frozenset(map(id, (bytes, bytearray, str, int, float, complex, bool, type(None))))
"""By their ``id``: builtin types that lead to nothing. Most names of a long notebook hold one of them."""
_OPEN: Final = frozenset({Kind.MAPPING, Kind.SEQUENCE, Kind.SET, Kind.TUPLE, Kind.OBJECT, Kind.LOADER, Kind.MODULE})
_ARRAYS: Final = frozenset({Kind.ARRAY})


def largest(names: Iterable[tuple[str, Any]], passed_over: frozenset[int] = frozenset()) -> tuple[HostHolding, ...]:
    """Return the names that lead to the most memory that is no tensor's, from a MiB on, the largest first.

    Args:
        passed_over: objects by their ``id`` that lead nowhere here.
    """
    search = _Search(set(passed_over))
    leading = (one for one in names if id(type(one[1])) not in _LEAVES or sys.getsizeof(one[1]) >= MIB)
    found = (search.below(name, value) for name, value in leading)
    return tuple(sorted(filter(None, found), key=lambda one: -one.bytes)[:_LISTED])


class _Search:
    """One search through several names. Short-lived."""

    def __init__(self, seen: set[int]) -> None:
        self._seen = seen
        self._left = _MOST_OBJECTS
        self._of_tensors: frozenset[int] | None = None

    def below(self, name: str, value: Any) -> HostHolding | None:
        """Return what hangs on one name and on none before it, None where that is less than a MiB."""
        own, in_arrays, arrays, objects = 0, 0, 0, 0
        level: list[Any] = [value]
        while level and self._left > 0:
            fresh = self._fresh(level)
            keys = list(map(id, map(type, fresh)))
            classes = dict(zip(keys, map(type, fresh), strict=True))
            sized = list(compress(fresh, map(_SIZED.__contains__, keys)))
            own += sum(map(sys.getsizeof, sized))
            objects += len(sized)
            met = list(compress(fresh, map(_keys(classes, _ARRAYS).__contains__, keys)))
            for size in map(self._of_array, met):
                in_arrays += size
                arrays += size > 0
            inner = {key for key in _keys(classes, _OPEN) if not leads_nowhere(classes[key])}
            level = gc.get_referents(*compress(fresh, map(inner.__contains__, keys)))
            level += chain.from_iterable(map(elements_of, met))
        size = own + in_arrays
        if size < MIB:
            return None
        return HostHolding(path=name, bytes=size, array_bytes=in_arrays, arrays=arrays, objects=objects)

    def _fresh(self, level: list[Any]) -> list[Any]:
        """Return those that were not met before, each once, as far as the budget goes, and note them."""
        fresh: list[Any] = []
        for first in range(0, len(level), _AT_ONCE):
            some = level[first : first + _AT_ONCE]
            by_id = dict(zip(map(id, some), some, strict=True))
            if not self._seen.isdisjoint(by_id):
                by_id = {key: one for key, one in by_id.items() if key not in self._seen}
            by_id = dict(islice(by_id.items(), self._left)) if len(by_id) > self._left else by_id
            self._seen.update(by_id)
            self._left -= len(by_id)
            fresh += by_id.values()
            if not self._left:
                break
        return fresh

    def _of_array(self, array: Any) -> int:
        """Return the bytes that an array keeps alive and nothing before it did, 0 where they are not its own."""
        told = vars(sys.modules["numpy"].ndarray)
        base_of = told["base"].__get__
        while (base := base_of(array)) is not None:
            if kind_of(type(base)) is not Kind.ARRAY:
                return 0  # a mapped file, a tensor, or a byte string that is counted by itself
            array = base
            if id(array) in self._seen:
                return 0
            self._seen.add(id(array))
        size = int(told["nbytes"].__get__(array))
        if size >= MIB and told["__array_interface__"].__get__(array)["data"][0] in self._tensors():
            return 0
        return size

    def _tensors(self) -> frozenset[int]:
        """Return where tensors of the host begin: ``torch.from_numpy`` makes one in the memory of an array."""
        torch: Any = sys.modules.get("torch")
        if torch is None:
            return frozenset()
        if self._of_tensors is None:
            from oomdoctor.objects.storages import PLAIN, begin_of

            plain = frozenset(map(id, PLAIN))
            ours = [one for one in gc.get_referrers(*PLAIN) if id(type(one)) in plain]
            self._of_tensors = frozenset(begin_of(one) for one in ours if one.is_cpu and one.layout is torch.strided)
        return self._of_tensors


def _keys(classes: dict[int, type], kinds: frozenset[Kind]) -> set[int]:
    return {key for key, cls in classes.items() if kind_of(cls) in kinds}

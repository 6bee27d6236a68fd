"""What a loop goes over: how many items there are, and how large those are that it would still get.

``zip``, ``enumerate`` and ``islice`` have no length, but what they go over often has. So in the shadow each of them
remembers it. What a step needs mostly grows with the item that it is given: a longer batch, a wider layer, more
samples. So of the items that are not followed the largest one stands for all. Nothing is taken from an iterator.

Limits: a ``zip`` that was made before the cell, or imported by name into a library; what is in objects of the user's
classes.
"""

from __future__ import annotations

import builtins
import itertools
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch.utils.data import DataLoader

_MOST_MEASURED: Final = 10_000
"""Items of a sequence that are measured, and parts of one item."""
_FEW: Final = 3
"""So many items whose size says nothing are followed besides: they may be the names of models that are compared."""
_VIEWS: Final[tuple[type, ...]] = (dict, type({}.items()), type({}.keys()), type({}.values()))


def length_of(iterable: Any) -> int | None:
    """Return how many items there are, None where that is not known."""
    try:
        return iterable.length if isinstance(iterable, _FOLLOWED) else len(iterable)
    except Exception:  # noqa: BLE001  a length of the user's may raise anything; the loop does not need one
        return None


def sources_of(iterable: Any) -> tuple[Any, ...]:
    """Return what an iterable takes its items from, side by side; nothing where that is not known."""
    shown = sys.modules.get("tqdm.std")  # a progress bar
    if shown is not None and isinstance(iterable, shown.tqdm):
        return (iterable.iterable,)
    sources: tuple[Any, ...] = getattr(iterable, "sources", ()) if isinstance(iterable, _FOLLOWED) else ()
    return sources


class _Zip(zip):  # type: ignore[type-arg]
    """``zip`` with a length: the least of those that are known; one without an end, as of ``count()``, says nothing."""

    def __init__(self, *iterables: Any, **_kwargs: Any) -> None:
        self.length = min((length for one in iterables if (length := length_of(one)) is not None), default=None)
        self.sources = iterables


class _Enumerate(enumerate):  # type: ignore[type-arg]
    """``enumerate`` with a length."""

    def __init__(self, iterable: Any, start: int = 0) -> None:
        self.length = length_of(iterable)
        self.sources = (range(start, start + (self.length or 0)), iterable)


class _Slice(itertools.islice):  # type: ignore[type-arg]
    """``itertools.islice`` with a length."""

    def __init__(self, iterable: Any, *bounds: Any) -> None:
        bound = slice(*bounds)
        ends = [count for count in (length_of(iterable), bound.stop) if count is not None]
        self.length = len(range(bound.start or 0, min(ends), bound.step or 1)) if ends else None


_FOLLOWED: Final = (_Zip, _Enumerate, _Slice)


def follow_lengths(namespace: dict[str, Any]) -> None:
    """Put those with a length in the place of Python's, for the rest of this process.

    Args:
        namespace: the user's, where names may have been imported.
    """
    kinds: tuple[tuple[Any, Any, Any], ...] = (
        *((builtins, zip, _Zip), (builtins, enumerate, _Enumerate)),
        (itertools, itertools.islice, _Slice),
    )
    for owner, plain, kind in kinds:
        setattr(owner, plain.__name__, kind)
        namespace.update({name: kind for name, value in namespace.items() if value is plain})


def size_of(item: Any) -> int:
    """Return how large an item is: samples, characters, elements, parameters; 0 where that is not known."""
    if isinstance(item, torch.Tensor):
        return item.numel()
    if isinstance(item, torch.nn.Module):
        return sum(parameter.numel() for parameter in item.parameters())
    if isinstance(item, DataLoader):
        return item.batch_size or 0
    if type(item) is int:
        return abs(item)
    if isinstance(item, (str, bytes, range)):
        return len(item)
    if isinstance(item, Mapping):
        return sum(map(size_of, item.values()))
    if isinstance(item, (list, tuple)):
        is_row = bool(item) and type(item[0]) in (int, float)
        return len(item) if is_row else sum(map(size_of, item[:_MOST_MEASURED]))
    arrays = sys.modules.get("numpy")
    return int(item.size) if arrays is not None and isinstance(item, arrays.ndarray) else 0


def ahead(iterable: Any, done: int, *, varies: bool) -> list[Any]:
    """Return items that may need more than those that a loop has followed.

    Args:
        iterable: what the loop goes over.
        done: how many were followed.
        varies: whether the last of them still made tensors of other sizes than those before.
    """
    items = _sequence(iterable)
    if items is None or not done < len(items):
        return []
    last = len(items) - 1
    if _counts(items):  # numbers in a row, of which the last is the largest
        return [items[last]] if varies else []
    sizes = [_told(items, index) for index in range(min(len(items), _MOST_MEASURED))]
    chosen = {last} if varies else set()
    if done == 1 and not any(sizes[: _FEW + 1]):
        chosen |= {*range(1, 1 + _FEW), last}
    largest = max(range(len(sizes)), key=sizes.__getitem__)
    if sizes[largest] > max(sizes[:done]):
        chosen.add(largest)
    return [items[index] for index in sorted(chosen) if done <= index <= last]


def is_known(iterable: Any) -> bool:
    """Whether it can be told what a loop would still go over."""
    return _sequence(iterable) is not None


class _Together(Sequence[Any]):
    """What ``zip`` makes of sequences."""

    def __init__(self, columns: Sequence[Sequence[Any]]) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return min(map(len, self.columns))

    def __getitem__(self, index: Any) -> Any:
        return tuple(column[index] for column in self.columns)


def _sequence(iterable: Any) -> Sequence[Any] | None:
    """Return what an iterable goes over as a sequence, without taking anything from it."""
    if isinstance(iterable, (list, tuple, range)):
        return iterable
    if type(iterable) in _VIEWS:
        return list(iterable)
    sources = sources_of(iterable)
    if not sources:
        return None
    columns = [column for source in sources if (column := _sequence(source)) is not None]
    if len(columns) < len(sources):
        return None
    return columns[0] if len(columns) == 1 else _Together(columns)


def _counts(items: Sequence[Any]) -> bool:
    return all(map(_counts, items.columns)) if isinstance(items, _Together) else isinstance(items, range)


def _told(items: Sequence[Any], index: int) -> int:
    """Return the size of an item; a counter that goes with it says nothing, nor does the name of one in a dict."""
    if isinstance(items, _Together):
        return sum(_told(column, index) for column in items.columns if not _counts(column))
    return size_of(items[index])

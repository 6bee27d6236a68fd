"""How large the items are that a loop would still go over, as far as that can be told without running anything.

What a step of a loop needs mostly grows with the item that it is given: a longer batch, a wider layer, more samples.
So of the items that are not followed the largest one stands for all. Limits: the size of what is in objects of the
user's classes is not known.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch.utils.data import DataLoader

from oomdoctor.forecast.lengths import sources_of

_MOST_MEASURED: Final = 10_000
"""Items of a sequence that are measured, and parts of one item."""
_FEW: Final = 3
"""So many items whose size says nothing are followed besides: they may be the names of models that are compared."""
_VIEWS: Final[tuple[type, ...]] = (dict, type({}.items()), type({}.keys()), type({}.values()))


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

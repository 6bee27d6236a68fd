"""Rows of a batch that are unlike each other: those that a wrong weight of a part's loss would show on.

Among so few rows there have to be the one with the most and the one with the fewest entries that are padding or
ignored, and labels of several kinds. They are taken from a batch by going, again and again, to the row that is
furthest from those that were taken.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch

__all__ = ["batch_size", "few_rows"]

_IGNORED: Final = -100
"""The label that losses pass over. Source: ``ignore_index`` of ``torch.nn.CrossEntropyLoss``."""


def batch_size(batch: Any) -> int | None:
    """Return how many rows a batch has: the first dimension that most of its tensors share. None where it has none."""
    sizes = Counter(tensor.shape[0] for tensor in _tensors(batch) if tensor.ndim)
    return sizes.most_common(1)[0][0] if sizes else None


def few_rows(batch: Any, most: int) -> Any:
    """Return a batch of at most ``most`` of its rows, the same structure; in their order, as few as they are."""
    size = batch_size(batch)
    if size is None or size <= most:
        return batch
    rows = _unlike([tensor for tensor in _tensors(batch) if tensor.ndim and tensor.shape[0] == size], size, most)
    return _cut(batch, rows, size)


def _tensors(batch: Any) -> Iterator[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _tensors(value)
    elif isinstance(batch, tuple | list):
        for value in batch:
            yield from _tensors(value)


def _cut(batch: Any, rows: list[int], size: int) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch[rows] if batch.ndim and batch.shape[0] == size else batch
    if isinstance(batch, Mapping):
        made = copy.copy(batch)
        for key, value in batch.items():
            made[key] = _cut(value, rows, size)  # type: ignore[index]
        return made
    if isinstance(batch, tuple | list):
        if len(batch) == size and not any(isinstance(item, torch.Tensor | Mapping) for item in batch):
            items = [batch[row] for row in rows]
        else:
            items = [_cut(item, rows, size) for item in batch]
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    return batch


def _unlike(tensors: list[torch.Tensor], size: int, most: int) -> list[int]:
    features = torch.stack([feature for tensor in tensors for feature in _features(tensor, size)], 1)
    spread = features.std(0, unbiased=False)
    features = (features - features.mean(0)) / torch.where(spread > 0, spread, torch.ones_like(spread))
    chosen = [int(features[:, 0].argmax())]
    distance = (features - features[chosen[0]]).square().sum(1)
    while len(chosen) < most:
        distance[chosen] = -1.0
        chosen.append(int(distance.argmax()))
        distance = torch.minimum(distance, (features - features[chosen[-1]]).square().sum(1))
    return sorted(chosen)


def _features(tensor: torch.Tensor, size: int) -> Iterator[torch.Tensor]:
    """Yield what tells the rows of a tensor apart: how much is padding or ignored, and what stands there on average."""
    with torch.no_grad():
        flat = tensor.detach().reshape(size, -1)
        if flat.shape[1] and not flat.is_complex():
            if not flat.is_floating_point():
                commonest = flat.flatten().mode().values if flat.dtype is not torch.bool else flat.new_ones(())
                yield 2.0 * (flat == _IGNORED).double().sum(1)
                yield (flat == commonest).double().sum(1)
            else:
                yield (flat == 0).double().sum(1)
            yield flat.double().nan_to_num(0.0, 0.0, 0.0).mean(1)
        else:
            yield torch.zeros(size, dtype=torch.double)

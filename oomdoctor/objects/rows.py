"""The rows of a batch: tensors that share their first dimension, in dictionaries, lists and tuples of any depth."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch


def tensors_in(batch: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a batch."""
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from tensors_in(value)
    elif isinstance(batch, tuple | list):
        for value in batch:
            yield from tensors_in(value)


def batch_size(batch: Any, dim: int = 0) -> int | None:
    """Return how many rows a batch has: what most of its tensors share in dimension ``dim``. None where it has none.

    One row is no batch where another tensor has more: a recurrent state has a row for each layer. Of sizes that are as
    frequent, it is the one that the other of the first two dimensions has as well. Where it has no tensors, its first
    array or list tells.
    """
    tensors = [*tensors_in(batch)]
    sizes = Counter(tensor.shape[dim] for tensor in tensors if tensor.ndim > dim)
    beside = Counter(size for tensor in tensors if tensor.ndim > 2 and dim < 2 for size in {*tensor.shape[:2]})
    if sizes:
        return max(sizes, key=lambda size: (size > 1, sizes[size], beside[size]))
    values = batch if isinstance(batch, tuple | list) else ()
    return next((len(value) for value in values if hasattr(value, "__array__") and value.ndim), None)


def cut(batch: Any, size: int, take: Callable[[Any], Any]) -> Any:
    """Return a batch of the same structure with fewer than ``size`` rows.

    ``take`` gives the rows of one tensor or array, or of a list with an item for each row.
    """
    if isinstance(batch, torch.Tensor) or (hasattr(batch, "__array__") and batch.ndim):
        return take(batch)
    if isinstance(batch, Mapping):
        made = copy.copy(batch)
        for key, value in batch.items():
            made[key] = cut(value, size, take)  # type: ignore[index]
        return made
    if isinstance(batch, tuple | list):
        tensors = [item for item in batch if isinstance(item, torch.Tensor)]
        batched = sum(size in tensor.shape[:2] for tensor in tensors)  # of those that have a length of their own, few
        is_rows = len(batch) == size and not any(isinstance(item, Mapping) for item in batch)
        is_rows = is_rows and (not tensors or (2 * batched < len(tensors) == size))
        items = take([*batch]) if is_rows else [cut(item, size, take) for item in batch]
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    return batch

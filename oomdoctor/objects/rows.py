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
    """Return how many rows a batch has: what most of its tensors share in dimension ``dim``. None where it has none."""
    sizes = Counter(tensor.shape[dim] for tensor in tensors_in(batch) if tensor.ndim > dim)
    return sizes.most_common(1)[0][0] if sizes else None


def cut(batch: Any, size: int, take: Callable[[Any], Any], dim: int = 0) -> Any:
    """Return a batch of the same structure with fewer rows.

    Args:
        size: how many rows there are; what has another number of them stays as it is.
        take: gives the rows of one tensor, or of a list with an item for each row.
        dim: the dimension of the rows.
    """
    if isinstance(batch, torch.Tensor):
        return take(batch) if batch.ndim > dim and batch.shape[dim] == size else batch
    if isinstance(batch, Mapping):
        made = copy.copy(batch)
        for key, value in batch.items():
            made[key] = cut(value, size, take, dim)  # type: ignore[index]
        return made
    if isinstance(batch, tuple | list):
        is_rows = len(batch) == size and not any(isinstance(item, torch.Tensor | Mapping) for item in batch)
        items = take([*batch]) if is_rows and dim == 0 else [cut(item, size, take, dim) for item in batch]
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    return batch

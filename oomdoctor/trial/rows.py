"""Rows of a batch that are unlike each other: those that a wrong weight of a part's loss would show on.

Among so few rows there have to be the one with the most and the one with the fewest entries that are padding or
ignored, and labels of several kinds. They are taken from a batch by going, again and again, to the row that is
furthest from those that were taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch

from oomdoctor.objects.rows import batch_size, cut, tensors_in

_IGNORED: Final = -100
"""The label that losses pass over. Source: ``ignore_index`` of ``torch.nn.CrossEntropyLoss``."""


def few_rows(batch: Any, most: int) -> Any:
    """Return a batch of at most ``most`` of its rows, the same structure; in their order, as few as they are."""
    size = batch_size(batch)
    if size is None or size <= most:
        return batch
    rows = _unlike([tensor for tensor in tensors_in(batch) if tensor.ndim and tensor.shape[0] == size], size, most)

    def taken(whole: Any) -> Any:
        if isinstance(whole, list):
            return [whole[row] for row in rows]
        return whole[rows] if whole.ndim and whole.shape[0] == size else whole

    return cut(batch, size, taken)


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

"""Which batch of a loader is the longest, where its samples are of unlike lengths.

A batch is padded to its longest sample, or its samples are put one after the other; either way that which holds the
longest ones needs most. So samples are measured, as many as there is time for, and the sampler is asked for batches.
Limits: a sampler that shuffles makes other batches in each epoch; what is random in a sample is seen once.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from torch.utils.data import BatchSampler, SequentialSampler
from torch.utils.data._utils.collate import default_collate

from oomdoctor.forecast.measures import size_of

_PROBED: Final = 32
"""Samples, spread over a data set, that tell whether lengths are unlike."""
_MEASURING_S: Final = 1.0
_MOST_BATCHES: Final = 100_000


def longest_batches(loader: Any) -> list[list[Any]]:
    """Return the indices of batches that may be the largest; nothing where all are alike, as far as can be told."""
    sampler = loader.batch_sampler
    if sampler is None:
        return []
    is_own = type(sampler) is not BatchSampler
    pads = loader.collate_fn is not default_collate
    if not (is_own or pads):
        return []  # torch stacks samples of one shape alone
    size = _sizes(loader.dataset) if pads else None
    if size is None and not is_own:
        return []
    size = size or (lambda _index: 1)
    batches = [list(batch) for batch in itertools.islice(sampler, _MOST_BATCHES)]
    if not batches:
        return []
    by_padding = max(batches, key=lambda batch: len(batch) * max(map(size, batch), default=0))
    by_sum = max(batches, key=lambda batch: sum(map(size, batch)))
    chosen = [by_padding] if by_padding == by_sum else [by_padding, by_sum]
    if not is_own and type(sampler.sampler) is not SequentialSampler:
        # Another epoch may put the longest together with any others.
        count = max(map(len, batches))
        chosen.append(sorted((index for batch in batches for index in batch), key=size, reverse=True)[:count])
    return chosen


def _sizes(dataset: Any) -> Callable[[Any], int] | None:
    """Return what tells how large a sample is, None where the samples are alike; what was not measured counts as 0."""
    try:
        count = len(dataset)
    except (TypeError, NotImplementedError):
        return None
    known: dict[Any, int] = {}
    step = max(count // _PROBED, 1)
    _measure(dataset, range(0, count, step), known)
    if len(set(known.values())) < 2:
        return None
    # In no order: where the time does not suffice, what was measured is to be like what was not.
    order = random.Random(0).sample(range(count), count)
    _measure(dataset, order, known)
    return lambda index: known.get(index, 0)


def _measure(dataset: Any, indices: Sequence[int], known: dict[Any, int]) -> None:
    end = time.monotonic() + _MEASURING_S
    for index in indices:
        if index not in known:
            known[index] = size_of(dataset[index])
        if time.monotonic() > end:
            return

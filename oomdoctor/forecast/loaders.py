"""The ``DataLoader`` of the dry run: a real batch, fetched in this process, handed out again and again.

Worker processes cannot be started there and need not be. Where samples are of unlike lengths, every other batch
is the one with the longest: it is padded to those, or they are put one after the other. So samples are measured, as
many as there is time for, and the sampler is asked for batches. What comes from a stream is taken from it.

Limits: where the samples are fakes, a few that are alike stand for all. A sampler that shuffles makes other batches in
each epoch; what is random in a sample is seen once; what libraries beside torch allocate for a fetch is not seen.
"""

from __future__ import annotations

import itertools
import operator
import random
import time
import weakref
from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_iter, tree_map_only
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler
from torch.utils.data._utils.collate import default_collate
from torch.utils.data._utils.fetch import _MapDatasetFetcher
from torch.utils.data.dataloader import _DatasetKind, _MultiProcessingDataLoaderIter, _SingleProcessDataLoaderIter

from oomdoctor.allocator.mode import run_apart, stays_whole
from oomdoctor.allocator.tensor_storages import storages_of
from oomdoctor.forecast.live_storages import Ledger
from oomdoctor.forecast.loop_hooks import length_of, size_of
from oomdoctor.model.memory import Role
from oomdoctor.sandbox.restrictions import fetch_here

if TYPE_CHECKING:
    from oomdoctor.forecast.loop_model import LoopModel
    from oomdoctor.forecast.tracker import Tracker

_FEW: Final = 16
"""So many samples stand for all of a batch. To take one of a fake tensor costs a millisecond."""

_PROBED: Final = 32
"""Samples, spread over a data set, that tell whether lengths are unlike."""
_MEASURING_S: Final = 1.0
_MOST_BATCHES: Final = 100_000


class Fetching(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what is alive while a batch is fetched: its samples, and what is made on the way to them.

    In the run that is forecast each batch is fetched anew, and all of its samples are alive until it is put together.
    To be used where no other mode is on.

    Args:
        tracker: its ledger of the host knows what was there before.
        is_here: whether what is fetched counts here; else nothing is counted.
    """

    def __init__(self, tracker: Tracker, *, is_here: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._host, self._is_here, self._ledger = tracker.host, is_here, Ledger()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled in a dry run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._is_here and stays_whole(func, args):
            return run_apart(func, self, args, kwargs or {})
        result = func(*args, **(kwargs or {}))
        for storage in storages_of(result) if self._is_here else ():
            if self._host.number_of(storage) is None:
                self._ledger.hold(storage)
        return result

    def fetched(self, batch: Any) -> _Fetched:
        """Return a batch with what was alive beside it; what a data set makes and keeps is counted from now on."""
        beside = self._ledger.peak - self._ledger.live
        strided = (tensor for tensor in _tensors(batch) if tensor.layout is torch.strided)
        own = {self._ledger.number_of(tensor.untyped_storage()) for tensor in strided}
        for number, storage in self._ledger.alive():
            if number not in own:
                self._host.hold(storage)
        return _Fetched(batch, beside)


class _Fetched(NamedTuple):
    """A batch, and how many bytes are alive beside it while it is fetched."""

    batch: Any
    beside: int = 0

    def happens(self, tracker: Tracker) -> None:
        samples = tracker.host.take(self.beside, Role.BATCH)
        for tensor in _tensors(self.batch):
            tracker.hold_real(tensor, Role.BATCH)
        tracker.host.give_back(samples)


def _tensors(batch: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_iter(batch) if isinstance(leaf, torch.Tensor)]


def _bytes(batch: Any) -> int:
    return sum(tensor.nbytes for tensor in _tensors(batch))


def replace_loaders(tracker: Tracker, loops: LoopModel) -> None:
    """Make every ``DataLoader`` of this process repeat its batches, for as long as ``loop_hooks`` wants more."""
    known: weakref.WeakKeyDictionary[Any, _Batches] = weakref.WeakKeyDictionary()

    def iterate(loader: Any) -> Iterator[Any]:
        if loader not in known or known[loader].rest is not None:
            with _disable_current_modes():
                is_here = tracker.ledger is tracker.host and not loader.num_workers
                is_here = known[loader].is_here if loader in known else is_here
                known[loader] = _batches(loader, tracker, is_here=is_here)
        return _repeat(known[loader], loader, tracker, loops)

    cls: Any = DataLoader
    cls.__iter__ = iterate
    _replace_workers(tracker)


def _replace_workers(tracker: Tracker) -> None:
    """Let iterators whose workers are those of the parent fetch what is left in this process."""
    fetchers: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    def following(iterator: Any) -> Any:
        with _disable_current_modes():
            if iterator not in fetchers:
                create: Any = _DatasetKind.create_fetcher
                fetchers[iterator] = create(
                    *(iterator._dataset_kind, iterator._dataset, iterator._auto_collation),
                    *(iterator._collate_fn, iterator._drop_last),
                )
            batch = fetchers[iterator].fetch(next(iterator._sampler_iter))
        _Fetched(batch).happens(tracker)
        return batch

    cls: Any = _MultiProcessingDataLoaderIter
    cls.__next__ = following


@dataclass(slots=True)
class _Batches:
    """What a loader gives.

    Attributes:
        first: its first batch.
        is_here: whether they are fetched in the memory that is asked about: workers have memory of their own, and no
            loader fetches on a device.
        longest: the one that holds the longest samples, where samples are of unlike lengths.
        rest: gives those after the first, where they can only be had one after the other.
    """

    first: _Fetched
    is_here: bool
    longest: _Fetched | None = None
    rest: Iterator[Any] | None = None


def _batches(loader: Any, tracker: Tracker, *, is_here: bool) -> _Batches:
    fetch_here(loader)
    iterator: Any = _SingleProcessDataLoaderIter(loader)
    fetcher: Any = iterator._dataset_fetcher
    fetching = Fetching(tracker, is_here=is_here)
    is_map = isinstance(fetcher, _MapDatasetFetcher)
    if not is_map:
        with fetching:
            batch = next(iterator)
        return _Batches(fetching.fetched(batch), is_here=is_here, rest=iterator)
    if not hasattr(fetcher.dataset, "__getitems__"):
        fetcher.dataset = _FewSamples(fetcher.dataset)
    fetch = fetcher.fetch
    fetcher.fetch = lambda indices: _made(partial(fetch, indices), tracker)
    with fetching:
        batch = next(iterator)
    batches = _Batches(fetching.fetched(batch), is_here=is_here)
    for indices in _longest_batches(loader, tracker):
        fetching = Fetching(tracker, is_here=is_here)
        with fetching:
            batch = fetcher.fetch(indices)
        if _bytes(batch) > _bytes((batches.longest or batches.first).batch):
            batches.longest = fetching.fetched(batch)
    return batches


def _made(make: Callable[[], Any], tracker: Tracker) -> Any:
    """Return what is made of real tensors, or among fakes where some of them, which the cell made, are fakes."""
    try:
        return make()
    except AssertionError:  # of torch, which does not have both in one operation
        with tracker.fake_mode:
            return make()


class _FewSamples:
    """A data set whose samples, where they are fakes, are taken to be like the first few of the batch."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitem__(self, index: Any) -> Any:
        return self._dataset[index]

    def __getitems__(self, indices: Sequence[Any]) -> list[Any]:
        samples = [self._dataset[index] for index in indices[:_FEW]]
        if len(indices) > _FEW and _are_fakes_alike(samples):
            for leaf in tree_iter(samples):
                if isinstance(leaf, FakeTensor):
                    leaf.constant = None  # that of one sample, not of those it stands for
            return samples + samples[-1:] * (len(indices) - _FEW)
        return samples + [self._dataset[index] for index in indices[_FEW:]]


def _are_fakes_alike(samples: Sequence[Any]) -> bool:
    kinds = []
    for sample in samples:
        leaves, structure = tree_flatten(sample)
        kinds.append((structure, [(leaf.shape, leaf.dtype) for leaf in leaves if isinstance(leaf, torch.Tensor)]))
    has_fakes = any(isinstance(leaf, FakeTensor) for leaf in tree_iter(samples[0]))
    return has_fakes and all(kind == kinds[0] for kind in kinds)


def _repeat(batches: _Batches, loader: Any, tracker: Tracker, loops: LoopModel) -> Iterator[Any]:
    total = length_of(loader)
    loop = loops.begins(total, id(loader))
    try:
        while (total is None or loop.turns < total) and loops.wants_more(loop):
            with _disable_current_modes():
                try:
                    fetched = _batch(batches, loader, loop.turns, total, tracker)
                except StopIteration:
                    loop.turns -= 1
                    return
            fetched.happens(tracker)
            batch = fetched.batch
            del fetched
            yield batch
            del batch
    finally:
        loops.ended(loop)


def _batch(batches: _Batches, loader: Any, turn: int, total: int | None, tracker: Tracker) -> _Fetched:
    """Return the batch of a turn; ``StopIteration`` where there is no more.

    Of two kinds each comes in its turn, so that a step after the first has the longest.
    """
    if batches.longest is not None and not turn % 2:
        return _again(batches.longest, torch.clone)
    if turn > 1 and batches.rest is not None:
        fetching = Fetching(tracker, is_here=batches.is_here)
        with fetching:
            batch = next(batches.rest)
        return fetching.fetched(batch)
    is_last = turn == total and batches.longest is None
    return _again(batches.first, _rest(loader) if is_last else torch.clone)


def _again(fetched: _Fetched, copy: Callable[[torch.Tensor], torch.Tensor]) -> _Fetched:
    return fetched._replace(batch=tree_map_only(torch.Tensor, copy, fetched.batch))


def _rest(loader: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what makes the last batch of the first one: it may have fewer samples."""
    sampler = loader.batch_sampler
    rest = 0
    if type(sampler) is BatchSampler and not sampler.drop_last and isinstance(sampler.sampler, Sized):
        rest = len(sampler.sampler) % sampler.batch_size

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        return (tensor[:rest] if rest and tensor.dim() and len(tensor) == sampler.batch_size else tensor).clone()

    return cut


def _longest_batches(loader: Any, tracker: Tracker) -> list[list[Any]]:
    """Return the indices of batches that may be the largest; nothing where all are alike, as far as can be told."""
    sampler = loader.batch_sampler
    if sampler is None:
        return []
    is_own = type(sampler) is not BatchSampler
    pads = loader.collate_fn is not default_collate
    if not (is_own or pads):
        return []  # torch stacks samples of one shape alone
    size = _sizes(loader.dataset, tracker) if pads else None
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


def _sizes(dataset: Any, tracker: Tracker) -> Callable[[Any], int] | None:
    """Return what tells how large a sample is, None where the samples are alike; what was not measured counts as 0."""
    try:
        count = len(dataset)
    except (TypeError, NotImplementedError):
        return None
    known: dict[Any, int] = {}
    step = max(count // _PROBED, 1)
    _measure(dataset, range(0, count, step), known, tracker)
    if len(set(known.values())) < 2:
        return None
    # In no order: where the time does not suffice, what was measured is to be like what was not.
    order = random.Random(0).sample(range(count), count)
    _measure(dataset, order, known, tracker)
    return lambda index: known.get(index, 0)


def _measure(dataset: Any, indices: Sequence[int], known: dict[Any, int], tracker: Tracker) -> None:
    end = time.monotonic() + _MEASURING_S
    for index in indices:
        if index not in known:
            known[index] = size_of(_made(partial(operator.getitem, dataset, index), tracker))
        if time.monotonic() > end:
            return

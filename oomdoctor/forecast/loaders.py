"""The ``DataLoader`` of the shadow: a real batch, fetched in this process, handed out again and again.

Worker processes cannot be started in the shadow and need not be. Where samples are of unlike lengths, every other batch
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
from typing import TYPE_CHECKING, Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_iter, tree_map_only
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler
from torch.utils.data._utils.collate import default_collate
from torch.utils.data._utils.fetch import _MapDatasetFetcher
from torch.utils.data.dataloader import _DatasetKind, _MultiProcessingDataLoaderIter, _SingleProcessDataLoaderIter

from oomdoctor.allocator.composites import run_apart, stays_whole
from oomdoctor.allocator.ledger import storages_of
from oomdoctor.forecast.ledger import Ledger
from oomdoctor.forecast.loops import length_of, size_of
from oomdoctor.forecast.operators import Together
from oomdoctor.model.memory import Role

if TYPE_CHECKING:
    from oomdoctor.forecast.pace import Pace
    from oomdoctor.forecast.tracker import Tracker

_FEW: Final = 16
"""So many samples stand for all of a batch. To take one of a fake tensor costs a millisecond."""

_PROBED: Final = 32
"""Samples, spread over a data set, that tell whether lengths are unlike."""
_MEASURING_S: Final = 1.0
_MOST_BATCHES: Final = 100_000
_MOST_EVENTS: Final = 4096
"""Events of one fetch; of one that has more, only what is alive together with the batch is gone through."""


class Fetch:
    """What one fetch of a batch allocates and frees: its samples, and what is made on the way to them.

    In the run that is forecast each batch is fetched anew, and all of its samples are alive until it is put together.
    So the trace of a real fetch is gone through for every batch that is handed out.

    Args:
        events: of a ledger, see there.
        made: which tensor of the batch it is that an allocation is for.
    """

    def __init__(self, events: Sequence[Any] = (), made: dict[int, int] | None = None) -> None:
        self._made = made or {}
        begun = {event[1] for event in events if event[0] == "alloc"}
        if len(events) > _MOST_EVENTS:  # what is gone before the first tensor of the batch is made is left out
            first = next((at for at, event in enumerate(events) if event[1] in self._made), len(events))
            begun -= {event[1] for event in events[:first] if event[0] == "free"}
        whole = begun & ({event[1] for event in events if event[0] == "free"} | self._made.keys())
        self._events = [event for event in events if event[1] in whole]

    def happens(self, tracker: Tracker, batch: Any = ()) -> None:
        """Go through it in the ledger of the host, and count ``batch`` as what it makes."""
        ledger, tensors, taken = tracker.host, _tensors(batch), dict[int, Any]()
        for event in self._events:
            if event[1] in self._made:
                tracker.hold_real(tensors[self._made[event[1]]], Role.BATCH)
            elif event[0] == "alloc":
                taken[event[1]] = ledger.take(event[2], Role.BATCH)
            else:
                ledger.give_back(taken.pop(event[1]))
        for tensor in tensors:
            tracker.hold_real(tensor, Role.BATCH)


class Fetching(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Takes down what is allocated and freed while it is on. To be used where no other mode is on.

    Args:
        tracker: its ledger of the host knows what was there before.
        is_here: whether what is fetched counts here; else nothing is taken down.
    """

    def __init__(self, tracker: Tracker, *, is_here: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._host, self._is_here, self._ledger, self._begun = tracker.host, is_here, Ledger(), 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled in a shadow

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._is_here and stays_whole(func, args):
            return run_apart(func, self, args, kwargs or {})
        result = func(*args, **(kwargs or {}))
        for storage in storages_of(result) if self._is_here else ():
            if self._host.number_of(storage) is None:
                self._ledger.hold(storage)
        return result

    def begin(self) -> None:
        """Note that what comes is the fetch itself: before it, a sampler may have drawn the order of all samples."""
        self._begun = len(self._ledger.events)

    def done(self, batch: Any) -> tuple[Fetch, Fetch]:
        """Return what came before the fetch, and the fetch, whose outcome is ``batch``; count what else is kept.

        What a data set makes once and keeps is counted from the first fetch on.
        """
        numbers = [
            self._ledger.number_of(tensor.untyped_storage()) if tensor.layout is torch.strided else None
            for tensor in _tensors(batch)
        ]
        made = {number: at for at, number in enumerate(numbers) if number is not None}
        for number, storage in self._ledger.alive():
            if number not in made:
                self._host.hold(storage)
        events = list(self._ledger.events)
        return Fetch(events[: self._begun]), Fetch(events[self._begun :], made)


def _tensors(batch: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_iter(batch) if isinstance(leaf, torch.Tensor)]


def _bytes(batch: Any) -> int:
    return sum(tensor.nbytes for tensor in _tensors(batch))


def replace_loaders(tracker: Tracker, pace: Pace) -> None:
    """Make every ``DataLoader`` of this process repeat its batches, for as long as ``pace`` wants more."""
    known: weakref.WeakKeyDictionary[Any, _Batches] = weakref.WeakKeyDictionary()

    def iterate(loader: Any) -> Iterator[Any]:
        if loader not in known or known[loader].rest is not None:
            with _disable_current_modes():
                is_here = tracker.ledger is tracker.host and not loader.num_workers
                is_here = known[loader].is_here if loader in known else is_here
                known[loader] = _batches(loader, tracker, is_here=is_here)
        return _repeat(known[loader], loader, tracker, pace)

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
        Fetch().happens(tracker, batch)
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
        begins: what it takes to begin to go through it; ``takes``: to fetch the first batch.
        longest: the one that holds the longest samples, where samples are of unlike lengths; ``longest_takes``: what it
            takes to fetch that one.
        rest: gives those after the first, where they can only be had one after the other.
    """

    first: Any
    is_here: bool
    begins: Fetch
    takes: Fetch
    longest: Any = None
    longest_takes: Fetch | None = None
    rest: Iterator[Any] | None = None


def _batches(loader: Any, tracker: Tracker, *, is_here: bool) -> _Batches:
    loader.__dict__.update(
        num_workers=0,
        pin_memory=False,
        persistent_workers=False,
        timeout=0,
        prefetch_factor=None,
        _DataLoader__multiprocessing_context=None,
        worker_init_fn=None,
    )
    fetching = Fetching(tracker, is_here=is_here)
    with fetching:
        iterator: Any = _SingleProcessDataLoaderIter(loader)
    fetcher = iterator._dataset_fetcher
    is_map = isinstance(fetcher, _MapDatasetFetcher)
    if not is_map:
        fetching.begin()
        with fetching:
            batch = next(iterator)
        begins, takes = fetching.done(batch)
        return _Batches(batch, is_here=is_here, begins=begins, takes=takes, rest=iterator)
    if not hasattr(fetcher.dataset, "__getitems__"):
        fetcher.dataset = _FewSamples(fetcher.dataset)
    fetch = fetcher.fetch

    def fetched(indices: Any) -> Any:
        def together() -> Any:
            with Together():  # type: ignore[no-untyped-call]
                return fetch(indices)

        fetching.begin()
        return _made(together, lambda: fetch(indices), tracker)

    fetcher.fetch = fetched
    with fetching:
        batch = next(iterator)
    begins, takes = fetching.done(batch)
    found = _Batches(batch, is_here=is_here, begins=begins, takes=takes)
    for indices in _longest_batches(loader, tracker):
        fetching = Fetching(tracker, is_here=is_here)
        with fetching:
            batch = fetched(indices)
        if _bytes(batch) > _bytes(found.first if found.longest is None else found.longest):
            found.longest, (_, found.longest_takes) = batch, fetching.done(batch)
    return found


def _made(make: Callable[[], Any], among_fakes: Callable[[], Any], tracker: Tracker) -> Any:
    """Return what is made of real tensors, or among fakes where some of them, which the cell made, are fakes."""
    try:
        return make()
    except AssertionError:  # of torch, which does not have both in one operation
        with tracker.fake_mode:
            return among_fakes()


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


def _repeat(batches: _Batches, loader: Any, tracker: Tracker, pace: Pace) -> Iterator[Any]:
    total = length_of(loader)
    loop = pace.begins(total, id(loader))
    batches.begins.happens(tracker)
    try:
        while (total is None or loop.turns < total) and pace.wants_more(loop):
            with _disable_current_modes():
                try:
                    batch, takes = _batch(batches, loader, loop.turns, total, tracker)
                except StopIteration:
                    loop.turns -= 1
                    return
            takes.happens(tracker, batch)
            yield batch
            del batch
    finally:
        pace.ended(loop)


def _batch(batches: _Batches, loader: Any, turn: int, total: int | None, tracker: Tracker) -> tuple[Any, Fetch]:
    """Return the batch of a turn, and what it takes to fetch it.

    Of two kinds each comes in its turn, so that a step after the first one has the longest.

    Raises:
        StopIteration: there is no more.
    """
    if batches.longest_takes is not None and not turn % 2:
        return tree_map_only(torch.Tensor, torch.clone, batches.longest), batches.longest_takes
    if turn > 1 and batches.rest is not None:
        fetching = Fetching(tracker, is_here=batches.is_here)
        with fetching:
            batch = next(batches.rest)
        return batch, fetching.done(batch)[1]
    is_last = turn == total and batches.longest is None
    return tree_map_only(torch.Tensor, _rest(loader) if is_last else torch.clone, batches.first), batches.takes


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
            sample = partial(operator.getitem, dataset, index)
            known[index] = size_of(_made(sample, sample, tracker))
        if time.monotonic() > end:
            return

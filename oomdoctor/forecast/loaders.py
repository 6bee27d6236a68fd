"""The ``DataLoader`` of the shadow: one real batch, fetched in this process, handed out again and again.

Worker processes cannot be started in the shadow and need not be. Limit: batches of varying length are judged by the
first one, the last of a loader's own sampler excepted.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sized
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_iter, tree_map_only
from torch.utils.data import BatchSampler, DataLoader
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter, _SingleProcessDataLoaderIter

from oomdoctor.model.evidence import Role

if TYPE_CHECKING:
    from oomdoctor.forecast.pace import Pace
    from oomdoctor.forecast.tracker import Tracker

__all__ = ["orphan_workers", "replace_loaders"]


def orphan_workers() -> None:
    """Keep this process from shutting down the workers of its parent when it drops a loader's iterator."""
    iterator: Any = _MultiProcessingDataLoaderIter
    iterator._shutdown_workers = iterator.__del__ = lambda self: None


def replace_loaders(tracker: Tracker, pace: Pace) -> None:
    """Make every ``DataLoader`` of this process repeat its first batch, for as long as ``pace`` wants more."""
    first_batches: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    def iterate(loader: Any) -> Iterator[Any]:
        with _disable_current_modes():
            if loader not in first_batches:
                first_batches[loader] = _first_batch(loader)
        return _repeat(first_batches[loader], loader, tracker, pace)

    cls: Any = DataLoader
    cls.__iter__ = iterate


def _first_batch(loader: Any) -> Any:
    loader.__dict__.update(
        num_workers=0,
        pin_memory=False,
        persistent_workers=False,
        timeout=0,
        prefetch_factor=None,
        _DataLoader__multiprocessing_context=None,
        worker_init_fn=None,
    )
    return next(_SingleProcessDataLoaderIter(loader))


def _repeat(first: Any, loader: Any, tracker: Tracker, pace: Pace) -> Iterator[Any]:
    total = _length(loader)
    loop = pace.begins(total, id(loader))
    try:
        while (total is None or loop.turns < total) and pace.wants_more(loop):
            with _disable_current_modes():
                is_last = loop.turns == total
                batch = tree_map_only(torch.Tensor, _rest(loader) if is_last else torch.clone, first)
            for leaf in tree_iter(batch):
                if isinstance(leaf, torch.Tensor):
                    tracker.hold_real(leaf, Role.BATCH)
            leaf = None
            yield batch
            del batch
    finally:
        pace.ended(loop)


def _rest(loader: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what makes the last batch of the first one: it may have fewer samples."""
    sampler = loader.batch_sampler
    rest = 0
    if type(sampler) is BatchSampler and not sampler.drop_last and isinstance(sampler.sampler, Sized):
        rest = len(sampler.sampler) % sampler.batch_size

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        return (tensor[:rest] if rest and tensor.dim() and len(tensor) == sampler.batch_size else tensor).clone()

    return cut


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None

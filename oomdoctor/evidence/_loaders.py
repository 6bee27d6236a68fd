"""What the loaders of the namespace are like, read from their dictionaries alone: no iterator is made, no worker asked.

Whether fewer workers would give the same batches depends on what makes the samples. That is tried: in a forked copy a
few samples are made twice, as two workers would make them, and compared. What depends on the order is told where it is
certain. Limits: what later samples alone would show, and how sums round on several threads.
"""

from __future__ import annotations

import multiprocessing
import random
import sys
from collections.abc import Iterable
from functools import partial
from inspect import getattr_static
from types import FunctionType
from typing import Any, Final

from oomdoctor.model.code import LoaderFacts
from oomdoctor.objects.kinds import module_of, mro_of, name_of, plain_dict
from oomdoctor.program.definitions import Program
from oomdoctor.program.training_loops import looped
from oomdoctor.sandbox.copies import answered

_AT_ONCE: Final = frozenset(
    {
        *("SequentialSampler", "RandomSampler", "SubsetRandomSampler", "WeightedRandomSampler", "DistributedSampler"),
        "_InfiniteConstantSampler",
    }
)
"""Samplers that draw all their numbers before they give the first index, or draw with a generator of their own.

Source: torch/utils/data/sampler.py, distributed.py and dataloader.py.
"""
_HOMES: Final = "torch.utils.data."
_CONTEXT: Final = "_DataLoader__multiprocessing_context"


_TRIED: Final = 4
"""Samples that are made twice."""
_WORKERS: Final = ((0, 2, 1, 1), (1, 3, 2, -1))
"""Of two workers: number, count and seed, and in which direction they go through the samples."""
_LIMIT_S: Final = 5.0


def batch_sizes(loaders: Iterable[tuple[str, Any]]) -> tuple[tuple[str, int], ...]:
    """Return the batch size of each loader; one that takes batches as its data set gives them has none."""
    sizes = ((path, (plain_dict(loader) or {}).get("batch_size")) for path, loader in loaders)
    return tuple((path, size) for path, size in sizes if type(size) is int)


def loaders(program: Program, found: Iterable[tuple[str, Any]], *, tries: bool = True) -> tuple[LoaderFacts, ...]:
    """Return the facts of each loader, in their order.

    Args:
        tries: whether samples are made in a copy of the process, to tell whether they depend on their worker.
    """
    return tuple(_facts(path, plain_dict(loader) or {}, program, tries) for path, loader in found)


def _facts(path: str, own: dict[str, Any], program: Program, tries: bool) -> LoaderFacts:
    workers, collate = own.get("num_workers"), own.get("collate_fn")
    workers = workers if type(workers) is int else 0
    ahead = own.get("prefetch_factor")
    sampler = _innermost(own)
    is_iterable = _is_iterable(own.get("dataset"))
    return LoaderFacts(
        path=path,
        num_workers=workers,
        prefetch=ahead if type(ahead) is int and workers else None,
        pin_memory=own.get("pin_memory") is True,
        persistent=own.get("persistent_workers") is True,
        spawns=_start_method(own.get(_CONTEXT)) != "fork",
        iterable=is_iterable,
        unordered=own.get("in_order") is False,
        varies=_varies(own, tries=tries) if workers and not is_iterable else None,
        order=_order(own, sampler),
        shuffles=name_of(type(sampler)) not in {"SequentialSampler", "list", "range"},
        collates=own.get("batch_sampler") is not None and _is_default(collate),
        looped=looped(program, path),
    )


def _varies(own: dict[str, Any], *, tries: bool) -> str | None:
    """Return why a batch may depend on the worker that makes it, None where no two of them differed."""
    if own.get("worker_init_fn") is not None:
        return "its `worker_init_fn` prepares each worker on its own"
    told, _ = answered(partial(_difference, own), limit_s=_LIMIT_S) if tries else (None, None)
    return "it was not tried whether two workers make the same" if told is None else told or None


def _difference(own: dict[str, Any]) -> str:
    """Return in what the samples of two workers differ, empty if in nothing; for a forked copy."""
    from oomdoctor.sandbox.silence import keep_to_itself, orphan_workers

    keep_to_itself(None)
    orphan_workers()
    try:
        first, second = (_made(own, *worker) for worker in _WORKERS)
    except Exception as exc:  # noqa: BLE001 - border: data sets of the user's may fail in any way
        return f"making a few failed ({type(exc).__name__})"
    if isinstance(first, str) or isinstance(second, str):
        return str(first if isinstance(first, str) else second)
    at = next((at for at in first if first[at] != second.get(at)), None)
    return "" if at is None and len(first) == len(second) else f"two workers made {at or 'its samples'} differently"


def _made(own: dict[str, Any], number: int, count: int, seed: int, step: int) -> dict[str, str] | str:
    """Return each value of some samples as one worker makes them, by its path; or that random numbers are drawn."""
    import torch
    from torch.utils.data import _utils

    from oomdoctor.objects.leaves import Leaves, generators

    dataset, collate, info = own["dataset"], own["collate_fn"], _utils.worker.WorkerInfo
    numpy = sys.modules.get("numpy.random")
    for set_seed in (random.seed, torch.manual_seed, *((numpy.seed,) if numpy is not None else ())):
        set_seed(seed)
    before, found = dict(generators()), dict[str, str]()
    for at in range(min(len(dataset), _TRIED))[::step]:
        _utils.worker._worker_info = info(id=number, num_workers=count, seed=seed, dataset=dataset)
        sample = dataset.__getitems__([at])[0] if hasattr(dataset, "__getitems__") else dataset[at]
        _utils.worker._worker_info = None  # in a worker, torch's own collating asks for memory to be shared
        batch = collate([sample] if own.get("batch_sampler") is not None else sample)
        found |= {path: leaf.exact for path, leaf in Leaves({}).below(batch, f"sample {at}")}
    return "random numbers are drawn for each" if dict(generators()) != before else found


def _innermost(own: dict[str, Any]) -> Any:
    """Return what gives the indices, below the batches that torch makes of them."""
    batches = own.get("batch_sampler")
    if batches is None:
        return own.get("sampler")
    is_torchs = (module_of(type(batches)), name_of(type(batches))) == (f"{_HOMES}sampler", "BatchSampler")
    return (plain_dict(batches) or {}).get("sampler") if is_torchs else batches


def _order(own: dict[str, Any], sampler: Any) -> str | None:
    """Return why the order may depend on when indices are asked for, None where it is certain that it does not."""
    cls = type(sampler)
    if cls in (list, range):
        return None
    if not module_of(cls).startswith(_HOMES) or name_of(cls) not in _AT_ONCE:
        return f"when its `{name_of(cls)}` draws random numbers is not known"
    # With a generator of its own the sampler draws again at the end of an epoch, or in between with replacement.
    if name_of(cls) == "RandomSampler" and (plain_dict(sampler) or {}).get("generator") is not None:
        return "its sampler draws from a generator of the program's as it goes"
    return None


def _is_iterable(dataset: Any) -> bool:
    bases = mro_of(type(dataset))
    return any(name_of(base) == "IterableDataset" and module_of(base).startswith(_HOMES) for base in bases)


def _is_default(collate: Any) -> bool:
    if type(collate) is not FunctionType:
        return False
    return (collate.__module__, collate.__name__) == (f"{_HOMES}_utils.collate", "default_collate")


def _start_method(context: Any) -> str:
    """Return how the workers of a loader begin: as its own context says, else as this process is set."""
    named = getattr_static(context, "_name", None) if context is not None else None
    if type(named) is str:
        return named
    # The first of all methods is the default of the platform, which asking for it would settle.
    return multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]


def sharing_strategy() -> str | None:
    """Return by what tensors are handed between processes here, None where torch's multiprocessing is not in use."""
    module = sys.modules.get("torch.multiprocessing")
    strategy = getattr_static(module, "_sharing_strategy", None) if module is not None else None
    return strategy if type(strategy) is str else None

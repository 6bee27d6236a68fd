"""What the loaders of the namespace are like, read from their dictionaries alone: no iterator is made, no worker asked.

Whether fewer workers, or batches fetched less far ahead, would give the same batches depends on what makes the samples
and on what decides on their order; both are told here as far as they are certain.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Iterable, Mapping
from inspect import getattr_static
from types import FunctionType
from typing import Any, Final

from oomdoctor.evidence._making import Makers, home_of
from oomdoctor.model.code import LoaderFacts
from oomdoctor.objects.kinds import mro_of, name_of, plain_dict
from oomdoctor.program.definitions import Program
from oomdoctor.program.training_loops import looped

__all__ = ["loaders", "sharing_strategy"]

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


def loaders(
    program: Program, found: Iterable[tuple[str, Any]], namespace: Mapping[str, Any]
) -> tuple[LoaderFacts, ...]:
    """Return the facts of each loader, in their order."""
    makers = Makers(program, namespace)
    return tuple(_facts(path, plain_dict(loader) or {}, makers, program) for path, loader in found)


def _facts(path: str, own: dict[str, Any], makers: Makers, program: Program) -> LoaderFacts:
    workers, collate = own.get("num_workers"), own.get("collate_fn")
    workers = workers if type(workers) is int else 0
    ahead = own.get("prefetch_factor")
    sampler = _innermost(own)
    return LoaderFacts(
        path=path,
        num_workers=workers,
        prefetch=ahead if type(ahead) is int and workers else None,
        pin_memory=own.get("pin_memory") is True,
        persistent=own.get("persistent_workers") is True,
        spawns=_start_method(own.get(_CONTEXT)) != "fork",
        iterable=_is_iterable(own.get("dataset")),
        unordered=own.get("in_order") is False,
        varies=_varies(own, makers),
        order=_order(own, sampler),
        shuffles=name_of(type(sampler)) not in {"SequentialSampler", "list", "range"},
        collates=own.get("batch_sampler") is not None and _is_default(collate),
        looped=looped(program, path),
    )


def _varies(own: dict[str, Any], makers: Makers) -> str | None:
    if own.get("worker_init_fn") is not None:
        return "its `worker_init_fn` prepares each worker on its own"
    return makers.dataset(own.get("dataset")) or makers.call(own.get("collate_fn"))


def _innermost(own: dict[str, Any]) -> Any:
    """Return what gives the indices, below the batches that torch makes of them."""
    batches = own.get("batch_sampler")
    if batches is None:
        return own.get("sampler")
    is_torchs = (home_of(type(batches)), name_of(type(batches))) == (f"{_HOMES}sampler", "BatchSampler")
    return (plain_dict(batches) or {}).get("sampler") if is_torchs else batches


def _order(own: dict[str, Any], sampler: Any) -> str | None:
    """Return why the order may depend on when indices are asked for, None where it is certain that it does not."""
    cls = type(sampler)
    if cls in (list, range):
        return None
    if not home_of(cls).startswith(_HOMES) or name_of(cls) not in _AT_ONCE:
        return f"when its `{name_of(cls)}` draws random numbers is not known"
    # With a generator of its own the sampler draws again at the end of an epoch, or in between with replacement.
    if name_of(cls) == "RandomSampler" and (plain_dict(sampler) or {}).get("generator") is not None:
        return "its sampler draws from a generator of the program's as it goes"
    return None


def _is_iterable(dataset: Any) -> bool:
    bases = mro_of(type(dataset))
    return any(name_of(base) == "IterableDataset" and home_of(base).startswith(_HOMES) for base in bases)


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

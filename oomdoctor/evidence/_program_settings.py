"""How the cells set the program up, as their calls tell: loaders, precision, devices, compilation, other libraries.

What a name leads to is looked at first, where it tells the same: a loader's dictionary, the classes of modules.
"""

from __future__ import annotations

import multiprocessing
import random
import re
import sys
from collections.abc import Callable, Container, Iterable, Sequence
from functools import partial
from inspect import getattr_static
from types import FunctionType
from typing import Any, Final

from oomdoctor.evidence._models import held, parameters, sizes
from oomdoctor.model.code import LoaderFacts
from oomdoctor.objects.kinds import module_of, mro_of, name_of, plain_dict
from oomdoctor.program.definitions import Call, Program, calls, decorators, imports_of, text_of
from oomdoctor.program.dependencies import Ground
from oomdoctor.sandbox.copies import answered

_FRAMEWORKS: Final = (
    *("tensorflow", "jax", "cupy", "paddle", "jittor", "mxnet", "vllm", "deepspeed", "rmm", "bitsandbytes"),
)
"""Libraries that take memory of the device beside PyTorch's pool, or in its stead."""
_SHARDING: Final = {
    **dict.fromkeys(("DistributedDataParallel", "DDP"), "DistributedDataParallel"),
    **dict.fromkeys(("FullyShardedDataParallel", "FSDP", "FSDPModule", "fully_shard"), "FullyShardedDataParallel"),
    "DeepSpeedEngine": "deepspeed",
}
_STRATEGIES: Final = {
    "ddp": "DistributedDataParallel",
    "fsdp": "FullyShardedDataParallel",
    "deepspeed": "deepspeed",
}
_APEX: Final = re.compile(r"(^|\.)amp\.(initialize|scale_loss)$")
_MIXED: Final = re.compile(r"16|mixed|true", re.IGNORECASE)
_HALF: Final = re.compile(r"^(torch\.)?(float16|half|bfloat16)$")
_TRAINERS: Final = re.compile(r"(Trainer|TrainingArguments|Fabric|Accelerator)$")
_NETS: Final = re.compile(r"(^|\.)(\w*model|\w*net|\w*module)$", re.IGNORECASE)
_PADS: Final = re.compile(r"\bpad_sequence\(|\bpack_sequence\(|\bF\.pad\(|functional\.pad\(|\.pad\(")
_COLLATORS: Final = re.compile(r"^DataCollator(With|For)\w+$|^dynamic_padding")

_Objects = Sequence[tuple[str, Any]]


def told(
    program: Program,
    under: Ground,
    modules: _Objects,
    loaders: _Objects,
    loaded: Container[str],
    line: int | None,
    off: Container[str],
) -> dict[str, Any]:
    """Return the fields of ``CodeFacts`` that are told by calls; ``off`` are names and attributes that are False."""
    basis = tuple(calls(under.basis))
    firsts = {fact: _first(basis, holds) for fact, holds in _CALLS.items()}
    compiled = (one.place for one in decorators(under.basis) if one.name == "torch.compile")
    optimized = (path for path, module in modules if type(module).__name__ == "OptimizedModule")
    workers = max(_of_loaders(basis, loaders, "num_workers", 0), default=None)
    # Source: torch/utils/data/dataloader.py: ``prefetch_factor`` is 2 where there are workers and it is not given.
    ahead = max(_of_loaders(basis, loaders, "prefetch_factor", 2), default=None) if workers else None
    entered = (*calls(under.reach), *decorators(under.reach))
    casts = any(one.tail == "autocast" and not _is_off(one, program, off) for one in entered)
    named = {home.partition(".")[0] for home in imports_of(program).values()}
    running = [call for call in calls(program.running) if (call.cell, call.line) == (program.failing, line)]
    pins = any(call.receiver and call.tail == "pin_memory" for call in basis)
    return {
        **firsts,
        "compiles": firsts["compiles"] or next(compiled, None) or next(optimized, None),
        "distributed": _distributed(basis, modules),
        "find_unused_parameters": any(map(_finds_unused, basis)),
        "framework": ", ".join(name for name in _FRAMEWORKS if name in named or name in loaded) or None,
        "generates": _first(calls(program.running), lambda call: bool(call.receiver) and call.tail == "generate"),
        "numpy_call": next((call.text for call in running if call.name.startswith(("np.", "numpy."))), None),
        "pandas_call": next((call.text for call in running if call.name.startswith(("pd.", "pandas."))), None),
        "num_workers": workers,
        "prefetch": ahead,
        "pin_memory": pins or any(_of_loaders(basis, loaders, "pin_memory", False)),
        "sequence_varies": _sequence_varies(program, basis, loaders),
        "autocast": casts or any(map(_tells_mixed, basis)) or firsts["apex"] is not None,
        "half_weights": _has_half_weights(basis, modules),
    }


def _is_off(call: Call, program: Program, off: Container[str]) -> bool:
    """Whether a context is entered with ``enabled`` False, be it the value of a name or of a parameter."""
    text = call.keywords.get("enabled", "")
    text = call.given(program).get(text, text)
    return text == "False" or text in off


def _compiles(call: Call) -> bool:
    return call.tail == "compile" and (call.receiver == "torch" or _NETS.search(call.receiver) is not None)


def _captures(call: Call) -> bool:
    if call.name.endswith(("cuda.graph", "cuda.CUDAGraph", "make_graphed_callables")) or call.name == "CUDAGraph":
        return True
    return _compiles(call) and call.literals.get("mode") == "reduce-overhead"


_CALLS: Final[dict[str, Callable[[Call], bool]]] = {
    "apex": lambda call: _APEX.search(call.name) is not None,
    "compiles": _compiles,
    "cuda_graphs": _captures,
    "data_parallel": lambda call: call.tail == "DataParallel",
}
"""The facts that are the first call of a kind, as text with its place."""


def _first(found: Any, holds: Callable[[Call], bool]) -> str | None:
    return next((call.place for call in found if holds(call)), None)


def _distributed(basis: Sequence[Call], modules: _Objects) -> str | None:
    """Return what spreads the training over ranks: the name of the class, or ``deepspeed``."""
    for _, module in modules:
        names = [base.__name__ for base in mro_of(type(module))]
        if found := next((_SHARDING[name] for name in names if name in _SHARDING), None):
            return found
    for call in basis:
        if call.tail in _SHARDING:
            return _SHARDING[call.tail]
        if call.name == "deepspeed.initialize":
            return "deepspeed"
        for keyword in ("strategy", "deepspeed", "fsdp"):
            given = str(call.literals.get(keyword, ""))
            words = given if keyword == "strategy" else keyword * (given not in {"", "None", "False"})
            if found := next((name for word, name in _STRATEGIES.items() if word in words), None):
                return found
    return None


def _finds_unused(call: Call) -> bool:
    names = ("find_unused_parameters", "ddp_find_unused_parameters")
    by_strategy = "find_unused_parameters_true" in str(call.literals.get("strategy"))
    return by_strategy or any(call.literals.get(name) is True for name in names)


def _of_loaders(basis: Sequence[Call], loaders: _Objects, name: str, default: int) -> list[int]:
    """Return a setting of the loaders, or where no name leads to one, of the calls that make them."""
    given = [held(loader, name) for _, loader in loaders]
    if not loaders:
        given = [call.literals.get(name, default) for call in basis if call.tail == "DataLoader"]
    return [value for value in given if type(value) is int or type(value) is bool]


def _sequence_varies(program: Program, basis: Sequence[Call], loaders: _Objects) -> bool:
    """Whether batches are padded to the longest of their samples, so that their size is not that of the one before."""
    collators = [held(loader, "collate_fn") for _, loader in loaders]
    given = [call.keywords.get("collate_fn", "") for call in basis if call.tail == "DataLoader"]
    if any(text.startswith("lambda") and _PADS.search(text) for text in given):
        return True
    names = {one.__code__.co_name if type(one) is FunctionType else type(one).__name__ for one in collators}
    names |= {text.partition("(")[0].rpartition(".")[2] for text in given}
    functions = map(program.function, names - {""})
    tokenizers = (call for call in basis if "token" in call.name.lower() or call.name.endswith("processor"))
    return (
        any(map(_COLLATORS.match, names))
        or any(found is not None and _PADS.search(text_of(found)) for found in functions)
        or any(call.literals.get("padding") in (True, "longest") for call in tokenizers)
    )


def _tells_mixed(call: Call) -> bool:
    if not _TRAINERS.search(call.name):
        return False
    given = call.literals
    words = [str(given[name]) for name in ("precision", "mixed_precision") if name in given]
    is_switched = any(given.get(name) is True for name in ("fp16", "bf16"))
    return is_switched or any(_MIXED.search(word) and "true" not in word for word in words)


def _has_half_weights(basis: Sequence[Call], modules: _Objects) -> bool:
    """Whether most of the weights take 2 bytes each; where no module is at hand, whether the cells make them so."""
    counts: dict[int, int] = {}
    for count, each in sizes(parameters(module for _, module in modules)):
        counts[each] = counts.get(each, 0) + count
    return max(counts, key=lambda each: counts[each]) == 2 if counts else any(map(_makes_half, basis))


def _makes_half(call: Call) -> bool:
    if call.tail in {"half", "bfloat16"}:
        return re.search(r"model|net|unet|pipe|encoder|decoder", call.receiver, re.IGNORECASE) is not None
    if call.tail in {"from_pretrained", "from_config"}:
        return any(_HALF.match(call.keywords.get(name, "")) for name in ("torch_dtype", "dtype"))
    return call.name.endswith("set_default_dtype") and any(map(_HALF.match, call.arguments))


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
    return tuple((path, size) for path, loader in loaders if type(size := held(loader, "batch_size")) is int)


def loaders(found: Iterable[tuple[str, Any]], *, tries: bool = True) -> tuple[LoaderFacts, ...]:
    """Return the facts of each loader, in their order.

    ``tries``: whether samples are made in a copy of the process, to tell whether they depend on their worker.
    """
    return tuple(_facts(path, plain_dict(loader) or {}, tries) for path, loader in found)


def _facts(path: str, own: dict[str, Any], tries: bool) -> LoaderFacts:
    workers, collate = own.get("num_workers"), own.get("collate_fn")
    workers = workers if type(workers) is int else 0
    ahead = own.get("prefetch_factor")
    sampler = _innermost(own)
    bases = mro_of(type(own.get("dataset")))
    is_iterable = any(name_of(base) == "IterableDataset" and module_of(base).startswith(_HOMES) for base in bases)
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
    )


def _varies(own: dict[str, Any], *, tries: bool) -> str | None:
    """Return why a batch may depend on the worker that makes it, None where no two of them differed."""
    if own.get("worker_init_fn") is not None:
        return "its `worker_init_fn` prepares each worker on its own"
    told, _ = answered(partial(_difference, own), limit_s=_LIMIT_S) if tries else (None, None)
    return "it was not tried whether two workers make the same" if told is None else told or None


def _difference(own: dict[str, Any]) -> str:
    """Return in what the samples of two workers differ, empty if in nothing; for a forked copy."""
    from oomdoctor.sandbox.restrictions import keep_to_itself, orphan_workers

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
    return held(batches, "sampler") if is_torchs else batches


def _order(own: dict[str, Any], sampler: Any) -> str | None:
    """Return why the order may depend on when indices are asked for, None where it is certain that it does not."""
    cls = type(sampler)
    if cls in (list, range):
        return None
    if not module_of(cls).startswith(_HOMES) or name_of(cls) not in _AT_ONCE:
        return f"when its `{name_of(cls)}` draws random numbers is not known"
    # With a generator of its own the sampler draws again at the end of an epoch, or in between with replacement.
    if name_of(cls) == "RandomSampler" and held(sampler, "generator") is not None:
        return "its sampler draws from a generator of the program's as it goes"
    return None


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

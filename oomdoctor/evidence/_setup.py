"""How the cells set the program up, as their calls tell: loaders, precision, devices, compilation, other libraries.

What a name leads to is looked at first, where it tells the same: a loader's dictionary, the classes of modules.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Sequence
from types import FunctionType
from typing import Any, Final

from oomdoctor.evidence._models import parameters, sizes
from oomdoctor.objects.kinds import mro_of, plain_dict
from oomdoctor.program.definitions import Call, Program, calls, calls_at, decorators, imports_of, text_of
from oomdoctor.program.ground import Ground

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
    program: Program, under: Ground, modules: _Objects, loaders: _Objects, loaded: Container[str], line: int | None
) -> dict[str, Any]:
    """Return the fields of ``CodeFacts`` that are told by calls.

    Args:
        loaded: names of the modules that this process has imported.
        line: line of the failing cell that was running.
    """
    basis = tuple(calls(under.basis))
    firsts = {fact: _first(basis, holds) for fact, holds in _CALLS.items()}
    compiled = (one.place for one in decorators(under.basis) if one.name == "torch.compile")
    optimized = (path for path, module in modules if type(module).__name__ == "OptimizedModule")
    workers = max(_of_loaders(basis, loaders, "num_workers", 0), default=None)
    # Source: torch/utils/data/dataloader.py: ``prefetch_factor`` is 2 where there are workers and it is not given.
    ahead = max(_of_loaders(basis, loaders, "prefetch_factor", 2), default=None) if workers else None
    entered = (*calls(under.reach), *decorators(under.reach))
    casts = any(one.tail == "autocast" and one.literals.get("enabled") is not False for one in entered)
    named = {home.partition(".")[0] for home in imports_of(program).values()}
    running = calls_at(program, line) if line is not None else ()
    pins = any(call.receiver and call.method == "pin_memory" for call in basis)
    return {
        **firsts,
        "compiles": firsts["compiles"] or next(compiled, None) or next(optimized, None),
        "distributed": _distributed(basis, modules),
        "find_unused_parameters": any(map(_finds_unused, basis)),
        "framework": ", ".join(name for name in _FRAMEWORKS if name in named or name in loaded) or None,
        "generates": _first(calls(program.running), lambda call: bool(call.receiver) and call.method == "generate"),
        "numpy_call": next((call.text for call in running if call.name.startswith(("np.", "numpy."))), None),
        "num_workers": workers,
        "prefetch": ahead,
        "pin_memory": pins or any(_of_loaders(basis, loaders, "pin_memory", False)),
        "sequence_varies": _sequence_varies(program, basis, loaders),
        "autocast": casts or any(map(_tells_mixed, basis)) or firsts["apex"] is not None,
        "half_weights": _has_half_weights(basis, modules),
    }


def _compiles(call: Call) -> bool:
    return call.method == "compile" and (call.receiver == "torch" or _NETS.search(call.receiver) is not None)


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
    """Whether DDP is told to look for parameters without a gradient in each step."""
    names = ("find_unused_parameters", "ddp_find_unused_parameters")
    by_strategy = "find_unused_parameters_true" in str(call.literals.get("strategy"))
    return by_strategy or any(call.literals.get(name) is True for name in names)


def _of_loaders(basis: Sequence[Call], loaders: _Objects, name: str, default: int) -> list[int]:
    """Return a setting of the loaders, or where no name leads to one, of the calls that make them."""
    given = [(plain_dict(loader) or {}).get(name) for _, loader in loaders]
    if not loaders:
        given = [call.literals.get(name, default) for call in basis if call.tail == "DataLoader"]
    return [value for value in given if type(value) is int or type(value) is bool]


def _sequence_varies(program: Program, basis: Sequence[Call], loaders: _Objects) -> bool:
    """Whether batches are padded to the longest of their samples, so that their size is not that of the one before."""
    held = [(plain_dict(loader) or {}).get("collate_fn") for _, loader in loaders]
    given = [call.keywords.get("collate_fn", "") for call in basis if call.tail == "DataLoader"]
    if any(text.startswith("lambda") and _PADS.search(text) for text in given):
        return True
    names = {one.__code__.co_name if type(one) is FunctionType else type(one).__name__ for one in held}
    names |= {text.partition("(")[0].rpartition(".")[2] for text in given}
    functions = map(program.function, names - {""})
    return (
        any(map(_COLLATORS.match, names))
        or any(found is not None and _PADS.search(text_of(found)) for found in functions)
        or any(map(_pads_to_longest, basis))
    )


def _pads_to_longest(call: Call) -> bool:
    """Whether it is a tokenizer's call with ``padding=True``, which pads to the longest of what it is given."""
    is_tokenizer = "token" in call.name.lower() or call.name.endswith("processor")
    return is_tokenizer and call.literals.get("padding") in (True, "longest")


def _tells_mixed(call: Call) -> bool:
    """Whether a trainer is told to compute in mixed precision."""
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
    if call.method in {"half", "bfloat16"}:
        return re.search(r"model|net|unet|pipe|encoder|decoder", call.receiver, re.IGNORECASE) is not None
    if call.method in {"from_pretrained", "from_config"}:
        return any(_HALF.match(call.keywords.get(name, "")) for name in ("torch_dtype", "dtype"))
    return call.name.endswith("set_default_dtype") and any(map(_HALF.match, call.arguments))

"""How the program is set up beside its loop: on several devices, compiled, captured, and with which other libraries."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any, Final, TypeAlias

from oomdoctor.objects.kinds import mro_of
from oomdoctor.program.calls import Call, calls, decorators, imported_modules
from oomdoctor.program.definitions import Program, Scope

__all__ = [
    "compiles",
    "cuda_graphs",
    "data_parallel",
    "distributed",
    "find_unused_parameters",
    "framework",
    "generates",
]

Scopes: TypeAlias = Sequence[Scope]

_FRAMEWORKS: Final = (
    "tensorflow",
    "jax",
    "cupy",
    "paddle",
    "jittor",
    "mxnet",
    "vllm",
    "deepspeed",
    "rmm",
    "bitsandbytes",
)
"""Libraries that take memory of the device beside PyTorch's pool, or in its stead."""

_SHARDING: Final = {
    "DistributedDataParallel": "DistributedDataParallel",
    "DDP": "DistributedDataParallel",
    "FullyShardedDataParallel": "FullyShardedDataParallel",
    "FSDP": "FullyShardedDataParallel",
    "FSDPModule": "FullyShardedDataParallel",
    "fully_shard": "FullyShardedDataParallel",
    "DeepSpeedEngine": "deepspeed",
}


def data_parallel(basis: Scopes) -> str | None:
    """Return the call of ``nn.DataParallel``, which gathers all outputs on one device."""
    return _first(basis, lambda call: call.tail == "DataParallel")


def distributed(basis: Scopes, modules: Iterable[tuple[str, Any]]) -> str | None:
    """Return what spreads the training over ranks: the name of the class, or ``deepspeed``."""
    for _, module in modules:
        names = [base.__name__ for base in mro_of(type(module))]
        found = next((_SHARDING[name] for name in names if name in _SHARDING), None)
        if found:
            return found
    for call in calls(basis):
        if call.tail in _SHARDING:
            return _SHARDING[call.tail]
        if call.name == "deepspeed.initialize":
            return "deepspeed"
        for keyword, value in call.literals.items():
            if keyword in {"strategy", "deepspeed", "fsdp"} and (told := _told(keyword, value)):
                return told
    return None


def _told(keyword: str, value: object) -> str | None:
    if keyword != "strategy":
        name = {"deepspeed": "deepspeed", "fsdp": "FullyShardedDataParallel"}[keyword]
        return name if str(value) not in {"", "None", "False"} else None
    return next((name for word, name in _STRATEGIES.items() if word in str(value)), None)


_STRATEGIES: Final = {
    "ddp": "DistributedDataParallel",
    "fsdp": "FullyShardedDataParallel",
    "deepspeed": "deepspeed",
}


def find_unused_parameters(basis: Scopes) -> bool:
    """Whether DDP looks for parameters without a gradient in each step."""
    return any(
        call.literals.get("find_unused_parameters") is True
        or call.literals.get("ddp_find_unused_parameters") is True
        or "find_unused_parameters_true" in str(call.literals.get("strategy"))
        for call in calls(basis)
    )


def compiles(basis: Scopes, modules: Iterable[tuple[str, Any]]) -> str | None:
    """Return the call of ``torch.compile``, or the model that it was called on."""
    found = _first(basis, _compiles)
    if found:
        return found
    for decorator in decorators(basis):
        if decorator.name == "torch.compile":
            return decorator.place
    return next((path for path, module in modules if type(module).__name__ == "OptimizedModule"), None)


def _compiles(call: Call) -> bool:
    if call.method != "compile":
        return False
    named = re.search(r"(^|\.)(\w*model|\w*net|\w*module)$", call.receiver, re.IGNORECASE)
    return call.receiver == "torch" or named is not None


def cuda_graphs(basis: Scopes) -> str | None:
    """Return the call that captures a CUDA graph, whose memory lies in a private pool."""

    def captures(call: Call) -> bool:
        if call.name.endswith(("cuda.graph", "cuda.CUDAGraph", "make_graphed_callables")) or call.name == "CUDAGraph":
            return True
        return _compiles(call) and call.literals.get("mode") == "reduce-overhead"

    return _first(basis, captures)


def framework(program: Program, loaded: Container[str]) -> str | None:
    """Return other libraries that use the device in this process: those that the cells import or that are loaded."""
    named = {name.partition(".")[0] for name in imported_modules(program)}
    return ", ".join(name for name in _FRAMEWORKS if name in named or name in loaded) or None


def generates(program: Program) -> str | None:
    """Return the call that makes a decoder generate token by token, filling its KV cache."""
    return _first(program.running, lambda call: bool(call.receiver) and call.method == "generate")


def _first(scopes: Iterable[Scope], holds: Callable[[Call], bool]) -> str | None:
    return next((call.place for call in calls(scopes) if holds(call)), None)

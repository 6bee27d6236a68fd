"""How the program is set up beside its loop: on several devices, compiled, captured, and with which other libraries."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any, Final, TypeAlias

from oomdoctor.objects.kinds import mro_of
from oomdoctor.program.definitions import Program, Scope, place
from oomdoctor.program.names import call_name, own_nodes

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
    return _first(basis, lambda call: call_name(call).rpartition(".")[2] == "DataParallel")


def distributed(basis: Scopes, modules: Iterable[tuple[str, Any]]) -> str | None:
    """Return what spreads the training over ranks: the name of the class, or ``deepspeed``."""
    for _, module in modules:
        names = [base.__name__ for base in mro_of(type(module))]
        found = next((_SHARDING[name] for name in names if name in _SHARDING), None)
        if found:
            return found
    for _, call in _calls(basis):
        name = call_name(call)
        if name.rpartition(".")[2] in _SHARDING:
            return _SHARDING[name.rpartition(".")[2]]
        if name == "deepspeed.initialize":
            return "deepspeed"
        for keyword in call.keywords:
            if keyword.arg in {"strategy", "deepspeed", "fsdp"} and (told := _told(keyword)):
                return told
    return None


def _told(keyword: ast.keyword) -> str | None:
    text = str(keyword.value.value) if isinstance(keyword.value, ast.Constant) else ""
    if keyword.arg != "strategy":
        name = {"deepspeed": "deepspeed", "fsdp": "FullyShardedDataParallel"}[str(keyword.arg)]
        return name if text not in {"", "None", "False"} or not isinstance(keyword.value, ast.Constant) else None
    return next((name for word, name in _STRATEGIES.items() if word in text), None)


_STRATEGIES: Final = {
    "ddp": "DistributedDataParallel",
    "fsdp": "FullyShardedDataParallel",
    "deepspeed": "deepspeed",
}


def find_unused_parameters(basis: Scopes) -> bool:
    """Whether DDP looks for parameters without a gradient in each step."""
    return any(
        isinstance(keyword.value, ast.Constant)
        and (
            (keyword.arg in {"find_unused_parameters", "ddp_find_unused_parameters"} and keyword.value.value is True)
            or (keyword.arg == "strategy" and "find_unused_parameters_true" in str(keyword.value.value))
        )
        for _, call in _calls(basis)
        for keyword in call.keywords
    )


def compiles(basis: Scopes, modules: Iterable[tuple[str, Any]]) -> str | None:
    """Return the call of ``torch.compile``, or the model that it was called on."""
    found = _first(basis, _compiles)
    if found:
        return found
    for scope in basis:
        for node in scope.function.node.decorator_list if scope.function else ():
            if call_name(node) == "torch.compile":
                return place(scope, node)
    return next((path for path, module in modules if type(module).__name__ == "OptimizedModule"), None)


def _compiles(call: ast.Call) -> bool:
    receiver, _, method = ast.unparse(call.func).rpartition(".")
    if method != "compile":
        return False
    return receiver == "torch" or bool(re.search(r"(^|\.)(\w*model|\w*net|\w*module)$", receiver, re.IGNORECASE))


def cuda_graphs(basis: Scopes) -> str | None:
    """Return the call that captures a CUDA graph, whose memory lies in a private pool."""

    def captures(call: ast.Call) -> bool:
        name = call_name(call)
        modes = [keyword.value for keyword in call.keywords if keyword.arg == "mode"]
        return (
            name.endswith(("cuda.graph", "cuda.CUDAGraph", "make_graphed_callables"))
            or name in {"CUDAGraph"}
            or (_compiles(call) and any(isinstance(m, ast.Constant) and m.value == "reduce-overhead" for m in modes))
        )

    return _first(basis, captures)


def framework(program: Program, loaded: Container[str]) -> str | None:
    """Return other libraries that use the device in this process: those that the cells import or that are loaded."""
    named = {
        name.partition(".")[0] for scope in program.scopes for node in own_nodes(scope.body) for name in _imported(node)
    }
    return ", ".join(name for name in _FRAMEWORKS if name in named or name in loaded) or None


def _imported(node: ast.AST) -> tuple[str, ...]:
    if isinstance(node, ast.Import):
        return tuple(alias.name for alias in node.names)
    return (node.module or "",) if isinstance(node, ast.ImportFrom) else ()


def generates(program: Program) -> str | None:
    """Return the call that makes a decoder generate token by token, filling its KV cache."""
    return _first(program.running, lambda call: isinstance(call.func, ast.Attribute) and call.func.attr == "generate")


def _first(scopes: Iterable[Scope], holds: Callable[[ast.Call], bool]) -> str | None:
    return next((place(scope, call) for scope, call in _calls(scopes) if holds(call)), None)


def _calls(scopes: Iterable[Scope]) -> Iterator[tuple[Scope, ast.Call]]:
    for scope in scopes:
        yield from ((scope, node) for node in own_nodes(scope.body) if isinstance(node, ast.Call))

"""The end state of a run as plain values: each leaf that a name of the user's leads to, and what else a cell leaves."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType, ModuleType
from typing import Any, Final

import torch

from oomdoctor.objects.leaves import Leaf, Leaves, generators, plain_leaf, tensor_leaf, text_leaf
from oomdoctor.objects.named import is_users, own_modules

_MOST_LEAVES: Final = 50_000


class TooMuch(Exception):
    """There is more to compare than is looked at."""


def names_of(namespace: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the user's, sorted."""
    return tuple(sorted(name for name in namespace if is_users(name)))


def end_of(
    namespace: Mapping[str, Any], names: Collection[str], said: str, beside: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Leaf]:
    """Return the leaves of what ``names`` lead to, of the generators, and of what was printed.

    Args:
        namespace: the user's; what leads back to it is not followed.
        names: those of the unchanged program: what the changed one binds besides is its own.
        said: the text that the run has printed.
        beside: more values, by what they are called.
    """
    found: dict[str, Leaf] = {}
    leaves = Leaves(namespace)
    for name, value in ({name: namespace[name] for name in names if name in namespace} | {**beside}).items():
        for path, leaf in leaves.below(value, name):
            found[path] = leaf
            if len(found) >= _MOST_LEAVES:
                break
    for module in own_modules():
        for name, value in vars(module).items():
            if is_users(name) and type(value) is not ModuleType and len(found) < _MOST_LEAVES:
                found.update(leaves.below(value, f"{module.__name__}.{name}"))
    if len(found) >= _MOST_LEAVES:
        raise TooMuch(f"the names lead to more than {_MOST_LEAVES:,} values")
    found["what is printed"] = text_leaf(said)
    found["the modes of torch"] = plain_leaf([*map(str, _modes())])
    found.update(generators())
    return found


def gradients_of(optimizer: torch.optim.Optimizer) -> Iterator[Leaf]:
    """Yield the gradients that an optimizer is about to step by."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                yield tensor_leaf(parameter.grad, is_gradient=True)


def _modes() -> Iterator[object]:
    """Yield the modes and settings of torch that results depend on."""
    yield from (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_cache_enabled())
    yield from (torch.get_default_dtype(), torch.get_default_device(), torch.get_float32_matmul_precision())
    yield from (torch.is_anomaly_enabled(), torch.are_deterministic_algorithms_enabled())

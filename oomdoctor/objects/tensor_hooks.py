"""The hooks of one tensor, known by the numbers of their handles: what a cell registered is taken away again.

``Tensor.register_hook`` and ``register_post_accumulate_grad_hook`` put theirs into dicts that autograd reads. The hooks
themselves are not held, because they would keep alive what they close over: one that a cell removed stays removed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

__all__ = ["has_hooks", "hooks_of", "take_new_hooks_away"]

_KINDS: Final = ("_backward_hooks", "_post_accumulate_grad_hooks")


def hooks_of(tensor: Any) -> frozenset[int]:
    """Return the numbers of the hooks of a tensor; only one that requires gradients can have any."""
    return frozenset(number for hooks in _registered(tensor) for number in hooks)


def has_hooks(tensor: Any) -> bool:
    """Return whether a backward through a tensor runs functions that were registered on it."""
    return any(True for _ in _registered(tensor))


def take_new_hooks_away(tensor: Any, before: frozenset[int]) -> None:
    """Remove the hooks of a tensor that were not there before."""
    for hooks in _registered(tensor):
        for number in [number for number in hooks if number not in before]:
            del hooks[number]


def _registered(tensor: Any) -> Iterator[dict[int, Any]]:
    if tensor.requires_grad:
        yield from (hooks for kind in _KINDS if (hooks := getattr(tensor, kind)))

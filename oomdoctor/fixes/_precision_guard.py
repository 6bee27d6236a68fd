"""Weights that a patched cell casts in place, kept for the way back.

A retry copies weights just in time for the first step of an optimizer. A cast changes them as a step does, and nobody
tells of it: so it is announced in the same way, by a step of an optimizer that does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from oomdoctor.fixes._forward import is_shadow_run

__all__ = ["announced"]


class _Announcement(torch.optim.Optimizer):
    """An optimizer of which only the hooks before its step matter."""

    def __init__(self, parameters: list[Any]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing."""


@contextmanager
def announced() -> Iterator[None]:
    """Announce the first cast or move of a module within the context before it happens."""
    original: Callable[..., nn.Module] = nn.Module._apply
    is_due = not is_shadow_run()

    def apply(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        nonlocal is_due
        if is_due and (parameters := list(module.parameters())):
            is_due = False
            _Announcement(parameters).step()
        return original(module, *args, **kwargs)

    nn.Module._apply = apply  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module._apply = original  # type: ignore[method-assign]

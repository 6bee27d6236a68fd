"""LBFGS in a shadow: values decide how long it searches and what it remembers, so it does the most that it may.

It makes all of its iterations, and its line search takes two steps.
Limits: a search that has to narrow its bracket from both sides holds two gradients more, one that is right at once two
less.
"""

from __future__ import annotations

import sys
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


def search_in_full() -> None:
    """Let the LBFGS of this process make all of its iterations."""
    # Torch deletes the module's name from its package.
    module: Any = sys.modules[torch.optim.LBFGS.__module__]
    step = module.LBFGS.step

    @wraps(step)
    def in_full(optimizer: Any, closure: Any) -> Any:
        for group in optimizer.param_groups:
            group["tolerance_change"] = -1.0
        return step(optimizer, closure)

    module.LBFGS.step = in_full
    module._strong_wolfe = _searched


def _searched(
    evaluate: Callable[..., Any], x: Any, t: Any, d: Any, _f: Any, g: Any, *_args: Any, **_kwargs: Any
) -> Any:
    """Do what ``torch.optim.lbfgs._strong_wolfe`` does where its second step is right.

    Source: that function in torch 2.13: ``g``, both of ``bracket_g`` and the last ``g_new`` live as long as it runs.
    """
    before = g.clone()
    _, gradient = evaluate(x, t, d)
    bracket = [before, gradient.clone()]
    loss, gradient = evaluate(x, t, d)
    bracket[1] = gradient.clone()
    return loss, bracket[1], t, 2

"""The losses whose single number lies in memory for one number per element.

Their kernels make the result as large as their input, and shrink it to a number at the end: its memory stays as large
for as long as the loss lives. Their meta kernels do not tell of that.

Source: ``mse_loss``, ``smooth_l1_loss`` and ``binary_cross_entropy`` in ``aten/src/ATen/native/BinaryOps.cpp`` and
``Loss.cpp``; what a run of them with torch 2.13 allocates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

_aten = torch.ops.aten


def _reduced(func: Any, args: Any, kwargs: Any) -> Any:
    out = func(*args, **kwargs)
    if out.dim():
        return out
    shape = torch.broadcast_shapes(args[0].shape, args[1].shape)  # type: ignore[no-untyped-call]
    return torch.empty(shape, dtype=out.dtype, device=out.device).resize_(())


LOSSES: Final[dict[Any, Callable[[Any, Any, Any], Any]]] = {
    _aten.mse_loss.default: _reduced,
    _aten.smooth_l1_loss.default: _reduced,
    _aten.binary_cross_entropy.default: _reduced,
}
"""Operations to be run on fake tensors by a function of their own, ``(func, args, kwargs)``."""

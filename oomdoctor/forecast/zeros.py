"""The zeros of forward-mode derivatives, which are without memory until something needs them.

Where a tangent is not known to be anything else, autograd makes a tensor that is marked as zero and has no data. Its
meta kernel makes one of full size.

Source: ``_efficientzerotensor`` in ``aten/src/ATen/native/TensorFactories.cpp``, whose allocator returns no memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch


def _without_memory(_func: Any, args: Any, kwargs: Any) -> Any:
    return torch.empty((), dtype=kwargs.get("dtype"), device=kwargs.get("device")).expand(args[0])


ZEROS: Final[dict[Any, Callable[[Any, Any, Any], Any]]] = {
    torch.ops.aten._efficientzerotensor.default: _without_memory,
}
"""Operations to be run on fake tensors by a function of their own, ``(func, args, kwargs)``."""

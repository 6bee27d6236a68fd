"""Watches what fused attention is given while a changed cell runs, and refuses what its kernels take otherwise."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from oomdoctor.errors import OomDoctorError
from oomdoctor.fixes import _forward

_DIMENSIONS: Final = 4
"""Batch, heads, length and features: what the kernels take."""
_SOFTMAXES: Final = frozenset({torch.ops.aten._softmax.default, torch.ops.aten._safe_softmax.default})


class Checked(TorchFunctionMode):
    """Refuses attention that fused kernels take otherwise than when it is written out, or that none of them takes.

    A mask that leaves a query nothing to attend to gives, written out, a mean of all, or what is not a number.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one function of torch.

        Raises:
            OomDoctorError: it is such attention.
        """
        kwargs = kwargs or {}
        if func is not functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        given = kwargs.get("attn_mask", args[3] if len(args) > 3 else None)
        is_mask = isinstance(given, torch.Tensor) and given.dtype is torch.bool and not _forward.is_shadow_run()
        if is_mask and not bool(given.any(-1).all()):
            raise OomDoctorError("a mask leaves a query nothing to attend to, which the fused kernel takes otherwise")
        with _Softmax() as seen:  # type: ignore[no-untyped-call]
            result = func(*args, **kwargs)
        query = kwargs.get("query", args[0] if args else None)
        if seen.ran and query.dim() == _DIMENSIONS:
            drops = kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)
            raise OomDoctorError(
                f"PyTorch has no fused kernel for this attention{' with dropout' if drops else ''} on "
                f"{query.device.type}: it writes out the scores"
            )
        return result


class _Softmax(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees whether a softmax runs as an operation of its own, which it does for scores that are written out."""

    ran = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ran = self.ran or func in _SOFTMAXES
        return func(*args, **(kwargs or {}))

"""Watches cross-entropies while a changed cell runs, and refuses those that may not be taken over chunks of rows."""

from __future__ import annotations

from inspect import signature
from typing import Any, Final

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from oomdoctor.errors import OomDoctorError

__all__ = ["CheckedLoss"]

_HALVES: Final = (torch.float16, torch.bfloat16)
_SIGNATURE: Final = signature(functional.cross_entropy)


class CheckedLoss(TorchFunctionMode):
    """Refuses a ``cross_entropy`` that a change of the source would take wrongly in chunks."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one function of torch.

        Raises:
            OomDoctorError: it is such a call.
        """
        kwargs = kwargs or {}
        if func is functional.cross_entropy and (why := _why_not(_SIGNATURE.bind(*args, **kwargs).arguments)):
            raise OomDoctorError(f"a cross-entropy {why}")
        return func(*args, **kwargs)


def _why_not(given: dict[str, Any]) -> str | None:
    """Return why the rows cannot be taken apart, None if they can."""
    logits, target, weight = given["input"], given["target"], given.get("weight")
    if target.is_floating_point():
        return "takes probabilities for targets: it is not taken in chunks"
    if logits.ndim < 2 or target.shape != logits.shape[:1] + logits.shape[2:]:
        return "takes no rows of classes: it is not taken in chunks"
    if weight is not None and weight.requires_grad:
        return "learns its class weights: it is not taken in chunks"
    if logits.dtype in _HALVES and not torch.is_autocast_enabled(logits.device.type):
        return "is taken in half precision: sums of chunks would round otherwise"
    return None

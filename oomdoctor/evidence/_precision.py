"""In which precision this device, and this processor, computes what the models are made of."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import Any, Final

from oomdoctor.objects.kinds import module_of, registered, submodules
from oomdoctor.sandbox.fork import answered
from oomdoctor.sandbox.walls import raise_limits

_MOST_TRIED: Final = 64 << 20
"""Bytes of weights from which on a layer is not tried: it is copied for that."""
_TRIAL_S: Final = 10.0
_tried: Final[dict[type, bool]] = {}
"""Whether a class of layers lacks a kernel; the processor does not change."""


def native_bfloat16() -> bool | None:
    """Whether the CUDA device computes in bfloat16 itself; None where CUDA is not in use in this process.

    Asked of the properties that torch has read, so that nothing is set up on the device.

    Source: ``torch.cuda.is_bf16_supported``: compute capability 8.0, and every device of ROCm.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    return torch.version.hip is not None or bool(torch.cuda.get_device_capability() >= (8, 0))


def float32_only(models: Iterable[Any]) -> tuple[str, ...]:
    """Return the classes of layers that this processor computes in float32 and has no kernel for in bfloat16.

    It depends on the processor's extensions and on the library, so it is tried: in a forked copy, the smallest layer of
    a class runs on a few zeros in both types. Limits: layers of torch in host memory that take one tensor.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None or torch.cuda.is_initialized() or not hasattr(os, "fork"):
        return ()
    layers: dict[type, tuple[int, Any]] = {}
    for layer in (layer for model in models for _, layer in submodules(model)):
        size = _bytes_to_try(torch, layer)
        if size < layers.get(type(layer), (_MOST_TRIED,))[0]:
            layers[type(layer)] = size, layer
    untried = [layer for cls, (_, layer) in layers.items() if cls not in _tried]
    if untried:
        told = answered(
            lambda: "".join(str(int(_lacks_bfloat16(torch, layer))) for layer in untried),
            limit_s=_TRIAL_S,
            prepare=raise_limits,
        )
        if told is not None and told.text:
            _tried.update((type(layer), lacks == "1") for layer, lacks in zip(untried, told.text, strict=True))
    return tuple(sorted(cls.__name__ for cls in layers if _tried.get(cls)))


def _bytes_to_try(torch: Any, layer: Any) -> int:
    """Return the bytes of a layer of torch that has weights of its own in float32 on the CPU; too many of any other."""
    if not module_of(type(layer)).startswith("torch.nn.modules."):
        return _MOST_TRIED
    weights = [weight for _, weight in registered(layer, "_parameters") if weight is not None]
    if not weights or any(type(one) is not torch.nn.Parameter for one in weights):
        return _MOST_TRIED
    if any(one.device.type != "cpu" or one.dtype != torch.float32 for one in weights):
        return _MOST_TRIED
    return sum(one.nbytes for one in weights)


def _lacks_bfloat16(torch: Any, layer: Any) -> bool:
    """Whether the layer takes some input in float32 and fails on it under autocast; for a forked copy."""
    from torch.utils._python_dispatch import _disable_current_modes

    weight = next((one for _, one in registered(layer, "_parameters") if one is not None and one.dim() > 1), None)
    if weight is None:
        return False
    width, window = weight.shape[1], weight.shape[2:]
    with torch.no_grad(), _disable_current_modes():
        for shape in ((2, 2, width), (2, width, *window)):
            given = torch.zeros(shape, device="cpu")
            try:
                type(layer).forward(layer, given)
            except (RuntimeError, TypeError, ValueError, IndexError):
                continue  # it takes something else
            try:
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    type(layer).forward(layer, given)
            except RuntimeError:
                return True
            return False
    return False

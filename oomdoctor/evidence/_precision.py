"""In which precision this device, and this processor, computes what the models are made of."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import Any, Final

from oomdoctor.evidence._models import parameters
from oomdoctor.objects.kinds import name_of, submodules
from oomdoctor.sandbox.copies import answered

_RECURRENT: Final = ("LSTM", "GRU", "RNN")
"""Layers that oneDNN has no kernel in bfloat16 for on some processors."""
_TRIAL_S: Final = 10.0
_tried: Final[dict[str, bool]] = {}
"""Whether a kind of layers lacks a kernel; the processor does not change."""


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

    It depends on the processor's extensions and on the library, so it is tried: in a forked copy, a small layer of the
    kind runs on a few zeros. Limits: layers of torch in host memory.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None or torch.cuda.is_initialized() or not hasattr(os, "fork"):
        return ()
    layers = [layer for model in models for _, layer in submodules(model)]
    there = [layer for layer in layers if any(type(layer) is getattr(torch.nn, name) for name in _RECURRENT)]
    weights = {name_of(type(layer)): parameters([layer]) for layer in there}
    plain = {name: all(type(one) is torch.nn.Parameter for one in given) for name, given in weights.items()}
    on_host = {name for name in weights if plain[name] and all(one.device.type == "cpu" for one in weights[name])}
    if untried := sorted(on_host - _tried.keys()):
        told, _ = answered(
            lambda: "".join(str(int(_lacks_bfloat16(torch, name))) for name in untried), limit_s=_TRIAL_S
        )
        if told:
            _tried.update((name, lacks == "1") for name, lacks in zip(untried, told, strict=True))
    return tuple(sorted(name for name in on_host if _tried.get(name)))


def _lacks_bfloat16(torch: Any, name: str) -> bool:
    """Whether a layer fails under autocast; for a forked copy, whose random numbers are its own."""
    from torch.utils._python_dispatch import _disable_current_modes

    with torch.no_grad(), _disable_current_modes(), torch.autocast("cpu", dtype=torch.bfloat16):
        try:
            getattr(torch.nn, name)(2, 2, device="cpu")(torch.zeros(2, 2, 2, device="cpu"))
        except RuntimeError:
            return True
    return False

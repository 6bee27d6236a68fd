"""What a run costs in time, from the operations in it, and how far its forecast may be off.

Time is counted in bytes moved, by the roofline model: an operation takes as long as the larger of the bytes that it
reads and writes, and its FLOPs divided by the machine balance; each has a fixed price on top. Only ratios between
runs of one cell are ever shown. Limits: caches, parallelism and the copy engine are not modelled.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.utils.flop_counter import flop_registry

__all__ = ["Meter"]

_FLOPS_PER_BYTE: Final = 8.0
"""Machine balance: FLOPs that a processor does in the time in which it moves a byte.

Between the peak ratios of server processors (about 4 to 10 in float32) and of GPUs without tensor cores (12.6 on an
A100: 19.5 TFLOP/s over 1.55 TB/s, by its data sheet).
"""

_BYTES_PER_CALL: Final = 64 * 1024
"""Price of one operation whatever its size: about 5 µs of dispatch at 12 GB/s of memory traffic."""

_MARGIN: Final = 0.02
_MARGIN_CONVOLUTION: Final = 0.15
_MARGIN_RECURRENT: Final = 0.35
"""Margins for what the kernels of operators need inside, which no dispatcher sees.

Source: ``benchmarks/forecast.py`` with torch 2.13 on a CPU: forecasts at most 0.3 % too low without convolutions, 12 %
with (scratch of the kernels), 15 % with fused LSTMs (scratch of their backward). An earlier series of 80 runs of ten
models had at most 0.8 %, 9.5 % and, without the workspace of LSTMs, 33 %.
"""

_aten = torch.ops.aten


def _packets(*names: str) -> frozenset[Any]:
    return frozenset(getattr(_aten, name) for name in names if hasattr(_aten, name))


_CONVOLUTIONS: Final = _packets(
    *("convolution", "_convolution", "convolution_backward", "mkldnn_convolution", "cudnn_convolution")
)
_RECURRENT: Final = _packets("mkldnn_rnn_layer", "mkldnn_rnn_layer_backward", "_cudnn_rnn", "miopen_rnn", "lstm", "gru")


class Meter:
    """Adds up what operations cost and which margin they call for.

    Attributes:
        cost: time so far in bytes moved.
        margin: calibrated error of the peak of a run with these operations, as a ratio.
    """

    least_margin: Final = _MARGIN

    def __init__(self) -> None:
        self.cost = 0.0
        self.margin = _MARGIN
        self._views: dict[Any, bool] = {}

    def count(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Add one operation on tensors, whose data need not exist."""
        if self._is_view(func):
            return
        moved = _bytes(args) + _bytes(tuple(kwargs.values())) + _bytes(out)
        self.cost += max(moved, self._flops(func, args, kwargs, out) / _FLOPS_PER_BYTE) + _BYTES_PER_CALL
        packet = func._overloadpacket
        if packet in _RECURRENT:
            self.margin = max(self.margin, _MARGIN_RECURRENT)
        elif packet in _CONVOLUTIONS:
            self.margin = max(self.margin, _MARGIN_CONVOLUTION)

    def _flops(self, func: Any, args: Any, kwargs: Any, out: Any) -> float:
        formula = flop_registry.get(func._overloadpacket)
        if formula is None:
            return 0.0
        try:
            return float(formula(*args, **kwargs, out_val=out))
        except (TypeError, ValueError, AssertionError, AttributeError, IndexError):
            return 0.0  # a formula that does not know this overload; the bytes still count

    def _is_view(self, func: Any) -> bool:
        known = self._views.get(func)
        if known is None:
            returns = func._schema.returns
            known = bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
            self._views[func] = known
        return known


def _bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(map(_bytes, value)) if isinstance(value, (tuple, list)) else 0

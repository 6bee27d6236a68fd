"""What a run costs in time, from the operations in it, and how far its forecast may be off.

Time is counted in bytes moved, by the roofline model: an operation takes as long as the larger of the bytes that it
reads and writes, and its FLOPs divided by the machine balance; each has a fixed price on top. Only ratios between
runs of one cell are ever shown. Limits: caches, parallelism and the copy engine are not modelled.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from oomdoctor.forecast.kernels import Kernels, flop_registry

_FLOPS_PER_BYTE: Final = 8.0
"""Machine balance: FLOPs that a processor does in the time in which it moves a byte.

Between the peak ratios of server processors (about 4 to 10 in float32) and of GPUs without tensor cores (12.6 on an
A100: 19.5 TFLOP/s over 1.55 TB/s, by its data sheet).
"""

_BYTES_PER_CALL: Final = 64 * 1024
"""Price of one operation whatever its size: about 5 µs of dispatch at 12 GB/s of memory traffic."""

_MARGIN: Final = 0.02
_MARGIN_MEASURED: Final = 0.05
_MARGIN_CONVOLUTION: Final = 0.15
_MARGIN_RECURRENT: Final = 0.35
_MARGIN_ALGEBRA: Final = 0.25
_MARGIN_UNKNOWN: Final = 0.25
"""Margins for what the kernels of operators need inside, which no dispatcher sees: without convolutions and fused
recurrent layers, with such as were measured (see ``kernels``), with convolutions and recurrent layers that were not.

Source: ``benchmarks/results/forecast.txt``, 96 runs of twelve models with torch 2.13 on a CPU. Forecasts were too low
by at most 0.4 %, 2.0 %, 9.8 % and 14.7 % of the peak; the last margin holds for cuDNN's layers too, of which nothing
was measured. The margin for linear algebra is that of matrices of 100 rows and more, in runs of each operation alone.
"""

_aten = torch.ops.aten


def _packets(*names: str) -> frozenset[Any]:
    return frozenset(getattr(_aten, name) for name in names if hasattr(_aten, name))


_CONVOLUTIONS: Final = _packets(
    *("convolution", "_convolution", "convolution_backward", "mkldnn_convolution", "cudnn_convolution")
)
_ESTIMATED: Final = _packets("_cudnn_rnn", "miopen_rnn", "cudnn_convolution")
"""Operations of libraries that are not asked what they need."""
_RECURRENT: Final = _packets("mkldnn_rnn_layer", "mkldnn_rnn_layer_backward", "_cudnn_rnn", "miopen_rnn", "lstm", "gru")


class Meter:
    """Adds up what operations cost and which margin they call for.

    Attributes:
        cost: time so far in bytes moved.
        flops: floating point operations so far, as far as a formula tells them; ``moved``: bytes read and written.
    """

    least_margin: Final = _MARGIN

    def __init__(self, kernels: Kernels) -> None:
        self.cost = self.flops = self.moved = 0.0
        self._kernels = kernels
        self._recurrent = self._convolutions = self._estimated = False
        self._views: dict[Any, bool] = {}

    def count(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Add one operation on tensors, whose data need not exist."""
        if self._is_view(func):
            return
        moved = _bytes(args) + _bytes(tuple(kwargs.values())) + _bytes(out)
        flops = self._flops(func, args, kwargs, out)
        self.cost += max(moved, flops / _FLOPS_PER_BYTE) + _BYTES_PER_CALL
        self.flops, self.moved = self.flops + flops, self.moved + moved
        self._recurrent = self._recurrent or func._overloadpacket in _RECURRENT
        self._convolutions = self._convolutions or func._overloadpacket in _CONVOLUTIONS
        self._estimated = self._estimated or func._overloadpacket in _ESTIMATED

    @property
    def margin(self) -> float:
        """Calibrated error of the peak of a run with the operations so far, as a ratio."""
        algebra = _MARGIN_ALGEBRA if self._kernels.estimated else 0.0
        return max(self._of_layers, algebra, _MARGIN_UNKNOWN if self._kernels.unknown else 0.0)

    @property
    def is_estimate(self) -> bool:
        """Whether what kernels need inside is known only about, and matters."""
        return self.margin > _MARGIN_MEASURED

    @property
    def _of_layers(self) -> float:
        if not (self._recurrent or self._convolutions):
            return _MARGIN
        if not (self._kernels.unmeasured or self._estimated):
            return _MARGIN_MEASURED
        return _MARGIN_RECURRENT if self._recurrent else _MARGIN_CONVOLUTION

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

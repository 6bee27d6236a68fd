"""What a run costs in time, from the operations in it, and how far its forecast may be off.

Time is counted in bytes moved, by the roofline model: an operation takes as long as the larger of the bytes that it
reads and writes, and its FLOPs divided by the machine balance; each has a fixed price on top. Only ratios between
runs of one cell are ever shown. Limits: caches, parallelism and the copy engine are not modelled.
"""

from __future__ import annotations

import logging
from typing import Any, Final

import torch

from oomdoctor.forecast.host_scratch import ALGEBRA, bytes_in


def _flop_registry() -> dict[Any, Any]:
    """Import torch's formulas without its warning that Triton is missing: no dry run meets a kernel of Triton's."""
    log = logging.getLogger("torch.utils.flop_counter")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        from torch.utils.flop_counter import flop_registry
    finally:
        log.setLevel(level)
    return flop_registry


_flop_formulas: Final = _flop_registry()

_FLOPS_PER_BYTE: Final = 8.0
"""Machine balance: FLOPs that a processor does in the time in which it moves a byte.

Between the peak ratios of server processors (about 4 to 10 in float32) and of GPUs without tensor cores (12.6 on an
A100: 19.5 TFLOP/s over 1.55 TB/s, by its data sheet).
"""

_BYTES_PER_CALL: Final = 160 * 1024
"""Price of one operation whatever its size: about 13 µs at 12 GB/s of memory traffic.

Source: steps of small layers on one thread, forward and backward: 10 µs an operation of a transformer, 14 of an MLP, 35
of a CNN.
"""

# Margins -------------------------------------------------------------------------------------------------------------

_CONVOLUTIONS: Final = ("convolution", "_convolution", "convolution_backward", "mkldnn_convolution")
_RECURRENT: Final = ("mkldnn_rnn_layer", "mkldnn_rnn_layer_backward")
_ON_CARD: Final = ("_cudnn_rnn", "miopen_rnn", "lstm", "gru")


def _rows(margin: float, *names: str) -> dict[Any, float]:
    return {getattr(torch.ops.aten, name): margin for name in names if hasattr(torch.ops.aten, name)}


MARGIN: Final = 0.02
"""Error of the peak that is never taken to be smaller: of tensors alone, as the virtual accelerator counts them."""
MARGIN_OF_HOST: Final = 0.05
MARGIN_OF_HOST_LAYERS: Final = 0.10
"""Margins for the scratch memory of the CPU's kernels, of which a few rules are known (see ``host_scratch``): without
and with convolutions and fused recurrent layers.

Source: ``benchmarks/results/forecast.txt``, 96 runs of twelve models on a CPU.
"""
_MARGIN_UNKNOWN: Final = 0.25
_OF_LIBRARIES: Final = _rows(0.35, *_ON_CARD) | _rows(0.15, "cudnn_convolution")
"""Operations of libraries that are not asked what they need. Source: ``benchmarks/results/cuda_here.txt``, an H100:
convolutions 0.1 to 12 % more than forecast, recurrent layers 25 %."""
_OF_HOST: Final = (
    _OF_LIBRARIES
    | _rows(MARGIN_OF_HOST_LAYERS, *_CONVOLUTIONS, *_RECURRENT)
    # Source: runs of each operation alone, with matrices of 100 rows and more.
    | {operator._overloadpacket: 0.25 for operator in ALGEBRA}
)
_OF_CARD: Final = _OF_LIBRARIES | _rows(0.15, *_CONVOLUTIONS) | _rows(0.35, *_RECURRENT)


class Meter:
    """Adds up what operations cost and which margin they call for.

    Attributes:
        cost: time so far in bytes moved.
        flops: floating point operations so far, as far as a formula tells them; ``moved``: bytes read and written.
        margin: error of the peak of a run with the operations so far, as a ratio.
        unknown: what is not known of the operations that there were, in words.
    """

    def __init__(self, *, of_card: bool, of_host: bool) -> None:
        """Begin with nothing.

        Args:
            of_card: whether a card is emulated.
            of_host: whether the scratch memory of the CPU's kernels counts. With neither, tensors alone are counted.
        """
        self.cost = self.flops = self.moved = 0.0
        self.margin = MARGIN_OF_HOST if of_host else MARGIN
        self.unknown: set[str] = set()
        self._margins = _OF_HOST if of_host else _OF_CARD if of_card else {}
        self._views: dict[Any, bool] = {}

    def count(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Add one operation on tensors, whose data need not exist."""
        if self._is_view(func):
            return
        moved = bytes_in(args) + bytes_in(tuple(kwargs.values())) + bytes_in(out)
        flops = self._flops(func, args, kwargs, out)
        self.cost += max(moved, flops / _FLOPS_PER_BYTE) + _BYTES_PER_CALL
        self.flops, self.moved = self.flops + flops, self.moved + moved
        self.margin = max(self.margin, self._margins.get(func._overloadpacket, 0.0))

    def cannot_tell(self, what: str) -> None:
        """Note that something of an operation is not known."""
        self.unknown.add(what)
        self.margin = max(self.margin, _MARGIN_UNKNOWN)

    @property
    def is_estimate(self) -> bool:
        """Whether what kernels need inside is known only about, and matters."""
        return self.margin > MARGIN_OF_HOST

    def _flops(self, func: Any, args: Any, kwargs: Any, out: Any) -> float:
        formula = _flop_formulas.get(func._overloadpacket)
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

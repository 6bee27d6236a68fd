"""What a run costs in time, from the operations in it, and how far its forecast may be off.

Time is counted in bytes moved, by the roofline model: an operation takes as long as the larger of the bytes that it
reads and writes, and its FLOPs divided by the machine balance; each has a fixed price on top. Only ratios between
runs of one cell are ever shown. Limits: caches, parallelism and the copy engine are not modelled.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import torch


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

# Scratch of the CPU's kernels -----------------------------------------------------------------------------------------

# Kernels of oneDNN and LAPACK copy what they are given into layouts of their own, which no dispatcher sees. The rules
# are estimates from the shapes; what they leave out is in the margin. Source: runs of each operation with torch 2.13
# and oneDNN 3.12; the files of ``aten/src/ATen/native`` that are named.

_aten = torch.ops.aten
_FORMATS: Final = {4: torch.channels_last, 5: torch.channels_last_3d}
_GATES: Final = 4 * torch.float32.itemsize
"""Bytes of the gates of a fused LSTM for each number that it returns: those of all steps are computed at once."""

_Rule: TypeAlias = "Callable[[Sequence[Any], Any], float]"


def scratch_bytes(func: Any, args: Sequence[Any], out: Any) -> int:
    """Return the bytes that an operation in host memory needs beyond what it returns, as far as a rule tells."""
    rule = RULES.get(func)
    return 0 if rule is None or args[0].device.type != "cpu" else int(rule(args, out))


def matrix_copy(matrix: torch.Tensor) -> int:
    """Return the bytes of the copy of matrices which have neither rows nor columns without gaps.

    A gradient that was expanded from a number is one: that of a sum. Source: ``addmm_impl_cpu_`` in
    ``LinearAlgebra.cpp``.
    """
    rows, columns = matrix.stride()[-2:]
    has_rows = columns == 1 and rows >= matrix.shape[-1]
    has_columns = rows == 1 and columns >= matrix.shape[-2]
    return 0 if has_rows or has_columns else _bytes(matrix)


def dense_copy(tensor: torch.Tensor, *, in_any_order: bool = False) -> int:
    """Return the bytes of the copy of a tensor that has gaps, or elements that share their place.

    Args:
        tensor: strided.
        in_any_order: whether channels may come last.
    """
    formats = [torch.contiguous_format]
    if in_any_order and tensor.dim() in _FORMATS:
        formats.append(_FORMATS[tensor.dim()])
    return 0 if any(tensor.is_contiguous(memory_format=one) for one in formats) else _bytes(tensor)


def _algebra(matrices: float, singles: float = 0.0) -> _Rule:
    """Return the rule for an operation of LAPACK: so many times its input, and so many times one matrix of it."""

    def needs(args: Sequence[Any], _out: Any) -> float:
        one = args[0].shape[-2:].numel() * args[0].element_size()
        return matrices * _bytes(args[0]) + singles * float(one)

    return needs


ALGEBRA: Final[dict[Any, _Rule]] = {
    _aten._linalg_svd.default: _algebra(1.1),
    _aten._linalg_eigh.default: _algebra(0, 2.1),
    _aten.linalg_eig.default: _algebra(3),
    _aten.linalg_eigvals.default: _algebra(1.1),
    _aten.linalg_qr.default: _algebra(0.1),
    _aten.linalg_inv_ex.default: _algebra(1),
    _aten.linalg_pinv.atol_rtol_tensor: _algebra(3),
    _aten.linalg_matrix_exp.default: _algebra(12),  # by the norm of the matrix, which nobody knows, 7 to 12
}
RULES: Final[dict[Any, _Rule]] = ALGEBRA | {
    _aten.mm.default: lambda args, _out: sum(map(matrix_copy, args[-2:])),
    _aten.addmm.default: lambda args, _out: sum(map(matrix_copy, args[-2:])),
    _aten.convolution.default: lambda args, out: max(_bytes(args[:2]), _bytes(out)),
    _aten.convolution_backward.default: lambda args, _out: _bytes(args[:2]),
    _aten.mkldnn_rnn_layer.default: lambda args, out: _bytes(args[1:5]) + _GATES * out[0].numel(),
    _aten.mkldnn_rnn_layer_backward.default: lambda args, _out: 2 * _bytes(args[1:5]) + _GATES * args[7].numel(),
    # A gradient of the input that is let go of before the one that is returned. Source: ``Normalization.cpp``.
    _aten.native_batch_norm_backward.default: lambda args, _out: (
        0 if dense_copy(args[0], in_any_order=True) else _bytes(args[1])
    ),
    # Backward sums, as many as the forward ones. Source: ``LossCTC.cpp``.
    _aten._ctc_loss_backward.default: lambda args, _out: _bytes(args[6]),
    _aten._ctc_loss_backward.Tensor: lambda args, _out: _bytes(args[6]),
}
"""Bytes beyond the results, by operation: ``(args, out)``."""


def _bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(map(_bytes, value)) if isinstance(value, (tuple, list)) else 0


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
"""Margins for the scratch memory of the CPU's kernels, of which a few rules are known (see ``RULES``): without
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
        moved = _bytes(args) + _bytes(tuple(kwargs.values())) + _bytes(out)
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

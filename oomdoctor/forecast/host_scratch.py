"""Scratch memory of the CPU's kernels: what they allocate beside their results, by rules from the shapes.

Kernels of oneDNN and LAPACK copy what they are given into layouts of their own, which no dispatcher sees. The rules are
estimates; what they leave out is in the margin of a forecast of host memory (see ``cost``).

Source: runs of each operation with torch 2.13 and oneDNN 3.12; the files of ``aten/src/ATen/native`` that are named.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import torch

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


def _bytes(*tensors: torch.Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


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
    _aten.convolution.default: lambda args, out: max(_bytes(*args[:2]), _bytes(out)),
    _aten.convolution_backward.default: lambda args, _out: _bytes(*args[:2]),
    _aten.mkldnn_rnn_layer.default: lambda args, out: _bytes(*args[1:5]) + _GATES * out[0].numel(),
    _aten.mkldnn_rnn_layer_backward.default: lambda args, _out: 2 * _bytes(*args[1:5]) + _GATES * args[7].numel(),
    # A gradient of the input that is let go of before the one that is returned. Source: ``Normalization.cpp``.
    _aten.native_batch_norm_backward.default: lambda args, _out: (
        0 if dense_copy(args[0], in_any_order=True) else _bytes(args[1])
    ),
    # Backward sums, as many as the forward ones. Source: ``LossCTC.cpp``.
    _aten._ctc_loss_backward.default: lambda args, _out: _bytes(args[6]),
    _aten._ctc_loss_backward.Tensor: lambda args, _out: _bytes(args[6]),
}
"""Bytes beyond the results, by operation: ``(args, out)``."""

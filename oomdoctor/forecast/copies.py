"""What kernels of the CPU make for themselves by a rule that is known: copies, and sums on the way.

Source: the files of ``aten/src/ATen/native`` that are named at each; what runs of them with torch 2.13 allocate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

_aten = torch.ops.aten
_FORMATS: Final = {4: torch.channels_last, 5: torch.channels_last_3d}
_HALVES: Final = (torch.bfloat16, torch.float16)


def _of_product(args: Sequence[Any], _out: Any) -> int:
    """Return the bytes of the copies that BLAS is given of matrices.

    Source: ``addmm_impl_cpu_`` in ``LinearAlgebra.cpp``.
    """
    return sum(matrix_copy(matrix) for matrix in args[-2:])


def matrix_copy(matrix: torch.Tensor) -> int:
    """Return the bytes of the copy of matrices which have neither rows nor columns without gaps.

    A gradient that was expanded from a number is one: that of a sum.
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


def _of_loss(_args: Sequence[Any], out: torch.Tensor) -> int:
    return 0 if out.dim() else int(out.untyped_storage().nbytes())


def _of_first(args: Sequence[Any], _out: Any) -> int:
    return _bytes(args[0])


def _of_batch_norm_backward(args: Sequence[Any], _out: Any) -> int:
    """Return the bytes of the gradient of the input that is made and let go of before the one that is returned.

    It is made where the gradient that comes in and the input lie alike; where they do not, halves that lie with their
    channels last are copied instead.

    Source: ``batch_norm_backward_cpu`` in ``Normalization.cpp``.
    """
    grad, x = args[:2]
    formats = [one for one in (torch.contiguous_format, _FORMATS.get(x.dim())) if one is not None]
    if any(x.is_contiguous(memory_format=one) and grad.is_contiguous(memory_format=one) for one in formats):
        return _bytes(x)
    is_copied = x.dtype in _HALVES and not x.is_contiguous() and 0 not in grad.stride()
    return 2 * _bytes(x) if is_copied else 0


def _of_group_norm_backward(args: Sequence[Any], _out: Any) -> int:
    """Return the bytes of two sums for each sample and channel.

    Source: ``GroupNormBackwardKernelImplInternal`` in ``group_norm_kernel.cpp``.
    """
    x, samples, channels = args[1], args[5], args[6]
    return int(2 * samples * channels * max(x.element_size(), torch.float32.itemsize))


def _of_distances(args: Sequence[Any], _out: Any) -> int:
    """Return the bytes of both sets of points with two columns more, whose product Euclidean distances come of.

    Source: ``_euclidean_dist`` in ``Distance.cpp``.
    """
    return int(sum(_bytes(one) + 2 * one.shape[:-1].numel() * one.element_size() for one in args[:2]))


def _of_ctc_loss_backward(args: Sequence[Any], _out: Any) -> int:
    """Return the bytes of the backward sums, which are as many as the forward ones.

    Source: ``ctc_loss_backward_cpu_template`` in ``LossCTC.cpp``.
    """
    return _bytes(args[6])


def _of_linear_algebra(matrices: float, singles: float = 0.0) -> Callable[[Sequence[Any], Any], int]:
    """Return the rule for an operation that needs so many times its input, and so many times one matrix of it.

    Source: runs with LAPACK as torch 2.13 brings it, for matrices of 400 and more rows; smaller ones need more.
    """

    def needs(args: Sequence[Any], _out: Any) -> int:
        one = args[0].shape[-2:].numel() * args[0].element_size()
        return int(matrices * _bytes(args[0]) + singles * one)

    return needs


ESTIMATED: Final[dict[Any, Callable[[Sequence[Any], Any], int]]] = {
    _aten._linalg_svd.default: _of_linear_algebra(1.1),
    _aten._linalg_eigh.default: _of_linear_algebra(0, 2.1),
    _aten.linalg_eig.default: _of_linear_algebra(3),
    _aten.linalg_eigvals.default: _of_linear_algebra(1.1),
    _aten.linalg_qr.default: _of_linear_algebra(0.1),
    _aten.linalg_inv_ex.default: _of_linear_algebra(1),
    _aten.linalg_pinv.atol_rtol_tensor: _of_linear_algebra(3),
    # By the norm of what it is given, which nobody knows beforehand, it is 7 to 12.
    _aten.linalg_matrix_exp.default: _of_linear_algebra(12),
}
"""Bytes beyond the results, by operation, of which the rule is known only about."""

COPIES: Final[dict[Any, Callable[[Sequence[Any], Any], int]]] = {
    _aten.mm.default: _of_product,
    _aten.addmm.default: _of_product,
    _aten.mse_loss.default: _of_loss,
    _aten.smooth_l1_loss.default: _of_loss,
    _aten.isinf.default: _of_first,
    _aten.median.default: _of_first,
    _aten.dist.default: _of_first,
    _aten._euclidean_dist.default: _of_distances,
    _aten.native_batch_norm_backward.default: _of_batch_norm_backward,
    _aten._ctc_loss_backward.default: _of_ctc_loss_backward,
    _aten._ctc_loss_backward.Tensor: _of_ctc_loss_backward,
    _aten.native_group_norm_backward.default: _of_group_norm_backward,
}
"""Bytes beyond the results, by operation: ``(args, out)``."""


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()

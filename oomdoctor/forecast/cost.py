"""What a run costs in time, from the operations in it, and how far its forecast may be off.

Time is counted in bytes moved, by the roofline model: an operation takes as long as the larger of the bytes that it
reads and writes, and its FLOPs divided by the machine balance; each has a fixed price on top. Only ratios between
runs of one cell are ever shown. Limits: caches, parallelism and the copy engine are not modelled.

Kernels of oneDNN and LAPACK on the CPU copy what they are given into layouts of their own, which no dispatcher sees,
and give that back at the end of an operation. The rules follow from the shapes; what they leave out is in the margin.
Limits: algorithms that oneDNN chooses by the processor are known of x86-64 with AVX2 and AVX-512.

Source: the events of the allocator in runs of each operation with torch 2.13 and oneDNN 3.12, of convolutions also with
``ONEDNN_MAX_CPU_ISA=AVX2``; the files of ``aten/src/ATen/native`` that are named.
"""

from __future__ import annotations

import logging
import math
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

# Scratch memory of the CPU's kernels ----------------------------------------------------------------------------------

_aten = torch.ops.aten
_FORMATS: Final = {4: torch.channels_last, 5: torch.channels_last_3d}
_GATES: Final = 4 * torch.float32.itemsize
"""Bytes of the gates of a fused LSTM for each number that it returns: those of all steps are computed at once."""

_Rule: TypeAlias = "Callable[[Sequence[Any], Any], float]"


def scratch_bytes(func: Any, args: Sequence[Any], out: Any) -> int:
    """Return the bytes that an operation in host memory needs beyond what it returns, as far as a rule tells."""
    rule = RULES.get(func)
    return 0 if rule is None or args[0].device.type != "cpu" else int(rule(args, out))


def bytes_in(value: Any) -> int:
    """Return the bytes of the elements of all tensors in a value, within lists and tuples too."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(map(bytes_in, value)) if isinstance(value, (tuple, list)) else 0


def matrix_copy(matrix: torch.Tensor) -> int:
    """Return the bytes of the copy of matrices which have neither rows nor columns without gaps.

    A gradient that was expanded from a number is one: that of a sum. Source: ``addmm_impl_cpu_`` in
    ``LinearAlgebra.cpp``.
    """
    rows, columns = matrix.stride()[-2:]
    has_rows = columns == 1 and rows >= matrix.shape[-1]
    has_columns = rows == 1 and columns >= matrix.shape[-2]
    return 0 if has_rows or has_columns else bytes_in(matrix)


def dense_copy(tensor: torch.Tensor, *, in_any_order: bool = False) -> int:
    """Return the bytes of the copy of a strided tensor that has gaps, or elements that share their place.

    ``in_any_order``: whether channels may come last.
    """
    formats = [torch.contiguous_format]
    if in_any_order and tensor.dim() in _FORMATS:
        formats.append(_FORMATS[tensor.dim()])
    return 0 if any(tensor.is_contiguous(memory_format=one) for one in formats) else bytes_in(tensor)


_BLOCK: Final = 16 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 8
"""Channels that oneDNN lays side by side, as many as a vector has places: so many stand in its copies at least."""
_FEW_CHANNELS: Final = 3
"""Channels of an image that are read as they lie. Source: ``is_1stconv`` in ``jit_avx512_common_conv_kernel.cpp``."""
_OF_ROWS: Final = 8.0
"""How many times the weights' size images have to be for each thread to sum the gradients of its own images."""


def _convolution(
    images: torch.Tensor, weights: torch.Tensor, out: torch.Tensor, *, spreads: bool, is_plain: bool = True
) -> int:
    """Return what a convolution copies: all that it works on, by blocks of channels, and then the result alone.

    ``spreads``: whether it is a transposed one with a stride, whose result is copied twice, and not by blocks.
    """
    if not _is_of_onednn(images.dtype):
        return _columns(weights, out) if is_plain else bytes_in(out)
    if _has_channels_last(images):
        return 2 * _blocked(weights, 0)
    result, copies = (bytes_in(out), 2) if spreads else (_blocked(out), 1)
    read, kernel = (0, bytes_in(weights)) if _lies_as_read(images) else (_blocked(images), _blocked(weights, 0))
    return max(read + kernel + result - bytes_in(out), copies * result)


def _convolution_backward(args: Sequence[Any], out: Sequence[Any]) -> int:
    """Return what the gradients of a convolution copy: that of the images is made first, then that of the weights."""
    gradient, images, weights = args[:3]
    dense = dense_copy(gradient, in_any_order=True)
    if not _is_of_onednn(images.dtype):
        return dense + (_columns(weights, gradient) if _is_plain(args[6], args[7], args[9]) else bytes_in(gradient))
    kernel = _blocked(weights, 0)
    if _has_channels_last(images):
        return dense + 3 * kernel
    is_strided, is_transposed = max(args[4]) > 1, args[7]
    first = 0
    if out[0] is not None:  # as the other kind of convolution makes it
        spreads = is_strided and not is_transposed and weights.shape[1] > 1
        first = _convolution(gradient, weights, out[0], spreads=spreads) - bytes_in(out[1])
    if out[1] is None:
        return dense + first
    small, large = (gradient, images) if is_transposed else (images, gradient)
    read = 0 if _lies_as_read(small) else _blocked(small)
    own = _sums(weights, of_rows=bytes_in((gradient, images)) > _OF_ROWS * bytes_in(weights))
    return dense + max(first, read + _blocked(large) + kernel - bytes_in(weights) + own, kernel)


def _sums(weights: torch.Tensor, *, of_rows: bool) -> int:
    """Return the bytes of the sums of each thread, which are in float32.

    ``of_rows``: whether each thread sums the gradients of its own images; the result has the sums of one of them.
    """
    each, threads = weights.numel() * torch.float32.itemsize, torch.get_num_threads()
    is_short = weights.element_size() < torch.float32.itemsize
    return each * (threads if is_short else (threads - 1) * of_rows)


def _is_of_onednn(dtype: torch.dtype) -> bool:
    """Whether oneDNN computes with such numbers on this processor. Source: ``use_mkldnn`` in ``Convolution.cpp``."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype in (torch.bfloat16, torch.float16):
        name = "bf16" if dtype is torch.bfloat16 else "fp16"
        return bool(getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported")())
    return dtype is torch.float32


def _is_plain(dilation: Sequence[int], transposed: bool, groups: int) -> bool:
    """Whether torch unfolds all images at once where oneDNN is not asked: others are taken one by one, or in parts."""
    return not transposed and max(dilation) == 1 and groups == 1


def _columns(weights: torch.Tensor, out: torch.Tensor) -> int:
    """Return the bytes of what torch's own convolution unfolds its images to. Source: ``ConvolutionMM2d.cpp``."""
    window = math.prod(weights.shape[2:])
    return 0 if window == 1 else int(bytes_in(weights[:1]) * out.shape[0] * math.prod(out.shape[2:]))


def _has_channels_last(images: torch.Tensor) -> bool:
    """Whether oneDNN works on images as they lie, whatever their number of channels."""
    return not images.is_contiguous() and not dense_copy(images, in_any_order=True)


def _lies_as_read(images: torch.Tensor) -> bool:
    """Whether images are read without a copy: those of few channels."""
    return images.shape[1] <= _FEW_CHANNELS


def _blocked(tensor: torch.Tensor, first: int = 1) -> int:
    """Return the bytes of a copy whose channels, the dimensions from ``first`` to 1, are filled up to whole blocks."""
    return int(
        bytes_in(tensor) * math.prod(-(-size // _BLOCK) * _BLOCK / size for size in tensor.shape[first:2] if size)
    )


def _algebra(matrices: float, singles: float = 0.0) -> _Rule:
    """Return the rule for an operation of LAPACK: so many times its input, and so many times one matrix of it."""

    def needs(args: Sequence[Any], _out: Any) -> float:
        one = args[0].shape[-2:].numel() * args[0].element_size()
        return matrices * bytes_in(args[0]) + singles * float(one)

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
    _aten.convolution.default: lambda args, out: _convolution(
        args[0], args[1], out, spreads=args[6] and max(args[3]) > 1, is_plain=_is_plain(args[5], args[6], args[8])
    ),
    _aten.convolution_backward.default: _convolution_backward,
    _aten.mkldnn_rnn_layer.default: lambda args, out: bytes_in(args[1:5]) + _GATES * out[0].numel(),
    _aten.mkldnn_rnn_layer_backward.default: lambda args, _out: 2 * bytes_in(args[1:5]) + _GATES * args[7].numel(),
    # A gradient of the input that is let go of before the one that is returned. Source: ``Normalization.cpp``.
    _aten.native_batch_norm_backward.default: lambda args, _out: (
        0 if dense_copy(args[0], in_any_order=True) else bytes_in(args[1])
    ),
    # Backward sums, as many as the forward ones. Source: ``LossCTC.cpp``.
    _aten._ctc_loss_backward.default: lambda args, _out: bytes_in(args[6]),
    _aten._ctc_loss_backward.Tensor: lambda args, _out: bytes_in(args[6]),
}
"""Bytes beyond the results, by operation: ``(args, out)``."""

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
        """Begin: of an emulated card, of the host with its kernels' scratch memory, else of tensors alone."""
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

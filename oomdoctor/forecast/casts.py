"""The copies that operations on the CPU make of what they are given in another type than the one they compute in.

A kernel of the CPU works on one type alone. So of an operand in any other, all of it is cast beforehand, beside the
result: a mask that is multiplied with floats, integers that are divided, booleans that are summed. Kernels of CUDA cast
each element as they load it, and need nothing. Limits: lists of tensors (``torch.cat``, ``torch._foreach_add``), and
results of another type in ``out=``.

Source: ``TensorIteratorBase::compute_types`` in ``aten/src/ATen/TensorIterator.cpp``; what runs of each operation with
torch 2.13 allocate.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, Final

import torch
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND, elementwise_dtypes

_aten = torch.ops.aten


def _packets(*names: str) -> frozenset[Any]:
    return frozenset(getattr(_aten, name) for name in names)


_AS_THEY_ARE: Final = _packets("masked_fill", "masked_fill_", "clone", "copy", "copy_", "_to_copy", "fill", "fill_")
"""Operations on elements whose kernels take operands in their own types."""
_SUMS: Final = _packets("sum", "nansum", "prod", "cumsum", "cumprod", "mean", "linalg_vector_norm")
_TRUTHS: Final = _packets("any", "all")
_LOGICAL: Final = _packets("logical_and_", "logical_or_", "logical_xor_")
"""What they write into truths is one however they compute."""
_WHOLE_MEAN: Final = _aten.mean.default
_HALVES: Final = (torch.bfloat16, torch.float16)
_WHERE: Final = _packets("where")
"""Whose condition stays as it is."""


def cast_bytes(func: Any, args: Sequence[Any], out: Any) -> int:
    """Return the bytes of the copies in another type that an operation makes of its operands.

    Args:
        func: the operation; ``args``: what it is given, on tensors whose data need not exist.
        out: what it returns.
    """
    if not isinstance(out, torch.Tensor) or not _may_cast(func):
        return 0
    packet = func._overloadpacket
    given = args[1:] if packet in _WHERE else args
    tensors = [value for value in given if isinstance(value, torch.Tensor)]
    if not tensors or any(value.device.type != "cpu" for value in tensors):
        return 0
    if packet in _TRUTHS:
        return 0 if tensors[0].dtype in (torch.bool, torch.uint8) else tensors[0].numel()
    if func is _WHOLE_MEAN and out.dtype in _HALVES:
        return tensors[0].numel() * torch.float32.itemsize
    if packet in _SUMS:
        return _copied(tensors[:1], out.dtype)
    if all(value.dtype == out.dtype for value in tensors) and len(tensors) == len(given):
        return 0
    scalars = [value for value in given if isinstance(value, (bool, int, float, complex))]
    _, common = elementwise_dtypes(
        *tensors, *scalars[:1], type_promotion_kind=ELEMENTWISE_TYPE_PROMOTION_KIND.NO_OPMATH
    )
    if _is_inexact(out.dtype) and not _is_inexact(common):
        common = out.dtype
    is_cast_back = args[0] is out and not (packet in _LOGICAL and out.dtype is torch.bool)
    return _copied([*tensors, out] if is_cast_back else tensors, common)


@cache
def _may_cast(func: Any) -> bool:
    packet = func._overloadpacket
    if packet in _AS_THEY_ARE:
        return False
    return torch.Tag.pointwise in func.tags or packet in _SUMS or packet in _TRUTHS


def _copied(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> int:
    """Return the bytes of the copies of those that are of another type; of single numbers none to speak of."""
    return sum(value.numel() * dtype.itemsize for value in tensors if value.dtype != dtype and value.dim())


def _is_inexact(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex

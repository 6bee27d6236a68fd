"""Operations that change the elements of a tensor and nothing else: most of what an optimizer does.

They return the tensor that they were given and allocate nothing, so the fake mode, which takes a tenth of a millisecond
for each, need not be asked. Limits: tensors of one shape, type and device, without values that are followed; any other
may be an error, or change more.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensor

_aten = torch.ops.aten
_OPERATIONS: Final = frozenset(
    (
        *(_aten.add_.Tensor, _aten.add_.Scalar, _aten.mul_.Tensor, _aten.mul_.Scalar, _aten.div_.Tensor),
        *(_aten.addcmul_.default, _aten.addcdiv_.default, _aten.lerp_.Scalar, _aten.zero_.default),
    )
)


def changes_elements(func: Any, args: Any) -> bool:
    """Return whether an operation on fake tensors is such a one."""
    if func not in _OPERATIONS:
        return False
    first = args[0]
    kind = first.shape, first.dtype, first.fake_device
    return first.dtype.is_floating_point and all(
        (value.shape, value.dtype, value.fake_device) == kind and value.constant is None
        for value in args
        if isinstance(value, FakeTensor)
    )

"""Many fake tensors that are alike, put together: what a few of them make tells what all would.

A batch of thousands of samples is stacked or concatenated in one operation, and the fake mode takes some dozen
microseconds for each of its arguments, again and again. Limits: tensors without values, and results without gaps.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
_FEW: Final = 2


def _put_together(func: Any, args: Any, kwargs: Any) -> Any:
    tensors = args[0]
    if len(tensors) <= _FEW or not _are_alike(tensors):
        return func(*args, **kwargs)
    few = func(tensors[:_FEW], *args[1:], **kwargs)
    if not few.is_contiguous():
        return func(*args, **kwargs)
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
    shape = list(few.shape)
    shape[dim] = shape[dim] // _FEW * len(tensors)
    return few.new_empty(shape)


def _are_alike(tensors: Any) -> bool:
    first = tensors[0]
    if type(first) is not FakeTensor or first.layout is not torch.strided:
        return False
    kind = first.shape, first.stride(), first.dtype, first.fake_device
    return all(
        tensor is first
        or (type(tensor) is FakeTensor and (tensor.shape, tensor.stride(), tensor.dtype, tensor.fake_device) == kind)
        for tensor in tensors
    ) and all(tensor.constant is None for tensor in tensors)


ALIKE: Final = {_aten.stack.default: _put_together, _aten.cat.default: _put_together}
"""Operations to be run on fake tensors by a function of their own, ``(func, args, kwargs)``."""


class Together(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Does the same where the tracker does not see the operation."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled in a shadow

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        handler = ALIKE.get(func)
        return func(*args, **(kwargs or {})) if handler is None else handler(func, args, kwargs or {})

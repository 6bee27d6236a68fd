"""Tensors of the user's own classes, made of fakes.

A fake tensor cannot become one of another class. So a real tensor of that class is made, with the shape and without the
memory, and the fake one stands for its data, as it does for a parameter whose ``.data`` was assigned. Limits: a tensor
with a graph stays what it is, because a new one would have none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

if TYPE_CHECKING:
    from oomdoctor.forecast.tracker import Tracker


def make_subclasses(tracker: Tracker) -> None:
    """Put stand-ins into the place of ``Tensor.as_subclass`` and ``Tensor._make_subclass``."""
    make = torch.Tensor._make_subclass

    def made(cls: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(data, FakeTensor) or issubclass(cls, FakeTensor):
            return make(cls, data, *args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            with _disable_current_modes():
                without_memory = torch.empty((), dtype=data.dtype).expand(data.shape)
                found = make(cls, without_memory, *args, **kwargs)
            tracker.repoint(found, data)
        return found

    def as_subclass(tensor: Any, cls: Any) -> Any:
        if not isinstance(tensor, FakeTensor):
            return plain(tensor, cls)
        return tensor if tensor.requires_grad else made(cls, tensor)

    owner: Any = torch.Tensor
    plain = torch.Tensor.as_subclass
    owner._make_subclass, owner.as_subclass = staticmethod(made), as_subclass

"""Failures on demand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from oomdoctor.allocator.message import cuda_out_of_memory
from oomdoctor.model.sizes import GIB, MIB


@contextmanager
def oom_at(operation: int) -> Iterator[None]:
    """Fail the tensor operation of this number, counted from one, as a full CUDA device would.

    Operations of the calling thread are counted, backward's among them; those before and after are not touched.
    """
    with _FailAt(operation):
        yield


class _FailAt(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, operation: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._left = operation

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._left -= 1
        if self._left == 0:
            used = GIB - 2 * MIB
            raise torch.OutOfMemoryError(
                cuda_out_of_memory(tried=20 * MIB, total=GIB, allocated=used - MIB, reserved=used)
            )
        return func(*args, **(kwargs or {}))

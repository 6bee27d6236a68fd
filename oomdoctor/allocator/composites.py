"""Operations that compiled code takes apart, where a dispatch mode would see them whole.

Mostly autograd takes them apart above every mode. Under ``inference_mode``, and of tensors that were made there, it is
out of the way, and what is allocated inside of them would not be seen.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any, Final

import torch

_COMPOSITE: Final = torch._C.DispatchKey.CompositeImplicitAutograd


def stays_whole(func: Any, args: Iterable[Any]) -> bool:
    """Whether an operation that is to be taken apart has come to a mode as it is."""
    if not isinstance(func, torch._ops.OpOverload):
        return False
    is_out_of_the_way = torch.is_inference_mode_enabled() or any(
        isinstance(one, torch.Tensor) and one.is_inference() for one in args
    )
    return is_out_of_the_way and _is_composite(func)


def run_apart(func: Any, mode: Any, args: Any, kwargs: Any) -> Any:
    """Run such an operation so that ``mode``, which it has come to, sees what is inside."""
    with mode:
        return func._op_dk(_COMPOSITE, *args, **kwargs)


@cache
def _is_composite(func: Any) -> bool:
    """Whether compiled code takes it apart. One that Python alone can take apart has a kernel of its own."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return has_kernel(func.name(), "CompositeImplicitAutograd") and not has_kernel(func.name(), "CPU")

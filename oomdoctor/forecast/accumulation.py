"""Whether autograd adds a gradient to another one in place.

Where a tensor was used more than once, the engine adds up its gradients: into the first of them if nobody else holds
it, into a new tensor otherwise, and always into a new one where the first is of a subclass, as every fake is. So what
the engine would do with plain tensors is told here, by the same counts of references; what a fake has more of them is
measured on an accumulation that is known.

Source: ``can_accumulate_inplace`` in ``torch/csrc/autograd/input_buffer.cpp``.
"""

from __future__ import annotations

import sys
from functools import cache
from types import FrameType
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

_ADD: Final = torch.ops.aten.add.Tensor
_ENGINE: Final = torch.autograd.graph._engine_run_backward.__code__
_MAKER: Final = "_oomdoctor_maker"
"""Attribute of a fake gradient: number of the node of the graph that made it."""


def adds_in_place(func: Any, args: Any, caller: FrameType | None) -> bool:
    """Return whether an operation is the engine's, and adds a gradient to one that nobody else holds.

    Args:
        func: the operation; ``args``: what it was given, as a dispatch mode got it.
        caller: the frame that called the mode.
    """
    if func is not _ADD or caller is None or caller.f_code is not _ENGINE or torch.is_grad_enabled():
        return False
    alone = counts_alone()
    return alone is not None and _are_gradients(args) and _holders(args) == alone


def note_maker(out: Any, caller: FrameType | None) -> None:
    """Note which node has made a gradient: what a node adds to something of its own is no accumulation."""
    if isinstance(out, FakeTensor) and caller is not None and caller.f_code is _ENGINE:
        setattr(out, _MAKER, _node())


def _node() -> int | None:
    node: Any = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


def _are_gradients(args: Any) -> bool:
    if len(args) != 2 or not all(isinstance(value, FakeTensor) for value in args):
        return False
    into, more = args
    if into.layout is not torch.strided or more.layout is not torch.strided:
        return False
    fits = (into.shape, into.dtype, into.fake_device) == (more.shape, more.dtype, more.fake_device)
    return fits and _is_dense(into) and getattr(into, _MAKER, None) != _node()


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether each place in memory, from the first to the last, is that of one element."""
    step = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length != 1 and stride != step:
            return False
        step *= length
    return True


def _holders(args: Any) -> tuple[int, int, int]:
    """Return how many hold the first argument, its object and its memory."""
    storage = torch._C._storage_Use_Count(args[0].untyped_storage()._cdata)
    return args[0]._use_count(), sys.getrefcount(args[0]), storage


@cache
def counts_alone() -> tuple[int, int, int] | None:
    """Return the counts of a gradient that the engine alone holds, None where they cannot be had in this version.

    To be called first outside of an operation, where autograd is at work.
    """
    found: list[tuple[int, int, int]] = []

    class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            return False

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is _ADD and sys._getframe(1).f_code is _ENGINE:
                found.append(_counted(func, args))
            return func(*args, **(kwargs or {}))

    def _counted(_func: Any, args: Any) -> tuple[int, int, int]:  # as deep as ``adds_in_place``
        return _holders(args)

    try:
        with _disable_current_modes(), torch.enable_grad(), FakeTensorMode(), Watch():  # type: ignore[no-untyped-call]
            x = torch.empty(2, requires_grad=True)
            used = x * 1
            torch.autograd.backward((used.sin() * used.cos()).sum())
    except AttributeError:  # counts that another version does not tell
        return None
    return found[0] if len(set(found)) == 1 else None

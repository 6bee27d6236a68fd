"""Makes the tensors of another process again: the same to each other, and without what was in them.

Pickles name these functions. What they make goes by the ``Making`` that is under way: its storages, and the fake mode
that the tensors are to belong to. A storage whose bytes were sent is real, and so are its tensors; any other has no
memory, and its tensors are fakes.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from oomdoctor.errors import ForecastError

if TYPE_CHECKING:
    import torch

    from oomdoctor.forecast.fresh_told import Described

__all__ = ["UNSENT", "Making", "complete", "making", "storage", "tensor"]

UNSENT: Final = "_oomdoctor_unsent"
"""Attribute of a fake tensor that stands for one of another process whose values stayed there."""

_current: Making | None = None


class Making:
    """One program in the making.

    Attributes:
        storages: by their number, until ``release``; ``used``: numbers of those that tensors lie in.
    """

    def __init__(self, described: Sequence[Described], graphs: Sequence[Sequence[int]], fake_mode: Any) -> None:
        import torch

        untyped: Any = torch.UntypedStorage
        self.fake_mode = fake_mode
        self.used: set[int] = set()
        self._described, self._graphs = described, graphs
        self.storages: list[Any] = []
        for one in described:
            if one.data is None:
                self.storages.append(untyped(one.nbytes, device="meta"))
            else:
                self.storages.append(untyped(one.nbytes))
                ctypes.memmove(self.storages[-1].data_ptr(), one.data, one.nbytes)

    def use(self, number: int) -> Any:
        """Return a storage, which from now on lives as long as something of the program has it."""
        self.used.add(number)
        return self.storages[number]

    def tensor(self, number: int, dtype: Any, *layout: Any) -> Any:
        """Return a tensor in a storage: a fake one where its bytes were not sent."""
        import torch
        from torch._subclasses.fake_tensor import FakeTensor

        shape, stride, offset = layout
        base, described = self.use(number), self._described[number]
        if described.data is not None:
            return torch.empty(0, dtype=dtype).set_(base, offset, shape, stride)
        twin = torch.empty(0, dtype=dtype, device="meta").set_(base, offset, shape, stride)
        made: Any = FakeTensor(self.fake_mode, twin, torch.device(described.device))
        return made

    def graph(self, number: int) -> list[Any]:
        """Return the storages that a graph of the other process keeps."""
        return [self.use(one) for one in self._graphs[number]]

    def is_fake(self, number: int) -> bool:
        """Return whether the bytes of a storage were not sent."""
        return self._described[number].data is None

    def release(self, pinned: Iterable[int]) -> list[Any]:
        """Let go of the storages that the program alone has; return the others."""
        alone = self.used.difference(pinned)
        others = [one for number, one in enumerate(self.storages) if number not in alone]
        self.storages = []
        return others


@contextlib.contextmanager
def making(one: Making) -> Iterator[None]:
    """Return a context in which pickles are loaded as ``one`` says."""
    global _current
    _current = one
    try:
        yield
    finally:
        _current = None


def _now() -> Making:
    if _current is None:
        raise ForecastError("a tensor was made outside of a program in the making")
    return _current


def storage(number: int) -> Any:
    """Return the storage with this number."""
    return _now().use(number)


def tensor(
    number: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    offset: int,
    requires_grad: bool,
    is_parameter: bool,
    graph: int | None,
) -> torch.Tensor:
    """Return the tensor that was described so; see ``fresh_parcel``."""
    import torch

    one = _now()
    made: torch.Tensor = one.tensor(number, dtype, shape, stride, offset)
    if graph is not None:
        made = _of_earlier_graph(made, one.graph(graph))
    elif is_parameter:
        made = torch.nn.Parameter(made, requires_grad)
    elif requires_grad:
        made.requires_grad_()
    if one.is_fake(number):
        setattr(made, UNSENT, True)
    return made


def complete(made: Any, state: tuple[Any, Any, Any, Any, Any]) -> None:
    """Give a tensor its gradient, its attributes and its hooks, and to its graph what that began with."""
    grad, attributes, hooks, accumulated, leaves = state
    if leaves:
        made.grad_fn.keeps.extend(leaves)
    if grad is not None:
        made.grad = grad
    if attributes:
        made.__dict__.update(attributes)
    if hooks:
        made._backward_hooks = hooks
    if accumulated:
        made._post_accumulate_grad_hooks = accumulated


def _of_earlier_graph(made: torch.Tensor, keeps: list[Any]) -> torch.Tensor:
    """Return the tensor as the result of something that a backward cannot go through, and that keeps what it kept."""
    import torch

    anchor = torch.zeros((), requires_grad=True)
    result: torch.Tensor = _earlier().apply(anchor, (made, keeps))
    return result


@cache
def _earlier() -> Any:
    """Return the function, once: a class of its own for each tensor would keep it in a cycle."""
    import torch

    class Earlier(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, _anchor: torch.Tensor, given: tuple[torch.Tensor, list[Any]]) -> torch.Tensor:
            made, ctx.keeps = given
            return made

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            raise ForecastError("the cell goes back through a graph that an earlier cell recorded, which is not sent")

    return Earlier

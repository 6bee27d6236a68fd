"""What is alive at the start of the cell: every tensor that Python knows, their gradients, and what graphs keep.

Only in a forked process: it looks at all objects of the interpreter.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterable, Iterator
from types import FunctionType
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.optim.optimizer import Optimizer

from oomdoctor.model.memory import Role
from oomdoctor.objects.alive import is_apart
from oomdoctor.objects.graph import Graphs
from oomdoctor.objects.kinds import registered

_WITHOUT_SHAPE: Final = (UninitializedParameter, UninitializedBuffer)
"""What a lazy module has before its first forward: no memory, and an error for whoever asks for it."""
_NONE: Final[list[Any]] = []


class Alive:
    """The objects of some kinds, sorted out in one pass: an interpreter holds half a million of them.

    Attributes:
        storages, tensors, modules, optimizers, functions, deques: those of the kind; of tensors, no fakes.
    """

    __slots__ = ("deques", "functions", "modules", "optimizers", "storages", "tensors")

    def __init__(self) -> None:
        self.storages: list[torch.UntypedStorage] = []
        self.tensors: list[torch.Tensor] = []
        self.modules: list[torch.nn.Module] = []
        self.optimizers: list[Optimizer] = []
        self.functions: list[FunctionType] = []
        self.deques: list[deque[Any]] = []

    def _of(self, kind: type) -> list[Any] | None:
        """Return where an object of this type belongs, None for nowhere. Its own methods are not asked."""
        if kind is torch.UntypedStorage:
            return self.storages
        if kind is FunctionType:
            return self.functions
        if kind is deque:
            return self.deques
        if issubclass(kind, torch.Tensor):
            return None if issubclass(kind, (FakeTensor, *_WITHOUT_SHAPE)) else self.tensors
        if issubclass(kind, torch.nn.Module):
            return self.modules
        return self.optimizers if issubclass(kind, Optimizer) else None

    def add(self, objects: Iterable[Any]) -> Alive:
        """Sort ``objects`` in."""
        places: dict[type, list[Any] | None] = {}
        for found in objects:
            kind = type(found)
            place = places.get(kind, _NONE)
            if place is _NONE:
                place = places[kind] = self._of(kind)
            if place is not None:
                place.append(found)
        return self


def alive() -> Alive:
    """Return what the garbage collector knows of."""
    return Alive().add(gc.get_objects())


def live_storages(found: Alive) -> Iterator[tuple[torch.UntypedStorage, Role | None]]:
    """Yield every storage with memory of its own, and what it is there for as far as that shows; some come again."""
    for storage in found.storages:
        yield storage, None
    roots: list[Any] = []
    for tensor in found.tensors:
        if is_apart(tensor):
            continue
        role = Role.USER_TENSOR
        if tensor.grad_fn is not None:
            roots.append(tensor.grad_fn)
            role = Role.GRAPH_KEPT_ALIVE
        elif tensor.requires_grad and tensor.grad is not None:
            yield from _as(Role.GRADIENT, tensor.grad)
        yield from _as(role, tensor)
    for storage in saved_by(roots):
        yield storage, Role.GRAPH_KEPT_ALIVE
    for tensor, role in told_roles(found):
        if not is_apart(tensor):
            yield from _as(role, tensor)


def told_roles(found: Alive) -> Iterator[tuple[torch.Tensor, Role]]:
    """Yield the tensors that have a part of training: parameters, and what modules and optimizers keep.

    A plain look into what torch's own classes keep: no property and no method of a class of the user's is run.
    """
    for tensor in found.tensors:
        if issubclass(type(tensor), torch.nn.Parameter):
            yield tensor, Role.PARAMETER
    for module in found.modules:
        for kept, role in (("_parameters", Role.PARAMETER), ("_buffers", Role.BUFFER)):
            for _, tensor in registered(module, kept):
                if isinstance(tensor, torch.Tensor) and not isinstance(tensor, _WITHOUT_SHAPE):
                    yield tensor, role
    for optimizer in found.optimizers:
        for tensor in state_of(optimizer):
            yield tensor, Role.OPTIMIZER_STATE


def state_of(optimizer: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that an optimizer keeps for its parameters, in the containers that torch's own keep them in."""
    state = optimizer.__dict__.get("state")
    todo: list[Any] = [state]
    while todo:
        held = todo.pop()
        if isinstance(held, dict):
            todo += held.values()
        elif isinstance(held, (list, tuple)):
            todo += held
        elif isinstance(held, torch.Tensor):
            yield held


def saved_by(roots: list[Any]) -> Iterator[torch.UntypedStorage]:
    """Yield what the graphs behind ``roots`` saved for backward, without unpacking it."""
    graphs = Graphs()
    for root in roots:
        if root is not None:
            graphs.from_node(root)
    for tensor in graphs.saved:
        for storage, _ in _as(Role.GRAPH_KEPT_ALIVE, tensor):
            yield storage


def _as(role: Role, value: Any) -> Iterator[tuple[torch.UntypedStorage, Role]]:
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        try:
            yield value.untyped_storage(), role
        except (NotImplementedError, RuntimeError):  # a wrapper without memory of its own
            return

"""What is alive at the start of the cell: every tensor that Python knows, their gradients, and what graphs keep.

Only in a forked process: it looks at all objects of the interpreter.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.optimizer import Optimizer

from oomdoctor.model.aside import is_apart
from oomdoctor.model.evidence import Role

__all__ = ["live_modules", "live_storages", "optimizer_count", "state_of", "told_roles"]


def live_storages() -> Iterator[tuple[torch.UntypedStorage, Role | None]]:
    """Yield every storage with memory of its own, and what it is there for as far as that shows; some come again."""
    roots: list[Any] = []
    objects = gc.get_objects()
    for found in objects:
        kind = type(found)
        if kind is torch.UntypedStorage:
            yield found, None
        elif issubclass(kind, torch.Tensor) and not isinstance(found, FakeTensor):
            if is_apart(found):
                continue
            role = Role.USER_TENSOR
            if found.grad_fn is not None:
                roots.append(found.grad_fn)
                role = Role.GRAPH_KEPT_ALIVE
            elif found.requires_grad and found.grad is not None:
                yield from _as(Role.GRADIENT, found.grad)
            yield from _as(role, found)
    for storage in _saved(roots):
        yield storage, Role.GRAPH_KEPT_ALIVE
    for tensor, role in told_roles(objects):
        if not is_apart(tensor):
            yield from _as(role, tensor)


def told_roles(objects: list[Any]) -> Iterator[tuple[torch.Tensor, Role]]:
    """Yield the tensors among ``objects``, and in the modules and optimizers among them, that have a part of training.

    A plain look into what torch's own classes keep: no property and no method of a class of the user's is run.
    """
    for found in objects:
        kind = type(found)
        if issubclass(kind, torch.nn.Parameter):
            yield found, Role.PARAMETER
        elif issubclass(kind, torch.nn.Module):
            buffers = found.__dict__.get("_buffers")
            for buffer in buffers.values() if isinstance(buffers, dict) else ():
                if isinstance(buffer, torch.Tensor):
                    yield buffer, Role.BUFFER
        elif issubclass(kind, Optimizer):
            for tensor in state_of(found):
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


def live_modules() -> list[weakref.ref[torch.nn.Module]]:
    """Return the modules that exist, without keeping them alive."""
    return [weakref.ref(found) for found in gc.get_objects() if issubclass(type(found), torch.nn.Module)]


def optimizer_count() -> int:
    """Return how many optimizers exist."""
    return sum(issubclass(type(found), Optimizer) for found in gc.get_objects())


def _saved(roots: list[Any]) -> Iterator[torch.UntypedStorage]:
    """Yield what the graphs behind ``roots`` saved for backward, without unpacking it.

    To unpack is to run the hooks of whoever packed it: on a checkpointed graph, the forward.
    """
    seen: set[Any] = set()
    todo = list(roots)
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for name in dir(type(node)):
            if name.startswith("_raw_saved_"):
                try:
                    saved = getattr(node, name)
                except RuntimeError:  # a backward has freed it
                    continue
                for item in saved if isinstance(saved, (tuple, list)) else (saved,):
                    for storage, _ in _as(Role.GRAPH_KEPT_ALIVE, getattr(item, "data", None)):
                        yield storage
        todo += [following for following, _ in node.next_functions]


def _as(role: Role, value: Any) -> Iterator[tuple[torch.UntypedStorage, Role]]:
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        try:
            yield value.untyped_storage(), role
        except (NotImplementedError, RuntimeError):  # a wrapper without memory of its own
            return

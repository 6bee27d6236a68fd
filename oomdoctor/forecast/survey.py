"""What is alive at the start of the cell: every tensor that Python knows, their gradients, and what graphs keep.

Only in a forked process: it looks at all objects of the interpreter.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.optimizer import Optimizer

from oomdoctor.model.aside import is_apart

__all__ = ["live_storages", "optimizer_count"]


def live_storages() -> Iterator[torch.UntypedStorage]:
    """Yield every storage with memory of its own; some come more than once."""
    roots: list[Any] = []
    for found in gc.get_objects():
        kind = type(found)
        if kind is torch.UntypedStorage:
            yield found
        elif issubclass(kind, torch.Tensor) and not isinstance(found, FakeTensor):
            if is_apart(found):
                continue
            yield from _storage(found)
            if found.grad_fn is not None:
                roots.append(found.grad_fn)
            elif found.requires_grad and found.grad is not None:
                yield from _storage(found.grad)
    yield from _saved(roots)


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
                    yield from _storage(getattr(item, "data", None))
        todo += [following for following, _ in node.next_functions]


def _storage(value: Any) -> Iterator[torch.UntypedStorage]:
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        try:
            yield value.untyped_storage()
        except (NotImplementedError, RuntimeError):  # a wrapper without memory of its own
            return

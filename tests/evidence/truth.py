"""The truth about memory, told without names, graphs or the garbage collector.

A dispatch mode notes every storage that an operation returns, by a weak reference to its ``UntypedStorage``: PyTorch
keeps one such object for as long as the memory lives, so the reference dies with the memory and holds nothing. What a
storage is there for is known from the program: which models and optimizers it has, what it calls a batch, and in which
step the storage came to be.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from truth_reach import reach

from oomdoctor.model.memory import Role

ANY: Final = frozenset(Role)
LEFT_OVER: Final = frozenset({Role.ACTIVATION, Role.GRAPH_KEPT_ALIVE, Role.USER_TENSOR})


class Alive(NamedTuple):
    """A storage that lives, and the roles that are right for it."""

    nbytes: int
    roles: frozenset[Role]


Truth = dict[int, Alive]


class Tracker(TorchDispatchMode):
    """Every storage that an operation returned while it was on, as long as it lives.

    It changes what it looks at in one way: what a dispatch mode was shown is a Python object from then on, which the
    garbage collector knows, even where only the autograd graph holds it.

    Attributes:
        step: number of the training step, counted by whoever runs the program.
    """

    def __init__(self) -> None:
        super().__init__()
        gc.collect()
        self.step = 0
        self._born: dict[int, tuple[weakref.ref[Any], int]] = {}
        for value in gc.get_objects():  # what was there before the program began: whatever is said of it is right
            if type(value) in (torch.Tensor, torch.nn.Parameter):
                self._note(value, -1)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch.compile is loaded, and frames of its own stand in every traceback

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor, self.step)
        return result

    def alive(self) -> Iterator[tuple[int, int, int]]:
        """Yield key, bytes and step of birth of every storage that lives; the step is -1 for what was there before."""
        for key, (ref, step) in list(self._born.items()):
            storage = ref()
            if storage is not None and storage.nbytes():
                yield key, storage.nbytes(), step

    def _note(self, tensor: torch.Tensor, step: int) -> None:
        if tensor.layout is not torch.strided or tensor.device.type == "meta":
            return
        storage = tensor.untyped_storage()
        known = self._born.get(storage._cdata)
        if known is None or known[0]() is not storage:
            self._born[storage._cdata] = weakref.ref(storage), step


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """What the writer of a program knows of its tensors at one moment.

    Attributes:
        models, optimizers: the program's own.
        batch: tensors of the batch; ``cache``: of a cache of keys and values, which are activations as well.
        kept: tensors that the program keeps with their graphs; ``values``: without.
        old: what is right for a storage that an earlier step made and that is nothing of the above.
    """

    models: Iterable[torch.nn.Module]
    optimizers: Iterable[torch.optim.Optimizer]
    batch: Iterable[torch.Tensor] = ()
    cache: Iterable[torch.Tensor] = ()
    kept: Iterable[torch.Tensor] = ()
    values: Iterable[torch.Tensor] = ()
    old: frozenset[Role] = LEFT_OVER

    def of(self, tracker: Tracker) -> Truth:
        """Return every storage that lives, with the roles that are right for it."""
        known: dict[int, frozenset[Role]] = {}

        def note(tensors: Iterable[Any], *roles: Role) -> None:
            for tensor in tensors:
                if isinstance(tensor, torch.Tensor):
                    known.setdefault(tensor.untyped_storage()._cdata, frozenset(roles))

        parameters = [parameter for model in self.models for parameter in model.parameters()]
        note(parameters, Role.PARAMETER)
        note((parameter.grad for parameter in parameters), Role.GRADIENT)
        states = [state for optimizer in self.optimizers for state in optimizer.state.values()]
        note((value for state in states for value in state.values()), Role.OPTIMIZER_STATE)
        note((buffer for model in self.models for buffer in model.buffers()), Role.BUFFER)
        note(self.batch, Role.BATCH)
        note(self.cache, Role.KV_CACHE, Role.ACTIVATION)
        note(self.values, Role.USER_TENSOR)
        for tensor in self.kept:
            for key in reach(tensor, graph=True).storages:
                known.setdefault(key, frozenset({Role.GRAPH_KEPT_ALIVE}))
        now = frozenset({Role.ACTIVATION})
        return {
            key: Alive(nbytes, known.get(key) or (ANY if step < 0 else self.old if step < tracker.step else now))
            for key, nbytes, step in tracker.alive()
        }

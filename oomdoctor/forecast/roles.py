"""What storages are there for: those that are alive at the start of the cell, and those that it makes.

At the start that is every tensor that Python knows, their gradients, and what graphs keep. Of what the cell makes it is
told at the moments at which torch shows it: a gradient is what a backward leaves in ``.grad``, optimizer state what a
step leaves in ``state``, parameters and buffers what a module registers; what a step makes and lets go of again was a
buffer of its own. The notes of the ledger take that down, also of what the peak has seen already.

Only in a forked process, to be thrown away: it looks at all objects of the interpreter.
"""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from types import FunctionType
from typing import TYPE_CHECKING, Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules import module as torch_module
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter, is_lazy
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_iter

from oomdoctor.model.memory import ModuleMemory, Role
from oomdoctor.objects.alive import alive, is_apart
from oomdoctor.objects.kinds import registered
from oomdoctor.objects.storages import Graphs

if TYPE_CHECKING:
    from oomdoctor.forecast.tracker import Tracker

_torch: Any = torch
_modules: Any = torch_module
_WITHOUT_SHAPE: Final = (UninitializedParameter, UninitializedBuffer)
"""What a lazy module has before its first forward: no memory, and an error for whoever asks for it."""
_APART: Final = (FakeTensor, *_WITHOUT_SHAPE)


class Alive:
    """The objects of some kinds, found in one pass of the half a million of an interpreter. Nothing of theirs runs.

    Fakes are not among the tensors.
    """

    def __init__(self, more: Iterable[Any] = ()) -> None:
        """Look for them; ``more`` are objects that the garbage collector does not tell of."""
        kinds = (torch.UntypedStorage, torch.Tensor, torch.nn.Module, Optimizer, FunctionType)
        by_type: dict[type, list[Any]] = defaultdict(list)
        for found in chain(alive(*kinds), more):
            by_type[type(found)].append(found)

        def of(root: type) -> list[Any]:
            own = (found for kind, found in by_type.items() if issubclass(kind, root) and not issubclass(kind, _APART))
            return list(chain.from_iterable(own))

        self.storages, self.tensors, self.modules, self.optimizers, self.functions = map(of, kinds)


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


# Roles of what is made ------------------------------------------------------------------------------------------------


def follow_roles(tracker: Tracker) -> None:
    """Have modules, backward passes and optimizers tell what they keep. To be called before their other stand-ins."""
    _follow_modules(tracker)
    _follow_detach(tracker)
    _follow_backward(tracker)
    _follow_steps(tracker)


def note_roles(tracker: Tracker, modules: list[weakref.ref[torch.nn.Module]]) -> None:
    """Tell what modules and optimizers keep at the end, where they have it by other ways.

    ``modules`` are those from before the cell, which the garbage collector does not tell of any more.
    """
    before = [module for reference in modules if (module := reference()) is not None]
    for tensor, role in told_roles(Alive(before)):
        tracker.mark(tensor, role)


def _follow_modules(tracker: Tracker) -> None:
    def keeper(role: Role) -> Any:
        def registered(_module: Any, _name: str, tensor: Any) -> None:
            if isinstance(tensor, torch.Tensor):
                tracker.mark(tensor, role)

        return registered

    _modules.register_module_parameter_registration_hook(keeper(Role.PARAMETER))
    _modules.register_module_buffer_registration_hook(keeper(Role.BUFFER))


def _follow_detach(tracker: Tracker) -> None:
    """Note what the program detaches; autograd itself detaches what it saves, below this method."""
    detach = torch.Tensor.detach

    def noted(tensor: torch.Tensor) -> torch.Tensor:
        note = tracker.note_of(tensor) if tensor.requires_grad else None
        if note is not None:
            note.detached = True
        return detach(tensor)

    _torch.Tensor.detach = noted


def _follow_backward(tracker: Tracker) -> None:
    backward = torch.autograd.backward

    def followed(tensors: Any, *args: Any, **kwargs: Any) -> None:
        leaves = list(_leaves(tensors))
        aside, tracker.ledger.making = tracker.ledger.making, None  # of a step that calls its closure
        try:
            backward(tensors, *args, **kwargs)
        finally:
            tracker.ledger.making = aside
            _mark_gradients(tracker, leaves)

    _torch.autograd.backward = followed


def _follow_steps(tracker: Tracker) -> None:
    ledger = tracker.ledger

    def begins(optimizer: Any, _args: Any, _kwargs: Any) -> None:
        for group in optimizer.param_groups:
            _mark_gradients(tracker, group["params"])
        ledger.making = f"buffers of {type(optimizer).__name__}.step()"

    def ended(optimizer: Any, _args: Any, _kwargs: Any) -> None:
        ledger.making = None
        for tensor in state_of(optimizer):
            tracker.mark(tensor, Role.OPTIMIZER_STATE)

    register_optimizer_step_pre_hook(begins)
    register_optimizer_step_post_hook(ended)


def _mark_gradients(tracker: Tracker, parameters: list[Any]) -> None:
    for parameter in parameters:
        if isinstance(parameter, torch.nn.Parameter):
            tracker.mark(parameter, Role.PARAMETER)
        if parameter.grad is not None:
            tracker.mark(parameter.grad, Role.GRADIENT)


def _leaves(tensors: Any) -> Iterator[Any]:
    """Yield the tensors in which a backward from ``tensors`` leaves gradients."""
    given = tensors if isinstance(tensors, (list, tuple)) else [tensors]
    todo = [tensor.grad_fn for tensor in given if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None]
    yield from (tensor for tensor in given if isinstance(tensor, torch.Tensor) and tensor.grad_fn is None)
    seen: set[Any] = set()
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None) if not node.next_functions else None
        if leaf is not None:
            yield leaf
        todo += [following for following, _ in node.next_functions if following is not None]


# What modules keep ----------------------------------------------------------------------------------------------------

# Every allocation is noted with the module whose forward was running. What is looked at is the moment at which forwards
# hold most: when the last graph is whole. Source of what such figures are for: Chen et al., arXiv:1604.06174.


_is_wrapped: Final = torch._C._functorch.is_functorch_wrapped_tensor
_IN_TURN: Final = torch.nn.Sequential.forward


@dataclass(frozen=True, slots=True)
class _Place:
    """A module by its path below the model that was called, ``(type name, bytes of parameters)``."""

    model: tuple[str, int]
    path: str


class ModuleCalls:
    """Notes which module's forward is running, and what each gives out; in a process that is thrown away."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker
        self._places: Any = weakref.WeakKeyDictionary()
        self._about: dict[_Place, tuple[bool, bool]] = {}
        self._costs: dict[_Place, float] = defaultdict(float)
        self._within: list[_Place] = []

    def follow(self, models: Iterable[tuple[str, Any]]) -> None:
        """Have all modules tell of their calls: a part that is called by itself belongs to a model with a name."""
        for _, model in models:
            self._name(model)
        plain = _torch.nn.Module._call_impl

        def followed(module: Any, *args: Any, **kwargs: Any) -> Any:
            if module not in self._places:
                self._name(module)
            place, before = self._places[module], self._tracker.meter.cost
            self._costs[place] += 0.0
            self._within.append(place)
            self._tracker.ledger.within = place
            try:
                out = plain(module, *args, **kwargs)
            finally:
                self._within.pop()
                self._tracker.ledger.within = self._within[-1] if self._within else None
            self._costs[place] += self._tracker.meter.cost - before
            for one in tree_iter(out):
                is_plain = isinstance(one, torch.Tensor) and not _is_wrapped(one)  # functorch's have no storage
                note = self._tracker.note_of(one) if is_plain else None
                if note is not None:
                    note.out_of = note.out_of | {place}
            return out

        _torch.nn.Module._call_impl = followed

    def _name(self, model: Any) -> None:
        """Name the parts of a model that were not named as those of another one."""
        made = (one for one in model.parameters() if not is_lazy(one))
        size = sum(one.numel() * one.element_size() for one in made)
        for path, part in model.named_modules():
            if part not in self._places:
                self._places[part] = place = _Place((type(model).__name__, size), path)
                runs_in_turn = type(part).forward is _IN_TURN
                self._about[place] = (runs_in_turn, getattr(part, "inplace", None) is True)

    def told(self) -> tuple[ModuleMemory, ...]:
        """Return what each module keeps, in the order of the first calls."""
        ledger = self._tracker.ledger
        live: dict[int, int] = {}
        held = most = at = 0
        for index, event in enumerate(ledger.events):
            if event[0] == "alloc":
                live[event[1]] = event[2]
                held += event[2] if ledger.note(event[1]).within is not None else 0
            else:
                size = live.pop(event[1])
                held -= size if ledger.note(event[1]).within is not None else 0
            if held > most:
                most, at = held, index + 1
        own, output = Counter[_Place](), Counter[_Place]()
        for number, size in ledger.alive_after(at).items():
            note = ledger.note(number)
            if note.within is not None:
                own[note.within] += size
                output.update(dict.fromkeys(note.out_of, size))
        whole = self._tracker.meter.cost or 1.0
        return tuple(
            ModuleMemory(
                *(place.model, place.path, own[place], output[place], round(cost / whole, 6)), *self._about[place]
            )
            for place, cost in self._costs.items()
        )

"""What the storages that a shadow run makes are there for, told at the moments at which torch shows it.

A gradient is what a backward leaves in ``.grad``, optimizer state what a step leaves in ``state``, parameters and
buffers what a module registers; what a step makes and lets go of again was a buffer of its own. The notes of the ledger
take that down, also of what the peak has seen already. Everything here is done to a process that was forked to be
thrown away.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules import module as torch_module
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from oomdoctor.forecast.survey import alive, state_of, told_roles
from oomdoctor.model.memory import Role

if TYPE_CHECKING:
    from oomdoctor.forecast.tracker import Tracker

_torch: Any = torch
_modules: Any = torch_module


def follow_roles(tracker: Tracker) -> None:
    """Have modules, backward passes and optimizers tell what they keep. To be called before their other stand-ins."""
    _follow_modules(tracker)
    _follow_detach(tracker)
    _follow_backward(tracker)
    _follow_steps(tracker)


def note_roles(tracker: Tracker, modules: list[weakref.ref[torch.nn.Module]]) -> None:
    """Tell what modules and optimizers keep at the end, where they have it by other ways.

    Args:
        modules: those that were there before the cell, which the garbage collector does not tell of any more.
    """
    before = [module for reference in modules if (module := reference()) is not None]
    for tensor, role in told_roles(alive().add(before)):
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

    cls: Any = torch.Tensor
    cls.detach = noted


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

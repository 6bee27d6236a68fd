"""Micro-batches on live objects: a loader that gives parts of its batches, and steps held back until the last part.

While it is in force, in a loop over one of the session's loaders: ``backward`` weighs a mean loss by its part's
share of the batch; ``zero_grad`` acts while no gradients are pending; clipping and the steps of optimizers and
schedulers act on the last part alone. Whether a loss is a mean or a sum is read from its autograd node, never from
tensors that it saved. All is put back on exit, whatever happens.

Limits: losses that couple samples by other means than a product of two activations are not recognised, and values
that the loop prints are of parts. An optimizer that the session does not know may not step in such a loop.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from oomdoctor.errors import OomDoctorError
from oomdoctor.fixes._forward import is_shadow_run
from oomdoctor.model.kinds import submodules
from oomdoctor.model.session import Session

__all__ = ["in_parts"]

_UNKNOWN: Final = 0
_MEAN: Final = 1
_SUM: Final = 2
"""Values of ``_saved_reduction``. Source: ``at::Reduction`` in ATen/core/Reduction.h: None 0, Mean 1, Sum 2."""

_NO_IGNORE: Final = {-100, 2**64 - 100}
"""The default ``ignore_index``, which autograd nodes show as an unsigned number."""

_ARITHMETIC: Final = ("Add", "Sub", "Mul", "Div", "Neg", "ToCopy", "Clone", "Squeeze", "View", "Alias")
_CLIPS: Final = ("clip_grad_norm_", "clip_grad_value_")
_MISSING: Final = object()


@dataclass(slots=True)
class _Place:
    """Where the loop stands: which share of its batch the part at hand has, and what is still to come.

    Attributes:
        share: None outside of a loop over a known loader.
        pending: gradients of earlier parts wait for the step.
    """

    share: float | None = None
    is_last: bool = True
    pending: bool = False
    checked: bool = False
    owners: set[int] = field(default_factory=set)


@contextmanager
def in_parts(session: Session, parts: int) -> Iterator[None]:
    """Take the batches of the session's loaders in ``parts`` parts.

    Raises:
        OomDoctorError: on entering or in the loop, with the reason why the meaning would not be kept.
    """
    _check(session)
    place = _Place(owners={id(optimizer) for _, optimizer in session.optimizers})
    with ExitStack() as undo:
        _gate_loaders(undo, place, [loader for _, loader in session.loaders], parts)
        for _, optimizer in session.optimizers:
            _gate(undo, optimizer, "zero_grad", lambda: not place.pending)
            _gate(undo, optimizer, "step", lambda: place.is_last, done=lambda: _stepped(place))
        for _, scheduler in session.schedulers:
            _gate(undo, scheduler, "step", lambda: place.is_last)
        for _, module in session.modules:
            _gate(undo, module, "zero_grad", lambda: not place.pending)
        _gate_clipping(undo, place, session.namespace)
        _weigh_backward(undo, place)
        undo.callback(register_optimizer_step_pre_hook(functools.partial(_check_owner, place)).remove)
        yield


def _check(session: Session) -> None:
    if not session.loaders:
        raise OomDoctorError(
            "no DataLoader was found among the notebook's objects, so no batches can be taken in parts"
        )
    if not session.optimizers:
        raise OomDoctorError("no optimizer was found among the notebook's objects, so its steps cannot be held back")
    for path, root in session.modules:
        for name, module in submodules(root, path):
            kinds = {base.__name__ for base in type(module).__mro__}
            if module.__dict__.get("training") and (
                "_BatchNorm" in kinds or ("_InstanceNorm" in kinds and module.__dict__.get("track_running_stats"))
            ):
                raise OomDoctorError(f"{name} normalises over the batch in training mode")
            if kinds & {"RNNBase", "MultiheadAttention"} and not module.__dict__.get("batch_first"):
                raise OomDoctorError(f"{name} takes the batch in dimension 1, not 0")
            _check_loss(name, module)
    for name, value in session.namespace.items():
        if type(value).__name__ == "GradScaler" and value.__dict__.get("_enabled"):
            raise OomDoctorError(f"{name} scales gradients and counts steps, which live parts would upset")


def _check_loss(name: str, module: Any) -> None:
    if type(module).__module__ != "torch.nn.modules.loss" or module.__dict__.get("reduction") != "mean":
        return
    if module.__dict__.get("ignore_index", -100) != -100:
        raise OomDoctorError(f"{name} passes over some targets, so its mean is not one over samples")
    if type(module).__name__ in {"CrossEntropyLoss", "NLLLoss"} and module._buffers.get("weight") is not None:
        raise OomDoctorError(f"{name} has class weights, so its mean is not one over samples")


def _gate_loaders(undo: ExitStack, place: _Place, loaders: list[Any], parts: int) -> None:
    known = {id(loader) for loader in loaders}
    for cls in {type(loader) for loader in loaders}:
        original = cls.__iter__

        def iterate(loader: Any, original: Callable[[Any], Iterator[Any]] = original) -> Iterator[Any]:
            batches = original(loader)
            return _parts_of(batches, place, parts) if id(loader) in known else batches

        _replace(undo, cls, "__iter__", iterate)


def _parts_of(batches: Iterator[Any], place: _Place, parts: int) -> Iterator[Any]:
    try:
        for batch in batches:
            # Without gradients (evaluation) there is nothing to accumulate, and metrics are of whole batches.
            if not torch.is_grad_enabled():
                yield batch
                continue
            if place.share is not None and place.pending:
                raise OomDoctorError("a batch ended without a step of the optimizer: the loop accumulates already")
            rows = _rows(batch)
            bounds = [(start, min(start + -(-rows // parts), rows)) for start in range(0, rows, -(-rows // parts))]
            for start, end in bounds:
                place.share, place.is_last = (end - start) / rows, end == rows
                yield _slice(batch, rows, start, end)
    finally:
        place.share, place.is_last, place.pending = None, True, False


def _rows(batch: Any) -> int:
    lengths = {tensor.shape[0] if tensor.dim() else 0 for tensor in _tensors(batch)}
    if len(lengths) != 1 or 0 in lengths:
        raise OomDoctorError("the tensors of a batch differ in their first dimension, so it cannot be taken in parts")
    for tensor in _tensors(batch):
        if not tensor.is_floating_point() and not is_shadow_run() and bool((tensor == -100).any()):
            raise OomDoctorError(
                "the batch has entries of -100, which a loss passes over: its mean is not over samples"
            )
    return lengths.pop()


def _tensors(batch: Any) -> Iterator[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, dict):
        for value in batch.values():
            yield from _tensors(value)
    elif isinstance(batch, list | tuple):
        for value in batch:
            yield from _tensors(value)


def _slice(value: Any, rows: int, start: int, end: int) -> Any:
    if isinstance(value, torch.Tensor):
        return value[start:end]
    if type(value) is dict:
        return {key: _slice(item, rows, start, end) for key, item in value.items()}
    if type(value) in {list, tuple}:
        if len(value) == rows and not any(True for _ in _tensors(value)):
            return value[start:end]
        return type(value)(_slice(item, rows, start, end) for item in value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_slice(item, rows, start, end) for item in value))
    if isinstance(value, str | int | float | bool | None):
        return value
    raise OomDoctorError(f"a batch holds a {type(value).__name__}, which cannot be taken in parts")


def _gate(
    undo: ExitStack, owner: Any, name: str, opens: Callable[[], bool], done: Callable[[], None] | None = None
) -> None:
    """Have ``owner.name`` do nothing while ``opens`` says no."""
    original = getattr(owner, name)

    # ``wraps`` carries over the marks by which schedulers know a step that they have wrapped.
    @functools.wraps(original)
    def gated(*args: Any, **kwargs: Any) -> Any:
        if args and callable(args[0]) and name == "step":
            raise OomDoctorError("the optimizer calls a closure, which cannot be taken in parts")
        if not opens():
            return None
        result = original(*args, **kwargs)
        if done is not None:
            done()
        return result

    _replace(undo, owner, name, gated)


def _stepped(place: _Place) -> None:
    place.pending = False


def _gate_clipping(undo: ExitStack, place: _Place, namespace: dict[str, Any]) -> None:
    home = torch.nn.utils
    for name in _CLIPS:
        original = getattr(home, name)

        def clip(*args: Any, original: Callable[..., Any] = original, **kwargs: Any) -> Any:
            return original(*args, **kwargs) if place.is_last else torch.zeros(())

        _replace(undo, home, name, clip)
        for key in [key for key, value in namespace.items() if value is original]:
            namespace[key] = clip
            undo.callback(namespace.__setitem__, key, original)


def _weigh_backward(undo: ExitStack, place: _Place) -> None:
    original: Callable[..., None] = torch.Tensor.backward

    def backward(
        loss: torch.Tensor,
        gradient: torch.Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        if place.share is not None:
            if gradient is not None or loss.dim() or retain_graph or create_graph or inputs is not None:
                raise OomDoctorError("backward is called with arguments, which cannot be weighted by a part's share")
            if not place.checked:
                _check_graph(loss.grad_fn)
                place.checked = True
            place.pending = True
            weight = place.share if _reduction(loss.grad_fn) == _MEAN else 1.0
            gradient = torch.full_like(loss, weight)
        original(loss, gradient, retain_graph, create_graph, inputs)

    _replace(undo, torch.Tensor, "backward", backward)


def _reduction(node: Any) -> int:
    """Return how the loss made by ``node`` reduces.

    Raises:
        OomDoctorError: it cannot be told, or its terms reduce in different ways.
    """
    found = set(_reductions(node))
    if len(found) != 1 or _UNKNOWN in found:
        raise OomDoctorError("the loss is not known to be a mean or a sum over the samples of the batch")
    return found.pop()


def _reductions(node: Any) -> Iterator[int]:
    name = node.name() if node is not None else ""
    if name.startswith("Mean") and "0" in name:
        yield _MEAN
    elif name.startswith("Sum") and "0" in name:
        yield _SUM
    elif (kind := getattr(node, "_saved_reduction", None)) in {_MEAN, _SUM}:
        if kind == _MEAN and getattr(node, "_saved_ignore_index", -100) not in _NO_IGNORE:
            raise OomDoctorError("the loss passes over some targets, so its mean is not one over samples")
        yield int(kind)
    elif name.startswith(_ARITHMETIC):
        if name.startswith("Div") and getattr(node.next_functions[0][0], "name", str)().startswith("Sum"):
            # A sum that a count of the samples divides is a mean; by what it was divided, the graph does not tell.
            raise OomDoctorError("the loss is a sum that is divided, and by what is not known")
        for child, _ in node.next_functions:
            if child is not None:
                yield from _reductions(child)
    else:
        yield _UNKNOWN


def _check_graph(root: Any) -> None:
    """Look through the graph of the first part for what couples samples: batch statistics, similarity matrices."""
    todo, seen = [root], set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        children = [child for child, _ in node.next_functions]
        name = node.name()
        if "BatchNorm" in name and getattr(node, "_saved_training", True):
            raise OomDoctorError("a layer normalises over the batch in training mode")
        if name == "MmBackward0" and not any(child is None or _is_weight(child) for child in children[:2]):
            raise OomDoctorError("the loss compares the samples of a batch with one another")
        todo += children


def _is_weight(node: Any) -> bool:
    while node is not None and node.name() in {"TBackward0", "TransposeBackward0", "ToCopyBackward0"}:
        node = node.next_functions[0][0]
    return node is None or "AccumulateGrad" in node.name()


def _check_owner(place: _Place, optimizer: Any, args: Any, kwargs: Any) -> None:
    if place.share is not None and id(optimizer) not in place.owners:
        raise OomDoctorError("an optimizer that the cell made itself steps in the loop: its steps cannot be held back")


def _replace(undo: ExitStack, owner: Any, name: str, value: Any) -> None:
    before = vars(owner).get(name, _MISSING)
    if before is _MISSING:
        undo.callback(_drop, owner, name)
    else:
        undo.callback(type.__setattr__ if isinstance(owner, type) else _put, owner, name, before)
    _put(owner, name, value)


def _put(owner: Any, name: str, value: Any) -> None:
    if isinstance(owner, type):
        setattr(owner, name, value)
    else:
        # Past ``nn.Module.__setattr__`` and its like, which keep registers of their own.
        vars(owner)[name] = value


def _drop(owner: Any, name: str) -> None:
    if isinstance(owner, type):
        delattr(owner, name)
    else:
        vars(owner).pop(name, None)

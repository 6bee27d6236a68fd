"""Micro-batches on live objects: a loader that gives parts of its batches, and steps held back until the last part.

While it is in force, in a loop over one of the session's loaders: ``backward`` weighs a mean loss by its part's
share of the batch; ``zero_grad`` acts while no gradients are pending; clipping and the steps of optimizers and
schedulers act on the last part alone. Whether a loss is a mean or a sum is read from its graph. All is put back on
exit, whatever happens.

The body of the loop runs once for each part, so what it does by itself must not add up: it has to ask for a step in
each part, and may change neither gradients, weights nor the settings of an optimizer between the parts of a batch. A
loop that ends before its batches do has counted parts. An optimizer that the session does not know may not step in it.

Limits: values that the loop prints are of parts, and a mean that it multiplies by a count of samples counts parts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import MethodType
from typing import Any, Final

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from oomdoctor.errors import OomDoctorError
from oomdoctor.fixes._forward import is_shadow_run
from oomdoctor.fixes._micro_place import Place
from oomdoctor.model.session import Session
from oomdoctor.objects.alive import classes_below
from oomdoctor.objects.kinds import submodules

__all__ = ["in_parts"]

_CLIPS: Final = ("clip_grad_norm_", "clip_grad_value_")
_MISSING: Final = object()


@contextmanager
def in_parts(session: Session, parts: int) -> Iterator[None]:
    """Take the batches of the session's loaders in ``parts`` parts.

    Raises:
        OomDoctorError: on entering or in the loop, with the reason why the meaning would not be kept.
    """
    _check(session)
    modules = [module for _, module in session.modules]
    weights = [weight for module in modules for weight in (*module.parameters(), *module.buffers())]
    place = Place(optimizers=[optimizer for _, optimizer in session.optimizers], weights=weights)
    with ExitStack() as undo:
        _gate_loaders(undo, place, [loader for _, loader in session.loaders], parts)
        for optimizer in place.optimizers:
            _gate(undo, optimizer, "zero_grad", place.may_zero)
            _gate(undo, optimizer, "step", place.may_step, done=place.stepped)
        for module in modules:
            _gate(undo, module, "zero_grad", place.may_zero)
        _gate_schedulers(undo, place, [type(scheduler) for _, scheduler in session.schedulers])
        _gate_clipping(undo, place, session.namespace)
        _weigh_backward(undo, place)
        _refuse_other_gradients(undo, place)
        undo.callback(register_optimizer_step_pre_hook(place.check_owner).remove)
        yield
        if place.unfinished and not is_shadow_run():
            raise OomDoctorError("the loop ended before its batches did: it may have counted parts of them")


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


def _check_loss(name: str, module: Any) -> None:
    if type(module).__module__ != "torch.nn.modules.loss" or module.__dict__.get("reduction") != "mean":
        return
    if module.__dict__.get("ignore_index", -100) != -100:
        raise OomDoctorError(f"{name} passes over some targets, so its mean is not one over samples")
    if type(module).__name__ in {"CrossEntropyLoss", "NLLLoss"} and module._buffers.get("weight") is not None:
        raise OomDoctorError(f"{name} has class weights, so its mean is not one over samples")


def _gate_loaders(undo: ExitStack, place: Place, loaders: list[Any], parts: int) -> None:
    known = {id(loader) for loader in loaders}
    for cls in {type(loader) for loader in loaders}:
        original = cls.__iter__

        def iterate(loader: Any, original: Callable[[Any], Iterator[Any]] = original) -> Iterator[Any]:
            batches = original(loader)
            return _parts_of(batches, place, parts) if id(loader) in known else batches

        _replace(undo, cls, "__iter__", iterate)


def _parts_of(batches: Iterator[Any], place: Place, parts: int) -> Iterator[Any]:
    took_parts = False
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
            if len(bounds) > 1 and not took_parts:
                took_parts = True
                place.unfinished += 1
            for start, end in bounds:
                place.begin(start, end, rows)
                written = place.written()
                yield _slice(batch, rows, start, end)
                place.check(written)
        place.unfinished -= took_parts
    finally:
        place.share, place.is_last, place.pending = None, True, False
        place.gradients = place.factors = None


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
    before = vars(owner).get(name, _MISSING)
    original = getattr(owner, name)

    # ``wraps`` carries over the marks by which schedulers know a step that they have wrapped.
    @functools.wraps(original)
    def gated(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args and callable(args[0]) and name == "step":
            raise OomDoctorError("the optimizer calls a closure, which cannot be taken in parts")
        if not opens():
            return None
        result = original(*args, **kwargs)
        if done is not None:
            done()
        return result

    # A method, as schedulers that the cell makes take it apart.
    method = vars(owner)[name] = MethodType(gated, owner)

    def put_back() -> None:
        # What such a scheduler has put in its place stays there.
        if vars(owner).get(name) is method:
            _put(owner, name, before)

    undo.callback(put_back)


def _gate_schedulers(undo: ExitStack, place: Place, known: Sequence[type]) -> None:
    """Have schedulers step with the last part alone, those that the cell makes as well."""
    roots = (torch.optim.lr_scheduler.LRScheduler, *known)
    for cls in dict.fromkeys(cls for root in roots for cls in classes_below(root)):
        if "step" in vars(cls):
            original = vars(cls)["step"]

            @functools.wraps(original)
            def step(*args: Any, original: Callable[..., Any] = original, **kwargs: Any) -> Any:
                return original(*args, **kwargs) if place.is_last else None

            _replace(undo, cls, "step", step)


def _gate_clipping(undo: ExitStack, place: Place, namespace: dict[str, Any]) -> None:
    home = torch.nn.utils
    for name in _CLIPS:
        original = getattr(home, name)

        def clip(*args: Any, original: Callable[..., Any] = original, **kwargs: Any) -> Any:
            return original(*args, **kwargs) if place.is_last else torch.zeros(())

        _replace(undo, home, name, clip)
        for key in [key for key, value in namespace.items() if value is original]:
            namespace[key] = clip
            undo.callback(namespace.__setitem__, key, original)


def _weigh_backward(undo: ExitStack, place: Place) -> None:
    original: Callable[..., None] = torch.Tensor.backward
    within = False

    def backward(
        loss: torch.Tensor,
        gradient: torch.Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        nonlocal within
        # A mode that sees torch's functions, such as a default device, comes back here on its way.
        outermost = not within
        if place.share is not None and outermost:
            if gradient is not None or loss.dim() or retain_graph or create_graph or inputs is not None:
                raise OomDoctorError("backward is called with arguments, which cannot be weighted by a part's share")
            weight = place.weight(loss.grad_fn)
            gradient = torch.full_like(loss, weight)
        within = True
        try:
            original(loss, gradient, retain_graph, create_graph, inputs)
        finally:
            within = not outermost
        if place.share is not None:
            place.gradients = place.collected()

    _replace(undo, torch.Tensor, "backward", backward)


def _refuse_other_gradients(undo: ExitStack, place: Place) -> None:
    """Refuse what makes gradients by other ways than ``backward`` of the loss."""
    differentiate: Callable[..., Any] = torch.autograd.grad

    @functools.wraps(differentiate)
    def grad(*args: Any, **kwargs: Any) -> Any:
        if place.share is not None:
            raise OomDoctorError("the loop takes derivatives itself, which are not weighted by a part's share")
        return differentiate(*args, **kwargs)

    _replace(undo, torch.autograd, "grad", grad)
    scaled: Callable[..., Any] = torch.amp.GradScaler.scale

    @functools.wraps(scaled)
    def scale(scaler: Any, outputs: Any) -> Any:
        if place.share is not None and scaler.is_enabled():
            raise OomDoctorError("a GradScaler scales gradients and counts steps, which live parts would upset")
        return scaled(scaler, outputs)

    _replace(undo, torch.amp.GradScaler, "scale", scale)


def _replace(undo: ExitStack, owner: Any, name: str, value: Any) -> None:
    undo.callback(_put, owner, name, vars(owner).get(name, _MISSING))
    _put(owner, name, value)


def _put(owner: Any, name: str, value: Any) -> None:
    if isinstance(owner, type):
        delattr(owner, name) if value is _MISSING else setattr(owner, name, value)
    elif value is _MISSING:
        vars(owner).pop(name, None)
    else:
        # Past ``nn.Module.__setattr__`` and its like, which keep registers of their own.
        vars(owner)[name] = value

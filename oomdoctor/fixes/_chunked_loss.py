"""A cross-entropy over chunks of rows, and the output layer of a model with it.

``chunked_loss(F.cross_entropy, 8)`` has the log-probabilities of one chunk of rows at a time, in the backward pass too.

``chunked_head(model, 8)`` does so for each cross-entropy that a forward of ``model`` takes, in a library as well, and
has the gradient of the logits of one chunk at a time: in the backward pass a chunk's logits are made again from what
the output layer was given. How the rows of the loss lie in those of the layer is told by what each function between
them does to numbers of rows in the place of logits: it moves them (``view``, a slice), or it computes (a cast, a
division), which is done again. After what does neither, the loss alone is taken in chunks. Losses that come out
otherwise the second time are an error. Limit: the logits are made whole in the forward, since a model may return them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from inspect import signature
from typing import Any, Final, NamedTuple, cast

import torch
from torch.autograd.function import once_differentiable
from torch.nn import CrossEntropyLoss, functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

from oomdoctor.errors import OomDoctorError, StateError
from oomdoctor.fixes import _forward

_HALVES: Final = (torch.float16, torch.bfloat16)
_SIGNATURE: Final = signature(functional.cross_entropy)
_OPTIONS: Final = ("weight", "ignore_index", "reduction", "label_smoothing")
_WIDENS: Final = 2
"""So many times as many outputs as inputs has a layer whose logits are worth making twice."""
_FIRST: Final = 1 << 40
"""Number of the first row: what computes with such numbers does not give one of them."""
_LOSS_MOVES: Final = 0.02
"""How far a chunk's losses may lie apart when they are taken twice, of the largest: bfloat16 has three digits."""


def chunked_loss(loss: Callable[..., Any], chunks: int) -> Callable[..., Any]:
    """Return a cross-entropy that has the log-probabilities of one chunk of rows at a time.

    The mean is over all rows that count, weighted by their classes, not the mean of means of chunks.

    Args:
        loss: ``torch.nn.functional.cross_entropy``, or a ``torch.nn.CrossEntropyLoss``.
        chunks: how many; called with tensors of which there is no chunk, it is the loss itself.
    """

    def taken(*args: Any, **kwargs: Any) -> Any:
        if type(loss) is CrossEntropyLoss:
            kwargs |= {name: getattr(loss, name) for name in _OPTIONS}
        elif loss is not functional.cross_entropy:
            raise StateError("the loss is not torch's cross_entropy: it is not taken in chunks")
        given = _given(args, kwargs)
        if why := _why_not(given):
            raise StateError(f"a cross-entropy {why}")
        return _reduced(given, lambda *of: _OfRows.apply(*of, chunks))  # type: ignore[no-untyped-call]

    return taken


def chunked_head(model: Any, chunks: int) -> None:
    """Have each cross-entropy that a forward of ``model`` takes made in chunks of rows, its output layer with it.

    Args:
        model: a ``torch.nn.Module`` whose forward takes the loss. A second call changes the number of chunks.
        chunks: how many.

    Raises:
        OomDoctorError: it is compiled, replicated or sharded; raised in the backward pass where a chunk's losses come
            out otherwise than in the forward.
    """
    _forward.refuse_unless_plain(type(model).__name__, model)
    if type(mark := vars(model).get("forward")) is _Headed:
        mark.chunks = chunks
    else:
        model.forward = _Headed(model, chunks)


class _Headed:
    """The ``forward`` of a module whose losses are taken in chunks."""

    def __init__(self, module: Any, chunks: int) -> None:
        self._module, self.chunks = module, chunks
        self._own: _forward.Forward | None = vars(module).get("forward")

    @property
    def __wrapped__(self) -> _forward.Forward:
        """The module's own forward, by which libraries read what arguments it takes."""
        return self._own or type(self._module).forward.__get__(self._module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _Follow(self.chunks):
            return self.__wrapped__(*args, **kwargs)


class _Made(NamedTuple):
    """What is known of logits: which call made them, how their rows lie in its own, what was computed on the way.

    Attributes:
        call: ``function(inputs, *rest, **options)``, which made ``classes`` numbers of each row of its inputs.
        autocast: whether it ran so, and in which type.
        rows: numbers of the rows, in the shape of the logits with a single one in the place of the classes.
        version: of the logits; another one tells that something was written into them.
    """

    call: tuple[Callable[..., Any], torch.Tensor, tuple[Any, ...], dict[str, Any]]
    classes: int
    autocast: tuple[bool, torch.dtype]
    rows: torch.Tensor
    computed: tuple[Callable[[torch.Tensor], torch.Tensor], ...]
    version: int


class _Follow(TorchFunctionMode):
    """Follows what makes logits to the cross-entropies that are taken of them."""

    def __init__(self, chunks: int) -> None:
        super().__init__()
        self._chunks, self._made = chunks, WeakIdKeyDictionary()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one function, in chunks where it is a cross-entropy."""
        kwargs = kwargs or {}
        if func is functional.cross_entropy:
            return self._loss(_given(args, kwargs))
        first = args[0] if args else None
        known = self._known(first)
        result = func(*args, **kwargs)
        if isinstance(first, torch.Tensor) and isinstance(result, torch.Tensor) and result.is_floating_point():
            made = _made(func, first, args[1:], kwargs, result)
            if made is None and known is not None:
                made = _followed(known, func, first, args[1:], kwargs, result)
            if made is not None:
                self._made[result] = made
        return result

    def _known(self, tensor: Any) -> _Made | None:
        found: _Made | None = self._made.get(tensor) if isinstance(tensor, torch.Tensor) else None  # type: ignore[no-untyped-call]
        return found if found is not None and found.version == tensor._version else None

    def _loss(self, given: dict[str, Any]) -> Any:
        if _why_not(given) is not None:
            return functional.cross_entropy(**given)
        made = self._known(given["input"])
        if made is None or made.rows.shape[1] != 1 or not torch.is_grad_enabled():
            return _reduced(given, lambda *of: _OfRows.apply(*of, self._chunks))  # type: ignore[no-untyped-call]
        _, inputs, rest, options = made.call
        layer = pytree.tree_leaves((rest, options))
        return _reduced(
            given,
            lambda logits, *of: _OfLayer.apply(  # type: ignore[no-untyped-call]
                logits.detach(), *of, self._chunks, made, inputs, *layer
            ),
        )


def _made(func: Any, first: torch.Tensor, rest: Any, options: Any, result: torch.Tensor) -> _Made | None:
    """Return what is known of the result of a call that makes many more numbers of each row than it is given."""
    if first.ndim < 2 or result.shape[:-1] != first.shape[:-1] or result.shape[-1] < _WIDENS * first.shape[-1]:
        return None
    device = result.device.type
    with _disable_current_modes():
        rows = torch.arange(_FIRST, _FIRST + first.shape[:-1].numel(), device="cpu").view(*first.shape[:-1], 1)
    autocast = (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
    return _Made((func, first, tuple(rest), options), result.shape[-1], autocast, rows, (), result._version)


def _followed(
    made: _Made, func: Any, first: torch.Tensor, rest: Any, options: Any, result: torch.Tensor
) -> _Made | None:
    """Return what is known of the result of a function of logits: None where it neither moves nor computes rows."""
    moved = _moved(made, func, rest, options)
    if moved is not None and moved.ndim == result.ndim:
        differ = [pair for pair in zip(moved.shape, result.shape, strict=True) if pair[0] != pair[1]]
        if differ == [(1, made.classes)]:
            return made._replace(rows=moved, version=result._version)
    if result.shape != first.shape or any(map(torch.is_tensor, pytree.tree_leaves((rest, options)))):
        return None
    computed = (*made.computed, lambda logits: func(logits, *rest, **options))
    return made._replace(computed=computed, version=result._version)


def _moved(made: _Made, func: Any, rest: Any, options: Any) -> torch.Tensor | None:
    """Return the numbers of rows as a function moves them, None where it does not do that alone."""

    def single(leaf: Any) -> Any:
        """One row has one number in the place of its classes; what chooses among rows is brought to them."""
        if isinstance(leaf, torch.Tensor):
            return leaf.cpu()
        return 1 if type(leaf) is int and leaf == made.classes else leaf

    # A function that does not take such numbers does not move them; one that draws must not do so twice.
    with suppress(Exception), _disable_current_modes(), torch.random.fork_rng(devices=()):
        rest, options = pytree.tree_map(single, (rest, options))
        moved = func(made.rows, *rest, **options)
        end = _FIRST + made.call[1].shape[:-1].numel()
        if moved.dtype is torch.int64 and bool(((moved >= _FIRST) & (moved < end)).all()):
            return cast("torch.Tensor", moved)
    return None


class _OfLayer(torch.autograd.Function):
    """The losses of all rows, whose logits are made again in the backward pass, chunk by chunk."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Any:
        logits, target, options, chunks, made, *layer = given
        each = [_losses(part, labels, options) for part, labels in _chunks(chunks, logits, target)]
        losses = torch.cat(each, _longest(target))
        ctx.save_for_backward(target, losses, *(one if isinstance(one, torch.Tensor) else None for one in layer))
        ctx.options, ctx.chunks, ctx.made = options, chunks, made
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_losses: torch.Tensor) -> Any:
        target, before, *layer = ctx.saved_tensors
        is_wanted = ctx.needs_input_grad[-len(layer) :]
        wanted = [at for at, one in enumerate(is_wanted) if one]
        own: list[Any] = [
            one if one is None else one.detach().requires_grad_(at in wanted) for at, one in enumerate(layer)
        ]
        inputs = layer[0].detach().flatten(0, -2)
        totals: list[Any] = [torch.zeros_like(inputs) if 0 in wanted else None, *(None for _ in layer[1:])]
        parts = _chunks(ctx.chunks, ctx.made.rows, target, of_losses, before)
        for rows, labels, of_part, losses_before in parts:
            places = _places(rows, inputs.device)
            with torch.enable_grad():
                own[0] = inputs[places].requires_grad_(0 in wanted)
                losses = _losses(_again(ctx.made, own), labels, ctx.options)
            _check_alike(losses.detach(), losses_before)
            for at, grad in zip(wanted, torch.autograd.grad(losses, [own[at] for at in wanted], of_part), strict=True):
                if at == 0:
                    totals[0].index_add_(0, places.flatten(), grad.flatten(0, -2))
                else:
                    totals[at] = grad if totals[at] is None else totals[at].add_(grad)
        if totals[0] is not None:
            totals[0] = totals[0].view_as(layer[0])
        return None, None, None, None, None, *totals


def _longest(target: torch.Tensor) -> int:
    """Return the dimension of a target that is cut into chunks."""
    return max(range(target.ndim), key=lambda at: target.shape[at])


def _chunks(chunks: int, of_classes: torch.Tensor, *of_rows: torch.Tensor) -> Iterator[Any]:
    """Yield the chunks of logits, each with those of what has a number for each of their rows."""
    at = _longest(of_rows[0])
    yield from zip(of_classes.chunk(chunks, at and at + 1), *(one.chunk(chunks, at) for one in of_rows), strict=True)


def _places(rows: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return at which rows of its inputs a layer made the logits of a chunk."""
    if _forward.is_shadow_run():
        return torch.zeros(rows.squeeze(1).shape, dtype=torch.int64, device=device)
    return (rows - _FIRST).squeeze(1).to(device)


def _again(made: _Made, layer: list[Any]) -> torch.Tensor:
    """Make the logits of a chunk from its inputs, and the layer's other tensors."""
    function, _, rest, options = made.call
    leaves, form = pytree.tree_flatten((rest, options))
    filled = [leaf if one is None else one for leaf, one in zip(leaves, layer[1:], strict=True)]
    rest, options = pytree.tree_unflatten(filled, form)
    inputs = layer[0]
    with torch.autocast(inputs.device.type, made.autocast[1], enabled=made.autocast[0]):
        logits: torch.Tensor = function(inputs, *rest, **options)
        for compute in made.computed:
            logits = compute(logits)
    return logits.movedim(-1, 1) if logits.ndim > 2 else logits


def _check_alike(losses: torch.Tensor, before: torch.Tensor) -> None:
    if not _forward.is_shadow_run() and bool(((losses - before).abs() > _LOSS_MOVES * before.abs().max()).any()):
        raise OomDoctorError("the logits of a chunk are not those of the whole: the loss is not taken in chunks")


def _given(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    bound = _SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


def _reduced(given: dict[str, Any], each: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Return the loss of what ``each(logits, target, options)`` gives for all rows."""
    options = given | {"reduction": "none"}
    logits, target, reduction = options.pop("input"), options.pop("target"), given["reduction"]
    losses = each(logits, target, options)
    if reduction != "mean":
        return losses if reduction == "none" else losses.sum()
    counted, weight = target != given["ignore_index"], given["weight"]
    mean: torch.Tensor = losses.sum() / (counted.sum() if weight is None else weight[target[counted]].sum())
    return mean


class _OfRows(torch.autograd.Function):
    """The losses of all rows. The gradient of each chunk is written into that of the whole: there is no second one."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, target: torch.Tensor, given: dict[str, Any], chunks: int) -> Any:
        ctx.save_for_backward(logits, target)
        ctx.chunks, ctx.given = chunks, given
        losses = [_losses(part, labels, given) for part, labels in _chunks(chunks, logits, target)]
        return torch.cat(losses, _longest(target))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_losses: torch.Tensor) -> Any:
        logits, target = ctx.saved_tensors
        grad = torch.empty_like(logits)
        parts = _chunks(ctx.chunks, logits, target, of_losses)
        into = (there for there, _ in _chunks(ctx.chunks, grad, target))
        for (part, labels, of_part), there in zip(parts, into, strict=True):
            with torch.enable_grad():
                part = part.detach().requires_grad_()
                losses = _losses(part, labels, ctx.given)
            there.copy_(torch.autograd.grad(losses, part, of_part)[0])
        return grad, None, None, None


def _losses(logits: torch.Tensor, target: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
    """Return the losses of a chunk; of halves in single precision, as autocast, which the backward is not under."""
    return functional.cross_entropy(logits.float() if logits.dtype in _HALVES else logits, target, **given)


def _why_not(given: dict[str, Any]) -> str | None:
    """Return why the rows cannot be taken apart, None if they can."""
    logits, target, weight = given["input"], given["target"], given["weight"]
    if given["size_average"] is not None or given["reduce"] is not None:
        return "reduces in a way of the past: it is not taken in chunks"
    if target.is_floating_point():
        return "takes probabilities for targets: it is not taken in chunks"
    if logits.ndim < 2 or target.shape != logits.shape[:1] + logits.shape[2:]:
        return "takes no rows of classes: it is not taken in chunks"
    if weight is not None and weight.requires_grad:
        return "learns its class weights: it is not taken in chunks"
    if logits.dtype in _HALVES and not torch.is_autocast_enabled(logits.device.type):
        return "is taken in half precision: sums of chunks would round otherwise"
    return None

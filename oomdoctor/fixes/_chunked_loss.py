"""A cross-entropy in chunks of rows, and the gradient of the layer that made its logits chunk by chunk.

``chunked_loss(F.cross_entropy, 8)`` has the log-probabilities of one chunk of rows at a time, and ``chunked_head(model,
8)`` does so for each cross-entropy that a forward of the model takes. Where a linear layer made the logits, as their
graph tells, there is no gradient of all logits either: in the backward pass a chunk's logits are made again from what
the layer was given. Views, slices, copies and casts between the layer and the loss are followed. That logits come out
as they were is seen in the forward, of all rows in a few classes, and of a few rows in all classes.

Limits: the logits themselves are made whole, since a model may return them. A hook on logits that are cast before the
loss, or that are gone when it is registered, is not called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from inspect import signature
from typing import Any, Final, NamedTuple
from weakref import ref

import torch
from torch.nn import CrossEntropyLoss, functional
from torch.overrides import TorchFunctionMode

from oomdoctor.errors import StateError
from oomdoctor.fixes import _forward

_HALVES: Final = (torch.float16, torch.bfloat16)
_SIGNATURE: Final = signature(functional.cross_entropy)
_OPTIONS: Final = ("weight", "ignore_index", "reduction", "label_smoothing")
_TRIED: Final = 4
"""Rows and classes that are made again in the forward to see whether they come out as they were."""
_LEAST: Final = 1e-3
"""How far logits that are made again may lie apart, of the largest, where their type has more digits than that."""
_COPIES: Final = frozenset({"Alias", "Clone", "ToCopy"})
_VIEWS: Final = frozenset({"View", "UnsafeView", "ReshapeAlias", "Unsqueeze", "Squeeze"})
_PRODUCTS: Final = frozenset({functional.linear, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__})


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
        given = _arguments_of(args, kwargs)
        if why := _why_not(given):
            raise StateError(f"a cross-entropy {why}")
        return _in_chunks(given, chunks)

    return taken


def chunked_head(model: Any, chunks: int) -> None:
    """Have each cross-entropy that a forward of ``model`` takes made in chunks of rows, its output layer with it.

    Args:
        model: a ``torch.nn.Module`` whose forward takes the loss. A second call changes the number of chunks.
        chunks: how many.

    Raises:
        OomDoctorError: it is compiled, replicated or sharded; raised in a backward pass of which another one is to be
            taken, or where a hook asks for the gradient of the logits.
    """
    _forward.refuse_unless_plain(type(model).__name__, model)
    if type(mark := vars(model).get("forward")) is _Headed:
        mark.chunks = chunks
    else:
        model.forward = _Headed(model, chunks)


class _Headed(_forward.Replaced):
    def __init__(self, module: Any, chunks: int) -> None:
        super().__init__(module)
        self.chunks = chunks

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _LossesInChunks(self.chunks):
            return self.__wrapped__(*args, **kwargs)


class _Layer(NamedTuple):
    """A matrix product that makes logits: of rows, a weight with a column for each class, and a bias."""

    inputs: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    autocast: tuple[bool, torch.dtype]  # whether it ran so, and in which type
    made: ref[torch.Tensor] | None = None


class _LossesInChunks(TorchFunctionMode):
    """Takes each cross-entropy in chunks.

    The last linear layer before it is remembered: of one that does not learn, the graph has not kept what it was given.
    """

    _last: tuple[Any, _Layer] | None = None

    def __init__(self, chunks: int) -> None:
        super().__init__()
        self._chunks = chunks

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one function, in chunks where it is a cross-entropy."""
        kwargs = kwargs or {}
        if func is functional.cross_entropy:
            given = _arguments_of(args, kwargs)
            return func(**given) if _why_not(given) is not None else _in_chunks(given, self._chunks, self._last)
        made = func(*args, **kwargs)
        if func in _PRODUCTS and not kwargs:
            with suppress(Exception):  # nested tensors have no shape
                self._last = _remembered(func, args, made) or self._last
        return made


def _remembered(func: Any, args: Sequence[Any], made: Any) -> tuple[Any, _Layer] | None:
    """Return a matrix product with its place in the graph, None where it makes no rows of classes."""
    inputs, weight, *rest = args
    if made.grad_fn is None or made.ndim < 2 or weight.ndim != 2 or inputs.shape[:-1] != made.shape[:-1]:
        return None
    weight, kind = weight.T if func is functional.linear else weight, made.device.type
    autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    return made.grad_fn, _Layer(inputs.flatten(0, -2), weight, next(iter(rest), None), autocast, ref(made))


def _arguments_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    bound = _SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


def _why_not(given: dict[str, Any]) -> str | None:
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


def _in_chunks(given: dict[str, Any], chunks: int, last: tuple[Any, _Layer] | None = None) -> torch.Tensor:
    """Return a loss in chunks, with the layer that made its logits where their graph leads to one."""
    options = given | {"reduction": "none"}
    logits, target, reduction = options.pop("input"), options.pop("target"), given["reduction"]
    found = _replay_of(logits, target, last) if torch.is_grad_enabled() else None
    if found is None:
        losses: torch.Tensor = _OfRows.apply(logits, target, options, chunks)  # type: ignore[no-untyped-call]
    else:
        replay, layer = found
        losses = _OfLayer.apply(logits.detach(), target, options, chunks, replay, *layer[:3])  # type: ignore[no-untyped-call]
    if reduction != "mean":
        return losses if reduction == "none" else losses.sum()
    counted, weight = target != given["ignore_index"], given["weight"]
    mean: torch.Tensor = losses.sum() / (counted.sum() if weight is None else weight[target[counted]].sum())
    return mean


class _OfRows(torch.autograd.Function):
    """The losses of all rows. The gradient of each chunk is written into that of the whole: there is no second one."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, target: torch.Tensor, options: dict[str, Any], chunks: int) -> Any:
        return _losses(ctx, logits, target, options, chunks, logits)

    @staticmethod
    def backward(ctx: Any, of_losses: torch.Tensor) -> Any:
        _check_once()
        target, logits = ctx.saved_tensors
        grad = torch.empty_like(logits)
        parts = _chunks_of(ctx.chunks, logits, target, of_losses)
        into = (there for there, _ in _chunks_of(ctx.chunks, grad, target))
        for (part, labels, of_part), there in zip(parts, into, strict=True):
            with torch.enable_grad():
                part = part.detach().requires_grad_()
                losses = _losses_of(part, labels, ctx.options)
            there.copy_(torch.autograd.grad(losses, part, of_part)[0])
        return grad, None, None, None


def _losses(ctx: Any, logits: Any, target: Any, options: dict[str, Any], chunks: int, *kept: Any) -> torch.Tensor:
    """Return the losses of all rows, and save what their backward pass needs."""
    ctx.save_for_backward(target, *kept)
    ctx.options, ctx.chunks = options, chunks
    each = [_losses_of(part, labels, options) for part, labels in _chunks_of(chunks, logits, target)]
    return torch.cat(each, _longest(target)[0])


def _check_once() -> None:
    """Raise where a gradient of gradients is to be taken, which what is made again in a backward pass does not give."""
    if torch.is_grad_enabled():
        raise StateError("a gradient of gradients is taken, which a loss in chunks does not give")


def _longest(target: torch.Tensor) -> tuple[int, int]:
    """Return the dimension of a target that is cut into chunks, and which one of the logits that is."""
    at = max(range(target.ndim), key=lambda at: target.shape[at])
    return at, at and at + 1


def _chunks_of(chunks: int, of_classes: torch.Tensor, *of_rows: torch.Tensor) -> Iterator[Any]:
    """Yield the chunks of logits, each with those of what has a number for each of their rows."""
    at, within = _longest(of_rows[0])
    yield from zip(of_classes.chunk(chunks, within), *(one.chunk(chunks, at) for one in of_rows), strict=True)


def _losses_of(logits: torch.Tensor, target: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
    """Return the losses of a chunk; of halves in single precision, as autocast, which the backward is not under."""
    return functional.cross_entropy(logits.float() if logits.dtype in _HALVES else logits, target, **given)


class _Replay(NamedTuple):
    """How a chunk of logits is made again. It holds no tensor that the graph has to let go of.

    Attributes:
        rows: which row of the layer's inputs each row of logits is of, in the shape of the logits with a single class.
        watched: the tensors on the way, whose hooks would want gradients that there are not.
    """

    autocast: tuple[bool, torch.dtype]
    rows: torch.Tensor
    watched: tuple[ref[torch.Tensor], ...]

    def __call__(self, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Make the logits of rows of the layer's inputs."""
        with torch.autocast(inputs.device.type, self.autocast[1], enabled=self.autocast[0]):
            return functional.linear(inputs, weight.T, bias).movedim(-1, 1)

    def is_watched(self) -> bool:
        """Tell whether somebody asks for the gradient of logits on the way."""
        tensors = (one() for one in self.watched)
        return any(one is not None and (one._backward_hooks or one.retains_grad) for one in tensors)


def _replay_of(
    logits: torch.Tensor, target: torch.Tensor, last: tuple[Any, _Layer] | None
) -> tuple[_Replay, _Layer] | None:
    """Return how logits are made again, and the linear layer that made them; None where they do not come out so."""
    with suppress(Exception):  # what a graph has saved may be gone, or with somebody who unpacks it
        node, path = logits.grad_fn, list[Any]()
        while (layer := _layer_of(node, logits, last)) is None:
            path.append(node)
            ((node, _),) = node.next_functions  # type: ignore[union-attr]
        classes = layer.weight.shape[1]
        rows = torch.arange(len(layer.inputs), device="cpu").view(*_shape_of(node)[:-1], 1)
        for later in reversed(path):
            rows = _moved(rows, later, classes)
        if rows.shape[1] != 1 or (len(rows), classes, *rows.shape[2:]) != logits.shape:
            return None
        watched = (ref(logits), *([] if logits._base is None else [ref(logits._base)]))
        replay = _Replay(layer.autocast, rows, watched if layer.made is None else (*watched, layer.made))
        if not replay.is_watched() and (_forward.is_dry_run() or _comes_out(logits, target, replay, layer)):
            return replay, layer
    return None


def _layer_of(node: Any, logits: torch.Tensor, last: tuple[Any, _Layer] | None) -> _Layer | None:
    """Return the matrix product that a node of the graph is: the ``last`` one, or by what the node has saved."""
    if last is not None and node is last[0]:
        return last[1]
    weight = getattr(node, "_saved_mat2", None)
    if weight is None:
        return None
    inputs, bias = node._saved_self if hasattr(node, "_saved_self") else node._saved_mat1, None
    if len(node.next_functions) == 3:  # of ``addmm``
        added = node.next_functions[0][0]
        if added is not None and _kind_of(added) in _COPIES:
            ((added, _),) = added.next_functions
        leaf = getattr(added, "variable", None)
        if leaf is None or (node._saved_alpha, node._saved_beta) != (1, 1):
            raise StateError("what is added to the logits was computed")
        bias = leaf.to(inputs.dtype)  # as autocast does
    for tensor, (edge, _) in zip((inputs, weight), node.next_functions[-2:], strict=True):
        # What hooks have unpacked may lie in no graph, or in another one.
        if (
            (edge is not tensor.grad_fn)
            if tensor.grad_fn is not None
            else (getattr(edge, "variable", None) is not tensor)
        ):
            raise StateError("the layer was given something else than it has saved")
    return _Layer(inputs, weight, bias, (False, torch.get_autocast_dtype(logits.device.type)))


def _kind_of(node: Any) -> str:
    name: str = node.name()
    return name.removesuffix("0").removesuffix("1").removesuffix("Backward")


def _shape_of(node: Any) -> torch.Size:
    shape: torch.Size = node._input_metadata[0].shape
    return shape


def _moved(rows: torch.Tensor, node: Any, classes: int) -> torch.Tensor:
    """Return the numbers of rows behind a node; raise ``StateError`` where it may change logits or their gradients."""

    def saved(name: str) -> int:
        value: int = getattr(node, f"_saved_{name}")
        return value - (1 << 64) if value >> 63 else value  # torch gives the negative ones without their sign

    kind, shape = _kind_of(node), _shape_of(node)
    if kind in _COPIES:
        return rows
    if kind in _VIEWS and shape[-1] == classes:
        return rows.reshape(*shape[:-1], 1)
    if kind == "Transpose":
        return rows.transpose(saved("dim0"), saved("dim1"))
    if kind == "Slice":
        every = slice(saved("start"), saved("end"), saved("step"))
        return rows[(slice(None),) * (saved("dim") % rows.ndim) + (every,)]
    if kind == "Index":
        return rows[tuple(slice(None) if one is None else one.cpu() for one in node._saved_indices)]
    raise StateError(f"{kind} may compute in logits")


def _comes_out(logits: torch.Tensor, target: torch.Tensor, replay: _Replay, layer: _Layer) -> bool:
    """Tell whether some logits that are made again are those that there are, to the last digits of their layer."""
    (inputs, weight, bias, *_), rows, device = layer, replay.rows.squeeze(1), logits.device
    at, within = _longest(target)
    with torch.no_grad(), torch.random.fork_rng([]):  # the host's generator alone is drawn from
        few, classes = (torch.randint(size, (_TRIED,), device="cpu") for size in (target.shape[at], weight.shape[1]))
        some = None if bias is None else bias.expand(weight.shape[1])[classes.to(device)]
        of_all_rows = replay(inputs[rows.to(device)], weight[:, classes.to(device)], some)
        of_all_classes = replay(inputs[rows.index_select(at, few).to(device)], weight, bias)
        pairs = (of_all_rows, 1, classes), (of_all_classes, within, few)
        return all(_is_near(again, logits.index_select(dim, chosen.to(device))) for again, dim, chosen in pairs)


def _is_near(again: torch.Tensor, there: torch.Tensor) -> bool:
    largest, eps = there.abs().max(), torch.finfo(again.dtype).eps  # what an infinity has masked is not made again
    return bool(largest.isfinite() and ((again - there).abs() <= max(_LEAST, 4 * eps) * largest).all())


class _OfLayer(torch.autograd.Function):
    """The losses of all rows, whose logits are made again in the backward pass, chunk by chunk."""

    @staticmethod
    def forward(ctx: Any, logits: Any, target: Any, options: Any, chunks: int, replay: Any, *layer: Any) -> Any:
        ctx.replay = replay
        return _losses(ctx, logits, target, options, chunks, *layer)

    @staticmethod
    def backward(ctx: Any, of_losses: torch.Tensor) -> Any:
        _check_once()
        if ctx.replay.is_watched():
            raise StateError("a hook asks for the gradient of logits, which a head in chunks does not have as a whole")
        target, inputs, *others = ctx.saved_tensors
        wanted = [at for at, one in enumerate(ctx.needs_input_grad[-3:]) if one]
        own = [None if one is None else one.detach().requires_grad_(at in wanted) for at, one in enumerate(others, 1)]
        totals: list[Any] = [torch.zeros_like(inputs) if 0 in wanted else None, None, None]
        for rows, labels, of_part in _chunks_of(ctx.chunks, ctx.replay.rows, target, of_losses):
            if _forward.is_dry_run():
                places = torch.zeros(rows.squeeze(1).shape, dtype=torch.int64, device=inputs.device)
            else:
                places = rows.squeeze(1).to(inputs.device)
            with torch.enable_grad():
                given = [inputs.detach()[places].requires_grad_(0 in wanted), *own]
                losses = _losses_of(ctx.replay(*given), labels, ctx.options)
            grads = torch.autograd.grad(losses, [given[at] for at in wanted], of_part)
            for at, grad in zip(wanted, grads, strict=True):
                if at == 0:
                    totals[0].index_add_(0, places.flatten(), grad.flatten(0, -2))
                else:
                    totals[at] = grad if totals[at] is None else totals[at].add_(grad)
        return None, None, None, None, None, *totals

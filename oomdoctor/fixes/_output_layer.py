"""A cross-entropy in chunks of rows, and the gradient of the layer that made its logits chunk by chunk.

``chunked_loss(F.cross_entropy, 8)`` has the log-probabilities of one chunk of rows at a time. Where a linear layer made
the logits, as their graph tells, there is no gradient of all logits either: in the backward pass a chunk's logits are
made again from what the layer was given. That they come out as they were is seen in the forward, of all rows in a few
classes, and of a few rows in all classes; where they do not, the loss alone is taken in chunks.

Limit: torch does not tell of hooks that are kept in the graph. One on logits that are cast before the loss, or that are
gone when it is registered, is not called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple
from weakref import ref

import torch
from torch.nn import CrossEntropyLoss, functional
from torch.utils import _pytree as pytree

from oomdoctor.errors import StateError
from oomdoctor.fixes import _forward
from oomdoctor.fixes._chunked_loss import (
    OPTIONS,
    arguments_of,
    check_once,
    chunks_of,
    in_rows,
    longest,
    losses_of,
    reduced,
    why_not,
)

TRIED: Final = 4
"""Rows and classes that are made again in the forward to see whether they come out as they were."""
_LEAST: Final = 1e-3
"""How far logits that are made again may lie apart, of the largest, where their type has more digits than that."""
_NODES: Final = 4
"""So many nodes of a graph lie at most between logits and the layer that made them."""
_MOVING: Final = frozenset(
    f"{name}Backward0"
    for name in ("View", "UnsafeView", "ReshapeAlias", "Alias", "Clone", "ToCopy", "Unsqueeze", "Squeeze")
)
"""Those that leave each number as it is, and its gradient: views, copies and casts. Another may hide or turn one."""


def chunked_loss(loss: Callable[..., Any], chunks: int) -> Callable[..., Any]:
    """Return a cross-entropy that has the log-probabilities of one chunk of rows at a time.

    The mean is over all rows that count, weighted by their classes, not the mean of means of chunks.

    Args:
        loss: ``torch.nn.functional.cross_entropy``, or a ``torch.nn.CrossEntropyLoss``.
        chunks: how many; called with tensors of which there is no chunk, it is the loss itself.
    """

    def taken(*args: Any, **kwargs: Any) -> Any:
        if type(loss) is CrossEntropyLoss:
            kwargs |= {name: getattr(loss, name) for name in OPTIONS}
        elif loss is not functional.cross_entropy:
            raise StateError("the loss is not torch's cross_entropy: it is not taken in chunks")
        given = arguments_of(args, kwargs)
        if why := why_not(given):
            raise StateError(f"a cross-entropy {why}")
        return in_chunks(given, chunks)

    return taken


def in_chunks(given: dict[str, Any], chunks: int) -> torch.Tensor:
    """Return a loss in chunks, with the layer that made its logits where their graph leads to one."""
    found = _in_graph(given["input"]) if torch.is_grad_enabled() else None
    return in_rows(given, chunks) if found is None else with_layer(given, chunks, *found)


def with_layer(
    given: dict[str, Any], chunks: int, replay: Replay, layer: Sequence[torch.Tensor | None]
) -> torch.Tensor:
    """Return a loss in chunks whose logits are made again, from the inputs and other tensors of their layer."""
    return reduced(
        given,
        lambda logits, *of: _OfLayer.apply(  # type: ignore[no-untyped-call]
            logits.detach(), *of, chunks, replay, *layer
        ),
    )


def comes_out(again: torch.Tensor, there: torch.Tensor, eps: float) -> bool:
    """Tell whether logits that were made again are those that there are, to the last digits of their layer."""
    largest = there.abs().max()  # what was masked by an infinity is not made again
    return bool(largest.isfinite() and ((again - there).abs() <= max(_LEAST, 4 * eps) * largest).all())


class Replay(NamedTuple):
    """How a chunk of logits is made again. It holds no tensor that the graph has to let go of.

    Attributes:
        leaves: the arguments of the layer beside its inputs, None for each tensor; ``form``: how they were nested.
        rows: which row of the inputs each row of logits is of, in the shape of the logits with a single class.
        computed: what was computed of the logits on the way.
    """

    function: Callable[..., Any]
    leaves: list[Any]
    form: Any
    autocast: tuple[bool, torch.dtype]
    rows: torch.Tensor
    computed: tuple[Callable[[torch.Tensor], torch.Tensor], ...]
    passed: tuple[ref[torch.Tensor], ...]

    def __call__(self, inputs: torch.Tensor, tensors: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """Make the logits of rows of ``inputs``, with the tensors of the layer."""
        filled = [leaf if one is None else one for leaf, one in zip(self.leaves, tensors, strict=True)]
        rest, options = pytree.tree_unflatten(filled, self.form)
        with torch.autocast(inputs.device.type, self.autocast[1], enabled=self.autocast[0]):
            logits: torch.Tensor = self.function(inputs, *rest, **options)
            for compute in self.computed:
                logits = compute(logits)
        return logits.movedim(-1, 1) if logits.ndim > 2 else logits

    def is_watched(self) -> bool:
        """Tell whether somebody asks for the gradient of logits on the way."""
        tensors = (one() for one in self.passed)
        return any(one is not None and (one._backward_hooks or one.retains_grad) for one in tensors)


def _in_graph(logits: torch.Tensor) -> tuple[Replay, list[torch.Tensor | None]] | None:
    """Return how logits are made again, with the inputs and other tensors of the linear layer that made them.

    None where no layer did, some rows or classes do not come out as they were, or a hook wants their gradient.
    """
    with suppress(Exception):  # what a graph has saved may be gone, or with somebody who unpacks it
        layer = _layer_of(logits)
        if layer is None:
            return None
        leaves, form = pytree.tree_flatten(((None, None), {}))
        rows = torch.arange(len(logits), device="cpu").unsqueeze(1)
        plain = False, torch.get_autocast_dtype(logits.device.type)
        watched = tuple(ref(one) for one in (logits, logits._base) if one is not None)
        found = Replay(_linear, leaves, form, plain, rows, (), watched)
        if not found.is_watched() and (_forward.is_shadow_run() or _is_made_by(logits, *layer)):
            return found, [*layer]
    return None


def _layer_of(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | None:
    """Return what the matrix product was given that logits come from: rows, a weight, and a bias."""
    node: Any = logits.grad_fn
    for _ in range(_NODES):
        if node is None or logits.ndim != 2:
            return None
        weight = getattr(node, "_saved_mat2", None)
        if weight is not None:
            inputs = getattr(node, "_saved_mat1", None)  # of ``addmm``; ``mm`` calls it by another name
            leaf = None if inputs is None else _leaf_of(node.next_functions[0][0])
            if inputs is not None and leaf is None:
                return None
            bias = None if inputs is None or leaf is None else leaf.to(inputs.dtype)  # as autocast does
            inputs = node._saved_self if inputs is None else inputs
            is_scaled = {getattr(node, f"_saved_{name}", 1) for name in ("alpha", "beta")} != {1}
            is_of_rows = inputs.ndim == weight.ndim == 2 and logits.shape == (len(inputs), weight.shape[1])
            # What hooks have unpacked may lie in no graph, or in another one.
            is_linked = all(map(_leads_to, (inputs, weight), node.next_functions[-2:]))
            return (inputs, weight, bias) if is_of_rows and is_linked and not is_scaled else None
        if node.name() not in _MOVING:
            return None
        ((node, _),) = node.next_functions
    return None


def _leaf_of(node: Any) -> torch.Tensor | None:
    """Return the leaf that a layer was given for its bias, which autocast may have cast; None where it was computed."""
    if node is not None and node.name() in _MOVING:
        ((node, _),) = node.next_functions
    return getattr(node, "variable", None)


def _leads_to(tensor: torch.Tensor, edge: tuple[Any, int]) -> bool:
    """Tell whether an edge of a graph is that of a tensor."""
    return edge[0] is tensor.grad_fn if tensor.grad_fn is not None else getattr(edge[0], "variable", None) is tensor


def _linear(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return inputs @ weight if bias is None else torch.addmm(bias, inputs, weight)


def _is_made_by(logits: torch.Tensor, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    eps = torch.finfo(inputs.dtype).eps
    with torch.no_grad(), torch.random.fork_rng([]):  # the host's generator alone is drawn from
        rows, classes = (torch.randint(size, (TRIED,), device="cpu").to(logits.device) for size in logits.shape)
        some = None if bias is None else bias.expand(weight.shape[1])[classes]
        of_all_rows = _linear(inputs, weight[:, classes], some)
        of_all_classes = _linear(inputs[rows], weight, bias)
        return comes_out(of_all_rows, logits[:, classes], eps) and comes_out(of_all_classes, logits[rows], eps)


class _OfLayer(torch.autograd.Function):
    """The losses of all rows, whose logits are made again in the backward pass, chunk by chunk."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Any:
        logits, target, options, chunks, replay, *layer = given
        each = [losses_of(part, labels, options) for part, labels in chunks_of(chunks, logits, target)]
        ctx.save_for_backward(target, *layer)
        ctx.options, ctx.chunks, ctx.replay = options, chunks, replay
        return torch.cat(each, longest(target)[0])

    @staticmethod
    def backward(ctx: Any, of_losses: torch.Tensor) -> Any:
        check_once()
        if ctx.replay.is_watched():
            raise StateError("a hook asks for the gradient of logits, which a head in chunks does not have as a whole")
        target, *layer = ctx.saved_tensors
        wanted = [at for at, one in enumerate(ctx.needs_input_grad[-len(layer) :]) if one]
        own: list[Any] = [
            one if one is None else one.detach().requires_grad_(at in wanted) for at, one in enumerate(layer)
        ]
        inputs = layer[0].detach().flatten(0, -2)
        totals: list[Any] = [torch.zeros_like(inputs) if 0 in wanted else None, *(None for _ in layer[1:])]
        for rows, labels, of_part in chunks_of(ctx.chunks, ctx.replay.rows, target, of_losses):
            places = _places(rows, inputs.device)
            with torch.enable_grad():
                own[0] = inputs[places].requires_grad_(0 in wanted)
                losses = losses_of(ctx.replay(own[0], own[1:]), labels, ctx.options)
            for at, grad in zip(wanted, torch.autograd.grad(losses, [own[at] for at in wanted], of_part), strict=True):
                if at == 0:
                    totals[0].index_add_(0, places.flatten(), grad.flatten(0, -2))
                else:
                    totals[at] = grad if totals[at] is None else totals[at].add_(grad)
        if totals[0] is not None:
            totals[0] = totals[0].view_as(layer[0])
        return None, None, None, None, None, *totals


def _places(rows: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return of which rows of its inputs a layer made the logits of a chunk."""
    if _forward.is_shadow_run():
        return torch.zeros(rows.squeeze(1).shape, dtype=torch.int64, device=device)
    return rows.squeeze(1).to(device)

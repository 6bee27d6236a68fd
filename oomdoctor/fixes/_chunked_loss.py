"""A cross-entropy over chunks of rows: one chunk at a time has log-probabilities, in the backward pass too."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any, Final

import torch
from torch.autograd.function import once_differentiable
from torch.nn import CrossEntropyLoss, functional

from oomdoctor.errors import StateError

_HALVES: Final = (torch.float16, torch.bfloat16)
_SIGNATURE: Final = signature(functional.cross_entropy)
_OPTIONS: Final = ("weight", "ignore_index", "reduction", "label_smoothing")


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
        bound = _SIGNATURE.bind(*args, **kwargs)
        bound.apply_defaults()
        given: dict[str, Any] = bound.arguments
        if why := _why_not(given):
            raise StateError(f"a cross-entropy {why}")
        logits, target, reduction = given.pop("input"), given.pop("target"), given["reduction"]
        given["reduction"] = "none"
        each: torch.Tensor = _OfRows.apply(logits, target, chunks, given)  # type: ignore[no-untyped-call]
        if reduction != "mean":
            return each if reduction == "none" else each.sum()
        counted, weight = target != given["ignore_index"], given["weight"]
        return each.sum() / (counted.sum() if weight is None else weight[target[counted]].sum())

    return taken


class _OfRows(torch.autograd.Function):
    """The losses of all rows. The gradient of each chunk is written into that of the whole: there is no second one."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, target: torch.Tensor, chunks: int, given: dict[str, Any]) -> Any:
        ctx.save_for_backward(logits, target)
        ctx.chunks, ctx.given = chunks, given
        rows = zip(logits.chunk(chunks), target.chunk(chunks), strict=True)
        return torch.cat([_losses(*one, given) for one in rows])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_losses: torch.Tensor) -> Any:
        logits, target = ctx.saved_tensors
        grad = torch.empty_like(logits)
        parts = (one.chunk(ctx.chunks) for one in (logits, target, of_losses, grad))
        for part, labels, of_part, into in zip(*parts, strict=True):
            with torch.enable_grad():
                part = part.detach().requires_grad_()
                losses = _losses(part, labels, ctx.given)
            into.copy_(torch.autograd.grad(losses, part, of_part)[0])
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

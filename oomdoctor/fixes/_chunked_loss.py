"""A cross-entropy over chunks of rows: the log-probabilities of one chunk at a time, in the backward pass too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from inspect import signature
from typing import Any, Final

import torch
from torch.nn import functional

from oomdoctor.errors import StateError

_HALVES: Final = (torch.float16, torch.bfloat16)
_SIGNATURE: Final = signature(functional.cross_entropy)
OPTIONS: Final = ("weight", "ignore_index", "reduction", "label_smoothing")


def in_rows(given: dict[str, Any], chunks: int) -> torch.Tensor:
    """Return a loss in chunks of rows of the logits that there are."""
    return reduced(given, lambda *of: _OfRows.apply(*of, chunks))  # type: ignore[no-untyped-call]


def arguments_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return all arguments of a cross-entropy by name."""
    bound = _SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


def reduced(given: dict[str, Any], each: Callable[..., torch.Tensor]) -> torch.Tensor:
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
        losses = [losses_of(part, labels, given) for part, labels in chunks_of(chunks, logits, target)]
        return torch.cat(losses, longest(target)[0])

    @staticmethod
    def backward(ctx: Any, of_losses: torch.Tensor) -> Any:
        check_once()
        logits, target = ctx.saved_tensors
        grad = torch.empty_like(logits)
        parts = chunks_of(ctx.chunks, logits, target, of_losses)
        into = (there for there, _ in chunks_of(ctx.chunks, grad, target))
        for (part, labels, of_part), there in zip(parts, into, strict=True):
            with torch.enable_grad():
                part = part.detach().requires_grad_()
                losses = losses_of(part, labels, ctx.given)
            there.copy_(torch.autograd.grad(losses, part, of_part)[0])
        return grad, None, None, None


def check_once() -> None:
    """Raise where a gradient of gradients is to be taken, which what is made again in a backward pass does not give."""
    if torch.is_grad_enabled():
        raise StateError("a gradient of gradients is taken, which a loss in chunks does not give")


def longest(target: torch.Tensor) -> tuple[int, int]:
    """Return the dimension of a target that is cut into chunks, and which one of the logits that is."""
    at = max(range(target.ndim), key=lambda at: target.shape[at])
    return at, at and at + 1


def chunks_of(chunks: int, of_classes: torch.Tensor, *of_rows: torch.Tensor) -> Iterator[Any]:
    """Yield the chunks of logits, each with those of what has a number for each of their rows."""
    at, within = longest(of_rows[0])
    yield from zip(of_classes.chunk(chunks, within), *(one.chunk(chunks, at) for one in of_rows), strict=True)


def losses_of(logits: torch.Tensor, target: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
    """Return the losses of a chunk; of halves in single precision, as autocast, which the backward is not under."""
    return functional.cross_entropy(logits.float() if logits.dtype in _HALVES else logits, target, **given)


def why_not(given: dict[str, Any]) -> str | None:
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

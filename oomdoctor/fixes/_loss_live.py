"""``cross_entropy`` taken over chunks of rows wherever a program calls it, by name or through ``nn.CrossEntropyLoss``.

The loss of each row is computed as ever, so that label smoothing, class weights and ignored targets are torch's own.
Of each chunk nothing is kept but what the caller holds already: the backward pass computes its log-probabilities anew,
and writes its gradient into the one tensor that it returns. Calls that this does not suit run as they are: targets
that are probabilities, single rows, class weights that are learned, transforms of ``torch.func``, subclasses.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from oomdoctor.errors import OomDoctorError
from oomdoctor.fixes import _forward

__all__ = ["CheckedLoss", "ChunkedLoss"]

_HALVES: Final = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """The arguments of a ``cross_entropy``."""

    input: Any
    target: Any
    weight: Any = None
    size_average: bool | None = None
    ignore_index: int = -100
    reduce: bool | None = None
    reduction: str = "mean"
    label_smoothing: float = 0.0

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
        """Return the arguments by their names."""
        return cls(**dict(zip(cls.__slots__, args, strict=False)), **kwargs)

    def why_not(self) -> str | None:
        """Return why the rows cannot be taken apart, None if they can."""
        if not isinstance(self.target, torch.Tensor) or not isinstance(self.input, torch.Tensor):
            return "is called with something else than tensors"
        if self.target.is_floating_point():
            return "takes probabilities for targets"
        if self.input.ndim < 2 or self.target.shape != self.input.shape[:1] + self.input.shape[2:]:
            return "takes no rows of classes"
        if self.weight is not None and self.weight.requires_grad:
            return "learns its class weights"
        if self.size_average is not None or self.reduce is not None or self.reduction not in ("mean", "sum", "none"):
            return "reduces in a way of old"
        return None


class ChunkedLoss(TorchFunctionMode):
    """Takes every ``cross_entropy`` that is called while it is on over so many chunks."""

    def __init__(self, chunks: int) -> None:
        super().__init__()
        self._chunks = chunks

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one function of torch."""
        kwargs = kwargs or {}
        if func is functional.cross_entropy:
            call = _Call.of(args, kwargs)
            if call.why_not() is None and max(call.target.shape) > 1 and _is_plain(call):
                return _chunked(call, self._chunks)
        return func(*args, **kwargs)


class CheckedLoss(TorchFunctionMode):
    """Refuses a ``cross_entropy`` that a change of the source would take wrongly in chunks."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one function of torch.

        Raises:
            OomDoctorError: it is such a call.
        """
        kwargs = kwargs or {}
        if func is functional.cross_entropy:
            call = _Call.of(args, kwargs)
            if (why := call.why_not()) is not None:
                raise OomDoctorError(f"a cross-entropy {why}: it is not taken in chunks")
            if call.input.dtype in _HALVES and not torch.is_autocast_enabled(call.input.device.type):
                raise OomDoctorError("a cross-entropy is taken in half precision: sums of chunks would round otherwise")
        return func(*args, **kwargs)


def _is_plain(call: _Call) -> bool:
    """Tell whether the tensors are torch's own, and no transform of ``torch.func`` looks at them."""
    if torch._C._are_functorch_transforms_active():
        return False
    tensors = [call.input, call.target] + ([] if call.weight is None else [call.weight])
    return _forward.is_shadow_run() or all(type(one) in (torch.Tensor, torch.nn.Parameter) for one in tensors)


def _chunked(call: _Call, chunks: int) -> Any:
    rows = _Rows.apply(call.input, call.target, call.weight, _Way.of(call, chunks))  # type: ignore[no-untyped-call]
    if call.reduction == "none":
        return rows
    # In half precision, a sum over many rows would lose digits or overflow before it is divided.
    total = rows.sum(dtype=torch.float32 if rows.dtype in _HALVES else None)
    if call.reduction == "mean":
        counts = call.target != call.ignore_index
        weights = counts if call.weight is None else call.weight[call.target.where(counts, 0)].where(counts, 0)
        total = total / weights.sum(dtype=None if call.weight is None else total.dtype)
    return total.to(rows.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """How a loss is taken: its options, the dimension that is cut, and the autocast that it stood under."""

    ignore_index: int
    label_smoothing: float
    dim: int
    size: int
    autocast: tuple[str, torch.dtype, bool, bool]

    @classmethod
    def of(cls, call: _Call, chunks: int) -> _Way:
        longest = max(range(call.target.ndim), key=lambda dim: call.target.shape[dim])
        kind = call.input.device.type
        on = torch.is_autocast_enabled(kind)
        return cls(
            ignore_index=call.ignore_index,
            label_smoothing=call.label_smoothing,
            dim=longest,
            size=-(-call.target.shape[longest] // chunks),
            autocast=(kind, torch.get_autocast_dtype(kind), on, torch.is_autocast_cache_enabled()),
        )

    def cast(self) -> AbstractContextManager[None]:
        kind, dtype, on, cached = self.autocast
        return torch.autocast(kind, dtype=dtype, enabled=on, cache_enabled=cached)

    def parts(self, target: Any, *inputs: Any) -> Iterator[tuple[Any, ...]]:
        """Yield views of the same rows of a target, or of what has its shape, and of inputs."""
        for start in range(0, target.shape[self.dim], self.size):
            count = min(self.size, target.shape[self.dim] - start)
            # The classes stand in dimension 1 of an input.
            dim = self.dim + (self.dim > 0)
            yield target.narrow(self.dim, start, count), *(one.narrow(dim, start, count) for one in inputs)

    def loss(self, rows: Any, target: Any, weight: Any) -> Any:
        return functional.cross_entropy(
            rows,
            target,
            weight,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            reduction="none",
        )


class _Rows(torch.autograd.Function):
    """The loss of each row."""

    @staticmethod
    def forward(ctx: Any, logits: Any, target: Any, weight: Any, way: _Way) -> Any:
        """Compute the losses chunk by chunk."""
        ctx.save_for_backward(logits, target, weight)
        ctx.way = way
        return torch.cat([way.loss(rows, part, weight) for part, rows in way.parts(target, logits)], dim=way.dim)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        """Compute each chunk's log-probabilities anew for its part of the gradient.

        Raises:
            OomDoctorError: the gradient is to be differentiated itself.
        """
        # ``once_differentiable`` would tell only where the gradient that comes in requires one.
        if torch.is_grad_enabled():
            raise OomDoctorError("a gradient is taken of gradients, which a loss taken in chunks does not give")
        logits, target, weight = ctx.saved_tensors
        way: _Way = ctx.way
        whole = torch.empty_like(logits)
        places = zip(way.parts(target, logits, whole), way.parts(gradient), strict=True)
        for (part, rows, out), (given,) in places:
            # Where the backward pass runs in the scope of the mode, the chunks are not cut again.
            with torch.enable_grad(), way.cast(), torch._C.DisableTorchFunction():
                alone = rows.detach().requires_grad_()
                loss = way.loss(alone, part, weight)
            out.copy_(torch.autograd.grad(loss, alone, given)[0])
        return whole, None, None, None

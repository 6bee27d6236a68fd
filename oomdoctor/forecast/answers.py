"""What a fake tensor says when the program asks for a value that only a real one has.

Where the values are known (literals, small draws, integers and masks that were there before the cell), so is what
depends on them. For the rest the policy aims at the upper bound of memory and at the way through the cell that trains:
masks select everything, ``nonzero`` finds all, losses are finite, a number is 1. Where a bool may be either, the
likelier is answered, and the forecast says so. One that is asked for again and again at one place stands in a loop
that waits for it (rejection sampling, convergence), so every 32nd answer there is the other one; but not where memory
rises meanwhile: a generation piles up tokens, and has an end of its own.
"""

from __future__ import annotations

import math
import operator
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_iter, tree_map_only

from oomdoctor.forecast.bounds import bounded

_aten = torch.ops.aten
_FLIP_EVERY: Final = 32
_MOST_ASKED: Final = 1024
_INNER_MODULES: Final = ("torch._", "torch.utils._", "torch.overrides", "oomdoctor.forecast")

_HINT: Final = "_oomdoctor_hint"
"""Attribute of a fake bool tensor whose answer is known: ``isnan`` is False, ``isfinite`` is True."""
_LIKELY: Final = "_oomdoctor_likely"
"""Attribute of one that is the comparison of one element with a number: what 1 would be, which ``item()`` answers."""


class Scalars:
    """Answers for ``item()``, ``float()``, ``int()`` and ``bool()`` of tensors.

    Attributes:
        has_guessed: whether a bool was asked for that may be either.
        until: when loops that pile something up are made to end, by ``time.monotonic``; ``missed``: whether one was.
    """

    def __init__(self, live: Callable[[], int]) -> None:
        """Begin with nothing asked; ``live`` tells how many bytes are alive."""
        self.has_guessed = False
        self.until, self.missed = math.inf, False
        self._live = live
        self._asked: Counter[object] = Counter()
        self._levels: dict[object, int] = {}

    def answer(self, tensor: torch.Tensor) -> Any:
        """Return the value of a scalar that nobody knows."""
        if tensor.dtype is torch.bool:
            hint = getattr(tensor, _HINT, None)
            return self._bool(getattr(tensor, _LIKELY, True)) if hint is None else hint
        if tensor.dtype.is_complex:
            return complex(1.0)
        return 1.0 if tensor.dtype.is_floating_point else 1

    def compare(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Return whether two tensors are equal, or close."""
        values = [leaf.constant if isinstance(leaf, FakeTensor) else leaf for leaf in args[:2]]
        if any(value is None for value in values):
            return self._bool(False)
        with _disable_current_modes():
            return bool(func(*values, *args[2:], **kwargs))

    def _bool(self, answer: bool) -> bool:
        self.has_guessed = True
        place = _place()
        before = self._levels.setdefault(place, self._live())
        self._asked[place] += 1
        if self._asked[place] % _FLIP_EVERY:
            return answer
        self._levels[place] = self._live()
        if self._levels[place] <= before:
            return not answer
        is_over = self._asked[place] >= _MOST_ASKED or time.monotonic() > self.until
        self.missed = self.missed or is_over
        return answer is not is_over


def _place() -> object:
    """Return the place in the user's or a library's code that asks."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_INNER_MODULES):
        frame = frame.f_back
    return (frame.f_code, frame.f_lineno) if frame is not None else None


def _new(shape: list[int], like: torch.Tensor, dtype: torch.dtype, *, size: int | None = None) -> torch.Tensor:
    """Return a result; ``size`` is that of its dimensions which nobody knows, None where all are known."""
    found = torch.empty(shape, dtype=dtype, device=like.device)
    return found if size is None else bounded(found, size)


def _is_known(tensor: torch.Tensor) -> bool:
    return getattr(tensor, "constant", None) is not None


def _known(bound: Callable[[Any, Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
    """Return a handler that computes for real where all values are known, and else answers the upper bound."""

    def handler(func: Any, args: Any, kwargs: Any) -> Any:
        tensors = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if any(getattr(tensor, "constant", None) is None for tensor in tensors):
            return bound(func, args, kwargs)
        with _disable_current_modes():
            constants = tree_map_only(FakeTensor, lambda tensor: tensor.constant, (args, kwargs))
            found = func(*constants[0], **constants[1])
        return tree_map_only(torch.Tensor, _aten.lift_fresh.default, found)

    return handler


def _found(mask: torch.Tensor) -> int:
    """Return how many elements of a mask are true, all of them where that is not known."""
    constant = getattr(mask, "constant", None)
    if constant is None:
        return mask.numel()
    with _disable_current_modes():
        return int(constant.count_nonzero())


def _nonzero(_func: Any, args: Any, _kwargs: Any) -> Any:
    most = args[0].numel()
    return _new([most, args[0].dim()], args[0], torch.int64, size=most)


def _masked_select(_func: Any, args: Any, _kwargs: Any) -> Any:
    shape: Any = torch.broadcast_shapes(args[0].shape, args[1].shape)  # type: ignore[no-untyped-call]
    times = shape.numel() // max(args[1].numel(), 1)
    most = _found(args[1]) * times
    return _new([most], args[0], args[0].dtype, size=None if _is_known(args[1]) else most)


def _unique(_func: Any, args: Any, kwargs: Any) -> Any:
    tensor = args[0]
    along = kwargs.get("dim", args[1] if len(args) > 1 and type(args[1]) is int else None)
    count = tensor.numel() if along is None else tensor.shape[along]
    shape = [tensor.numel()] if along is None else list(tensor.shape)
    return (
        _new(shape, tensor, tensor.dtype, size=count),
        _new(list(tensor.shape) if along is None else [count], tensor, torch.int64),
        _new([count], tensor, torch.int64, size=count),
    )


def _index(func: Any, args: Any, kwargs: Any) -> Any:
    tensor, indices, *rest = args
    chosen: list[Any] = []
    most: int | None = None
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            most = most if _is_known(index) else index.numel()
            chosen += [_new([_found(index)], index, torch.int64) for _ in range(index.dim())]
        else:
            chosen.append(index)
    out = func(tensor, chosen, *rest, **kwargs)
    return out if most is None else bounded(out, most)


def _repeat_interleave(_func: Any, args: Any, kwargs: Any) -> Any:
    known = kwargs.get("output_size")
    most = args[0].numel() if known is None else known
    return _new([most], args[0], torch.int64, size=most if known is None else None)


def _bincount(_func: Any, args: Any, kwargs: Any) -> Any:
    least = kwargs.get("minlength", args[2] if len(args) > 2 else 0)
    weights = kwargs.get("weights", args[1] if len(args) > 1 else None)
    return _new([max(least, 1)], args[0], torch.int64 if weights is None else torch.float64)


def _ctc_loss(_func: Any, args: Any, _kwargs: Any) -> Any:
    """Return the losses and the table of the forward sums, which is as wide as the longest target needs.

    Source: ``ctc_loss_allocate_outputs`` in ``aten/src/ATen/native/LossCTC.cpp``.
    """
    log_probs, targets, _, lengths, *_ = args
    values = lengths.constant if isinstance(lengths, FakeTensor) else lengths
    with _disable_current_modes():
        longest = targets.shape[-1] if values is None else max(int(length) for length in values)
    times, batch = log_probs.shape[:2]
    width = 2 * longest + 1
    sums = _new([batch, times, width], log_probs, log_probs.dtype, size=width if values is None else None)
    return log_probs.new_empty([batch]), sums


def _ctc_loss_backward(_func: Any, args: Any, _kwargs: Any) -> Any:
    return torch.empty_like(args[1], memory_format=torch.contiguous_format)


def _hinted(value: bool) -> Callable[[Any, Any, Any], Any]:
    def handler(func: Any, args: Any, kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        setattr(out, _HINT, value)
        return out

    return handler


def _compared(compare: Callable[[Any, Any], bool]) -> Callable[[Any, Any, Any], Any]:
    def handler(func: Any, args: Any, kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        if args[0].dim() == 0 and isinstance(args[1], (int, float)):
            setattr(out, _LIKELY, compare(1, args[1]))
        return out

    return handler


def _keeps_hint(func: Any, args: Any, kwargs: Any) -> Any:
    out = func(*args, **kwargs)
    hint = getattr(args[0], _HINT, None)
    if hint is not None and isinstance(out, FakeTensor):
        setattr(out, _HINT, hint)
    return out


def _decided_by(value: bool) -> Callable[[Any, Any, Any], Any]:
    """Return a handler for an operation that gives ``value`` wherever one side has it, whatever the other one is."""

    def handler(func: Any, args: Any, kwargs: Any) -> Any:
        out = _keeps_hint(func, args, kwargs)
        sides = (getattr(side, "constant", None) for side in args[:2])
        # Of integers, none has a bit where the other one has none; all of them are more than True.
        if (out.dtype is torch.bool or not value) and out.numel() and not _is_known(out):
            with _disable_current_modes():
                if any(side is not None and bool((side == value).all()) for side in sides):
                    out.constant = torch.full(out.shape, value, dtype=out.dtype)
                    # By this it is forgotten once something is written to it.
                    out.fake_mode.fake_tensor_converter.add_constant_storage_mapping(out)
        return out

    return handler


ANSWERS: Final[dict[Any, Callable[[Any, Any, Any], Any]]] = {
    _aten.nonzero.default: _known(_nonzero),
    _aten.masked_select.default: _masked_select,
    _aten._unique2.default: _known(_unique),
    _aten.unique_dim.default: _known(_unique),
    _aten.unique_consecutive.default: _known(_unique),
    _aten.index.Tensor: _index,
    _aten.repeat_interleave.Tensor: _known(_repeat_interleave),
    _aten.bincount.default: _known(_bincount),
    _aten._ctc_loss.default: _ctc_loss,
    _aten._ctc_loss.Tensor: _ctc_loss,
    _aten._ctc_loss_backward.default: _ctc_loss_backward,
    _aten._ctc_loss_backward.Tensor: _ctc_loss_backward,
    _aten._is_all_true.default: _hinted(True),
    _aten.isnan.default: _hinted(False),
    _aten.isinf.default: _hinted(False),
    _aten.isfinite.default: _hinted(True),
    **{
        getattr(_aten, compare.__name__).Scalar: _compared(compare)
        for compare in (operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne)
    },
    _aten.any.default: _keeps_hint,
    _aten.all.default: _keeps_hint,
    _aten.logical_or.default: _decided_by(True),
    _aten.bitwise_or.Tensor: _decided_by(True),
    _aten.logical_and.default: _decided_by(False),
    _aten.bitwise_and.Tensor: _decided_by(False),
}
"""Operations whose output depends on values, and the upper bound that is answered: ``(func, args, kwargs)``."""

COMPARISONS: Final = (_aten.equal.default, _aten.allclose.default)
"""Operations that answer with a bool, see ``Scalars.compare``."""

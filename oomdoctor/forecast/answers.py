"""What a fake tensor says when the program asks for a value that only a real one has.

Where the values are known (literals, small draws, integers and masks that were there before the cell), so is what
depends on them. For the rest the policy aims at the upper bound of memory and at the way through the cell that trains:
masks select everything, ``nonzero`` finds all, losses are finite, a number is 1. Where a bool may be either, both
ways are gone (see ``ways``), the likelier first. One that is asked for again and again at one place stands in a loop
that waits for it (rejection sampling, convergence), so every 32nd answer there is the other one.
"""

from __future__ import annotations

import operator
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_iter, tree_map_only

__all__ = ["ANSWERS", "Scalars", "bound_bytes"]

_aten = torch.ops.aten
_FLIP_EVERY: Final = 32
_INNER_MODULES: Final = ("torch._", "torch.utils._", "torch.overrides", "oomdoctor.forecast")

_HINT: Final = "_oomdoctor_hint"
"""Attribute of a fake bool tensor whose answer is known: ``isnan`` is False, ``isfinite`` is True."""
_LIKELY: Final = "_oomdoctor_likely"
"""Attribute of one that is the comparison of one element with a number: what 1 would be, which ``item()`` answers."""


class Scalars:
    """Answers for ``item()``, ``float()``, ``int()`` and ``bool()`` of tensors.

    Attributes:
        choose: tells whether to answer what is likely, where a bool may be either.
    """

    def __init__(self) -> None:
        self.choose: Callable[[], bool] = lambda: True
        self._asked: Counter[object] = Counter()

    def answer(self, tensor: torch.Tensor) -> Any:
        """Return the value of a scalar that nobody knows."""
        if tensor.dtype is torch.bool:
            hint = getattr(tensor, _HINT, None)
            return self._bool(self.choose() is getattr(tensor, _LIKELY, True)) if hint is None else hint
        if tensor.dtype.is_complex:
            return complex(1.0)
        return 1.0 if tensor.dtype.is_floating_point else 1

    def _bool(self, answer: bool) -> bool:
        place = _place()
        self._asked[place] += 1
        return answer if self._asked[place] % _FLIP_EVERY else not answer


def _place() -> object:
    """Return the place in the user's or a library's code that asks."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_INNER_MODULES):
        frame = frame.f_back
    return (frame.f_code, frame.f_lineno) if frame is not None else None


def bound_bytes() -> int:
    """Return the size of the largest result so far that nobody knows the size of, and that was taken for the most."""
    return max(_taken, default=0)


_taken: set[int] = set()


def _new(shape: list[int], like: torch.Tensor, dtype: torch.dtype, *, known: bool = False) -> torch.Tensor:
    found = torch.empty(shape, dtype=dtype, device=like.device)
    if not known:
        _taken.add(found.nbytes)
    return found


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
    return _new([args[0].numel(), args[0].dim()], args[0], torch.int64)


def _masked_select(_func: Any, args: Any, _kwargs: Any) -> Any:
    shape: Any = torch.broadcast_shapes(args[0].shape, args[1].shape)  # type: ignore[no-untyped-call]
    times = shape.numel() // max(args[1].numel(), 1)
    return _new([_found(args[1]) * times], args[0], args[0].dtype, known=_is_known(args[1]))


def _unique(_func: Any, args: Any, kwargs: Any) -> Any:
    tensor = args[0]
    along = kwargs.get("dim", args[1] if len(args) > 1 and type(args[1]) is int else None)
    count = tensor.numel() if along is None else tensor.shape[along]
    shape = [tensor.numel()] if along is None else list(tensor.shape)
    return (
        _new(shape, tensor, tensor.dtype),
        _new(list(tensor.shape) if along is None else [count], tensor, torch.int64),
        _new([count], tensor, torch.int64),
    )


def _index(func: Any, args: Any, kwargs: Any) -> Any:
    tensor, indices, *rest = args
    chosen: list[Any] = []
    known = True
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            known = known and _is_known(index)
            chosen += [_new([_found(index)], index, torch.int64, known=True) for _ in range(index.dim())]
        else:
            chosen.append(index)
    out = func(tensor, chosen, *rest, **kwargs)
    if not known:
        _taken.add(out.nbytes)
    return out


def _repeat_interleave(_func: Any, args: Any, kwargs: Any) -> Any:
    size = kwargs.get("output_size")
    return _new([size or args[0].numel()], args[0], torch.int64, known=size is not None)


def _bincount(_func: Any, args: Any, kwargs: Any) -> Any:
    least = kwargs.get("minlength", args[2] if len(args) > 2 else 0)
    weights = kwargs.get("weights", args[1] if len(args) > 1 else None)
    return _new([max(least, 1)], args[0], torch.int64 if weights is None else torch.float64)


def _equal(_func: Any, _args: Any, _kwargs: Any) -> Any:
    return True


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


ANSWERS: Final[dict[Any, Callable[[Any, Any, Any], Any]]] = {
    _aten.nonzero.default: _known(_nonzero),
    _aten.masked_select.default: _masked_select,
    _aten._unique2.default: _known(_unique),
    _aten.unique_dim.default: _known(_unique),
    _aten.unique_consecutive.default: _known(_unique),
    _aten.index.Tensor: _index,
    _aten.repeat_interleave.Tensor: _known(_repeat_interleave),
    _aten.bincount.default: _known(_bincount),
    _aten.equal.default: _equal,
    _aten.allclose.default: _equal,
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
    _aten.logical_or.default: _keeps_hint,
    _aten.bitwise_or.Tensor: _keeps_hint,
}
"""Operations whose output depends on values, and the upper bound that is answered: ``(func, args, kwargs)``."""

"""Values that only a real tensor has: what a fake one says when the program asks, and how large what they decide is.

Where the values are known (literals, small draws, integers and masks that were there before the cell), so is what
depends on them. For the rest the policy aims at the upper bound of memory and at the way through the cell that trains:
masks select everything, ``nonzero`` finds all, losses are finite, a number is 1. Where a bool may be either, the
likelier is answered, and the forecast says so. One that is asked for again and again at one place stands in a loop
that waits for it (rejection sampling, convergence), so every 32nd answer there is the other one; but not in an
``assert``, nor where memory rises meanwhile: a generation piles up tokens, and has an end of its own.

What is made of a result that was taken for the most is as large as that: the tokens of an expert, what its layers make
of them, their gradients. So each such size is remembered, and a storage is of this kind where it was made of one of
this kind and has such a size again. Limits: a size that something else has as well.
"""

from __future__ import annotations

import math
import sys
import time
from collections import Counter
from collections.abc import Callable
from types import CodeType
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_iter, tree_map_only

from oomdoctor.program.code_names import asserts_at

if TYPE_CHECKING:
    from collections.abc import Iterable

    from oomdoctor.forecast.live_storages import Ledger, Note

Handler: TypeAlias = "Callable[[Any, Any, Any], Any]"
"""Runs an operation on fake tensors: ``(func, args, kwargs)``."""

_aten = torch.ops.aten
_MARK: Final = "_oomdoctor_bound"
_FLIP_EVERY: Final = 32
_MOST_ASKED: Final = 1024
_INNER_MODULES: Final = ("torch._", "torch.utils._", "torch.overrides", "oomdoctor.forecast")
HINT: Final = "_oomdoctor_hint"
"""Attribute of a fake bool tensor whose answer is known: ``isnan`` is False, ``isfinite`` is True."""
LIKELY: Final = "_oomdoctor_likely"
"""Attribute of one that is the comparison of one element with a number: what 1 would be, which ``item()`` answers."""

_sizes: set[int] = set()
unbounded: set[str] = set()
"""Operators that were answered with the least that they may give, as nothing bounds what values make of it."""


class Scalars:
    """Answers for ``item()``, ``float()``, ``int()`` and ``bool()`` of tensors.

    Attributes:
        asked: how many values were asked for that nobody knows.
        has_guessed: whether a bool was asked for that may be either.
        until: when loops that pile something up are made to end, by ``time.monotonic``; ``missed``: whether one was.
    """

    def __init__(self, live: Callable[[], int]) -> None:
        """Begin with nothing asked; ``live`` tells how many bytes are alive."""
        self.asked = 0
        self.has_guessed = False
        self.until, self.missed = math.inf, False
        self._live = live
        self._asked: Counter[object] = Counter()
        self._levels: dict[object, int] = {}

    def answer(self, tensor: torch.Tensor) -> Any:
        """Return the value of a scalar that nobody knows."""
        self.asked += 1
        if tensor.dtype is torch.bool:
            hint = getattr(tensor, HINT, None)
            return self._bool(getattr(tensor, LIKELY, True)) if hint is None else hint
        if tensor.dtype.is_complex:
            return complex(1.0)
        return 1.0 if tensor.dtype.is_floating_point else 1

    def compare(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Return whether two tensors are equal, or close."""
        values = [leaf.constant if isinstance(leaf, FakeTensor) else leaf for leaf in args[:2]]
        if any(value is None for value in values):
            self.asked += 1
            return self._bool(False)
        with _disable_current_modes():
            return bool(func(*values, *args[2:], **kwargs))

    def _bool(self, answer: bool) -> bool:
        self.has_guessed = True
        place = _place()
        if asserts_at(*place):
            return True
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


def _place() -> tuple[CodeType | None, int]:
    """Return the place in the user's or a library's code that asks."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_INNER_MODULES):
        frame = frame.f_back
    return (frame.f_code, frame.f_lineno) if frame is not None else (None, 0)


def named(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return all arguments of an operation by name."""
    given: dict[str, Any] = {argument.name: argument.default_value for argument in func._schema.arguments}
    given |= dict(zip(given, args, strict=False)) | kwargs
    return given


def _bounded(made: torch.Tensor, size: int) -> torch.Tensor:
    """Note that a result has a dimension of this size, which nobody knows and that was taken for the most."""
    if size > 1:
        _sizes.add(size)
        setattr(made, _MARK, True)
    return made


def follow_bounds(func: Any, given: Iterable[Note | None], made: Iterable[tuple[torch.Tensor, Note | None]]) -> None:
    """Mark what an operation has made of memory whose size nobody knows, by the notes of what it was given."""
    if not _sizes:
        return
    is_bound = any(note is not None and note.is_bound for note in given)
    for tensor, note in made:
        if note is None:
            continue
        if is_bound and tensor.dim() and (note.is_bound or func is _aten.cat.default):
            _sizes.add(max(tensor.shape))  # another view of it, or several put together
        note.is_bound = note.is_bound or hasattr(tensor, _MARK) or (is_bound and not _sizes.isdisjoint(tensor.shape))


def uncertain_bytes(ledger: Ledger) -> int:
    """Return how much of what is alive at the peak is of a size that nobody knows."""
    alive = ledger.alive_after(ledger.peak_at) if _sizes else {}
    return sum(size for number, size in alive.items() if ledger.note(number).is_bound)


def _new(shape: list[int], like: torch.Tensor, dtype: torch.dtype, *, size: int | None = None) -> torch.Tensor:
    """Return a result; ``size`` is that of its dimensions which nobody knows, None where all are known."""
    found = torch.empty(shape, dtype=dtype, device=like.device)
    return found if size is None else _bounded(found, size)


def is_known(tensor: torch.Tensor) -> bool:
    """Return whether the values of a fake tensor are known."""
    return getattr(tensor, "constant", None) is not None


def known(bound: Handler) -> Handler:
    """Return a handler that computes for real where all values are known, and else answers the upper bound."""

    def handler(func: Any, args: Any, kwargs: Any) -> Any:
        if not all(is_known(leaf) for leaf in tree_iter((args, kwargs)) if isinstance(leaf, torch.Tensor)):
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


def nonzero(_func: Any, args: Any, _kwargs: Any) -> Any:
    """Return the places of all elements."""
    most = args[0].numel()
    return _new([most, args[0].dim()], args[0], torch.int64, size=most)


def masked_select(_func: Any, args: Any, _kwargs: Any) -> Any:
    """Return all elements where a mask is not known."""
    shape: Any = torch.broadcast_shapes(args[0].shape, args[1].shape)  # type: ignore[no-untyped-call]
    most = _found(args[1]) * (shape.numel() // max(args[1].numel(), 1))
    return _new([most], args[0], args[0].dtype, size=None if is_known(args[1]) else most)


def unique(func: Any, args: Any, kwargs: Any) -> Any:
    """Return as many values as there are elements."""
    tensor, along = args[0], named(func, args, kwargs).get("dim")
    count = tensor.numel() if along is None else tensor.shape[along]
    shape = [tensor.numel()] if along is None else list(tensor.shape)
    return (
        _new(shape, tensor, tensor.dtype, size=count),
        _new(list(tensor.shape) if along is None else [count], tensor, torch.int64),
        _new([count], tensor, torch.int64, size=count),
    )


def index(func: Any, args: Any, kwargs: Any) -> Any:
    """Return all rows where a mask is not known."""
    tensor, indices, *rest = args
    chosen: list[Any] = []
    most: int | None = None
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            most = most if is_known(index) else index.numel()
            chosen += [_new([_found(index)], index, torch.int64) for _ in range(index.dim())]
        else:
            chosen.append(index)
    out = func(tensor, chosen, *rest, **kwargs)
    return out if most is None else _bounded(out, most)


def repeat_interleave(func: Any, args: Any, kwargs: Any) -> Any:
    """Return as many as is told, else each once."""
    told = named(func, args, kwargs)["output_size"]
    if told is None:
        unbounded.add("repeat_interleave")
    return _new([args[0].numel() if told is None else told], args[0], torch.int64)


def bincount(func: Any, args: Any, kwargs: Any) -> Any:
    """Return as many counts as there are at the least."""
    given = named(func, args, kwargs)
    unbounded.add("bincount")
    return _new([max(given["minlength"], 1)], args[0], torch.int64 if given["weights"] is None else torch.float64)


def ctc_loss(_func: Any, args: Any, _kwargs: Any) -> Any:
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


def packed(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the data and the batch sizes, which stay a real tensor, because compiled code reads them from memory.

    Source: ``_pack_padded_sequence`` in ``aten/src/ATen/native/PackedSequence.cpp``.
    """
    padded, lengths = args[:2]
    steps = padded.shape[1 if named(func, args, kwargs)["batch_first"] else 0]
    with _disable_current_modes():
        known = lengths.constant
        each = torch.full((lengths.numel(),), steps) if known is None else known
        sizes = (each[None, :] > torch.arange(int(each.max()))[:, None]).sum(1)
        count = int(sizes.sum())
    return padded.new_empty((count, *padded.shape[2:])), sizes

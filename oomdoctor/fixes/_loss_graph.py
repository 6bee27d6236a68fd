"""What the autograd graph of a loss tells of it: whether it is a mean or a sum, and whether it keeps samples apart.

Limits: what is made of the batch before any weight comes in (its mean, a permutation) is not in the graph, and neither
is by what a mean is multiplied.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from torch.utils._python_dispatch import _disable_current_modes

from oomdoctor.errors import OomDoctorError
from oomdoctor.fixes._forward import is_shadow_run

__all__ = ["MEAN", "SUM", "check_apart", "may_count", "reduction"]

_UNKNOWN: Final = 0
MEAN: Final = 1
SUM: Final = 2
"""Values of ``_saved_reduction``. Source: ``at::Reduction`` in ATen/core/Reduction.h: None 0, Mean 1, Sum 2."""

_NO_IGNORE: Final = {-100, 2**64 - 100}
"""The default ``ignore_index``, which autograd nodes show as an unsigned number."""

_ARITHMETIC: Final = ("Add", "Sub", "Mul", "Div", "Neg", "ToCopy", "Clone", "Squeeze", "View", "Alias")
_PAIRWISE: Final = ("Cdist", "EuclideanDist", "Pdist")
_ALONG: Final = (
    *("Mean", "Sum", "Std", "Var", "Prod", "Softmax", "LogSoftmax", "Logsumexp", "Norm", "LinalgVectorNorm"),
    *("Max", "Min", "Amax", "Amin", "Median", "Sort", "Topk", "Cumsum"),
)
"""Operations that combine the entries along ``_saved_dim``."""


def reduction(root: Any) -> tuple[int, tuple[float, ...]]:
    """Return how the loss made by ``root`` reduces, and by what sums in it are multiplied or divided.

    Raises:
        OomDoctorError: it cannot be told, or its terms reduce in different ways.
    """
    factors: list[float] = []
    found = set(_reductions(root, factors))
    if len(found) != 1 or _UNKNOWN in found:
        raise OomDoctorError("the loss is not known to be a mean or a sum over the samples of the batch")
    return found.pop(), tuple(factors)


def may_count(factors: Sequence[float], rows: int) -> bool:
    """Whether a factor of a sum over ``rows`` samples may count them: a sum that their number divides is a mean."""
    return any(_is_multiple(factor, rows) or _is_multiple(1 / factor, rows) for factor in factors if factor)


def _is_multiple(value: float, rows: int) -> bool:
    return abs(value) > 0.99 * rows and abs(value / rows - round(value / rows)) < 1e-3


def _reductions(node: Any, factors: list[float]) -> Iterator[int]:
    name = node.name() if node is not None else ""
    if name.startswith("Mean") and "0" in name:
        yield MEAN
    elif name.startswith("Sum") and "0" in name:
        yield SUM
    elif (kind := getattr(node, "_saved_reduction", None)) in {MEAN, SUM}:
        if kind == MEAN and getattr(node, "_saved_ignore_index", -100) not in _NO_IGNORE:
            raise OomDoctorError("the loss passes over some targets, so its mean is not one over samples")
        if kind == MEAN and name.startswith("NllLoss") and node._saved_weight is not None:
            raise OomDoctorError("the loss has class weights, so its mean is not one over samples")
        yield int(kind)
    elif name.startswith(_ARITHMETIC):
        below = [set(_reductions(child, factors)) for child, _ in node.next_functions if child is not None]
        if name.startswith(("Div", "Mul")):
            if len(below) > 1:
                yield _UNKNOWN
            elif SUM in set().union(*below):
                factors += _factor(node)
        for found in below:
            yield from found
    else:
        yield _UNKNOWN


def _factor(node: Any) -> tuple[float, ...]:
    """Return the number that a scalar is multiplied or divided by, none where tensors have no values."""
    if is_shadow_run():
        return ()
    # A mode would see the tensor that a number was saved as, and take it for a number.
    with _disable_current_modes():
        saved = [getattr(node, name, None) for name in ("_saved_other", "_saved_self")]
        found = [float(one) for one in saved if isinstance(one, torch.Tensor) and one.ndim == 0]
    if not found:
        raise OomDoctorError("the loss is a sum that is divided or multiplied, and by what is not known")
    return (found[0],)


def check_apart(root: Any, rows: int) -> None:
    """Look through the graph of a loss over ``rows`` samples for what makes one of them depend on the others.

    Raises:
        OomDoctorError: there is such an operation.
    """
    todo, seen = [root], set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        children = [child for child, _ in node.next_functions]
        name = node.name()
        if "BatchNorm" in name and getattr(node, "_saved_training", True):
            raise OomDoctorError("a layer normalises over the batch in training mode")
        product = name == "MmBackward0" and not any(child is None or _is_weight(child) for child in children[:2])
        if product or name.startswith(_PAIRWISE):
            raise OomDoctorError("the loss compares the samples of a batch with one another")
        if name.startswith(_ALONG) and _goes_over_rows(node, rows):
            raise OomDoctorError("a value is made over the samples of a batch, not from each of them")
        todo += children


def _goes_over_rows(node: Any, rows: int) -> bool:
    """Whether an operation along some dimensions goes along the first, and that is as long as the part has samples."""
    sizes = getattr(node, "_saved_self_sym_sizes", None)
    if sizes is None and (of := getattr(node, "_saved_self", None)) is not None:
        sizes = of.shape
    if sizes is None:
        # It gives as many entries as it takes: a softmax, a cumulative sum.
        sizes = node._input_metadata[0].shape
    along = getattr(node, "_saved_dim", None)
    axes = along if isinstance(along, tuple | list) else () if along is None else (along,)
    # Negative numbers are shown as unsigned ones.
    places = {(axis - 2**64 if axis >= 2**63 else axis) % len(sizes) for axis in axes} if sizes else set()
    return 0 in places and sizes[0] == rows and rows > 1


def _is_weight(node: Any) -> bool:
    while node is not None and node.name() in {"TBackward0", "TransposeBackward0", "ToCopyBackward0"}:
        node = node.next_functions[0][0]
    return node is None or "AccumulateGrad" in node.name()

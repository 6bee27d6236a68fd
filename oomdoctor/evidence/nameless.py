"""Tensors of the program that no way from a name has met: found by the collector, told by who counts them."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch

from oomdoctor.objects.alive import alive, without_apart
from oomdoctor.objects.storages import Bare, storages_of, unobserved

_OF_A_START: Final = 10_000
"""More objects than a start of the interpreter puts out of the collector's sight: 375 in CPython 3.12, else none."""

_base: Final = vars(torch._C.TensorBase)["_base"].__get__


def bases_of(views: Sequence[Any], held: Mapping[int, Sequence[Any]]) -> Iterator[Any]:
    """Yield what those of ``views`` were made of that lie in the same storages as ``held``, or the parts they have."""
    view: Any
    for key, _, _, view in storages_of(views):
        if key in held and type(view) is not Bare:
            yield _base(view)
        elif key in held and view.tensor is not None:
            yield from held[key]


def held_by_c(some: list[Any], others: list[Any]) -> list[Any]:
    """Return those of ``some`` that nothing of Python's holds beside these two lists, in each of which they are."""
    alone = object()
    some.append(alone)
    others.append(alone)
    counts = list(map(sys.getrefcount, some))  # this variable holds one of them, C++ the others
    some.pop()
    others.pop()
    return [one for one, count in zip(some, counts, strict=False) if count <= counts[-1]]


def _counts_of_c() -> bool:
    """Return whether Python counts a reference where C++ holds a tensor too; older versions of torch do not tell it."""
    with unobserved():
        tensor = torch.empty(0)
        before = sys.getrefcount(tensor)
        view = tensor.view(0)
        return sys.getrefcount(tensor) - before == len(view.shape)


C_COUNTS: Final = _counts_of_c()


def all_tensors() -> list[Any]:
    """Return every tensor of the program that the garbage collector knows."""
    return without_apart(alive(torch.Tensor))


def out_of_sight() -> int:
    """Return how many objects the program has put out of the garbage collector's sight, by ``gc.freeze``.

    No call tells what they are, and to bring them back would undo for good what the program did.
    """
    frozen = gc.get_freeze_count()
    return frozen if frozen > _OF_A_START else 0

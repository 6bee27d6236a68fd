"""Arguments of a forward split over the batch, and its outputs put together again.

What cannot be told is refused: a tensor counts as batched, as not batched, or the call is not split. Dimension 0 of
the first tensor is taken for the batch; that the samples there do not depend on each other is for the caller to check.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from oomdoctor.errors import OomDoctorError

__all__ = ["Call", "Divided", "divide", "join"]

Call: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]

_ATOMS: Final = (type(None), bool, int, float, complex, str, torch.dtype, torch.device)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Divided:
    """One call's arguments with the batch found in them. Holds the tensors.

    Attributes:
        rows: size of the batch.
    """

    rows: int
    leaves: tuple[Any, ...] = dataclasses.field(repr=False)
    batched: tuple[bool, ...]
    form: Any = dataclasses.field(repr=False)

    def chunks(self, count: int) -> list[Call]:
        """Return the calls for ``count`` parts of the batch, cut as ``Tensor.chunk`` does."""
        rows = -(-self.rows // count)
        return [self.part(start, min(start + rows, self.rows)) for start in range(0, self.rows, rows)]

    def part(self, start: int, stop: int) -> Call:
        """Return the call for the rows from ``start`` up to ``stop``; its tensors are views."""
        cut = [leaf[start:stop] if batched else leaf for leaf, batched in zip(self.leaves, self.batched, strict=True)]
        args, kwargs = pytree.tree_unflatten(cut, self.form)
        return tuple(args), dict(kwargs)


def divide(path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Divided:
    """Find the batch in the arguments of a call of ``path``.

    Raises:
        OomDoctorError: there is no tensor, or an argument of which one cannot tell whether it goes with the batch.
    """
    leaves, form = pytree.tree_flatten((args, kwargs))
    first = next((leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.ndim), None)
    if first is None:
        raise OomDoctorError(f"{path} was called without a tensor to split")
    if any(isinstance(value, list | PackedSequence) for value in (*args, *kwargs.values())):
        raise OomDoctorError(f"{path} was called with a list or a packed sequence, which is not split")
    batched = tuple(_is_batched(path, leaf, first) for leaf in leaves)
    return Divided(rows=first.shape[0], leaves=tuple(leaves), batched=batched, form=form)


def _is_batched(path: str, leaf: Any, first: torch.Tensor) -> bool:
    rows = first.shape[0]
    if leaf is first:
        return True
    if not isinstance(leaf, torch.Tensor):
        if not isinstance(leaf, _ATOMS):
            raise OomDoctorError(f"{path} was called with a {type(leaf).__name__}, which may or may not be batched")
        if type(leaf) is int and leaf == rows and rows > 1:
            raise OomDoctorError(f"{path} was called with the number {leaf}, which may be the size of the batch")
        return False
    shape = tuple(leaf.shape)
    square = len(shape) == 2 and shape[0] == shape[1]
    if shape and shape[0] == rows and not (square and rows > 1):
        return True
    # A mask of (length, length) is shared by the samples; one of (batch * heads, length, length) or a hidden state of
    # (layers, batch, features) is not, though its first dimension differs.
    shared = not shape or (rows not in shape and (shape[0] == 1 or shape[0] in first.shape[1:] or shape[0] % rows != 0))
    if shared:
        return False
    raise OomDoctorError(
        f"{path} was called with a tensor of shape {shape} beside one of {tuple(first.shape)}: whether it goes with "
        "the batch cannot be told"
    )


def join(path: str, parts: Sequence[Any], rows: Sequence[int]) -> Any:
    """Return the outputs of the parts as one, of the same form.

    Raises:
        OomDoctorError: a part of the output does not belong to single samples, such as a loss over the batch.
    """
    first = parts[0]
    if isinstance(first, torch.Tensor):
        if any(part.ndim == 0 or part.shape[0] != count for part, count in zip(parts, rows, strict=True)):
            kind = "a single number, such as a loss" if first.ndim == 0 else f"a tensor of shape {tuple(first.shape)}"
            raise OomDoctorError(f"{path} returns {kind}, which is not made of rows for the samples: it is not split")
        return torch.cat(tuple(parts))
    if isinstance(first, _ATOMS):
        if any(part != first for part in parts):
            raise OomDoctorError(f"{path} returns {first!r} for one part of the batch and another value for the next")
        return first
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        names = [field.name for field in dataclasses.fields(first) if field.init]
        values = [{name: getattr(part, name) for name in names} for part in parts]
        return type(first)(**_join_mapping(path, values, rows))
    return _join_container(path, parts, rows)


def _join_container(path: str, parts: Sequence[Any], rows: Sequence[int]) -> Any:
    first = parts[0]
    if isinstance(first, Mapping):
        return _remade(path, type(first), _join_mapping(path, parts, rows))
    if isinstance(first, tuple | list) and not isinstance(first, torch.Size):
        if any(len(part) != len(first) for part in parts):
            raise OomDoctorError(f"{path} returns a different number of values for the parts of the batch")
        joined = [join(path, values, rows) for values in zip(*parts, strict=True)]
        return type(first)(*joined) if hasattr(first, "_fields") else _remade(path, type(first), joined)
    raise OomDoctorError(f"{path} returns a {type(first).__name__}, which cannot be put together from parts")


def _join_mapping(path: str, parts: Sequence[Mapping[Any, Any]], rows: Sequence[int]) -> dict[Any, Any]:
    if any(part.keys() != parts[0].keys() for part in parts):
        raise OomDoctorError(f"{path} returns different keys for the parts of the batch")
    return {key: join(path, [part[key] for part in parts], rows) for key in parts[0]}


def _remade(path: str, cls: Callable[[Any], Any], content: Any) -> Any:
    try:
        return cls(content)
    except TypeError as error:
        raise OomDoctorError(f"{path} returns a {cls.__name__}, which cannot be made anew: {error}") from error

"""Forwards of live models run over parts of the batch: arguments are split, and outputs put together again.

What cannot be told is refused: a tensor counts as batched, as not batched, or the call is not split. Dimension 0 of
the first tensor is taken for the batch; that the samples there do not depend on each other is for the trial to show. A
forward that changes state of its own, or draws random numbers without dropout, is refused as it runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeAlias

import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from oomdoctor.errors import OomDoctorError
from oomdoctor.fixes import _forward, _recompute

Call: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]

_DATA_PARALLEL: Final = {"DistributedDataParallel": "it exchanges gradients or buffers once for each forward"}
_ATOMS: Final = (type(None), bool, int, float, complex, str, torch.dtype, torch.device)


@contextmanager
def forwards_in_parts(models: Sequence[tuple[str, Any]], parts: int, *, with_gradients: bool) -> Iterator[None]:
    """Split every forward of ``models``, given with their paths; undone on exit.

    Args:
        with_gradients: split those with gradients as well, each part recomputed in the backward pass.

    Raises:
        OomDoctorError: no model can be split; raised by a call of the model where its arguments, its output or what
            it does to them cannot be split.
    """
    found = _forward.splittable(models, _DATA_PARALLEL)
    run = _InParts({id(model): path for path, model in found}, parts, with_gradients=with_gradients).run
    with _forward.replaced([model for _, model in found], run):
        yield


class _InParts:
    """Runs forwards in parts."""

    def __init__(self, paths: dict[int, str], parts: int, *, with_gradients: bool) -> None:
        self._paths, self._parts, self._with_gradients = paths, parts, with_gradients
        self._inside = False

    def run(self, module: Any, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one forward: whole where it is part of another one already split, or where there is one sample."""
        if self._inside or (torch.is_grad_enabled() and not self._with_gradients):
            return forward(*args, **kwargs)
        path = self._paths.get(id(module), type(module).__name__)
        call = divide(path, args, kwargs)
        if call.rows < 2:
            return forward(*args, **kwargs)
        drops = _forward.active_dropout(module)
        if drops and not self._with_gradients:
            raise OomDoctorError(f"{path} is not split: it is in training mode, and drops other values for each part")
        _forward.refuse_batch_norm(path, module)
        devices = _forward.devices(module)
        watch, marks = _recompute.StateWatch(path, module), _forward.rng_marks(devices)
        most = -(-call.rows // self._parts)
        rows = [min(most, call.rows - start) for start in range(0, call.rows, most)]
        whole = gathered(path, self._each(path, module, self._whole(forward), call), rows)
        if (changed := watch.changed()) is not None:
            raise OomDoctorError(f"{path} is not split: its forward changes {changed}, which it would for each part")
        if not drops and marks != _forward.rng_marks(devices):
            raise OomDoctorError(f"{path} is not split: its forward draws random numbers, others for each part")
        return whole

    def _each(self, path: str, module: Any, forward: Any, call: Divided) -> Iterator[Any]:
        for args, kwargs in call.chunks(self._parts):
            if torch.is_grad_enabled():
                yield _recompute.recomputed(path, module, forward, args, kwargs)
            else:
                yield forward(*args, **kwargs)

    def _whole(self, forward: Any) -> Any:
        """Return ``forward`` with nothing split below it, in the backward pass as well."""

        def run(*args: Any, **kwargs: Any) -> Any:
            outside, self._inside = self._inside, True
            try:
                return forward(*args, **kwargs)
            finally:
                self._inside = outside

        return run


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


def gathered(path: str, parts: Iterator[Any], rows: Sequence[int]) -> Any:
    """Return the outputs of the parts as one. One tensor is filled as they come, so that it never exists twice."""
    first = next(parts)
    if torch.is_grad_enabled() or not isinstance(first, torch.Tensor) or first.shape[:1] != (rows[0],):
        return join(path, [first, *parts], rows)
    form = torch.channels_last if _is_channels_last(first) else torch.contiguous_format
    whole = torch.empty((sum(rows), *first.shape[1:]), dtype=first.dtype, device=first.device, memory_format=form)
    whole[: rows[0]] = first
    done, kind = rows[0], (first.dtype, first.shape[1:])
    del first
    for part, count in zip(parts, rows[1:], strict=True):
        if not isinstance(part, torch.Tensor) or part.shape[:1] != (count,) or (part.dtype, part.shape[1:]) != kind:
            raise OomDoctorError(f"{path} is not split: the outputs for parts of the batch do not fit together")
        whole[done : done + count] = part
        done += count
    return whole


def _is_channels_last(tensor: Any) -> bool:
    return tensor.ndim == 4 and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=torch.channels_last)


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

"""A batch in parts: the body of a loop for each of them, or calls of a model whose outputs are put together again.

``batch_parts(4, x, y)`` yields parts of a batch; ``join_parts`` puts together what they have left. ``in_parts(model,
4)(x)`` gives what ``model(x)`` does; with gradients, each part is recomputed in the backward pass. Random numbers are
drawn as for the whole batch (see ``_batch_draws``). What cannot be told is refused: a tensor counts as batched, as not
batched, or the call is not split. That samples do not depend on each other is for the trial to show.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import count as counted
from threading import local
from typing import Any, Final, TypeAlias

import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from oomdoctor.errors import OomDoctorError, UsageError
from oomdoctor.fixes import _forward
from oomdoctor.fixes._batch_draws import Draws
from oomdoctor.objects.rows import batch_size, cut, tensors_in

Call: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]

_DATA_PARALLEL: Final = {"DistributedDataParallel": "it exchanges gradients or buffers once for each forward"}
_ATOMS: Final = (type(None), bool, int, float, complex, str, torch.dtype, torch.device)


def in_parts(model: Any, parts: int) -> Callable[..., Any]:
    """Return ``model`` as a function that runs it over ``parts`` of the batch, each recomputed in the backward pass.

    Args:
        model: a ``torch.nn.Module``, called with tensors of which the first has the batch in dimension 0. Where that
            one is in host memory and the model on a device, its parts are moved there one by one. Or its ``generate``,
            whose parts are padded to the longest as it pads a batch, and which keeps no graph.
        parts: how many; one of a batch of a single sample.

    Raises:
        OomDoctorError: it is compiled, replicated or sharded, or has forward hooks below it; raised by a call whose
            arguments or output cannot be split, or that changes what it would for each part.
    """
    owner = getattr(model, "__self__", model)
    path = type(owner).__name__
    _forward.refuse_unless_plain(path, owner, _DATA_PARALLEL)
    _forward.refuse_hooks(path, owner)
    return _InParts(path, owner, model, parts)


def batch_parts(parts: int, *values: Any, dim: int = 0, ddp: Any = None) -> Iterator[Any]:
    """Yield a batch in parts, each of which draws the random numbers that it has in the whole batch.

    Args:
        parts: how many; fewer than there are rows.
        values: tensors with a row for each sample in dimension ``dim``, or dictionaries, lists and tuples of such
            tensors, and of lists with an item for each sample. What else is in them goes to every part as it is.
        dim: the dimension of the batch. A tensor that has it elsewhere, as the state of a recurrent layer, or that was
            flattened, is cut where it is. What has a graph is cut from it, and its gradients are passed on at the end.
        ddp: a model that ``DistributedDataParallel`` wraps: its gradients are exchanged once, with the last part. One
            with ``static_graph``, which cannot leave an exchange out, exchanges them with each part.

    Yields:
        The part of the one value, or of each value as a tuple.

    Raises:
        UsageError: there is no tensor among the values, or one row in a later dimension; or the model is not one that
            DDP wraps.
        StateError: in the body, from an operator of which it cannot be told what it draws for which row; or Python or
            NumPy drew others for one part than for another.
    """
    rows = batch_size(values, dim)
    if rows is None:
        raise UsageError("batch_parts was given no tensor with the rows of a batch")
    if dim and rows < 2:  # of the first one, a last batch may have a single row
        raise UsageError(f"batch_parts was given one row in dimension {dim}, which has no parts")
    if ddp is not None and not hasattr(ddp, "no_sync"):
        raise UsageError(f"batch_parts takes a model that DistributedDataParallel wraps, not a {type(ddp).__name__}")
    waits = ddp is not None and not getattr(ddp, "static_graph", False)
    devices = {tensor.device for tensor in tensors_in(values)}
    draws, borders = Draws(rows, devices), dict[int, tuple[torch.Tensor, torch.Tensor]]()
    given = (one for one in tensors_in(values) if one.ndim > 1 and dim in (0, 1) and one.shape[dim] == rows)
    terms: dict[str, Any] = {"rows": rows, "dim": dim, "borders": borders}
    terms["steps"] = {one.shape[1 - dim] for one in given}
    for start, count in draws.parts(parts):
        part = cut(values, rows, partial(_rows, start=start, count=count, **terms))
        with draws.of(start, count), ddp.no_sync() if waits and start + count < rows else nullcontext():
            yield part if len(values) > 1 else part[0]
    reached = [(whole, leaf.grad) for whole, leaf in borders.values() if leaf.grad is not None]
    if reached:
        torch.autograd.backward([whole for whole, _ in reached], [grad for _, grad in reached])


def join_parts(parts: Sequence[Any]) -> Any:
    """Return what parts of a batch have left as that of the whole batch, without its graph.

    Args:
        parts: of each part the same kind of thing: a tensor, or tuples, lists and dictionaries of tensors. Tensors are
            joined along the dimension in which they differ.
    """
    leaves, structure = zip(*map(pytree.tree_flatten, parts), strict=True)
    return pytree.tree_unflatten([_joined(list(several)) for several in zip(*leaves, strict=True)], structure[0])


def _joined(parts: list[Any]) -> Any:
    if not isinstance(parts[0], torch.Tensor):
        return parts[-1]
    shapes = [one.shape for one in parts]
    differing = [at for at, sizes in enumerate(zip(*shapes, strict=True)) if len({*sizes}) > 1]
    return torch.cat([one.detach() for one in parts], differing[0]) if differing else parts[-1].detach()


def _rows(
    whole: Any,
    *,
    start: int,
    count: int,
    rows: int,
    dim: int,
    steps: Collection[int],
    borders: dict[int, tuple[torch.Tensor, torch.Tensor]],
) -> Any:
    """Return the rows of one value; a tensor with a graph is cut from it, and gets the gradients of all parts at once.

    One of a single dimension may have been flattened with another one, of a size among ``steps``.
    """
    if not isinstance(whole, torch.Tensor):
        return whole[start : start + count] if len(whole) == rows else whole
    # The batch may be in the other of the first two, as of a state or a mask of padding.
    dims = [dim, *([1 - dim] if whole.ndim > 2 - dim and dim in (0, 1) else [])]
    at = next((one for one in dims if whole.ndim > one and whole.shape[one] == rows), None)
    is_flat = at is None and whole.ndim == 1 and rows > 0 and len(whole) % rows == 0 and len(whole) // rows in steps
    if at is None and not is_flat:
        return whole
    if whole.grad_fn is not None and torch.is_grad_enabled():
        whole = borders.setdefault(id(whole), (whole, whole.detach().requires_grad_()))[1]
    if at is not None:
        part = whole.narrow(at, start, count)
        return part.contiguous() if whole.is_contiguous() else part
    return whole.view((-1, rows) if dim else (rows, -1)).narrow(dim, start, count).reshape(-1)


_running: Final = local()
"""Whether a thread runs a part."""


class _InParts:
    """Runs a model in parts, and those within it whole."""

    def __init__(self, path: str, model: Any, call: Callable[..., Any], parts: int) -> None:
        self._path, self._model, self._call, self._parts = path, model, call, parts

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one forward: whole where it is part of another one already split, or where there is one sample."""
        if getattr(_running, "inside", False) or (call := divide(self._path, args, kwargs)).rows < 2:
            return self._call(*args, **kwargs)
        _forward.refuse_batch_norm(self._path, self._model)
        devices = _forward.devices(self._model)
        watch, device = _forward.StateWatch(self._path, self._model), devices[0] if len(devices) == 1 else None
        draws = Draws(call.rows, devices, _InParts._run.__code__)
        marks = None if self._call is self._model else _forward.rng_marks(devices)
        parts: Iterator[tuple[int, Any]] = (
            (count, self._part(draws, start, count, *call.part(start, count, device)))
            for start, count in draws.parts(self._parts, may_draw=_forward.active_dropout(self._model))
        )
        if marks is not None:
            parts = iter(_as_long(list(parts), self._model))
            if marks != _forward.rng_marks(devices):
                raise OomDoctorError(f"{self._path} is not split: it draws random numbers, others for each part")
        whole = gathered(self._path, parts, call.rows)
        if (changed := watch.changed()) is not None:
            raise OomDoctorError(f"{self._path} is not split: its forward changes {changed}, as it would for each part")
        return whole

    def _part(self, draws: Draws, start: int, count: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._call is not self._model:
            return self._whole(*args, **kwargs)
        run = partial(self._run, draws, start, count, counted())
        if torch.is_grad_enabled():
            return _forward.recomputed(self._path, self._model, run, args, kwargs)
        return run(*args, **kwargs)

    def _run(self, draws: Draws, start: int, count: int, runs: Iterator[int], *args: Any, **kwargs: Any) -> Any:
        with draws.of(start, count, again=next(runs) > 0):
            return self._whole(*args, **kwargs)

    def _whole(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model with nothing split below it, in the backward pass as well."""
        outside, _running.inside = getattr(_running, "inside", False), True
        try:
            return self._call(*args, **kwargs)
        finally:
            _running.inside = outside


def _as_long(parts: list[tuple[int, Any]], model: Any) -> list[tuple[int, Any]]:
    """Return what was generated for the parts, padded on the right to the longest, as ``GenerationMixin`` pads rows."""
    if not all(isinstance(part, torch.Tensor) and part.ndim == 2 for _, part in parts):
        return parts
    settings, longest = getattr(model, "generation_config", None), max(part.shape[1] for _, part in parts)
    ends, pad = getattr(settings, "eos_token_id", None), getattr(settings, "pad_token_id", None)
    pad = (ends[0] if isinstance(ends, list) else ends) if pad is None else pad
    if pad is None:
        return parts
    fill = torch.nn.functional.pad
    return [(count, fill(part, (0, longest - part.shape[1]), value=pad)) for count, part in parts]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Divided:
    """One call's arguments with the batch found in them; the tensor that tells it is the ``first`` of ``leaves``."""

    rows: int
    first: int
    leaves: tuple[Any, ...] = dataclasses.field(repr=False)
    batched: tuple[bool, ...]
    form: Any = dataclasses.field(repr=False)

    def part(self, start: int, count: int, device: torch.device | None = None) -> Call:
        """Return the call for ``count`` rows of the batch from ``start`` on, the first tensor moved."""
        pairs = zip(self.leaves, self.batched, strict=True)
        leaves = [leaf[start : start + count] if is_batched else leaf for leaf, is_batched in pairs]
        if device is not None and leaves[self.first].device.type == "cpu":
            leaves[self.first] = leaves[self.first].to(device)
        args, kwargs = pytree.tree_unflatten(leaves, self.form)
        return tuple(args), dict(kwargs)


def divide(path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Divided:
    """Find the batch in the arguments of a call; raise ``OomDoctorError`` where what goes with it cannot be told."""
    leaves, form = pytree.tree_flatten((args, kwargs))
    at = next((at for at, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.ndim), None)
    if at is None:
        raise OomDoctorError(f"{path} was called without a tensor to split")
    if any(isinstance(value, list | PackedSequence) for value in (*args, *kwargs.values())):
        raise OomDoctorError(f"{path} was called with a list or a packed sequence, which is not split")
    batched = tuple(_is_batched(path, leaf, leaves[at]) for leaf in leaves)
    return Divided(rows=leaves[at].shape[0], first=at, leaves=tuple(leaves), batched=batched, form=form)


def _is_batched(path: str, leaf: Any, first: torch.Tensor) -> bool:
    rows = first.shape[0]
    if not isinstance(leaf, torch.Tensor):
        if not isinstance(leaf, _ATOMS):
            raise OomDoctorError(f"{path} was called with a {type(leaf).__name__}, which may or may not be batched")
        if type(leaf) is int and leaf == rows and rows > 1:
            raise OomDoctorError(f"{path} was called with the number {leaf}, which may be the size of the batch")
        return False
    shape = tuple(leaf.shape)
    square = len(shape) == 2 and shape[0] == shape[1]
    if leaf is first or (shape and shape[0] == rows and not (square and rows > 1)):
        return True
    # A mask of (length, length) is shared by the samples; one of (batch * heads, length, length) or a hidden state of
    # (layers, batch, features) is not, though its first dimension differs.
    if shape and (rows in shape or not (shape[0] == 1 or shape[0] in first.shape[1:] or shape[0] % rows != 0)):
        raise OomDoctorError(
            f"{path} was called with a tensor of shape {shape} beside one of {tuple(first.shape)}: whether it goes "
            "with the batch cannot be told"
        )
    return False


def gathered(path: str, parts: Iterator[tuple[int, Any]], rows: int) -> Any:
    """Return the outputs of the parts, given with their numbers of rows, as one; a tensor never exists twice."""
    count, first = next(parts)
    if torch.is_grad_enabled() or not isinstance(first, torch.Tensor) or first.shape[:1] != (count,):
        counts, outputs = zip((count, first), *parts, strict=True)
        return join(path, outputs, counts)
    is_last = first.ndim == 4 and not first.is_contiguous() and first.is_contiguous(memory_format=torch.channels_last)
    form = torch.channels_last if is_last else torch.contiguous_format
    whole = torch.empty((rows, *first.shape[1:]), dtype=first.dtype, device=first.device, memory_format=form)
    whole[:count] = first
    done, kind = count, (first.dtype, first.shape[1:])
    del first
    for count, part in parts:
        if not isinstance(part, torch.Tensor) or part.shape[:1] != (count,) or (part.dtype, part.shape[1:]) != kind:
            raise OomDoctorError(f"{path} is not split: the outputs for parts of the batch do not fit together")
        whole[done : done + count] = part
        done += count
    return whole


def join(path: str, parts: Sequence[Any], rows: Sequence[int]) -> Any:
    """Return the outputs of the parts as one; raise ``OomDoctorError`` where they are not made of rows for samples."""
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
    items = [_items(path, part) for part in parts]
    if any(one.keys() != items[0].keys() for one in items):
        raise OomDoctorError(f"{path} returns different keys or numbers of values for the parts of the batch")
    whole = {name: join(path, [one[name] for one in items], rows) for name in items[0]}
    cls, is_row = type(first), isinstance(first, tuple | list) and not hasattr(first, "_fields")
    try:
        return cls(whole.values()) if is_row else cls(whole) if isinstance(first, Mapping) else cls(**whole)
    except TypeError as error:
        raise OomDoctorError(f"{path} returns a {cls.__name__}, which cannot be made anew: {error}") from error


def _items(path: str, output: Any) -> Mapping[Any, Any]:
    if isinstance(output, Mapping):
        return output
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        return {field.name: getattr(output, field.name) for field in dataclasses.fields(output) if field.init}
    if isinstance(output, tuple | list) and not isinstance(output, torch.Size):
        return dict(zip(getattr(output, "_fields", range(len(output))), output, strict=True))
    raise OomDoctorError(f"{path} returns a {type(output).__name__}, which cannot be put together from parts")

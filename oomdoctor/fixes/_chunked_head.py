"""A model whose forward takes its loss, with the output layer and the loss in chunks of rows.

``chunked_head(model, 8)`` takes each cross-entropy of a forward of ``model`` in chunks, in a library as well, and has
the gradient of the logits of one chunk at a time: in the backward pass a chunk's logits are made again from what
the output layer was given. How the rows of the loss lie in those of the layer is told by what each function between
them does to numbers of rows in the place of logits: it moves them (``view``, a slice), or it computes (a cast, a
division), which is done again. A few rows are made again in the forward: where they come out otherwise, or the logits
lie in another graph, the loss alone is taken in chunks. Limit: the logits are made whole in the forward, since a model
may return them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final, NamedTuple, cast
from weakref import ref

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

from oomdoctor.fixes import _forward
from oomdoctor.fixes._chunked_loss import arguments_of, longest, why_not
from oomdoctor.fixes._output_layer import TRIED, Replay, comes_out, in_chunks, with_layer

_WIDENS: Final = 2
"""So many times as many outputs as inputs has a layer whose logits are worth making twice."""
_FIRST: Final = 1 << 40
"""Number of the first row: what computes with such numbers does not give one of them."""
_NODES: Final = 8
"""So many nodes of a graph does a function make at most that only moves or casts."""


def chunked_head(model: Any, chunks: int) -> None:
    """Have each cross-entropy that a forward of ``model`` takes made in chunks of rows, its output layer with it.

    Args:
        model: a ``torch.nn.Module`` whose forward takes the loss. A second call changes the number of chunks.
        chunks: how many.

    Raises:
        OomDoctorError: it is compiled, replicated or sharded; raised in a backward pass of which another one is to be
            taken, or where a hook asks for the gradient of the logits.
    """
    _forward.refuse_unless_plain(type(model).__name__, model)
    if type(mark := vars(model).get("forward")) is _Headed:
        mark.chunks = chunks
    else:
        model.forward = _Headed(model, chunks)


class _Headed(_forward.Replaced):
    """The ``forward`` of a module whose losses are taken in chunks."""

    def __init__(self, module: Any, chunks: int) -> None:
        super().__init__(module)
        self.chunks = chunks

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _Follow(self.chunks):
            return self.__wrapped__(*args, **kwargs)


class _Step(NamedTuple):
    """A call of which the first argument is followed: ``function(first, *rest, **options)``."""

    function: Callable[..., Any]
    rest: tuple[Any, ...]
    options: dict[str, Any]
    before: torch.Size
    after: torch.Size


class _Made(NamedTuple):
    """What is known of logits: the call that made many numbers of each row of ``inputs``, and those that came after it.

    Attributes:
        autocast: whether it ran so, and in which type; ``eps``: the last digit of what it made, as a share.
        version: of the logits; another one tells that something was written into them.
        grad_fn: their place in the graph: another one, or None, tells that they were cut out of it.
        passed: the tensors on the way, whose hooks want gradients that there will not be.
    """

    inputs: torch.Tensor
    layer: _Step
    autocast: tuple[bool, torch.dtype]
    eps: float
    steps: tuple[_Step, ...]
    version: int
    grad_fn: Any
    passed: tuple[ref[torch.Tensor], ...]


class _Follow(TorchFunctionMode):
    """Follows what makes logits to the cross-entropies that are taken of them."""

    def __init__(self, chunks: int) -> None:
        super().__init__()
        self._chunks, self._made = chunks, WeakIdKeyDictionary()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one function, in chunks where it is a cross-entropy."""
        kwargs = kwargs or {}
        if func is functional.cross_entropy:
            return self._loss(arguments_of(args, kwargs))
        first = args[0] if args else None
        if not isinstance(first, torch.Tensor) or not torch.is_grad_enabled():
            return func(*args, **kwargs)
        known, before = self._known(first), first.shape
        result = func(*args, **kwargs)
        if _is_linked(result):
            step = _Step(func, tuple(args[1:]), kwargs, before, result.shape)
            if (made := _begun(first, step, result) or (known and _continued(known, step, result))) is not None:
                self._made[result] = made
        return result

    def _known(self, tensor: torch.Tensor) -> _Made | None:
        found: _Made | None = self._made.get(tensor)  # type: ignore[no-untyped-call]
        is_same = found is not None and found.version == tensor._version and found.grad_fn is tensor.grad_fn
        return found if is_same else None

    def _loss(self, given: dict[str, Any]) -> Any:
        if why_not(given) is not None:
            return functional.cross_entropy(**given)
        made = self._known(given["input"]) if torch.is_grad_enabled() else None
        found = None if made is None else _replay(made, given["input"], given["target"])
        if made is None or found is None:
            return in_chunks(given, self._chunks)
        replay, tensors = found
        return with_layer(given, self._chunks, replay, [made.inputs, *tensors])


def _is_linked(result: Any) -> bool:
    """Tell whether it is a tensor of numbers that lies in a graph, and no transform of torch.func wraps."""
    is_float = isinstance(result, torch.Tensor) and result.is_floating_point() and result.grad_fn is not None
    return is_float and not torch._C._functorch.is_functorch_wrapped_tensor(result)


def _begun(first: torch.Tensor, step: _Step, result: torch.Tensor) -> _Made | None:
    """Return what is known of the result of a call that makes many more numbers of each row than it is given."""
    before, after = step.before, step.after
    if len(before) < 2 or after[:-1] != before[:-1] or after[-1] < _WIDENS * before[-1]:
        return None
    device, eps = result.device.type, torch.finfo(result.dtype).eps
    autocast = (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
    return _Made(first, step, autocast, eps, (), result._version, result.grad_fn, (ref(result),))


def _continued(made: _Made, step: _Step, result: torch.Tensor) -> _Made | None:
    """Return what is known of the result of a further call; None where it lies in the graph of another one."""
    node = result.grad_fn
    for _ in range(_NODES):
        if node is made.grad_fn or node is None:
            break
        node = next((one for one, _ in node.next_functions if one is not None), None)
    if node is not made.grad_fn:
        return None
    steps, passed = (*made.steps, step), (*made.passed, ref(result))
    return made._replace(steps=steps, version=result._version, grad_fn=result.grad_fn, passed=passed)


def _replay(made: _Made, logits: torch.Tensor, target: torch.Tensor) -> tuple[Replay, list[torch.Tensor | None]] | None:
    """Return how logits are made again, and the tensors of their layer beside its inputs.

    None where that does not give the logits that there are, which is tried on a few rows.
    """
    leaves, form = pytree.tree_flatten((made.layer.rest, made.layer.options))
    plain = [None if isinstance(one, torch.Tensor) else one for one in leaves]
    tensors = [one if isinstance(one, torch.Tensor) else None for one in leaves]
    devices = [logits.device] if logits.device.type == "cuda" else []
    # Functions of others are run on what they were not made for: whatever that raises, they are not followed.
    with suppress(Exception), torch.random.fork_rng(devices):
        told = _told(made)
        if told is None or told[0].shape[1] != 1 or told[0].numel() != target.numel():
            return None
        rows, computed = told
        found = Replay(made.layer.function, plain, form, made.autocast, rows, computed, made.passed)
        if found.is_watched():
            return None
        if _forward.is_shadow_run():
            return found, tensors
        with torch.no_grad():
            at, within = longest(target)
            few = torch.randint(target.shape[at], (TRIED,), device="cpu")
            chosen = rows.index_select(within, few).squeeze(1).to(logits.device)
            again = found(made.inputs.flatten(0, -2)[chosen], tensors)
            there = logits.index_select(within, few.to(logits.device))
            if comes_out(again, there, made.eps):
                return found, tensors
    return None


def _told(made: _Made) -> tuple[torch.Tensor, tuple[Callable[[torch.Tensor], torch.Tensor], ...]] | None:
    """Return which row each row of logits is of, and what was computed of them, by what each call does to numbers.

    None where a call neither moves rows nor computes in each of them.
    """
    classes, count = made.layer.after[-1], made.layer.before[:-1].numel()
    computed: list[Callable[[torch.Tensor], torch.Tensor]] = []

    def single(leaf: Any) -> Any:
        """One row has one number in the place of its classes; what chooses among rows is brought to them."""
        if isinstance(leaf, torch.Tensor):
            return leaf.cpu()
        return 1 if type(leaf) is int and leaf == classes else leaf

    with _disable_current_modes():
        rows = torch.arange(_FIRST, _FIRST + count, device="cpu").view(*made.layer.before[:-1], 1)
        for step in made.steps:
            moved = None
            with suppress(Exception):
                rest, options = pytree.tree_map(single, (step.rest, step.options))
                moved = step.function(rows, *rest, **options)
            if _are_moved(moved, count, classes, step.after):
                rows = cast("torch.Tensor", moved)
            elif step.after == step.before and not any(map(torch.is_tensor, pytree.tree_leaves(step[1:3]))):
                computed.append(partial(_computed, step))
            else:
                return None
        return rows - _FIRST, tuple(computed)


def _computed(step: _Step, logits: torch.Tensor) -> Any:
    return step.function(logits, *step.rest, **step.options)


def _are_moved(rows: Any, count: int, classes: int, shape: torch.Size) -> bool:
    """Tell whether these are numbers of rows still, in a shape with a single one in the place of the classes."""
    if not isinstance(rows, torch.Tensor) or rows.dtype is not torch.int64 or rows.ndim != len(shape):
        return False
    differ = [pair for pair in zip(rows.shape, shape, strict=True) if pair[0] != pair[1]]
    return differ == [(1, classes)] and bool(((rows >= _FIRST) & (rows < _FIRST + count)).all())

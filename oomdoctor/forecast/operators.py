"""The operators that fake tensors cannot run as they are, and what is done in their place: one table.

Where values decide how large a result is and all of them are known (literals, small draws, integers and masks that were
there before the cell), it is computed for real; else it is made as large as it may be: masks select everything,
``nonzero`` finds all. Where nothing bounds it, it is made as small as it may be, and the forecast says so. Few integers
are drawn for real, because they choose where batches begin. Some meta kernels do not tell what the real ones allocate:
the sums of a CTC loss, losses that keep one number per element, zeros without memory, what fused recurrent layers keep
for their backward. What a kernel takes inside is in ``cost`` (on the host) and in ``device_scratch`` (on CUDA).

Limits: a large draw moves the generator by one number, not by as many as it has. The reserve of cuDNN cannot be asked
for without a GPU: it is an estimate from published figures.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import cache
from math import prod
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from oomdoctor.forecast import values
from oomdoctor.forecast.values import HINT, LIKELY, Handler, is_known, known, named

_aten = torch.ops.aten
_MOST_DRAWN: Final = 1 << 17


# Bools ---------------------------------------------------------------------------------------------------------------


def _hinted(value: bool) -> Handler:
    def handler(func: Any, args: Any, kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        setattr(out, HINT, value)
        return out

    return handler


def _compared(compare: Callable[[Any, Any], bool]) -> Handler:
    def handler(func: Any, args: Any, kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        if args[0].dim() == 0 and isinstance(args[1], (int, float)):
            setattr(out, LIKELY, compare(1, args[1]))
        return out

    return handler


def _keeps_hint(func: Any, args: Any, kwargs: Any) -> Any:
    out = func(*args, **kwargs)
    hint = getattr(args[0], HINT, None)
    if hint is not None and isinstance(out, FakeTensor):
        setattr(out, HINT, hint)
    return out


def _decided_by(value: bool) -> Handler:
    """Return a handler for an operation that gives ``value`` wherever one side has it, whatever the other one is."""

    def handler(func: Any, args: Any, kwargs: Any) -> Any:
        out = _keeps_hint(func, args, kwargs)
        sides = (getattr(side, "constant", None) for side in args[:2])
        # Of integers, none has a bit where the other one has none; all of them are more than True.
        if (out.dtype is torch.bool or not value) and out.numel() and not is_known(out):
            with _disable_current_modes():
                if any(side is not None and bool((side == value).all()) for side in sides):
                    out.constant = torch.full(out.shape, value, dtype=out.dtype)
                    # By this it is forgotten once something is written to it.
                    out.fake_mode.fake_tensor_converter.add_constant_storage_mapping(out)
        return out

    return handler


# Random numbers ------------------------------------------------------------------------------------------------------


def _integers(func: Any, args: Any, kwargs: Any) -> Any:
    """Draw for real where they are few."""
    sizes = [value for value in args if isinstance(value, (list, tuple))] or [args[:1]]
    return _few(func, args, kwargs, prod(sizes[-1]))


def _identity(func: Any, args: Any, kwargs: Any) -> Any:
    """Make it for real where it is small: masks of pairs are made of it."""
    return _few(func, args, kwargs, args[0] * args[-1])


def _few(func: Any, args: Any, kwargs: Any, count: int) -> Any:
    """Run for real what makes so many elements, if they are few; the fake mode keeps the values of what is lifted."""
    if count > _MOST_DRAWN or torch.device(kwargs.get("device") or "cpu").type != "cpu":
        return func(*args, **kwargs)
    with _disable_current_modes():
        made = func(*args, **kwargs)
    return _aten.lift_fresh.default(made)


def _made(func: Any, args: Any, kwargs: Any) -> Any:
    """Make integers and masks for real where they are few: what is written to them is followed then."""
    dtype = kwargs.get("dtype") or (torch.float32 if len(args) < 2 else torch.tensor(args[1]).dtype)
    if dtype.is_floating_point or dtype.is_complex:
        return func(*args, **kwargs)
    return _integers(func, [args[0], *args[1:]], kwargs)


def draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether an operation draws random numbers: none where nothing is dropped, as attention may be told."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    given = named(func, args, kwargs)
    share = given.get("dropout_p", given.get("p", 1.0) if "dropout" in func.__name__ else 1.0)
    return share is None or float(share) > 0


def move_generator(generator: Any) -> None:
    """Draw one number; by this a change of the cell finds out that a forward draws."""
    with _disable_current_modes():
        if generator is None or generator.device.type == "cpu":
            torch.empty(()).uniform_(generator=generator)


# What meta kernels do not tell ---------------------------------------------------------------------------------------


def _reduced(func: Any, args: Any, kwargs: Any) -> Any:
    """Return a number that lies in memory for one per element. Source: ``BinaryOps.cpp`` and ``Loss.cpp`` of ATen."""
    out = func(*args, **kwargs)
    if out.dim():
        return out
    shape = torch.broadcast_shapes(args[0].shape, args[1].shape)  # type: ignore[no-untyped-call]
    return torch.empty(shape, dtype=out.dtype, device=out.device).resize_(())


def _without_memory(_func: Any, args: Any, kwargs: Any) -> Any:
    """Return a tangent that is zero. Source: ``_efficientzerotensor`` in ``TensorFactories.cpp``."""
    return torch.empty((), dtype=kwargs.get("dtype"), device=kwargs.get("device")).expand(args[0])


def _reflectors(_func: Any, args: Any, _kwargs: Any) -> Any:
    """Return what an orthogonal factorisation is kept as, which has no meta kernel: vectors by columns, and scales."""
    *batch, rows, columns = args[0].shape
    return args[0].mT.contiguous().mT, args[0].new_empty((*batch, min(rows, columns)))


_STEPS: Final = (4, 8)
"""Steps from which on the workspace of oneDNN's LSTM grows evenly, as measured with oneDNN 3.12."""
_TENSORS: Final = 7
"""Leading arguments of that layer that are tensors: the input, four weights, the states."""
_KEPT_BY_CUDNN: Final = {0: 2, 1: 2, 2: 5, 3: 6}
"""Vectors of the hidden size that a layer of cuDNN keeps for each step and sample, by mode: RNNs, LSTM, GRU.

Source: pytorch/pytorch#2895, where four layers of hidden size 320 reserved 736,000,000 bytes as an LSTM and 864,000,000
as a GRU (cuDNN of 2017, float32): with the outputs between the layers, 23 and 27 vectors of 25,000 steps times samples.
Of plain RNNs no figure is known: theirs is a guess.
"""


def _recurrent_layer(func: Any, args: Any, kwargs: Any) -> Any:
    """Return a fused LSTM's results with the workspace for its backward, told by two real short runs."""
    *results, workspace = func(*args, **kwargs)
    args = list(named(func, args, kwargs).values())
    steps, *rest = args[0].shape
    shapes = tuple(tuple(tensor.shape) for tensor in args[1:_TENSORS])
    options = tuple(tuple(value) if isinstance(value, list) else value for value in args[_TENSORS:])
    few, more = _STEPS if steps > max(_STEPS) else (steps, steps + 1)
    grad = torch.is_grad_enabled()  # a checkpointed forward keeps none
    first, second = (_workspace_bytes((count, *rest), shapes, args[0].dtype, options, grad) for count in (few, more))
    nbytes = first + (second - first) * (steps - few) // (more - few)
    return (*results, torch.empty(nbytes, dtype=torch.uint8, device=workspace.device))


@cache
def _workspace_bytes(
    input_shape: tuple[int, ...],
    shapes: tuple[tuple[int, ...], ...],
    dtype: torch.dtype,
    options: tuple[Any, ...],
    grad: bool,
) -> int:
    with _disable_current_modes(), torch.set_grad_enabled(grad):
        tensors = [torch.zeros(shape, dtype=dtype) for shape in (input_shape, *shapes)]
        arguments = [list(value) if isinstance(value, tuple) else value for value in options]
        *_, workspace = _aten.mkldnn_rnn_layer.default(*tensors, *arguments)
        return 0 if workspace is None else int(workspace.nbytes)


def _cudnn_layers(func: Any, args: Any, kwargs: Any) -> Any:
    *results, reserve, weights = func(*args, **kwargs)
    given = named(func, args, kwargs)
    if given["train"]:
        x, layers = given["input"], given["num_layers"]
        rows = x.shape[:-1].numel() * (1 + given["bidirectional"])  # steps times samples, packed or not
        vectors = _KEPT_BY_CUDNN[given["mode"]] * layers + layers - 1
        nbytes = vectors * rows * given["hidden_size"] * x.element_size()
        reserve = torch.empty(nbytes, dtype=torch.uint8, device=reserve.device)
    return *results, reserve, weights


def _cudnn_layers_backward(func: Any, args: Any, kwargs: Any) -> Any:
    """Return gradients like what they are of: it has no meta kernel. Source: ``RNN.cpp`` of cuDNN in ATen."""
    given = named(func, args, kwargs)
    grads = [None if one is None else torch.empty_like(one) for one in (given["input"], given["hx"], given["cx"])]
    weights = [torch.empty_like(weight) for weight in given["weight"]] if given["output_mask"][3] else []
    return (*grads, weights)


# The table -----------------------------------------------------------------------------------------------------------


def _table(*rows: tuple[str, Handler]) -> dict[Any, Handler]:
    return {operator_named(name): handler for names, handler in rows for name in names.split()}


def operator_named(name: str) -> Any:
    """Return an operator of ATen by its name and, after a dot, that of its overload."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(_aten, packet), overload or "default")


WORKSPACES: Final = _table(("mkldnn_rnn_layer", _recurrent_layer), ("_cudnn_rnn", _cudnn_layers))
"""Operators that return a workspace for their backward, as the fourth of their results."""
HANDLERS: Final = WORKSPACES | _table(
    ("nonzero", known(values.nonzero)),
    ("masked_select", values.masked_select),
    ("_unique2 unique_dim unique_consecutive", known(values.unique)),
    ("index.Tensor", known(values.index)),
    ("repeat_interleave.Tensor", known(values.repeat_interleave)),
    ("bincount", known(values.bincount)),
    ("_ctc_loss _ctc_loss.Tensor", values.ctc_loss),
    (
        "_ctc_loss_backward _ctc_loss_backward.Tensor",
        lambda _func, args, _kwargs: torch.empty_like(args[1], memory_format=torch.contiguous_format),
    ),
    ("_pack_padded_sequence", values.packed),
    ("_pack_padded_sequence_backward", lambda _func, args, _kwargs: args[0].new_zeros(args[1])),
    ("_is_all_true isfinite", _hinted(True)),
    ("isnan isinf", _hinted(False)),
    *((f"{one.__name__}.Scalar", _compared(one)) for one in (operator.lt, operator.le, operator.gt, operator.ge)),
    *((f"{one.__name__}.Scalar", _compared(one)) for one in (operator.eq, operator.ne)),
    ("any all", _keeps_hint),
    ("logical_or bitwise_or.Tensor", _decided_by(True)),
    ("logical_and bitwise_and.Tensor", _decided_by(False)),
    ("randint randint.generator randint.low randint.low_generator randperm randperm.generator", _integers),
    ("arange arange.start arange.start_step", _integers),
    ("zeros ones full", _made),
    ("eye eye.m", _identity),
    ("mse_loss smooth_l1_loss binary_cross_entropy", _reduced),
    ("_efficientzerotensor", _without_memory),
    ("geqrf", _reflectors),
    ("_cudnn_rnn_backward", _cudnn_layers_backward),
)
"""What runs an operation on fake tensors in place of its own kernel."""
COMPARISONS: Final = (_aten.equal.default, _aten.allclose.default)
"""Operations that answer with a bool, see ``Scalars.compare``."""

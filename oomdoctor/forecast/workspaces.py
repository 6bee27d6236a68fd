"""Memory that kernels return to autograd and that their meta kernels tell nothing of.

The fused LSTM of oneDNN keeps a workspace for its backward that is many times its output; its meta kernel returns one
of zero bytes. From a few steps on the workspace grows by the same amount with every time step, so two real short runs
tell what it is over many. The reserve of cuDNN's layers cannot be asked for without a GPU: it is an estimate from the
shapes, of figures that someone has published, and the margin of such a forecast is the widest.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Final

import torch
from torch.utils._python_dispatch import _disable_current_modes

_aten = torch.ops.aten
_FEW, _MORE = 4, 8
"""Steps from which on the workspace grows evenly, as measured with oneDNN 3.12."""
_TENSORS: Final = 7
"""Leading arguments of the layer that are tensors: the input, four weights, the states."""


def _recurrent_layer(func: Any, args: Any, kwargs: Any) -> Any:
    *results, workspace = func(*args, **kwargs)
    if kwargs:
        return (*results, workspace)
    steps, *rest = args[0].shape
    shapes = tuple(tuple(tensor.shape) for tensor in args[1:_TENSORS])
    options = tuple(tuple(value) if isinstance(value, list) else value for value in args[_TENSORS:])
    counts = (steps,) if steps <= _MORE else (_FEW, _MORE)
    grad = torch.is_grad_enabled()  # a checkpointed forward keeps none
    found = [_workspace_bytes((count, *rest), shapes, args[0].dtype, options, grad) for count in counts]
    nbytes = found[0] + (found[-1] - found[0]) * (steps - counts[0]) // (_MORE - _FEW)
    return (*results, torch.empty(nbytes, dtype=torch.uint8, device=workspace.device))


@cache
def _workspace_bytes(
    input_shape: tuple[int, ...],
    shapes: tuple[tuple[int, ...], ...],
    dtype: torch.dtype,
    options: tuple[Any, ...],
    grad: bool,
) -> int:
    """Return the size of the workspace of a real run."""
    with _disable_current_modes(), torch.set_grad_enabled(grad):
        tensors = [torch.zeros(shape, dtype=dtype) for shape in (input_shape, *shapes)]
        arguments = [list(value) if isinstance(value, tuple) else value for value in options]
        *_, workspace = _aten.mkldnn_rnn_layer.default(*tensors, *arguments)
        return 0 if workspace is None else int(workspace.nbytes)


_KEPT_BY_CUDNN: Final = {0: 2, 1: 2, 2: 5, 3: 6}
"""Vectors of the hidden size that a layer of cuDNN keeps for each step and sample, by mode: RNNs, LSTM, GRU.

Source: pytorch/pytorch#2895, where four layers of hidden size 320 reserved 736,000,000 bytes as an LSTM and 864,000,000
as a GRU (cuDNN of 2017, float32): with the outputs between the layers, 23 and 27 vectors of 25,000 steps times samples.
Of plain RNNs no figure is known: theirs is a guess.
"""


def _cudnn_layers(func: Any, args: Any, kwargs: Any) -> Any:
    output, hidden, cell, reserve, weights = func(*args, **kwargs)
    named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    if not named["train"]:
        return output, hidden, cell, reserve, weights
    x, layers, directions = named["input"], named["num_layers"], 1 + named["bidirectional"]
    rows = x.shape[:-1].numel()  # steps times samples, packed or not
    vectors = _KEPT_BY_CUDNN[named["mode"]] * layers + layers - 1
    nbytes = vectors * directions * rows * named["hidden_size"] * x.element_size()
    return output, hidden, cell, torch.empty(nbytes, dtype=torch.uint8, device=reserve.device), weights


def _cudnn_layers_backward(func: Any, args: Any, kwargs: Any) -> Any:
    """Return gradients like what they are of: it has no meta kernel. Source: ``RNN.cpp`` of cuDNN in ATen."""
    named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    given = named["input"], named["hx"], named["cx"]
    grads = [torch.empty_like(one) if one is not None else None for one in given]
    weights = [torch.empty_like(weight) for weight in named["weight"]] if named["output_mask"][3] else []
    return (*grads, weights)


GRADIENTS: Final[dict[Any, Callable[[Any, Any, Any], Any]]] = {
    _aten._cudnn_rnn_backward.default: _cudnn_layers_backward,
}
"""Operators of the gradients of those layers, in the same form."""

WORKSPACES: Final[dict[Any, Callable[[Any, Any, Any], Any]]] = {
    _aten.mkldnn_rnn_layer.default: _recurrent_layer,
    _aten._cudnn_rnn.default: _cudnn_layers,
}
"""Operations to be run on fake tensors by a function of their own, ``(func, args, kwargs)``; of what they return, the
workspace is the fourth."""

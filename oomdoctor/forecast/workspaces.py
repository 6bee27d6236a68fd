"""Memory that kernels return to autograd and that their meta kernels tell nothing of.

The fused LSTM of oneDNN keeps a workspace for its backward that is many times its output; its meta kernel returns one
of zero bytes. The workspace grows by the same amount with every time step, so two real runs over one step and over two
tell what it is over many. Limits: oneDNN's layer on the CPU in training; the libraries of GPUs are not asked.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Final

import torch
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["WORKSPACES"]

_aten = torch.ops.aten
_TRAIN: Final = 15
_TENSORS: Final = 7
"""Leading arguments of the layer that are tensors: the input, four weights, the states; ``train`` is the sixteenth."""


def _recurrent_layer(func: Any, args: Any, kwargs: Any) -> Any:
    *results, workspace = func(*args, **kwargs)
    if kwargs or not args[_TRAIN]:
        return (*results, workspace)
    steps, *rest = args[0].shape
    shapes = tuple(tuple(tensor.shape) for tensor in args[1:_TENSORS])
    options = tuple(tuple(value) if isinstance(value, list) else value for value in args[_TENSORS:])
    one, two = (_workspace_bytes((count, *rest), shapes, args[0].dtype, options) for count in (1, 2))
    nbytes = one + (steps - 1) * (two - one)
    return (*results, torch.empty(nbytes, dtype=torch.uint8, device=workspace.device))


@cache
def _workspace_bytes(
    input_shape: tuple[int, ...], shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype, options: tuple[Any, ...]
) -> int:
    """Return the size of the workspace of a real run."""
    with _disable_current_modes(), torch.enable_grad():
        tensors = [torch.zeros(shape, dtype=dtype) for shape in (input_shape, *shapes)]
        arguments = [list(value) if isinstance(value, tuple) else value for value in options]
        *_, workspace = _aten.mkldnn_rnn_layer.default(*tensors, *arguments)
        return int(workspace.nbytes)


WORKSPACES: Final[dict[Any, Callable[[Any, Any, Any], Any]]] = {_aten.mkldnn_rnn_layer.default: _recurrent_layer}
"""Operations to be run on fake tensors by a function of their own: ``(func, args, kwargs)``."""

"""What releases of torch differ in, as marks of the tests that need it: this torch is asked, never its version."""

from __future__ import annotations

from contextlib import suppress
from inspect import signature
from typing import Any, Final

import pytest
import torch
from torch._C._dynamo import eval_frame
from torch._decomp import meta_table
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from oomdoctor.evidence.owners import C_COUNTS

TELLS_SAVED: Final = hasattr(torch._C._autograd.SavedTensor, "data")

tells_saved: Final = pytest.mark.skipif(not TELLS_SAVED, reason="this torch does not tell what a graph has saved")
TELLS_SHAPES: Final = hasattr(torch.autograd.graph.Node, "_input_metadata")
tells_shapes: Final = pytest.mark.skipif(
    not TELLS_SHAPES, reason="this torch does not tell the shape of what a node of a graph has made"
)
tells_holders: Final = pytest.mark.skipif(
    not C_COUNTS, reason="this torch does not tell whether C++ alone holds what a view was made of"
)
keeps_weak_references: Final = pytest.mark.skipif(
    not C_COUNTS, reason="in this torch, garbage takes along weak references to tensors that C++ holds on to"
)
tells_compiled: Final = pytest.mark.skipif(
    not hasattr(eval_frame, "get_eval_frame_callback"), reason="this torch does not tell that compiled code runs"
)
leads_operators: Final = pytest.mark.skipif(
    not hasattr(TorchDispatchMode, "supports_higher_order_operators"),
    reason="operators of higher order ask each mode for a rule of its own in this torch",
)
loads_out_of_order: Final = pytest.mark.skipif(
    "in_order" not in signature(DataLoader).parameters, reason="loaders of this torch keep the order"
)
has_accelerator: Final = pytest.mark.skipif(not hasattr(torch, "accelerator"), reason="this torch has no accelerator")
fakes_have_an_index: Final = pytest.mark.skipif(
    not hasattr(FakeTensor, "_normalize_fake_device"), reason="fakes of this torch take any device for theirs"
)
fakes_know_all: Final = pytest.mark.skipif(
    torch.ops.aten._transformer_encoder_layer_fwd.default not in meta_table,
    reason="fakes of this torch lack some operators: a cell that needs one is refused with its name",
)


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def _makes_subclasses() -> bool:
    with suppress(RuntimeError), _Mode():
        return torch.empty(0).as_subclass(type("Named", (torch.Tensor,), {})) is not None
    return False


makes_subclasses: Final = pytest.mark.skipif(
    not _makes_subclasses(), reason="below a mode, this torch makes no subclass of a tensor"
)


def no_default_device() -> None:
    """Take back what ``set_default_device`` has set; torch 2.4 fails where it is then asked for the default."""
    torch.set_default_device(None)
    with suppress(AttributeError):
        if torch._GLOBAL_DEVICE_CONTEXT.device_context is None:
            del torch._GLOBAL_DEVICE_CONTEXT.device_context

"""What a dry run does instead: the functions of torch and Python that would not work, or would do something.

Everything here is done to a process that was forked to be thrown away; nothing is ever put back.
"""

from __future__ import annotations

import copy
import functools
import os
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import TYPE_CHECKING, Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_iter, tree_map, tree_map_only

from oomdoctor.forecast.loaders import replace_loaders
from oomdoctor.forecast.tracker import raw_data
from oomdoctor.model.memory import Role
from oomdoctor.sandbox.restrictions import do_nothing, keep_to_itself

if TYPE_CHECKING:
    from oomdoctor.forecast.loop_model import LoopModel
    from oomdoctor.forecast.tracker import Tracker

# The modules as things whose attributes may be assigned.
_torch: Any = torch
_Fake: Any = FakeTensor

_OWN: Final = __name__.partition(".")[0]


def replace_all(tracker: Tracker, loops: LoopModel, shell: Any) -> None:
    """Put every stand-in into place in this process."""
    replace_loaders(tracker, loops)
    _replace_unpacking()
    _follow_training(loops)
    _scale_gradients()
    _read_values(tracker)
    _repoint_data(tracker)
    _move_modules()
    _copy_deeply()
    _make_subclasses(tracker)
    _keep_files(tracker)
    _follow_threads(tracker)
    _hide_fakes()
    _compile_nothing(tracker)
    keep_to_itself(shell)


def _follow_training(loops: LoopModel) -> None:
    register_optimizer_step_post_hook(lambda optimizer, _args, _kwargs: loops.stepped(optimizer))
    init, backward = Optimizer.__init__, torch.autograd.backward

    def counted_init(self: Any, *args: Any, **kwargs: Any) -> None:
        loops.optimizers += 1
        init(self, *args, **kwargs)

    def counted_backward(*args: Any, **kwargs: Any) -> None:
        loops.backward_begins()
        try:
            backward(*args, **kwargs)
        finally:
            loops.backward_ended()

    _torch.optim.Optimizer.__init__ = counted_init
    _torch.autograd.backward = counted_backward


def _scale_gradients() -> None:
    """Let a scaler take every step: whether a gradient is finite is not known here, and a step not taken shows less."""

    def step(_scaler: Any, optimizer: Any, _state: Any, *args: Any, **kwargs: Any) -> Any:
        return optimizer.step(*args, **kwargs)

    _torch.amp.GradScaler._maybe_opt_step = step


def _read_values(tracker: Tracker) -> None:
    """Let whole tensors be read: the true values where there are any, otherwise ones in the shape they would have."""
    read_numpy, read_list = torch.Tensor.numpy, torch.Tensor.tolist

    def as_numpy(tensor: torch.Tensor, **kwargs: Any) -> Any:
        import numpy as np

        with _disable_current_modes():
            values = tracker.values_of(tensor)
            if values is not None:
                array = read_numpy(values, **kwargs)
            else:
                array = np.ones(tuple(tensor.shape), torch.empty(0, dtype=tensor.dtype).numpy().dtype)
            if values is not tensor:  # a true array would share the tensor's memory, and keep it alive
                fake = tensor if isinstance(tensor, FakeTensor) else tracker.twin(tensor)
                weakref.finalize(array, do_nothing, fake.untyped_storage())
        return array

    def as_list(tensor: torch.Tensor) -> Any:
        values = tracker.values_of(tensor)
        if values is not None:
            with _disable_current_modes():
                return read_list(values)
        value = True if tensor.dtype is torch.bool else 1.0 if tensor.dtype.is_floating_point else 1
        return _nested(tuple(tensor.shape), value)

    def formatted(tensor: torch.Tensor, spec: str) -> str:
        return format(tensor.item(), spec) if tensor.dim() == 0 else "tensor(…)"

    for cls in (_torch.Tensor, _Fake):
        cls.numpy, cls.tolist, cls.__format__ = as_numpy, as_list, formatted
        cls.__repr__ = lambda self, **_kwargs: f"tensor(…, size={tuple(self.shape)})"
        cls.pin_memory = lambda self, *_args, **_kwargs: self


def _nested(shape: tuple[int, ...], value: Any) -> Any:
    return [_nested(shape[1:], value) for _ in range(shape[0])] if shape else value


def _repoint_data(tracker: Tracker) -> None:
    """Let ``.data`` of a real tensor be assigned a fake one."""

    def assign(tensor: Any, value: Any) -> None:
        if isinstance(value, FakeTensor) and not isinstance(tensor, FakeTensor):
            tracker.repoint(tensor, value)
        else:
            raw_data.__set__(tensor, value)

    _torch.Tensor.data = property(tracker.data_of, assign)


def _move_modules() -> None:
    """Convert parameters through ``.data`` alone: ``Module._apply`` makes new ones of what is fake."""

    def apply(module: Any, fn: Callable[[Any], Any], recurse: bool = True) -> Any:
        if recurse:
            for child in module.children():
                child._apply(fn)
        for name, parameter in module._parameters.items():
            if parameter is not None:
                with torch.no_grad():
                    data = fn(parameter)
                    is_meta = "meta" in (data.device.type, parameter.device.type)
                    if is_meta and isinstance(parameter, FakeTensor):  # of no such data, says torch
                        module._parameters[name] = torch.nn.Parameter(data, parameter.requires_grad)
                        continue
                    parameter.data = data
                    if parameter.grad is not None:
                        parameter.grad = fn(parameter.grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = fn(buffer)
        return module

    _torch.nn.Module._apply = apply


@dataclass(slots=True)
class _Saved:
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Saved:
        return cls(tensor.shape, tensor.dtype, tensor.device)


def _keep_files(tracker: Tracker) -> None:
    """Let what the cell saves and loads again come back with tensors of the same shapes, though nothing is written.

    What it loads from a file that is there is read, and counts from then on. Objects that are not made of dicts, lists
    and tensors are loaded as what they are at that time, if they are still alive.
    """
    by_path: dict[str, Any] = {}
    by_buffer: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
    load = torch.load

    def place(file: Any) -> tuple[Any, Any]:
        path = file if isinstance(file, (str, os.PathLike)) else getattr(file, "name", None)
        return (by_path, os.path.realpath(path)) if isinstance(path, (str, os.PathLike)) else (by_buffer, file)

    def save(obj: Any, f: Any, *_args: Any, **_kwargs: Any) -> None:
        places, key = place(f)
        is_one = isinstance(obj, (torch.Tensor, dict, list, tuple))
        places[key] = tree_map_only(torch.Tensor, _Saved.of, obj) if is_one else weakref.ref(obj)

    def loaded(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        places, key = place(f)
        if key not in places:
            found = load(f, map_location, *args, **kwargs)
            for leaf in tree_iter(found):
                if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu":
                    tracker.hold_real(leaf, Role.USER_TENSOR)
            return found
        kept = places[key]
        if isinstance(kept, weakref.ref):
            if kept() is None:
                raise FileNotFoundError("what was saved here is not kept in a forecast")
            return copy.deepcopy(kept())

        def made(leaf: Any) -> Any:
            if not isinstance(leaf, _Saved):
                return leaf
            where = map_location if isinstance(map_location, (str, torch.device)) else leaf.device
            return torch.empty(leaf.shape, dtype=leaf.dtype, device=where)

        return tree_map(made, kept)

    _torch.save, _torch.load = save, loaded


def _follow_threads(tracker: Tracker) -> None:
    """Have what the cell does in threads of its own run on fakes too: modes are those of one thread."""
    run = threading.Thread.run

    def followed(thread: threading.Thread) -> None:
        target = getattr(thread, "_target", None)
        if str(getattr(target, "__module__", "")).partition(".")[0] == _OWN:
            run(thread)
            return
        with tracker.fake_mode, tracker:
            run(thread)

    cls: Any = threading.Thread
    cls.run = followed


def _copy_deeply() -> None:
    def deepcopy(tensor: Any, memo: dict[int, Any]) -> Any:
        if id(tensor) in memo:
            return memo[id(tensor)]
        if not tensor.is_leaf:
            raise RuntimeError("Only Tensors created explicitly by the user support the deepcopy protocol")
        with torch.no_grad():
            twin = tensor.detach().clone()
        if isinstance(tensor, torch.nn.Parameter):
            twin = torch.nn.Parameter(twin, tensor.requires_grad)
        else:
            twin.requires_grad_(tensor.requires_grad)
        memo[id(tensor)] = twin
        if tensor.grad is not None and not isinstance(tensor, torch.nn.Parameter):
            twin.grad = copy.deepcopy(tensor.grad, memo)
        return twin

    for cls in (_torch.Tensor, _torch.nn.Parameter, _Fake):
        cls.__deepcopy__ = deepcopy


def _hide_fakes() -> None:
    """Keep libraries from taking the way that they take under export when they see fake tensors.

    transformers' ``is_tracing`` looks for this name; it would materialise attention masks.
    """
    _torch._subclasses.FakeTensor = type("FakeTensor", (), {})


def _compile_nothing(tracker: Tracker) -> None:
    """Run as it is what is compiled in a real run, and note where it comes to that."""

    def uncompiled(model: Any = None, **_kwargs: Any) -> Any:
        if model is None:
            return uncompiled
        if not isinstance(model, FunctionType):
            tracker.is_uncompiled = True
            return model

        @functools.wraps(model)
        def run(*args: Any, **kwargs: Any) -> Any:
            tracker.is_uncompiled = True
            return model(*args, **kwargs)

        return run

    _torch.compile = uncompiled
    frames: Any = sys.modules.get("torch._dynamo.eval_frame")
    if frames is None or not hasattr(torch.compiler, "set_stance"):
        return
    torch.compiler.set_stance("force_eager")
    answered = frames._callback_from_stance

    def noted(callback: Any) -> Any:
        # Code of an earlier cell, compiled there; of code that is kept from being compiled there is nothing to call.
        tracker.is_uncompiled = tracker.is_uncompiled or callable(callback)
        return answered(callback)

    frames._callback_from_stance = noted


def _replace_unpacking() -> None:
    """Unpack in Python, by the operations that the compiled code would use; it writes lengths into memory.

    Source: ``_pad_packed_sequence`` in ``aten/src/ATen/native/PackedSequence.cpp``.
    """
    _torch._VF._pad_packed_sequence = _padded


def _padded(
    data: torch.Tensor, sizes: torch.Tensor, batch_first: bool, padding: float, total: int
) -> tuple[torch.Tensor, torch.Tensor]:
    with _disable_current_modes():
        counts = sizes.tolist()
        lengths = (sizes[:, None] > torch.arange(counts[0])[None, :]).sum(0)
    steps = max(total, len(counts))
    padded = data.new_full((steps, counts[0], *data.shape[1:]), padding)
    begin = offset = 0
    for step in range(1, len(counts) + 1):
        if step == len(counts) or counts[step] != counts[begin]:
            number = (step - begin) * counts[begin]
            part = data[offset : offset + number].view(step - begin, counts[begin], *data.shape[1:])
            padded[begin:step, : counts[begin]].copy_(part)
            begin, offset = step, offset + number
    return (padded.transpose(0, 1) if batch_first else padded), lengths


def _make_subclasses(tracker: Tracker) -> None:
    """Make real tensors of the user's own classes, whose data fakes stand for: no fake can become one of them.

    A tensor with a graph stays what it is, because a new one would have none.
    """
    make = torch.Tensor._make_subclass

    def made(cls: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(data, FakeTensor) or issubclass(cls, FakeTensor):
            return make(cls, data, *args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            with _disable_current_modes():
                without_memory = torch.empty((), dtype=data.dtype).expand(data.shape)
                found = make(cls, without_memory, *args, **kwargs)
            tracker.repoint(found, data)
        return found

    def as_subclass(tensor: Any, cls: Any) -> Any:
        if not isinstance(tensor, FakeTensor):
            return plain(tensor, cls)
        return tensor if tensor.requires_grad else made(cls, tensor)

    plain = torch.Tensor.as_subclass
    _torch.Tensor._make_subclass, _torch.Tensor.as_subclass = staticmethod(made), as_subclass

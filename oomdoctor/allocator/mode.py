"""Shows the virtual accelerator every operation of a thread, and raises its refusals in CUDA's place.

A dispatch mode stands below autograd and autocast: it sees what is really run, in forward and backward. Modes of the
user's, above or below it, go on working, and so do tensor subclasses with operations of their own. What an operation
is about to allocate is foreseen, so that what cannot fit is refused before the host pays for it: without that a tensor
of 40 GiB on a simulated device of 512 MiB would first be computed, on a machine that may have 8 GiB.

Limits: what a higher-order operator (``torch.cond``, ``flex_attention``) runs inside is seen by its results alone.
Foreseen are operations of ATen on plain CPU tensors whose result sizes follow from their argument sizes.
"""

from __future__ import annotations

import math
import os
import re
import warnings
from collections.abc import Hashable, Iterable, Iterator
from functools import cache
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Final

import torch
from torch._C._dynamo import eval_frame
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from oomdoctor.allocator.caching import OutOfSpace

if TYPE_CHECKING:
    from oomdoctor.allocator.device import VirtualAccelerator

_HOST_REFUSED: Final = re.compile(r"DefaultCPUAllocator: .*you tried to allocate (\d+) bytes")
_CAN_HIDE_FROM_DYNAMO: Final = hasattr(eval_frame, "set_code_exec_strategy")
_running_compiled: Final = getattr(eval_frame, "get_eval_frame_callback", lambda: None)
_WIDEST_ITEM: Final = 16
_LARGE: Final = 1 << 20
_MOST_FORESEEN: Final = 1 << 16
"""So many sizes are remembered: a training with lengths of all kinds has no end of them."""
TELLING: Final = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
"""Types of arguments that tell, beside the sizes of tensors, how large a result is."""
_UNFORESEEABLE: Final = (RuntimeError, TypeError, ValueError, IndexError)
_PRODUCTS: Final = frozenset({"aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm"})
_UNCOMPILED: Final = (
    "torch.compile: on the simulated GPU compiled functions run uncompiled, so that every allocation is counted; "
    "call torch._dynamo.reset() after it is switched off to have them compiled again"
)


class CountingMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation of its thread below autograd, and counts what it returns."""

    supports_higher_order_operators = True

    def __init__(self, device: VirtualAccelerator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self._process = os.getpid()
        self._warned = False
        self._foreseen: dict[Hashable, tuple[int, ...]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Torch's own wrapper imports torch._dynamo (a second) and its frames keep the arguments of a failed operation
        # alive in the traceback; _hide_from_dynamo below does the same without either.
        return not _CAN_HIDE_FROM_DYNAMO

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if types and any(map(_dispatches_itself, types)):
            return NotImplemented  # its own operations on plain tensors come back here
        kwargs = kwargs or {}
        if os.getpid() != self._process:
            return func(*args, **kwargs)
        if (compiling := _running_compiled()) is not None:
            eval_frame.set_eval_frame(None)
        try:
            if compiling is not None and not self._warned:
                self._warned = True
                warnings.warn(_UNCOMPILED, stacklevel=3)
            if stays_whole(func, args):
                return run_apart(func, self, args, kwargs)
            self._foresee(func, types, args, kwargs)
            result = func(*args, **kwargs)
            self.device.count(result)
            return result
        except OutOfSpace as full:
            failure = self.device.failure(full)
        except RuntimeError as error:
            full_too = self._refused_by_device_too(error)
            if full_too is None:
                raise
            failure = self.device.failure(full_too)
        finally:
            # A real device's failure keeps neither the operands nor the result alive: no frame of ours may.
            args = kwargs = result = None
            if compiling is not None:
                eval_frame.set_eval_frame(compiling)
        try:
            raise failure
        finally:
            del failure  # else this frame and its error would hold one another, and the program's frames with them

    def _foresee(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise before the host works for a result that cannot fit."""
        if types or most_bytes(func, args) <= self.device.headroom():
            return
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            return
        key = (func, torch.get_default_dtype(), *_described(args), *kwargs, *_described(kwargs.values()))
        sizes = self._foreseen.get(key)
        if sizes is None:
            with _disable_current_modes():  # not shown to the user's own modes
                sizes = foreseen_bytes(func, args, kwargs)
            if None not in key and len(self._foreseen) < _MOST_FORESEEN:
                self._foreseen[key] = sizes
        if sum(sizes) > self.device.headroom():
            self.device.check_room(sizes)

    def _refused_by_device_too(self, error: RuntimeError) -> OutOfSpace | None:
        """Return the device's refusal of what the host had no memory for; None where the device had room for it."""
        match = _HOST_REFUSED.search(str(error))
        if match is None:
            return None
        try:
            self.device.check_room([int(match[1])])
        except OutOfSpace as full:
            return full.with_traceback(None)
        return None


def _dispatches_itself(kind: type) -> bool:
    """Whether tensors of ``kind`` wrap others and have operations of their own; torch's fake ones are let through."""
    own = kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__  # type: ignore[attr-defined]
    return own and not kind.__module__.startswith("torch._subclasses")


def _hide_from_dynamo(function: Any) -> None:
    """Have torch.compile run the frames of ``function`` as they are."""
    strategy = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT)
    eval_frame.set_code_exec_strategy(function.__code__, strategy)


if _CAN_HIDE_FROM_DYNAMO:
    _hide_from_dynamo(CountingMode.__torch_dispatch__)


def _described(values: Iterable[Any]) -> Iterator[Hashable]:
    """Yield what tells the sizes that are made of arguments, None for one of which it cannot be told."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield (value.size(), value.stride(), value.dtype) if value.layout is torch.strided else None
        elif isinstance(value, list | tuple):
            yield len(value)
            yield from _described(value)
        elif type(value) in TELLING:
            yield type(value).__name__, value  # True is 1, and makes results of another type
        else:
            yield None


def most_bytes(func: Any, args: tuple[Any, ...]) -> int:
    """Return bytes that the results of ``func`` hardly exceed: cheap, and mostly far too high.

    No result of an operation has more elements than its tensor arguments multiplied (an outer product), or than the
    sizes that it is given multiplied. Zero for operations that only write in place or make views.
    """
    if not _returns_new_memory(func):
        return 0
    elements = 1
    for value in args:
        kind = type(value)
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            elements *= value.numel() or 1
        elif kind is list or kind is tuple:
            elements *= _elements_of(value)
        elif kind is int and value > 1:
            elements *= value
    if elements > _LARGE:
        elements = _tighter(func, [value for value in args if isinstance(value, torch.Tensor)], elements)
    return elements * _WIDEST_ITEM


def foreseen_bytes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    """Return the bytes of the results of ``func`` one by one, as its meta kernel tells them; () where it cannot.

    Call it outside of dispatch modes. No data is read, no random number drawn.
    """
    if any(argument.name == "device" for argument in func._schema.arguments):
        device = kwargs.get("device")
        if device is not None and device.type != "cpu":
            return ()
        kwargs = {**kwargs, "device": torch.device("meta")}
    try:
        args, kwargs = tree_map(_as_meta, args), tree_map(_as_meta, kwargs)
        results = func(*args, **kwargs)
    except _UNFORESEEABLE:
        return ()
    results = [result for result in tree_leaves(results) if type(result) is torch.Tensor]
    # Some views say of themselves that they are new: ``aten::_unsafe_view``, which each linear layer makes.
    given = {_storage(one) for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)} - {None}
    fresh = [result for result in results if _storage(result) not in given]
    return tuple(result.numel() * result.element_size() for result in fresh)


def _storage(tensor: torch.Tensor) -> int | None:
    """Return the storage of a tensor by its address; a sparse one has none."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else None


def _tighter(func: Any, tensors: list[torch.Tensor], elements: int) -> int:
    """Return the elements of the result where its shape is simple to tell, which is so for most operations run."""
    if func._schema.name in _PRODUCTS:
        left, right = tensors[-2:]
        return left.numel() // max(left.shape[-1], 1) * right.shape[-1]
    if torch.Tag.pointwise in func.tags and tensors:
        sizes = zip_longest(*(reversed(tensor.shape) for tensor in tensors), fillvalue=1)
        return math.prod(map(max, sizes))
    return elements


@cache
def _returns_new_memory(func: Any) -> bool:
    """Whether some result is a fresh tensor, by the schema, and every argument can be stood in for."""
    schema = getattr(func, "_schema", None)  # a higher-order operator has none
    if schema is None or func.namespace != "aten" or schema.name.startswith("aten::_foreach"):
        return False
    return any(returned.alias_info is None and "Tensor" in str(returned.type) for returned in schema.returns)


def _elements_of(values: list[Any] | tuple[Any, ...]) -> int:
    if values and type(values[0]) is int:
        return math.prod(size for size in values if size > 0)
    return max(sum(value.numel() for value in values if isinstance(value, torch.Tensor)), 1)


def _as_meta(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")


# Composite operations -------------------------------------------------------------------------------------------------

# Mostly autograd takes these apart above every mode. Under ``inference_mode``, and of tensors that were made there, it
# is out of the way, and what is allocated inside of them would not be seen.

_COMPOSITE: Final = torch._C.DispatchKey.CompositeImplicitAutograd


def stays_whole(func: Any, args: Iterable[Any]) -> bool:
    """Whether an operation that is to be taken apart has come to a mode as it is."""
    if not isinstance(func, torch._ops.OpOverload):
        return False
    is_out_of_the_way = torch.is_inference_mode_enabled() or any(
        isinstance(one, torch.Tensor) and one.is_inference() for one in args
    )
    return is_out_of_the_way and _is_composite(func)


def run_apart(func: Any, mode: Any, args: Any, kwargs: Any) -> Any:
    """Run such an operation so that ``mode``, which it has come to, sees what is inside."""
    with mode:
        return func._op_dk(_COMPOSITE, *args, **kwargs)


@cache
def _is_composite(func: Any) -> bool:
    """Whether compiled code takes it apart. One that Python alone can take apart has a kernel of its own."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return has_kernel(func.name(), "CompositeImplicitAutograd") and not has_kernel(func.name(), "CPU")

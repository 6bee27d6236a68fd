"""A device that this machine lacks, or must not touch, in a dry run: fake tensors are relabelled.

Fake tensors carry a device of their own, and the fake mode follows it through every operation: it says where results
lie and refuses what mixes devices, as CUDA does. Only below Python is there nothing behind such a device. So every fake
is built with the keys of the CPU and compiled code is told that it lies there, while Python code is told the truth of
the dry run: ``tensor.device`` is ``cuda:0``. Moves between devices, which compiled code would take for none, are made
here. What else Python can ask of a device is in ``device_calls``, what operators do differently there in
``device_kernels`` and ``device_autocast``; ``check`` proves all of it before a number is believed.

Limits: one device. Storages of the device and of the host are counted in ledgers of their own.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, Final

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import _disable_current_modes

from oomdoctor.errors import ForecastError
from oomdoctor.forecast.device_scratch import scratch
from oomdoctor.forecast.live_storages import Ledger
from oomdoctor.forecast.tracker import NoDevice, Tracker
from oomdoctor.sandbox.card import cublas_workspace_bytes
from oomdoctor.sandbox.copies import one_sentence

if TYPE_CHECKING:
    from oomdoctor.sandbox.card import Card

_WORDS: Final = (
    *("not linked with support for", "not compiled with", "without ATen_", "Found no NVIDIA driver"),
    "driver version is insufficient",  # CUDA's own, where there is none
)
"""What torch says where there is no such device."""

_CPU: Final = torch.device("cpu")
_META: Final = torch.device("meta")
_aten = torch.ops.aten
_QUERY = torch.ops.prim.device.default

# The classes as things whose attributes may be assigned.
_Tensor: Any = torch.Tensor
_Fake: Any = FakeTensor
_Mode: Any = FakeTensorMode
_Module: Any = fake_tensor
_raw_to = torch.Tensor.to
_raw_device: Any = torch._C.TensorBase.device


def lacking(error: BaseException) -> str | None:
    """Return whether ``error`` tells of the lack of ``cuda``, of ``another`` device, or of something else: None."""
    text = one_sentence(error)
    if not isinstance(error, NoDevice) and not any(words in text for words in _WORDS):
        return None
    return "cuda" if "cuda" in text.lower() or "NVIDIA" in text else "another"


class DeviceTracker(Tracker):  # type: ignore[no-untyped-call]
    """A tracker whose ledger counts what lies on a device.

    Compiled code that makes a tensor "where that one is" asks that one first, is told the CPU, and asks for a tensor
    there. So the last tensor that it asked is remembered with the call that Python was at: within the same call, it
    is that tensor's device that is meant. A frame that has ended leaves its address to another, so that a call is over
    as soon as any other asks for something.
    """

    depth = 2

    def __init__(self, ledger: Ledger, card: Card, *, asks_host: bool = False) -> None:
        super().__init__(ledger, of_card=True)
        self.card = card
        self.workspaces: Any = None
        self.ledgers["cuda"] = Ledger()
        self.ledger = self.ledgers["cpu" if asks_host else "cuda"]
        self._asked: tuple[torch.device, tuple[Any, ...]] | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _QUERY:
            self._asked = args[0].fake_device, _place(sys._getframe(1))
            return _answer(args)
        if self._asked is not None:
            device, place = self._asked
            if place != _place(sys._getframe(1)):
                self._asked = None
            elif kwargs and kwargs.get("device") == _CPU:
                kwargs = kwargs | {"device": device}
        return super().__torch_dispatch__(func, types, args, kwargs)

    def turns(self, func: Any, args: Any, kwargs: Any, out: Any) -> list[tuple[int, ...]]:
        """Return what an operation on the device takes from its allocator for itself. See ``device_scratch``."""
        fakes = (one for one in (*args[:2], out) if isinstance(one, FakeTensor))
        if not any(fake.fake_device.type == "cuda" for fake in fakes):
            return []
        self.workspaces.follow(func)
        return scratch(self.card, func, args, kwargs, out)


def _place(frame: FrameType) -> tuple[CodeType, int, int]:
    return frame.f_code, id(frame), frame.f_lasti


def emulate(tracker: DeviceTracker) -> None:
    """Give this process the device of ``tracker``, for good; a ``ForecastError`` says why that does not work."""
    from oomdoctor.forecast import device_autocast, device_kernels
    from oomdoctor.sandbox import device_calls
    from oomdoctor.sandbox.card import mend_autograd

    card = tracker.card
    if card.held is not None or card.flag is not None:
        mend_autograd(card)
    _build_on_cpu(card)
    _tell_of_device(tracker)
    _move(card)
    device_calls.replace(tracker.ledger, card)
    tracker.workspaces = device_kernels.replace(tracker, card)
    device_autocast.replace(tracker, partial(check_autocast, tracker))
    check(tracker)


def _build_on_cpu(card: Card) -> None:
    """Build fakes of every device with the keys of the CPU, and say to compiled code that they lie there."""
    make = torch.Tensor._make_subclass
    handlers = fake_tensor._DISPATCH_META_HANDLERS
    dispatch = FakeTensor.__torch_dispatch__.__func__  # type: ignore[attr-defined]

    def make_on_cpu(cls: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device_for_backend_keys") is not None:
            kwargs["device_for_backend_keys"] = _CPU
        return make(cls, data, *args, **kwargs)

    def dispatched(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _answer(args) if func is _QUERY else dispatch(cls, func, types, args, kwargs or {})

    _Tensor._make_subclass = staticmethod(make_on_cpu)
    handlers[_QUERY] = _answer
    _Fake.__torch_dispatch__ = classmethod(dispatched)
    _Fake._normalize_fake_device = staticmethod(card.resolve)
    _Mode.avoid_device_init = property(lambda _mode: True)  # else it would build literals on the device, for real
    _Module.init_cuda_context = lambda: None  # the same in older versions of torch


def _answer(args: Any) -> torch.device:
    return _META if args[0].fake_mode.in_kernel_invocation else _CPU


def _tell_of_device(tracker: Tracker) -> None:
    """Say to Python code where a tensor lies in the dry run."""

    def device_of(tensor: torch.Tensor) -> torch.device:
        fake = tracker.moved(tensor)
        found: torch.device = _raw_device.__get__(tensor) if fake is None else fake.device
        return found

    def index_of(tensor: torch.Tensor) -> int:
        return -1 if tensor.device.index is None else tensor.device.index

    _Tensor.device = property(device_of)
    for cls in (_Tensor, _Fake):
        cls.get_device = index_of
        for name in ("cpu", "cuda", "meta"):
            setattr(cls, f"is_{name}", property(_is_on(name)))
        cls.record_stream = lambda tensor, stream: None
    _follow_data()
    read = torch.Tensor.numpy

    def as_numpy(tensor: torch.Tensor, **kwargs: Any) -> Any:
        if tensor.device.type != "cpu" and not kwargs.get("force"):
            raise TypeError(
                f"can't convert {tensor.device} device type tensor to numpy. "
                "Use Tensor.cpu() to copy the tensor to host memory first."
            )
        return read(tensor, **kwargs)

    for cls in (_Tensor, _Fake):
        cls.numpy = as_numpy


def _is_on(kind: str) -> Callable[[torch.Tensor], bool]:
    return lambda tensor: tensor.device.type == kind


def _follow_data() -> None:
    """Let a fake whose ``.data`` is assigned lie where that does."""
    data: Any = torch.Tensor.data

    def assign(tensor: Any, value: Any) -> None:
        data.fset(tensor, value)
        if isinstance(tensor, FakeTensor) and isinstance(value, FakeTensor):
            tensor.fake_device = value.fake_device

    _Tensor.data = property(data.fget, assign)


class _Move(torch.autograd.Function):
    """A copy to another device, whose gradient goes back to where the tensor came from."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, device: torch.device, options: dict[str, Any]) -> torch.Tensor:
        ctx.device, ctx.dtype = tensor.device, tensor.dtype
        return _copied(tensor, device, options)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _copied(grads[0], ctx.device, {"dtype": ctx.dtype}), None, None


def _copied(tensor: torch.Tensor, device: torch.device, options: dict[str, Any]) -> torch.Tensor:
    copied: torch.Tensor = _aten._to_copy.default(tensor, device=device, **options)
    return copied


def _move(card: Card) -> None:
    """Copy between devices where compiled code would see no difference."""

    def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        device, options, copies = asked_of_to(card, args, kwargs)
        if device is None or device == tensor.device:
            return _raw_to(tensor, **{"dtype": tensor.dtype, "copy": copies} | options)
        if tensor.requires_grad and torch.is_grad_enabled():
            moved: torch.Tensor = _Move.apply(tensor, device, options)  # type: ignore[no-untyped-call]
            return moved
        with torch.no_grad():
            return _copied(tensor, device, options)

    def to_card(
        tensor: torch.Tensor, device: Any = None, non_blocking: bool = False, memory_format: Any = torch.preserve_format
    ) -> torch.Tensor:
        return to(tensor, "cuda" if device is None else device, memory_format=memory_format)

    for cls in (_Tensor, _Fake):
        cls.to = cls.type_as = to
        cls.cpu = lambda tensor, memory_format=torch.preserve_format: to(tensor, _CPU, memory_format=memory_format)
        cls.cuda = to_card
    _convert(to)


def _convert(to: Any) -> None:
    """Let ``tensor`` and its like move what is a tensor already."""
    _device_constructors()  # remembers those of torch, for its default device

    def converter(make: Any, *, copies: bool) -> Any:
        def convert(data: Any, *args: Any, device: Any = None, dtype: Any = None, **kwargs: Any) -> Any:
            if not isinstance(data, torch.Tensor) or device is None:
                return make(data, *args, device=device, dtype=dtype, **kwargs)
            moved = to(data.detach().clone() if copies else data, device, dtype)
            return moved.requires_grad_() if kwargs.get("requires_grad") else moved

        return convert

    for name in ("tensor", "as_tensor", "asarray"):
        setattr(torch, name, converter(getattr(torch, name), copies=name == "tensor"))

    def new_tensor(tensor: torch.Tensor, data: Any, *, dtype: Any = None, device: Any = None, **kwargs: Any) -> Any:
        return torch.tensor(data, dtype=dtype or tensor.dtype, device=device or tensor.device, **kwargs)

    for cls in (_Tensor, _Fake):
        cls.new_tensor = new_tensor


def asked_of_to(card: Card, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.device | None, Any, bool]:
    """Return what ``Tensor.to`` is asked for: the device or None, dtype and memory format, whether to copy anyway."""
    kwargs = dict(kwargs)
    copies = bool(kwargs.pop("copy", args[3] if len(args) > 3 else False))
    other = kwargs.get("other", args[0] if args else None)
    if isinstance(other, torch.Tensor):  # compiled code would not know where it lies
        return other.device, {"dtype": other.dtype}, copies
    if type(other) is int:
        args = (card.resolve(other), *args[1:])
    device, dtype, _, memory_format = torch._C._nn._parse_to(*args[:3], **kwargs)
    options = {"dtype": dtype, "memory_format": memory_format}
    given = {name: value for name, value in options.items() if value is not None}
    return None if device is None else card.resolve(device), given, copies


# The check ------------------------------------------------------------------------------------------------------------

# A small program whose numbers are known is run on the emulated device before any number of it is believed.


_ROWS, _COLUMNS = 64, 128
_FLOATS = _ROWS * _COLUMNS * 4


def check(tracker: DeviceTracker) -> None:
    """Run the program on ledgers of its own; a ``ForecastError`` where one of its numbers is not what it has to be."""
    with _apart(tracker):
        _check_moves(tracker)
        _check_step(tracker)
        _check_kernels(tracker)


def check_autocast(tracker: DeviceTracker) -> None:
    """Look at the types of what autocast of the device, which is on, makes; a ``ForecastError`` where one is wrong."""
    with _apart(tracker):
        lower = torch.get_autocast_dtype("cuda")
        tensor = torch.ones(_ROWS, _COLUMNS, device="cuda")
        product = tensor @ tensor.mT
        _expect("the dtype of a product under autocast", product.dtype, lower)
        _expect("the dtype of a softmax under autocast", product.softmax(-1).dtype, torch.float32)
        host = torch.ones(2, 2) @ torch.ones(2, 2)
        _expect("the dtype of a product in host memory", host.dtype, torch.float32)


@contextlib.contextmanager
def _apart(tracker: DeviceTracker) -> Iterator[None]:
    """Count what the block makes in ledgers of its own; a ``ForecastError`` says what went wrong in it."""
    aside = tracker.host, tracker.ledger, tracker.ledgers
    workspaces = tracker.workspaces.swap({})
    tracker.host, tracker.ledger = Ledger(), Ledger()
    tracker.ledgers = {"cpu": tracker.host, "cuda": tracker.ledger}
    try:
        with _disable_current_modes(), tracker.fake_mode, tracker, torch.random.fork_rng(devices=()):
            yield
    except ForecastError:
        raise
    except Exception as error:
        raise _failed(one_sentence(error)) from error
    finally:
        tracker.host, tracker.ledger, tracker.ledgers = aside
        tracker.workspaces.swap(workspaces)


def _failed(what: str) -> ForecastError:
    return ForecastError(f"a device of CUDA cannot be emulated with this torch: {what}")


def _expect(what: str, found: Any, expected: Any) -> None:
    if found != expected:
        raise _failed(f"{what} is {found} instead of {expected}")


def _check_moves(tracker: DeviceTracker) -> None:
    """There and back, and never both at once."""
    card = tracker.card
    host, there = tracker.ledgers["cpu"], tracker.ledger
    tensor = torch.ones(_ROWS, _COLUMNS, device="cuda")
    _expect("a new tensor", (tensor.device, there.live, host.live), (card.device, _FLOATS, 0))
    back = tensor.cpu()
    _expect("a copy in host memory", (back.device.type, there.live, host.live), ("cpu", _FLOATS, _FLOATS))
    _expect("the device of a copy there", back.to("cuda").device, card.device)
    with contextlib.suppress(RuntimeError):
        _expect("the sum of tensors on two devices", tensor + back, None)
    del tensor
    _expect("what is left on the device", there.live, 0)


def _check_step(tracker: DeviceTracker) -> None:
    """One step of training: weight, gradient, and the momentum that stays."""
    card = tracker.card
    weight = torch.nn.Parameter(torch.ones(_COLUMNS, _COLUMNS, device="cuda"))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    torch.autograd.backward((torch.ones(_ROWS, _COLUMNS, device="cuda") @ weight).sum())
    _expect("the device of a gradient", getattr(weight.grad, "device", None), card.device)
    optimizer.step()
    weight.grad = None
    products = 2 * cublas_workspace_bytes(card.capability)
    _expect("what a step leaves", tracker.ledger.live, 2 * _COLUMNS * _COLUMNS * 4 + products)


def _check_kernels(tracker: DeviceTracker) -> None:
    """What CUDA does in another way: a mask of bytes, no scores."""
    ledger, begin = tracker.ledger, tracker.ledger.live
    tensor = torch.ones(1, 2, _ROWS, 32, device="cuda", requires_grad=True)
    size = tensor.numel()
    dropped = torch.nn.functional.dropout(tensor, 0.5)
    _expect("what dropout keeps", ledger.live - begin, 4 * size + 5 * size)
    del dropped
    ledger.peak = before = ledger.live
    torch.nn.functional.scaled_dot_product_attention(tensor, tensor, tensor)
    writes_scores = ledger.peak - before - 4 * size >= 2 * _ROWS * _ROWS * 4
    _expect("whether attention writes its scores down", writes_scores, False)

"""A machine without a GPU made to behave as one with so much memory.

While it is on, the storage of every CPU tensor counts as device memory: each goes through the model of the CUDA caching
allocator, with the settings of ``PYTORCH_CUDA_ALLOC_CONF`` at that time, and where the capacity ends
``torch.OutOfMemoryError`` is raised with the text that CUDA prints. Nothing else changes: results are those of the CPU,
``tensor.device`` says ``cpu``, and ``torch.cuda`` is left alone. What ``save_on_cpu`` keeps for a backward pass lies in
host memory, as beside a GPU: it is copied there, and back where the backward pass asks for it.

Limits:
    * Dispatch modes belong to a thread. What other threads allocate is not counted until an operation of this thread
      returns a tensor in it. Forked processes, the workers of a DataLoader among them, are not counted.
    * Scratch memory inside of a kernel is not seen, nor the CUDA context, nor the workspaces of cuBLAS and cuDNN.
    * Tensors alive when it is switched on are counted then, save those that only an autograd graph holds.
    * Functions of ``torch.compile`` run uncompiled, so that all of their operations are counted. Those that are first
      called here stay uncompiled until ``torch._dynamo.reset()``; a warning says so.
"""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, ContextDecorator
from typing import TYPE_CHECKING, Any, Final, TypeVar

from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode,
    _get_current_dispatch_mode_stack,
)

from oomdoctor.allocator.device import VirtualAccelerator
from oomdoctor.allocator.mode import CountingMode
from oomdoctor.errors import UsageError
from oomdoctor.model.sizes import format_size, parse_size
from oomdoctor.objects.alive import keep_apart

if TYPE_CHECKING:
    from collections.abc import Callable

_BASE: Final[Any] = TorchDispatchMode
"""Its ``__enter__`` and ``__exit__`` do the bookkeeping of the stack, and nothing of what a mode does of its own."""
F = TypeVar("F", bound="Callable[..., Any]")

_mode: CountingMode | None = None
_held_by_block = False


def active() -> VirtualAccelerator | None:
    """Return the accelerator that is on, None if there is none."""
    return _mode.device if _mode is not None else None


def simulate(size: str | int) -> AbstractContextManager[VirtualAccelerator]:
    """Return a context in which CPU tensors live on a virtual accelerator of ``size`` (``"512MiB"``, or bytes).

    The call alone switches nothing on. Where what it returns is dropped unused, a warning says so, and where a notebook
    shows it, that does.

    Raises:
        SizeError: ``size`` is not one.
        UsageError: on entry, when one is on already, when the tensors that are alive do not fit, or when the
            allocator's settings in the environment cannot be used.
    """
    return _Block(parse_size(size))


class _Block(AbstractContextManager["VirtualAccelerator"], ContextDecorator):
    """One ``simulate(...)``, for one ``with`` or for any number of calls of the function that it decorates."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._used = False

    def __repr__(self) -> str:
        state = "was used" if self._used else "is not switched on"
        return f"<simulate: {format_size(self._capacity_bytes)}, {state}; {_USE}>"

    def __enter__(self) -> VirtualAccelerator:
        global _held_by_block
        self._used = True
        if _mode is not None:
            size = format_size(_mode.device.capacity_bytes)
            raise UsageError(f"a simulated GPU of {size} is on already: leave it first")
        device = _put_on(self._capacity_bytes)
        _held_by_block = True
        return device

    def __exit__(self, *raised: Any) -> None:
        global _held_by_block
        _held_by_block = False
        _take_off()

    def _recreate_cm(self) -> _Block:
        self._used = True
        return _Block(self._capacity_bytes)

    def __call__(self, function: F) -> F:
        self._used = True  # what it decorates may never be called
        return super().__call__(function)

    def __del__(self) -> None:
        if not self._used:
            warnings.warn(f"simulate(...) was dropped, and nothing was switched on: {_USE}", UserWarning, stacklevel=2)


_USE: Final = "write `with oomdoctor.simulate(...):`, or `%oomdoctor simulate SIZE` in a notebook"


def switch_on(size: str | int) -> VirtualAccelerator:
    """Put a virtual accelerator of ``size`` in place until ``switch_off``; it replaces one that is on.

    Raises:
        SizeError: ``size`` is not one.
        UsageError: inside a ``with simulate(...)`` block, in another thread than the one that is on, when the tensors
            that are alive do not fit, or when the allocator's settings in the environment cannot be used. One that was
            on stays on.
    """
    capacity_bytes = parse_size(size)
    previous = _mode
    _check_not_held()
    if previous is None:
        return _put_on(capacity_bytes)
    _take_off(keep=True)
    try:
        device = _put_on(capacity_bytes)
    except UsageError:
        _resume(previous)
        raise
    previous.device.close()
    return device


def switch_off() -> None:
    """Take the virtual accelerator away that ``switch_on`` put in place; nothing happens if there is none.

    Raises:
        UsageError: inside a ``with simulate(...)`` block, or in another thread than ``switch_on``.
    """
    _check_not_held()
    if _mode is not None:
        _take_off()


def uncounted() -> AbstractContextManager[None]:
    """Return a context that runs outside of the count of this thread, and outside of any other dispatch mode.

    For oomdoctor's own work: tensors made there are not counted before the program uses them, those that die there
    are given back.
    """
    context: AbstractContextManager[None] = _disable_current_modes()
    return context


def _check_not_held() -> None:
    if _held_by_block:
        raise UsageError("a `with simulate(...)` block is running: it ends with its block")


def _put_on(capacity_bytes: int) -> VirtualAccelerator:
    device = VirtualAccelerator(capacity_bytes)
    with uncounted():
        fits = device.adopt()
    if not fits:
        device.close()
        raise UsageError(
            f"the tensors that are alive now do not fit into a simulated GPU of {format_size(capacity_bytes)}"
        )
    device.reset_peak()
    _resume(CountingMode(device))
    return device


def _resume(mode: CountingMode) -> None:
    global _mode
    _BASE.__enter__(mode)
    _mode = mode
    _saving.__init__ = _save_in_host_memory


_saving: Final[Any] = save_on_cpu
_saves: Final = save_on_cpu.__init__


def _save_in_host_memory(hooks: saved_tensors_hooks, *_args: Any, **_kwargs: Any) -> None:
    """Make ``save_on_cpu`` copy what is saved to memory that is not the device's, and back."""

    def pack(tensor: Any) -> Any:
        with uncounted():
            copy = tensor.detach().clone()
        keep_apart(copy)
        return copy

    saved_tensors_hooks.__init__(hooks, pack, lambda copy: copy.clone())


def _take_off(*, keep: bool = False) -> None:
    """Take the mode out of this thread's stack; ``keep`` leaves its device open to go on."""
    global _mode
    if _mode is None:
        return
    if not any(_mode is other for other in _get_current_dispatch_mode_stack()):
        raise UsageError("the simulated GPU was switched on in another thread: switch it off there")
    aside: list[TorchDispatchMode] = []
    while (top := _get_current_dispatch_mode()) is not None:
        _BASE.__exit__(top, None, None, None)
        if top is _mode:
            break
        aside.append(top)
    for other in reversed(aside):
        _BASE.__enter__(other)
    if not keep:
        _mode.device.close()
    _mode = None
    _saving.__init__ = _saves

"""The contents of tensors: watched from the start of a cell, copied to host memory only when they are about to change.

A watched tensor costs a weak reference and its version counter. Its contents are copied when ``keep`` is called, by
the hooks that run before the first forward and the first optimizer step. What was written in place before it was
kept shows in the version counter or the data pointer and is told as lost. Writes through ``tensor.data`` move
neither: where the text of a cell has one, all is kept before the cell begins. A tensor that was given other memory,
``tensor.data = other``, gets memory of its own again, which nothing may have shared with it before.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from weakref import ref

from oomdoctor.objects.alive import keep_apart
from oomdoctor.objects.containers import GONE, Remade, living, weak
from oomdoctor.objects.kinds import plain_dict

if TYPE_CHECKING:
    import torch

_HOOKS: Final = ("_backward_hooks", "_post_accumulate_grad_hooks")


@contextmanager
def outside_modes() -> Iterator[None]:
    """Run the body without anybody's dispatch and function modes, and without autograd, where torch is loaded."""
    if "torch" not in sys.modules:
        yield
        return
    import torch
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        yield


class Watched:
    """One tensor under watch: a weak reference, its stamp at the start, and its copy once there is one."""

    __slots__ = (
        *("aside", "bare", "copy", "device", "dtype", "hooks", "label", "pointer", "ref", "requires_grad"),
        *("shared", "uncopied", "version"),
    )

    def __init__(self, tensor: torch.Tensor, label: str) -> None:
        self.ref: Callable[[], torch.Tensor | None] = ref(tensor)
        self.label = label
        self.version, self.pointer = _stamp(tensor)
        self.device, self.dtype = tensor.device, tensor.dtype
        self.requires_grad = tensor.requires_grad
        # By the numbers of their handles: held themselves, they would keep alive what they close over.
        self.hooks = frozenset(number for hooks in _hooks(tensor) for number in hooks)
        self.bare = not plain_dict(tensor)
        self.copy: torch.Tensor | None = None
        self.uncopied = self.aside = self.shared = False

    def unchanged(self, tensor: torch.Tensor) -> bool:
        """Return whether nothing was written: neither counter nor pointer moved, or all of it to another device."""
        version, pointer = _stamp(tensor)
        return version == self.version and (pointer == self.pointer or self.has_moved(tensor))

    def was_exchanged(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor has other memory on its device than when it was copied."""
        return self.copy is not None and tensor.device == self.device and _stamp(tensor)[1] != self.pointer

    def has_moved(self, tensor: torch.Tensor) -> bool:
        """Return whether the contents are on another device, as ``Module.to`` takes them there."""
        return tensor.device != self.device and tensor.dtype == self.dtype and not tensor.is_meta


class Computed(Remade):
    """A tensor that a module has as a plain attribute and makes of its parameters, as ``weight_norm`` does.

    Each forward makes another one. Where this one is gone, its copy stands for it, which has no graph.
    """

    __slots__ = ("_made", "_watched")

    def __init__(self, watched: Watched) -> None:
        self._watched = watched
        self._made: torch.Tensor | None = None

    def get(self) -> Any:
        """Return the tensor, or its copy on its device."""
        tensor, copy = self._watched.ref(), self._watched.copy
        if tensor is None and self._made is None and copy is not None:
            with outside_modes():
                self._made = copy.to(self._watched.device, copy=True)
        made = self._made if tensor is None else tensor
        return GONE if made is None else made


def _hooks(tensor: Any) -> Iterator[dict[int, Any]]:
    """Yield the dicts that ``register_hook`` and the like put hooks into; a tensor without gradients has none."""
    if tensor.requires_grad:
        yield from (hooks for kind in _HOOKS if (hooks := getattr(tensor, kind)))


def _stamp(tensor: torch.Tensor) -> tuple[int, int]:
    """Return version counter and data pointer; zeros where the tensor has none (inference, sparse, fake tensors)."""
    try:
        version = tensor._version
    except RuntimeError:
        version = 0
    try:
        return version, tensor.data_ptr()
    except RuntimeError:
        return version, 0


class TensorCopies:
    """Watches tensors and keeps copies of those that are about to change.

    Args:
        room: how many bytes of host memory its copies may take, asked once, when the first copy is made.

    Attributes:
        kept_bytes: size of the copies.
        full: why copies were not made, empty if all were.
    """

    def __init__(self, room: Callable[[], int]) -> None:
        self._watched: dict[int, Watched] = {}
        self._gradients: list[tuple[Callable[[], Any], Watched | None]] = []
        self._pinned: list[torch.Tensor] = []
        self._buffers: list[Any] = []
        self._ask_room, self._room = room, -1
        self.kept_bytes = 0
        self.full = ""

    def watch(self, tensor: torch.Tensor, label: str) -> Watched:
        """Note the version of ``tensor``; ``label`` is what the user calls it.

        One made in inference mode counts no versions: it is copied at once.
        """
        watched = self._watched.setdefault(id(tensor), Watched(tensor, label))
        if watched.copy is None and tensor.is_inference():
            self.keep([tensor])
        return watched

    def watch_gradient(self, tensor: torch.Tensor, label: str) -> None:
        """Hold the gradient until the first forward: by then a cell that clears gradients has let go of it."""
        watched = None
        if (gradient := tensor.grad) is not None:
            watched = self.watch(gradient, f"{label}.grad")
            self._pinned.append(gradient)
        self._gradients.append((ref(tensor), watched))

    def await_computed(self, tensor: torch.Tensor, label: str) -> Computed:
        """Have a tensor that a forward may replace copied before the first one; return what holds it."""
        watched = self.watch(tensor, label)
        self._buffers.append(weak(tensor))
        return Computed(watched)

    def await_buffers(self, buffers: Iterable[Any]) -> None:
        """Have the buffers of a module copied before the first forward, which may write to them."""
        self._buffers += map(weak, buffers)

    def follow_devices(self) -> None:
        """Take each tensor to belong where it lies now: in a copy of the process that has moved them all."""
        for watched in self._watched.values():
            if (tensor := watched.ref()) is not None:
                watched.device = tensor.device

    @property
    def waits_for_forward(self) -> bool:
        """Whether a forward may change something that is not copied yet."""
        return bool(self._buffers or self._pinned)

    def before_forward(self, buffers: Iterable[torch.Tensor]) -> None:
        """Copy gradients, the buffers that were awaited and ``buffers``, and let go of the gradients."""
        awaited = [buffer for held in self._buffers if (buffer := living(held)) is not GONE]
        self.keep([*self._pinned, *awaited, *buffers])
        if not self.full:
            self._buffers.clear()
            self._pinned.clear()

    def watches(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` was seen at the start of the cell."""
        watched = self._watched.get(id(tensor))
        return watched is not None and watched.ref() is tensor

    def keep(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copy those of ``tensors`` that are watched, not copied yet and unchanged so far, as long as there is room."""
        with outside_modes():
            for tensor in tensors:
                watched = self._watched.get(id(tensor))
                if watched is not None and watched.copy is None and watched.ref() is tensor:
                    self._copy(watched, tensor)

    def keep_all(self, is_read: Callable[[str], bool] = lambda _: False) -> None:
        """Copy every watched tensor that is still alive, parameters and what is small first.

        What ``is_read`` says by its label is only read needs no copy where there is no room: its version tells of it.
        """
        before = {id(watched) for watched in self._watched.values() if watched.uncopied}
        self.keep(sorted(self.alive(), key=lambda one: (not one.requires_grad, one.numel() * one.element_size())))
        for watched in self._watched.values():
            if watched.uncopied and id(watched) not in before and (tensor := watched.ref()) is not None:
                watched.uncopied = tensor.requires_grad or not _has_contents(tensor) or not is_read(watched.label)

    def alive(self) -> list[torch.Tensor]:
        """Return the watched tensors that are alive."""
        return [tensor for watched in list(self._watched.values()) if (tensor := watched.ref()) is not None]

    def set_aside(self, tensors: Iterable[torch.Tensor]) -> None:
        """Have those of ``tensors`` that nothing shares their memory with take host memory alone, until ``restore``.

        They stay as they are in all but their place, should something hold on to them that was not seen.
        """
        for tensor in tensors:
            watched = self._watched.get(id(tensor))
            if watched is None or watched.ref() is not tensor or watched.aside or not _is_alone(tensor):
                continue
            self.keep([tensor])
            if watched.copy is not None and not watched.uncopied:
                with outside_modes():
                    tensor.data = watched.copy.clone()
                watched.aside = True

    def _copy(self, watched: Watched, tensor: torch.Tensor) -> None:
        import torch

        if self._room < 0:
            self._room = self._ask_room()
        if not watched.unchanged(tensor):
            return
        if tensor.is_meta or type(tensor).__module__ == "torch._subclasses.fake_tensor":
            return
        watched.uncopied = True
        if not _has_contents(tensor):
            self.full = "its storage is smaller than the tensor, as of one that was sharded"
            return
        size = tensor.element_size() * tensor.numel()
        if self.kept_bytes + size > self._room:
            self.full = "there was not enough host memory to keep a copy"
            return
        try:
            is_opaque = tensor.layout is torch._mkldnn  # type: ignore[attr-defined]
            watched.copy = tensor.detach().clone() if is_opaque else tensor.detach().to("cpu", copy=True)
            keep_apart(watched.copy)
        except (MemoryError, RuntimeError, NotImplementedError) as exc:
            self.full = f"a copy in host memory failed ({type(exc).__name__})"
            return
        watched.uncopied, watched.shared = False, not _is_alone(tensor)
        self.kept_bytes += size

    def give_up(self) -> str:
        """Return why copies were not made, empty if all were, and take the tensors as standing: none was written."""
        failed = [watched for watched in self._watched.values() if watched.uncopied]
        for watched in failed:
            watched.uncopied = False
        return f"`{failed[0].label}` could not be kept: {self.full}" if failed else ""

    def lost(self) -> Iterator[str]:
        """Yield a sentence for each living tensor that was written to, or about to be, and not kept; and for hooks."""
        why = f" ({self.full})" if self.full else ""
        for watched in self._watched.values():
            if (tensor := watched.ref()) is None:
                continue
            if watched.copy is None and (watched.uncopied or not watched.unchanged(tensor)):
                yield f"`{watched.label}` was written in place and no copy was kept{why}"
            if watched.shared and watched.was_exchanged(tensor):
                yield f"`{watched.label}` was given other memory, and another tensor may share what it had"
            if watched.hooks and watched.hooks - {number for hooks in _hooks(tensor) for number in hooks}:
                yield f"a hook of `{watched.label}` was removed by the cell, and cannot be put back"
        for _, gradient in self._gradients:
            if gradient is not None and gradient.ref() is None and gradient.copy is None:
                yield f"`{gradient.label}` was cleared by the cell, and no copy was kept"

    def unsure(self) -> Iterator[tuple[torch.Tensor, str]]:
        """Yield living tensors that may be running statistics and have no copy, each with its label.

        Those that wait for the first forward, which is to come, are none.
        """
        waiting = {id(living(held)) for held in self._buffers}
        for watched in self._watched.values():
            if watched.copy is not None or (tensor := watched.ref()) is None or tensor.requires_grad:
                continue
            if tensor.dim() == 1 and tensor.is_floating_point() and id(tensor) not in waiting:
                yield tensor, watched.label

    @property
    def bytes_to_copy(self) -> int:
        """Size of what is watched and alive and has no copy."""
        uncopied = (watched.ref() for watched in self._watched.values() if watched.copy is None)
        return sum(tensor.numel() * tensor.element_size() for tensor in uncopied if tensor is not None)

    def changed(self) -> Iterator[str]:
        """Yield what was done to living tensors: ``written `x```."""
        for watched in self._watched.values():
            tensor = watched.ref()
            if tensor is None:
                continue
            copy = None if tensor.is_inference() else watched.copy
            is_marked = watched.has_moved(tensor) or not watched.unchanged(tensor)  # asked first, as it reads nothing
            if is_marked or (copy is not None and not _is_equal(tensor, copy)):
                yield f"written `{watched.label}`"
        for parameter, gradient in self._gradients:
            tensor = parameter()
            if tensor is not None and (gradient.ref() if gradient is not None else None) is not tensor.grad:
                yield "written gradients"

    def pieces(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """Yield what puts the kept contents of each tensor back in place, from host memory, with what it is called.

        Version counters go back as well: a graph of an earlier cell that saved such a tensor stays usable. Contents
        are compared even where the counter stands still, because fused optimizers do not move it (torch 2.13).
        """
        for watched in self._watched.values():
            yield f"`{watched.label}`", partial(_restore, watched)
        for parameter, gradient in self._gradients:
            path = "a gradient" if gradient is None else f"`{gradient.label}`"
            yield path, partial(_restore_gradient, parameter, gradient)


def _restore(watched: Watched) -> None:
    import torch

    tensor = watched.ref()
    if tensor is None:
        return
    for hooks in _hooks(tensor):
        for number in [number for number in hooks if number not in watched.hooks]:
            del hooks[number]
    if watched.aside and watched.copy is not None:
        tensor.data = watched.copy.to(watched.device, copy=True)
        _set_version(tensor, watched.version)
        watched.pointer, watched.aside = _stamp(tensor)[1], False
    if watched.bare and (attributes := plain_dict(tensor)):
        attributes.clear()
    if tensor.is_leaf and tensor.requires_grad != watched.requires_grad:
        tensor.requires_grad_(watched.requires_grad)
    if watched.has_moved(tensor) and watched.unchanged(tensor) and watched.copy is None:
        tensor.data = tensor.detach().to(watched.device)
        watched.pointer = _stamp(tensor)[1]
    elif watched.copy is not None and not (
        watched.unchanged(tensor) and not watched.has_moved(tensor) and _is_equal(tensor, watched.copy)
    ):
        with torch.inference_mode() if tensor.is_inference() else nullcontext():
            _write(tensor, watched.copy, watched.device, is_apart=watched.was_exchanged(tensor))
        if not tensor.is_inference():
            _set_version(tensor, watched.version)
        watched.pointer = _stamp(tensor)[1]


def _restore_gradient(held: Callable[[], Any], watched: Watched | None) -> None:
    parameter = held()
    if parameter is None:
        return
    if watched is None:
        parameter.grad = None
        return
    gradient = watched.ref()
    if gradient is None and watched.copy is not None:
        gradient = watched.copy.to(parameter.device, copy=True)
    if gradient is not None and parameter.grad is not gradient:
        parameter.grad = gradient


def _is_equal(tensor: torch.Tensor, copy: torch.Tensor) -> bool:
    """Return whether the contents are those of the copy; of other than plain tensors the counter must tell."""
    import torch

    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided or tensor.is_nested:
        return True
    return torch.equal(tensor.detach().cpu(), copy)


def _has_contents(tensor: torch.Tensor) -> bool:
    """Return whether the storage has all elements: FSDP resizes it to nothing, and reading would be out of bounds."""
    import torch

    if tensor.layout is not torch.strided or tensor.is_nested or not tensor.numel():
        return True
    try:
        room = tensor.untyped_storage().nbytes()
        last = tensor.storage_offset() + sum(
            (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
    except (RuntimeError, NotImplementedError):  # a wrapper without a storage of its own
        return True
    return (last + 1) * tensor.element_size() <= room


def _is_alone(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's memory is its own: no view of it, no graph, no other process shares it."""
    import torch

    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    if not is_plain or tensor.is_nested or tensor.is_inference() or tensor.grad_fn is not None:
        return False
    if tensor.device.type == "cpu" and tensor.is_shared():  # type: ignore[no-untyped-call]
        return False
    storage = tensor.untyped_storage()
    held = torch._C._storage_Use_Count(storage._cdata)
    return bool(held <= _OWN_USES)


_OWN_USES = 2
"""Of a storage that one tensor has: the tensor's, and that of the object which Python sees."""


def _write(tensor: torch.Tensor, copy: Any, device: torch.device, *, is_apart: bool) -> None:
    """Give a tensor the contents of its copy, in memory of its own where it ``is_apart`` from what it had."""
    same = tensor.shape == copy.shape and tensor.dtype == copy.dtype and tensor.layout == copy.layout
    if same and tensor.device == device and not is_apart:
        tensor.copy_(copy)
    else:  # the cell pointed it at other storage: another dtype, another shape, another device
        tensor.data = copy.to(device, copy=True)


def _set_version(tensor: torch.Tensor, version: int) -> None:
    import torch

    set_counter = torch._C._autograd._unsafe_set_version_counter
    try:
        set_counter((tensor,), (version,))
    except TypeError:  # before torch 2.6 it took one tensor
        set_counter(tensor, version)  # type: ignore[arg-type]

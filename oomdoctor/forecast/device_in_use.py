"""A process whose device is in use: its tensors are relabelled in the forked copy, without a call to the device.

A forked process must not touch the device of its parent. Every tensor there keeps its Python object and all that refers
to it; only what lies behind is replaced by a fake of the same shape on the same bytes. The old memory is held, because
even to free it would be a call to the device. What the snapshot of the cell's start has to bring back is brought back
on the fakes.

Limits: one device of the process in use. Graphs that were recorded there cannot be
run. None of this has to work: the check of ``devices`` runs a backward, and what fails is refused.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.weak import WeakIdKeyDictionary

from oomdoctor.errors import ForecastError
from oomdoctor.forecast.devices import asked_of_to
from oomdoctor.forecast.live_storages import Layout
from oomdoctor.forecast.roles import Alive, live_storages
from oomdoctor.objects.alive import alive, is_apart
from oomdoctor.sandbox.card import Card
from oomdoctor.sandbox.copies import one_sentence

if TYPE_CHECKING:
    from oomdoctor.forecast.devices import DeviceTracker
    from oomdoctor.model.memory import Role

_torch: Any = torch
_kept: list[Any] = []
"""What must never be freed in this process."""


class Held:
    """What lies on the device at the start: to be called before ``gc.freeze``, which hides it.

    Attributes:
        tensors: every tensor there that Python knows.
        storages: their memory and what else there is, with the role where it is known.
        pointers: where the memory of each tensor begins, as long as the tensor lives.
    """

    def __init__(self, card: Card) -> None:
        self.storages: list[tuple[Any, Role | None]] = [
            (storage, role) for storage, role in live_storages(Alive()) if lies_there(storage, card)
        ]
        self.tensors = list({id(tensor): tensor for tensor in _tensors() if lies_there(tensor, card)}.values())
        self.pointers: Any = WeakIdKeyDictionary()
        _kept.extend(storage for storage, _ in self.storages)
        _kept.extend(tensor.untyped_storage() for tensor in self.tensors if tensor.layout is torch.strided)


def lies_there(found: Any, card: Card) -> bool:
    """Whether a real tensor or storage lies on the device; a ``ForecastError`` where it lies on one of another kind."""
    device: torch.device = found.device
    if device.type in ("cpu", "meta"):
        return False
    if device != card.device:
        raise ForecastError(f"tensors lie on {device} and on {card.device}: one device is forecast")
    return True


def _tensors() -> Iterator[torch.Tensor]:
    for found in alive(torch.Tensor):
        if not isinstance(found, FakeTensor) and not is_apart(found):
            yield found
            if found.is_leaf and found.grad is not None:
                yield found.grad


def relabel(tracker: DeviceTracker, held: Held, *, is_emptied: bool) -> Layout | None:
    """Put a fake behind every tensor that lies on the device, and count what is held there.

    Returns:
        Where it lies in the allocator's segments; None where these are not known. For ``is_emptied`` see ``Layout``.

    Raises:
        ForecastError: one of them has a layout that is not followed.
    """
    ledger, behind = tracker.ledger, dict[int, torch.UntypedStorage]()
    layout = Layout(ledger, tracker.card.segments, is_emptied=is_emptied)
    for storage, role in held.storages:
        if storage._cdata not in behind:
            behind[storage._cdata] = _torch.UntypedStorage(storage.nbytes(), device="meta")
            ledger.hold(behind[storage._cdata])
            layout.place(behind[storage._cdata], storage.data_ptr())
        if role is not None:
            ledger.mark(behind[storage._cdata], role)
    recorded = {tensor.grad_fn for tensor in held.tensors if tensor.grad_fn is not None}
    for tensor in held.tensors:
        if tensor.layout is not torch.strided:
            raise ForecastError(f"a tensor of layout {tensor.layout} lies on {tensor.device}, which is not followed")
        twin = torch.empty(0, dtype=tensor.dtype, device="meta")
        base = behind[tensor.untyped_storage()._cdata]
        held.pointers[tensor] = tensor.data_ptr()
        twin.set_(base, tensor.storage_offset(), tensor.size(), tensor.stride())
        tracker.repoint(tensor, FakeTensor(tracker.fake_mode, twin, tracker.card.device))
    # What only graphs hold stays, and so do the workspaces of the libraries, which no tensor shows.
    shown = {tensor.untyped_storage()._cdata for tensor in map(tracker.moved, held.tensors) if tensor is not None}
    _kept.extend(base for base in behind.values() if base._cdata not in shown)
    held.tensors.clear()
    hidden = (tracker.card.held or 0) - ledger.live
    if hidden > 0:
        _kept.append(_torch.UntypedStorage(hidden, device="meta"))
        tracker.hold_as("held by libraries", _kept[-1])
        layout.stay(_kept[-1])
        tracker.workspaces.found(hidden)
    _refuse_backward_through(recorded, tracker.card)
    return layout if tracker.card.segments else None


def _refuse_backward_through(recorded: set[Any], card: Card) -> None:
    """Have a backward end that would run nodes which were recorded on the device."""
    if not recorded:
        return
    backward = torch.autograd.backward

    def checked(tensors: Any, *args: Any, **kwargs: Any) -> None:
        todo, seen = [tensor.grad_fn for tensor in ([tensors] if isinstance(tensors, torch.Tensor) else tensors)], set()
        while todo:
            node = todo.pop()
            if node in recorded:
                raise ForecastError(
                    f"the cell goes back through a graph that an earlier cell recorded on {card.device}"
                )
            if node is not None and node not in seen:
                seen.add(node)
                todo += [following for following, _ in node.next_functions]
        backward(tensors, *args, **kwargs)

    _torch.autograd.backward = checked


def bring_back(tracker: DeviceTracker, held: Held, prepare: Callable[[], None]) -> None:
    """Restore the start of the cell on the fakes, inside of the modes; a ``ForecastError`` where that fails."""
    try:
        with _as_on_the_device(tracker, held):
            prepare()
    except Exception as error:
        raise ForecastError(f"the start of the cell could not be restored: {one_sentence(error)}") from error
    gc.collect()
    ledger = tracker.ledger
    gone = {event[1] for event in ledger.events if event[0] == "free"}
    ledger.events[:] = [event for event in ledger.events if event[1] not in gone]
    ledger.peak, ledger.peak_at = ledger.live, len(ledger.events)


@contextlib.contextmanager
def _as_on_the_device(tracker: DeviceTracker, held: Held) -> Iterator[None]:
    """Outside of the modes, tell of tensors behind which a fake lies where they lay, and write nothing to them.

    What is taken to the device there becomes a fake.
    """
    cls, card = _torch.Tensor, tracker.card.device
    real = {name: getattr(cls, name) for name in ("copy_", "data_ptr", "to")}

    def is_outside() -> bool:
        return not _torch._C._len_torch_dispatch_stack()

    def copy_(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return tensor if is_outside() and tracker.moved(tensor) is not None else real["copy_"](tensor, *args, **kwargs)

    def data_ptr(tensor: torch.Tensor) -> int:
        return held.pointers.get(tensor) or real["data_ptr"](tensor)  # type: ignore[no-any-return]

    def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if is_outside() and not isinstance(tensor, FakeTensor):
            device, options, _ = asked_of_to(tracker.card, args, kwargs)
            if device == card:
                with tracker.fake_mode, tracker:
                    return torch.empty_like(tensor, device=card, **options)
        return real["to"](tensor, *args, **kwargs)

    cls.copy_, cls.data_ptr, cls.to = copy_, data_ptr, to
    try:
        yield
    finally:
        cls.copy_, cls.data_ptr, cls.to = real.values()

"""A program whose tensors lie on a device, tried in host memory: a copy of the process must not touch the device.

Before the process is copied, what its tensors hold there is copied to host memory, each storage once. In the copy every
such tensor keeps its Python object and points there, whatever is asked for on the device is made in host memory, and
what is asked of the device itself does nothing.

Limits: one device, plain tensors. Kernels that only the device has, and graphs that were recorded there, end the trial.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from oomdoctor.errors import OomDoctorError
from oomdoctor.objects.alive import alive
from oomdoctor.sandbox import device_calls
from oomdoctor.sandbox.autograd import mend_autograd
from oomdoctor.sandbox.card import in_use

if TYPE_CHECKING:
    from oomdoctor.sandbox.card import Card

_CPU = torch.device("cpu")
_kept: list[Any] = []
"""What must not be freed in the copy of the process: that would be a call to the device."""


class HostCopies:
    """Copies in host memory of what lies on the device, made in the user's process.

    Args:
        room: how many bytes they may take.

    Raises:
        OomDoctorError: they cannot be made; the text says why in one sentence.
    """

    def __init__(self, room: int) -> None:
        card = in_use()
        if card is None:
            raise OomDoctorError("only what lies on a CUDA device is copied to the host")
        self._card: Card = card
        self._tensors = list({id(tensor): tensor for tensor in _tensors_on(card.device)}.values())
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in self._tensors}
        needed = sum(storage.nbytes() for storage in storages.values())
        if needed > room:
            raise OomDoctorError(f"{needed >> 20:,} MiB lie on {card.device}, and the host has room for {room >> 20:,}")
        self._storages = list(storages.values())
        try:
            self._copies = {key: storage.cpu() for key, storage in storages.items()}  # type: ignore[no-untyped-call]
        except (MemoryError, RuntimeError) as error:
            raise OomDoctorError(f"what lies on {card.device} could not be copied: {type(error).__name__}") from error

    def put_in_place(self) -> None:
        """Have the tensors of this process, which was forked, lie in host memory."""
        _kept.extend(self._storages)
        held = self._card.held or 0
        device_calls.replace(SimpleNamespace(live=held, peak=held), self._card)
        if torch.get_default_device().type != "cpu":
            torch.set_default_device("cpu")
        with torch.no_grad():
            for tensor in self._tensors:
                there = torch.empty(0, dtype=tensor.dtype)
                copy = self._copies[tensor.untyped_storage()._cdata]
                there.set_(copy, tensor.storage_offset(), tensor.size(), tensor.stride())
                tensor.data = there

    def on_host(self) -> TorchDispatchMode:
        """Return the mode that a run in a further copy of the process takes place in."""
        mend_autograd(self._card)
        return _OnHost()


def _tensors_on(device: torch.device) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for tensor in alive(torch.Tensor):
        for one in (tensor, tensor.grad if tensor.is_leaf else None):
            if one is None or one.device.type in ("cpu", "meta"):
                continue
            if one.device != device:
                raise OomDoctorError(f"tensors lie on {one.device} and on {device}")
            if one.layout is not torch.strided or one.is_quantized or one.is_nested:
                raise OomDoctorError(f"a tensor of layout {one.layout} lies on {device}")
            found.append(one)
    return found


class _OnHost(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Makes in host memory what is asked for on a device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generators: dict[int, torch.Generator] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in (torch.ops.aten._pin_memory.default, torch.ops.aten.pin_memory.default):
            return args[0]
        given = {name: self._moved(value) for name, value in (kwargs or {}).items()}
        if given.get("pin_memory"):
            given["pin_memory"] = False
        return func(*map(self._moved, args), **given)

    def _moved(self, value: Any) -> Any:
        if isinstance(value, torch.device):
            return _CPU if value.type != "meta" else value
        if isinstance(value, torch.Generator) and value.device.type != "cpu":
            if id(value) not in self._generators:
                self._generators[id(value)] = torch.Generator().manual_seed(value.initial_seed())
            return self._generators[id(value)]
        return value

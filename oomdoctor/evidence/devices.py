"""Which devices are in use, which could be, and which this machine lacks. None is initialised by looking at it."""

from __future__ import annotations

import os
import platform
from typing import Any, Final

import torch

from oomdoctor.evidence import driver
from oomdoctor.evidence._torch_devices import TorchAccelerator, initialised, unused
from oomdoctor.evidence.host import HostAccelerator
from oomdoctor.model.memory import DeviceMemory, Measured, Usage
from oomdoctor.model.session import Accelerator
from oomdoctor.model.unavailable import Unavailable


class MetalAccelerator:
    """The one ``mps`` device; ``reserved`` is what Metal gave this process, buffers of its own libraries included."""

    name = "mps:0"
    measure = "nothing: torch.mps keeps no high-water mark"

    def read(self) -> DeviceMemory:
        """Return the memory as torch and Metal tell it."""
        untold = Unavailable("macOS does not tell GPU memory by process")
        reserved = int(torch.mps.driver_allocated_memory())
        total, name = _recommended(), getattr(torch.backends.mps, "get_name", None)
        return DeviceMemory(
            name=self.name,
            tensor_device=self.name,
            total=total,
            free=total if isinstance(total, Unavailable) else max(total - reserved, 0),
            allocated=int(torch.mps.current_allocated_memory()),
            reserved=reserved,
            cap=Unavailable("torch.mps does not tell the fraction that this process may use"),
            context=Unavailable("it is part of what Metal gave this process and is not told apart"),
            elsewhere=untold,
            processes=untold,
            card=f"{name() if name is not None else 'Apple GPU'}, macOS {platform.mac_ver()[0]}",
            basis="Metal's recommended working set, a part of the host's memory",
        )

    def usage(self) -> Usage:
        """Return what Metal counts."""
        allocated, reserved = int(torch.mps.current_allocated_memory()), int(torch.mps.driver_allocated_memory())
        return Usage(self.name, allocated, reserved, _recommended())

    def peak(self) -> Measured:
        """Say that there is none."""
        return Unavailable("torch.mps keeps no high-water mark")

    def holds(self, tensor: Any) -> bool:
        """Return whether the memory of ``tensor`` is on this device."""
        return bool(tensor.device.type == "mps")

    def reset_peak(self) -> None:
        """Do nothing: there is no high-water mark."""

    def empty_cache(self) -> None:
        """Return cached, unused buffers to Metal."""
        torch.mps.empty_cache()


def in_use() -> tuple[Accelerator, ...]:
    """Return the devices that this process has initialised, the host last."""
    found: list[Accelerator] = [TorchAccelerator(kind, index) for kind in _kinds() for index in initialised(kind)]
    if _metal_in_use():
        found.append(MetalAccelerator())
    return (*found, HostAccelerator())


def of_name(name: str | None) -> Accelerator:
    """Return the device called ``name``, the first of its kind for a name without an index; else the host."""
    devices = in_use()
    return next((device for device in devices if name in (device.name, device.name.partition(":")[0])), devices[-1])


def not_in_use() -> tuple[DeviceMemory, ...]:
    """Return, by the NVIDIA driver alone, the cards that this process could use and has not initialised."""
    if torch.version.hip:
        return ()
    cards = driver.visible_cards()
    if isinstance(cards, Unavailable):
        return ()
    properties = [torch.cuda.get_device_properties(index) for index in initialised("cuda")]
    begun = [driver.card(str(getattr(device, "uuid", ""))) for device in properties]
    uuids = {card.uuid for card in begun if not isinstance(card, Unavailable)}
    return tuple(unused(index, card) for index, card in cards if card.uuid not in uuids)


def absent() -> tuple[tuple[str, Unavailable], ...]:
    """Return each kind of device that this process does not have, with the reason; the same reason is told once."""
    cards = () if torch.version.hip else driver.visible_cards()
    has_cuda: bool = torch.backends.cuda.is_built()  # type: ignore[no-untyped-call]
    told: dict[str, Unavailable] = {}
    for kind, title, is_built, in_use, why in (
        ("CUDA", "CUDA and ROCm", has_cuda, initialised("cuda"), _unused_cuda(cards)),
        ("XPU", "XPU (Intel)", torch._C._has_xpu, initialised("xpu"), "this process has not used an XPU (Intel) yet"),
        ("MPS", "MPS (Apple)", torch.backends.mps.is_built(), _metal_in_use(), _UNUSED_METAL),
    ):
        if not in_use:
            told[kind] = Unavailable(why if is_built else f"torch {torch.__version__} is built without {title}")
    if isinstance(cards, Unavailable) and cards not in told.values():
        told["NVML"] = cards
    return tuple(told.items())


_UNUSED_METAL: Final = "this process has not used MPS (Apple) yet"


def _unused_cuda(cards: tuple[object, ...] | Unavailable) -> str:
    if torch.version.hip:
        return "this process has not used ROCm yet"
    if isinstance(cards, Unavailable):
        return cards.reason
    if cards:
        return "this process has not used CUDA yet"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    none = "the NVIDIA driver finds no card"
    return none if hidden is None else f"CUDA_VISIBLE_DEVICES={hidden!r} leaves this process no card"


def _kinds() -> tuple[str, ...]:
    """Return the kinds whose modules tell whether they are initialised; an extension may name ``privateuseone``."""
    extension = torch._C._get_privateuse1_backend_name()
    return ("cuda", "xpu", "mtia", *(() if extension == "privateuseone" else (extension,)))


def _metal_in_use() -> bool:
    """Return whether this process has memory on Apple's GPU.

    ``torch.mps`` has no ``is_initialized``. Newer versions tell whether the allocator has begun; to ask the others for
    its sums makes a handle of the device, and takes no memory there.
    """
    if not torch.backends.mps.is_built():
        return False
    begun = getattr(torch._C, "_accelerator_isAllocatorInitialized", None)
    try:
        if begun is not None and not begun():
            return False
    except RuntimeError:  # no accelerator at all, or one whose allocator does not tell
        pass
    return bool(torch.backends.mps.is_available() and torch.mps.driver_allocated_memory() > 0)


def _recommended() -> Measured:
    recommended = getattr(torch.mps, "recommended_max_memory", None)
    if recommended is None:
        return Unavailable(f"torch {torch.__version__} does not tell how much memory Metal recommends")
    return int(recommended())

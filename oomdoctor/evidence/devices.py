"""Which devices are in use, which could be, and which this machine lacks. None is initialised by looking at it."""

from __future__ import annotations

import os
import platform
from typing import Any

import torch

from oomdoctor.evidence import driver
from oomdoctor.evidence._torch_devices import TorchAccelerator, initialised, unused
from oomdoctor.evidence.host import HostAccelerator
from oomdoctor.model.absence import Unavailable
from oomdoctor.model.memory import DeviceMemory, Measured
from oomdoctor.model.session import Accelerator


class MetalAccelerator:
    """The one ``mps`` device.

    ``reserved`` is what Metal gave this process, buffers of its own libraries included.
    """

    name = "mps:0"
    measure = "nothing: torch.mps keeps no high-water mark"

    def read(self) -> DeviceMemory:
        """Return the memory as torch and Metal tell it."""
        untold = Unavailable("macOS does not tell GPU memory by process")
        reserved = int(torch.mps.driver_allocated_memory())
        total = _recommended()
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
            card=_metal_label(),
            basis="Metal's recommended working set, a part of the host's memory",
        )

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
    begun = _begun()
    return tuple(unused(index, card) for index, card in cards if card.uuid not in begun)


def absent() -> tuple[tuple[str, Unavailable], ...]:
    """Return each kind of device that this process does not have, with the reason; the same reason is told once."""
    cards = () if torch.version.hip else driver.visible_cards()
    reasons = {
        "CUDA": _no_cuda(cards),
        "XPU": _no_xpu(),
        "MPS": _no_metal(),
        "NVML": cards if isinstance(cards, Unavailable) else None,
    }
    told: dict[str, Unavailable] = {}
    for kind, reason in reasons.items():
        if reason is not None and reason not in told.values():
            told[kind] = reason
    return tuple(told.items())


def _kinds() -> tuple[str, ...]:
    """Return the kinds whose modules tell of themselves whether they are initialised.

    An extension of torch gives its name to the device type ``privateuseone``.
    """
    extension = torch._C._get_privateuse1_backend_name()
    return ("cuda", "xpu", "mtia", *(() if extension == "privateuseone" else (extension,)))


def _begun() -> frozenset[str | Unavailable]:
    """Return the UUIDs of the cards that this process has initialised, as the driver writes them."""
    properties = [torch.cuda.get_device_properties(index) for index in initialised("cuda")]
    uuids = [str(getattr(device, "uuid", "")) for device in properties]
    cards = [driver.card(uuid) for uuid in uuids]
    return frozenset(card.uuid for card in cards if not isinstance(card, Unavailable))


def _no_cuda(cards: tuple[object, ...] | Unavailable) -> Unavailable | None:
    if initialised("cuda"):
        return None
    if not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        return Unavailable(f"torch {torch.__version__} is built without CUDA and ROCm")
    if torch.version.hip:
        return Unavailable("this process has not used ROCm yet")
    if isinstance(cards, Unavailable):
        return cards
    if cards:
        return Unavailable("this process has not used CUDA yet")
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is None:
        return Unavailable("the NVIDIA driver finds no card")
    return Unavailable(f"CUDA_VISIBLE_DEVICES={hidden!r} leaves this process no card")


def _no_xpu() -> Unavailable | None:
    if initialised("xpu"):
        return None
    if not torch._C._has_xpu:
        return Unavailable(f"torch {torch.__version__} is built without XPU (Intel)")
    return Unavailable("this process has not used an XPU (Intel) yet")


def _no_metal() -> Unavailable | None:
    if not torch.backends.mps.is_built():
        return Unavailable(f"torch {torch.__version__} is built without MPS (Apple)")
    return None if _metal_in_use() else Unavailable("this process has not used MPS (Apple) yet")


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


def _metal_label() -> str:
    name = getattr(torch.backends.mps, "get_name", None)
    return f"{name() if name is not None else 'Apple GPU'}, macOS {platform.mac_ver()[0]}"

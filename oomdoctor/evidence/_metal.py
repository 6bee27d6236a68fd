"""Apple's GPU, which shares the host's memory: torch tells its sums, and no more."""

from __future__ import annotations

import platform
from typing import Any

import torch

from oomdoctor.model.absence import Unavailable
from oomdoctor.model.memory import DeviceMemory, Measured

__all__ = ["MetalAccelerator", "in_use"]


class MetalAccelerator:
    """The one ``mps`` device.

    ``reserved`` is what Metal gave this process, buffers of its own libraries included.
    """

    name = "mps:0"
    measure = "nothing: torch.mps keeps no high-water mark"

    def read(self) -> DeviceMemory:
        """Return the memory as torch and Metal tell it."""
        uncounted = Unavailable("torch's allocator for mps keeps no such count")
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
            inactive_split=uncounted,
            largest_free_block=uncounted,
            peak_allocated=uncounted,
            peak_reserved=uncounted,
            retries=uncounted,
            ooms=uncounted,
            cap=Unavailable("torch.mps does not tell the fraction that this process may use"),
            context=Unavailable("it is part of what Metal gave this process and is not told apart"),
            elsewhere=untold,
            processes=untold,
            card=_label(),
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


def in_use() -> bool:
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


def _label() -> str:
    name = getattr(torch.backends.mps, "get_name", None)
    return f"{name() if name is not None else 'Apple GPU'}, macOS {platform.mac_ver()[0]}"

"""The device that a shadow run takes place on, where that is not this machine's memory.

It stands alone, without torch, because the process that asks may have no room to load it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

__all__ = ["CACHED", "TYPES", "Card"]

TYPES: Final = ("cuda", "xpu", "mps")
"""Devices that can be emulated. ROCm calls its own ``cuda``."""

CACHED: Final = ("cuda", "xpu")
"""Those whose caching allocator is the one that is modelled. Source: ``c10/xpu/XPUCachingAllocator.cpp`` is a port."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """The device to be emulated.

    Attributes:
        type: ``cuda``, ``xpu`` or ``mps``.
        name: as ``get_device_name`` tells it.
        capability: compute capability of CUDA; it decides on workspaces and attention kernels.
        total: bytes of memory that it says to have.
        multiprocessors: how many it has; ``threads``: how many each of them has room for. Buffers hang on both.
        index: its number.
        held: bytes that this process holds there, where the device is one that it has in use; None where it is not.
        flag: see ``device_in_use.fork_flag``; None where that is not to be touched.
        segments: of its caching allocator in this process, as ``torch.cuda.memory_snapshot()`` tells them; none where
            that is not known.
    """

    type: str = "cuda"
    name: str = "a card that this machine lacks"
    capability: tuple[int, int] = (8, 0)
    total: int = 80 << 30
    multiprocessors: int = 108
    threads: int = 2048
    index: int = 0
    held: int | None = None
    flag: int | None = None
    segments: tuple[Mapping[str, Any], ...] = ()

    @property
    def device(self) -> torch.device:
        """The device with its index."""
        import torch

        return torch.device(self.type, self.index)

    def resolve(self, device: Any) -> torch.device:
        """Return ``device`` with its index.

        Raises:
            RuntimeError: there is no such device, with the words of CUDA.
        """
        import torch

        asked = torch.device(self.type, device) if isinstance(device, int) else torch.device(device)
        if asked.type in ("cpu", "meta"):
            return torch.device(asked.type)
        if asked.type != self.type:
            raise RuntimeError(f"the forecast is made for {self.type}: there is no device {asked}")
        if asked.index not in (None, self.index):
            raise RuntimeError(f"CUDA error: invalid device ordinal: the forecast is made for one device, not {asked}")
        return self.device

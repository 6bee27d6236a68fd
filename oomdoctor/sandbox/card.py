"""The device that a program runs on, as a copy of its process is told of it: the copy cannot ask it.

It stands alone, without torch, because the process that asks may have no room to load it.
"""

from __future__ import annotations

import ctypes
import inspect
import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

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
        flag: see ``autograd.fork_flag``; None where that is not to be touched.
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


def not_in_use(kind: str) -> Card:
    """Return a device that this process has not begun to use, or that this machine lacks. To be asked in the copy."""
    import torch

    from oomdoctor.sandbox.autograd import fork_flag

    has_threads = kind == "cuda" and bool(torch.version.cuda or torch.version.hip)
    return Card(type=kind, flag=fork_flag() if has_threads else None)


def in_use() -> Card | None:
    """Return the device of CUDA that this process has in use; None if it has none. To be asked before the fork."""
    import torch

    from oomdoctor.sandbox.autograd import fork_flag

    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    index = torch.cuda.current_device()
    flag = fork_flag()
    told = torch.cuda.get_device_properties(index)
    return Card(
        index=index,
        name=told.name,
        capability=(told.major, told.minor),
        total=told.total_memory,
        multiprocessors=told.multi_processor_count,
        threads=told.max_threads_per_multi_processor,
        held=torch.cuda.memory_allocated(index),
        segments=_segments(index),
        flag=flag if flag is not None and ctypes.c_ubyte.from_address(flag).value == 0 else None,
    )


_OF_SEGMENT: Final = ("address", "total_size", "stream", "segment_type", "segment_pool_id", "is_expandable")
_OF_BLOCK: Final = ("address", "size", "requested_size", "state")


def _segments(index: int) -> tuple[dict[str, Any], ...]:
    """Return the segments of the allocator without the traces that may have been recorded; none of another backend."""
    import torch

    if torch.cuda.get_allocator_backend() != "native":
        return ()
    snapshot: Any = torch.cuda.memory_snapshot
    is_told = "include_traces" in inspect.signature(snapshot).parameters
    records = snapshot(include_traces=False) if is_told else snapshot()
    return tuple(
        {
            **{name: record[name] for name in _OF_SEGMENT if name in record},
            "blocks": [{name: block[name] for name in _OF_BLOCK if name in block} for block in record["blocks"]],
        }
        for record in records
        if record["device"] == index
    )


def cublas_workspace_bytes(capability: tuple[int, int]) -> int:
    """Return what torch gives to each handle of cuBLAS when it first multiplies matrices.

    Source: ``parseChosenWorkspaceSize`` in ``aten/src/ATen/cuda/CublasHandlePool.cpp``: ``:4096:2:16:8``, and 32 MiB
    from Hopper on. Recorded traces of an A100-like card have 8.125 MiB, of an H100 32 MiB.
    """
    sizes = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if sizes:
        return sum(int(kib) * 1024 * int(count) for kib, count in sizes)
    return 32 << 20 if capability[0] in (9, 10, 12) else (2 * 4096 + 8 * 16) * 1024

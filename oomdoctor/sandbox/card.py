"""The device that a program runs on, as a copy of its process is told of it: the copy cannot ask it.

It stands alone, without torch, because the process that asks may have no room to load it.
"""

from __future__ import annotations

import ctypes
import inspect
import os
import re
import struct
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """The device of CUDA to be emulated; ROCm calls its own ``cuda`` as well.

    Attributes:
        name: as ``get_device_name`` tells it.
        capability: compute capability of CUDA; it decides on workspaces and attention kernels.
        total: bytes of memory that it says to have.
        multiprocessors: how many it has; ``threads``: how many each of them has room for. Buffers hang on both.
        index: its number.
        held: bytes that this process holds there, where the device is one that it has in use; None where it is not.
        flag: see ``fork_flag``; None where that is not to be touched.
        segments: of its caching allocator in this process, as ``torch.cuda.memory_snapshot()`` tells them; none where
            that is not known.
    """

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

        return torch.device("cuda", self.index)

    def resolve(self, device: Any) -> torch.device:
        """Return ``device`` with its index; a ``RuntimeError`` with the words of CUDA where there is no such device."""
        import torch

        asked = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        if asked.type in ("cpu", "meta"):
            return torch.device(asked.type)
        if asked.type != "cuda":
            raise RuntimeError(f"the forecast is made for cuda: there is no device {asked}")
        if asked.index not in (None, self.index):
            raise RuntimeError(f"CUDA error: invalid device ordinal: the forecast is made for one device, not {asked}")
        return self.device


def not_in_use() -> Card:
    """Return a device that this process has not begun to use, or that this machine lacks. To be asked in the copy."""
    import torch

    has_threads = bool(torch.version.cuda or torch.version.hip)
    return Card(flag=fork_flag() if has_threads else None)


def in_use() -> Card | None:
    """Return the device of CUDA that this process has in use; None if it has none. To be asked before the fork."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
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


# The autograd engine of a copy ----------------------------------------------------------------------------------------

# Two things of the parent's engine would keep a backward from running in a copy. It has threads where a device is in
# use, which did not survive the fork, and notes that at the fork in a byte that nothing resets; and it asks the device
# which streams are current. The byte is found by decoding one instruction (on x86-64) and cleared, if it read 0 before
# the fork and 1 after. The second is left without a device to ask by a backend of Python's that has none.

_SYMBOL: Final = "_ZN5torch8autograd6Engine30initialize_device_threads_poolEv"
_COMPARE_BYTE: Final = b"\x80\x3d"
"""``cmpb imm8, disp32(%rip)``: seven bytes, of which the displacement is the third to the sixth."""
_LATEST: Final = 24
"""The engine looks at the byte first thing: an instruction that comes later is another one."""


def fork_flag() -> int | None:
    """Return the address of the byte that says that the engine's threads were lost in a fork; None if not found."""
    import torch

    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        begin = ctypes.cast(library[_SYMBOL], ctypes.c_void_p).value
    except (OSError, AttributeError):
        return None
    if begin is None:
        return None
    code = ctypes.string_at(begin, 64)
    at = code.find(_COMPARE_BYTE)
    if not 0 <= at <= _LATEST or code[at + 6] != 0:
        return None
    (displacement,) = struct.unpack_from("<i", code, at + 2)
    return begin + at + 7 + int(displacement)


def mend_autograd(card: Card) -> None:
    """Let a backward begin in this forked process, if the parent's engine had threads."""
    import torch
    from torch.utils import backend_registration

    if card.flag is not None:
        byte = ctypes.c_ubyte.from_address(card.flag)
        if byte.value == 1:
            byte.value = 0
    register = getattr(backend_registration, "_setup_privateuseone_for_python_backend", None)  # not in torch 2.4
    if register is not None and torch._C._get_privateuse1_backend_name() == "privateuseone":
        register(rename="oomdoctor_none")

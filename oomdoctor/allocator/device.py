"""The virtual accelerator as a device: how much memory it has, what lives there, and how it fails.

It only keeps count; ``mode`` shows it what the program does, ``virtual`` switches it on and off.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any

import torch

from oomdoctor.allocator.blocks import Block
from oomdoctor.allocator.caching import CachingAllocator, OutOfSpace
from oomdoctor.allocator.settings import AllocatorSettings
from oomdoctor.allocator.tensor_storages import Ledger, storages_alive, storages_of
from oomdoctor.errors import UsageError
from oomdoctor.model.memory import DeviceMemory, Usage
from oomdoctor.model.sizes import GIB, KIB, MIB

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class VirtualAccelerator:
    """A device of ``capacity_bytes`` on which all CPU tensors of this thread live.

    Its allocator has the settings that it is given, or else those of the environment, which raises ``UsageError`` where
    they cannot be used.

    Attributes:
        number: tells it from others that were switched on in this process.
        allocator: the model of its allocator.
    """

    name: str = "cuda:0"
    measure: str = "tensors counted by the simulated GPU"
    _numbers = count(1)

    def __init__(self, capacity_bytes: int, *, settings: AllocatorSettings | None = None) -> None:
        self.number = next(self._numbers)
        self.capacity_bytes = self._room = capacity_bytes
        self.allocator = CachingAllocator(capacity_bytes, settings=settings or AllocatorSettings.from_environment())
        self._ledger = Ledger(self.allocator)
        self._note_limit()

    def set_per_process_memory_fraction(self, fraction: float) -> None:
        """Let ``fraction`` of the memory be reserved from now on, as ``torch.cuda``'s function of this name does.

        Raises:
            UsageError: ``fraction`` is not a number from 0 to 1.
        """
        if not isinstance(fraction, (int, float)) or not 0 <= fraction <= 1:
            raise UsageError(f"a memory fraction of {fraction!r} cannot be used: it is a number from 0 to 1")
        self.allocator.set_per_process_memory_fraction(fraction)
        self._note_limit()

    def _note_limit(self) -> None:
        limit = self.allocator.limit_bytes
        self._room = self.capacity_bytes if limit is None else limit

    def read(self) -> DeviceMemory:
        """Return the memory as it stands."""
        self._ledger.settle()
        model = self.allocator
        memory = DeviceMemory(
            name=self.name,
            tensor_device="cpu",
            simulated=True,
            switched_on=self.number,
            total=self.capacity_bytes,
            free=self.capacity_bytes - model.reserved,
            allocated=model.allocated,
            reserved=model.reserved,
            inactive_split=model.inactive_split,
            largest_free_block=model.largest_free_block,
            peak_allocated=model.peak_allocated,
            peak_reserved=model.peak_reserved,
            basis="capacity of the simulated GPU",
        )
        return memory if model.limit_bytes is None else replace(memory, cap=model.limit_bytes)

    def usage(self) -> Usage:
        """Return the counters as they were booked last: ``settle`` books what has died since."""
        model = self.allocator
        limit = self.capacity_bytes if model.limit_bytes is None else model.limit_bytes
        name = f"{self.name} (simulated)"
        return Usage(name, model.allocated, model.reserved, limit, self.number)

    def peak(self) -> int:
        """Return the high-water mark of what was allocated since it was last reset."""
        return self.allocator.peak_allocated

    def settle(self, *, sizes: bool = True) -> None:
        """Book every storage that has died, and those of another size. For the thread that the program runs in."""
        self._ledger.settle(sizes=sizes)

    def memory_snapshot(self) -> list[dict[str, Any]]:
        """Return what ``torch.cuda.memory_snapshot()`` returns of a device: segments with their blocks, no frames."""
        self._ledger.settle()
        return self.allocator.memory_snapshot()

    def reset_peak(self) -> None:
        """Begin a new high-water mark at what is held now."""
        self._ledger.settle()
        self.allocator.reset_peak()

    def empty_cache(self) -> None:
        """Return cached, unused segments to the simulated driver."""
        self._ledger.settle()
        self.allocator.empty_cache()

    def block_of(self, tensor: torch.Tensor) -> Block | None:
        """Return the block that stands for the storage of ``tensor``; None if it is not counted or empty."""
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # an oneDNN tensor, or another without a storage
            return None
        return self._ledger.block_of(storage)

    def counted(self) -> Iterator[tuple[torch.UntypedStorage, Block]]:
        """Yield the storages that live here, each with the block that stands for it; empty ones have none."""
        self._ledger.settle()
        return self._ledger.counted()

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether the storage of ``tensor`` is counted here; copies that oomdoctor keeps aside are not."""
        return self.block_of(tensor) is not None

    def adopt(self) -> bool:
        """Count the storages that are alive already; return whether they fit."""
        try:
            for storage in storages_alive():
                self._ledger.count(storage)
        except OutOfSpace:
            return False
        return True

    def count(self, result: Any) -> None:
        """Count the storages of what an operation returned.

        Raises:
            OutOfSpace: one does not fit; it is not counted.
        """
        # Backward goes past a function mode of the user's; so do we.
        with torch._C.DisableTorchFunction() if torch._C._len_torch_function_stack() else nullcontext():
            for storage in storages_of(result):
                self._ledger.count(storage)

    def check_room(self, sizes: Sequence[int]) -> None:
        """Raise what requests of ``sizes`` bytes, one after the other, would raise; keep none of them.

        Raises:
            OutOfSpace: one does not fit.
        """
        self._ledger.settle()
        granted = []
        try:
            for nbytes in sizes:
                granted.append(self.allocator.malloc(nbytes))  # noqa: PERF401 - those granted so far are given back
        finally:
            for block in granted:
                self.allocator.free(block)

    @contextmanager
    def allocating(self, **settings: Any) -> Iterator[None]:
        """Allocate with other settings for as long as the context lasts."""
        before = {name: getattr(self.allocator.settings, name) for name in settings}
        self.allocator.settings = replace(self.allocator.settings, **settings)
        try:
            yield
        finally:
            self.allocator.settings = replace(self.allocator.settings, **before)

    def headroom(self) -> int:
        """Return the bytes that may be allocated still."""
        return self._room - self.allocator.allocated

    def failure(self, full: OutOfSpace) -> torch.OutOfMemoryError:
        """Return the error that CUDA would raise for ``full``."""
        text = cuda_out_of_memory(
            tried=full.segment,
            total=self.capacity_bytes,
            allocated=self.allocator.allocated,
            reserved=self.allocator.reserved,
            allowed=self.allocator.limit_bytes,
        )
        return torch.OutOfMemoryError(text)

    def close(self) -> None:
        """Stop following storages; the counters stay as they are."""
        self._ledger.settle()
        self._ledger.close()


# The text of CUDA's error ---------------------------------------------------------------------------------------------


def cuda_size(size_bytes: int) -> str:
    """Return ``size_bytes`` as CUDA's allocator prints sizes: two decimals, units changed above 1024.

    Source: ``format_size`` in ``c10/cuda/CUDACachingAllocator.cpp``.
    """
    if size_bytes <= KIB:
        return f"{size_bytes} bytes"
    if size_bytes <= MIB:
        return f"{size_bytes / KIB:.2f} KiB"
    if size_bytes <= GIB:
        return f"{size_bytes / MIB:.2f} MiB"
    return f"{size_bytes / GIB:.2f} GiB"


def cuda_out_of_memory(*, tried: int, total: int, allocated: int, reserved: int, allowed: int | None = None) -> str:
    """Return the message for a request of ``tried`` bytes that found no room; all sizes in bytes.

    Args:
        tried: size of the segment that was refused, as CUDA prints it, not of the tensor.
        total: capacity of the device; what is not reserved is free.
        allowed: what this process may reserve; None where nothing limits it.

    Source: the ``TORCH_CHECK_WITH(OutOfMemoryError, ...)`` in ``c10/cuda/CUDACachingAllocator.cpp``.
    """
    allowed_info = "" if allowed is None else f"{cuda_size(allowed)} allowed; "
    return (
        f"CUDA out of memory. Tried to allocate {cuda_size(tried)}. "
        f"GPU 0 has a total capacity of {cuda_size(total)} of which {cuda_size(total - reserved)} is free. "
        f"Including non-PyTorch memory, this process has {cuda_size(reserved)} memory in use. "
        f"{allowed_info}Of the allocated memory {cuda_size(allocated)} is allocated by PyTorch, "
        f"and {cuda_size(reserved - allocated)} is reserved by PyTorch but unallocated. "
        "If reserved but unallocated memory is large try setting "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  "
        "See documentation for Memory Management  "
        "(https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
    )

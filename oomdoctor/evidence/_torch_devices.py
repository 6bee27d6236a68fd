"""Devices with a caching allocator of torch's: CUDA, ROCm, XPU, and backends that extend torch in the same form.

Each function is taken from the backend's own module (``torch.cuda``); what one that is not there would tell is
``Unavailable``. None is called unless the backend was initialised by the program itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, TypeAlias

import torch

from oomdoctor.evidence import driver
from oomdoctor.evidence.driver import shares
from oomdoctor.model.memory import DeviceMemory, Measured, PrivatePool, Usage
from oomdoctor.model.unavailable import Unavailable
from oomdoctor.sandbox.card import cublas_workspace_bytes

Segments: TypeAlias = list[dict[str, Any]] | Unavailable

_KEYS: Final = {
    "allocated": "allocated_bytes.all.current",
    "reserved": "reserved_bytes.all.current",
    "inactive_split": "inactive_split_bytes.all.current",
    "peak_allocated": "allocated_bytes.all.peak",
    "peak_reserved": "reserved_bytes.all.peak",
    "retries": "num_alloc_retries",
    "ooms": "num_ooms",
}
_KEPT_BY_THE_DRIVER: Final = frozenset({"allocated", "reserved", "peak_allocated", "peak_reserved"})
"""What ``cudaMallocAsync`` counts; the others it reports as zero. Source: c10/cuda/CUDAMallocAsyncAllocator.cpp."""

_ORDINARY: Final = (0, 0)


def counters(stats: Mapping[str, Any] | Unavailable, backend: str = "native") -> dict[str, Any]:
    """Return the counters of one device in its ``memory_stats``, by their names in ``DeviceMemory``."""

    def counter(name: str, key: str) -> Measured:
        if isinstance(stats, Unavailable):
            return stats
        if backend == "cudaMallocAsync" and name not in _KEPT_BY_THE_DRIVER:
            return Unavailable("the cudaMallocAsync allocator keeps no such count")
        return int(stats[key]) if key in stats else Unavailable(f"this allocator's memory_stats has no {key}")

    return {name: counter(name, key) for name, key in _KEYS.items()}


def largest_free_block(segments: Segments, index: int) -> Measured:
    """Return the size of the largest cached block that an ordinary request could take, 0 where none is free.

    Blocks of private pools serve no other request. Whether a block belongs to another stream is not looked at.
    """
    if isinstance(segments, Unavailable):
        return segments
    return max(
        (
            int(block["size"])
            for segment in _of_device(segments, index)
            if _pool(segment) == _ORDINARY
            for block in segment["blocks"]
            if block["state"] == "inactive"
        ),
        default=0,
    )


def workspaces(segments: Segments, index: int, size: int) -> tuple[int, ...]:
    """Return the size of each live block that was asked for with the size of a workspace."""
    if isinstance(segments, Unavailable) or not size:
        return ()
    blocks = (block for segment in _of_device(segments, index) for block in segment["blocks"])
    live = (block for block in blocks if block["state"].startswith("active"))
    return tuple(size for block in live if block.get("requested_size", block["size"]) == size)


def private_pools(segments: Segments, index: int) -> tuple[PrivatePool, ...]:
    """Return the private pools with segments on a device, the largest first."""
    if isinstance(segments, Unavailable):
        return ()
    sizes: dict[tuple[int, int], list[int]] = {}
    for segment in _of_device(segments, index):
        if (pool := _pool(segment)) != _ORDINARY:
            size = sizes.setdefault(pool, [0, 0])
            size[0] += int(segment["total_size"])
            size[1] += int(segment["allocated_size"])
    pools = (PrivatePool(name=_title(pool), reserved=size[0], allocated=size[1]) for pool, size in sizes.items())
    return tuple(sorted(pools, key=lambda pool: -pool.reserved))


def _of_device(segments: Iterable[dict[str, Any]], index: int) -> Iterable[dict[str, Any]]:
    return (segment for segment in segments if segment.get("device", index) == index)


def _pool(segment: dict[str, Any]) -> tuple[int, int]:
    first, second = segment.get("segment_pool_id", _ORDINARY)
    return int(first), int(second)


def _title(pool: tuple[int, int]) -> str:
    """Return who made a pool: a graph numbers the first place of its id (``MempoolId_t``), a ``MemPool`` the second."""
    made_by_capture, made_by_handle = pool
    if made_by_capture:
        return f"pool {made_by_capture} of a captured graph"
    return f"pool {made_by_handle} of a MemPool or a graph_pool_handle"


class TorchAccelerator:
    """A device that ``torch.<kind>.memory_stats`` tells of; AMD's are of the kind ``cuda`` too."""

    def __init__(self, kind: str, index: int) -> None:
        self.kind = kind
        self.index = index
        self.name = f"{kind}:{index}"
        self.measure = f"torch.{kind}.max_memory_allocated"

    def read(self) -> DeviceMemory:
        """Return the device's memory by its allocator and its driver."""
        counts = self._counters()
        segments = self._snapshot()
        free, total = self._totals()
        card, label = self._card()
        return DeviceMemory(
            name=self.name,
            tensor_device=self.name,
            total=total,
            free=free,
            **counts,
            largest_free_block=largest_free_block(segments, self.index),
            cap=self._cap(total),
            **shares(card, counts["reserved"])._asdict(),
            private_pools=private_pools(segments, self.index),
            workspaces=workspaces(segments, self.index, self._workspace_bytes()),
            card=label,
            basis=self._basis(),
        )

    def usage(self) -> Usage:
        """Return the allocator's counters, and its limit as far as torch tells it without asking the driver."""
        counts, total = self._counters(), self._capacity()
        cap = self._cap(total)
        limit = cap if isinstance(cap, int) else total
        return Usage(self.name, counts["allocated"], counts["reserved"], limit)

    def peak(self) -> Measured:
        """Return the allocator's high-water mark: what ``torch.cuda.max_memory_allocated`` tells."""
        found: Measured = self._counters()["peak_allocated"]
        return found

    def _counters(self) -> dict[str, Any]:
        return counters(self._call("memory_stats"), self._backend())

    def holds(self, tensor: Any) -> bool:
        """Return whether the memory of ``tensor`` is on this device."""
        return str(tensor.device) == self.name

    def reset_peak(self) -> None:
        """Begin a new high-water mark, where the allocator keeps one."""
        self._call("reset_peak_memory_stats")

    def empty_cache(self) -> None:
        """Return fully free segments to the driver."""
        self._call("empty_cache", of_all=True)

    def _call(self, name: str, *, of_all: bool = False, **options: Any) -> Any:
        """Return what a function of the backend answers for this device, or without it, or why it does not."""
        function = getattr(getattr(torch, self.kind, None), name, None)
        if function is None:
            return Unavailable(f"torch {torch.__version__} has no torch.{self.kind}.{name}")
        return _answer(function, *(() if of_all else (self.index,)), **options)

    def _backend(self) -> str:
        found = self._call("get_allocator_backend", of_all=True)
        return found if isinstance(found, str) else "native"

    def _snapshot(self) -> Segments:
        """Return every segment of the allocator; without the history of allocations, which may be long."""
        if self._backend() == "cudaMallocAsync":
            return Unavailable("the cudaMallocAsync allocator keeps no list of blocks")
        try:
            found = self._call("memory_snapshot", of_all=True, include_traces=False)  # which came after torch 2.4
        except TypeError:
            found = self._call("memory_snapshot", of_all=True)
        return found if isinstance(found, Unavailable) else list(found)

    def _totals(self) -> tuple[Measured, Measured]:
        found = self._call("mem_get_info")
        if not isinstance(found, Unavailable):
            return int(found[0]), int(found[1])
        total = self._capacity()
        return found, found if isinstance(total, Unavailable) else total

    def _capacity(self) -> Measured:
        total = getattr(self._call("get_device_properties"), "total_memory", None)
        return Unavailable(f"torch.{self.kind} does not tell it") if total is None else int(total)

    def _workspace_bytes(self) -> int:
        """Return how large a workspace of cuBLAS is, 0 where that is not known.

        PyTorch allocates one for each pair of a handle and a stream, and keeps it; every thread has a handle.
        Source: ``getChosenWorkspaceSize`` in aten/src/ATen/cuda/CublasHandlePool.cpp.
        """
        if self.kind != "cuda" or torch.version.hip:
            return 0
        told = getattr(torch._C, "_cuda_getCublasWorkspaceSize", None)  # which came with torch 2.13
        if told is None:
            capability = self._call("get_device_capability")
            return 0 if isinstance(capability, Unavailable) else cublas_workspace_bytes(capability)
        size = _answer(told)
        return 0 if isinstance(size, Unavailable) else int(size)

    def _cap(self, total: Measured) -> Measured:
        fraction = self._call("get_per_process_memory_fraction")
        for known in (fraction, total):
            if isinstance(known, Unavailable):
                return Unavailable(f"whether a cap is set for this process cannot be told: {known.reason}")
        return int(total * fraction) if fraction < 1 else Unavailable("no cap is set for this process")

    def _card(self) -> tuple[driver.Card | Unavailable, str | Unavailable]:
        properties = self._call("get_device_properties")
        if isinstance(properties, Unavailable):
            return properties, properties
        name = str(getattr(properties, "name", self.name))
        if torch.version.hip and self.kind == "cuda":
            return Unavailable("other use of AMD cards is not read"), f"{name}, ROCm {torch.version.hip}"
        if self.kind != "cuda":
            version = getattr(properties, "driver_version", None)
            return Unavailable(f"other use of {self.kind} devices is not read"), (
                f"{name}, driver {version}" if version else name
            )
        uuid = getattr(properties, "uuid", None)
        if uuid is None:
            return Unavailable("this version of torch does not tell the card's UUID"), name
        card = driver.card(str(uuid))
        label = card if isinstance(card, Unavailable) else card.label
        return card, name if isinstance(label, Unavailable) else label

    def _basis(self) -> str:
        if self.kind == "cuda":
            return "hipMemGetInfo" if torch.version.hip else "cudaMemGetInfo"
        return f"torch.{self.kind}.mem_get_info"


def unused(index: int | None, card: driver.Card) -> DeviceMemory:
    """Return the reading of a card that this process has not initialised: the driver's alone."""
    untouched = Unavailable("this process has not used it")
    counted = {*_KEYS, "largest_free_block", "cap"} - {"allocated", "reserved"}
    untold: dict[str, Any] = dict.fromkeys(counted, untouched)
    used = shares(card, 0, in_use=False)
    listed = () if isinstance(used.processes, Unavailable) else used.processes
    name = f"cuda:{index}" if index is not None else card.uuid
    name = "cuda:?" if isinstance(name, Unavailable) else name
    return DeviceMemory(
        name=name,
        tensor_device=name,
        total=card.total,
        free=card.free,
        allocated=0,
        reserved=0,
        **untold,
        context=used.context if any(process.is_own for process in listed) else untouched,
        elsewhere=used.elsewhere,
        processes=used.processes,
        card=card.label,
        basis="the NVIDIA driver (NVML)",
    )


def initialised(kind: str) -> tuple[int, ...]:
    """Return the indices of the devices of a kind that this process has initialised; initialises none.

    A CUDA device counts once it has a context: asking for its memory would make one, which takes some hundred MiB.
    """
    module = getattr(torch, kind, None)
    begun = getattr(module, "is_initialized", None)
    if begun is None or not begun():
        return ()
    indices = range(module.device_count())  # type: ignore[union-attr]
    has_context = getattr(torch._C, "_cuda_hasPrimaryContext", None) if kind == "cuda" else None
    if has_context is None:
        return tuple(indices)
    held = {index: _answer(torch.cuda.memory_reserved, index) for index in indices}  # to ask makes no context
    return tuple(index for index in indices if has_context(index) or (isinstance(held[index], int) and held[index] > 0))


def _answer(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Return a function's answer; a device that is lost, or an allocator that cannot tell, is ``Unavailable``."""
    try:
        return function(*args, **options)
    except RuntimeError as error:
        first, *_ = [*str(error).strip().splitlines(), type(error).__name__]
        return Unavailable(f"torch cannot tell it: {first}")

"""Rows of the allocators inside PyTorch: CUDA, HIP, XPU, NPU and MPS.

Order is priority: where two rows claim the same text, the first has it, so that wordings that say more come before
those that say less.
"""

from __future__ import annotations

from typing import Final

from oomdoctor.incident.formats import Format, compiled
from oomdoctor.model.incident import Family

_TORCH: Final = (
    compiled(r"Tried to allocate {requested}"),
    compiled(r"\((?:GPU|XPU|NPU|HIP) {device#};"),
    compiled(r"{total} total capacity"),
    compiled(r"{allocated} already allocated"),
    compiled(r"(?<![a-z]){free} free[;)]"),
    compiled(r"{cached} cached"),
    compiled(r"{reserved} reserved in total"),
    compiled(r"(?:GPU|XPU|NPU) {device#} has a total capaci?ty of"),
    compiled(r"total capaci?ty of {total}"),
    compiled(r"of which {free} is free"),
    compiled(r"this process has {process} memory in use"),
    compiled(r"Of the allocated memory {allocated} is allocated by PyTorch"),
    compiled(r"{unallocated} is reserved by PyTorch but unallocated"),
)
_CUDA: Final = compiled(r"\bCUDA out of memory")
_CUDA_SHORT: Final = compiled(
    r"Error(?:: |\(['\"])CUDA out of memory|\bCUDA out of memory(?=\. Tried to allocate)"
    r"|(?:^|[:\]>] ?)CUDA out of memory"
    r"(?=[.!]?$|[,;:]? (?:with|at|for|on|in|when|while|during|after|even)\b)"
)
_MENDED: Final = compiled(r"\bfix(?:e[sd])?\b[: ][^\n]{0,60}$")
_SPLIT_HINT: Final = "If reserved memory is >> allocated memory try setting max_split_size_mb to avoid fragmentation."


def _torch(name: str, title: str, versions: str, requires: str | None, sample: str) -> Format:
    return Format(
        name=name,
        family=Family.CUDA,
        title=title,
        versions=versions,
        needles=("cuda out of memory",),
        pattern=_CUDA if requires else _CUDA_SHORT,
        clauses=_TORCH,
        requires=compiled(requires) if requires else None,
        denied=None if requires else _MENDED,
        device="cuda:{}",
        flows=True,
        reach=1200,
        sample=sample,
    )


def _other(name: str, family: Family, kind: str, device: str, sample: str) -> Format:
    return Format(
        name=name,
        family=family,
        title=f"The caching allocator of the {kind} device could not get the memory for a tensor.",
        versions="PyTorch 2",
        needles=(f"{kind.lower()} out of memory",),
        pattern=compiled(rf"\b{kind} out of memory"),
        clauses=_TORCH,
        device=device,
        flows=True,
        reach=1200,
        sample=sample,
    )


_ALLOCATOR: Final = "The caching allocator could not get the memory for a tensor."

_TORCH_ROWS: Final = (
    Format(
        name="cuda_malloc_async",
        family=Family.CUDA,
        title="CUDA's own stream-ordered allocator could not get the memory for a tensor.",
        versions="PyTorch 1.13 on with backend:cudaMallocAsync",
        needles=("allocation on device",),
        pattern=compiled(r"Allocation on device ?{device#}?(?: would exceed allowed memory|$)"),
        clauses=(
            compiled(r"Currently allocated : {allocated}"),
            compiled(r"Requested : {requested}"),
            compiled(r"Device limit : {total}"),
            compiled(r"Free \(according to CUDA\): {free}"),
        ),
        device="cuda:{}",
        reach=600,
        sample=(
            "torch.OutOfMemoryError: Allocation on device 0 would exceed allowed memory. (out of memory)\n"
            "Currently allocated     : 6.25 GiB\nRequested               : 1.50 GiB\n"
            "Device limit            : 8.00 GiB\nFree (according to CUDA): 12.00 MiB\n"
            "PyTorch limit (set by user-supplied memory fraction)\n                        : 17179869184.00 GiB"
        ),
    ),
    Format(
        name="cuda_1eb",
        family=Family.CUDA,
        title="A tensor of more than an exbibyte was asked for: a size that was computed wrongly.",
        versions="PyTorch 2",
        needles=("more than 1eb memory",),
        pattern=compiled(r"(?:CUDA out of memory\. )?Tried to allocate more than 1EB memory"),
        device="cuda:{}",
        sample="torch.OutOfMemoryError: CUDA out of memory. Tried to allocate more than 1EB memory.",
    ),
    _torch(
        "cuda_cached",
        _ALLOCATOR,
        "PyTorch 1.0 to 1.3; 'cached' is unused cache, without what is allocated",
        r"\d ?(?:[KMG]i?B|bytes) cached",
        "RuntimeError: CUDA out of memory. Tried to allocate 300.00 MiB (GPU 1; 7.80 GiB total capacity; "
        "5.10 GiB already allocated; 120.31 MiB free; 1.75 GiB cached)",
    ),
    _torch(
        "cuda_reserved_hint",
        _ALLOCATOR,
        "PyTorch 1.10 to 2.0; 'reserved' includes what is allocated; the hint is always printed",
        r"reserved in total by PyTorch\)? ?If reserved memory",
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 640.00 MiB (GPU 0; 14.75 GiB total "
        f"capacity; 12.40 GiB already allocated; 90.00 MiB free; 13.95 GiB reserved in total by PyTorch) {_SPLIT_HINT}",
    ),
    _torch(
        "cuda_reserved",
        _ALLOCATOR,
        "PyTorch 1.4 to 1.9; 'reserved' includes what is allocated",
        r"reserved in total",
        "RuntimeError: CUDA out of memory. Tried to allocate 44.00 MiB (GPU 0; 5.93 GiB total capacity; "
        "4.61 GiB already allocated; 31.50 MiB free; 4.88 GiB reserved in total by PyTorch)",
    ),
    _torch(
        "cuda_capacty",
        _ALLOCATOR,
        "PyTorch 2.1, spelt so; 'reserved but unallocated' is the unused part",
        r"total capacty of",
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 208.00 MiB. GPU 0 has a total capacty of "
        "9.78 GiB of which 41.12 MiB is free. Process 811 has 9.70 GiB memory in use. Of the allocated memory "
        "8.92 GiB is allocated by PyTorch, and 310.77 MiB is reserved by PyTorch but unallocated.",
    ),
    _torch(
        "cuda_new_alloc_conf",
        _ALLOCATOR,
        "PyTorch 2.10; 'reserved but unallocated' is the unused part",
        r"PYTORCH_ALLOC_CONF",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 72.00 MiB. GPU 3 has a total capacity of "
        "79.11 GiB of which 33.19 MiB is free. Including non-PyTorch memory, this process has 79.06 GiB memory in use. "
        "Of the allocated memory 77.83 GiB is allocated by PyTorch, and 604.20 MiB is reserved by PyTorch but "
        "unallocated. If reserved but unallocated memory is large try setting "
        "PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation.",
    ),
    _torch(
        "cuda_new_capped",
        "The caching allocator could not get the memory for a tensor; this process has a cap of its own.",
        "PyTorch 2.2 on with a memory fraction",
        r"\d ?[KMGT]i?B allowed; Of the allocated",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.25 GiB. GPU 0 has a total capacity of "
        "24.00 GiB of which 14.50 GiB is free. Including non-PyTorch memory, this process has 9.30 GiB memory in "
        "use. 9.60 GiB allowed; Of the allocated memory 8.40 GiB is allocated by PyTorch, and 100.00 MiB is reserved "
        "by PyTorch but unallocated.",
    ),
    _torch(
        "cuda_new",
        _ALLOCATOR,
        "PyTorch 2.2 on; private pools, where there are such, are named between",
        r"total capacity of|is allocated by PyTorch",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.12 GiB. GPU 0 has a total capacity of "
        "15.70 GiB of which 700.25 MiB is free. Including non-PyTorch memory, this process has 14.99 GiB memory in "
        "use. Of the allocated memory 11.80 GiB is allocated by PyTorch, with 96.00 MiB allocated "
        "in private pools (e.g., CUDA Graphs), and 2.31 GiB is reserved by PyTorch but unallocated.",
    ),
    _torch(
        "cuda_short",
        _ALLOCATOR,
        "any; the numbers were cut off or never printed",
        None,
        "RuntimeError: CUDA out of memory.",
    ),
    _other(
        "hip_new",
        Family.HIP,
        "HIP",
        "cuda:{}",
        "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 96.00 MiB. GPU 0 has a total capacity of "
        "11.98 GiB of which 40.00 MiB is free. Of the allocated memory 11.03 GiB is allocated by PyTorch, and "
        "212.50 MiB is reserved by PyTorch but unallocated.",
    ),
    _other(
        "xpu_new",
        Family.XPU,
        "XPU",
        "xpu:{}",
        "torch.OutOfMemoryError: XPU out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of "
        "7.81 GiB of which 1.90 GiB is free. Of the allocated memory 5.60 GiB is allocated by PyTorch, and "
        "12.00 MiB is reserved by PyTorch but unallocated.",
    ),
    _other(
        "npu",
        Family.NPU,
        "NPU",
        "npu:{}",
        "RuntimeError: NPU out of memory. Tried to allocate 130.00 MiB (NPU 2; 29.50 GiB total capacity; 27.30 GiB "
        "already allocated; 27.30 GiB current active; 88.10 MiB free; 28.01 GiB reserved in total by PyTorch).If "
        "reserved memory is >> allocated memory try setting max_split_size_mb to avoid fragmentation.",
    ),
    Format(
        name="xpu_ipex",
        family=Family.XPU,
        title="One block is larger than this Intel device can give out at once.",
        versions="Intel extension for PyTorch 2",
        needles=("can not allocate memory block",),
        pattern=compiled(r"can NOT allocate memory block with size larger than"),
        clauses=_TORCH,
        device="xpu:{}",
        flows=True,
        sample=(
            "RuntimeError: Current platform can NOT allocate memory block with size larger than 4GB! Tried to allocate "
            "5.21 GiB (GPU  0; 14.90 GiB total capacity; 10.00 MiB already allocated; 12.00 MiB reserved in total "
            "by PyTorch)"
        ),
    ),
    Format(
        name="no_batch_size",
        family=Family.CUDA,
        title="Every batch size that was tried ran out of memory, down to the smallest.",
        versions="Accelerate 0.7 on",
        needles=("no executable batch size found",),
        pattern=compiled(r"No executable batch size found, reached"),
        device="cuda:{}",
        sample="RuntimeError: No executable batch size found, reached zero.",
    ),
    Format(
        name="torch_headless",
        family=Family.CUDA,
        title="The caching allocator could not get the memory for a tensor; the head of the message is lost.",
        versions="any",
        needles=("tried to allocate",),
        pattern=compiled(r"Tried to allocate {requested}(?= \(GPU|\.? GPU \d)"),
        clauses=_TORCH,
        device="cuda:{}",
        flows=True,
        reach=1000,
        sample=(
            "Tried to allocate 20.00 MiB (GPU 0; 3.94 GiB total capacity; 3.20 GiB already allocated; 9.06 MiB free;"
        ),
    ),
)

_MPS_ROWS: Final = (
    Format(
        name="mps",
        family=Family.MPS,
        title="The MPS allocator would go over its share of the unified memory.",
        versions="PyTorch 1.12 on; up to 2.6 the units read GB and are binary",
        needles=("mps backend out of memory",),
        pattern=compiled(r"MPS backend out of memory"),
        clauses=(
            compiled(r"MPS allocated: {allocated}"),
            compiled(r"max allowed: {total}"),
            compiled(r"Tried to allocate {requested}"),
        ),
        device="mps",
        flows=True,
        sample=(
            "RuntimeError: MPS backend out of memory (MPS allocated: 12.40 GB, other allocations: 840.00 MB, max "
            "allowed: 13.60 GB). Tried to allocate 512.00 MB on private pool."
        ),
    ),
    Format(
        name="mps_invalid_buffer",
        family=Family.MPS,
        title="One tensor is larger than the largest Metal buffer.",
        versions="PyTorch 1.12 on",
        needles=("invalid buffer size",),
        pattern=compiled(r"Invalid buffer size: {requested}"),
        device="mps",
        sample="RuntimeError: Invalid buffer size: 14.25 GB",
    ),
    Format(
        name="mps_ndarray",
        family=Family.MPS,
        title="One array is larger than a Metal array can be.",
        versions="macOS",
        needles=("total bytes of ndarray",),
        pattern=compiled(r"total bytes of NDArray (?:> ?)?2\*\*32"),
        device="mps",
        sample="MPSNDArray.mm:700: failed assertion `Error: total bytes of NDArray > 2**32'",
    ),
    Format(
        name="metal",
        family=Family.MPS,
        title="A Metal command ran out of memory.",
        versions="macOS; MLX",
        needles=("callbackerroroutofmemory", "[metal::malloc]"),
        pattern=compiled(r"CallbackErrorOutOfMemory|\[metal::malloc\]"),
        clauses=(compiled(r"allocate {requested#} bytes"), compiled(r"buffer size of {total#} bytes")),
        device="mps",
        sample=(
            "Error: command buffer exited: Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)"
        ),
    ),
)

ROWS: Final = (*_TORCH_ROWS, *_MPS_ROWS)

"""The text of CUDA's out-of-memory error, made from numbers.

A simulated device fails in the words of a real one, so that everything that reads the message is put to the same use.
The form is that of torch 2.4 and later, one process alone on the device and no memory outside of the allocator.
"""

from __future__ import annotations

from oomdoctor.model.sizes import GIB, KIB, MIB


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

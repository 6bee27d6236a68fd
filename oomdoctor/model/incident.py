"""What happened: one failure, as it was recognised from an exception or from text."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Family(StrEnum):
    """Who refused the memory. The words are those of the labelled message corpora."""

    CUDA = "cuda_oom"
    CUDA_INIT = "cuda_init_oom"
    HIP = "hip_oom"
    MPS = "mps_oom"
    XPU = "xpu_oom"
    NPU = "npu_oom"
    MUSA = "musa_oom"
    MLU = "mlu_oom"
    HPU = "hpu_oom"
    NEURON = "neuron_oom"
    CUBLAS = "cublas_alloc"
    CUDNN = "cudnn_alloc"
    HOST = "host_oom"
    NUMPY = "numpy_oom"
    PINNED = "pinned_host_oom"
    FORK = "fork_oom"
    SHM = "shm"
    WORKER_KILLED = "worker_killed"
    RANK_KILLED = "rank_killed"
    KERNEL_KILLED = "kernel_killed"
    CUPY = "cupy_oom"
    JAX = "jax_oom"
    TF = "tf_oom"
    VLLM_KV = "vllm_kv"
    TRITON_RESOURCE = "triton_resource"
    NOT_OOM = "not_oom"


@dataclass(frozen=True, slots=True, kw_only=True)
class CellLine:
    """The line of the user's own code that was running.

    Attributes:
        number: the cell's execution count, None outside of a notebook; negative in a module of the user's own.
        line: one-based line within the cell or the file, None where a text shows the line and not where it stands.
        source_line: its text, stripped.
        function: the function it stands in, ``<module>`` at the top level of the cell.
        file: what the module is called that it stands in, None in a cell.
    """

    number: int | None
    line: int | None
    source_line: str
    function: str = "<module>"
    file: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """One failure. Sizes are bytes, None where the message has none.

    Attributes:
        format: name of the row of the message table that matched, None for an exception class alone.
        device: ``cuda:0`` and the like, ``cpu`` for host memory.
        reserved: what the caching allocator holds, allocated bytes included.
        process_used: what this process holds on the device by the driver's count, memory outside of PyTorch included.
        cell: the line of the cell that failed; ``inner``: the line of the user's that was reached from there, a
            function of an earlier cell or a module's ``forward``, None where it is the same line.
        framework_frame: the innermost frame, ``file:line function``, wherever it is.
    """

    is_oom: bool
    family: Family
    format: str | None = None
    device: str | None = None
    requested: int | None = None
    total: int | None = None
    free: int | None = None
    allocated: int | None = None
    reserved: int | None = None
    process_used: int | None = None
    exc_type: str | None = None
    message: str = ""
    cell: CellLine | None = None
    inner: CellLine | None = None
    framework_frame: str | None = None

"""Rows for failures that are taken for a lack of memory and are none: nothing that frees memory would help."""

from __future__ import annotations

from typing import Final

from oomdoctor.incident.formats import Format, compiled
from oomdoctor.model.incident import Family


def _not_oom(
    name: str,
    title: str,
    needles: tuple[str, ...],
    shape: str,
    sample: str,
    *,
    family: Family = Family.NOT_OOM,
    unless: str | None = None,
) -> Format:
    return Format(
        name=name,
        family=family,
        title=title,
        versions="any",
        needles=needles,
        pattern=compiled(shape),
        unless=compiled(unless) if unless else None,
        sample=sample,
    )


ROWS: Final = (
    _not_oom(
        "triton_smem",
        "A Triton kernel wants more on-chip shared memory than the device has; its tiles are too large.",
        ("out of resource", "no valid triton configs"),
        r"out of resources?: (?:shared memory|threads|registers|tensor memory)|No valid triton configs",
        "OutOfResources: out of resource: shared memory, Required: 131072, Hardware limit: 101376.",
        family=Family.TRITON_RESOURCE,
    ),
    _not_oom(
        "tpu_vmem",
        "A TPU kernel wants more on-chip memory than there is; it is not the device's main memory.",
        ("memory space vmem", "memory space smem", "scoped vmem"),
        r"memory space (?:vmem|smem)|scoped vmem",
        "RuntimeError: RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem.",
        family=Family.TRITON_RESOURCE,
    ),
    _not_oom(
        "launch_resources",
        "A kernel wants more registers or threads than one multiprocessor has.",
        ("too many resources requested",),
        r"too many resources requested for launch",
        "RuntimeError: CUDA error: too many resources requested for launch",
    ),
    _not_oom(
        "lock_table",
        "The table of locks of a PostgreSQL server is full; it is not this machine's memory.",
        ("out of shared memory",),
        r"errors\.OutOfMemory[):]{1,2} ?out of shared memory"
        r"|out of shared memory ?HINT: You might need to increase max_",
        "psycopg2.errors.OutOfMemory: out of shared memory",
    ),
    _not_oom(
        "illegal_access",
        "A kernel read or wrote outside of its memory; the process must be started anew.",
        ("illegal memory access",),
        r"an illegal memory access was encountered",
        "RuntimeError: CUDA error: an illegal memory access was encountered",
    ),
    _not_oom(
        "misaligned",
        "A kernel used a misaligned address; the process must be started anew.",
        ("misaligned address",),
        r"misaligned address",
        "RuntimeError: CUDA error: misaligned address",
    ),
    _not_oom(
        "device_assert",
        "An assertion failed on the device, as a rule an index or a class label out of range.",
        ("device-side assert", "], thread: ["),
        r"device-side assert triggered|block: \[[\d,]{1,30}\], thread: \[[\d,]{1,30}\] Assertion",
        "RuntimeError: CUDA error: device-side assert triggered",
    ),
    _not_oom(
        "no_kernel_image",
        "This build has no code for this device's architecture.",
        ("no kernel image",),
        r"no kernel image is available",
        "RuntimeError: CUDA error: no kernel image is available for execution on the device",
    ),
    _not_oom(
        "driver_version",
        "The driver is too old for the CUDA runtime.",
        ("driver version is insufficient", "driver on your system is too old"),
        r"driver version is insufficient|driver on your system is too old",
        "CUDA driver version is insufficient for CUDA runtime version",
    ),
    _not_oom(
        "library_error",
        "A CUDA library failed for a reason other than memory.",
        ("cublas_status_", "cudnn_status_", "cusolver_status_", "cufft_", "unable to find an engine"),
        r"(?:CUBLAS|CUDNN|CUSOLVER)_STATUS_(?!ALLOC_FAILED|NOT_INITIALIZED|SUCCESS)[A-Z_]{1,40}|CUFFT_(?!ALLOC"
        r"|SUCCESS)[A-Z_]{1,30}"
        r"|GET was unable to find an engine",
        "RuntimeError: cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
    ),
    _not_oom(
        "cuda_error_other",
        "A CUDA call failed for a reason other than memory.",
        ("cuda error: ", "cuda runtime error (", "thcudacheck fail", "hip error: "),
        r"(?:CUDA|HIP) error: (?!out of memory|CUBLAS_STATUS_(?:ALLOC|NOT_INIT))[^\n]{1,120}"
        r"|cuda runtime error \((?!2\))\d{1,4}\)|THCudaCheck FAIL [^\n]{1,300}error=(?!2 )\d{1,4}",
        "RuntimeError: CUDA error: invalid device ordinal",
    ),
    _not_oom(
        "cuda_code_other",
        "A CUDA call failed for a reason other than memory.",
        ("cuda_error_", "cudaerror"),
        r"\bCUDA_ERROR_(?!OUT_OF_MEMORY)[A-Z_]{3,60}\b|\bcudaError(?!MemoryAllocation)[A-Z][A-Za-z]{3,50}\b",
        "numba.cuda.cudadrv.driver.CudaAPIError: [700] Call to cuMemcpyDtoH results in CUDA_ERROR_ILLEGAL_ADDRESS",
    ),
    _not_oom(
        "timeout",
        "Something took longer than its limit: a rank that is slow, stuck or gone.",
        ("collective operation timeout", "timeouterror", "timed out"),
        r"caught collective operation timeout|^(?:[\w.]{1,60}\.)?TimeoutError\b|(?:connection|read"
        r"|operation) timed out",
        "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=8, OpType=ALLREDUCE)",
    ),
    _not_oom(
        "nccl_peer",
        "Another rank closed the connection; the reason stands in that rank's output.",
        ("closed by remote peer", "connection reset by peer", "socket recv failed"),
        r"Connection closed by remote peer|Connection reset by peer|Socket recv failed",
        "NCCL WARN socketProgress: Connection closed by remote peer host7<51159>",
    ),
    _not_oom(
        "nccl",
        "NCCL failed for a reason other than memory; its last line says which.",
        ("nccl error", "ncclunhandledcudaerror", "ncclsystemerror", "cuda failure", "ncclinternalerror"),
        r"NCCL error in|nccl(?:UnhandledCuda|System|Internal|Remote)Error|Cuda failure(?: \d{1,4})? '(?!out of memory)",
        "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:99, unhandled cuda error",
        unless=r"Cuda failure(?: \d{1,4})? 'out of memory|Failed to CUDA (?:calloc|malloc)",
    ),
    _not_oom(
        "worker_signal",
        "A loader's worker was ended by a signal that does not come from a lack of memory.",
        ("is killed by signal",),
        r"is killed by signal: (?!Killed|Bus)[A-Za-z]{3,30}",
        "RuntimeError: DataLoader worker (pid 7) is killed by signal: Segmentation fault.",
    ),
    _not_oom(
        "worker_failed",
        "A loader's worker ended with an error of its own; with num_workers=0 it shows which.",
        ("exited unexpectedly with",),
        r"exited unexpectedly with exit code (?!-9\b|137\b)-?\d{1,4}",
        "RuntimeError: worker (pid 99) exited unexpectedly with exit code 1. Details are lost.",
    ),
    _not_oom(
        "rank_failed",
        "A rank failed with an error of its own; the reason stands in that rank's output.",
        ("exitcode",),
        r"exitcode ?:? ?(?!-9\b)-?\d{1,3}",
        "ERROR:torch.distributed.elastic:failed (exitcode: 1) local_rank: 0 (pid: 44) of binary: /usr/bin/python",
    ),
    _not_oom(
        "descriptors",
        "The limit on open files was reached; raise it, or use the file_system sharing strategy.",
        ("too many open files", "items of ancdata"),
        r"Too many open files|received 0 items of ancdata",
        "OSError: [Errno 24] Too many open files",
    ),
    _not_oom(
        "time_limit",
        "The scheduler ended the job because its time was over, or because it gave the machine to another one.",
        (
            "due to time limit",
            "due to preemption",
            "due to job requeue",
            "maximum execution time",
            "walltime",
            "term_runlimit",
            "job is preempted",
        ),
        r"DUE TO (?:TIME LIMIT|PREEMPTION|JOB REQUEUE|NODE FAILURE)|exceeded the maximum execution time"
        r"|walltime [^\n]{1,60}exceeded limit|TERM_RUNLIMIT|this job is preempted",
        "slurmstepd: error: *** JOB 7 ON node3 CANCELLED AT 2024-01-02T03:04:05 DUE TO TIME LIMIT ***",
    ),
    _not_oom(
        "device_lost",
        "The device or its driver failed; the machine needs a look, and perhaps a restart.",
        (
            "fallen off the bus",
            "uncorrectable ecc",
            "devicelost",
            "device_lost",
            "device removed",
            "device_removed",
            "nvrm: xid",
        ),
        r"fallen off the bus|uncorrectable ECC error|DeviceLost|DEVICE_(?:LOST|REMOVED)|device removed|NVRM: Xid",
        "terminate called after throwing an instance of 'vk::DeviceLostError'",
    ),
    _not_oom(
        "no_driver",
        "No device can be used: the driver is missing, or the environment hides the devices.",
        ("found no nvidia driver", "no cuda gpus are available", "cuda unknown error", "no cuda-capable device"),
        r"Found no NVIDIA driver|No CUDA GPUs are available|CUDA unknown error|no CUDA-capable device",
        "RuntimeError: No CUDA GPUs are available",
    ),
    _not_oom(
        "disk_full",
        "The disk is full.",
        (
            "no space left on device",
            "not enough space on the disk",
            "disk quota exceeded",
            "storagefull",
            "failed writing file",
        ),
        r"No space left on device|not enough space on the disk|Disk quota exceeded|kind: StorageFull"
        r"|failed writing file",
        "OSError: [Errno 28] No space left on device",
    ),
    _not_oom(
        "int_max",
        "A tensor has more elements than this operation can index.",
        ("int_max elements", "must fit in", "32-bit index"),
        r"INT_MAX elements|canUse32BitIndexMath|numel must fit in",
        "RuntimeError: nonzero is not supported for tensors with more than INT_MAX elements",
    ),
    _not_oom(
        "negative_size",
        "A negative size was asked for: a size that was computed wrongly.",
        ("called with negative number", "negative malloc size", "negative dimensions are not"),
        r"alloc_cpu\(\) seems to have been called with negative number|negative malloc size"
        r"|negative dimensions are not allowed",
        "RuntimeError: alloc_cpu() seems to have been called with negative number: 18446744072",
    ),
    _not_oom(
        "free_query",
        "This device cannot say how much of its memory is free.",
        ("querying the available free memory",),
        r"support querying the available free memory",
        "RuntimeError: The device (GPU) doesn't support querying the available free memory.",
    ),
    _not_oom(
        "disk_io",
        "A file could not be written or read; the disk may be full or broken.",
        ("input/output error",),
        r"Input/output error",
        "RuntimeError: write(): fd 7 failed with Input/output error",
    ),
    _not_oom(
        "static_tls",
        "A library was loaded too late for the room that is set aside for thread-local data: import it earlier.",
        ("static tls block",),
        r"cannot allocate memory in static TLS block",
        "ImportError: libgomp.so.1: cannot allocate memory in static TLS block",
    ),
    _not_oom(
        "threads",
        "The limit on processes or threads was reached (ulimit -u, pids of the cgroup); memory is not what is short.",
        ("can't start new thread", "pthread_create failed", "resource temporarily unavailable"),
        r"can't start new thread|pthread_create failed|Resource temporarily unavailable",
        "RuntimeError: can't start new thread",
    ),
    _not_oom(
        "watchers",
        "The limit on watched files was reached (fs.inotify.max_user_watches).",
        ("file watchers", "inotify"),
        r"number of file watchers reached|inotify (?:watch|instance) limit",
        "Error: ENOSPC: System limit for number of file watchers reached",
    ),
    _not_oom(
        "arena_plan",
        "The buffer of a plan for other shapes was too small: a fault of the library, not a lack of memory.",
        ("not enough space: expected",),
        r"not enough space: expected \d{1,20}, got \d{1,20}",
        "onnx runtime error 2: not enough space: expected 270000, got 260000",
    ),
    _not_oom(
        "shared_mapping",
        "A piece of shared memory could not be mapped for a reason other than memory.",
        ("map view of shared file",),
        r"map view of shared file <[^>\n]{1,80}>, error code: <(?!1455|8>|14>)\d{1,5}>",
        "RuntimeError: Couldn't map view of shared file <torch_1_2>, error code: <5>",
    ),
    _not_oom(
        "tactic_skipped",
        "TensorRT passed over a way to compute a layer that needs more workspace than there is, and goes on.",
        ("skipping tactic", "to use tactic"),
        r"Skipping tactic|memory is insufficient to use tactic",
        "[TRT] [W] Skipping tactic 5 due to insufficient memory on requested size of 900 detected for tactic 6.",
    ),
    _not_oom(
        "heap_corruption",
        "The process damaged its own heap: a fault of a library, and not a lack of memory.",
        ("malloc(): ", "free(): ", "double free", "corrupted ", "invalid pointer", "munmap_chunk"),
        r"malloc\(\): (?:memory corruption|invalid|corrupted|unsorted|mismatching|unaligned|smallbin)"
        r"|(?:free|realloc|munmap_chunk)\(\): (?:invalid|corrupted|double)|double free or corruption"
        r"|corrupted (?:size vs\. prev_size|double-linked list)|Attempt to free invalid pointer",
        "free(): invalid next size (fast)",
    ),
    _not_oom(
        "device_fault",
        "A kernel read or wrote an address of the device that it may not; the process must be started anew.",
        ("memory access fault by gpu", "hsa_status_error_memory"),
        r"Memory access fault by GPU|HSA_STATUS_ERROR_MEMORY_(?:FAULT|APERTURE_VIOLATION)",
        "Memory access fault by GPU node-2 on address 0x7f00. Reason: Page not present or supervisor privilege.",
    ),
    _not_oom(
        "recursion",
        "The program called itself too deeply.",
        ("maximum recursion depth", "stack overflow", "c stack usage", "3221225725", "0xc00000fd"),
        r"maximum recursion depth exceeded|\bstack overflow\b|C stack usage\s{1,3}\d{1,20}"
        r"|exited code: 3221225725|0xC00000FD",
        "RecursionError: maximum recursion depth exceeded",
    ),
    _not_oom(
        "shape",
        "Shapes, sizes or indices do not fit together.",
        ("size mismatch", "shapes cannot be multiplied", "out of bounds", "must match the size", "index out of range"),
        r"size mismatch,|shapes cannot be multiplied|is out of bounds for|must match the size of|index out of range",
        "RuntimeError: mat1 and mat2 shapes cannot be multiplied (3x4 and 5x6)",
    ),
    _not_oom(
        "segfault",
        "The process read memory that is not its own.",
        ("segmentation fault", "sigsegv"),
        r"Segmentation fault|SIGSEGV",
        "Segmentation fault (core dumped)",
    ),
    _not_oom(
        "interrupt",
        "The user interrupted the program.",
        ("keyboardinterrupt",),
        r"^KeyboardInterrupt\b",
        "KeyboardInterrupt",
    ),
)

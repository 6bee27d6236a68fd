"""Rows of CUDA, HIP and oneAPI themselves and of their libraries: handles, pinned memory, direct calls."""

from __future__ import annotations

from typing import Final

from oomdoctor.incident.formats import Format, compiled
from oomdoctor.model.incident import Family

ROWS: Final = (
    Format(
        name="cublas_tf",
        family=Family.CUBLAS,
        title="The device had no room left for the handle of cuBLAS.",
        versions="TensorFlow 1 and 2, MXNet",
        needles=("create cublas handle",),
        pattern=compiled(r"create cublas handle"),
        clauses=(compiled(r"failed to allocate \S{1,20} \({requested#} bytes\) from device"),),
        device="cuda:{}",
        sample="E stream_executor/cuda_blas.cc:99] failed to create cublas handle: CUBLAS_STATUS_NOT_INITIALIZED",
    ),
    Format(
        name="cublas",
        family=Family.CUBLAS,
        title="cuBLAS could not set itself up; as a rule the device had no room left for its handle or workspace.",
        versions="PyTorch 1 and 2",
        needles=("cublas_status_alloc_failed", "cublas_status_not_initialized", "cublascreate"),
        pattern=compiled(r"CUBLAS_STATUS_ALLOC_FAILED|CUBLAS_STATUS_NOT_INITIALIZED|cublasCreate\(handle\)"),
        device="cuda:{}",
        sample="RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    ),
    Format(
        name="cublas_thc",
        family=Family.CUBLAS,
        title="cuBLAS could not set itself up; as a rule the device had no room left for its handle or workspace.",
        versions="PyTorch 0.3 to 1.2",
        needles=("cublas runtime error",),
        pattern=compiled(
            r"cublas runtime error : (?:resource allocation failed|library not initialized|the library was not)"
        ),
        device="cuda:{}",
        sample="RuntimeError: cublas runtime error : resource allocation failed at THCGeneral.cpp:200",
    ),
    Format(
        name="cusolver",
        family=Family.CUBLAS,
        title="cuSOLVER could not set itself up; as a rule the device had no room left for its handle.",
        versions="PyTorch 1.7 on, TensorFlow",
        needles=("cusolverdncreate", "cusolver_status_alloc_failed", "cusparse_status_alloc_failed", "cusparsecreate"),
        pattern=compiled(
            r"cusolverDnCreate|CUSOLVER_STATUS_ALLOC_FAILED|CUSPARSE_STATUS_ALLOC_FAILED|cusparseCreate\(handle\)"
        ),
        device="cuda:{}",
        sample="RuntimeError: cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`",
    ),
    Format(
        name="cufft",
        family=Family.CUBLAS,
        title="cuFFT could not get the memory for its plan or its workspace.",
        versions="PyTorch 1.7 on",
        needles=("cufft_alloc_failed",),
        pattern=compiled(r"CUFFT_ALLOC_FAILED"),
        device="cuda:{}",
        sample="RuntimeError: cuFFT error: CUFFT_ALLOC_FAILED",
    ),
    Format(
        name="cudnn",
        family=Family.CUDNN,
        title="cuDNN could not set itself up; as a rule the device had no room left for its handle or workspace.",
        versions="PyTorch 0.4 on, TensorFlow",
        needles=("cudnn_status_alloc_failed", "cudnn_status_not_initialized", "create cudnn handle", "cudnn failed to"),
        pattern=compiled(
            r"CUDNN_STATUS_ALLOC_FAILED|CUDNN_STATUS_NOT_INITIALIZED|could not create cudnn handle"
            r"|probably because cuDNN failed to initialize"
        ),
        device="cuda:{}",
        sample="RuntimeError: cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    ),
    Format(
        name="cudnn_algo",
        family=Family.CUDNN,
        title="cuDNN found no algorithm whose workspace fits into the memory that is left.",
        versions="PyTorch 1.5 on",
        needles=("valid cudnn algorithm", "find was unable to find an engine"),
        pattern=compiled(r"Unable to find a valid cuDNN algorithm|FIND was unable to find an engine"),
        device="cuda:{}",
        sample="RuntimeError: Unable to find a valid cuDNN algorithm to run convolution",
    ),
    Format(
        name="nccl_oom",
        family=Family.CUDA,
        title="NCCL could not get device memory for its buffers.",
        versions="NCCL 2",
        needles=("cuda failure", "failed to cuda calloc", "failed to cuda malloc"),
        pattern=compiled(
            r"Cuda failure(?: \d{1,4})? '?out of memory|Failed to CUDA (?:calloc"
            r"|malloc)(?: async)?(?: {requested#} bytes)?"
        ),
        clauses=(compiled(r"Failed to CUDA (?:calloc|malloc)(?: async)? {requested#} bytes"),),
        device="cuda:{}",
        sample="worker0:12:90 [0] NCCL WARN Cuda failure 2 'out of memory'",
    ),
    Format(
        name="thc_host",
        family=Family.PINNED,
        title="CUDA could not pin host memory.",
        versions="PyTorch 0.1 to 1.9",
        needles=("thccachinghostallocator",),
        pattern=compiled(r"THCCachingHostAllocator\.(?:cpp|c|cu)"),
        context=compiled(r"out of memory"),
        device="cpu",
        sample="THCudaCheck FAIL file=/src/THC/THCCachingHostAllocator.cpp line=200 error=2 : out of memory",
    ),
    Format(
        name="thc_init",
        family=Family.CUDA_INIT,
        title="The first use of the device failed: it was full before.",
        versions="PyTorch 0.1 to 1.9",
        needles=("error=2 : out of memory", "cuda runtime error (2)"),
        pattern=compiled(
            r"THCudaCheck FAIL file=\S{1,300}(?:THCTensorRandom|THCGeneral|/init\.)\S{0,40} line=\d{1,6} error=2 :"
            r"|cuda runtime error \(2\) : out of memory at \S{1,300}(?:THCTensorRandom|THCGeneral|/init\.)"
        ),
        device="cuda:{}",
        sample="RuntimeError: cuda runtime error (2) : out of memory at /src/THC/THCGeneral.cpp:50",
    ),
    Format(
        name="thc",
        family=Family.CUDA,
        title="A CUDA call failed with code 2, out of memory.",
        versions="PyTorch 0.1 to 1.9",
        needles=("error=2 :", "runtime error (2)", "error 2 :"),
        pattern=compiled(r"error=2 : out of memory|runtime error \(2\) ?: out of memory"),
        device="cuda:{}",
        sample="RuntimeError: cuda runtime error (2) : out of memory at /src/THC/generic/THCStorage.cu:60",
    ),
    Format(
        name="pinned_thread",
        family=Family.PINNED,
        title="CUDA could not pin host memory for a batch.",
        versions="PyTorch 1 and 2",
        needles=("cuda error: out of memory", "cudaerrormemoryallocation"),
        pattern=compiled(r"CUDA error: out of memory|cudaErrorMemoryAllocation"),
        context=compiled(r"pin_memory|in pin memory thread|CachingHostAllocator|cudaHostAlloc|cudaHostRegister"),
        device="cpu",
        sample=(
            "RuntimeError: Caught RuntimeError in pin memory thread for device 0.\n"
            "RuntimeError: CUDA error: out of memory"
        ),
    ),
    Format(
        name="cuda_error_init",
        family=Family.CUDA_INIT,
        title="The first use of the device failed: it was full before.",
        versions="PyTorch 0.4.1 on",
        needles=("cuda error: out of memory", "implicit initialization on gpu"),
        pattern=compiled(
            r"CUDA error: out of memory"
            r"|implicit initialization on GPU:\d{1,3} failed\. Status: out of memory"
        ),
        context=compiled(
            r"implicit initialization|_lazy_init\b|_cuda_init\(|_cuda_setDevice"
            r"|_cuda_getDefaultGenerator|cuda\.default_generators"
        ),
        device="cuda:{}",
        sample=(
            '  File "x.py", line 9, in _lazy_init\n    torch._C._cuda_init()\nRuntimeError: CUDA error: out of memory'
        ),
    ),
    Format(
        name="cuda_error_bare",
        family=Family.CUDA,
        title="A CUDA call outside of the caching allocator ran out of memory.",
        versions="PyTorch 0.4.1 on; torch.AcceleratorError since 2.8",
        needles=(
            "cuda error: out of memory",
            "driver error: out of memory",
            "cuda error (2): out",
            "cuda error 2: out",
        ),
        pattern=compiled(r"CUDA (?:driver )?error(?: \(2\)| 2)?: out of memory(?! at)"),
        device="cuda:{}",
        sample=(
            "torch.AcceleratorError: CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at "
            "some other API call, so the stacktrace below might be incorrect."
        ),
    ),
    Format(
        name="hip_error_bare",
        family=Family.HIP,
        title="A HIP call outside of the caching allocator ran out of memory.",
        versions="PyTorch 1.8 on for ROCm",
        needles=("hip error: out of memory", "hiperroroutofmemory"),
        pattern=compiled(r"HIP error: out of memory|hipErrorOutOfMemory"),
        device="cuda:{}",
        sample="RuntimeError: HIP error: out of memory",
    ),
    Format(
        name="xpu_ur",
        family=Family.XPU,
        title="The driver of the Intel device ran out of memory.",
        versions="PyTorch 2.4 on with oneAPI",
        needles=("ur_result_error_out_of", "pi_error_out_of", "out_of_device_memory"),
        pattern=compiled(
            r"UR_RESULT_ERROR_OUT_OF_(?:DEVICE_MEMORY|HOST_MEMORY|RESOURCES)|PI_ERROR_OUT_OF_(?:RESOURCES|HOST_MEMORY)"
            r"|ZE_RESULT_ERROR_OUT_OF_DEVICE_MEMORY"
        ),
        device="xpu:{}",
        sample="RuntimeError: level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)",
    ),
    Format(
        name="nvml_assert",
        family=Family.CUDA,
        title="The device ran out of memory, and the report of it failed as well.",
        versions="PyTorch 2.1 on",
        needles=("internal assert failed",),
        pattern=compiled(
            r"(?:NVML_SUCCESS == r|handles_\.at\(i\)) INTERNAL ASSERT FAILED"
            r"|INTERNAL ASSERT FAILED at \S{0,200}CUDACachingAllocator"
        ),
        device="cuda:{}",
        sample='RuntimeError: NVML_SUCCESS == r INTERNAL ASSERT FAILED at "/src/c10/cuda/CUDACachingAllocator.cpp":999',
    ),
)

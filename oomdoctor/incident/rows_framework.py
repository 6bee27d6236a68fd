"""Rows of other frameworks that fill a device: JAX, TensorFlow, CuPy, PaddlePaddle and more."""

from __future__ import annotations

from typing import Final

from oomdoctor.incident.formats import Format, compiled
from oomdoctor.model.incident import Family

ROWS: Final = (
    Format(
        name="jittor",
        family=Family.CUDA,
        title="Jittor used more than the device has.",
        versions="Jittor 1",
        needles=("gpu memory is overflow",),
        pattern=compiled(r"GPU memory is overflow"),
        clauses=(compiled(r"Total: {total}"), compiled(r"Used: {process}")),
        device="cuda:{}",
        sample="GPU memory is overflow, please reduce your batch_size or data size!\nTotal: 10.5GB Used: 13.25GB",
    ),
    Format(
        name="paddle",
        family=Family.CUDA,
        title="PaddlePaddle could not get device memory.",
        versions="PaddlePaddle 2",
        needles=("out of memory error on gpu",),
        pattern=compiled(
            r"Out of memory error on GPU {device#}\.\s{0,3}(?:GPU \d{1,3} )?Cannot allocate {requested}(?: GPU)? memory"
        ),
        clauses=(
            compiled(r"{allocated} memory has been allocated"),
            compiled(r"available memory is(?: only)? {free}"),
        ),
        device="cuda:{}",
        flows=True,
        sample=(
            "ResourceExhaustedError: Out of memory error on GPU 0. Cannot allocate 1.50GB memory on "
            "GPU 0, 9.25GB memory "
            "has been allocated and available memory is only 640.00MB."
        ),
    ),
    Format(
        name="paddle_enforce",
        family=Family.CUDA,
        title="PaddlePaddle was asked for more device memory than is free.",
        versions="PaddlePaddle 0 and 1",
        needles=("enforce allocating <= available",),
        pattern=compiled(r"enforce allocating <= available failed, {requested#} > {free#}"),
        device="cuda:{}",
        sample="paddle.fluid.core.EnforceNotMet: enforce allocating <= available failed, 9000000000 > 1200000000",
    ),
    Format(
        name="tf_oom",
        family=Family.TF,
        title="TensorFlow's allocator could not get the memory for a tensor.",
        versions="TensorFlow 1 and 2",
        needles=("oom when allocating tensor",),
        pattern=compiled(r"OOM when allocating tensor"),
        clauses=(
            compiled(r"with shape ?\[(?P<shape>[\d,\s]{1,120})\]"),
            compiled(r"and type (?P<dtype>[a-z0-9]{1,20})"),
            compiled(r"device:(?P<place>[GC]PU):{device#}"),
        ),
        device="cuda:{}",
        flows=True,
        sample=(
            "ResourceExhaustedError: OOM when allocating tensor with shape[8,256,256,64] and type float on "
            "/job:localhost/replica:0/task:0/device:GPU:0 by allocator GPU_0_bfc"
        ),
    ),
    Format(
        name="tf_pinned",
        family=Family.PINNED,
        title="TensorFlow could not pin host memory.",
        versions="TensorFlow 1 and 2",
        needles=("bytes on host: cuda_error_out_of_memory", "pinned host memory of size"),
        pattern=compiled(
            r"failed to alloc(?:ate)? \d{1,20} bytes on host|could not allocate pinned host memory of size"
        ),
        clauses=(compiled(r"{requested#} bytes on host"), compiled(r"memory of size: {requested#}")),
        device="cpu",
        sample="E cuda_driver.cc:50] failed to alloc 8589934592 bytes on host: CUDA_ERROR_OUT_OF_MEMORY: out of memory",
    ),
    Format(
        name="tf_cuda_driver",
        family=Family.TF,
        title="TensorFlow or JAX could not get its pool from the driver; it may try again with less.",
        versions="TensorFlow 1 and 2",
        needles=(
            "bytes) from device",
            "dst tensor is not initialized",
            "memory [op:",
        ),
        pattern=compiled(
            r"failed to allocate \S{1,20} \({requested#} bytes\) from device"
            r"|Dst tensor is not initialized"
            r"|failed to allocate memory \[Op:"
        ),
        families=((compiled(r"external/(?:xla|org_tensorflow)/"), Family.JAX), (compiled(r"\w"), Family.TF)),
        unless=compiled(r"not a failure, but (?:this )?may mean"),
        device="cuda:{}",
        sample="failed to allocate 4.50G (4831838208 bytes) from device: CUDA_ERROR_OUT_OF_MEMORY: out of memory",
    ),
    Format(
        name="bfc_allocator",
        family=Family.TF,
        title="The pool that TensorFlow and JAX share has no room for a request; the error itself follows.",
        versions="TensorFlow 1 and 2, JAX",
        needles=("ran out of memory trying to allocate",),
        pattern=compiled(r"ran out of memory trying to allocate {requested}"),
        clauses=(compiled(r"device:GPU:{device#}"),),
        unless=compiled(r"not a failure, but (?:this )?may mean"),
        families=((compiled(r"external/xla/"), Family.JAX), (compiled(r"ran out"), Family.TF)),
        device="cuda:{}",
        vague=True,
        sample="W bfc_allocator.cc:501] Allocator (GPU_0_bfc) ran out of memory trying to allocate 2.50GiB",
    ),
    Format(
        name="jax",
        family=Family.JAX,
        title="XLA could not get device memory.",
        versions="JAX, torch_xla",
        needles=(
            "resource_exhausted",
            "resource exhausted: ",
            "bytes for new constant",
            "ran out of memory in memory space",
        ),
        pattern=compiled(
            r"RESOURCE[_ ]?EXHAUSTED: (?:From /job:\S{1,80}:\s{0,4})?(?:XLA:TPU compile permanent error\. )?"
            r"(?:Out of memory|Failed to allocate|Error allocating|Attempting to (?:reserve|allocate)"
            r"|Ran out of memory|"
            r"Error loading program|LoadExecutable|Compilation failure: Ran out of memory|[^\n]{0,80}out of memory)"
            r"|Failed to allocate {requested#} bytes for new constant"
            r"|Compilation failure: Ran out of memory in memory space|Ran out of memory in memory space hbm"
        ),
        clauses=(
            compiled(r"(?:allocate|allocating|request for) {requested#} ?bytes"),
            compiled(r"\({requested#}B\)"),
            compiled(r"(?:allocate|allocating|request for|reserve) {requested}"),
            compiled(r"Used {requested} of {total}"),
            compiled(r"There are {free} free"),
            compiled(r"(?P<place>\bTPU\b|\bhbm\b|(?<=_)HBM(?=\d))"),
        ),
        unless=compiled(r"memory space (?:vmem|smem)"),
        device="cuda:{}",
        flows=True,
        sample=(
            "jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to "
            "allocate 2097152 bytes."
        ),
    ),
    Format(
        name="cupy",
        family=Family.CUPY,
        title="CuPy's memory pool could not get device memory.",
        versions="CuPy 1 on",
        needles=("out of memory to allocate", "out of memory allocating"),
        pattern=compiled(r"out of memory (?:to allocate|allocating) {requested#} bytes"),
        clauses=(compiled(r"(?:\(total|allocated so far:) {allocated#} bytes"),),
        device="cuda:{}",
        flows=True,
        sample="OutOfMemoryError: Out of memory allocating 1,048,576 bytes (allocated so far: 6,291,456 bytes).",
    ),
    Format(
        name="rmm_pool",
        family=Family.CUPY,
        title="RMM's pool could not grow.",
        versions="RMM",
        needles=("maximum pool size exceeded",),
        pattern=compiled(r"Maximum pool size exceeded"),
        clauses=(compiled(r"failed to allocate {requested}"),),
        device="cuda:{}",
        flows=True,
        sample="MemoryError: RMM failure at:pool.hpp:9: Maximum pool size exceeded",
    ),
    Format(
        name="xgboost",
        family=Family.CUPY,
        title="XGBoost could not get device memory.",
        versions="XGBoost 1 on",
        needles=("memory allocation error on worker",),
        pattern=compiled(r"Memory allocation error on worker"),
        clauses=(
            compiled(r"Requested memory: {requested}"),
            compiled(r"Requested memory: {requested#}"),
            compiled(r"Free memory: {free}"),
            compiled(r"Free memory: {free#}"),
        ),
        device="cuda:{}",
        flows=True,
        sample=(
            "XGBoostError: Memory allocation error on worker 0: Caching allocator\n"
            "- Free memory: 1.5GB\n- Requested memory: 2.25GB"
        ),
    ),
    Format(
        name="rmm",
        family=Family.CUPY,
        title="A CUDA array library could not get device memory.",
        versions="RMM, CuPy",
        needles=(
            "cudaerrormemoryallocation",
            "bad_alloc: out_of_m",
        ),
        pattern=compiled(r"cudaErrorMemoryAllocation|bad_alloc: out_of_memory"),
        clauses=(
            compiled(r"failed to allocate {requested}"),
            compiled(r"Requested memory: {requested#}"),
            compiled(r"Free memory: {free#}"),
        ),
        device="cuda:{}",
        sample=(
            "MemoryError: std::bad_alloc: CUDA error at: rmm/mr/device/x.hpp:9: cudaErrorMemoryAllocation out of memory"
        ),
    ),
    Format(
        name="numba",
        family=Family.CUPY,
        title="Numba could not get device memory from the driver.",
        versions="Numba",
        needles=("results in cuda_error_out_of",),
        pattern=compiled(r"results in CUDA_ERROR_OUT_OF_MEMORY"),
        device="cuda:{}",
        sample="CudaAPIError: [2] Call to cuMemAlloc results in CUDA_ERROR_OUT_OF_MEMORY",
    ),
    Format(
        name="cuda_driver",
        family=Family.CUDA,
        title="A CUDA call ran out of memory.",
        versions="vLLM, Triton, PyCUDA, Caffe, Darknet and others that call CUDA themselves",
        needles=(
            "cuda_error_out_of_memory",
            "cuda error: out of memory at",
            "[cuda]: out of memory",
            "cumemalloc",
            "curesult error",
            "(2 vs. 0)",
            "status: out of memory",
        ),
        pattern=compiled(
            r"CUDA_ERROR_OUT_OF_MEMORY|CUDA error: out of memory at|\[CUDA\]: out of memory"
            r"|CUresult error result=2\b|cuMemAlloc\w{0,12} failed"
            r"|cudaSuccess \(2 vs\. 0\) out of memory|CUDA error: out of memory at|Status: out of memory"
        ),
        unless=compiled(r"not a failure, but (?:this )?may mean"),
        device="cuda:{}",
        sample="RuntimeError: Triton Error [CUDA]: out of memory",
    ),
)

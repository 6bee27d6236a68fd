"""Rows of what runs models without training them: llama.cpp, ONNX Runtime, TensorRT, vLLM and the like."""

from __future__ import annotations

from typing import Final

from oomdoctor.incident.formats import Format, compiled
from oomdoctor.model.incident import Family

ROWS: Final = (
    Format(
        name="ggml_hip",
        family=Family.HIP,
        title="llama.cpp could not get device memory.",
        versions="llama.cpp for ROCm",
        needles=("cudamalloc failed", "rocm0 buffer"),
        pattern=compiled(
            r"(?:allocating {requested} on device {device#}: )?cudaMalloc failed: out of memory"
            r"|allocate ROCm\d{1,2} buffer"
        ),
        clauses=(compiled(r"failed to allocate \S{1,20} buffer of size {requested#}"),),
        context=compiled(r"ROCm\d"),
        device="cuda:{}",
        reach=600,
        sample=(
            "alloc_buffer: allocating 900.00 MiB on device 1: cudaMalloc failed: out of memory\n"
            "reserve: failed to allocate ROCm1 buffer of size 943718400"
        ),
    ),
    Format(
        name="faiss",
        family=Family.CUDA,
        title="Faiss could not get device memory.",
        versions="Faiss 1.7 on",
        needles=("fail type",),
        pattern=compiled(r"alloc(?:ator)? fail type \w{1,40} dev {device#} space \w{1,20} stream"),
        clauses=(compiled(r"size {requested#} bytes"), compiled(r"Device free memory: {free#} bytes")),
        device="cuda:{}",
        flows=True,
        sample="StandardGpuResources: alloc fail type Other dev 1 space Device stream 0x5 size 1048576 bytes",
    ),
    Format(
        name="ggml",
        family=Family.CUDA,
        title="A library that calls cudaMalloc itself ran out of device memory.",
        versions="llama.cpp, MXNet, Faiss before 1.7",
        needles=("cudamalloc", "unable to allocate cuda"),
        pattern=compiled(
            r"(?:allocating {requested} on device {device#}: )?cudaMalloc(?: retry)? failed: out of memory"
            r"|cudaMalloc[^\n]{0,60}out of memory"
            r"|unable to allocate CUDA\d{1,2} buffer"
        ),
        clauses=(
            compiled(r"failed to allocate \S{1,20} buffer of size {requested#}"),
            compiled(r"cudaMalloc {requested#} bytes"),
            compiled(r"bytes on device {device#}"),
        ),
        device="cuda:{}",
        reach=600,
        sample="alloc_buffer: allocating 256.00 MiB on device 2: cudaMalloc failed: out of memory",
    ),
    Format(
        name="ggml_pinned",
        family=Family.PINNED,
        title="llama.cpp could not pin host memory.",
        versions="llama.cpp",
        needles=("of pinned memory",),
        pattern=compiled(r"failed to allocate {requested} of pinned memory"),
        device="cpu",
        sample="host_malloc: failed to allocate 750,00 MiB of pinned memory: out of memory",
    ),
    Format(
        name="bitsandbytes_dispatch",
        family=Family.CUDA,
        title="The quantized model does not fit on the device, so that part of it would have to stay on the host.",
        versions="Transformers 4 on with bitsandbytes",
        needles=("to fit the quantized model", "not enough gpu ram to fit"),
        pattern=compiled(r"enough GPU RAM to fit"),
        device="cuda:{}",
        sample=(
            "ValueError: Some modules are dispatched on the CPU or the disk. Make sure you have enough GPU RAM to fit "
            "the quantized model."
        ),
    ),
    Format(
        name="tensorrt",
        family=Family.CUDA,
        title="TensorRT could not get device memory.",
        versions="TensorRT 8 on",
        needles=(
            "cuda runtime (out of memory)",
            "amount of gpu memory",
            "amount of memory (",
            "cuda failure 2: out of memory",
            "2 (out of memory)",
            "error code 2: outofmemory",
        ),
        pattern=compiled(
            r"Cuda Runtime \(out of memory\)|Requested amount of (?:GPU )?memory \({requested#} bytes\)"
            r"|CUDA failure 2: out of memory"
            r"|Cuda Error in [\w:]{1,120}: 2 \(out of memory\)|Error Code 2: OutOfMemory"
        ),
        clauses=(
            compiled(r"amount of (?:GPU )?memory \({requested#} bytes\)"),
            compiled(r"Requested size was {requested#} bytes"),
        ),
        device="cuda:{}",
        sample="[E] Requested amount of GPU memory (2147483648 bytes) could not be allocated.",
    ),
    Format(
        name="onnxruntime_arena",
        family=Family.CUDA,
        title="ONNX Runtime's arena could not get memory for a buffer.",
        versions="ONNX Runtime 1",
        needles=("bfcarena",),
        pattern=compiled(r"BFCArena::AllocateRawInternal[^\n]{0,160}Failed to allocate"),
        clauses=(compiled(r"requested buffer of size {requested#}"),),
        device="cuda:{}",
        flows=True,
        sample="BFCArena::AllocateRawInternal Failed to allocate memory for requested buffer of size 5368709120",
    ),
    Format(
        name="vllm_free",
        family=Family.VLLM_KV,
        title="The server found less free device memory than it was told to take.",
        versions="vLLM 0.7 on",
        needles=("free memory on device",),
        pattern=compiled(r"Free memory on device(?: \S{1,12})? \({free@}/{total}\)"),
        clauses=(compiled(r"utilization \([\d.]{1,8}, {requested}\)"),),
        device="cuda:{}",
        flows=True,
        sample=(
            "ValueError: Free memory on device (3.50/23.60 GiB) on startup is less than desired GPU memory utilization "
            "(0.9, 21.24 GiB)."
        ),
    ),
    Format(
        name="vllm_kv",
        family=Family.VLLM_KV,
        title="The cache for keys and values of one request is larger than what the model leaves free.",
        versions="vLLM, SGLang, text-generation-inference",
        needles=("kv cache", "cache blocks", "mem-fraction-static", "mem_fraction_static", "prefill tokens"),
        pattern=compiled(
            r"No available memory for the cache blocks|(?:no|not enough|insufficient) (?:\w{1,10} ){0,3}memory "
            r"(?:\w{1,10} ){0,3}(?:for|to \w{1,10}) (?:the )?(?:KV|cache)"
            r"|tokens that can be stored in (?:the )?KV cache"
            r"|(?:{requested} )?KV cache is needed(?:, which is larger than the available KV cache memory \({free}\))?"
            r"|larger than the (?:available|maximum)[^\n]{0,60}KV cache"
            r"|Not enough memory\. Please try to increase --mem|No available memory for the KV cache"
            r"|Not enough memory to handle \d{1,9} prefill tokens"
        ),
        clauses=(compiled(r"KV cache memory \({free}\)"),),
        device="cuda:{}",
        flows=True,
        sample="ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`.",
    ),
    Format(
        name="vulkan",
        family=Family.CUDA,
        title="A Vulkan device could not give the memory that was asked for.",
        versions="llama.cpp and whisper.cpp with Vulkan",
        needles=("device memory allocation of size", "erroroutofdevicememory", "vk_error_out_of_device_memory"),
        pattern=compiled(
            r"Device memory allocation of size {requested#} failed|ErrorOutOfDeviceMemory|VK_ERROR_OUT_OF_DEVICE_MEMORY"
        ),
        device="cuda:{}",
        sample=(
            "ggml_vulkan: Device memory allocation of size 268435456 failed.\n"
            "ggml_vulkan: vk::Device::allocateMemory: ErrorOutOfDeviceMemory"
        ),
    ),
)

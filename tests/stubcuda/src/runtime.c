/* libcudart.so.13: the part of the runtime's API that PyTorch calls. Copies and fills are real and done at once; kernels
 * are launched to no effect. What has nothing to do here (to wait, to launch) is listed in build.py. */
#include "device.h"
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define API EXPORTED cudaError_t
#define HOST (-1) /* the device of a block of pinned host memory */

static __thread int current;
static __thread cudaError_t last;

static cudaError_t answer(int code) {
    if (code) last = (cudaError_t)code;
    return (cudaError_t)code;
}

/* What asks for the device is refused in a copy of a process that had it in use. */
#define HERE if (stub_lost()) return answer(stub_lost())

API cudaGetLastError(void) {
    cudaError_t code = last;
    last = cudaSuccess;
    return code;
}
API cudaPeekAtLastError(void) { return last; }
EXPORTED const char *cudaGetErrorName(cudaError_t code) { return stub_error_name((int)code); }
EXPORTED const char *cudaGetErrorString(cudaError_t code) { return stub_error_text((int)code); }

/* --- devices ---------------------------------------------------------------------------------------------------- */

static int wrong(int device) {
    if (!stub_devices()) return cudaErrorNoDevice;
    return device < 0 || device >= stub_devices() ? cudaErrorInvalidDevice : cudaSuccess;
}

API cudaGetDeviceCount(int *count) {
    HERE;
    *count = stub_devices();
    return answer(wrong(0));
}
API cudaGetDevice(int *device) {
    *device = current;
    return answer(wrong(current));
}
API cudaSetDevice(int device) {
    HERE;
    int code = wrong(device);
    if (!code) stub_use(current = device); /* since CUDA 12 this makes the context */
    return answer(code);
}
API cudaDriverGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }
API cudaRuntimeGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }
API cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    HERE;
    *value = stub_attribute((int)attribute);
    return answer(wrong(device));
}
API cudaDeviceGetPCIBusId(char *out, int room, int device) {
    snprintf(out, (size_t)room, "0000:%02X:00.0", stub_card(device) + 1);
    return answer(wrong(device));
}
API cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}
API cudaDeviceCanAccessPeer(int *can, int device, int peer) { *can = 0; return cudaSuccess; }
API cudaGetDeviceProperties(struct cudaDeviceProp *out, int device) {
    HERE;
#define FROM(attribute) stub_attribute((int)cudaDevAttr##attribute)
    memset(out, 0, sizeof *out);
    snprintf(out->name, sizeof out->name, "%s", stub_name());
    memcpy(out->uuid.bytes, "stubcuda-device", sizeof out->uuid.bytes);
    out->uuid.bytes[15] = (char)stub_card(device);
    out->totalGlobalMem = stub_total();
    out->pciBusID = stub_card(device) + 1;
    out->major = FROM(ComputeCapabilityMajor);
    out->minor = FROM(ComputeCapabilityMinor);
    out->multiProcessorCount = FROM(MultiProcessorCount);
    out->maxThreadsPerMultiProcessor = FROM(MaxThreadsPerMultiProcessor);
    out->maxBlocksPerMultiProcessor = FROM(MaxBlocksPerMultiprocessor);
    out->sharedMemPerBlock = (size_t)FROM(MaxSharedMemoryPerBlock);
    out->sharedMemPerBlockOptin = (size_t)FROM(MaxSharedMemoryPerBlockOptin);
    out->sharedMemPerMultiprocessor = (size_t)FROM(MaxSharedMemoryPerMultiprocessor);
    out->reservedSharedMemPerBlock = (size_t)FROM(ReservedSharedMemoryPerBlock);
    out->regsPerBlock = FROM(MaxRegistersPerBlock);
    out->regsPerMultiprocessor = FROM(MaxRegistersPerMultiprocessor);
    out->warpSize = FROM(WarpSize);
    out->maxThreadsPerBlock = FROM(MaxThreadsPerBlock);
    out->maxThreadsDim[0] = FROM(MaxBlockDimX);
    out->maxThreadsDim[1] = FROM(MaxBlockDimY);
    out->maxThreadsDim[2] = FROM(MaxBlockDimZ);
    out->maxGridSize[0] = FROM(MaxGridDimX);
    out->maxGridSize[1] = FROM(MaxGridDimY);
    out->maxGridSize[2] = FROM(MaxGridDimZ);
    out->totalConstMem = (size_t)FROM(TotalConstantMemory);
    out->textureAlignment = (size_t)FROM(TextureAlignment);
    out->memPitch = (size_t)FROM(MaxPitch);
    out->l2CacheSize = FROM(L2CacheSize);
    out->memoryBusWidth = FROM(GlobalMemoryBusWidth);
    out->asyncEngineCount = FROM(AsyncEngineCount);
    out->unifiedAddressing = FROM(UnifiedAddressing);
    out->concurrentKernels = FROM(ConcurrentKernels);
    out->canMapHostMemory = FROM(CanMapHostMemory);
    out->streamPrioritiesSupported = FROM(StreamPrioritiesSupported);
    out->cooperativeLaunch = FROM(CooperativeLaunch);
    return answer(wrong(device));
}
API cudaGetDriverEntryPointByVersion(const char *name, void **out, unsigned version, unsigned long long flags,
                                     enum cudaDriverEntryPointQueryResult *how) {
    extern int cuGetProcAddress_v2(const char *, void **, int, uint64_t, void *);
    if (how) *how = cudaDriverEntryPointSuccess;
    return answer(cuGetProcAddress_v2(name, out, (int)version, flags, NULL));
}

/* --- memory ----------------------------------------------------------------------------------------------------- */

API cudaMalloc(void **out, size_t bytes) {
    HERE;
    int code = wrong(current);
    return answer(code ? code : stub_alloc(out, bytes, current));
}
API cudaFree(void *start) {
    HERE;
    stub_use(current); /* cudaFree(0) is the old way to make a context */
    return answer(stub_release(start));
}
API cudaMemGetInfo(size_t *free, size_t *total) {
    HERE;
    stub_use(current);
    *free = stub_free(stub_card(current));
    *total = stub_total();
    return cudaSuccess;
}
API cudaHostAlloc(void **out, size_t bytes, unsigned flags) {
    HERE;
    if (posix_memalign(out, 4096, bytes ? bytes : 1)) return answer(cudaErrorMemoryAllocation);
    stub_remember((struct block){*out, bytes, bytes, HOST, NULL});
    return cudaSuccess;
}
API cudaFreeHost(void *start) {
    HERE;
    struct block was;
    if (start && !stub_forget(start, &was)) return answer(cudaErrorInvalidValue);
    free(start);
    return cudaSuccess;
}
API cudaPointerGetAttributes(struct cudaPointerAttributes *out, const void *pointer) {
    HERE;
    struct block block;
    memset(out, 0, sizeof *out);
    out->type = cudaMemoryTypeUnregistered;
    out->device = -1;
    if (!stub_find(pointer, &block)) return cudaSuccess;
    out->type = block.device == HOST ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
    out->device = block.device == HOST ? current : block.device;
    out->devicePointer = (void *)pointer;
    out->hostPointer = block.device == HOST ? (void *)pointer : NULL;
    return cudaSuccess;
}
API cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
    HERE;
    stub_copy(to, from, bytes);
    return cudaSuccess;
}
API cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
    HERE;
    stub_copy(to, from, bytes);
    return cudaSuccess;
}
API cudaMemcpyPeerAsync(void *to, int device, const void *from, int other, size_t bytes, cudaStream_t stream) {
    HERE;
    stub_copy(to, from, bytes);
    return cudaSuccess;
}
API cudaMemcpy2DAsync(void *to, size_t to_step, const void *from, size_t from_step, size_t width, size_t rows,
                      enum cudaMemcpyKind kind, cudaStream_t stream) {
    HERE;
    for (size_t row = 0; row < rows; row++)
        stub_copy((char *)to + row * to_step, (const char *)from + row * from_step, width);
    return cudaSuccess;
}
API cudaMemset(void *to, int value, size_t bytes) { HERE; stub_fill(to, value, bytes); return cudaSuccess; }
API cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream) {
    HERE;
    stub_fill(to, value, bytes);
    return cudaSuccess;
}
API cudaGetSymbolAddress(void **out, const void *symbol) {
    static char variables[1 << 20]; /* of kernels, which none of them reads */
    *out = variables;
    return cudaSuccess;
}

/* --- streams and events: all is done by the time that a call returns ----------------------------------------------- */

struct stream { int priority; };

API cudaStreamCreateWithPriority(cudaStream_t *out, unsigned flags, int priority) {
    HERE;
    struct stream *stream = malloc(sizeof *stream);
    stream->priority = priority;
    *out = (cudaStream_t)stream;
    return cudaSuccess;
}
API cudaStreamCreateWithFlags(cudaStream_t *out, unsigned flags) { return cudaStreamCreateWithPriority(out, flags, 0); }
API cudaStreamCreate(cudaStream_t *out) { return cudaStreamCreateWithPriority(out, 0, 0); }
API cudaStreamDestroy(cudaStream_t stream) { free(stream); return cudaSuccess; }
API cudaStreamGetPriority(cudaStream_t stream, int *priority) {
    HERE;
    int given = (uintptr_t)stream > 2; /* 0, 1 and 2 are the default streams */
    *priority = given ? ((struct stream *)stream)->priority : 0;
    return cudaSuccess;
}
API cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t call, void *data, unsigned flags) {
    HERE;
    call(stream, cudaSuccess, data);
    return cudaSuccess;
}
API cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t call, void *data) { HERE; call(data); return cudaSuccess; }
API cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    HERE;
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
API cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                             cudaGraph_t *graph, const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges,
                             size_t *count) {
    return cudaStreamIsCapturing(stream, status);
}
API cudaEventCreateWithFlags(cudaEvent_t *out, unsigned flags) {
    HERE;
    *out = (cudaEvent_t)calloc(1, sizeof(struct timespec));
    return cudaSuccess;
}
API cudaEventCreate(cudaEvent_t *out) { return cudaEventCreateWithFlags(out, 0); }
API cudaEventDestroy(cudaEvent_t event) { free(event); return cudaSuccess; }
API cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    HERE;
    clock_gettime(CLOCK_MONOTONIC, (struct timespec *)event);
    return cudaSuccess;
}
API cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
    return cudaEventRecord(event, stream);
}
API cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to) {
    HERE;
    struct timespec *a = (struct timespec *)from, *b = (struct timespec *)to;
    *ms = (float)((double)(b->tv_sec - a->tv_sec) * 1e3 + (double)(b->tv_nsec - a->tv_nsec) / 1e6);
    return cudaSuccess;
}

/* --- kernels ---------------------------------------------------------------------------------------------------- */

API cudaFuncGetAttributes(struct cudaFuncAttributes *out, const void *kernel) {
    HERE;
    memset(out, 0, sizeof *out);
    out->maxThreadsPerBlock = 1024;
    out->numRegs = 32;
    out->ptxVersion = out->binaryVersion = stub_capability();
    out->maxDynamicSharedSizeBytes = stub_attribute((int)cudaDevAttrMaxSharedMemoryPerBlock);
    return cudaSuccess;
}
/* As many as the threads allow: PyTorch sizes the staging buffers of reductions by it. */
API cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *kernel, int threads, size_t shared) {
    HERE;
    int room = stub_attribute((int)cudaDevAttrMaxThreadsPerMultiProcessor) / (threads > 0 ? threads : 1);
    *blocks = room > 0 ? room : 1;
    return cudaSuccess;
}
API cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *kernel, int threads, size_t shared,
                                                           unsigned flags) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, kernel, threads, shared);
}

/* What nvcc's code calls as a library is loaded, and around a launch. */
EXPORTED void **__cudaRegisterFatBinary(void *binary) {
    static void *registered;
    return &registered;
}
EXPORTED char __cudaInitModule(void **binary) { return 1; }
EXPORTED int __cudaGetKernel(void **out, const void *kernel) {
    *out = (void *)kernel;
    return cudaSuccess;
}
EXPORTED int __cudaPopCallConfiguration(dim3 *grid, dim3 *threads, size_t *shared, void *stream) {
    grid->x = grid->y = grid->z = threads->x = threads->y = threads->z = 1;
    *shared = 0;
    *(void **)stream = NULL;
    return cudaSuccess;
}

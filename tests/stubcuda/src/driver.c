/* libcuda.so.1: the part of the driver's API that PyTorch calls. Modules load from anything; kernels do nothing. */
#define _GNU_SOURCE
#include "device.h"
#define __CUDA_API_VERSION_INTERNAL /* functions by their own names, not by those of their newest versions */
#include <cuda.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define API EXPORTED CUresult
#define GRAIN ((size_t)2 << 20)

/* Objects that are only handed around need an address of their own, and nothing behind it. */
static char the_context, the_module, the_kernel, the_linker;

API cuInit(unsigned flags) { return stub_devices() ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE; }
API cuDriverGetVersion(int *version) { *version = CUDA_VERSION; return CUDA_SUCCESS; }
API cuDeviceGetCount(int *count) { *count = stub_devices(); return CUDA_SUCCESS; }
API cuDeviceGet(CUdevice *device, int ordinal) {
    *device = ordinal;
    return ordinal >= 0 && ordinal < stub_devices() ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}
API cuDeviceGetName(char *out, int room, CUdevice device) {
    snprintf(out, (size_t)room, "%s", stub_name());
    return CUDA_SUCCESS;
}
API cuDeviceTotalMem_v2(size_t *bytes, CUdevice device) { *bytes = stub_total(); return CUDA_SUCCESS; }
API cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    *value = attribute == CU_DEVICE_ATTRIBUTE_PCI_BUS_ID ? stub_card(device) + 1 : stub_attribute(attribute);
    return CUDA_SUCCESS;
}
API cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    struct holder all[MOST_PROCESSES];
    int count = stub_holders(stub_card(device), all, MOST_PROCESSES);
    *flags = 0;
    *active = stub_lost() != 0; /* a copy finds the state of the process that it was copied of */
    for (int i = 0; i < count; i++) *active |= all[i].pid == getpid();
    return CUDA_SUCCESS;
}
API cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    stub_use(device);
    *context = (CUcontext)&the_context;
    return CUDA_SUCCESS;
}
API cuCtxGetCurrent(CUcontext *context) { *context = (CUcontext)&the_context; return CUDA_SUCCESS; }
API cuGetErrorString(CUresult code, const char **text) { *text = stub_error_text((int)code); return CUDA_SUCCESS; }
API cuGetErrorName(CUresult code, const char **name) { *name = stub_error_name((int)code); return CUDA_SUCCESS; }

API cuPointerGetAttribute(void *out, CUpointer_attribute attribute, CUdeviceptr pointer) {
    struct block block;
    if (!stub_find((void *)pointer, &block)) return CUDA_ERROR_INVALID_VALUE;
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE: *(unsigned *)out = CU_MEMORYTYPE_DEVICE; return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_CONTEXT: *(CUcontext *)out = (CUcontext)&the_context; return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int *)out = block.device; return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: *(CUdeviceptr *)out = pointer; return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: *(void **)out = block.start; return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE: *(size_t *)out = block.asked; return CUDA_SUCCESS;
    default: return CUDA_ERROR_NOT_SUPPORTED;
    }
}

/* --- virtual memory, of which expandable segments are made ------------------------------------------------------
 * A handle is charged to the card while it is owned or mapped. Its bytes live at the address that it is mapped to, and
 * are gone once it is unmapped; PyTorch reads none of them again. */
struct handle { size_t size; int device, owned, mapped; };

static void settle(struct handle *handle) {
    if (handle->owned || handle->mapped) return;
    stub_charge(handle->device, -(int64_t)handle->size);
    free(handle);
}

API cuMemGetAllocationGranularity(size_t *size, const CUmemAllocationProp *of, CUmemAllocationGranularity_flags how) {
    *size = GRAIN;
    return CUDA_SUCCESS;
}
API cuMemAddressReserve(CUdeviceptr *out, size_t size, size_t boundary, CUdeviceptr wish, unsigned long long flags) {
    *out = (CUdeviceptr)stub_map(size, PROT_NONE);
    return *out ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
API cuMemAddressFree(CUdeviceptr start, size_t size) { munmap((void *)start, size); return CUDA_SUCCESS; }
API cuMemCreate(CUmemGenericAllocationHandle *out, size_t size, const CUmemAllocationProp *of, unsigned long long flags) {
    if (size % GRAIN) return CUDA_ERROR_INVALID_VALUE;
    if (!stub_charge(of->location.id, (int64_t)size)) return CUDA_ERROR_OUT_OF_MEMORY;
    struct handle *handle = malloc(sizeof *handle);
    *handle = (struct handle){size, of->location.id, 1, 0};
    *out = (CUmemGenericAllocationHandle)(uintptr_t)handle;
    return CUDA_SUCCESS;
}
API cuMemRelease(CUmemGenericAllocationHandle out) {
    struct handle *handle = (struct handle *)(uintptr_t)out;
    handle->owned--;
    settle(handle);
    return CUDA_SUCCESS;
}
API cuMemMap(CUdeviceptr at, size_t size, size_t offset, CUmemGenericAllocationHandle out, unsigned long long flags) {
    struct handle *handle = (struct handle *)(uintptr_t)out;
    handle->mapped++;
    stub_remember((struct block){(char *)at, size, size, handle->device, handle});
    return CUDA_SUCCESS;
}
API cuMemSetAccess(CUdeviceptr at, size_t size, const CUmemAccessDesc *how, size_t count) {
    return mprotect((void *)at, size, PROT_READ | PROT_WRITE) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
API cuMemUnmap(CUdeviceptr at, size_t size) { /* of one mapping or several */
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    struct block was;
    for (char *next = (char *)at; next < (char *)at + size; next += was.size) {
        if (!stub_forget(next, &was)) return CUDA_ERROR_INVALID_VALUE;
        mmap(next, was.size, PROT_NONE, flags, -1, 0);
        struct handle *handle = was.handle;
        handle->mapped--;
        settle(handle);
    }
    return CUDA_SUCCESS;
}

/* --- kernels ---------------------------------------------------------------------------------------------------- */

API cuModuleLoad(CUmodule *out, const char *file) { *out = (CUmodule)&the_module; return CUDA_SUCCESS; }
API cuModuleLoadData(CUmodule *out, const void *image) { *out = (CUmodule)&the_module; return CUDA_SUCCESS; }
API cuModuleLoadDataEx(CUmodule *out, const void *image, unsigned count, CUjit_option *options, void **values) {
    *out = (CUmodule)&the_module;
    return CUDA_SUCCESS;
}
API cuModuleGetFunction(CUfunction *out, CUmodule module, const char *name) {
    *out = (CUfunction)&the_kernel;
    return CUDA_SUCCESS;
}
API cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction kernel) {
    *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 32;
    return CUDA_SUCCESS;
}
API cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction kernel, int threads, size_t shared) {
    *blocks = 2;
    return CUDA_SUCCESS;
}
API cuLinkCreate_v2(unsigned count, CUjit_option *options, void **values, CUlinkState *out) {
    *out = (CUlinkState)&the_linker;
    return CUDA_SUCCESS;
}
API cuLinkComplete(CUlinkState linker, void **image, size_t *size) {
    *image = &the_module;
    *size = sizeof the_module;
    return CUDA_SUCCESS;
}

static CUresult refused(void) { return CUDA_ERROR_NOT_SUPPORTED; }

/* PyTorch asks for driver functions by name. What is not there is refused when it is called, which is hardly ever. */
API cuGetProcAddress_v2(const char *name, void **out, int version, cuuint64_t flags, CUdriverProcAddressQueryResult *how) {
    static const char *const ENDINGS[] = {"_v2", ""};
    Dl_info here;
    dladdr((void *)refused, &here);
    void *library = dlopen(here.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    *out = NULL;
    for (int i = 0; i < 2 && !*out; i++) {
        char full[256];
        snprintf(full, sizeof full, "%s%s", name, ENDINGS[i]);
        *out = dlsym(library, full);
    }
    dlclose(library);
    if (!*out) *out = (void *)refused;
    if (how) *how = CU_GET_PROC_ADDRESS_SUCCESS;
    return CUDA_SUCCESS;
}

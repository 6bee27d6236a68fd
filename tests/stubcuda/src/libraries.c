/* cuBLAS, NVRTC and others, a library each by what is defined: handles that are not null, and the answers that PyTorch
 * reads. All else succeeds and does nothing, or is refused, as build.py says. */
#include "device.h"
#include <stdlib.h>
#include <string.h>

#define API EXPORTED int
#define HANDLE(function) API function(void **out) { *out = calloc(1, 64); return 0; }
#define PLACE(function) API function(void **out) { static char place; *out = &place; return 0; }

#ifdef CUBLAS
/* Each handle has an address of its own: PyTorch keeps a workspace for every pair of handle and stream. */
HANDLE(cublasCreate_v2)
API cublasDestroy_v2(void *handle) { free(handle); return 0; }
API cublasGetVersion_v2(void *handle, int *version) { *version = 130100; return 0; }
API cublasGetPointerMode_v2(void *handle, int *mode) { *mode = 0; return 0; }
API cublasGetMathMode(void *handle, int *mode) { *mode = 0; return 0; }
API cublasGetSmCountTarget(void *handle, int *count) { *count = 0; return 0; }
API cublasGetStream_v2(void *handle, void **stream) { *stream = NULL; return 0; }
#endif

#ifdef CUBLASLT
/* Source: cublasLt.h, cublasLtMatmulHeuristicResult_t */
struct heuristic { uint64_t algorithm[8]; size_t workspace; int state; float waves; int reserved[4]; };

HANDLE(cublasLtCreate)
PLACE(cublasLtMatmulDescCreate)
PLACE(cublasLtMatrixLayoutCreate)
PLACE(cublasLtMatmulPreferenceCreate)
EXPORTED size_t cublasLtGetVersion(void) { return 130100; }
API cublasLtMatmulAlgoGetHeuristic(void *handle, void *operation, void *a, void *b, void *c, void *d, void *preference,
                                   int wanted, struct heuristic *out, int *found) {
    memset(out, 0, sizeof *out * (size_t)wanted);
    *found = wanted > 0;
    return 0;
}
#endif

#ifdef NVRTC
API nvrtcVersion(int *major, int *minor) { *major = 13; *minor = 0; return 0; }
PLACE(nvrtcCreateProgram)
static int sixteen(size_t *size) { *size = 16; return 0; }
static int zeros(char *out) { memset(out, 0, 16); return 0; }
API nvrtcGetPTXSize(void *program, size_t *size) { return sixteen(size); }
API nvrtcGetPTX(void *program, char *out) { return zeros(out); }
API nvrtcGetCUBINSize(void *program, size_t *size) { return sixteen(size); }
API nvrtcGetCUBIN(void *program, char *out) { return zeros(out); }
API nvrtcGetProgramLogSize(void *program, size_t *size) { return sixteen(size); }
API nvrtcGetProgramLog(void *program, char *out) { return zeros(out); }
API nvrtcGetLoweredName(void *program, const char *expression, const char **name) { *name = "kernel"; return 0; }
EXPORTED const char *nvrtcGetErrorString(int code) { return "stubcuda compiles nothing"; }
#endif

#ifdef NCCL
API ncclGetVersion(int *version) { *version = 23007; return 0; }
EXPORTED const char *ncclGetErrorString(int code) { return "stubcuda has no NCCL"; }
EXPORTED const char *ncclGetLastError(void *communicator) { return "stubcuda has no NCCL"; }
#endif

#ifdef CUPTI
API cuptiGetVersion(unsigned *version) { *version = 130000; return 0; }
API cuptiGetResultString(int code, const char **text) { *text = "stubcuda has no CUPTI"; return 0; }
#endif

#ifdef CUSPARSE
HANDLE(cusparseCreate)
EXPORTED const char *cusparseGetErrorString(int code) { return "stubcuda has no cuSPARSE"; }
#endif

#ifdef CUSOLVER
HANDLE(cusolverDnCreate)
#endif

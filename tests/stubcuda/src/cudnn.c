/* libcudnn.so.9: one engine for every convolution, without a workspace; batch norm without a reserve; the weights of
 * recurrent nets where PyTorch looks for them. NVIDIA's own sizes are not known here. What is missing succeeds. */
#include "device.h"
#include <stdlib.h>
#include <string.h>

#define API EXPORTED int
#define MOST_DIMENSIONS 8

struct descriptor {
    int type, dimensions, sizes[MOST_DIMENSIONS], strides[MOST_DIMENSIONS], format; /* of a tensor or a filter */
    int cell, bias, directions, input, hidden, layers;                              /* of a recurrent net */
    int time, batch;                                                                /* of its data */
};

static int make(void **out) {
    *out = calloc(1, sizeof(struct descriptor));
    return 0;
}

/* Source: cudnn_graph.h, cudnnDataType_t */
static size_t width(int type) {
    switch (type) {
    case 1: case 10: return 8; /* double, int64 */
    case 2: case 9: return 2;  /* half, bfloat16 */
    case 3: return 1;          /* int8 */
    default: return 4;
    }
}

EXPORTED size_t cudnnGetVersion(void) { return 92400; }
EXPORTED size_t cudnnGetCudartVersion(void) { return 13000; }
EXPORTED const char *cudnnGetErrorString(int code) { return code ? "CUDNN_STATUS (stub)" : "CUDNN_STATUS_SUCCESS"; }
EXPORTED void cudnnGetLastErrorString(char *out, size_t room) { if (room) *out = 0; }
API cudnnGetProperty(int which, int *value) { *value = which == 0 ? 9 : which == 1 ? 24 : 0; return 0; }
API cudnnCreate(void **out) { *out = calloc(1, 64); return 0; }
API cudnnGetStream(void *handle, void **stream) { *stream = NULL; return 0; }

#define DESCRIPTOR(Kind) \
    API cudnnCreate##Kind##Descriptor(void **out) { return make(out); } \
    API cudnnDestroy##Kind##Descriptor(void *descriptor) { free(descriptor); return 0; }
DESCRIPTOR(Tensor)
DESCRIPTOR(Filter)
DESCRIPTOR(Convolution)
DESCRIPTOR(Activation)
DESCRIPTOR(Dropout)
DESCRIPTOR(RNN)
DESCRIPTOR(RNNData)
DESCRIPTOR(CTCLoss)
DESCRIPTOR(SpatialTransformer)

static void keep(int *to, const int *from, int count) {
    memcpy(to, from, sizeof *to * (size_t)(count < MOST_DIMENSIONS ? count : MOST_DIMENSIONS));
}
API cudnnSetTensorNdDescriptor(struct descriptor *of, int type, int count, const int *sizes, const int *strides) {
    of->type = type;
    of->dimensions = count;
    keep(of->sizes, sizes, count);
    keep(of->strides, strides, count);
    return 0;
}
API cudnnGetTensorNdDescriptor(const struct descriptor *of, int room, int *type, int *count, int *sizes, int *strides) {
    *type = of->type;
    *count = of->dimensions;
    keep(sizes, of->sizes, of->dimensions < room ? of->dimensions : room);
    keep(strides, of->strides, of->dimensions < room ? of->dimensions : room);
    return 0;
}
API cudnnSetFilterNdDescriptor(struct descriptor *of, int type, int format, int count, const int *sizes) {
    of->type = type;
    of->format = format;
    of->dimensions = count;
    keep(of->sizes, sizes, count);
    return 0;
}
API cudnnGetFilterNdDescriptor(const struct descriptor *of, int room, int *type, int *format, int *count, int *sizes) {
    *type = of->type;
    *format = of->format;
    *count = of->dimensions;
    keep(sizes, of->sizes, of->dimensions < room ? of->dimensions : room);
    return 0;
}
API cudnnDropoutGetStatesSize(void *handle, size_t *size) { *size = 1 << 20; return 0; }

/* --- batch norm -------------------------------------------------------------------------------------------------- */

API cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(void *handle, int mode, int fused, void *x, void *z, void *y,
                                                             void *scale, void *activation, size_t *size) {
    *size = 0;
    return 0;
}
API cudnnGetBatchNormalizationBackwardExWorkspaceSize(void *handle, int mode, int fused, void *x, void *y, void *dy,
                                                      void *dz, void *dx, void *scale, void *activation, size_t *size) {
    *size = 0;
    return 0;
}
API cudnnGetBatchNormalizationTrainingExReserveSpaceSize(void *handle, int mode, int fused, void *activation, void *x,
                                                         size_t *size) {
    *size = 0;
    return 0;
}

/* --- recurrent nets: the matrices of every layer and direction, then the biases of all ------------------------------ */

API cudnnSetRNNDescriptor_v8(struct descriptor *of, int algorithm, int cell, int bias, int both_ways, int input_mode,
                             int type, int precision, int maths, int input, int hidden, int projected, int layers,
                             void *dropout, unsigned flags) {
    of->type = type;
    of->cell = cell;
    of->bias = bias;
    of->directions = both_ways ? 2 : 1;
    of->input = input;
    of->hidden = hidden;
    of->layers = layers;
    return projected && projected != hidden ? 9 : 0; /* projections are refused: not supported */
}
API cudnnSetRNNDataDescriptor(struct descriptor *of, int type, int layout, int time, int batch, int vector,
                              const int *lengths, void *fill) {
    of->type = type;
    of->time = time;
    of->batch = batch;
    return 0;
}

/* Source: cudnn_adv.h, cudnnRNNMode_t: 2 is an LSTM, 3 a GRU. */
static int gates(const struct descriptor *of) { return of->cell == 2 ? 4 : of->cell == 3 ? 3 : 1; }

/* The columns of matrix `id` of a pseudo-layer (a layer in one direction): those of the input come first. */
static int columns(const struct descriptor *of, int pseudo, int id) {
    if (id >= gates(of)) return of->hidden;
    return pseudo < of->directions ? of->input : of->hidden * of->directions;
}
static size_t elements_before(const struct descriptor *of, int pseudo, int id) {
    size_t sum = 0;
    for (int layer = 0; layer <= pseudo; layer++)
        for (int i = 0; i < (layer == pseudo ? id : 2 * gates(of)); i++)
            sum += (size_t)of->hidden * (size_t)columns(of, layer, i);
    return sum;
}
static size_t biases_before(const struct descriptor *of, int pseudo, int id) {
    if (!of->bias) return 0;
    int each = of->bias == 2 ? 2 * gates(of) : gates(of); /* CUDNN_RNN_DOUBLE_BIAS is 2 */
    return (size_t)(pseudo * each + id) * (size_t)of->hidden;
}
API cudnnGetRNNWeightSpaceSize(void *handle, const struct descriptor *of, size_t *size) {
    int all = of->layers * of->directions;
    *size = (elements_before(of, all, 0) + biases_before(of, all, 0)) * width(of->type);
    return 0;
}
API cudnnGetRNNWeightParams(void *handle, const struct descriptor *of, int pseudo, size_t size, char *weights, int id,
                            struct descriptor *matrix, void **matrix_at, struct descriptor *bias, void **bias_at) {
    int rows = of->hidden, across = columns(of, pseudo, id);
    int shape[] = {1, rows, across}, strides[] = {rows * across, across, 1};
    int bias_shape[] = {1, rows, 1}, bias_strides[] = {rows, 1, 1};
    size_t behind_all = elements_before(of, of->layers * of->directions, 0);
    if (matrix) cudnnSetTensorNdDescriptor(matrix, of->type, 3, shape, strides);
    if (bias) cudnnSetTensorNdDescriptor(bias, of->type, 3, bias_shape, bias_strides);
    if (matrix_at) *matrix_at = weights + elements_before(of, pseudo, id) * width(of->type);
    if (bias_at) *bias_at = of->bias ? weights + (behind_all + biases_before(of, pseudo, id)) * width(of->type) : NULL;
    return 0;
}
/* Guesses: what the gates of all steps take, which a backward reads again. */
API cudnnGetRNNTempSpaceSizes(void *handle, const struct descriptor *of, int training, const struct descriptor *data,
                              size_t *workspace, size_t *reserve) {
    size_t states = (size_t)data->time * (size_t)data->batch * (size_t)(of->hidden * of->directions) * width(of->type);
    *workspace = states * (size_t)gates(of);
    if (reserve) *reserve = training ? states * (size_t)(of->layers * (gates(of) + 2)) : 0;
    return 0;
}

/* --- the graph interface, by which PyTorch runs convolutions --------------------------------------------------------
 * Source: cudnn_graph.h, cudnnBackendAttributeName_t */
enum { HEURISTIC_RESULTS = 202, CONFIG_ENGINE = 300, PLAN_WORKSPACE = 402, PLAN_JSON = 405, ENGINE_INDEX = 1301 };

API cudnnBackendCreateDescriptor(int kind, void **out) { return make(out); }
API cudnnBackendDestroyDescriptor(void *descriptor) { free(descriptor); return 0; }
API cudnnBackendGetAttribute(const struct descriptor *of, int name, int type, int64_t room, int64_t *count, void *out) {
    int64_t there = 0;
    switch (name) {
    case HEURISTIC_RESULTS: case CONFIG_ENGINE: /* descriptors, that the caller has made already */
        if (count) *count = 1;
        return 0;
    case PLAN_JSON:
        there = sizeof "{}";
        if (out && room >= there) memcpy(out, "{}", sizeof "{}");
        break;
    case PLAN_WORKSPACE: case ENGINE_INDEX:
        there = 1;
        if (out && room) *(int64_t *)out = 0;
        break;
    }
    if (count) *count = there;
    return 0;
}

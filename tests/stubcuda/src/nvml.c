/* libnvidia-ml.so.1: what PyTorch and pynvml ask of the cards. What is not here is no function of this driver. */
#include "device.h"
#include <stdio.h>
#include <string.h>

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7 }; /* Source: nvml.h, nvmlReturn_t */
#define API EXPORTED int

static struct card { int index; } all_cards[MOST_CARDS];

struct memory { unsigned long long total, free, used; };
struct memory_v2 { unsigned version; unsigned long long total, reserved, free, used; };
struct process_v1 { unsigned pid; unsigned long long bytes; };
struct process { unsigned pid; unsigned long long bytes; unsigned gpu_instance, compute_instance; };
struct utilization { unsigned gpu, memory; };
struct pci { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; };

API nvmlInit_v2(void) { return SUCCESS; }
API nvmlInitWithFlags(unsigned flags) { return SUCCESS; }
API nvmlShutdown(void) { return SUCCESS; }
EXPORTED const char *nvmlErrorString(int code) {
    switch (code) {
    case SUCCESS: return "Success";
    case INVALID_ARGUMENT: return "Invalid Argument";
    case NOT_FOUND: return "Not Found";
    case INSUFFICIENT_SIZE: return "Insufficient Size";
    default: return "Unknown Error";
    }
}
API nvmlSystemGetDriverVersion(char *out, unsigned room) { snprintf(out, room, "580.65.06"); return SUCCESS; }
API nvmlSystemGetNVMLVersion(char *out, unsigned room) { snprintf(out, room, "13.580.65.06"); return SUCCESS; }
API nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 13000; return SUCCESS; }
API nvmlSystemGetProcessName(unsigned pid, char *out, unsigned room) {
    char path[32];
    snprintf(path, sizeof path, "/proc/%u/cmdline", pid);
    FILE *file = fopen(path, "r");
    if (!file) return NOT_FOUND;
    size_t length = fread(out, 1, room - 1, file); /* the program's name ends at the first zero */
    fclose(file);
    out[length] = 0;
    return SUCCESS;
}

API nvmlDeviceGetCount_v2(unsigned *count) { *count = (unsigned)stub_cards(); return SUCCESS; }
API nvmlDeviceGetHandleByIndex_v2(unsigned index, struct card **out) {
    if (index >= (unsigned)stub_cards()) return INVALID_ARGUMENT;
    *out = &all_cards[index];
    (*out)->index = (int)index;
    return SUCCESS;
}
API nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, struct card **out) {
    unsigned domain, bus;
    if (sscanf(bus_id, "%x:%x", &domain, &bus) != 2 || !bus) return NOT_FOUND;
    return nvmlDeviceGetHandleByIndex_v2(bus - 1, out) ? NOT_FOUND : SUCCESS;
}
API nvmlDeviceGetUUID(struct card *card, char *out, unsigned room) {
    const unsigned char bytes[] = "stubcuda-device"; /* as the runtime tells it, with the card in the last byte */
    int at = snprintf(out, room, "GPU-");
    for (int i = 0; i < 16; i++) {
        const char *dash = i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "";
        at += snprintf(out + at, room - (unsigned)at, "%s%02x", dash, i < 15 ? bytes[i] : card->index);
    }
    return SUCCESS;
}
API nvmlDeviceGetHandleByUUID(const char *uuid, struct card **out) {
    for (int i = 0; i < stub_cards(); i++) {
        char its[48];
        nvmlDeviceGetHandleByIndex_v2((unsigned)i, out);
        nvmlDeviceGetUUID(*out, its, sizeof its);
        if (!strcmp(its, uuid)) return SUCCESS;
    }
    return NOT_FOUND;
}
API nvmlDeviceGetIndex(struct card *card, unsigned *index) { *index = (unsigned)card->index; return SUCCESS; }
API nvmlDeviceGetMinorNumber(struct card *card, unsigned *number) { return nvmlDeviceGetIndex(card, number); }
API nvmlDeviceGetName(struct card *card, char *out, unsigned room) {
    snprintf(out, room, "%s", stub_name());
    return SUCCESS;
}
API nvmlDeviceGetPciInfo_v3(struct card *card, struct pci *out) {
    memset(out, 0, sizeof *out);
    out->bus = (unsigned)card->index + 1;
    snprintf(out->legacy, sizeof out->legacy, "0000:%02X:00.0", out->bus);
    snprintf(out->bus_id, sizeof out->bus_id, "00000000:%02X:00.0", out->bus);
    return SUCCESS;
}
API nvmlDeviceGetMemoryInfo(struct card *card, struct memory *out) {
    out->total = stub_total();
    out->free = stub_free(card->index);
    out->used = out->total - out->free;
    return SUCCESS;
}
API nvmlDeviceGetMemoryInfo_v2(struct card *card, struct memory_v2 *out) {
    out->total = stub_total();
    out->reserved = 0;
    out->free = stub_free(card->index);
    out->used = out->total - out->free;
    return SUCCESS;
}
API nvmlDeviceGetUtilizationRates(struct card *card, struct utilization *out) {
    out->gpu = out->memory = 0;
    return SUCCESS;
}
API nvmlDeviceGetCudaComputeCapability(struct card *card, int *major, int *minor) {
    *major = stub_capability() / 10;
    *minor = stub_capability() % 10;
    return SUCCESS;
}
API nvmlDeviceGetMigMode(struct card *card, unsigned *now, unsigned *later) { *now = *later = 0; return SUCCESS; }
API nvmlDeviceGetMaxMigDeviceCount(struct card *card, unsigned *count) { *count = 0; return SUCCESS; }
API nvmlDeviceGetMigDeviceHandleByIndex(struct card *card, unsigned index, struct card **out) { return NOT_FOUND; }

API nvmlDeviceGetComputeRunningProcesses_v3(struct card *card, unsigned *count, struct process *out) {
    struct holder holders[MOST_PROCESSES];
    unsigned room = *count;
    *count = (unsigned)stub_holders(card->index, holders, MOST_PROCESSES);
    if (*count > room) return INSUFFICIENT_SIZE;
    for (unsigned i = 0; i < *count; i++) {
        unsigned long long bytes = stub_held(&holders[i], card->index);
        out[i] = (struct process){(unsigned)holders[i].pid, bytes, ~0u, ~0u}; /* in no part of a divided card */
    }
    return SUCCESS;
}
/* PyTorch's message of a failed allocation names processes by this one. */
API nvmlDeviceGetComputeRunningProcesses(struct card *card, unsigned *count, struct process_v1 *out) {
    struct process processes[MOST_PROCESSES];
    unsigned room = *count;
    *count = MOST_PROCESSES;
    nvmlDeviceGetComputeRunningProcesses_v3(card, count, processes);
    if (*count > room) return INSUFFICIENT_SIZE;
    for (unsigned i = 0; i < *count; i++) out[i] = (struct process_v1){processes[i].pid, processes[i].bytes};
    return SUCCESS;
}
API nvmlDeviceGetGraphicsRunningProcesses_v3(struct card *card, unsigned *count, struct process *out) {
    *count = 0;
    return SUCCESS;
}
API nvmlDeviceGetMPSComputeRunningProcesses_v3(struct card *card, unsigned *count, struct process *out) {
    *count = 0;
    return SUCCESS;
}
/* PyTorch asks for these by name as soon as it needs NVML. */
API nvmlDeviceGetNvLinkRemoteDeviceType(struct card *card, unsigned link, int *type) { return NOT_SUPPORTED; }
API nvmlDeviceGetNvLinkRemotePciInfo_v2(struct card *card, unsigned link, struct pci *out) { return NOT_SUPPORTED; }

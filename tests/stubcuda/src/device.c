/* The pretended cards. Device memory is host memory that is mapped without being committed: it costs nothing until
 * something writes to it. Who holds what stands in a table that processes share. */
#define _GNU_SOURCE
#include "device.h"
#include <ctype.h>
#include <cuda.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define GRAIN ((size_t)2 << 20) /* a card gives its memory in pieces of 2 MiB */

struct table {
    pid_t locked_by; /* one lock for the table and for this process's blocks: it is held for microseconds */
    struct holder holders[MOST_PROCESSES];
};

static struct table *table;
static uint64_t total, context;
static int cards, visible[MOST_CARDS], devices;
static int capability = 80, multiprocessors;
static char name[128];
static int has_context, lost;

/* "15GiB", "400MiB" or a number of bytes. */
static uint64_t size_of(const char *variable, uint64_t otherwise) {
    const char *text = getenv(variable);
    if (!text || !*text) return otherwise;
    char *unit;
    double number = strtod(text, &unit);
    switch (toupper(*unit)) {
    case 'K': return (uint64_t)(number * (1 << 10));
    case 'M': return (uint64_t)(number * (1 << 20));
    case 'G': return (uint64_t)(number * (1 << 30));
    default: return (uint64_t)number;
    }
}

static int number_of(const char *variable, int otherwise) { return (int)size_of(variable, (uint64_t)otherwise); }

static void see_devices(void) {
    const char *rest = getenv("CUDA_VISIBLE_DEVICES");
    for (int card = 0; !rest && card < cards; card++) visible[devices++] = card;
    while (rest && *rest && devices < MOST_CARDS) {
        char *end;
        long card = strtol(rest, &end, 10);
        if (end == rest || card < 0 || card >= cards) return; /* as CUDA does: none after one that is not there */
        visible[devices++] = (int)card;
        rest = *end == ',' ? end + 1 : end;
    }
}

/* Processes given one STUBCUDA_SHARED share the cards; otherwise a process does with its forked children. */
static struct table *shared_table(void) {
    const char *shared = getenv("STUBCUDA_SHARED");
    int file = -1, flags = MAP_SHARED | MAP_ANONYMOUS;
    if (shared && *shared) {
        file = open(shared, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
        if (file < 0 || ftruncate(file, sizeof(struct table))) {
            perror(shared);
            abort();
        }
        flags = MAP_SHARED;
    }
    struct table *at = mmap(NULL, sizeof(struct table), PROT_READ | PROT_WRITE, flags, file, 0);
    if (file >= 0) close(file);
    if (at == MAP_FAILED) abort();
    return at;
}

static void in_copy(void) { lost = has_context ? 3 : 0; }

__attribute__((constructor)) static void begin(void) {
    const char *text = getenv("STUBCUDA_CC");
    int major = 8, minor = 0;
    if (text) sscanf(text, "%d.%d", &major, &minor);
    capability = 10 * major + minor;
    total = size_of("STUBCUDA_MEM", (uint64_t)16 << 30);
    context = size_of("STUBCUDA_CONTEXT", 0);
    multiprocessors = number_of("STUBCUDA_SMS", 108);
    cards = number_of("STUBCUDA_DEVICES", 1);
    if (cards > MOST_CARDS) cards = MOST_CARDS;
    text = getenv("STUBCUDA_NAME");
    snprintf(name, sizeof name, "%s", text && *text ? text : "NVIDIA A100-SXM4-80GB (stub)");
    see_devices();
    table = shared_table();
    pthread_atfork(NULL, NULL, in_copy);
}

static int gone(pid_t pid) { return pid != getpid() && kill(pid, 0) && errno == ESRCH; }

static void lock(void) {
    for (;;) {
        pid_t nobody = 0;
        if (__atomic_compare_exchange_n(&table->locked_by, &nobody, getpid(), 0, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED))
            return;
        if (gone(nobody)) /* it was killed with the lock in its hand; nobody holds now who that was */
            __atomic_compare_exchange_n(&table->locked_by, &nobody, 0, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
        sched_yield();
    }
}

static void unlock(void) { __atomic_store_n(&table->locked_by, 0, __ATOMIC_RELEASE); }

/* This process's row, made where there is none; what a dead process held is free. */
static struct holder *own(void) {
    struct holder *unused = NULL, *found = NULL;
    for (struct holder *row = table->holders; row < table->holders + MOST_PROCESSES; row++) {
        if (row->pid && gone(row->pid)) memset(row, 0, sizeof *row);
        if (row->pid == getpid()) found = row;
        if (!row->pid && !unused) unused = row;
    }
    if (found) return found;
    if (!unused) {
        fprintf(stderr, "stubcuda: more than %d processes\n", MOST_PROCESSES);
        abort();
    }
    unused->pid = getpid();
    return unused;
}

uint64_t stub_held(const struct holder *holder, int card) {
    return holder->bytes[card] + (holder->context[card] ? context : 0);
}

static uint64_t used(int card) {
    uint64_t sum = 0;
    own(); /* the dead are forgotten */
    for (int i = 0; i < MOST_PROCESSES; i++) sum += stub_held(&table->holders[i], card);
    return sum;
}

int stub_cards(void) { return cards; }
int stub_devices(void) { return devices; }
int stub_card(int device) { return device >= 0 && device < devices ? visible[device] : 0; }
uint64_t stub_total(void) { return total; }
int stub_capability(void) { return capability; }
const char *stub_name(void) { return name; }

uint64_t stub_free(int card) {
    lock();
    uint64_t taken = used(card);
    unlock();
    return taken < total ? total - taken : 0;
}

int stub_holders(int card, struct holder *out, int room) {
    int count = 0;
    lock();
    own();
    for (int i = 0; i < MOST_PROCESSES; i++)
        if (table->holders[i].context[card]) {
            if (count < room) out[count] = table->holders[i];
            count++;
        }
    unlock();
    return count;
}

int stub_lost(void) { return lost; }

void stub_use(int device) {
    has_context = 1;
    lock();
    own()->context[stub_card(device)] = 1;
    unlock();
}

int stub_charge(int device, int64_t bytes) {
    int card = stub_card(device);
    lock();
    struct holder *row = own();
    row->context[card] = has_context = 1;
    int fits = bytes <= 0 || used(card) + (uint64_t)bytes <= total;
    if (fits) row->bytes[card] += (uint64_t)bytes;
    unlock();
    return fits;
}

/* --- addresses ------------------------------------------------------------------------------------------------- */

void *stub_map(size_t size, int protection) {
    size_t whole = size + GRAIN; /* what lies before and behind the boundaries goes back at once */
    char *raw = mmap(NULL, whole, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (raw == MAP_FAILED) return NULL;
    char *start = (char *)(((uintptr_t)raw + GRAIN - 1) & ~(GRAIN - 1));
    if (start > raw) munmap(raw, (size_t)(start - raw));
    munmap(start + size, (size_t)(raw + whole - (start + size)));
    return start;
}

static struct block *blocks; /* in the order of their addresses */
static int block_count, block_room;

static int first_behind(const void *address) {
    int low = 0, high = block_count;
    while (low < high) {
        int middle = (low + high) / 2;
        if (blocks[middle].start <= (const char *)address) low = middle + 1;
        else high = middle;
    }
    return low;
}

void stub_remember(struct block block) {
    lock();
    if (block_count == block_room) {
        block_room = block_room ? 2 * block_room : 256;
        blocks = realloc(blocks, sizeof *blocks * (size_t)block_room);
    }
    int at = first_behind(block.start);
    memmove(blocks + at + 1, blocks + at, sizeof *blocks * (size_t)(block_count - at));
    blocks[at] = block;
    block_count++;
    unlock();
}

int stub_forget(void *start, struct block *was) {
    lock();
    int at = first_behind(start) - 1, found = at >= 0 && blocks[at].start == start;
    if (found) {
        *was = blocks[at];
        block_count--;
        memmove(blocks + at, blocks + at + 1, sizeof *blocks * (size_t)(block_count - at));
    }
    unlock();
    return found;
}

int stub_find(const void *address, struct block *found) {
    lock();
    int at = first_behind(address) - 1, inside = at >= 0 && (const char *)address < blocks[at].start + blocks[at].size;
    if (inside) *found = blocks[at];
    unlock();
    return inside;
}

int stub_alloc(void **out, size_t bytes, int device) {
    *out = NULL;
    if (!bytes) return CUDA_SUCCESS;
    if (bytes > total) return CUDA_ERROR_OUT_OF_MEMORY;
    size_t size = (bytes + GRAIN - 1) & ~(GRAIN - 1);
    if (!stub_charge(device, (int64_t)size)) return CUDA_ERROR_OUT_OF_MEMORY;
    char *start = stub_map(size, PROT_READ | PROT_WRITE);
    if (!start) {
        stub_charge(device, -(int64_t)size);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    stub_remember((struct block){start, bytes, size, device, NULL});
    *out = start;
    return CUDA_SUCCESS;
}

int stub_release(void *start) {
    struct block was;
    if (!start) return CUDA_SUCCESS;
    if (!stub_forget(start, &was)) return CUDA_ERROR_INVALID_VALUE;
    munmap(was.start, was.size);
    stub_charge(was.device, -(int64_t)was.size);
    return CUDA_SUCCESS;
}

void stub_copy(void *to, const void *from, size_t bytes) {
    if (to != from) memmove(to, from, bytes);
}

/* Zeros in whole pages are pages given back, so that a model of many GiB on the device takes none of the host. */
void stub_fill(void *to, int value, size_t bytes) {
    struct block block;
    uintptr_t page = 4096, start = ((uintptr_t)to + page - 1) & ~(page - 1), end = ((uintptr_t)to + bytes) & ~(page - 1);
    if (!(value & 0xff) && start < end && stub_find(to, &block) && !madvise((void *)start, end - start, MADV_DONTNEED)) {
        memset(to, 0, start - (uintptr_t)to);
        memset((void *)end, 0, (uintptr_t)to + bytes - end);
    } else {
        memset(to, value, bytes);
    }
}

/* --- what a card says of itself -------------------------------------------------------------------------------- */

/* Source: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability". */
static int shared_memory(int of_a_block) {
    int kib = capability >= 90 ? 228 : capability == 80 ? 164 : capability > 80 ? 100 : 64;
    return (kib - (of_a_block && capability >= 80)) << 10;
}

#define IS(attribute, value) case CU_DEVICE_ATTRIBUTE_##attribute: return value;
int stub_attribute(int attribute) {
    switch (attribute) {
    IS(COMPUTE_CAPABILITY_MAJOR, capability / 10)
    IS(COMPUTE_CAPABILITY_MINOR, capability % 10)
    IS(MULTIPROCESSOR_COUNT, multiprocessors)
    IS(MAX_THREADS_PER_MULTIPROCESSOR, capability == 75 ? 1024 : 2048)
    IS(MAX_BLOCKS_PER_MULTIPROCESSOR, capability == 75 ? 16 : 32)
    IS(MAX_SHARED_MEMORY_PER_MULTIPROCESSOR, shared_memory(0))
    IS(MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, shared_memory(1))
    IS(MAX_SHARED_MEMORY_PER_BLOCK, 48 << 10)
    IS(RESERVED_SHARED_MEMORY_PER_BLOCK, 1024)
    IS(MAX_REGISTERS_PER_BLOCK, 65536)
    IS(MAX_REGISTERS_PER_MULTIPROCESSOR, 65536)
    IS(TOTAL_CONSTANT_MEMORY, 65536)
    IS(WARP_SIZE, 32)
    IS(MAX_THREADS_PER_BLOCK, 1024)
    IS(MAX_BLOCK_DIM_X, 1024)
    IS(MAX_BLOCK_DIM_Y, 1024)
    IS(MAX_BLOCK_DIM_Z, 64)
    IS(MAX_GRID_DIM_X, 2147483647)
    IS(MAX_GRID_DIM_Y, 65535)
    IS(MAX_GRID_DIM_Z, 65535)
    IS(MAX_PITCH, 2147483647)
    IS(TEXTURE_ALIGNMENT, 512)
    IS(L2_CACHE_SIZE, 40 << 20)
    IS(GLOBAL_MEMORY_BUS_WIDTH, 5120)
    IS(ASYNC_ENGINE_COUNT, 3)
    IS(CLOCK_RATE, 1410000)
    IS(MEMORY_CLOCK_RATE, 1593000)
    IS(UNIFIED_ADDRESSING, 1)
    IS(CONCURRENT_KERNELS, 1)
    IS(CAN_MAP_HOST_MEMORY, 1)
    IS(STREAM_PRIORITIES_SUPPORTED, 1)
    IS(COOPERATIVE_LAUNCH, 1)
    IS(HOST_REGISTER_SUPPORTED, 1)
    IS(CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM, 1)
    IS(VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 1)
    IS(HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, 1)
    default: return 0;
    }
}

/* The words that PyTorch's messages repeat. */
static const struct { int code; const char *name, *text; } ERRORS[] = {
    {0, "cudaSuccess", "no error"},
    {1, "cudaErrorInvalidValue", "invalid argument"},
    {2, "cudaErrorMemoryAllocation", "out of memory"},
    {100, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {101, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {500, "cudaErrorSymbolNotFound", "named symbol not found"},
    {3, "cudaErrorInitializationError", "initialization error"},
    {801, "cudaErrorNotSupported", "operation not supported"},
};

static size_t error_row(int code) {
    size_t rows = sizeof ERRORS / sizeof *ERRORS, row = 0;
    while (row < rows && ERRORS[row].code != code) row++;
    return row < rows ? row : rows - 1;
}

const char *stub_error_name(int code) { return ERRORS[error_row(code)].name; }
const char *stub_error_text(int code) { return ERRORS[error_row(code)].text; }

/* The pretended cards: their size, who holds how much of them, and which addresses are device memory.
 * Defined in libcuda.so.1; the other stub libraries link with it. */
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define MOST_CARDS 8
#define MOST_PROCESSES 64
#define EXPORTED __attribute__((visibility("default")))

struct holder {                     /* what one process has of the cards */
    pid_t pid;
    uint64_t bytes[MOST_CARDS];     /* without its context */
    uint8_t context[MOST_CARDS];
};

struct block {                      /* device memory that was given out */
    char *start;
    size_t asked, size;             /* size: asked, rounded up to what a card gives memory in */
    int device;
    void *handle;                   /* of the driver's virtual memory, else NULL */
};

#pragma GCC visibility push(default) /* for the other libraries */

/* A card is one of the machine, as NVML numbers them; a device is one that CUDA_VISIBLE_DEVICES leaves. */
int stub_cards(void);
int stub_devices(void);
int stub_card(int device);

uint64_t stub_total(void);
uint64_t stub_free(int card);
uint64_t stub_held(const struct holder *holder, int card);
int stub_holders(int card, struct holder *out, int room);
void stub_use(int device);                         /* this process has a context from now on */
int stub_lost(void);                               /* 3 in a copy of a process that had a context, as CUDA says, else 0 */
int stub_charge(int device, int64_t bytes);        /* 0 where the card has not that much left */

void *stub_map(size_t size, int protection);       /* addresses on a boundary of a grain */
int stub_alloc(void **out, size_t bytes, int device);  /* 0, or the code of an error: CUDA's runtime and driver agree */
int stub_release(void *start);
void stub_remember(struct block block);
int stub_forget(void *start, struct block *was);
int stub_find(const void *address, struct block *found);
void stub_copy(void *to, const void *from, size_t bytes);
void stub_fill(void *to, int value, size_t bytes);

int stub_capability(void);                         /* 80 is 8.0 */
const char *stub_name(void);
int stub_attribute(int attribute);                 /* cudaDeviceAttr and CUdevice_attribute share their numbers */
const char *stub_error_name(int code);
const char *stub_error_text(int code);

#pragma GCC visibility pop

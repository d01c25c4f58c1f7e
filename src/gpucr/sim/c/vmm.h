/* vmm.c: physical memory without an address, and other objects with such handles. */
#ifndef GPUCR_SIM_VMM_H
#define GPUCR_SIM_VMM_H

#include "calls.h"

#define VMM_GRANULARITY_BYTES (2u << 20)

struct properties { /* CUmemAllocationProp */
    int type, handle_types, location_type, location;
    void *win32;
    uint8_t compression, direct_rdma;
    uint8_t flags[6];
};
_Static_assert(sizeof(struct properties) == 32, "CUmemAllocationProp");

struct allocation {
    struct location at; /* owner 0: imported, on the host or multicast, and `offset` tells it from others */
    uint64_t size_bytes;
    uint64_t pointer; /* of our own device memory; 0: it is something else */
    bool imported, multicast;
    struct properties properties;
    int shared; /* the file that holds the bytes since it was exported or imported, or is on the host; -1: our own memory */
    unsigned references; /* 0: released, and kept until it is unmapped, as the driver does */
    struct allocation *next;
};

struct allocation *vmm_known(uint64_t handle);
const struct allocation *vmm_at(uint64_t address); /* that is mapped there */
enum result vmm_remember(const struct allocation *allocation, uint64_t *handle);

#endif

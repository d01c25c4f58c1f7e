/*
 * cuMemAlloc and similar calls, backed by VMM memory. Allocations below the granularity stay with the driver, which
 * packs many into one page; there are few, and its own checkpoint takes them. Without an agent all stay there: nobody
 * could ask for their memory, neither gpucr nor a process that opens it by legacy IPC.
 */
#include "replaced.h"

#include <string.h>

#define PITCH_BYTES 512 /* what cuMemAllocPitch aligns rows to */

#define DIRECT_RDMA_OF_VMM 110 /* GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED */

static bool any_put_off; /* ranges freed during a capture */

static size_t rounded(size_t bytes, size_t to) {
    return (bytes + to - 1) / to * to;
}

void range_take_apart(address start, size_t reserved) {
    size_t place = sorted_place(&mappings, start);
    while (place < mappings.count) {
        const struct mapping *mapping = sorted_at(&mappings, place);
        if (mapping->start >= start + reserved)
            break;
        if (!block_at(mapping->block)->dropped)
            real.cuMemUnmap(mapping->start, mapping->bytes);
        mapping_remove(place);
    }
    real.cuMemAddressFree(start, reserved);
}

/* Like cuMemAlloc's memory, if the device can: network libraries check it. */
static uint8_t reaches_network(int device) {
    int can = 0;
    return real.cuDeviceGetAttribute != NULL &&
           real.cuDeviceGetAttribute(&can, DIRECT_RDMA_OF_VMM, device) == SUCCESS && can == 1;
}

static result add_chunk(address start, size_t bytes, int device) {
    const struct properties properties = {.type = PINNED, .location_type = ON_DEVICE, .location = device,
                                          .direct_rdma = reaches_network(device)};
    struct access access[MAX_DEVICES];
    unsigned access_count = peers_access(device, access);
    handle made;
    bool exportable;
    result result = create_exportable(&made, bytes, &properties, &exportable);
    if (result != SUCCESS)
        return result;
    struct block *block = block_new(made, bytes, &properties);
    if (block == NULL) {
        real.cuMemRelease(made);
        return OUT_OF_MEMORY;
    }
    block->exportable = exportable;
    struct mapping *mapping = NULL;
    result = real.cuMemMap(start, bytes, 0, made, 0);
    if (result == SUCCESS && (mapping = mapping_add(start, bytes, 0, block)) == NULL) {
        real.cuMemUnmap(start, bytes);
        result = OUT_OF_MEMORY;
    }
    block->references = 0; /* the mapping keeps it; the program has no handle */
    if (result != SUCCESS) {
        block_forget_unused(block);
        return result;
    }
    result = real.cuMemSetAccess(start, bytes, access, access_count);
    return result == SUCCESS && !mapping_set_access(mapping, access, access_count) ? OUT_OF_MEMORY : result;
}

static result back_with_chunks(address start, size_t reserved, int device) {
    for (size_t done = 0; done < reserved;) {
        size_t bytes = reserved - done < CHUNK_BYTES ? reserved - done : CHUNK_BYTES;
        result result = add_chunk(start + done, bytes, device);
        if (result != SUCCESS)
            return result;
        done += bytes;
    }
    return SUCCESS;
}

static result allocate(address *pointer, size_t bytes, int device, context current) {
    size_t reserved = rounded(bytes, GRANULARITY);
    address start;
    result result = real.cuMemAddressReserve(&start, reserved, 0, 0, 0);
    if (result != SUCCESS)
        return result;
    result = back_with_chunks(start, reserved, device);
    struct range *range = result == SUCCESS ? sorted_insert(&ranges, start) : NULL;
    if (range == NULL) {
        range_take_apart(start, reserved);
        return result == SUCCESS ? OUT_OF_MEMORY : result;
    }
    range->bytes = bytes;
    range->reserved = reserved;
    range->context = current;
    range->device = device;
    range->number = range_number();
    *pointer = start;
    return SUCCESS;
}

static void note_native(address start, size_t bytes, enum kind kind) {
    struct range *range = sorted_insert(&ranges, start);
    if (range == NULL)
        return; /* counted only */
    range->bytes = bytes;
    range->kind = kind;
}

static result allocate_native(address *pointer, size_t bytes) {
    result result = real.cuMemAlloc_v2(pointer, bytes);
    if (result == SUCCESS)
        note_native(*pointer, bytes, SMALL);
    return result;
}

/* OUT_OF_MEMORY means the same in both. After any other failure the driver may succeed. */
static result allocate_large(address *pointer, size_t bytes) {
    int device;
    context current = NULL;
    if (real.cuCtxGetDevice(&device) != SUCCESS || real.cuCtxGetCurrent(&current) != SUCCESS)
        return real.cuMemAlloc_v2(pointer, bytes);
    context_note(device, current);
    result result = allocate(pointer, bytes, device, current);
    return result == SUCCESS || result == OUT_OF_MEMORY ? result : allocate_native(pointer, bytes);
}

result replaced_cuMemAlloc_v2(address *pointer, size_t bytes) {
    if (pointer == NULL)
        return real.cuMemAlloc_v2(pointer, bytes);
    table_lock();
    free_what_was_put_off();
    bool is_taken = agent_serves() && bytes >= GRANULARITY && bytes <= SIZE_MAX - GRANULARITY;
    result result = is_taken ? allocate_large(pointer, bytes) : allocate_native(pointer, bytes);
    table_unlock();
    return result;
}

result replaced_cuMemAllocPitch_v2(address *pointer, size_t *pitch, size_t width, size_t height, unsigned element) {
    size_t row = width <= SIZE_MAX - PITCH_BYTES ? rounded(width, PITCH_BYTES) : 0, bytes;
    bool known_element = element == 4 || element == 8 || element == 16;
    if (pointer == NULL || pitch == NULL || row == 0 || !known_element || __builtin_mul_overflow(row, height, &bytes) ||
        bytes < GRANULARITY || bytes > SIZE_MAX - GRANULARITY)
        return real.cuMemAllocPitch_v2(pointer, pitch, width, height, element);
    result result = replaced_cuMemAlloc_v2(pointer, bytes);
    if (result == SUCCESS)
        *pitch = row;
    return result;
}

result replaced_cuMemAllocManaged(address *pointer, size_t bytes, unsigned flags) {
    result result = real.cuMemAllocManaged(pointer, bytes, flags);
    if (result == SUCCESS) {
        table_lock();
        note_native(*pointer, bytes, MANAGED);
        table_unlock();
    }
    return result;
}

/* Like cuMemFree: wait for work that may use the memory, in its context. */
static result synchronize(context owner) {
    context current = NULL;
    real.cuCtxGetCurrent(&current);
    result result = real.cuCtxSetCurrent(owner);
    if (result == SUCCESS)
        result = real.cuCtxSynchronize();
    real.cuCtxSetCurrent(current);
    return result;
}

static void remove_own(const struct range *range) {
    address start = range->start;
    size_t reserved = range->reserved;
    sorted_remove(&ranges, sorted_place(&ranges, start));
    range_take_apart(start, reserved);
}

/* The driver waits here for the GPU, and perhaps for a peer's: not with the table locked. */
static result free_native(address pointer) {
    struct range *range = range_of(pointer), before = {0};
    if (range != NULL && range->start == pointer) {
        before = *range;
        sorted_remove(&ranges, sorted_place(&ranges, pointer));
    }
    table_unlock();
    result result = real.cuMemFree_v2(pointer);
    table_lock();
    if (result != SUCCESS && before.start != 0)
        note_native(before.start, before.bytes, before.kind);
    return result;
}

static result free_own(address pointer, struct range *range) {
    if (range->start != pointer || range->freed)
        return INVALID_VALUE;
    if (captures_open() > 0) { /* waiting now would invalidate the capture */
        range->freed = true;
        any_put_off = true;
        return SUCCESS;
    }
    context owner = range->context;
    table_unlock();
    result result = synchronize(owner);
    table_lock();
    range = range_of(pointer); /* two threads may have freed it */
    if (result == SUCCESS && (range == NULL || range->kind != OWN || range->start != pointer || range->freed))
        return INVALID_VALUE;
    if (result == SUCCESS)
        remove_own(range);
    return result;
}

void range_give_up(address start, context owner) {
    if (captures_open() == 0)
        synchronize(owner);
    table_lock();
    struct range *range = range_of(start);
    if (range != NULL && range->start == start && range->freed)
        remove_own(range);
    table_unlock();
}

result replaced_cuMemFree_v2(address pointer) {
    table_lock();
    free_what_was_put_off();
    struct range *range = range_of(pointer);
    enum kind kind = range != NULL ? range->kind : SMALL;
    result result = kind == OPENED ? INVALID_VALUE : kind == OWN ? free_own(pointer, range) : free_native(pointer);
    table_unlock();
    return result;
}

/* Stream-ordered; here it waits. Inside a capture it is deferred. */
static result free_async(result (*function)(address, stream), result (*wait)(stream), address pointer, stream stream) {
    table_lock();
    const struct range *range = range_of(pointer);
    bool own = range != NULL && range->kind == OWN;
    table_unlock();
    if (own) {
        result result = captures_open() == 0 && wait != NULL ? wait(stream) : SUCCESS;
        return result == SUCCESS ? replaced_cuMemFree_v2(pointer) : result;
    }
    result result = function(pointer, stream);
    if (result == SUCCESS)
        atomic_fetch_sub(&counters[POOL_ALLOCATIONS], 1);
    return result;
}

result replaced_cuMemFreeAsync(address pointer, stream stream) {
    return free_async(real.cuMemFreeAsync, real.cuStreamSynchronize, pointer, stream);
}

result replaced_cuMemFreeAsync_ptsz(address pointer, stream stream) {
    return free_async(real.cuMemFreeAsync_ptsz, real.cuStreamSynchronize_ptsz, pointer, stream);
}

/* The driver's own checkpoint does not know about a registration, and a network card would keep writing. */
result replaced_cuMemGetHandleForAddressRange(void *made, address start, size_t bytes, int type, unsigned long long flags) {
    result result = real.cuMemGetHandleForAddressRange(made, start, bytes, type, flags);
    if (result != SUCCESS)
        return result;
    table_lock();
    struct range *range = range_of(start);
    if (range != NULL && range->kind == SMALL)
        range->registered = true;
    for (struct mapping *mapping = mapping_of(start); mapping != NULL && mapping->start < start + bytes;
         mapping = mapping_of(mapping->start + mapping->bytes))
        block_at(mapping->block)->registered = true;
    table_unlock();
    return result;
}

void free_what_was_put_off(void) {
    if (!any_put_off || captures_open() > 0)
        return;
    any_put_off = false;
    for (size_t place = 0; place < ranges.count;) {
        struct range *range = sorted_at(&ranges, place);
        if (!range->freed) {
            place++;
            continue;
        }
        synchronize(range->context);
        remove_own(sorted_at(&ranges, place));
    }
}

/* A primary context that others still use is not destroyed. */
static bool is_gone(context owner) {
    return captures_open() == 0 && synchronize(owner) != SUCCESS;
}

void forget_context(context destroyed, int device) {
    table_lock();
    for (size_t place = 0; place < ranges.count;) {
        const struct range *range = sorted_at(&ranges, place);
        bool affected = destroyed != NULL ? range->context == destroyed : range->device == device;
        if ((range->kind != OWN && range->kind != OPENED) || !affected || (destroyed == NULL && !is_gone(range->context))) {
            place++;
            continue;
        }
        context_forget(range->context);
        remove_own(range);
    }
    if (destroyed != NULL)
        context_forget(destroyed);
    table_unlock();
}

/* Host memory that the GPU can reach: allocated by the driver, or the program's own and registered. */
#include "calls.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

struct range {
    uint64_t start, size_bytes;
    bool registered;
    struct range *next;
};

static struct range *ranges;

bool host_memory_holds(uint64_t pointer, uint64_t size_bytes) {
    for (const struct range *range = ranges; range != NULL; range = range->next)
        if (pointer >= range->start && pointer - range->start < range->size_bytes &&
            size_bytes <= range->size_bytes - (pointer - range->start))
            return true;
    return false;
}

static enum result add(void *start, uint64_t size_bytes, bool registered) {
    struct range *made = malloc(sizeof *made);
    if (made == NULL)
        return OUT_OF_MEMORY;
    *made = (struct range){(uint64_t)(uintptr_t)start, size_bytes, registered, ranges};
    ranges = made;
    return SUCCESS;
}

static bool take_out(const void *start, bool registered, uint64_t *size_bytes) {
    for (struct range **link = &ranges; *link != NULL; link = &(*link)->next) {
        struct range *range = *link;
        if (range->start != (uint64_t)(uintptr_t)start || range->registered != registered)
            continue;
        *size_bytes = range->size_bytes;
        *link = range->next;
        free(range);
        return true;
    }
    return false;
}

static enum result allocate(void **pointer, uint64_t size_bytes) {
    if (current_device() == NULL)
        return INVALID_CONTEXT;
    if (size_bytes == 0)
        return INVALID_VALUE;
    *pointer = mmap(NULL, size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    return *pointer == MAP_FAILED ? OUT_OF_MEMORY : add(*pointer, size_bytes, false);
}

EXPORT int cuMemHostAlloc(void **pointer, size_t bytes, unsigned flags) {
    (void)flags;
    GATED(pointer == NULL ? INVALID_VALUE : allocate(pointer, bytes));
}

static enum result free_host(void *pointer) {
    uint64_t size_bytes;
    if (!take_out(pointer, false, &size_bytes))
        return INVALID_VALUE;
    munmap(pointer, size_bytes);
    return SUCCESS;
}

EXPORT int cuMemFreeHost(void *pointer) {
    GATED(free_host(pointer));
}

static enum result register_range(void *pointer, uint64_t size_bytes) {
    if (current_device() == NULL)
        return INVALID_CONTEXT;
    if (pointer == NULL || size_bytes == 0)
        return INVALID_VALUE;
    return host_memory_holds((uint64_t)(uintptr_t)pointer, 1) ? HOST_MEMORY_ALREADY_REGISTERED
                                                              : add(pointer, size_bytes, true);
}

EXPORT int cuMemHostRegister_v2(void *pointer, size_t bytes, unsigned flags) {
    (void)flags;
    GATED(register_range(pointer, bytes));
}

static enum result unregister(void *pointer) {
    uint64_t size_bytes;
    return take_out(pointer, true, &size_bytes) ? SUCCESS : HOST_MEMORY_NOT_REGISTERED;
}

EXPORT int cuMemHostUnregister(void *pointer) {
    GATED(unregister(pointer));
}

/* One address for both sides (UNIFIED_ADDRESSING). */
static enum result device_pointer(uint64_t *pointer, const void *host) {
    if (!host_memory_holds((uint64_t)(uintptr_t)host, 1))
        return INVALID_VALUE;
    *pointer = (uint64_t)(uintptr_t)host;
    return SUCCESS;
}

EXPORT int cuMemHostGetDevicePointer_v2(uint64_t *pointer, void *host, unsigned flags) {
    GATED(pointer == NULL || flags != 0 ? INVALID_VALUE : device_pointer(pointer, host));
}

/* Work takes effect when it is submitted (execution.c), so that an asynchronous copy is a copy. */
static enum result copy_async(uint64_t device, void *host, uint64_t size_bytes, struct stream *stream, bool to_device) {
    if (current_device() == NULL)
        return INVALID_CONTEXT;
    if (stream_query(stream) == INVALID_HANDLE)
        return INVALID_HANDLE;
    return to_device ? memory_write(device, host, size_bytes) : memory_read(host, device, size_bytes);
}

EXPORT int cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t bytes, struct stream *stream) {
    GATED(copy_async(to, (void *)(uintptr_t)from, bytes, stream, true));
}

EXPORT int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t bytes, struct stream *stream) {
    GATED(copy_async(from, to, bytes, stream, false));
}

static enum result set_async(uint64_t pointer, unsigned char value, size_t bytes, struct stream *stream) {
    if (current_device() == NULL)
        return INVALID_CONTEXT;
    return stream_query(stream) == INVALID_HANDLE ? INVALID_HANDLE : memory_set(pointer, value, bytes);
}

EXPORT int cuMemsetD8Async(uint64_t pointer, unsigned char value, size_t bytes, struct stream *stream) {
    GATED(set_async(pointer, value, bytes, stream));
}

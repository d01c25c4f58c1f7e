/* Pointer attributes, dma-bufs of device memory, and stream-ordered memory. */
#include "vmm.h"

#include <fcntl.h>
#include <string.h>

enum attribute { /* CUpointer_attribute */
    CONTEXT = 1,
    MEMORY_TYPE = 2,
    DEVICE_POINTER = 3,
    SYNC_MEMOPS = 6,
    BUFFER_ID = 7,
    DEVICE_ORDINAL = 9,
    LEGACY_IPC_CAPABLE = 10,
    RANGE_START = 11,
    RANGE_BYTES = 12,
    ALLOWED_HANDLE_TYPES = 14,
    DIRECT_RDMA_CAPABLE = 15,
};
#define ON_DEVICE_TYPE 2 /* CU_MEMORYTYPE_DEVICE */
#define DMA_BUF 1        /* CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD */

/* What is at a pointer: an allocation of cuMemAlloc, or mapped memory. */
struct found {
    const struct allocation *mapped; /* NULL: of cuMemAlloc */
    uint64_t start, size_bytes;
    int ordinal;
};

static bool find(uint64_t pointer, struct found *found) {
    struct location at;
    *found = (struct found){.mapped = vmm_at(pointer)};
    if (found->mapped != NULL) {
        found->ordinal = found->mapped->properties.location;
        return view_range(pointer, &found->start, &found->size_bytes);
    }
    if (!memory_locate(pointer, &at, &found->size_bytes))
        return false;
    found->start = at.base + at.offset;
    found->ordinal = device_ordinal(memory_device(pointer));
    return true;
}

static void put_int(void *data, int value) {
    memcpy(data, &value, sizeof value);
}

static void put_number(void *data, uint64_t value) {
    memcpy(data, &value, sizeof value);
}

static enum result tell(void *data, int attribute, uint64_t pointer) {
    struct found found;
    if (!find(pointer, &found))
        return INVALID_VALUE;
    const struct allocation *mapped = found.mapped;
    switch (attribute) {
    case CONTEXT: /* mapped memory belongs to none */
        put_number(data, mapped != NULL ? 0 : (uint64_t)(uintptr_t)device_at(found.ordinal)->primary);
        return SUCCESS;
    case MEMORY_TYPE:
        put_int(data, ON_DEVICE_TYPE);
        return SUCCESS;
    case DEVICE_POINTER:
        put_number(data, pointer);
        return SUCCESS;
    case BUFFER_ID:
        put_number(data, found.start);
        return SUCCESS;
    case DEVICE_ORDINAL:
        put_int(data, found.ordinal);
        return SUCCESS;
    case SYNC_MEMOPS:
        put_int(data, 0);
        return SUCCESS;
    case LEGACY_IPC_CAPABLE:
        put_int(data, mapped == NULL);
        return SUCCESS;
    case RANGE_START:
        put_number(data, found.start);
        return SUCCESS;
    case RANGE_BYTES:
        put_number(data, found.size_bytes);
        return SUCCESS;
    case ALLOWED_HANDLE_TYPES:
        put_number(data, mapped != NULL ? (uint64_t)mapped->properties.handle_types : 0);
        return SUCCESS;
    case DIRECT_RDMA_CAPABLE:
        put_int(data, mapped == NULL || mapped->properties.direct_rdma == 1);
        return SUCCESS;
    default:
        return NOT_SUPPORTED;
    }
}

EXPORT int cuPointerGetAttribute(void *data, int attribute, uint64_t pointer) {
    GATED(data == NULL ? INVALID_VALUE : tell(data, attribute, pointer));
}

/* Missing attributes return null, without an error. */
static enum result tell_all(unsigned count, const int *attributes, void **data, uint64_t pointer) {
    for (unsigned i = 0; i < count; i++)
        if (tell(data[i], attributes[i], pointer) != SUCCESS)
            put_int(data[i], 0);
    return SUCCESS;
}

EXPORT int cuPointerGetAttributes(unsigned count, int *attributes, void **data, uint64_t pointer) {
    GATED(count == 0 || attributes == NULL || data == NULL ? INVALID_VALUE : tell_all(count, attributes, data, pointer));
}

/* Reported: mapped memory has no SYNC_MEMOPS. */
static enum result set(int attribute, uint64_t pointer) {
    struct found found;
    if (attribute != SYNC_MEMOPS || !find(pointer, &found))
        return INVALID_VALUE;
    return found.mapped != NULL ? NOT_SUPPORTED : SUCCESS;
}

EXPORT int cuPointerSetAttribute(const void *value, int attribute, uint64_t pointer) {
    GATED(value == NULL ? INVALID_VALUE : set(attribute, pointer));
}

static enum result dma_buf(int *descriptor, uint64_t pointer, uint64_t size_bytes) {
    struct found found;
    uint64_t offset;
    int fd;
    if (!find(pointer, &found) || size_bytes == 0 || size_bytes > found.size_bytes - (pointer - found.start))
        return INVALID_VALUE;
    if (found.mapped != NULL) {
        if (!view_find(pointer, size_bytes, &fd, &offset))
            return INVALID_VALUE;
    } else {
        struct location at;
        memory_locate(pointer, &at, &offset);
        fd = memory_file(at.base);
    }
    *descriptor = fcntl(fd, F_DUPFD_CLOEXEC, 3);
    return *descriptor < 0 ? OPERATING_SYSTEM : SUCCESS;
}

EXPORT int cuMemGetHandleForAddressRange(void *made, uint64_t pointer, size_t bytes, int type, unsigned long long flags) {
    (void)flags;
    GATED(made == NULL || type != DMA_BUF ? INVALID_VALUE : dma_buf(made, pointer, bytes));
}

static enum result allocate_in_order(uint64_t *pointer, size_t bytes) {
    struct device *device = current_device();
    return device == NULL ? INVALID_CONTEXT : memory_allocate(device, bytes, pointer);
}

EXPORT int cuMemAllocAsync(uint64_t *pointer, size_t bytes, struct stream *stream) {
    (void)stream;
    GATED(pointer == NULL ? INVALID_VALUE : allocate_in_order(pointer, bytes));
}

static enum result free_in_order(uint64_t pointer, struct stream *stream) {
    enum result result = stream_wait(stream);
    return result == SUCCESS ? memory_free(pointer) : result;
}

EXPORT int cuMemFreeAsync(uint64_t pointer, struct stream *stream) {
    GATED(free_in_order(pointer, stream));
}

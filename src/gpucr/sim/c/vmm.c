/* The VMM calls: physical memory without an address, addresses without memory, and handles that travel as descriptors. */
#include "vmm.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define POSIX_DESCRIPTOR 1 /* CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR */

#define ON_HOST_NODE 3 /* CU_MEM_LOCATION_TYPE_HOST_NUMA */

static struct allocation *allocations;
static uint64_t others; /* that are not our own device memory */

bool vmm_is_imported(void) {
    for (const struct allocation *each = allocations; each != NULL; each = each->next)
        if (each->imported && each->references > 0)
            return true;
    return view_is_open(VIEW_IMPORTED);
}

struct allocation *vmm_known(uint64_t handle) {
    for (struct allocation *each = allocations; each != NULL; each = each->next)
        if ((uint64_t)(uintptr_t)each == handle && each->references > 0)
            return each;
    return NULL;
}

static struct allocation *mapped_at(uint64_t address) {
    struct location at;
    for (struct allocation *each = view_at(address, &at) ? allocations : NULL; each != NULL; each = each->next)
        if (each->at.base == at.base && each->at.offset == at.offset && each->at.owner == at.owner)
            return each;
    return NULL;
}

const struct allocation *vmm_at(uint64_t address) {
    return mapped_at(address);
}

enum result vmm_remember(const struct allocation *allocation, uint64_t *handle) {
    struct allocation *made = malloc(sizeof *made);
    if (made == NULL)
        return OUT_OF_MEMORY;
    *made = *allocation;
    if (made->pointer == 0)
        made->at = (struct location){.offset = ++others};
    made->next = allocations;
    allocations = made;
    *handle = (uint64_t)(uintptr_t)made;
    return SUCCESS;
}

static bool valid_size(uint64_t size_bytes) {
    return size_bytes > 0 && size_bytes % VMM_GRANULARITY_BYTES == 0;
}

EXPORT int cuMemGetAllocationGranularity(size_t *bytes, const struct properties *properties, int option) {
    (void)option;
    if (bytes == NULL || properties == NULL)
        return INVALID_VALUE;
    *bytes = VMM_GRANULARITY_BYTES;
    return SUCCESS;
}

static int new_file(const struct device *device, uint64_t size_bytes, const struct properties *properties) {
    struct exported content = {.size_bytes = size_bytes};
    if (device != NULL)
        memcpy(content.gpu, device->uuid, UUID_BYTES);
    _Static_assert(sizeof content.properties == sizeof *properties, "CUmemAllocationProp");
    memcpy(content.properties, properties, sizeof *properties);
    return exported_create(&sim_machine, &content);
}

/* NCCL's memory between processes: on a NUMA node, visible to GPUs and CPU. */
static enum result create_on_host(uint64_t *handle, uint64_t size_bytes, const struct properties *properties) {
    struct allocation allocation = {.size_bytes = size_bytes, .properties = *properties, .references = 1};
    if (!valid_size(size_bytes) || properties->location < 0)
        return INVALID_VALUE;
    allocation.shared = new_file(NULL, size_bytes, properties);
    return allocation.shared < 0 ? OPERATING_SYSTEM : vmm_remember(&allocation, handle);
}

static enum result create(uint64_t *handle, uint64_t size_bytes, const struct properties *properties) {
    enum result fault = fault_in_call(ACTION_CREATE);
    if (fault != SUCCESS)
        return fault;
    if (properties->location_type == ON_HOST_NODE)
        return create_on_host(handle, size_bytes, properties);
    struct device *device = device_at(properties->location);
    struct allocation allocation = {.size_bytes = size_bytes, .properties = *properties, .shared = -1, .references = 1};
    uint64_t whole;
    if (device == NULL || !valid_size(size_bytes))
        return INVALID_VALUE;
    enum result result = memory_allocate(device, size_bytes, &allocation.pointer);
    if (result != SUCCESS)
        return result;
    memory_locate(allocation.pointer, &allocation.at, &whole);
    return vmm_remember(&allocation, handle);
}

EXPORT int cuMemCreate(uint64_t *handle, size_t bytes, const struct properties *properties, unsigned long long flags) {
    GATED(handle == NULL || properties == NULL || flags != 0 ? INVALID_VALUE : create(handle, bytes, properties));
}

static void let_go_of_file(struct allocation *allocation) {
    if (allocation->shared < 0)
        return;
    if (allocation->pointer != 0)
        exported_disown(allocation->shared);
    close(allocation->shared);
    allocation->shared = -1;
}

/* Free memory without handles and mappings. */
static void forget_unused(void) {
    for (struct allocation **link = &allocations; *link != NULL;) {
        struct allocation *each = *link;
        if (each->references > 0 || view_shows(&each->at)) {
            link = &each->next;
            continue;
        }
        *link = each->next;
        if (each->pointer != 0)
            memory_free(each->pointer);
        let_go_of_file(each);
        free(each);
    }
}

static enum result release(uint64_t handle) {
    struct allocation *allocation = vmm_known(handle);
    if (allocation == NULL)
        return INVALID_VALUE;
    allocation->references--;
    forget_unused();
    return SUCCESS;
}

EXPORT int cuMemRelease(uint64_t handle) {
    GATED(release(handle));
}

static enum result reserve(uint64_t *address, uint64_t size_bytes) {
    if (!valid_size(size_bytes))
        return INVALID_VALUE;
    void *start = mmap(NULL, size_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    *address = (uint64_t)(uintptr_t)start;
    return start == MAP_FAILED ? OUT_OF_MEMORY : SUCCESS;
}

EXPORT int cuMemAddressReserve(uint64_t *address, size_t bytes, size_t alignment, uint64_t wish,
                               unsigned long long flags) {
    (void)alignment;
    (void)wish;
    GATED(address == NULL || flags != 0 ? INVALID_VALUE : reserve(address, bytes));
}

static enum result free_address(uint64_t address, uint64_t size_bytes) {
    return valid_size(size_bytes) && munmap((void *)(uintptr_t)address, size_bytes) == 0 ? SUCCESS : INVALID_VALUE;
}

EXPORT int cuMemAddressFree(uint64_t address, size_t bytes) {
    GATED(free_address(address, bytes));
}

static bool is_on_host(const struct allocation *allocation) {
    return allocation->properties.location_type == ON_HOST_NODE;
}

static enum result map(uint64_t address, uint64_t size_bytes, uint64_t offset, uint64_t handle) {
    const struct allocation *allocation = vmm_known(handle);
    enum result fault = fault_in_call(ACTION_MAP);
    if (fault != SUCCESS)
        return fault;
    if (allocation == NULL || offset != 0 || size_bytes != allocation->size_bytes)
        return INVALID_VALUE;
    if (is_on_host(allocation) && mmap((void *)(uintptr_t)address, size_bytes, PROT_READ | PROT_WRITE,
                                       MAP_SHARED | MAP_FIXED, allocation->shared, 0) == MAP_FAILED)
        return OUT_OF_MEMORY;
    return view_add(address, size_bytes, &allocation->at, allocation->imported ? VIEW_IMPORTED : VIEW_OWN,
                    &allocation->shared);
}

EXPORT int cuMemMap(uint64_t address, size_t bytes, size_t offset, uint64_t handle, unsigned long long flags) {
    GATED(flags != 0 ? INVALID_VALUE : map(address, bytes, offset, handle));
}

static enum result unmap(uint64_t address) {
    const struct allocation *allocation = vmm_at(address);
    if (allocation != NULL && is_on_host(allocation))
        mmap((void *)(uintptr_t)address, allocation->size_bytes, PROT_NONE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    if (!view_remove(address, VIEW_OWN))
        return INVALID_VALUE;
    forget_unused();
    return SUCCESS;
}

EXPORT int cuMemUnmap(uint64_t address, size_t bytes) {
    (void)bytes;
    GATED(unmap(address));
}

static enum result set_access(uint64_t address, uint64_t size_bytes, const void *descriptors) {
    int fd;
    uint64_t offset;
    enum result fault = fault_in_call(ACTION_ACCESS);
    if (fault != SUCCESS)
        return fault;
    return descriptors != NULL && view_find(address, size_bytes, &fd, &offset) ? SUCCESS : INVALID_VALUE;
}

EXPORT int cuMemSetAccess(uint64_t address, size_t bytes, const void *descriptors, size_t count) {
    GATED(count == 0 ? INVALID_VALUE : set_access(address, bytes, descriptors));
}

/* Only as much as there is data: device memory is large and mostly empty. */
static bool copy_bytes(int to, uint64_t to_offset, int from, uint64_t from_offset, uint64_t size_bytes) {
    static char buffer[1 << 20];
    const off_t end = (off_t)(from_offset + size_bytes);
    for (off_t at = (off_t)from_offset; at < end;) {
        off_t data = lseek(from, at, SEEK_DATA);
        if (data < 0 || data >= end)
            return data >= 0 || errno == ENXIO;
        size_t part = (uint64_t)(end - data) < sizeof buffer ? (size_t)(end - data) : sizeof buffer;
        ssize_t got = pread(from, buffer, part, data);
        if (got <= 0 || pwrite(to, buffer, (size_t)got, (off_t)to_offset + data - (off_t)from_offset) != got)
            return false;
        at = data + got;
    }
    return true;
}

/* Moves the bytes into a separate file, which keeps them even if this process ends. */
static enum result share(struct allocation *allocation) {
    int fd = new_file(memory_device(allocation->pointer), allocation->size_bytes, &allocation->properties);
    if (fd < 0)
        return OPERATING_SYSTEM;
    if (!copy_bytes(fd, 0, memory_file(allocation->at.base), allocation->at.offset, allocation->size_bytes)) {
        close(fd);
        return OPERATING_SYSTEM;
    }
    allocation->shared = fd;
    return SUCCESS;
}

static enum result export_memory(int *descriptor, uint64_t handle) {
    struct allocation *allocation = vmm_known(handle);
    if (allocation == NULL || allocation->imported || allocation->multicast || (allocation->properties.handle_types & POSIX_DESCRIPTOR) == 0)
        return INVALID_VALUE; /* also what was imported (measured, driver 580) */
    enum result fault = fault_in_call(ACTION_EXPORT);
    if (fault != SUCCESS)
        return fault;
    enum result result = allocation->shared < 0 ? share(allocation) : SUCCESS;
    if (result != SUCCESS)
        return result;
    *descriptor = fcntl(allocation->shared, F_DUPFD_CLOEXEC, 3);
    return *descriptor < 0 ? OPERATING_SYSTEM : SUCCESS;
}

enum result vmm_take_back(void) {
    if (driver_generation() >= DRIVER_FUTURE)
        return SUCCESS; /* the processes keep sharing the file */
    for (struct allocation *each = allocations; each != NULL; each = each->next) {
        if (each->multicast || (is_on_host(each) && !each->imported))
            return NOT_SUPPORTED; /* an assumption, never tried */
        if (each->shared < 0 || each->pointer == 0)
            continue;
        if (!copy_bytes(memory_file(each->at.base), each->at.offset, each->shared, 0, each->size_bytes))
            return UNKNOWN;
        let_go_of_file(each);
    }
    return SUCCESS;
}

void vmm_close_files(void) {
    for (struct allocation *each = allocations; each != NULL; each = each->next) {
        if (each->shared >= 0)
            close(each->shared);
        each->shared = -1;
    }
}

EXPORT int cuMemExportToShareableHandle(void *shareable, uint64_t handle, int type, unsigned long long flags) {
    GATED(shareable == NULL || type != POSIX_DESCRIPTOR || flags != 0 ? INVALID_VALUE
                                                                      : export_memory(shareable, handle));
}

static enum result import_memory(uint64_t *handle, int descriptor) {
    struct exported content;
    struct properties properties;
    enum result fault = fault_in_call(ACTION_IMPORT);
    if (fault != SUCCESS)
        return fault;
    if (!exported_is(descriptor, &content))
        return INVALID_VALUE;
    memcpy(&properties, content.properties, sizeof properties);
    struct allocation allocation = {.imported = true, .size_bytes = content.size_bytes, .references = 1,
                                    .properties = properties, .shared = fcntl(descriptor, F_DUPFD_CLOEXEC, 3)};
    if (allocation.shared < 0)
        return OPERATING_SYSTEM;
    enum result result = vmm_remember(&allocation, handle);
    if (result != SUCCESS)
        close(allocation.shared);
    return result;
}

EXPORT int cuMemImportFromShareableHandle(uint64_t *handle, void *shareable, int type) {
    GATED(handle == NULL || type != POSIX_DESCRIPTOR ? INVALID_VALUE
                                                     : import_memory(handle, (int)(intptr_t)shareable));
}

static enum result retain(uint64_t *handle, uint64_t address) {
    struct allocation *allocation = mapped_at(address);
    if (allocation == NULL)
        return INVALID_VALUE;
    allocation->references++;
    *handle = (uint64_t)(uintptr_t)allocation;
    return SUCCESS;
}

EXPORT int cuMemRetainAllocationHandle(uint64_t *handle, void *address) {
    GATED(handle == NULL ? INVALID_VALUE : retain(handle, (uint64_t)(uintptr_t)address));
}

static enum result tell_properties(struct properties *properties, uint64_t handle) {
    const struct allocation *allocation = vmm_known(handle);
    if (allocation == NULL)
        return INVALID_VALUE;
    *properties = allocation->properties;
    return SUCCESS;
}

EXPORT int cuMemGetAllocationPropertiesFromHandle(struct properties *properties, uint64_t handle) {
    GATED(properties == NULL ? INVALID_VALUE : tell_properties(properties, handle));
}

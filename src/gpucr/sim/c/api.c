/*
 * The part of the driver API that the simulator implements. Every call passes the gate, so it waits while the process
 * is locked or checkpointed.
 */
#include "calls.h"
#include "graph.h"

#include <stdio.h>
#include <string.h>

int cuda_version(void) {
#ifdef GPUCR_SIM_OLD_DRIVER
    return 12040;
#else
    static const int VERSIONS[] = {[DRIVER_580] = 13000, [DRIVER_610] = 13030, [DRIVER_615] = 13040, [DRIVER_FUTURE] = 14000};
    return VERSIONS[driver_generation()];
#endif
}

EXPORT int cuInit(unsigned flags) {
    return flags != 0 ? INVALID_VALUE : (int)library_initialize();
}

EXPORT int cuDriverGetVersion(int *version) {
    if (version == NULL)
        return INVALID_VALUE;
    *version = cuda_version();
    return SUCCESS;
}

/* --- devices ----------------------------------------------------------------------------------------------- */

static enum result device_count(int *count) {
    *count = sim_visible_count;
    return SUCCESS;
}

EXPORT int cuDeviceGetCount(int *count) {
    GATED(count == NULL ? INVALID_VALUE : device_count(count));
}

static enum result device_get(int *device, int ordinal) {
    if (device_at(ordinal) == NULL)
        return INVALID_DEVICE;
    *device = ordinal;
    return SUCCESS;
}

EXPORT int cuDeviceGet(int *device, int ordinal) {
    GATED(device == NULL ? INVALID_VALUE : device_get(device, ordinal));
}

static enum result device_name(char *name, int size, int ordinal) {
    const struct device *device = device_at(ordinal);
    if (device == NULL)
        return INVALID_DEVICE;
    if (name == NULL || size <= 0)
        return INVALID_VALUE;
    gpu_name(device->machine_index, name, (size_t)size);
    return SUCCESS;
}

EXPORT int cuDeviceGetName(char *name, int size, int ordinal) {
    GATED(device_name(name, size, ordinal));
}

static enum result device_uuid(uint8_t *uuid, int ordinal) {
    const struct device *device = device_at(ordinal);
    if (device == NULL)
        return INVALID_DEVICE;
    memcpy(uuid, device->uuid, UUID_BYTES);
    return SUCCESS;
}

EXPORT int cuDeviceGetUuid_v2(uint8_t *uuid, int ordinal) {
    GATED(uuid == NULL ? INVALID_VALUE : device_uuid(uuid, ordinal));
}

EXPORT int cuDeviceGetUuid(uint8_t *uuid, int ordinal) {
    return cuDeviceGetUuid_v2(uuid, ordinal);
}

static enum result device_total(size_t *bytes, int ordinal) {
    const struct device *device = device_at(ordinal);
    if (device == NULL)
        return INVALID_DEVICE;
    *bytes = device->capacity_bytes;
    return SUCCESS;
}

EXPORT int cuDeviceTotalMem_v2(size_t *bytes, int ordinal) {
    GATED(bytes == NULL ? INVALID_VALUE : device_total(bytes, ordinal));
}

static enum result attribute_of(int *value, int attribute, int ordinal) {
    const struct device *device = device_at(ordinal);
    if (device == NULL)
        return INVALID_DEVICE;
    return device_attribute(device, attribute, value);
}

EXPORT int cuDeviceGetAttribute(int *value, int attribute, int ordinal) {
    GATED(value == NULL ? INVALID_VALUE : attribute_of(value, attribute, ordinal));
}

/* --- contexts ---------------------------------------------------------------------------------------------- */

static enum result retain(struct context **context, int ordinal) {
    struct device *device = device_at(ordinal);
    return device == NULL ? INVALID_DEVICE : primary_retain(device, context);
}

EXPORT int cuDevicePrimaryCtxRetain(struct context **context, int ordinal) {
    GATED(context == NULL ? INVALID_VALUE : retain(context, ordinal));
}

static enum result release(int ordinal) {
    struct device *device = device_at(ordinal);
    return device == NULL ? INVALID_DEVICE : primary_release(device);
}

EXPORT int cuDevicePrimaryCtxRelease_v2(int ordinal) {
    GATED(release(ordinal));
}

EXPORT int cuDevicePrimaryCtxRelease(int ordinal) {
    return cuDevicePrimaryCtxRelease_v2(ordinal);
}

static enum result reset(int ordinal) {
    struct device *device = device_at(ordinal);
    return device == NULL ? INVALID_DEVICE : primary_reset(device);
}

EXPORT int cuDevicePrimaryCtxReset_v2(int ordinal) {
    GATED(reset(ordinal));
}

EXPORT int cuDevicePrimaryCtxReset(int ordinal) {
    return cuDevicePrimaryCtxReset_v2(ordinal);
}

static enum result create(struct context **context, int ordinal) {
    struct device *device = device_at(ordinal);
    if (device == NULL)
        return INVALID_DEVICE;
    enum result result = context_create(device, context);
    if (result == SUCCESS)
        current_context = *context;
    return result;
}

EXPORT int cuCtxCreate_v2(struct context **context, unsigned flags, int ordinal) {
    (void)flags;
    GATED(context == NULL ? INVALID_VALUE : create(context, ordinal));
}

EXPORT int cuCtxCreate(struct context **context, unsigned flags, int ordinal) {
    return cuCtxCreate_v2(context, flags, ordinal);
}

static enum result destroy(struct context *context) {
    const struct device *device = context_device(context);
    if (device == NULL || device->primary == context)
        return INVALID_CONTEXT;
    return context_destroy(context);
}

EXPORT int cuCtxDestroy_v2(struct context *context) {
    GATED(destroy(context));
}

EXPORT int cuCtxDestroy(struct context *context) {
    return cuCtxDestroy_v2(context);
}

static enum result set_current(struct context *context) {
    if (context != NULL && context_device(context) == NULL)
        return INVALID_CONTEXT;
    current_context = context;
    return SUCCESS;
}

EXPORT int cuCtxSetCurrent(struct context *context) {
    GATED(set_current(context));
}

static enum result get_current(struct context **context) {
    *context = current_context;
    return SUCCESS;
}

EXPORT int cuCtxGetCurrent(struct context **context) {
    GATED(context == NULL ? INVALID_VALUE : get_current(context));
}

struct device *current_device(void) {
    return current_context == NULL ? NULL : context_device(current_context);
}

static enum result context_ordinal(int *ordinal) {
    const struct device *device = current_device();
    if (device == NULL)
        return INVALID_CONTEXT;
    *ordinal = device_ordinal(device);
    return SUCCESS;
}

EXPORT int cuCtxGetDevice(int *ordinal) {
    GATED(ordinal == NULL ? INVALID_VALUE : context_ordinal(ordinal));
}

static enum result synchronize(void) {
    if (current_device() == NULL)
        return INVALID_CONTEXT;
    if (graph_forbids())
        return STREAM_CAPTURE_UNSUPPORTED;
    streams_wait_all(false);
    return SUCCESS;
}

EXPORT int cuCtxSynchronize(void) {
    GATED(synchronize());
}

/* --- memory ------------------------------------------------------------------------------------------------ */

static enum result allocate(uint64_t *pointer, size_t bytes) {
    struct device *device = current_device();
    return device == NULL ? INVALID_CONTEXT : memory_allocate(device, bytes, pointer);
}

EXPORT int cuMemAlloc_v2(uint64_t *pointer, size_t bytes) {
    GATED(pointer == NULL ? INVALID_VALUE : allocate(pointer, bytes));
}

static enum result allocate_managed(uint64_t *pointer, size_t bytes) {
    struct device *device = current_device();
    return device == NULL ? INVALID_CONTEXT : memory_allocate_managed(device, bytes, pointer);
}

EXPORT int cuMemAllocManaged(uint64_t *pointer, size_t bytes, unsigned flags) {
    (void)flags;
    GATED(pointer == NULL ? INVALID_VALUE : allocate_managed(pointer, bytes));
}

/* Synchronous calls wait for the default stream, which waits for all streams that are not NON_BLOCKING. */
#define IN_ORDER(call)                                  \
    (current_device() == NULL ? INVALID_CONTEXT         \
     : graph_forbids()        ? STREAM_CAPTURE_UNSUPPORTED \
                              : (streams_wait_all(true), (call)))

EXPORT int cuMemFree_v2(uint64_t pointer) {
    GATED(IN_ORDER(memory_free(pointer)));
}

EXPORT int cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t bytes) {
    GATED(IN_ORDER(memory_write(to, from, bytes)));
}

EXPORT int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t bytes) {
    GATED(IN_ORDER(memory_read(to, from, bytes)));
}

EXPORT int cuMemcpyDtoD_v2(uint64_t to, uint64_t from, size_t bytes) {
    GATED(IN_ORDER((peer_note_copy(to, from), memory_copy(to, from, bytes))));
}

EXPORT int cuMemsetD8_v2(uint64_t pointer, unsigned char value, size_t bytes) {
    GATED(IN_ORDER(memory_set(pointer, value, bytes)));
}

static enum result address_range(uint64_t *start, size_t *bytes, uint64_t pointer) {
    struct location at;
    uint64_t size_bytes;
    if (!memory_locate(pointer, &at, &size_bytes))
        return INVALID_VALUE;
    if (start != NULL)
        *start = at.base + at.offset;
    if (bytes != NULL)
        *bytes = size_bytes;
    return SUCCESS;
}

EXPORT int cuMemGetAddressRange_v2(uint64_t *start, size_t *bytes, uint64_t pointer) {
    GATED(address_range(start, bytes, pointer));
}

static enum result get_info(size_t *free_bytes, size_t *total_bytes) {
    const struct device *device = current_device();
    return device == NULL ? INVALID_CONTEXT : memory_info(device, free_bytes, total_bytes);
}

EXPORT int cuMemGetInfo_v2(size_t *free_bytes, size_t *total_bytes) {
    GATED(free_bytes == NULL || total_bytes == NULL ? INVALID_VALUE : get_info(free_bytes, total_bytes));
}

/* --- modules, kernels, streams ----------------------------------------------------------------------------- */

EXPORT int cuModuleLoadData(void **module, const void *image) {
    GATED(module == NULL ? INVALID_VALUE : current_device() == NULL ? INVALID_CONTEXT : module_load(image, module));
}

EXPORT int cuModuleGetFunction(void **function, void *module, const char *name) {
    GATED(function == NULL ? INVALID_VALUE : module_function(module, name, function));
}

EXPORT int cuLaunchKernel(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                          unsigned block_y, unsigned block_z, unsigned shared_bytes, struct stream *stream,
                          void **parameters, void **extra) {
    (void)shared_bytes;
    (void)extra;
    uint64_t threads = (uint64_t)grid_x * grid_y * grid_z * block_x * block_y * block_z;
    GATED(current_device() == NULL      ? INVALID_CONTEXT
          : graph_captures(stream) ? graph_take(function, threads, parameters)
                                        : launch(function, threads, stream, parameters));
}

EXPORT int cuStreamCreate(struct stream **stream, unsigned flags) {
    GATED(stream == NULL ? INVALID_VALUE : current_device() == NULL ? INVALID_CONTEXT : stream_create(flags, current_device(), stream));
}

EXPORT int cuStreamDestroy_v2(struct stream *stream) {
    GATED(stream_destroy(stream));
}

EXPORT int cuStreamDestroy(struct stream *stream) {
    return cuStreamDestroy_v2(stream);
}

EXPORT int cuStreamSynchronize(struct stream *stream) {
    GATED(stream_wait(stream));
}

EXPORT int cuStreamQuery(struct stream *stream) {
    GATED(stream_query(stream));
}

#ifndef GPUCR_SIM_OLD_DRIVER
static enum result stream_ordinal(const struct stream *stream, int *ordinal) {
    const struct device *device = stream_device(stream);
    if (device == NULL)
        return INVALID_HANDLE;
    *ordinal = device_ordinal(device);
    return SUCCESS;
}

EXPORT int cuStreamGetDevice(struct stream *stream, int *ordinal) {
    GATED(ordinal == NULL ? INVALID_VALUE : stream_ordinal(stream, ordinal));
}
#endif

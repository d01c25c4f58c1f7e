/*
 * Multicast objects: memory of several GPUs that is written at once (NVLink SHARP). Here they can be made and bound,
 * and their existence prevents a checkpoint: an assumption, never tried.
 */
#include "vmm.h"

struct multicast_properties { /* CUmulticastObjectProp */
    unsigned device_count;
    size_t size_bytes;
    unsigned long long handle_types, flags;
};

static enum result create(uint64_t *handle, const struct multicast_properties *properties) {
    const struct allocation made = {.size_bytes = properties->size_bytes, .multicast = true, .shared = -1, .references = 1};
    if (properties->device_count == 0 || properties->size_bytes == 0 || properties->size_bytes % VMM_GRANULARITY_BYTES != 0)
        return INVALID_VALUE;
    return vmm_remember(&made, handle);
}

EXPORT int cuMulticastCreate(uint64_t *handle, const struct multicast_properties *properties) {
    GATED(handle == NULL || properties == NULL ? INVALID_VALUE : create(handle, properties));
}

static bool is_multicast(uint64_t handle) {
    const struct allocation *known = vmm_known(handle);
    return known != NULL && known->multicast;
}

EXPORT int cuMulticastAddDevice(uint64_t handle, int device) {
    GATED(!is_multicast(handle)         ? INVALID_VALUE
          : device_at(device) == NULL ? INVALID_DEVICE
                                        : SUCCESS);
}

static enum result bind(uint64_t handle, const struct allocation *memory, size_t bytes) {
    bool well = is_multicast(handle) && memory != NULL && !memory->multicast && bytes > 0 && bytes <= memory->size_bytes;
    return well ? SUCCESS : INVALID_VALUE;
}

EXPORT int cuMulticastBindMem(uint64_t handle, size_t multicast_offset, uint64_t memory, size_t offset, size_t bytes,
                              unsigned long long flags) {
    (void)multicast_offset, (void)offset, (void)flags;
    GATED(bind(handle, vmm_known(memory), bytes));
}

EXPORT int cuMulticastBindAddr(uint64_t handle, size_t multicast_offset, uint64_t address, size_t bytes,
                               unsigned long long flags) {
    (void)multicast_offset, (void)flags;
    GATED(bind(handle, vmm_at(address), bytes));
}

EXPORT int cuMulticastUnbind(uint64_t handle, int device, size_t offset, size_t bytes) {
    (void)offset, (void)bytes;
    GATED(!is_multicast(handle)         ? INVALID_VALUE
          : device_at(device) == NULL ? INVALID_DEVICE
                                        : SUCCESS);
}

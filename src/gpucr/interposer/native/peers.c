/*
 * Peer access: the driver grants it for its own memory; VMM memory needs an access right per device. All rights are
 * restored when memory comes back.
 */
#include "replaced.h"

static unsigned enabled[MAX_DEVICES][MAX_DEVICES]; /* [owner][accessor]: how many contexts have it */

static result device_of_context(context wanted, int *device) {
    context current = NULL;
    real.cuCtxGetCurrent(&current);
    result result = real.cuCtxSetCurrent(wanted);
    if (result == SUCCESS)
        result = real.cuCtxGetDevice(device);
    real.cuCtxSetCurrent(current);
    if (result == SUCCESS && (*device < 0 || *device >= MAX_DEVICES))
        result = NOT_SUPPORTED;
    return result;
}

unsigned peers_access(int owner, struct access access[MAX_DEVICES]) {
    unsigned count = 0;
    access[count++] = (struct access){ON_DEVICE, owner, READ_WRITE};
    for (int accessor = 0; owner >= 0 && owner < MAX_DEVICES && accessor < MAX_DEVICES; accessor++)
        if (enabled[owner][accessor] > 0 && accessor != owner)
            access[count++] = (struct access){ON_DEVICE, accessor, READ_WRITE};
    return count;
}

static result allow(int owner, int accessor, int rights) {
    const struct access access = {ON_DEVICE, accessor, rights};
    for (size_t i = 0; i < mappings.count; i++) {
        struct mapping *mapping = sorted_at(&mappings, i);
        const struct range *range = range_of(mapping->start);
        if (range == NULL || (range->kind != OWN && range->kind != OPENED) || range->device != owner)
            continue;
        result result = real.cuMemSetAccess(mapping->start, mapping->bytes, &access, 1);
        if (result == SUCCESS && !mapping_set_access(mapping, &access, 1))
            result = OUT_OF_MEMORY;
        if (result != SUCCESS)
            return result;
    }
    return SUCCESS;
}

/* The two devices whose peer access the driver has just enabled or disabled. False: one is unknown. */
static bool devices_of(context peer, int *owner, int *accessor) {
    return real.cuCtxGetDevice(accessor) == SUCCESS && *accessor >= 0 && *accessor < MAX_DEVICES &&
           device_of_context(peer, owner) == SUCCESS;
}

result replaced_cuCtxEnablePeerAccess(context peer, unsigned flags) {
    int owner, accessor;
    table_lock();
    result result = real.cuCtxEnablePeerAccess(peer, flags);
    if (result == SUCCESS && devices_of(peer, &owner, &accessor)) {
        result = enabled[owner][accessor] == 0 ? allow(owner, accessor, READ_WRITE) : SUCCESS;
        if (result == SUCCESS)
            enabled[owner][accessor]++;
        else
            real.cuCtxDisablePeerAccess(peer);
    }
    table_unlock();
    return result;
}

result replaced_cuCtxDisablePeerAccess(context peer) {
    int owner, accessor;
    table_lock();
    result result = real.cuCtxDisablePeerAccess(peer);
    if (result == SUCCESS && devices_of(peer, &owner, &accessor) && enabled[owner][accessor] > 0 &&
        --enabled[owner][accessor] == 0)
        allow(owner, accessor, NO_ACCESS); /* extra rights are harmless if it fails */
    table_unlock();
    return result;
}

/* Pointer attributes: the interposer's memory looks like the driver's own. */
#include "replaced.h"

#include <string.h>

enum attribute { /* CUpointer_attribute */
    CONTEXT = 1,
    SYNC_MEMOPS = 6,
    BUFFER_ID = 7,
    LEGACY_IPC_CAPABLE = 10,
    RANGE_START = 11,
    RANGE_BYTES = 12,
    ALLOWED_HANDLE_TYPES = 14,
    MAPPING_BYTES = 18,
    MAPPING_START = 19,
};
#define NUMBERED ((uint64_t)0x6771 << 48) /* a BUFFER_ID of ours: the driver counts from 1 */

static struct range *backed(address pointer) {
    struct range *range = range_of(pointer);
    return range != NULL && (range->kind == OWN || range->kind == OPENED) && !range->freed ? range : NULL;
}

result replaced_cuMemGetAddressRange_v2(address *start, size_t *bytes, address pointer) {
    table_lock();
    const struct range *range = backed(pointer);
    bool ours = range != NULL;
    if (ours && start != NULL)
        *start = range->start;
    if (ours && bytes != NULL)
        *bytes = range->bytes;
    table_unlock();
    return ours ? SUCCESS : real.cuMemGetAddressRange_v2(start, bytes, pointer);
}

static bool answer_number(uint64_t *data, const struct range *range, int attribute) {
    switch (attribute) {
    case BUFFER_ID:
        *data = NUMBERED + range->number;
        return true;
    case RANGE_START:
    case MAPPING_START:
        *data = range->start;
        return true;
    case RANGE_BYTES:
    case MAPPING_BYTES:
        *data = range->bytes;
        return true;
    case ALLOWED_HANDLE_TYPES: /* as wide as the driver's answer */
        *data = 0;
        return true;
    default:
        return false;
    }
}

static bool answer_flag(void *data, const struct range *range, int attribute) {
    unsigned value;
    if (attribute == SYNC_MEMOPS)
        value = range->synchronous;
    else if (attribute == LEGACY_IPC_CAPABLE)
        value = range->kind == OWN;
    else
        return false;
    memcpy(data, &value, sizeof value);
    return true;
}

/* False: the driver's own answer is the right one. */
static bool answer(void *data, int attribute, address pointer) {
    bool answered = false;
    if (data == NULL)
        return false;
    table_lock();
    const struct range *range = backed(pointer);
    const struct mapping *mapping = range == NULL ? mapping_of(pointer) : NULL;
    if (range != NULL && attribute == CONTEXT) {
        memcpy(data, &range->context, sizeof range->context);
        answered = true;
    } else if (range != NULL) {
        answered = answer_number(data, range, attribute) || answer_flag(data, range, attribute);
    } else if (mapping != NULL && attribute == ALLOWED_HANDLE_TYPES) { /* without what was added here */
        *(uint64_t *)data = (unsigned)block_at(mapping->block)->asked.handle_types;
        answered = true;
    }
    table_unlock();
    return answered;
}

result replaced_cuPointerGetAttribute(void *data, int attribute, address pointer) {
    return answer(data, attribute, pointer) ? SUCCESS : real.cuPointerGetAttribute(data, attribute, pointer);
}

result replaced_cuPointerGetAttributes(unsigned count, int *attributes, void **data, address pointer) {
    result result = real.cuPointerGetAttributes(count, attributes, data, pointer);
    if (result == SUCCESS)
        for (unsigned i = 0; i < count; i++)
            answer(data[i], attributes[i], pointer);
    return result;
}

/*
 * The driver refuses SYNC_MEMOPS for VMM memory. If a program asked for it, after_call waits for each synchronous copy
 * and fill: that is what it promises.
 */
result replaced_cuPointerSetAttribute(const void *value, int attribute, address pointer) {
    result result = real.cuPointerSetAttribute(value, attribute, pointer);
    if (result != NOT_SUPPORTED || attribute != SYNC_MEMOPS || value == NULL)
        return result;
    table_lock();
    struct range *range = backed(pointer);
    if (range != NULL) {
        unsigned wanted;
        memcpy(&wanted, value, sizeof wanted);
        if (wanted != 0 && !range->synchronous)
            atomic_store(&copies_wait, true); /* permanent: such programs use a network card */
        range->synchronous = wanted != 0;
        result = SUCCESS;
    }
    table_unlock();
    return result;
}

/* What the driver tells of a pointer: of memory that the interposer backs the same as of the driver's own. */
#include "replaced.h"

#include <string.h>

enum attribute { /* CUpointer_attribute */
    CONTEXT = 1,
    RANGE_START = 11,
    RANGE_BYTES = 12,
    ALLOWED_HANDLE_TYPES = 14,
};

result replaced_cuMemGetAddressRange_v2(address *start, size_t *bytes, address pointer) {
    table_lock();
    const struct range *range = range_of(pointer);
    bool own = range != NULL && range->kind == OWN && !range->freed;
    if (own && start != NULL)
        *start = range->start;
    if (own && bytes != NULL)
        *bytes = range->bytes;
    table_unlock();
    return own ? SUCCESS : real.cuMemGetAddressRange_v2(start, bytes, pointer);
}

/* False: the driver's own answer is the right one. */
static bool answer(void *data, int attribute, address pointer) {
    bool answered = true;
    table_lock();
    const struct range *range = range_of(pointer);
    if (range == NULL || range->kind != OWN || data == NULL)
        answered = false;
    else if (attribute == CONTEXT)
        memcpy(data, &range->context, sizeof range->context);
    else if (attribute == RANGE_START)
        memcpy(data, &range->start, sizeof range->start);
    else if (attribute == RANGE_BYTES)
        memcpy(data, &range->bytes, sizeof range->bytes);
    else if (attribute == ALLOWED_HANDLE_TYPES)
        memset(data, 0, sizeof(uint64_t));
    else
        answered = false;
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

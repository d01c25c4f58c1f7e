/* Contexts: primary and created ones. Each costs device memory, as the driver's do. */
#include "sim.h"

#include <stdlib.h>

#define CONTEXT_MIB 8 /* GPUCR_SIM_CONTEXT_MIB */

struct context {
    struct device *device;
    uint64_t cost; /* device pointer */
    struct context *next;
};

_Thread_local struct context *current_context;
static struct context *contexts;

enum result context_create(struct device *device, struct context **context) {
    enum result fault = fault_in_call(ACTION_CONTEXT);
    if (fault != SUCCESS)
        return fault;
    struct context *made = calloc(1, sizeof *made);
    if (made == NULL)
        return OUT_OF_MEMORY;
    uint64_t bytes = (environment_number("GPUCR_SIM_CONTEXT_MIB", CONTEXT_MIB) << 20) + 512;
    enum result result = memory_allocate(device, bytes, &made->cost);
    if (result != SUCCESS) {
        free(made);
        return result;
    }
    made->device = device;
    made->next = contexts;
    contexts = made;
    *context = made;
    return SUCCESS;
}

enum result context_destroy(struct context *context) {
    for (struct context **link = &contexts; *link != NULL; link = &(*link)->next) {
        if (*link != context)
            continue;
        *link = context->next;
        enum result result = memory_free(context->cost);
        if (current_context == context)
            current_context = NULL;
        free(context);
        return result;
    }
    return INVALID_CONTEXT;
}

struct device *context_device(const struct context *context) {
    for (const struct context *known = contexts; known != NULL; known = known->next)
        if (known == context)
            return known->device;
    return NULL;
}

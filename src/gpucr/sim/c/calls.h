/* Shared by the files with exported driver calls. */
#ifndef GPUCR_SIM_CALLS_H
#define GPUCR_SIM_CALLS_H

#include "device.h"

/* Every call passes the gate, so that it waits while the process is locked or checkpointed. */
#define GATED(call)                       \
    do {                                  \
        if (!library_usable())            \
            return NOT_INITIALIZED;       \
        gate_enter();                     \
        enum result result_ = (call);     \
        gate_leave();                     \
        return (int)result_;              \
    } while (0)

struct device *current_device(void); /* of the current context; NULL: there is none */

#endif

/* cuCheckpointProcess*: the argument structs as the driver lays them out (64 bytes each, the rest zero). */
#include "sim.h"

#include <string.h>

struct lock_arguments {
    uint32_t timeout_ms;
    uint8_t reserved[60];
};
struct restore_arguments {
    const struct gpu_pair *pairs;
    uint32_t pair_count;
    uint8_t reserved[52];
};
struct plain_arguments {
    uint8_t reserved[64];
};
_Static_assert(sizeof(struct lock_arguments) == 64, "CUcheckpointLockArgs");
_Static_assert(sizeof(struct restore_arguments) == 64, "CUcheckpointRestoreArgs");
_Static_assert(sizeof(struct gpu_pair) == 32, "CUcheckpointGpuPair");

/* "Zero what you do not use": the simulator insists, so that a wrong layout shows. */
static bool all_zero(const uint8_t *bytes, size_t count) {
    for (size_t i = 0; i < count; i++)
        if (bytes[i] != 0)
            return false;
    return true;
}

EXPORT int cuCheckpointProcessGetState(int pid, int *state) {
    return state == NULL ? INVALID_VALUE : (int)control_state(pid, state);
}

EXPORT int cuCheckpointProcessGetRestoreThreadId(int pid, int *tid) {
    return tid == NULL ? INVALID_VALUE : (int)control_restore_tid(pid, tid);
}

EXPORT int cuCheckpointProcessLock(int pid, const struct lock_arguments *arguments) {
    struct request request = {.action = ACTION_LOCK};
    if (arguments != NULL) {
        if (!all_zero(arguments->reserved, sizeof arguments->reserved))
            return INVALID_VALUE;
        request.lock_timeout_ms = arguments->timeout_ms;
    }
    return (int)control_request(pid, &request);
}

static int plain(int pid, enum action action, const struct plain_arguments *arguments) {
    struct request request = {.action = action};
    if (arguments != NULL && !all_zero(arguments->reserved, sizeof arguments->reserved))
        return INVALID_VALUE;
    return (int)control_request(pid, &request);
}

EXPORT int cuCheckpointProcessCheckpoint(int pid, const struct plain_arguments *arguments) {
    return plain(pid, ACTION_CHECKPOINT, arguments);
}

EXPORT int cuCheckpointProcessRestore(int pid, const struct restore_arguments *arguments) {
    struct request request = {.action = ACTION_RESTORE};
    if (arguments != NULL) {
        if (!all_zero(arguments->reserved, sizeof arguments->reserved) || arguments->pair_count > MAX_GPUS ||
            (arguments->pairs == NULL && arguments->pair_count > 0))
            return INVALID_VALUE;
        request.pairs = arguments->pairs;
        request.pair_count = arguments->pair_count;
    }
    return (int)control_request(pid, &request);
}

EXPORT int cuCheckpointProcessUnlock(int pid, const struct plain_arguments *arguments) {
    return plain(pid, ACTION_UNLOCK, arguments);
}

/* Peer access: one GPU reads another one's memory. GPUCR_SIM_PEERS says whether the GPUs of the machine can. */
#include "calls.h"

#include <string.h>

static bool enabled[MAX_GPUS][MAX_GPUS]; /* by ordinal: [from][to] */
static bool used;

bool peer_was_used(void) {
    return used;
}

static bool can_access(int from, int to) {
    return from != to && machine_has_peers();
}

static enum result ask(int *can, int from, int to) {
    if (device_at(from) == NULL || device_at(to) == NULL)
        return INVALID_DEVICE;
    *can = can_access(from, to);
    return SUCCESS;
}

EXPORT int cuDeviceCanAccessPeer(int *can, int from, int to) {
    GATED(can == NULL ? INVALID_VALUE : ask(can, from, to));
}

static enum result change(const struct context *peer, bool enable) {
    const struct device *from = current_device(), *to = context_device(peer);
    if (from == NULL || to == NULL)
        return INVALID_CONTEXT;
    bool *link = &enabled[device_ordinal(from)][device_ordinal(to)];
    if (enable && !can_access(device_ordinal(from), device_ordinal(to)))
        return PEER_ACCESS_UNSUPPORTED;
    if (*link == enable)
        return enable ? PEER_ACCESS_ALREADY_ENABLED : PEER_ACCESS_NOT_ENABLED;
    *link = enable;
    return SUCCESS;
}

EXPORT int cuCtxEnablePeerAccess(struct context *peer, unsigned flags) {
    GATED(flags != 0 ? INVALID_VALUE : change(peer, true));
}

EXPORT int cuCtxDisablePeerAccess(struct context *peer) {
    GATED(change(peer, false));
}

/* Without peer access the driver copies through host memory, which leaves no trace. */
void peer_note_copy(uint64_t to, uint64_t from) {
    const struct device *source = memory_device(from), *target = memory_device(to);
    if (source == NULL || target == NULL || source == target)
        return;
    int one = device_ordinal(source), other = device_ordinal(target);
    if (enabled[one][other] || enabled[other][one])
        used = true;
}

static enum result copy(uint64_t to, struct context *to_context, uint64_t from, struct context *from_context,
                        size_t bytes) {
    if (context_device(to_context) == NULL || context_device(from_context) == NULL)
        return INVALID_CONTEXT;
    streams_wait_all(true);
    peer_note_copy(to, from);
    return memory_copy(to, from, bytes);
}

EXPORT int cuMemcpyPeer(uint64_t to, struct context *to_context, uint64_t from, struct context *from_context,
                        size_t bytes) {
    GATED(copy(to, to_context, from, from_context, bytes));
}

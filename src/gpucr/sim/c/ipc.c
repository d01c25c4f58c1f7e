/* Legacy CUDA IPC: a handle of 64 bytes names memory of one process, and another one opens it. */
#include "calls.h"

#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define IPC_MAGIC 0x6370692d6d697367u

struct ipc_handle { /* CUipcMemHandle */
    uint64_t magic;
    struct location at;
    uint64_t size_bytes;
    char reserved[64 - sizeof(uint64_t) * 2 - sizeof(struct location)];
};
_Static_assert(sizeof(struct ipc_handle) == 64, "CUipcMemHandle");

static enum result get_handle(struct ipc_handle *handle, uint64_t pointer) {
    memset(handle, 0, sizeof *handle);
    if (!memory_locate(pointer, &handle->at, &handle->size_bytes))
        return INVALID_VALUE;
    handle->magic = IPC_MAGIC;
    return SUCCESS;
}

EXPORT int cuIpcGetMemHandle(struct ipc_handle *handle, uint64_t pointer) {
    GATED(handle == NULL ? INVALID_VALUE : get_handle(handle, pointer));
}

static enum result open_handle(uint64_t *pointer, const struct ipc_handle *handle) {
    if (current_device() == NULL)
        return INVALID_CONTEXT;
    if (handle->magic != IPC_MAGIC || handle->at.owner == getpid() || !view_reachable(&handle->at))
        return INVALID_VALUE; /* the driver refuses handles of the same process, too */
    void *reserved = mmap(NULL, handle->size_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (reserved == MAP_FAILED)
        return OUT_OF_MEMORY;
    *pointer = (uint64_t)(uintptr_t)reserved;
    return view_add(*pointer, handle->size_bytes, &handle->at, VIEW_IPC, NULL);
}

EXPORT int cuIpcOpenMemHandle_v2(uint64_t *pointer, struct ipc_handle handle, unsigned flags) {
    (void)flags;
    GATED(pointer == NULL ? INVALID_VALUE : open_handle(pointer, &handle));
}

EXPORT int cuIpcCloseMemHandle(uint64_t pointer) {
    GATED(view_remove(pointer, VIEW_IPC) ? SUCCESS : INVALID_VALUE);
}

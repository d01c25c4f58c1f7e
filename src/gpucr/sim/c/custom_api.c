/*
 * Custom storage, the caller's side: the interfaces of CUDA 13.4, available only through cuGetProcAddress.
 * tests/sim/README.md distinguishes documented behaviour from assumptions.
 */
#include "device.h"
#include "graph.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

struct per_device { /* CUcheckpointCustomStoragePerDeviceData */
    uint64_t pointer;
    size_t size_bytes;
    struct stream *stream;
};

struct info { /* CUcheckpointCustomStorageInfo */
    struct operation *handle;
    struct per_device *devices;
    unsigned device_count;
};

struct checkpoint_arguments {
    struct info **info;
    uint8_t reserved[56];
};
struct restore_arguments {
    const struct gpu_pair *pairs;
    uint32_t pair_count;
    uint32_t padding;
    struct info **info;
    uint8_t reserved[40];
};
_Static_assert(sizeof(struct checkpoint_arguments) == 64, "CUcheckpointCheckpointArgs");
_Static_assert(sizeof(struct restore_arguments) == 64, "CUcheckpointRestoreArgs");

struct operation {
    pid_t pid;
    struct info info;
    struct per_device devices[MAX_GPUS];
    int files[MAX_GPUS];
    struct operation *next;
};
static struct operation *operations;

static bool all_zero(const uint8_t *bytes, size_t count) {
    for (size_t i = 0; i < count; i++)
        if (bytes[i] != 0)
            return false;
    return true;
}

static bool may_trace_others(void) {
    const unsigned sys_ptrace = 19;
    unsigned long long effective = 0;
    char line[256];
    FILE *status = fopen("/proc/self/status", "re");
    while (status != NULL && fgets(line, sizeof line, status) != NULL)
        if (sscanf(line, "CapEff: %llx", &effective) == 1)
            break;
    if (status != NULL)
        fclose(status);
    return effective >> sys_ptrace & 1;
}

static uint32_t retained(void) {
    uint32_t found = 0;
    for (int i = 0; i < sim_visible_count; i++)
        if (sim_devices[i].primary_users > 0)
            found |= 1u << sim_devices[i].machine_index;
    return found;
}

static struct device *device_with(const uint8_t uuid[UUID_BYTES]) {
    for (int i = 0; i < sim_visible_count; i++)
        if (memcmp(sim_devices[i].uuid, uuid, UUID_BYTES) == 0)
            return &sim_devices[i];
    return NULL;
}

static void forget(struct operation *operation) {
    for (struct operation **link = &operations; *link != NULL; link = &(*link)->next)
        if (*link == operation) {
            *link = operation->next;
            break;
        }
    for (unsigned i = 0; i < operation->info.device_count; i++) {
        struct per_device *each = &operation->devices[i];
        view_remove(each->pointer, VIEW_CUSTOM);
        munmap((void *)(uintptr_t)each->pointer, each->size_bytes);
        stream_destroy(each->stream);
        close(operation->files[i]);
    }
    free(operation);
}

/* The target's memory on one GPU, in one piece at an address of ours. */
static enum result show(struct operation *operation, const struct custom_part *part) {
    struct device *device = device_with(part->uuid);
    const struct location nowhere = {0};
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", operation->pid, part->fd);
    if (device == NULL)
        return INVALID_CONTEXT;
    unsigned number = operation->info.device_count;
    struct per_device *shown = &operation->devices[number];
    void *start = mmap(NULL, part->size_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED)
        return OUT_OF_MEMORY;
    *shown = (struct per_device){(uint64_t)(uintptr_t)start, part->size_bytes, NULL};
    operation->files[number] = open(path, O_RDWR | O_CLOEXEC);
    operation->info.device_count++;
    if (operation->files[number] < 0)
        return OPERATING_SYSTEM;
    enum result result = stream_create(1, device, &shown->stream);
    if (result != SUCCESS)
        return result;
    return view_add(shown->pointer, part->size_bytes, &nowhere, VIEW_CUSTOM, &operation->files[number]);
}

static enum result begin(pid_t pid, struct request *request, struct info **info) {
    struct custom_parts parts = {0};
    struct operation *operation = calloc(1, sizeof *operation);
    if (operation == NULL)
        return OUT_OF_MEMORY;
    request->is_custom = true;
    request->retained = retained();
    request->parts = &parts;
    enum result result = control_request(pid, request);
    if (result != SUCCESS) {
        free(operation);
        return result;
    }
    gate_enter();
    operation->pid = pid;
    operation->info.handle = operation;
    operation->info.devices = operation->devices;
    operation->next = operations;
    operations = operation;
    for (uint32_t i = 0; i < parts.count && result == SUCCESS; i++)
        result = show(operation, &parts.list[i]);
    if (result != SUCCESS)
        forget(operation);
    else
        *info = &operation->info;
    gate_leave();
    return result;
}

/* The order of these checks is an assumption. */
static enum result refuse(pid_t pid) {
    if (!library_usable())
        return NOT_INITIALIZED;
    if (pid == getpid())
        return NOT_SUPPORTED;
    return may_trace_others() ? SUCCESS : OPERATING_SYSTEM;
}

EXPORT int cuCheckpointProcessCheckpoint(int pid, const void *arguments);
EXPORT int cuCheckpointProcessRestore(int pid, const void *arguments);
int cuCheckpointProcessCheckpoint_custom(int pid, const struct checkpoint_arguments *arguments);
int cuCheckpointProcessRestore_custom(int pid, const struct restore_arguments *arguments);
int cuCheckpointOperationComplete_custom(struct operation *handle);

int cuCheckpointProcessCheckpoint_custom(int pid, const struct checkpoint_arguments *arguments) {
    struct request request = {.action = ACTION_CHECKPOINT};
    if (arguments == NULL || arguments->info == NULL)
        return cuCheckpointProcessCheckpoint(pid, arguments);
    if (!all_zero(arguments->reserved, sizeof arguments->reserved))
        return INVALID_VALUE;
    enum result result = refuse(pid);
    return result != SUCCESS ? (int)result : (int)begin(pid, &request, arguments->info);
}

int cuCheckpointProcessRestore_custom(int pid, const struct restore_arguments *arguments) {
    struct request request = {.action = ACTION_RESTORE};
    if (arguments == NULL || arguments->info == NULL)
        return cuCheckpointProcessRestore(pid, arguments);
    if (!all_zero(arguments->reserved, sizeof arguments->reserved) || arguments->padding != 0 ||
        arguments->pair_count > MAX_GPUS || (arguments->pairs == NULL && arguments->pair_count > 0))
        return INVALID_VALUE;
    request.pairs = arguments->pairs;
    request.pair_count = arguments->pair_count;
    enum result result = refuse(pid);
    return result != SUCCESS ? (int)result : (int)begin(pid, &request, arguments->info);
}

static struct operation *known(const struct operation *handle) {
    for (struct operation *each = operations; each != NULL; each = each->next)
        if (each == handle)
            return each;
    return NULL;
}

static enum result wait_for_streams(struct operation *operation) {
    for (unsigned i = 0; operation != NULL && i < operation->info.device_count; i++) {
        if (graph_captures(operation->devices[i].stream))
            return STREAM_CAPTURE_UNSUPPORTED;
        stream_wait(operation->devices[i].stream);
    }
    return operation == NULL ? INVALID_VALUE : SUCCESS;
}

int cuCheckpointOperationComplete_custom(struct operation *handle) {
    const struct request request = {.action = ACTION_COMPLETE};
    if (!library_usable())
        return NOT_INITIALIZED;
    gate_enter();
    struct operation *operation = known(handle);
    enum result result = wait_for_streams(operation);
    gate_leave();
    if (result != SUCCESS)
        return result;
    result = control_request(operation->pid, &request);
    if (result == NOT_INITIALIZED) /* nobody listens: it has ended */
        result = OPERATING_SYSTEM;
    if (result != SUCCESS && result != OPERATING_SYSTEM)
        return result; /* the mapping stays, and a retry is possible; without its process it is over */
    gate_enter();
    forget(operation);
    gate_leave();
    return result;
}

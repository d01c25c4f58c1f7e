/* The simulated libnvidia-ml.so.1: the GPUs of the machine, and who holds their memory, for nvidia-ml-py. */
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "machine.h"

#ifdef GPUCR_SIM_OLD_DRIVER
#define DRIVER_TEXT "550.00.00"
#define CUDA_VERSION 12040
#else
#define DRIVER_TEXT DRIVER_TEXTS[driver_generation()]
#define CUDA_VERSION CUDA_VERSIONS[driver_generation()]
static const char *const DRIVER_TEXTS[] = {
    [DRIVER_580] = "580.00.00", [DRIVER_610] = "610.00.00", [DRIVER_615] = "615.00.00", [DRIVER_FUTURE] = "999.00.00"};
static const int CUDA_VERSIONS[] = {[DRIVER_580] = 13000, [DRIVER_610] = 13030, [DRIVER_615] = 13040, [DRIVER_FUTURE] = 14000};
#endif

enum nvml_result {
    SUCCESS = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
    UNKNOWN = 999,
};

struct memory_v1 {
    unsigned long long total, free, used;
};
struct memory_v2 {
    unsigned version;
    unsigned long long total, reserved, free, used;
};
struct process {
    unsigned pid;
    unsigned long long used_bytes;
    unsigned gpu_instance, compute_instance;
};
struct pci {
    char legacy_bus_id[16];
    unsigned domain, bus, device, device_id, subsystem_id;
    char bus_id[32];
};
struct utilization {
    unsigned gpu, memory;
};

#define MEMORY_V2_VERSION (sizeof(struct memory_v2) | 2u << 24)
#define MAX_PROCESSES 1024

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static unsigned users;
static struct machine machine;

/* A device handle is the address of the GPU's record. */
static bool known(const struct gpu *gpu) {
    return users > 0 && gpu >= machine.gpus && gpu < machine.gpus + machine.gpu_count;
}

static unsigned index_of(const struct gpu *gpu) {
    return (unsigned)(gpu - machine.gpus);
}

#define REQUIRE(gpu, out)              \
    do {                               \
        if (users == 0)                \
            return UNINITIALIZED;      \
        if (!known(gpu) || (out) == NULL) \
            return INVALID_ARGUMENT;   \
    } while (0)

static int put_text(char *to, unsigned room, const char *text) {
    if (to == NULL)
        return INVALID_ARGUMENT;
    if (strlen(text) >= room)
        return INSUFFICIENT_SIZE;
    strcpy(to, text);
    return SUCCESS;
}

static void bus_id(unsigned index, char text[32], bool legacy) {
    snprintf(text, 32, legacy ? "%04x:%02x:00.0" : "%08x:%02x:00.0", 0u, index + 1);
}

/* --- library and system ------------------------------------------------------------------------------------ */

EXPORT int nvmlInitWithFlags(unsigned flags) {
    int result = SUCCESS;
    (void)flags;
    pthread_mutex_lock(&mutex);
    if (users == 0 && !machine_from_environment(&machine))
        result = UNKNOWN;
    else
        users++;
    pthread_mutex_unlock(&mutex);
    return result;
}

EXPORT int nvmlInit_v2(void) {
    return nvmlInitWithFlags(0);
}

EXPORT int nvmlShutdown(void) {
    int result = UNINITIALIZED;
    pthread_mutex_lock(&mutex);
    if (users > 0) {
        users--;
        result = SUCCESS;
    }
    pthread_mutex_unlock(&mutex);
    return result;
}

EXPORT const char *nvmlErrorString(int result) {
    switch (result) {
    case SUCCESS:
        return "The operation was successful";
    case UNINITIALIZED:
        return "NVML was not first initialized with nvmlInit()";
    case INVALID_ARGUMENT:
        return "A supplied argument is invalid";
    case NOT_FOUND:
        return "A query to find an object was unsuccessful";
    case INSUFFICIENT_SIZE:
        return "An input argument is not large enough";
    default:
        return "An internal driver error occurred";
    }
}

EXPORT int nvmlSystemGetDriverVersion(char *text, unsigned room) {
    return users == 0 ? UNINITIALIZED : put_text(text, room, DRIVER_TEXT);
}

EXPORT int nvmlSystemGetNVMLVersion(char *text, unsigned room) {
    char version[32];
    snprintf(version, sizeof version, "13.%s", DRIVER_TEXT);
    return users == 0 ? UNINITIALIZED : put_text(text, room, version);
}

EXPORT int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    if (version == NULL)
        return INVALID_ARGUMENT;
    *version = CUDA_VERSION;
    return SUCCESS;
}

/* --- finding a device -------------------------------------------------------------------------------------- */

EXPORT int nvmlDeviceGetCount_v2(unsigned *count) {
    if (users == 0)
        return UNINITIALIZED;
    if (count == NULL)
        return INVALID_ARGUMENT;
    *count = machine.gpu_count;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned index, const struct gpu **handle) {
    if (users == 0)
        return UNINITIALIZED;
    if (index >= machine.gpu_count || handle == NULL)
        return INVALID_ARGUMENT;
    *handle = &machine.gpus[index];
    return SUCCESS;
}

EXPORT int nvmlDeviceGetHandleByUUID(const char *uuid, const struct gpu **handle) {
    char text[41];
    if (users == 0)
        return UNINITIALIZED;
    if (uuid == NULL || handle == NULL)
        return INVALID_ARGUMENT;
    for (unsigned i = 0; i < machine.gpu_count; i++) {
        uuid_text(machine.gpus[i].uuid, text);
        if (strcmp(text, uuid) == 0)
            return nvmlDeviceGetHandleByIndex_v2(i, handle);
    }
    return NOT_FOUND;
}

EXPORT int nvmlDeviceGetHandleByPciBusId_v2(const char *wanted, const struct gpu **handle) {
    char full[32], legacy[32];
    if (users == 0)
        return UNINITIALIZED;
    if (wanted == NULL || handle == NULL)
        return INVALID_ARGUMENT;
    for (unsigned i = 0; i < machine.gpu_count; i++) {
        bus_id(i, full, false);
        bus_id(i, legacy, true);
        if (strcmp(full, wanted) == 0 || strcmp(legacy, wanted) == 0)
            return nvmlDeviceGetHandleByIndex_v2(i, handle);
    }
    return NOT_FOUND;
}

/* --- what a device is -------------------------------------------------------------------------------------- */

EXPORT int nvmlDeviceGetName(const struct gpu *gpu, char *text, unsigned room) {
    char name[64];
    REQUIRE(gpu, text);
    gpu_name(index_of(gpu), name, sizeof name);
    return put_text(text, room, name);
}

EXPORT int nvmlDeviceGetUUID(const struct gpu *gpu, char *text, unsigned room) {
    char uuid[41];
    REQUIRE(gpu, text);
    uuid_text(gpu->uuid, uuid);
    return put_text(text, room, uuid);
}

EXPORT int nvmlDeviceGetIndex(const struct gpu *gpu, unsigned *index) {
    REQUIRE(gpu, index);
    *index = index_of(gpu);
    return SUCCESS;
}

EXPORT int nvmlDeviceGetMinorNumber(const struct gpu *gpu, unsigned *minor) {
    return nvmlDeviceGetIndex(gpu, minor);
}

EXPORT int nvmlDeviceGetPciInfo_v3(const struct gpu *gpu, struct pci *pci) {
    char text[32];
    REQUIRE(gpu, pci);
    memset(pci, 0, sizeof *pci);
    bus_id(index_of(gpu), pci->bus_id, false);
    bus_id(index_of(gpu), text, true);
    memcpy(pci->legacy_bus_id, text, sizeof pci->legacy_bus_id);
    pci->bus = index_of(gpu) + 1;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetCudaComputeCapability(const struct gpu *gpu, int *major, int *minor) {
    REQUIRE(gpu, major);
    REQUIRE(gpu, minor);
    *major = 9;
    *minor = 0;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetPersistenceMode(const struct gpu *gpu, unsigned *enabled) {
    REQUIRE(gpu, enabled);
    *enabled = 1;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetMigMode(const struct gpu *gpu, unsigned *current, unsigned *pending) {
    REQUIRE(gpu, current);
    REQUIRE(gpu, pending);
    *current = *pending = machine_has_mig();
    return SUCCESS;
}

EXPORT int nvmlDeviceGetP2PStatus(const struct gpu *gpu, const struct gpu *other, int capability, int *status) {
    const int ok = 0, not_supported = 5; /* nvmlGpuP2PStatus_t */
    (void)capability;
    REQUIRE(gpu, status);
    REQUIRE(other, status);
    *status = machine_has_peers() && gpu != other ? ok : not_supported;
    return SUCCESS;
}

/* --- how a device is used ---------------------------------------------------------------------------------- */

EXPORT int nvmlDeviceGetMemoryInfo(const struct gpu *gpu, struct memory_v1 *memory) {
    uint64_t used[MAX_GPUS];
    REQUIRE(gpu, memory);
    if (ledger_used(&machine, used) != 0)
        return UNKNOWN;
    memory->total = gpu->capacity_bytes;
    memory->used = used[index_of(gpu)];
    memory->free = memory->total - memory->used;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetMemoryInfo_v2(const struct gpu *gpu, struct memory_v2 *memory) {
    struct memory_v1 plain;
    REQUIRE(gpu, memory);
    if (memory->version != MEMORY_V2_VERSION)
        return INVALID_ARGUMENT;
    int result = nvmlDeviceGetMemoryInfo(gpu, &plain);
    if (result != SUCCESS)
        return result;
    memory->total = plain.total;
    memory->reserved = 0;
    memory->free = plain.free;
    memory->used = plain.used;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetComputeRunningProcesses_v3(const struct gpu *gpu, unsigned *count, struct process *processes) {
    struct holding holdings[MAX_PROCESSES];
    size_t held = 0;
    unsigned found = 0;
    REQUIRE(gpu, count);
    if (ledger_read(&machine, holdings, MAX_PROCESSES, &held) != 0)
        return UNKNOWN;
    for (size_t i = 0; i < held; i++) {
        uint64_t used = holdings[i].bytes[index_of(gpu)];
        if (used == 0 || holdings[i].pid == 0)
            continue;
        if (found < *count && processes != NULL)
            processes[found] = (struct process){(unsigned)holdings[i].pid, used, UINT32_MAX, UINT32_MAX};
        found++;
    }
    bool room = found <= *count && (processes != NULL || found == 0);
    *count = found;
    return room ? SUCCESS : INSUFFICIENT_SIZE;
}

EXPORT int nvmlDeviceGetGraphicsRunningProcesses_v3(const struct gpu *gpu, unsigned *count, struct process *processes) {
    (void)processes;
    REQUIRE(gpu, count);
    *count = 0;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetMPSComputeRunningProcesses_v3(const struct gpu *gpu, unsigned *count,
                                                      struct process *processes) {
    (void)processes;
    REQUIRE(gpu, count);
    *count = 0;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetTemperature(const struct gpu *gpu, int sensor, unsigned *degrees) {
    REQUIRE(gpu, degrees);
    if (sensor != 0) {  // NVML_TEMPERATURE_GPU, the only one
        return INVALID_ARGUMENT;
    }
    *degrees = 40;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetUtilizationRates(const struct gpu *gpu, struct utilization *rates) {
    REQUIRE(gpu, rates);
    *rates = (struct utilization){0, 0};
    return SUCCESS;
}

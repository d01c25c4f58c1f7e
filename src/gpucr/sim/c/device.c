/* cuInit, CUDA_VISIBLE_DEVICES, fork, and primary contexts. */
#include "device.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static pid_t owner_pid; /* 0: not initialised */
static bool forked;

static void add_device(uint32_t machine_index) {
    for (int i = 0; i < sim_device_count; i++)
        if (sim_devices[i].machine_index == machine_index)
            return;
    struct device *device = &sim_devices[sim_device_count++];
    const struct gpu *gpu = &sim_machine.gpus[machine_index];
    memset(device, 0, sizeof *device);
    device->machine_index = machine_index;
    memcpy(device->uuid, gpu->uuid, UUID_BYTES);
    device->capacity_bytes = gpu->capacity_bytes;
}

/* An index, or a unique UUID prefix. -1: neither. */
static int named_gpu(const char *name) {
    char *end, text[41];
    int found = -1;
    if (strncmp(name, "GPU-", 4) != 0) {
        long index = strtol(name, &end, 10);
        return end != name && *end == '\0' && index >= 0 && index < (long)sim_machine.gpu_count ? (int)index : -1;
    }
    for (uint32_t i = 0; i < sim_machine.gpu_count; i++) {
        uuid_text(sim_machine.gpus[i].uuid, text);
        if (strncmp(text, name, strlen(name)) != 0)
            continue;
        if (found >= 0)
            return -1;
        found = (int)i;
    }
    return found;
}

/* Like the driver: the list ends at the first name that matches no GPU. */
static void add_visible(const char *visible) {
    char text[1024];
    snprintf(text, sizeof text, "%s", visible);
    char *rest = text, *name;
    while ((name = strsep(&rest, ",")) != NULL) {
        int index = named_gpu(name + strspn(name, " "));
        if (index < 0)
            return;
        add_device((uint32_t)index);
    }
}

/*
 * A child forked after cuInit cannot use CUDA. It keeps the parent's open devices, as with the driver (measured, 580),
 * but not the simulator's own files, which are the memory itself and would keep it alive.
 */
static void in_child(void) {
    if (owner_pid == 0)
        return;
    forked = true;
    memory_close_files();
    views_close_files();
    vmm_close_files();
#ifndef GPUCR_SIM_OLD_DRIVER
    custom_close_files();
    control_close_in_child();
#endif
}

bool library_usable(void) {
    return !forked && owner_pid == getpid();
}

static void find_devices(void) {
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    sim_device_count = 0;
    if (visible != NULL)
        add_visible(visible);
    sim_visible_count = sim_device_count;
    for (uint32_t i = 0; i < sim_machine.gpu_count; i++)
        add_device(i);
    if (visible == NULL)
        sim_visible_count = sim_device_count;
}

static enum result initialize_once(void) {
    if (forked)
        return NOT_INITIALIZED;
    if (owner_pid != 0)
        return SUCCESS;
    if (!machine_from_environment(&sim_machine))
        return UNKNOWN;
    find_devices();
    if (sim_visible_count == 0)
        return NO_DEVICE;
    enum result result = hardware_open();
#ifndef GPUCR_SIM_OLD_DRIVER
    if (result == SUCCESS)
        result = restore_thread_start();
    if (result == SUCCESS && !watcher_start())
        result = OPERATING_SYSTEM;
#endif
    if (result != SUCCESS) {
        hardware_close();
        return result;
    }
    pthread_atfork(NULL, NULL, in_child);
    owner_pid = getpid();
    return SUCCESS;
}

enum result library_initialize(void) {
    static pthread_mutex_t once = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&once);
    enum result result = initialize_once();
    pthread_mutex_unlock(&once);
    return result;
}

struct device *device_at(int ordinal) {
    return ordinal >= 0 && ordinal < sim_visible_count ? &sim_devices[ordinal] : NULL;
}

int device_ordinal(const struct device *device) {
    return (int)(device - sim_devices);
}

enum result device_attribute(const struct device *device, int attribute, int *value) {
    static const struct {
        int attribute, value;
    } FIXED[] = {
        {1, 1024}, /* MAX_THREADS_PER_BLOCK */
        {10, 32},  /* WARP_SIZE */
        {16, 132}, /* MULTIPROCESSOR_COUNT */
        {34, 0},   /* PCI_DEVICE_ID */
        {41, 1},   /* UNIFIED_ADDRESSING */
        {50, 0},   /* PCI_DOMAIN_ID */
        {75, 9},   /* COMPUTE_CAPABILITY_MAJOR */
        {76, 0},   /* COMPUTE_CAPABILITY_MINOR */
        {83, 1},   /* MANAGED_MEMORY */
        {102, 1},  /* VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED */
        {110, 1},  /* GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED */
    };
    if (attribute == 33) { /* PCI_BUS_ID */
        *value = (int)device->machine_index + 1;
        return SUCCESS;
    }
    for (size_t i = 0; i < sizeof FIXED / sizeof *FIXED; i++)
        if (FIXED[i].attribute == attribute) {
            *value = FIXED[i].value;
            return SUCCESS;
        }
    return INVALID_VALUE;
}

enum result primary_retain(struct device *device, struct context **context) {
    if (device->primary == NULL) {
        enum result result = context_create(device, &device->primary);
        if (result != SUCCESS)
            return result;
    }
    device->primary_users++;
    *context = device->primary;
    return SUCCESS;
}

enum result primary_release(struct device *device) {
    if (device->primary_users == 0)
        return INVALID_CONTEXT;
    if (--device->primary_users > 0)
        return SUCCESS;
    return primary_reset(device);
}

/* Existing handles are invalid until it is retained again. */
enum result primary_reset(struct device *device) {
    if (device->primary == NULL)
        return SUCCESS;
    struct context *context = device->primary;
    device->primary = NULL;
    return context_destroy(context);
}

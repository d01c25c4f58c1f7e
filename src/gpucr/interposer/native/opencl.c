/*
 * OpenCL has contexts of its own beside CUDA's, which the driver's checkpoint does not reach. Whether one was ever made on an
 * NVIDIA GPU is counted; who only looks for devices makes none. Names and numbers are those of CL/cl.h.
 */
#include "interposer.h"

#include <dlfcn.h>
#include <string.h>

#define DEVICES 0x1081     /* CL_CONTEXT_DEVICES */
#define VENDOR_ID 0x1001   /* CL_DEVICE_VENDOR_ID */
#define NVIDIA 0x10de      /* the PCI vendor */
#define NOT_FOUND_HERE -1001 /* CL_PLATFORM_NOT_FOUND_KHR, as without a platform */

typedef void notify(const char *, const void *, size_t, void *);
typedef void *create(const intptr_t *, uint32_t, void *const *, notify *, void *, int32_t *);
typedef void *create_from_type(const intptr_t *, uint64_t, notify *, void *, int32_t *);
typedef int32_t get_info(void *, uint32_t, size_t, void *, size_t *);

extern void *(*real_dlsym)(void *, const char *);
static void *_Atomic from; /* where the program looked them up; NULL: it is linked with them */

static void *theirs(const char *name) {
    symbols_find_libc();
    void *handle = atomic_load(&from);
    void *found = handle != NULL ? real_dlsym(handle, name) : NULL;
    return found != NULL ? found : real_dlsym(RTLD_NEXT, name);
}

static bool is_on_nvidia(void *context) {
    get_info *context_info = (get_info *)theirs("clGetContextInfo"), *device_info = (get_info *)theirs("clGetDeviceInfo");
    void *devices[MAX_DEVICES];
    size_t bytes = 0;
    uint32_t vendor = 0;
    if (context_info == NULL || device_info == NULL || context_info(context, DEVICES, sizeof devices, devices, &bytes) != 0)
        return true; /* on the safe side */
    for (size_t i = 0; i < bytes / sizeof *devices; i++)
        if (device_info(devices[i], VENDOR_ID, sizeof vendor, &vendor, NULL) != 0 || vendor == NVIDIA)
            return true;
    return false;
}

static void *counted(void *context) {
    if (context != NULL && is_on_nvidia(context))
        atomic_fetch_add(&counters[OPENCL], 1);
    return context;
}

static void *without(int32_t *error) {
    if (error != NULL)
        *error = NOT_FOUND_HERE;
    return NULL;
}

#define EXPORT __attribute__((visibility("default")))

EXPORT void *clCreateContext(const intptr_t *properties, uint32_t count, void *const *devices, notify *notify, void *data,
                             int32_t *error) {
    create *real = (create *)theirs("clCreateContext");
    return real == NULL ? without(error) : counted(real(properties, count, devices, notify, data, error));
}

EXPORT void *clCreateContextFromType(const intptr_t *properties, uint64_t type, notify *notify, void *data, int32_t *error) {
    create_from_type *real = (create_from_type *)theirs("clCreateContextFromType");
    return real == NULL ? without(error) : counted(real(properties, type, notify, data, error));
}

/* NULL: it is not one of these, or not there. */
void *opencl_dlsym(void *handle, const char *name) {
    symbols_find_libc(); /* the caller continues with it */
    bool by_type = strcmp(name, "clCreateContextFromType") == 0;
    if ((!by_type && strcmp(name, "clCreateContext") != 0) || handle == RTLD_NEXT || handle == RTLD_DEFAULT)
        return NULL;
    if (real_dlsym(handle, name) == NULL)
        return NULL;
    atomic_store(&from, handle);
    return by_type ? (void *)clCreateContextFromType : (void *)clCreateContext;
}

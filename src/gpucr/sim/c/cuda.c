/* Binding of libcuda.so.1 at run time. */
#include "cuda.h"

#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

static void bind(void *library, const char *name, void *slot) {
    void *function = dlsym(library, name);
    if (function == NULL) {
        fprintf(stderr, "%s: this libcuda.so.1 has no %s\n", program_invocation_short_name, name);
        exit(EXIT_FAILURE);
    }
    *(void **)slot = function; /* POSIX: a function pointer can be read from the object pointer of dlsym */
}

void cuda_bind(struct cuda *cuda) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        fprintf(stderr, "%s: %s\n", program_invocation_short_name, dlerror());
        exit(EXIT_FAILURE);
    }
    bind(library, "cuInit", &cuda->init);
    bind(library, "cuDriverGetVersion", &cuda->driver_version);
    bind(library, "cuDeviceGetCount", &cuda->device_count);
    bind(library, "cuDeviceGet", &cuda->device_get);
    bind(library, "cuDeviceGetName", &cuda->device_name);
    bind(library, "cuDevicePrimaryCtxRetain", &cuda->primary_retain);
    bind(library, "cuCtxSetCurrent", &cuda->set_current);
    bind(library, "cuMemAlloc_v2", &cuda->allocate);
    bind(library, "cuMemAllocManaged", &cuda->allocate_managed);
    bind(library, "cuMemcpyHtoD_v2", &cuda->to_device);
    bind(library, "cuMemcpyDtoH_v2", &cuda->to_host);
    bind(library, "cuModuleLoadData", &cuda->load_module);
    bind(library, "cuModuleGetFunction", &cuda->get_function);
    bind(library, "cuLaunchKernel", &cuda->launch);
    bind(library, "cuStreamCreate", &cuda->stream_create);
    bind(library, "cuStreamSynchronize", &cuda->stream_synchronize);
    bind(library, "cuGetErrorString", &cuda->error_text);
}

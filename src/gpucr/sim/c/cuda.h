/* The part of the CUDA driver API that the counter uses, bound at run time: no toolkit is needed to build it. */
#ifndef GPUCR_SIM_CUDA_H
#define GPUCR_SIM_CUDA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define STREAM_NON_BLOCKING 1u
#define MANAGED_GLOBAL 1u

typedef uint64_t device_pointer;

struct cuda {
    int (*init)(unsigned flags);
    int (*driver_version)(int *version);
    int (*device_count)(int *count);
    int (*device_get)(int *device, int ordinal);
    int (*device_name)(char *name, int size, int device);
    int (*primary_retain)(void **context, int device);
    int (*set_current)(void *context);
    int (*allocate)(device_pointer *pointer, size_t bytes);
    int (*allocate_managed)(device_pointer *pointer, size_t bytes, unsigned flags);
    int (*to_device)(device_pointer to, const void *from, size_t bytes);
    int (*to_host)(void *to, device_pointer from, size_t bytes);
    int (*load_module)(void **module, const void *image);
    int (*get_function)(void **function, void *module, const char *name);
    int (*launch)(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                  unsigned shared_bytes, void *stream, void **parameters, void **extra);
    int (*stream_create)(void **stream, unsigned flags);
    int (*stream_synchronize)(void *stream);
    int (*error_text)(int result, const char **text);
};

/* Loads libcuda.so.1 and binds all of the above; ends the program with a message if that fails. */
void cuda_bind(struct cuda *cuda);

#endif

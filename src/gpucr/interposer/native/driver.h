/* The part of the CUDA driver API that the interposer calls and replaces. No toolkit is needed to build it. */
#ifndef GPUCR_INTERPOSER_DRIVER_H
#define GPUCR_INTERPOSER_DRIVER_H

#include <stddef.h>
#include <stdint.h>

typedef int result; /* CUresult */
enum {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    INVALID_CONTEXT = 201,
    OPERATING_SYSTEM = 304,
    NOT_FOUND = 500,
    NOT_SUPPORTED = 801,
};

typedef uint64_t address; /* CUdeviceptr */
typedef uint64_t handle;  /* CUmemGenericAllocationHandle */
typedef void *context;
typedef void *stream;

enum { PINNED = 1, ON_DEVICE = 1, ON_HOST_NODE = 3, POSIX_DESCRIPTOR = 1, NO_ACCESS = 0, READ_WRITE = 3 };

struct properties { /* CUmemAllocationProp */
    int type, handle_types, location_type, location;
    void *win32;
    uint8_t compression, direct_rdma;
    uint8_t flags[6];
};
_Static_assert(sizeof(struct properties) == 32, "CUmemAllocationProp");

struct access { /* CUmemAccessDesc */
    int location_type, location, flags;
};
_Static_assert(sizeof(struct access) == 12, "CUmemAccessDesc");

struct ipc_handle { /* CUipcMemHandle */
    char bytes[64];
};

/* X(name, parameters): what is called. Those of OPTIONAL may be missing in a driver. */
#define NEEDED(X)                                                                           \
    X(cuInit, (unsigned))                                                                   \
    X(cuMemAlloc_v2, (address *, size_t))                                                   \
    X(cuMemFree_v2, (address))                                                              \
    X(cuMemCreate, (handle *, size_t, const struct properties *, unsigned long long))       \
    X(cuMemRelease, (handle))                                                               \
    X(cuMemAddressReserve, (address *, size_t, size_t, address, unsigned long long))        \
    X(cuMemAddressFree, (address, size_t))                                                  \
    X(cuMemMap, (address, size_t, size_t, handle, unsigned long long))                      \
    X(cuMemUnmap, (address, size_t))                                                        \
    X(cuMemSetAccess, (address, size_t, const struct access *, size_t))                     \
    X(cuMemExportToShareableHandle, (void *, handle, int, unsigned long long))              \
    X(cuMemImportFromShareableHandle, (handle *, void *, int))                              \
    X(cuCtxGetCurrent, (context *))                                                         \
    X(cuCtxSetCurrent, (context))                                                           \
    X(cuCtxGetDevice, (int *))                                                              \
    X(cuCtxSynchronize, (void))                                                             \
    X(cuMemcpyDtoD_v2, (address, address, size_t))                                          \
    X(cuMemcpyHtoD_v2, (address, const void *, size_t))

#define OPTIONAL(X)                                                                         \
    X(cuMemAllocManaged, (address *, size_t, unsigned))                                     \
    X(cuMemAllocPitch_v2, (address *, size_t *, size_t, size_t, unsigned))                  \
    X(cuMemGetAddressRange_v2, (address *, size_t *, address))                              \
    X(cuMemRetainAllocationHandle, (handle *, void *))                                      \
    X(cuMemGetAllocationPropertiesFromHandle, (struct properties *, handle))                \
    X(cuMulticastCreate, (handle *, const void *))                                          \
    X(cuMulticastAddDevice, (handle, int))                                                  \
    X(cuMulticastBindMem, (handle, size_t, handle, size_t, size_t, unsigned long long))     \
    X(cuMulticastBindAddr, (handle, size_t, address, size_t, unsigned long long))           \
    X(cuMulticastUnbind, (handle, int, size_t, size_t))                                     \
    X(cuMemGetHandleForAddressRange, (void *, address, size_t, int, unsigned long long))    \
    X(cuMemFreeAsync, (address, stream))                                                    \
    X(cuMemFreeAsync_ptsz, (address, stream))                                               \
    X(cuStreamSynchronize, (stream))                                                        \
    X(cuStreamSynchronize_ptsz, (stream))                                                   \
    X(cuIpcGetMemHandle, (struct ipc_handle *, address))                                    \
    X(cuIpcOpenMemHandle, (address *, struct ipc_handle, unsigned))                         \
    X(cuIpcOpenMemHandle_v2, (address *, struct ipc_handle, unsigned))                      \
    X(cuIpcCloseMemHandle, (address))                                                       \
    X(cuPointerSetAttribute, (const void *, int, address))                                  \
    X(cuDeviceGetAttribute, (int *, int, int))                                              \
    X(cuMemMapArrayAsync, (void *, unsigned, stream))                                       \
    X(cuMemMapArrayAsync_ptsz, (void *, unsigned, stream))                                  \
    X(cuPointerGetAttribute, (void *, int, address))                                        \
    X(cuPointerGetAttributes, (unsigned, int *, void **, address))                          \
    X(cuCtxEnablePeerAccess, (context, unsigned))                                           \
    X(cuCtxDisablePeerAccess, (context))                                                    \
    X(cuStreamIsCapturing, (stream, int *))                                                 \
    X(cuDevicePrimaryCtxGetState, (int, unsigned *, int *))                                 \
    X(cuDeviceGetUuid, (void *, int))                                                       \
    X(cuGetProcAddress, (const char *, void **, int, uint64_t))                             \
    X(cuGetProcAddress_v2, (const char *, void **, int, uint64_t, int *))

struct driver {
#define MEMBER(name, parameters) result(*name) parameters;
    NEEDED(MEMBER) OPTIONAL(MEMBER)
#undef MEMBER
};
extern struct driver real; /* the functions of libcuda itself, past the gate; symbols.c fills it */

#endif

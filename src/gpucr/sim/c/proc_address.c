/*
 * cuGetProcAddress: the driver's own look-up, by a base name and the CUDA version whose interface the caller expects.
 * cuda-bindings and libcudart ask it for everything. An unknown name, or one requested with too old a version, is no
 * error: the result is NULL with a reason.
 */
#include "device.h"

#include <string.h>

/*
 * X: a base name, the CUDA version that introduced this interface of it, and the suffix of the exported function.
 * ABSENT: from this version on the driver has a new interface that the simulator lacks. Of a name's lines, the last one
 * not newer than the request counts.
 */
#define INTERFACES(X, ABSENT)                  \
    X(cuInit, 2000, )                          \
    X(cuDriverGetVersion, 2020, )              \
    X(cuGetErrorString, 6000, )                \
    X(cuGetErrorName, 6000, )                  \
    X(cuDeviceGet, 2000, )                     \
    X(cuDeviceGetCount, 2000, )                \
    X(cuDeviceGetName, 2000, )                 \
    X(cuDeviceGetUuid, 9020, )                 \
    X(cuDeviceGetUuid, 11040, _v2)             \
    X(cuDeviceTotalMem, 3020, _v2)             \
    X(cuDeviceGetAttribute, 2000, )            \
    X(cuDeviceCanAccessPeer, 4000, )           \
    X(cuDevicePrimaryCtxRetain, 7000, )        \
    X(cuDevicePrimaryCtxRelease, 7000, )       \
    X(cuDevicePrimaryCtxRelease, 11000, _v2)   \
    X(cuDevicePrimaryCtxReset, 7000, )         \
    X(cuDevicePrimaryCtxReset, 11000, _v2)     \
    X(cuCtxCreate, 2000, )                     \
    X(cuCtxCreate, 3020, _v2)                  \
    ABSENT(cuCtxCreate, 11040)                 \
    X(cuCtxDestroy, 2000, )                    \
    X(cuCtxDestroy, 4000, _v2)                 \
    X(cuCtxSetCurrent, 4000, )                 \
    X(cuCtxGetCurrent, 4000, )                 \
    X(cuCtxGetDevice, 2000, )                  \
    ABSENT(cuCtxGetDevice, 13000)              \
    X(cuCtxSynchronize, 2000, )                \
    ABSENT(cuCtxSynchronize, 13000)            \
    X(cuCtxEnablePeerAccess, 4000, )           \
    X(cuCtxDisablePeerAccess, 4000, )          \
    X(cuMemAlloc, 3020, _v2)                   \
    X(cuMemAllocManaged, 6000, )               \
    X(cuMemFree, 3020, _v2)                    \
    X(cuMemGetInfo, 3020, _v2)                 \
    X(cuMemGetAddressRange, 3020, _v2)         \
    X(cuMemcpyHtoD, 3020, _v2)                 \
    X(cuMemcpyDtoH, 3020, _v2)                 \
    X(cuMemcpyDtoD, 3020, _v2)                 \
    X(cuMemcpyHtoDAsync, 3020, _v2)            \
    X(cuMemcpyDtoHAsync, 3020, _v2)            \
    X(cuMemcpyPeer, 4000, )                    \
    X(cuMemsetD8, 3020, _v2)                   \
    X(cuMemsetD8Async, 3020, )                 \
    X(cuMemHostAlloc, 2020, )                  \
    X(cuMemFreeHost, 2000, )                   \
    X(cuMemHostRegister, 6050, _v2)            \
    X(cuMemHostUnregister, 4000, )             \
    X(cuMemHostGetDevicePointer, 3020, _v2)    \
    X(cuIpcGetMemHandle, 4010, )               \
    X(cuIpcOpenMemHandle, 11000, _v2)          \
    X(cuIpcCloseMemHandle, 4010, )             \
    X(cuMemGetAllocationGranularity, 10020, )  \
    X(cuMemCreate, 10020, )                    \
    X(cuMemRelease, 10020, )                   \
    X(cuMemAddressReserve, 10020, )            \
    X(cuMemAddressFree, 10020, )               \
    X(cuMemMap, 10020, )                       \
    X(cuMemUnmap, 10020, )                     \
    X(cuMemSetAccess, 10020, )                 \
    X(cuMemExportToShareableHandle, 10020, )   \
    X(cuMemImportFromShareableHandle, 10020, ) \
    X(cuMemRetainAllocationHandle, 11000, )    \
    X(cuMemGetAllocationPropertiesFromHandle, 10020, ) \
    X(cuMemAllocAsync, 11020, )                \
    X(cuMemFreeAsync, 11020, )                 \
    X(cuMemGetHandleForAddressRange, 11070, )  \
    X(cuMulticastCreate, 12010, )              \
    X(cuMulticastAddDevice, 12010, )           \
    X(cuMulticastBindMem, 12010, )             \
    X(cuMulticastBindAddr, 12010, )            \
    X(cuMulticastUnbind, 12010, )              \
    X(cuPointerGetAttribute, 4000, )           \
    X(cuPointerGetAttributes, 7000, )          \
    X(cuPointerSetAttribute, 6000, )           \
    X(cuModuleLoadData, 2000, )                \
    X(cuModuleGetFunction, 2000, )             \
    X(cuLaunchKernel, 4000, )                  \
    X(cuEventCreate, 2000, )                   \
    X(cuEventRecord, 2000, )                   \
    X(cuEventQuery, 2000, )                    \
    X(cuEventSynchronize, 2000, )              \
    X(cuEventDestroy, 2000, )                  \
    X(cuEventDestroy, 4000, _v2)               \
    X(cuIpcGetEventHandle, 4010, )             \
    X(cuIpcOpenEventHandle, 4010, )            \
    X(cuStreamCreate, 2000, )                  \
    X(cuStreamDestroy, 2000, )                 \
    X(cuStreamDestroy, 4000, _v2)              \
    X(cuStreamSynchronize, 2000, )             \
    X(cuStreamQuery, 2000, )                   \
    X(cuStreamBeginCapture, 10010, _v2)        \
    X(cuStreamEndCapture, 10000, )             \
    X(cuStreamIsCapturing, 10000, )            \
    X(cuGraphInstantiateWithFlags, 11040, )    \
    X(cuGraphLaunch, 10000, )                  \
    X(cuGraphExecDestroy, 10000, )             \
    X(cuGraphDestroy, 10000, )

#ifdef GPUCR_SIM_OLD_DRIVER
#define CHECKPOINT_INTERFACES(X)
#else
#define CHECKPOINT_INTERFACES(X)                      \
    X(cuCheckpointProcessGetState, 12080, )           \
    X(cuCheckpointProcessGetRestoreThreadId, 12080, ) \
    X(cuCheckpointProcessLock, 12080, )               \
    X(cuCheckpointProcessCheckpoint, 12080, )         \
    X(cuCheckpointProcessRestore, 12080, )            \
    X(cuCheckpointProcessUnlock, 12080, )             \
    X(cuStreamGetDevice, 12080, )
#endif
#ifdef GPUCR_SIM_OLD_DRIVER
#define CUSTOM_INTERFACES(X)
#else
#define CUSTOM_INTERFACES(X)                               \
    X(cuCheckpointProcessCheckpoint, 13040, _custom)       \
    X(cuCheckpointProcessRestore, 13040, _custom)          \
    X(cuCheckpointOperationComplete, 13040, _custom)
#endif

/* Only their addresses are used here, so the parameters do not matter. */
#define DECLARED(name, since, suffix) extern int name##suffix(void);
#define NOTHING(name, since)
INTERFACES(DECLARED, NOTHING)
CHECKPOINT_INTERFACES(DECLARED)
CUSTOM_INTERFACES(DECLARED)
EXPORT int cuGetProcAddress(const char *name, void **function, int version, uint64_t flags);
EXPORT int cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status);

typedef void (*any_function)(void);

#define PRESENT_LINE(name, since, suffix) {#name, since, (any_function)name##suffix},
#define ABSENT_LINE(name, since) {#name, since, NULL},

static const struct interface {
    const char *name;
    int since;
    any_function function; /* NULL: absent */
} INTERFACE_LIST[] = {
    INTERFACES(PRESENT_LINE, ABSENT_LINE)
    CHECKPOINT_INTERFACES(PRESENT_LINE)
    CUSTOM_INTERFACES(PRESENT_LINE)
    PRESENT_LINE(cuGetProcAddress, 11030, )
    PRESENT_LINE(cuGetProcAddress, 12000, _v2)
};

enum status { FOUND = 0, SYMBOL_NOT_FOUND = 1, VERSION_NOT_SUFFICIENT = 2 }; /* CUdriverProcAddressQueryResult */

#define ALL_FLAGS 3u /* LEGACY_STREAM, PER_THREAD_DEFAULT_STREAM: here the two streams are the same */

static enum status find(const char *name, int version, any_function *function) {
    enum status status = SYMBOL_NOT_FOUND;
    *function = NULL;
    for (size_t i = 0; i < sizeof INTERFACE_LIST / sizeof *INTERFACE_LIST; i++) {
        const struct interface *each = &INTERFACE_LIST[i];
        if (strcmp(each->name, name) != 0)
            continue;
        if (each->since > version) /* the lines of a name ascend */
            return status == FOUND ? FOUND : VERSION_NOT_SUFFICIENT;
        *function = each->function;
        status = each->function == NULL ? SYMBOL_NOT_FOUND : FOUND;
    }
    return status;
}

EXPORT int cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status) {
    if (name == NULL || function == NULL || version > cuda_version() || (flags & ~(uint64_t)ALL_FLAGS) != 0)
        return INVALID_VALUE;
    enum status found = find(name, version, (any_function *)function);
    if (status != NULL)
        *status = (int)found;
    return SUCCESS;
}

/* That of CUDA 11: no status, and an error if there is nothing. */
EXPORT int cuGetProcAddress(const char *name, void **function, int version, uint64_t flags) {
    int status = SYMBOL_NOT_FOUND;
    int result = cuGetProcAddress_v2(name, function, version, flags, &status);
    return result == SUCCESS && status != FOUND ? NOT_FOUND : result;
}

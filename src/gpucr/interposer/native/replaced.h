/* The functions that replace the driver's. REPLACED(base name, exported name, by base name too) */
#ifndef GPUCR_INTERPOSER_REPLACED_H
#define GPUCR_INTERPOSER_REPLACED_H

#include "interposer.h"

/*
 * cuGetProcAddress looks up a function by its base name. If the address that it returns is not the exported function's,
 * the base name decides; BY_ADDRESS: only the address does, because newer drivers have another function of that name.
 */
#define REPLACEMENTS(X)                                             \
    X(cuMemAlloc, cuMemAlloc_v2)                                    \
    X(cuMemAllocPitch, cuMemAllocPitch_v2)                          \
    X(cuMemAllocManaged, cuMemAllocManaged)                         \
    X(cuMemFree, cuMemFree_v2)                                      \
    X(cuMemGetAddressRange, cuMemGetAddressRange_v2)                \
    X(cuMemCreate, cuMemCreate)                                     \
    X(cuMemRelease, cuMemRelease)                                   \
    X(cuMemMap, cuMemMap)                                           \
    X(cuMemUnmap, cuMemUnmap)                                       \
    X(cuMemSetAccess, cuMemSetAccess)                               \
    X(cuMemExportToShareableHandle, cuMemExportToShareableHandle)   \
    X(cuMemImportFromShareableHandle, cuMemImportFromShareableHandle) \
    X(cuMemRetainAllocationHandle, cuMemRetainAllocationHandle)     \
    X(cuMemGetAllocationPropertiesFromHandle, cuMemGetAllocationPropertiesFromHandle) \
    X(cuPointerGetAttribute, cuPointerGetAttribute)                 \
    X(cuPointerGetAttributes, cuPointerGetAttributes)               \
    X(cuCtxEnablePeerAccess, cuCtxEnablePeerAccess)                 \
    X(cuCtxDisablePeerAccess, cuCtxDisablePeerAccess)               \
    X(cuIpcGetMemHandle, cuIpcGetMemHandle)                         \
    X(cuIpcOpenMemHandle, cuIpcOpenMemHandle_v2)                    \
    X(BY_ADDRESS, cuIpcOpenMemHandle)                               \
    X(cuIpcCloseMemHandle, cuIpcCloseMemHandle)                     \
    X(cuPointerSetAttribute, cuPointerSetAttribute)                 \
    X(cuMemGetHandleForAddressRange, cuMemGetHandleForAddressRange) \
    X(BY_ADDRESS, cuMemFreeAsync)                                   \
    X(BY_ADDRESS, cuMemFreeAsync_ptsz)                              \
    X(BY_ADDRESS, cuMemMapArrayAsync)                               \
    X(BY_ADDRESS, cuMemMapArrayAsync_ptsz)                          \
    X(BY_ADDRESS, cuMulticastCreate)                                \
    X(BY_ADDRESS, cuMulticastAddDevice)                             \
    X(BY_ADDRESS, cuMulticastBindMem)                               \
    X(BY_ADDRESS, cuMulticastBindAddr)                              \
    X(BY_ADDRESS, cuMulticastUnbind)

result replaced_cuMemAlloc_v2(address *pointer, size_t bytes);
result replaced_cuMemAllocPitch_v2(address *pointer, size_t *pitch, size_t width, size_t height, unsigned element);
result replaced_cuMemAllocManaged(address *pointer, size_t bytes, unsigned flags);
result replaced_cuMemFree_v2(address pointer);
result replaced_cuMemGetAddressRange_v2(address *start, size_t *bytes, address pointer);
result replaced_cuMemCreate(handle *virtual, size_t bytes, const struct properties *asked, unsigned long long flags);
result replaced_cuMemRelease(handle virtual);
result replaced_cuMemMap(address start, size_t bytes, size_t offset, handle virtual, unsigned long long flags);
result replaced_cuMemUnmap(address start, size_t bytes);
result replaced_cuMemSetAccess(address start, size_t bytes, const struct access *access, size_t count);
result replaced_cuMemExportToShareableHandle(void *shareable, handle virtual, int type, unsigned long long flags);
result replaced_cuMemImportFromShareableHandle(handle *virtual, void *shareable, int type);
result replaced_cuMemRetainAllocationHandle(handle *virtual, void *pointer);
result replaced_cuMemGetAllocationPropertiesFromHandle(struct properties *properties, handle virtual);
result replaced_cuMulticastBindMem(handle multicast, size_t multicast_offset, handle virtual, size_t offset,
                                   size_t bytes, unsigned long long flags);
result replaced_cuMulticastCreate(handle *virtual, const void *properties);
result replaced_cuMulticastAddDevice(handle multicast, int device);
result replaced_cuMulticastBindAddr(handle multicast, size_t multicast_offset, address start, size_t bytes,
                                    unsigned long long flags);
result replaced_cuMulticastUnbind(handle multicast, int device, size_t offset, size_t bytes);
result replaced_cuMemMapArrayAsync(void *list, unsigned count, stream stream);
result replaced_cuMemMapArrayAsync_ptsz(void *list, unsigned count, stream stream);
result replaced_cuMemFreeAsync(address pointer, stream stream);
result replaced_cuMemFreeAsync_ptsz(address pointer, stream stream);
result replaced_cuMemGetHandleForAddressRange(void *made, address start, size_t bytes, int type, unsigned long long flags);
result replaced_cuIpcGetMemHandle(struct ipc_handle *handle, address pointer);
result replaced_cuIpcOpenMemHandle(address *pointer, struct ipc_handle handle, unsigned flags);
result replaced_cuIpcOpenMemHandle_v2(address *pointer, struct ipc_handle handle, unsigned flags);
result replaced_cuIpcCloseMemHandle(address pointer);
result replaced_cuPointerSetAttribute(const void *value, int attribute, address pointer);
result replaced_cuPointerGetAttribute(void *data, int attribute, address pointer);
result replaced_cuPointerGetAttributes(unsigned count, int *attributes, void **data, address pointer);
result replaced_cuCtxEnablePeerAccess(context peer, unsigned flags);
result replaced_cuCtxDisablePeerAccess(context peer);

#endif

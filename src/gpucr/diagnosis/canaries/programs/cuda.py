"""The part of the CUDA driver API that the canaries call, over ctypes. No toolkit, no torch."""

from __future__ import annotations

import ctypes
from typing import Any

_SONAME = "libcuda.so.1"

INCREMENT = b"gpucr_increment"
PTX = b"""
.version 7.0
.target sm_75
.address_size 64
.visible .entry gpucr_increment(.param .u64 pointer)
{
    .reg .b64 %rd<4>;
    ld.param.u64 %rd1, [pointer];
    cvta.to.global.u64 %rd2, %rd1;
    atom.global.add.u64 %rd3, [%rd2], 1;
    ret;
}
"""


class Impossible(Exception):
    """The machine lacks what the canary tests: nothing can be measured here."""


class CudaFailed(Exception):
    """A driver call did not return CUDA_SUCCESS. ``result`` is the CUresult."""

    def __init__(self, function: str, result: int) -> None:
        super().__init__(f"{function} gave {result}")
        self.result = result


class IpcHandle(ctypes.Structure):
    """CUipcMemHandle, and CUipcEventHandle."""

    _fields_ = (("reserved", ctypes.c_char * 64),)


class MemoryProperties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("requestedHandleTypes", ctypes.c_int),
        ("locationType", ctypes.c_int),
        ("locationId", ctypes.c_int),
        ("win32HandleMetaData", ctypes.c_void_p),
        ("allocFlags", ctypes.c_ubyte * 8),
    )


class MemoryAccess(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("locationType", ctypes.c_int), ("locationId", ctypes.c_int), ("flags", ctypes.c_int))


class Cuda:
    """libcuda.so.1, initialised. A call that fails raises CudaFailed, one that the driver does not have Impossible."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL(_SONAME)
        except OSError as e:
            raise Impossible(f"{_SONAME} cannot be loaded") from e
        self("cuInit", 0)

    def __call__(self, function: str, *arguments: Any) -> None:
        """Call a driver function."""
        try:
            call = getattr(self._library, function)
        except AttributeError as e:
            raise Impossible(f"this driver has no {function}") from e
        result = call(*arguments)
        if result != 0:
            raise CudaFailed(function, result)

    def device_count(self) -> int:
        """How many GPUs this process sees."""
        count = ctypes.c_int()
        self("cuDeviceGetCount", ctypes.byref(count))
        return count.value

    def context(self, ordinal: int) -> ctypes.c_void_p:
        """The primary context of a device, made current."""
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self("cuDeviceGet", ctypes.byref(device), ordinal)
        self("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self("cuCtxSetCurrent", context)
        return context

    def increment(self) -> ctypes.c_void_p:
        """The kernel that adds one to a 64-bit number, loaded into the current context."""
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self("cuModuleLoadData", ctypes.byref(module), PTX)
        self("cuModuleGetFunction", ctypes.byref(function), module, INCREMENT)
        return function

    def launch(self, function: ctypes.c_void_p, pointer: int, stream: ctypes.c_void_p | None = None) -> None:
        """One thread of the kernel on the number at ``pointer``."""
        parameter = ctypes.c_uint64(pointer)
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(parameter))
        self("cuLaunchKernel", function, 1, 1, 1, 1, 1, 1, 0, stream, parameters, None)

    def allocate(self, size_bytes: int) -> int:
        """Device memory of the current context."""
        pointer = ctypes.c_uint64()
        self("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size_bytes))
        return pointer.value

    def write(self, pointer: int, data: bytes) -> None:
        self("cuMemcpyHtoD_v2", ctypes.c_uint64(pointer), data, ctypes.c_size_t(len(data)))

    def read(self, pointer: int, size_bytes: int) -> bytes:
        data = ctypes.create_string_buffer(size_bytes)
        self("cuMemcpyDtoH_v2", data, ctypes.c_uint64(pointer), ctypes.c_size_t(size_bytes))
        return data.raw

    def stream(self) -> ctypes.c_void_p:
        """A new stream that does not wait for the default one."""
        stream = ctypes.c_void_p()
        self("cuStreamCreate", ctypes.byref(stream), 1)
        return stream

    def synchronize(self, stream: ctypes.c_void_p | None = None) -> None:
        """Wait for the work of a stream, or of the whole context."""
        if stream is None:
            self("cuCtxSynchronize")
        else:
            self("cuStreamSynchronize", stream)

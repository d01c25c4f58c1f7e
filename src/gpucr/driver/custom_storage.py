"""Custom storage of CUDA 13.4: the driver maps a target's device memory into its caller instead of staging it.

The interface follows NVIDIA's documentation (CUDA Driver API, "CUDA Checkpointing"). No machine with such a driver was
available: this has run on the simulated driver only.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from msgspec import Struct

from gpucr.driver import libcuda
from gpucr.driver.cuda import CudaDriver
from gpucr.errors import Unsupported
from gpucr.model import GpuMap, uuid_bytes


class _PerDevice(ctypes.Structure):
    """CUcheckpointCustomStoragePerDeviceData."""

    _fields_ = (("devPtr", ctypes.c_uint64), ("size", ctypes.c_size_t), ("stream", ctypes.c_void_p))


class _Info(ctypes.Structure):
    """CUcheckpointCustomStorageInfo."""

    _fields_ = (
        ("handle", ctypes.c_void_p),
        ("perDeviceData", ctypes.POINTER(_PerDevice)),
        ("deviceCount", ctypes.c_uint),
    )


class Shown(Struct, frozen=True):
    """Device memory of the target on one GPU, at an address in that GPU's primary context here.

    ``stream`` belongs to that context and identifies the GPU (`CustomStorage.ordinal`).
    """

    address: int
    size_bytes: int
    stream: int


class Begun(Struct, frozen=True):
    """A checkpoint or a restore that waits for `CustomStorage.complete`."""

    handle: int
    shown: tuple[Shown, ...]


class CustomStorage:
    """The three functions, for a process that has called cuInit and retained the primary contexts of all GPUs in use.

    Raises Unsupported if the driver has none.
    """

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver
        self._checkpoint = self._found("cuCheckpointProcessCheckpoint", ctypes.c_int, ctypes.c_void_p)
        self._restore = self._found("cuCheckpointProcessRestore", ctypes.c_int, ctypes.c_void_p)
        self._complete = self._found("cuCheckpointOperationComplete", ctypes.c_void_p)
        self._device_of = self._found("cuStreamGetDevice", ctypes.c_void_p, ctypes.c_void_p)

    def _found(self, name: str, *types: type[Any]) -> Callable[..., int]:
        address = self._driver.library.find(name, libcuda.API_13_4)
        if address is None:
            raise Unsupported(
                f"this driver has no custom storage: it lacks {name} of CUDA 13.4",
                hint="install NVIDIA driver 615 or newer, or leave the way to gpucr (`--gpu-state auto`)",
                code="GPUCR-GPU-STATE",
            )
        return ctypes.CFUNCTYPE(ctypes.c_int, *types)(address)

    def checkpoint(self, pid: int) -> Begun:
        """LOCKED → CHECKPOINTING: the memory is still on its GPUs and mapped here. Raises DriverError."""
        info = ctypes.POINTER(_Info)()
        arguments = libcuda.CheckpointArgs(customStorageInfo_out=ctypes.addressof(info))
        return self._begun(pid, "checkpoint", self._checkpoint(pid, ctypes.addressof(arguments)), info)

    def restore(self, pid: int, gpu_map: GpuMap | None = None) -> Begun:
        """CHECKPOINTED, by `checkpoint` → RESTORING: new memory, to be filled from here. Raises DriverError."""
        info = ctypes.POINTER(_Info)()
        pairs = [uuid_bytes(old) + uuid_bytes(new) for old, new in gpu_map.pairs] if gpu_map is not None else []
        arguments = libcuda.RestoreArgs(customStorageInfo_out=ctypes.addressof(info))
        if pairs:
            arguments.gpuPairs = (libcuda.GpuPair * len(pairs)).from_buffer_copy(b"".join(pairs))
            arguments.gpuPairsCount = len(pairs)
        return self._begun(pid, "restore", self._restore(pid, ctypes.addressof(arguments)), info)

    def complete(self, pid: int, handle: int) -> None:
        """CHECKPOINTING → CHECKPOINTED, or RESTORING → LOCKED; nothing is mapped here any more. Raises DriverError."""
        result = self._complete(handle)
        if result != libcuda.SUCCESS:
            raise self._driver.failure(pid, "complete", result)

    def _begun(self, pid: int, action: str, result: int, info: ctypes._Pointer[_Info]) -> Begun:
        if result != libcuda.SUCCESS:
            raise self._driver.failure(pid, action, result)
        found = info.contents
        each = [found.perDeviceData[number] for number in range(found.deviceCount)]
        return Begun(found.handle, tuple(Shown(one.devPtr, one.size, one.stream) for one in each))

    def ordinal(self, pid: int, shown: Shown) -> int:
        """The ordinal of its GPU in this process. Raises DriverError."""
        ordinal = ctypes.c_int(-1)
        result = self._device_of(shown.stream, ctypes.addressof(ordinal))
        if result != libcuda.SUCCESS:
            raise self._driver.failure(pid, "find the GPU of", result)
        return ordinal.value

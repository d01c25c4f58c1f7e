"""GPU inventory through NVML (nvidia-ml-py, imported late: most commands never need it).

A machine without NVML, without a loaded kernel module or without a GPU simply has no GPUs: the functions then answer
with an empty tuple or None. Everything else that NVML reports, such as a library that does not match the kernel
module, is DriverUnavailable with NVML's error as its cause.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from gpucr.errors import DriverUnavailable
from gpucr.model import Gpu, GpuUse


class _NoNvml(Exception):
    """NVML is not there, or the machine has no GPU."""


@contextmanager
def _nvml() -> Iterator[ModuleType]:
    """nvmlInit and nvmlShutdown as a pair; errors are translated here and nowhere else."""
    try:
        import pynvml
    except ImportError as e:
        raise _NoNvml from e
    try:
        pynvml.nvmlInit()
        try:
            yield pynvml
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as e:
        absent = (
            pynvml.NVML_ERROR_LIBRARY_NOT_FOUND,
            pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
            pynvml.NVML_ERROR_NOT_FOUND,
        )
        if e.value in absent:
            raise _NoNvml from e
        raise DriverUnavailable(
            f"NVML failed: {e}", hint="see what `nvidia-smi` says; the driver may need a reinstall or a reboot"
        ) from e


def _devices(nvml: ModuleType) -> Iterator[tuple[int, Any]]:
    for index in range(nvml.nvmlDeviceGetCount()):
        yield index, nvml.nvmlDeviceGetHandleByIndex(index)


def _if_supported(nvml: ModuleType, query: Callable[..., Any], *args: Any) -> Any:
    """The answer to a query; None where this GPU or driver does not know it."""
    try:
        return query(*args)
    except (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound):
        return None


def list_gpus() -> tuple[Gpu, ...]:
    """The GPUs of this machine, in NVML's order; empty where there are none. Sizes in bytes.

    Raises DriverUnavailable where NVML is there and broken.
    """
    try:
        with _nvml() as nvml:
            return tuple(_describe(nvml, index, handle) for index, handle in _devices(nvml))
    except _NoNvml:
        return ()


def _describe(nvml: ModuleType, index: int, handle: Any) -> Gpu:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    mig_modes = _if_supported(nvml, nvml.nvmlDeviceGetMigMode, handle)
    return Gpu(
        index=index,
        uuid=nvml.nvmlDeviceGetUUID(handle),
        name=nvml.nvmlDeviceGetName(handle),
        memory_total_bytes=int(memory.total),
        memory_free_bytes=int(memory.free),
        mig_enabled=mig_modes is not None and mig_modes[0] == nvml.NVML_DEVICE_MIG_ENABLE,
    )


def gpu_processes() -> tuple[GpuUse, ...]:
    """The processes that hold a compute context, once for each GPU they use; empty where there is no GPU.

    The pids are as NVML sees them: of this pid namespace on bare metal, of the host's in most containers.
    Raises DriverUnavailable where NVML is there and broken.
    """
    try:
        with _nvml() as nvml:
            return tuple(
                GpuUse(pid=process.pid, gpu_uuid=nvml.nvmlDeviceGetUUID(handle), used_bytes=process.usedGpuMemory)
                for _, handle in _devices(nvml)
                for process in _if_supported(nvml, nvml.nvmlDeviceGetComputeRunningProcesses, handle) or ()
            )
    except _NoNvml:
        return ()


def driver_version() -> str | None:
    """The NVIDIA driver's version, such as ``580.159.04``; None where there is none."""
    try:
        with _nvml() as nvml:
            return str(nvml.nvmlSystemGetDriverVersion())
    except _NoNvml:
        return None


def persistence_mode(gpu_uuid: str | None = None) -> bool | None:
    """Whether persistence mode is on, on the one GPU or on all; None where NVML cannot tell.

    The driver needs it on, or a cuInit before, to restore (NVIDIA's documentation of cuCheckpointProcessRestore).
    """
    try:
        with _nvml() as nvml:
            handles = [nvml.nvmlDeviceGetHandleByUUID(gpu_uuid)] if gpu_uuid else [h for _, h in _devices(nvml)]
            modes = [_if_supported(nvml, nvml.nvmlDeviceGetPersistenceMode, handle) for handle in handles]
            known = [mode == nvml.NVML_FEATURE_ENABLED for mode in modes if mode is not None]
            return all(known) if known else None
    except _NoNvml:
        return None

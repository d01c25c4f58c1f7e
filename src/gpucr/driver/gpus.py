"""GPU inventory through NVML (nvidia-ml-py, imported late: most commands never need it).

A machine without NVML, without a loaded kernel module or without a GPU simply has no GPUs: the functions then answer
with an empty tuple or None. Everything else that NVML reports, such as a library that does not match the kernel
module, is DriverUnavailable with NVML's error as its cause.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from gpucr.errors import DriverUnavailable
from gpucr.model import Gpu, GpuActivity, GpuUse

_DEVICES = Path("/dev")
_DRIVER_FACTS = Path("/proc/driver/nvidia/gpus")
_P2P_READ = 0  # NVML_P2P_CAPS_INDEX_READ, which nvidia-ml-py 13 has as the tuple (0,)


class NoNvml(Exception):
    """NVML is not there, or the machine has no GPU."""


@contextmanager
def opened_nvml() -> Iterator[ModuleType]:
    """nvmlInit and nvmlShutdown as a pair; errors are translated here and nowhere else."""
    try:
        import pynvml
    except ImportError as e:
        raise NoNvml from e
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
            raise NoNvml from e
        raise DriverUnavailable(
            f"NVML failed: {e}", hint="see what `nvidia-smi` says; the driver may need a reinstall or a reboot"
        ) from e


@contextmanager
def nvml_kept_open() -> Iterator[None]:
    """NVML stays initialised throughout the block: each of the functions here would start it anew.

    That takes time, and opens device files: nothing for a moment at which a job stands still.

    Raises DriverUnavailable where NVML is there and broken; nothing where there is none.
    """
    with ExitStack() as opened:
        with suppress(NoNvml):
            opened.enter_context(opened_nvml())
        yield


def devices(nvml: ModuleType) -> Iterator[tuple[int, Any]]:
    """The index and the handle of every GPU."""
    for index in range(nvml.nvmlDeviceGetCount()):
        yield index, nvml.nvmlDeviceGetHandleByIndex(index)


def _if_supported(nvml: ModuleType, query: Callable[..., Any], *args: Any) -> Any:
    """The answer to a query; None where this GPU or driver does not know it."""
    try:
        return query(*args)
    except (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound, nvml.NVMLLibraryMismatchError):
        return None


def list_gpus() -> tuple[Gpu, ...]:
    """The GPUs of this machine, in NVML's order; empty where there are none. Sizes in bytes.

    Raises DriverUnavailable where NVML is there and broken.
    """
    try:
        with opened_nvml() as nvml:
            return tuple(_describe(nvml, index, handle) for index, handle in devices(nvml))
    except NoNvml:
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
        with opened_nvml() as nvml:
            return tuple(
                GpuUse(pid=process.pid, gpu_uuid=nvml.nvmlDeviceGetUUID(handle), used_bytes=process.usedGpuMemory)
                for _, handle in devices(nvml)
                for process in _if_supported(nvml, nvml.nvmlDeviceGetComputeRunningProcesses, handle) or ()
            )
    except NoNvml:
        return ()


def unreachable_pairs() -> frozenset[frozenset[str]]:
    """The pairs of GPUs (by UUID) of which NVML knows that neither can read the other's memory.

    A pair that is not in it can, or NVML cannot tell. Empty where there are no GPUs. Raises DriverUnavailable where
    NVML is there and broken.
    """
    try:
        with opened_nvml() as nvml:
            handles = [(nvml.nvmlDeviceGetUUID(handle), handle) for _, handle in devices(nvml)]
            found = set()
            for number, (uuid, handle) in enumerate(handles):
                for other_uuid, other in handles[number + 1 :]:
                    ways = [
                        _if_supported(nvml, nvml.nvmlDeviceGetP2PStatus, *pair, _P2P_READ)
                        for pair in ((handle, other), (other, handle))
                    ]
                    if all(way is not None and way != nvml.NVML_P2P_STATUS_OK for way in ways):
                        found.add(frozenset((uuid, other_uuid)))
            return frozenset(found)
    except NoNvml:
        return frozenset()


def are_busy(uuids: Collection[str]) -> bool:
    """Whether one of these GPUs computes; True where NVML cannot tell. Raises DriverUnavailable as the others do."""
    try:
        with opened_nvml() as nvml:
            rates = [
                _if_supported(nvml, nvml.nvmlDeviceGetUtilizationRates, handle)
                for _, handle in devices(nvml)
                if nvml.nvmlDeviceGetUUID(handle) in uuids
            ]
    except NoNvml:
        return True
    return any(each is None or each.gpu > 0 for each in rates)


def gpu_activity() -> Mapping[str, GpuActivity]:
    """What each GPU does now, by UUID; empty where there are none. Raises DriverUnavailable as the others do."""
    found = {}
    try:
        with opened_nvml() as nvml:
            for _, handle in devices(nvml):
                rates = _if_supported(nvml, nvml.nvmlDeviceGetUtilizationRates, handle)
                degrees = _if_supported(nvml, nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU)
                found[nvml.nvmlDeviceGetUUID(handle)] = GpuActivity(None if rates is None else rates.gpu, degrees)
    except NoNvml:
        return {}
    return found


def mps_clients() -> frozenset[int]:
    """The pids (as NVML sees them) of processes that use a GPU through MPS; empty where NVML cannot tell.

    Raises DriverUnavailable where NVML is there and broken.
    """
    try:
        with opened_nvml() as nvml:
            return frozenset(
                process.pid
                for _, handle in devices(nvml)
                for process in _if_supported(nvml, nvml.nvmlDeviceGetMPSComputeRunningProcesses, handle) or ()
            )
    except NoNvml:
        return frozenset()


def gpus_with_device_file(gpus: Sequence[Gpu], root: Path) -> tuple[Gpu, ...]:
    """Those whose device file (``/dev/nvidia0``, …) is below this root folder, if it is in this process's ``/dev``.

    The driver knows no others for a process there, whatever CUDA_VISIBLE_DEVICES says (measured on driver 580). Which
    file is whose is in ``/proc/driver/nvidia``; all of them where that does not tell, or root cannot be looked into.
    """
    files = _device_files()
    try:
        hidden = {
            uuid for uuid, name in files.items() if (_DEVICES / name).exists() and not (root / "dev" / name).exists()
        }
    except OSError:
        return tuple(gpus)
    return tuple(gpu for gpu in gpus if gpu.uuid not in hidden)


def _device_files() -> Mapping[str, str]:
    """The names of the GPUs' device files, by UUID."""
    names: dict[str, str] = {}
    for path in sorted(_DRIVER_FACTS.glob("*/information")):
        with suppress(OSError, UnicodeDecodeError):
            facts = dict(line.partition(":")[::2] for line in path.read_text().splitlines())
            names[facts.get("GPU UUID", "").strip()] = f"nvidia{facts.get('Device Minor', '').strip()}"
    return names


def visible_gpus(gpus: Sequence[Gpu], environment: Mapping[str, str]) -> tuple[Gpu, ...]:
    """Those of a machine's GPUs that CUDA shows a process with this environment: CUDA_VISIBLE_DEVICES names them.

    Read as the driver does: indices, or UUIDs by as much as is unique, and the list ends at the first name that fits no
    GPU. (CUDA C++ Programming Guide, "CUDA Environment Variables". Indices count ``gpus``, in NVML's order, which is
    CUDA's with CUDA_DEVICE_ORDER=PCI_BUS_ID, and where all GPUs are of one model.)
    """
    names = environment.get("CUDA_VISIBLE_DEVICES")
    if names is None:
        return tuple(gpus)
    found: list[Gpu] = []
    for name in names.split(","):
        fitting = _named(name.strip(), gpus)
        if len(fitting) != 1:
            break
        if fitting[0] not in found:
            found.append(fitting[0])
    return tuple(found)


def _named(name: str, gpus: Sequence[Gpu]) -> list[Gpu]:
    if name.isascii() and name.isdecimal():
        return list(gpus[int(name) : int(name) + 1])
    return [gpu for gpu in gpus if name.startswith("GPU-") and gpu.uuid.startswith(name)]


def driver_version() -> str | None:
    """The NVIDIA driver's version, such as ``580.159.04``; None where there is none."""
    try:
        with opened_nvml() as nvml:
            return str(nvml.nvmlSystemGetDriverVersion())
    except NoNvml:
        return None


def persistence_mode(gpu_uuid: str | None = None) -> bool | None:
    """Whether persistence mode is on, on the one GPU or on all; None where NVML cannot tell.

    The driver needs it on, or a cuInit before, to restore (NVIDIA's documentation of cuCheckpointProcessRestore).
    """
    try:
        with opened_nvml() as nvml:
            handles = [nvml.nvmlDeviceGetHandleByUUID(gpu_uuid)] if gpu_uuid else [h for _, h in devices(nvml)]
            modes = [_if_supported(nvml, nvml.nvmlDeviceGetPersistenceMode, handle) for handle in handles]
            known = [mode == nvml.NVML_FEATURE_ENABLED for mode in modes if mode is not None]
            return all(known) if known else None
    except NoNvml:
        return None

"""GPU inventory through NVML (nvidia-ml-py, imported lazily: most commands never need it).

A machine without NVML, without a loaded kernel module or without a GPU simply has no GPUs: the functions return an
empty tuple or None. Any other NVML error, such as a library that does not match the kernel module, is DriverUnavailable
with NVML's error as its cause.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from gpucr.errors import DriverUnavailable
from gpucr.linux import proc_text
from gpucr.model import Gpu, GpuActivity, GpuUse
from gpucr.quantities import whole_number

_DEVICES = Path("/dev")
_DRIVER_FACTS = Path("/proc/driver/nvidia/gpus")
_P2P_READ = 0  # NVML_P2P_CAPS_INDEX_READ, which nvidia-ml-py 13 has as the tuple (0,)


class NoNvml(Exception):
    """NVML is missing, or the machine has no GPU."""


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
    """Keep NVML initialised during the block; otherwise each function here initialises it again.

    That takes time and opens device files, which is bad while a job is stopped.

    Raises DriverUnavailable if NVML is present but broken; does nothing without NVML.
    """
    with ExitStack() as opened:
        with suppress(NoNvml):
            opened.enter_context(opened_nvml())
        yield


def devices(nvml: ModuleType) -> Iterator[tuple[int, Any]]:
    """Index and handle of every GPU."""
    for index in range(nvml.nvmlDeviceGetCount()):
        yield index, nvml.nvmlDeviceGetHandleByIndex(index)


def _if_supported(nvml: ModuleType, query: Callable[..., Any], *args: Any) -> Any:
    """The result of a query; None if this GPU or driver does not support it."""
    try:
        return query(*args)
    except (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound, nvml.NVMLLibraryMismatchError):
        return None


def list_gpus() -> tuple[Gpu, ...]:
    """The GPUs of this machine, in NVML's order; empty if there are none. Sizes in bytes.

    Raises DriverUnavailable if NVML is there and broken.
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
    """The processes that hold a compute context, one entry per GPU they use; empty if there is no GPU.

    Pids are NVML's: of this pid namespace on bare metal, of the host's in most containers. Raises DriverUnavailable if
    NVML is there and broken.
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
    """The pairs of GPUs (UUIDs) that cannot read each other's memory, according to NVML.

    Other pairs can, or NVML cannot tell. Empty if there are no GPUs. Raises DriverUnavailable if NVML is there and
    broken.
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
    """Whether one of these GPUs is busy; True if NVML cannot tell. Raises DriverUnavailable like the others."""
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
    """The current activity of each GPU, by UUID; empty if there are none. Raises DriverUnavailable like the others."""
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
    """The pids (as NVML sees them) of processes that use a GPU through MPS; empty if NVML cannot tell.

    Raises DriverUnavailable if NVML is there and broken.
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
    """The GPUs whose device file (``/dev/nvidia0``, …) is below this root folder, of those with one in our ``/dev``.

    The driver knows no others for a process there, regardless of CUDA_VISIBLE_DEVICES (measured on driver 580).
    ``/proc/driver/nvidia`` maps files to GPUs; returns all GPUs if it does not, or if the root cannot be read.
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
        with suppress(OSError):
            facts = dict(line.partition(":")[::2] for line in proc_text.lines(path))
            names[facts.get("GPU UUID", "").strip()] = f"nvidia{facts.get('Device Minor', '').strip()}"
    return names


def visible_gpus(gpus: Sequence[Gpu], environment: Mapping[str, str]) -> tuple[Gpu, ...]:
    """The GPUs that CUDA shows to a process with this environment, according to CUDA_VISIBLE_DEVICES.

    Read as the driver does: indices, or unique prefixes of UUIDs, and the list ends at the first name that matches no
    GPU. (CUDA C++ Programming Guide, "CUDA Environment Variables". Indices refer to ``gpus``, in NVML's order, which is
    CUDA's with CUDA_DEVICE_ORDER=PCI_BUS_ID, or if all GPUs are the same model.)
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
    index = whole_number(name)
    if index is not None:
        return list(gpus[index : index + 1])
    return [gpu for gpu in gpus if name.startswith("GPU-") and gpu.uuid.startswith(name)]


def driver_version() -> str | None:
    """The NVIDIA driver's version, such as ``580.159.04``; None if there is none."""
    try:
        with opened_nvml() as nvml:
            return str(nvml.nvmlSystemGetDriverVersion())
    except NoNvml:
        return None


def persistence_mode(gpu_uuid: str | None = None) -> bool | None:
    """Whether persistence mode is on for all GPUs; None if NVML cannot tell.

    To restore, the driver needs it on, or a cuInit before (NVIDIA's documentation of cuCheckpointProcessRestore).
    """
    try:
        with opened_nvml() as nvml:
            handles = [nvml.nvmlDeviceGetHandleByUUID(gpu_uuid)] if gpu_uuid else [h for _, h in devices(nvml)]
            modes = [_if_supported(nvml, nvml.nvmlDeviceGetPersistenceMode, handle) for handle in handles]
            known = [mode == nvml.NVML_FEATURE_ENABLED for mode in modes if mode is not None]
            return all(known) if known else None
    except NoNvml:
        return None

"""The Driver over libcuda.so.1: result codes become errors that say why and what to do."""

from __future__ import annotations

import threading
from collections.abc import Callable

from gpucr.driver import gpus, libcuda, own_use
from gpucr.driver.api import DriverCapabilities
from gpucr.errors import (
    DriverError,
    DriverUnavailable,
    GpucrError,
    IllegalState,
    InvalidRequest,
    LockTimeout,
    NotACudaProcess,
    NotPermitted,
    NotSupportedByDriver,
    ProcessNotFound,
    Unsupported,
)
from gpucr.linux import processes
from gpucr.model import CudaState, GpuMap, uuid_bytes

_MAX_TIMEOUT_MS = 2**32 - 1
_MAX_PID = 2**31 - 1
_CUDA_13_0 = 13000

_ERROR_TYPES: dict[int, type[DriverError]] = {
    libcuda.ILLEGAL_STATE: IllegalState,
    libcuda.NOT_READY: LockTimeout,
    libcuda.NOT_SUPPORTED: NotSupportedByDriver,
}

_STATE_NEEDED = {"lock": "running", "checkpoint": "locked", "restore": "checkpointed", "unlock": "locked"}

_HINTS = {
    ("lock", libcuda.NOT_READY): (
        "GPU work is still pending: allow more time, or lock all processes of the job together if they wait for "
        "each other"
    ),
    ("lock", libcuda.NOT_SUPPORTED): (
        "a profiler that uses CUPTI was started in the process (torch.profiler, Nsight), and driver 580 refuses such a "
        "process until it ends; start the job without the profiler"
    ),
    ("checkpoint", libcuda.NOT_SUPPORTED): (
        "managed memory (cudaMallocManaged), MIG, MPS and memory shared between processes cannot be checkpointed by "
        "this driver"
    ),
    ("checkpoint", libcuda.OUT_OF_MEMORY): "free host memory: the checkpoint needs as much as the GPU memory in use",
    ("restore", libcuda.INVALID_VALUE): (
        "a GPU map must name every GPU of the machine, and each new GPU once; a restore with a correct map "
        "can still follow"
    ),
    ("restore", libcuda.OUT_OF_MEMORY): (
        "free memory on the target GPU; some drivers cannot restore the process any more after this"
    ),
    ("restore", libcuda.NOT_SUPPORTED): (
        "the process used memory shared between GPUs or processes (NVLink peer copies, NCCL over P2P), which this "
        "driver cannot bring back"
    ),
    ("checkpoint", libcuda.INVALID_CONTEXT): "a GPU of the process is hidden from gpucr: run it where it sees all GPUs",
    ("restore", libcuda.INVALID_CONTEXT): "a GPU of the process is hidden from gpucr: run it where it sees all GPUs",
    ("restore", libcuda.NO_DEVICE): "check with `nvidia-smi` that this machine has a working GPU",
    ("restore", libcuda.OPERATING_SYSTEM): (
        "a process whose restore ran out of memory before cannot be restored any more on some drivers"
    ),
}
_UNREACHABLE_HINT = "check that the process lives in this pid namespace and that this user may trace it"


class CudaDriver:
    """`gpucr.driver.api.Driver` over a loaded libcuda.so.1. Safe to call from several threads at once."""

    def __init__(self, library: libcuda.Libcuda) -> None:
        self.library = self._cuda = library
        self._initialized = False
        self._initialize_lock = threading.Lock()

    def capabilities(self) -> DriverCapabilities:
        """What this driver can do. No privileges needed.

        Custom storage has its own function and is detected by it. The GPU map is only a field of RestoreArgs, which
        older drivers silently ignore, so it is detected by the driver's CUDA version (13.0, driver 580).
        """
        result, version = self._cuda.version()
        if result != libcuda.SUCCESS:
            raise DriverUnavailable(
                f"cuDriverGetVersion failed with {self._cuda.error_name(result)} ({result})",
                hint="reinstall the NVIDIA driver: libcuda.so.1 must match the kernel module",
            )
        return DriverCapabilities(
            cuda_version=version,
            gpu_map=version >= _CUDA_13_0,
            custom_storage=self._cuda.has_custom_storage,
        )

    def ensure_initialized(self) -> None:
        """Call cuInit in this process, once. Costs 0.3 to 2.7 s, so only a restore that needs it does.

        Raises DriverUnavailable if cuInit fails.
        """
        with self._initialize_lock:
            if self._initialized:
                return
            with own_use.initializing(is_first=not self._cuda.is_initialized()):
                result = self._cuda.init()
            if result != libcuda.SUCCESS:
                raise DriverUnavailable(
                    f"cuInit failed with {self._cuda.error_name(result)} ({result}): {self._cuda.error_text(result)}",
                    hint="check with `nvidia-smi` that this machine has a working GPU",
                )
            self._initialized = True

    def state(self, pid: int) -> CudaState | None:
        """The process's state; None if it has no CUDA context. A thread id stands for its process.

        Raises ProcessNotFound or NotPermitted if /proc shows that as the cause of the driver's refusal.
        """
        _check_pid(pid)
        result, value = self._cuda.process_state(pid)
        if result in (libcuda.NOT_INITIALIZED, libcuda.OPERATING_SYSTEM):
            leader = _leader(pid)
            if leader != pid:
                pid = leader
                result, value = self._cuda.process_state(pid)
        if result == libcuda.SUCCESS:
            return CudaState(value)
        if result == libcuda.NOT_INITIALIZED and processes.presence(pid) is processes.Presence.PRESENT:
            return None
        raise self.failure(pid, "get the state of", result)

    def restore_thread_id(self, pid: int) -> int:
        """The thread id (in the target) of the thread that does the driver's work."""
        _check_pid(pid)
        result, thread_id = self._cuda.restore_thread_id(pid)
        if result != libcuda.SUCCESS:
            raise self.failure(pid, "find the restore thread of", result)
        return thread_id

    def lock(self, pid: int, timeout_ms: int = 0) -> None:
        """RUNNING → LOCKED. Waits up to ``timeout_ms`` for pending work (0: no limit), then raises LockTimeout."""
        if not 0 <= timeout_ms <= _MAX_TIMEOUT_MS:
            raise InvalidRequest(
                f"a lock timeout of {timeout_ms} ms is out of range", hint=f"give 0 to {_MAX_TIMEOUT_MS} milliseconds"
            )
        self._act(pid, "lock", lambda: self._cuda.lock(pid, timeout_ms))

    def checkpoint(self, pid: int) -> None:
        """LOCKED → CHECKPOINTED: device memory moves to host memory, GPU resources are released."""
        self._act(pid, "checkpoint", lambda: self._cuda.checkpoint(pid))

    def restore(self, pid: int, gpu_map: GpuMap | None = None) -> None:
        """CHECKPOINTED → LOCKED. A wrong GPU map gives CUDA_ERROR_INVALID_VALUE and leaves CHECKPOINTED.

        Calls cuInit first if persistence mode is off: the driver's documentation requires one of the two. Raises
        Unsupported if a GPU map is given and the driver is older than CUDA 13.0.
        """
        pairs = [(uuid_bytes(old), uuid_bytes(new)) for old, new in gpu_map.pairs] if gpu_map else []
        if pairs and not self.capabilities().gpu_map:
            raise Unsupported(
                "this driver cannot restore to another GPU",
                hint="install NVIDIA driver 580 or newer, or restore without a GPU map",
                code="GPUCR-OLD-DRIVER",
            )
        if not self._initialized and gpus.persistence_mode() is False:
            self.ensure_initialized()
        self._act(pid, "restore", lambda: self._cuda.restore(pid, pairs))

    def unlock(self, pid: int) -> None:
        self._act(pid, "unlock", lambda: self._cuda.unlock(pid))

    def _act(self, pid: int, action: str, call: Callable[[], int]) -> None:
        _check_pid(pid)
        result = call()
        if result != libcuda.SUCCESS:
            raise self.failure(pid, action, result)

    def failure(self, pid: int, action: str, result: int) -> GpucrError:
        """The error for a failed call. Checks /proc first: the driver returns 304, 800 or 3 for several causes."""
        if result in (libcuda.OPERATING_SYSTEM, libcuda.NOT_PERMITTED, libcuda.NOT_INITIALIZED):
            unreachable = _unreachable(pid, action)
            if unreachable is not None:
                return unreachable
        if result == libcuda.NOT_INITIALIZED:
            return NotACudaProcess(
                f"cannot {action} process {pid}: it has no CUDA context",
                pid=pid,
                hint="the process has not used CUDA yet, or only its children do",
            )
        state_result, value = self._cuda.process_state(pid)
        state = CudaState(value).word if state_result == libcuda.SUCCESS else None
        name, text = self._cuda.error_name(result), self._cuda.error_text(result)
        return _ERROR_TYPES.get(result, DriverError)(
            f"cannot {action} process {pid}: {name} ({result}), {text}",
            pid=pid,
            action=action,
            result=result,
            state=state,
            hint=_hint(action, result, state),
        )


def load_driver(path: str | None = None) -> CudaDriver:
    """Load libcuda.so.1 (or ``path``). No cuInit, no privileges, well under a millisecond.

    Raises DriverUnavailable if there is no libcuda.so.1, or one without the checkpoint functions.
    """
    try:
        return CudaDriver(libcuda.load(path))
    except libcuda.LibraryNotLoaded as e:
        raise DriverUnavailable(
            f"the NVIDIA driver's library cannot be loaded: {e}",
            hint="install NVIDIA driver 570 or newer; in a container, run it with the NVIDIA container runtime",
        ) from e
    except libcuda.FunctionsMissing as e:
        raise DriverUnavailable(
            f"the NVIDIA driver has no checkpoint functions ({e})",
            hint="install NVIDIA driver 570 or newer",
            code="GPUCR-OLD-DRIVER",
        ) from e


def _check_pid(pid: int) -> None:
    # ctypes would truncate a larger number to some other process's pid.
    if not 0 < pid <= _MAX_PID:
        raise ProcessNotFound(f"there is no process {pid}", pid=pid, hint="a pid is a positive number")


def _leader(pid: int) -> int:
    """The process that a thread id belongs to; the number itself if /proc does not show it."""
    try:
        return processes.thread_group_leader(pid)
    except (ProcessNotFound, PermissionError):
        return pid


def _unreachable(pid: int, action: str) -> GpucrError | None:
    presence = processes.presence(pid)
    if presence is processes.Presence.GONE:
        return ProcessNotFound(f"cannot {action} process {pid}: there is no such process", pid=pid)
    if presence is processes.Presence.ZOMBIE:
        return ProcessNotFound(
            f"cannot {action} process {pid}: it is a zombie", pid=pid, hint="its parent has not waited for it yet"
        )
    if presence is processes.Presence.NOT_PERMITTED:
        return NotPermitted(
            f"cannot {action} process {pid}: not permitted",
            pid=pid,
            hint="run as the user of the process with permission to trace it, or as root",
        )
    return None


def _hint(action: str, result: int, state: str | None) -> str | None:
    if result == libcuda.ILLEGAL_STATE and state in ("checkpointing", "restoring"):
        return "another tool has begun this with custom storage, and it alone can complete it"
    if result == libcuda.ILLEGAL_STATE and action == "restore" and state == "checkpointed":
        return "what left by custom storage comes back by that alone; `gpucr resume`, if gpucr suspended it"
    if result == libcuda.ILLEGAL_STATE and action in _STATE_NEEDED:
        return f"the process is {state or 'in an unknown state'}, and {action} needs it {_STATE_NEEDED[action]}"
    hint = _HINTS.get((action, result))
    if (action, result) == ("restore", libcuda.OPERATING_SYSTEM) and gpus.persistence_mode() is False:
        return f"turn persistence mode on (`nvidia-smi -pm 1`); {hint}"
    if hint is None and result in (libcuda.OPERATING_SYSTEM, libcuda.NOT_PERMITTED):
        return _UNREACHABLE_HINT
    return hint

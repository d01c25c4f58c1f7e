"""What the rest of gpucr needs of a CUDA driver. `gpucr.driver.cuda` is the implementation over libcuda.so.1."""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct

from gpucr.model import CudaState, GpuMap


class DriverCapabilities(Struct, frozen=True):
    """What this driver can do, found by looking for its functions, not by comparing versions.

    ``cuda_version`` is cuDriverGetVersion's number (13000 for CUDA 13.0), for display only.
    """

    cuda_version: int
    gpu_map: bool
    custom_storage: bool


class Driver(Protocol):
    """The checkpoint API for one process at a time. Pids are thread-group leaders in the caller's pid namespace.

    Every action blocks until the driver is done and can be called for several processes at once from several
    threads. Failures are `gpucr.errors.DriverError` (or a subclass) with pid, action, result code and, where it
    could be read, the state that the process is left in.
    """

    def capabilities(self) -> DriverCapabilities:
        """What this driver can do. No privileges needed."""
        ...

    def state(self, pid: int) -> CudaState | None:
        """The process's state; None where it has no CUDA context (CUDA_ERROR_NOT_INITIALIZED).

        Raises ProcessNotFound or NotPermitted where /proc tells that this is why the driver refused.
        """
        ...

    def restore_thread_id(self, pid: int) -> int:
        """The thread id (in the target) of the thread that does the driver's work."""
        ...

    def lock(self, pid: int, timeout_ms: int = 0) -> None:
        """RUNNING → LOCKED. Waits for pending work at most ``timeout_ms`` (0: no limit), then LockTimeout."""
        ...

    def checkpoint(self, pid: int) -> None:
        """LOCKED → CHECKPOINTED: device memory moves to host memory, GPU resources are released."""
        ...

    def restore(self, pid: int, gpu_map: GpuMap | None = None) -> None:
        """CHECKPOINTED → LOCKED. A wrong GPU map gives CUDA_ERROR_INVALID_VALUE and leaves CHECKPOINTED."""
        ...

    def unlock(self, pid: int) -> None:
        """LOCKED → RUNNING."""
        ...

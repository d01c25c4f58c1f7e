"""What the rest of gpucr needs from a CUDA driver. `gpucr.driver.cuda` is the implementation over libcuda.so.1."""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct

from gpucr.model import CudaState, GpuMap


class DriverCapabilities(Struct, frozen=True):
    """What this driver can do, detected by its functions, not by version.

    ``cuda_version`` is cuDriverGetVersion's number (13000 for CUDA 13.0), for display only.
    """

    cuda_version: int
    gpu_map: bool
    custom_storage: bool


class Driver(Protocol):
    """The checkpoint API for one process at a time. Pids are thread-group leaders in the caller's pid namespace.

    Every action blocks until the driver is done. Several threads may act on several processes at once. Failures are
    `gpucr.errors.DriverError` (or a subclass) with pid, action, result code and, if it could be read, the state in
    which the process is left.
    """

    def capabilities(self) -> DriverCapabilities:
        """What this driver can do. No privileges needed."""
        ...

    def state(self, pid: int) -> CudaState | None:
        """The process's state; None if it has no CUDA context (CUDA_ERROR_NOT_INITIALIZED).

        Raises ProcessNotFound or NotPermitted if /proc shows that as the cause of the driver's refusal.
        """
        ...

    def restore_thread_id(self, pid: int) -> int:
        """The thread id (in the target) of the thread that does the driver's work."""
        ...

    def lock(self, pid: int, timeout_ms: int = 0) -> None:
        """RUNNING → LOCKED. Waits up to ``timeout_ms`` for pending work (0: no limit), then raises LockTimeout."""
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

"""`gpucr.Process`: the driver's four actions on one process, with the members of ``cuda.core.checkpoint.Process``."""

from __future__ import annotations

from collections.abc import Mapping

from gpucr.driver.api import Driver
from gpucr.driver.cuda import load_driver
from gpucr.errors import InvalidRequest, NotACudaProcess
from gpucr.model import GpuMap, uuid_bytes, uuid_text


class Process:
    """A CUDA process that can be locked, checkpointed, restored and unlocked.

    The states go RUNNING → lock → LOCKED → checkpoint → CHECKPOINTED → restore → LOCKED → unlock → RUNNING. This acts
    on one process only; `gpucr.suspend` and `gpucr.dump` handle whole trees and undo partial failures. Needs the
    right to trace the process (same user, or root).

    Raises TypeError if ``pid`` is no int, ValueError if it is not positive. The driver is loaded at first use:
    DriverUnavailable if there is none.
    """

    __slots__ = ("_driver", "_pid")

    def __init__(self, pid: int) -> None:
        self._pid = _checked_int("pid", pid)
        if pid <= 0:
            raise ValueError(f"pid must be a positive int, not {pid}")
        self._driver: Driver | None = None

    def __repr__(self) -> str:
        return f"Process({self._pid})"

    @property
    def pid(self) -> int:
        """The process's pid, as seen in the caller's pid namespace."""
        return self._pid

    @property
    def state(self) -> str:
        """``running``, ``locked``, ``checkpointed`` or ``failed``; a newer driver's word is passed through.

        ``checkpointing``, ``restoring``: another tool has started that with custom storage (driver 615) and not
        completed it. No action leads out of these two.

        Raises ProcessNotFound, NotPermitted, or NotACudaProcess if the process has no CUDA context.
        """
        state = self._loaded().state(self._pid)
        if state is None:
            raise NotACudaProcess(f"process {self._pid} has no CUDA context", pid=self._pid)
        return state.word

    @property
    def restore_thread_id(self) -> int:
        """The id of the thread in the target that does the driver's work."""
        return self._loaded().restore_thread_id(self._pid)

    def lock(self, timeout_ms: int = 0) -> None:
        """RUNNING → LOCKED: CUDA calls block, pending work is finished.

        Waits up to ``timeout_ms`` milliseconds (0: no limit). Raises LockTimeout (the process is RUNNING again),
        IllegalState, DriverError.
        """
        _checked_int("timeout_ms", timeout_ms)
        if timeout_ms < 0:
            raise ValueError(f"timeout_ms must be >= 0, not {timeout_ms}")
        self._loaded().lock(self._pid, timeout_ms)

    def checkpoint(self) -> None:
        """LOCKED → CHECKPOINTED: device memory moves to host memory, the GPU is released.

        Raises NotSupportedByDriver (the process stays LOCKED), IllegalState, DriverError.
        """
        self._loaded().checkpoint(self._pid)

    def restore(self, gpu_mapping: Mapping[object, object] | None = None) -> None:
        """CHECKPOINTED → LOCKED: device memory goes back to a GPU.

        ``gpu_mapping`` maps the UUID of every GPU of the machine to the UUID of the GPU to restore onto.
        A UUID is a string, with or without ``GPU-`` in front, 16 bytes, a `uuid.UUID`, or anything with its 16
        ``bytes`` (``CUuuid``).

        Raises TypeError or ValueError, before the driver is called, for anything but a mapping of UUIDs or if a GPU is
        named twice; Unsupported if the driver is older than CUDA 13.0, DriverError for a wrong map. The process stays
        CHECKPOINTED.
        """
        gpu_map = _gpu_map(gpu_mapping)
        self._loaded().restore(self._pid, gpu_map)

    def unlock(self) -> None:
        """LOCKED → RUNNING: CUDA calls continue. Raises IllegalState, DriverError."""
        self._loaded().unlock(self._pid)

    def _loaded(self) -> Driver:
        if self._driver is None:
            self._driver = load_driver()
        return self._driver


def _checked_int(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, not {type(value).__name__}")
    return value


def _gpu_map(gpu_mapping: Mapping[object, object] | None) -> GpuMap | None:
    if gpu_mapping is None:
        return None
    if not isinstance(gpu_mapping, Mapping):
        raise TypeError(
            "gpu_mapping must be a mapping from the old UUID of each GPU to the new one, "
            f"not {type(gpu_mapping).__name__}"
        )
    if not gpu_mapping:
        return None
    pairs = tuple((_uuid_of(old), _uuid_of(new)) for old, new in gpu_mapping.items())
    for side, uuids in zip(("from", "to"), zip(*pairs, strict=True), strict=True):
        twice = next((uuid for uuid in uuids if uuids.count(uuid) > 1), None)
        if twice is not None:
            raise ValueError(f"gpu_mapping maps {side} {twice} twice")
    return GpuMap(pairs)


def _uuid_of(value: object) -> str:
    if isinstance(value, str):
        try:
            return uuid_text(uuid_bytes(value))
        except InvalidRequest as e:
            raise ValueError(
                f"a GPU UUID string must be 32 hex characters, with optional hyphens and GPU- in front, not {value!r}"
            ) from e
    raw = value if isinstance(value, bytes) else getattr(value, "bytes", None)
    if not isinstance(raw, bytes):
        raise TypeError(f"a GPU UUID must be a str, 16 bytes, a uuid.UUID or a CUuuid, not {type(value).__name__}")
    if len(raw) != 16:
        raise ValueError(f"a GPU UUID has 16 bytes, not {len(raw)}")
    return uuid_text(raw)

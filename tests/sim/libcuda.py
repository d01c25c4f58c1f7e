"""The simulated libcuda without gpucr's own binding in between, and what NVML tells."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

from gpucr.model import uuid_bytes

RUNNING, LOCKED, CHECKPOINTED, FAILED = range(4)

Machine = Callable[..., None]
RunProgram = Callable[..., list[str]]


class Libcuda:
    """The six checkpoint functions by their short names; everything returns the CUresult."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")

    def state(self, pid: int) -> tuple[int, int]:
        """(result, state); the state is -1 if there is none."""
        state = ctypes.c_int(-1)
        return self._library.cuCheckpointProcessGetState(pid, ctypes.byref(state)), state.value

    def restore_tid(self, pid: int) -> tuple[int, int]:
        """(result, thread id)."""
        tid = ctypes.c_int(-1)
        return self._library.cuCheckpointProcessGetRestoreThreadId(pid, ctypes.byref(tid)), tid.value

    def act(self, action: str, pid: int, arguments: bytes = bytes(64)) -> int:
        """Call lock, checkpoint, restore or unlock with 64 bytes of arguments."""
        function = getattr(self._library, f"cuCheckpointProcess{action.capitalize()}")
        result: int = function(pid, ctypes.create_string_buffer(arguments, 64))
        return result

    def lock(self, pid: int, timeout_ms: int = 0) -> int:
        """Lock with a timeout."""
        return self.act("lock", pid, timeout_ms.to_bytes(4, "little") + bytes(60))

    def restore(self, pid: int, pairs: Sequence[tuple[str, str]]) -> int:
        """Restore with a GPU map."""
        raw = b"".join(uuid_bytes(old) + uuid_bytes(new) for old, new in pairs)
        buffer = ctypes.create_string_buffer(raw, max(len(raw), 1))
        head = ctypes.addressof(buffer).to_bytes(8, "little") + len(pairs).to_bytes(4, "little")
        return self.act("restore", pid, head + bytes(52))

    def suspend(self, pid: int) -> None:
        """RUNNING → CHECKPOINTED."""
        assert (self.act("lock", pid), self.act("checkpoint", pid)) == (0, 0)

    def resume(self, pid: int) -> None:
        """CHECKPOINTED → RUNNING."""
        assert (self.act("restore", pid), self.act("unlock", pid)) == (0, 0)


def gpu_uuids() -> list[str]:
    """The GPUs of the machine that the environment describes, by NVML."""
    import pynvml

    pynvml.nvmlInit()
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        return [pynvml.nvmlDeviceGetUUID(handle) for handle in handles]
    finally:
        pynvml.nvmlShutdown()


def used_bytes(pid: int) -> list[int]:
    """What a process holds on each GPU, by NVML."""
    import pynvml

    pynvml.nvmlInit()
    try:
        held = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            processes = pynvml.nvmlDeviceGetComputeRunningProcesses(pynvml.nvmlDeviceGetHandleByIndex(index))
            held.append(sum(process.usedGpuMemory for process in processes if process.pid == pid))
        return held
    finally:
        pynvml.nvmlShutdown()

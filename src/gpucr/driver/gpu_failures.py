"""GPU failures as the driver reports them: Xid events of NVML, and lost GPUs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

from gpucr.driver.gpus import NoNvml, devices, opened_nvml
from gpucr.errors import DriverUnavailable

FATAL_XIDS = {
    48: "double-bit ECC error",
    62: "internal micro-controller halt",
    64: "row remapping failed",
    74: "NVLink error",
    79: "fallen off the bus",
    95: "uncontained ECC error",
    119: "the GSP does not answer",
    120: "GSP error",
    140: "unrecovered ECC error",
    143: "GPU initialisation failed",
    154: "a recovery action is needed",
}
"""After these a GPU must be reset or replaced (NVIDIA, "XID Errors", GPU debug guidelines).

Others are program errors (13, 31, 43, 45, 94, ...), which end the program, and its exit code shows them.
"""

_LOOK_EVERY_S = 5.0
_MOST_EVENTS = 100


class GpuFailures:
    """Call it for new failures. Each entry: a UUID, and what NVML said about that GPU."""

    def __init__(self, nvml: ModuleType, events: Any, handles: dict[str, Any]) -> None:
        self._nvml = nvml
        self._events = events
        self._handles = handles
        self._lost: set[str] = set()
        self._looked_s = time.monotonic()

    def __call__(self) -> Sequence[tuple[str, str]]:
        """Never raises: a GPU that cannot be queried is reported lost once."""
        return [*self._xids(), *self._gone()]

    def _xids(self) -> Iterator[tuple[str, str]]:
        nvml = self._nvml
        for _ in range(_MOST_EVENTS):
            try:
                event = nvml.nvmlEventSetWait_v2(self._events, 0)
                if event.eventData in FATAL_XIDS:
                    yield nvml.nvmlDeviceGetUUID(event.device), f"Xid {event.eventData}, {FATAL_XIDS[event.eventData]}"
            except nvml.NVMLError:  # a time-out: no event
                return

    def _gone(self) -> Iterator[tuple[str, str]]:
        if time.monotonic() < self._looked_s + _LOOK_EVERY_S:
            return
        self._looked_s = time.monotonic()
        for uuid, handle in self._handles.items():
            try:
                self._nvml.nvmlDeviceGetMemoryInfo(handle)
            except self._nvml.NVMLError_GpuIsLost:
                if uuid not in self._lost:
                    self._lost.add(uuid)
                    yield uuid, "it is lost"
            except self._nvml.NVMLError:
                continue


@contextmanager
def watched_gpu_failures() -> Iterator[Callable[[], Sequence[tuple[str, str]]]]:
    """Watch for GPU failures during the block. Without NVML or its events, none are reported."""
    with ExitStack() as opened:
        try:
            nvml = opened.enter_context(opened_nvml())
            failures = _watch(nvml, opened)
        except (NoNvml, DriverUnavailable):
            failures = None
        yield failures or (lambda: ())


def _watch(nvml: ModuleType, opened: ExitStack) -> GpuFailures | None:
    try:
        events = nvml.nvmlEventSetCreate()
        opened.callback(nvml.nvmlEventSetFree, events)
        handles = {}
        for _, handle in devices(nvml):
            nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events)
            handles[nvml.nvmlDeviceGetUUID(handle)] = handle
    except nvml.NVMLError:
        return None
    return GpuFailures(nvml, events, handles)

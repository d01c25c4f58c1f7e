"""Failures of GPUs as NVML reports them. The simulator has no events, so NVML's side is played here."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from gpucr.driver import gpu_failures
from gpucr.driver.gpu_failures import GpuFailures, watched_gpu_failures


class _Error(Exception):
    pass


class _LostError(_Error):
    pass


class _Nvml(ModuleType):
    """Two GPUs, handles 0 and 1, whose events and losses the test sets."""

    NVMLError = _Error
    NVMLError_GpuIsLost = _LostError

    def __init__(self) -> None:
        super().__init__("nvml")
        self.events: list[tuple[int, int]] = []
        self.lost: set[int] = set()

    def nvmlEventSetWait_v2(self, events: object, timeout_ms: int) -> Any:  # noqa: N802
        if not self.events:
            raise _Error("time-out")
        device, xid = self.events.pop(0)
        return SimpleNamespace(device=device, eventData=xid)

    def nvmlDeviceGetUUID(self, handle: int) -> str:  # noqa: N802
        return f"GPU-{handle}"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> None:  # noqa: N802
        if handle in self.lost:
            raise _LostError("GPU is lost")


@pytest.fixture
def nvml() -> _Nvml:
    return _Nvml()


def test_fatal_xids_are_reported_once_and_program_errors_are_not(nvml: _Nvml) -> None:
    failures = GpuFailures(nvml, object(), {"GPU-0": 0, "GPU-1": 1})
    nvml.events = [(0, 31), (1, 79), (0, 13)]
    assert failures() == [("GPU-1", "Xid 79, fallen off the bus")]
    assert failures() == []
    assert 31 not in gpu_failures.FATAL_XIDS, "a page fault of the program's own"


def test_a_lost_gpu_is_reported_once(nvml: _Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    failures = GpuFailures(nvml, object(), {"GPU-0": 0, "GPU-1": 1})
    nvml.lost = {1}
    assert failures() == [], "not asked at every look"
    monkeypatch.setattr(gpu_failures, "_LOOK_EVERY_S", 0.0)
    assert failures() == [("GPU-1", "it is lost")]
    assert failures() == []


def test_without_nvml_events_no_failures_are_reported(sim_only: None) -> None:
    with watched_gpu_failures() as failures:
        assert list(failures()) == []

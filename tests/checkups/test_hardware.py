"""Findings about the driver, the GPUs and the measurements, for each condition."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from gpucr import CanaryOutcome, CanaryResult, ProbeReport
from gpucr.checkups import cuda_driver, graphics, measured
from gpucr.checkups.cuda_driver import DriverFacts
from gpucr.checkups.graphics import GpuFacts
from gpucr.diagnosis.canaries.results import MeasuredMachine
from gpucr.driver import gpus
from gpucr.driver.api import DriverCapabilities
from gpucr.driver.cuda import CudaDriver, load_driver
from gpucr.model import Gpu
from tests.checkups.judging import only, severities

A, B = (f"GPU-{digit * 8}-0000-0000-0000-000000000000" for digit in "ab")
DRIVER = DriverFacts("580.159.04", DriverCapabilities(13000, gpu_map=True, custom_storage=False), has_device=True)
GPU = Gpu(0, A, "NVIDIA H200", 140 << 30, 100 << 30)
GPUS = GpuFacts((GPU,), ((A, True),), (), 0)


# --- the driver -------------------------------------------------------------------------------------------------


def test_a_driver_with_every_feature() -> None:
    found = cuda_driver.check(DRIVER)
    assert severities(found) == ["ok"] * 3
    assert "580.159.04" in found[0].what


def test_a_driver_without_the_gpu_map() -> None:
    facts = replace(DRIVER, version="570.86", capabilities=DriverCapabilities(12080, False, False))
    one = only(cuda_driver.check(facts))
    assert (one.severity, one.what) == ("warning", "this driver cannot restore to other GPUs")
    assert "CUDA 12.8" in one.evidence


@pytest.mark.parametrize(
    ("version", "says"), [("610.1", "may bring CUDA IPC"), ("580.1", "is not expected"), (None, "is not expected")]
)
def test_findings_about_shared_memory(version: str | None, says: str) -> None:
    assert says in cuda_driver.check(replace(DRIVER, version=version))[2].what


def test_a_driver_with_custom_storage() -> None:
    facts = replace(DRIVER, capabilities=DriverCapabilities(13040, gpu_map=True, custom_storage=True))
    assert "custom storage" in cuda_driver.check(facts)[3].what


@pytest.mark.parametrize(
    ("has_device", "version", "severity"),
    [(False, None, "warning"), (True, None, "blocking"), (False, "565.57", "blocking")],
)
def test_no_usable_driver(has_device: bool, version: str | None, severity: str) -> None:
    """This blocks only a machine that should have one."""
    facts = DriverFacts(version, None, has_device, "the NVIDIA driver has no checkpoint functions", "install 570")
    one = only(cuda_driver.check(facts))
    assert (one.severity, one.what, one.remedy) == (
        severity,
        "the NVIDIA driver has no checkpoint functions",
        "install 570",
    )


def test_checking_a_real_driver(driver: CudaDriver) -> None:
    facts = cuda_driver.look()
    assert facts.problem is None
    assert facts.version == gpus.driver_version()
    assert facts.capabilities == driver.capabilities()


def test_checking_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "load_driver", lambda: load_driver("/nonexistent/libcuda.so.1"))
    facts = cuda_driver.look()
    assert facts.capabilities is None
    assert "/nonexistent/libcuda.so.1" in str(facts.problem)


# --- the GPUs ---------------------------------------------------------------------------------------------------


def test_a_healthy_gpu() -> None:
    found = graphics.check(GPUS)
    assert severities(found) == ["ok", "ok"]
    assert "100.0 GiB of 140.0 GiB free" in found[0].what


def test_persistence_mode_is_off() -> None:
    one = only(graphics.check(replace(GPUS, persistence=((A, False),))))
    assert (one.severity, one.remedy, one.repair) == ("warning", "nvidia-smi -i 0 -pm 1", None)


def test_persistence_mode_is_unknown() -> None:
    assert "not known" in graphics.check(replace(GPUS, persistence=((A, None),)))[0].evidence


@pytest.mark.parametrize(
    ("others", "severity", "code"), [((), "blocking", "GPUCR-MIG"), ((replace(GPU, uuid=B),), "warning", "GPUCR-MIG")]
)
def test_a_partitioned_gpu(others: tuple[Gpu, ...], severity: str, code: str | None) -> None:
    facts = replace(GPUS, gpus=(replace(GPU, mig_enabled=True), *others))
    one = only(graphics.check(facts))
    assert (one.severity, one.code) == (severity, code)
    assert "MIG" in one.what


@pytest.mark.parametrize(
    ("change", "evidence"),
    [({"mps": ("nvidia-cuda-mps (pid 7)",)}, "nvidia-cuda-mps (pid 7)"), ({"mps_clients": 2}, "2 client(s)")],
)
def test_mps(change: dict[str, Any], evidence: str) -> None:
    one = only(graphics.check(replace(GPUS, **change)))
    assert one.severity == "warning"
    assert evidence in one.evidence


def test_no_gpu() -> None:
    assert only(graphics.check(GpuFacts((), (), (), 0))).severity == "warning"


def test_a_broken_nvml() -> None:
    one = only(graphics.check(GpuFacts((), (), (), 0, "NVML failed: Driver/library version mismatch")))
    assert (one.severity, one.evidence) == ("blocking", "NVML failed: Driver/library version mismatch")


def test_checking_real_gpus(sim_only: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUCR_SIM_GPUS", "3x1GiB")
    facts = graphics.look()
    assert len(facts.gpus) == len(facts.persistence) == 3
    assert facts.problem is None


# --- what was measured ------------------------------------------------------------------------------------------

MACHINE = MeasuredMachine("580", ("NVIDIA H200",), "6.18")


def report(**outcomes: CanaryOutcome) -> ProbeReport:
    results = [
        CanaryResult(name, outcome, "", None, None, None, 0.1, "2026-11-21T14:02:11Z")
        for name, outcome in outcomes.items()
    ]
    return ProbeReport(MACHINE, tuple(results), "/x")


def test_nothing_was_measured() -> None:
    one = only(measured.check(ProbeReport(MACHINE, (), None)))
    assert (one.severity, one.remedy) == ("unknown", "gpucr doctor --probe")


def test_restored_features() -> None:
    refused, one = measured.check(report(plain=CanaryOutcome.COMES_BACK, managed=CanaryOutcome.REFUSED))
    assert refused.severity == "warning"
    assert (one.severity, one.what) == ("ok", "1 of 2 canary programs came back")
    assert "2026-11-21" in one.evidence


@pytest.mark.parametrize(
    ("name", "severity"), [("plain", "blocking"), ("pinned", "warning"), ("streams_and_graphs", "warning")]
)
def test_a_common_feature_is_lost(name: str, severity: str) -> None:
    assert only(measured.check(report(**{name: CanaryOutcome.LOST}))).severity == severity


def test_a_machine_without_a_driver_has_nothing_to_measure() -> None:
    assert measured.check(None) == []

"""The outcome of each canary. Known for driver 580, from NCCL jobs and peer copies on two H200, like the simulator.

On hardware these also tell whether a machine is as that one: where it is not, the simulator and the rules are wrong.
"""

from __future__ import annotations

import pytest

from gpucr.diagnosis.canaries.prober import measure
from gpucr.diagnosis.canaries.results import CanaryOutcome, CanaryResult
from gpucr.driver import gpus
from gpucr.driver.cuda import CudaDriver

TIMEOUT_S = 600.0


@pytest.fixture
def on_driver_580(platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs that reach each other and driver 580, the only one for which it is known."""
    if platform == "sim":
        monkeypatch.setenv("GPUCR_SIM_PEERS", "1")
    version = gpus.driver_version() or ""
    if not version.startswith("580."):
        pytest.skip(f"known for driver 580 only, not for {version}")


def measured(driver: CudaDriver, name: str) -> CanaryResult:
    result = measure(driver, name, TIMEOUT_S)
    if result.outcome is CanaryOutcome.NOT_POSSIBLE:
        pytest.skip(result.detail)
    return result


@pytest.mark.parametrize("name", ["plain", "streams_and_graphs", "pinned", "shared_memory_ranks", "interposer"])
def test_memory_every_driver_restores(driver: CudaDriver, name: str) -> None:
    result = measured(driver, name)
    assert (result.outcome, result.detail) == (CanaryOutcome.COMES_BACK, "")


def test_managed_memory_is_refused_without_loss(driver: CudaDriver) -> None:
    result = measured(driver, "managed")
    assert result.outcome is CanaryOutcome.REFUSED
    assert (result.action, result.result, result.state) == ("checkpoint", 801, "locked")


def test_peer_copies_are_lost(on_driver_580: None, driver: CudaDriver, platform: str) -> None:
    result = measured(driver, "peer_access")
    if platform == "gpu" and result.outcome is CanaryOutcome.COMES_BACK:
        pytest.skip("this machine brings peer copies back, as others with the same driver and GPUs do (docs/adr/0012)")
    assert (result.outcome, result.action, result.result) == (CanaryOutcome.LOST, "restore", 1)


@pytest.mark.parametrize(("name", "codes"), [("legacy_ipc", {1}), ("vmm_export", {801, 999})])
def test_memory_shared_between_processes_is_lost(
    on_driver_580: None, driver: CudaDriver, name: str, codes: set[int]
) -> None:
    result = measured(driver, name)
    assert (result.outcome, result.action) == (CanaryOutcome.LOST, "restore")
    assert result.result in codes

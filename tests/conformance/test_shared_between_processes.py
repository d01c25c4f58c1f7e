"""Sharing between two processes over CUDA IPC: what comes back, and what is visible. Known for driver 580."""

from __future__ import annotations

import os

import pytest

from gpucr.driver import gpus
from gpucr.driver.cuda import CudaDriver
from tests.hardware import cuda_ipc

BOTH = "2 processes come back"
OUTCOMES = {
    "nothing": BOTH,
    "memory_shared": BOTH,
    "memory_open": "gave 1, state checkpointed",
    "memory_closed": BOTH,
    "memory_open_fork": "gave 1, state checkpointed",
    "event_made": BOTH,
    "event_shared": BOTH,
    "event_open": BOTH,
    "event_closed": BOTH,
    "event_destroyed": BOTH,
    "event_open_fork": BOTH,
    "event_shared_fork": BOTH,
    "both_open": "gave 1, state checkpointed",
    "both_closed": BOTH,
    "vmm_open": "gave 801, state checkpointed",
    "vmm_open_released": "gave 801, state checkpointed",
    "vmm_closed": BOTH,
    "vmm_closed_released": BOTH,
}
MAPS_THE_FILE = {  # of the first process's events
    "event_made": {"A"},
    "event_shared": {"A"},
    "event_open": {"A", "B"},
    "event_closed": {"A", "B"},
    "event_destroyed": {"A", "B"},
    "event_open_fork": {"A", "B", "child of A", "child of B"},
    "event_shared_fork": {"A", "child of A"},
    "both_open": {"A", "B"},
    "both_closed": {"A", "B"},
}


@pytest.fixture(autouse=True)
def on_driver_580(platform: str) -> None:
    version = gpus.driver_version() or ""
    if not version.startswith("580."):
        pytest.skip(f"known for driver 580 only, not for {version}")


def test_every_case_is_covered() -> None:
    assert OUTCOMES.keys() == cuda_ipc.CASES.keys()


@pytest.mark.parametrize("case", OUTCOMES)
def test_memory_that_is_restored(driver: CudaDriver, case: str) -> None:
    row = cuda_ipc.measure(driver, case)
    assert row["before"] == "A right, B right"
    assert row["outcome"].endswith(OUTCOMES[case])
    lost = "restore of " + str(row["B"])  # the one that has opened the other's memory
    if OUTCOMES[case] != BOTH:
        assert lost in row["outcome"]
    else:
        assert row["after"] == "A right, B right"
    file = f"map /dev/shm/cuda.shm.{os.getuid():x}.{row['A']:x}.1 "
    roles = {key.removeprefix("shown ") for key in row if key.startswith("shown ")}
    assert {role for role in roles if any(name.startswith(file) for name in row[f"shown {role}"])} == MAPS_THE_FILE.get(
        case, set()
    )


@pytest.mark.parametrize("case", cuda_ipc.IMPORTER_ENDS)
def test_the_owner_is_restored_after_the_importer_has_ended(driver: CudaDriver, case: str) -> None:
    row = cuda_ipc.measure(driver, case, end_importer=True)
    assert row["outcome"] == "1 processes come back"
    assert row["after"].startswith("A right")


def test_memory_on_another_gpu_is_lost_too(driver: CudaDriver) -> None:
    if len(gpus.list_gpus()) < 2:
        pytest.skip("needs 2 GPUs")
    row = cuda_ipc.measure(driver, "memory_open", second_gpu=True)
    assert row["outcome"].endswith(f"restore of {row['B']} gave 1, state checkpointed")

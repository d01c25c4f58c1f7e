"""`gpucr batch` with real processes and CRIU: started, told to leave its allocation, started again."""

from __future__ import annotations

import os
import shutil
import signal
import time
from typing import Any

import pytest

from gpucr.jobs.registered import registry
from gpucr.linux.private_folders import state_folder
from tests import command
from tests.batch.system import Batch, wait_for_line
from tests.counter import wait_until
from tests.storm import later

pytestmark = [pytest.mark.criu, pytest.mark.usefixtures("own_state")]


@pytest.mark.parametrize("how", [later("USR1"), later("TERM"), "time limit"])
def test_a_job_continues_in_its_next_allocation(batch: Batch, how: str) -> None:
    end = str(int(time.time()) + 3600)
    before = "2h" if how == "time limit" else "1m"
    first = batch.start("--before-limit", before, stop_at=30, SLURM_JOB_END_TIME=end)
    if how != "time limit":
        wait_for_line(first, "step 30")
        batch.starts[-1].send_signal(signal.Signals[f"SIG{how}"])
        batch.starts[-1].send_signal(signal.SIGTERM)  # a second one changes nothing
    assert batch.end() == 99, batch.errors()
    assert ("the time limit is" if how == "time limit" else f"SIG{how}") in batch.errors()
    assert batch.snapshots() == ["slurm-77"]
    (batch.folder / "go").touch()
    second = batch.start(stop_at=30)
    assert batch.end() == 0, batch.errors()
    assert "restored from" in batch.errors()
    lines = (first.read_text() + second.read_text()).splitlines()
    assert [line for line in lines if line.startswith("step")] == [f"step {step}" for step in range(60)]
    assert "SLURM_RESTART_COUNT=1" in lines, "the job can read the variables of its new place"
    assert batch.snapshots() == [], "a job that has ended well needs none"
    assert list((state_folder() / "batch").iterdir()) == []
    assert registry().jobs() == ()


def test_exit_code_and_leftovers(batch: Batch) -> None:
    batch.start("--every", "100ms", "--id", "mine", stop_at=30, code=7)
    wait_until(lambda: batch.errors().count("dumped to") >= 2, batch.errors)
    (batch.folder / "go").touch()
    assert batch.end() == 7, batch.errors()
    assert batch.snapshots() == ["mine"], "the last one alone"
    assert "the job ended with 7; the next start continues from the snapshot of" in batch.errors()
    batch.start("--id", "mine", steps=61)
    assert batch.end() == 2
    assert "is of another job" in batch.errors()
    assert "GPUCR-BATCH-OTHER-JOB" in batch.errors()
    assert batch.snapshots() == ["mine"]


def test_a_signal_that_ends_the_job_is_reported(batch: Batch) -> None:
    output = batch.start(stop_at=5)
    wait_for_line(output, "step 5")
    (job,) = registry().jobs()
    assert job.record is not None
    os.kill(job.record.pid, signal.SIGKILL)
    assert batch.end() == 128 + signal.SIGKILL


def test_without_a_writable_store_the_next_start_is_from_scratch(batch: Batch) -> None:
    """The grace time is used up; the job is ended, and the message says what it continues from."""
    output = batch.start("--grace", "1s", stop_at=5)
    wait_for_line(output, "step 5")
    for path in (*batch.store.iterdir(), batch.store):
        path.rename(path.with_name(f"{path.name}.away"))
    batch.starts[-1].send_signal(signal.SIGTERM)
    assert batch.end() == 99, batch.errors()
    assert "no dump: " in batch.errors()
    assert "there is no snapshot, and the next start is from scratch" in batch.errors()
    assert [job.state.word for job in registry().jobs()] == ["ended"]


def test_a_path_that_is_not_a_store_is_refused(batch: Batch) -> None:
    batch.store.mkdir()
    (batch.store / "something").touch()
    batch.start()
    assert batch.end() == 2
    assert "is not a store" in batch.errors()
    assert registry().jobs() == ()


def test_a_store_htcondor_transfers_away(batch: Batch) -> None:
    """After each dump the job ends with HTCondor's code, and the store holds that one snapshot alone."""
    scratch: dict[str, Any] = {"_CONDOR_SCRATCH_DIR": str(batch.folder)}
    checkpoints = ("--every", "100ms", "--checkpoint-exit", "85")
    for start in range(3):
        batch.start(*checkpoints, stop_at=30, **scratch)
        assert batch.end() == 85, batch.errors()
        told = "restored from" if start else "which only this place has: it can be restored in no other"
        assert told in batch.errors()
        assert batch.snapshots() == ["slurm-77"]
    report = command.run_json("prune", batch.store)
    assert (report["retired_packs"], report["waiting_packs"], report["deleted_packs"]) == (0, 0, 0)
    (batch.folder / "go").touch()
    batch.start("--every", "1h", "--checkpoint-exit", "85", stop_at=30, **scratch)
    assert batch.end() == 0, batch.errors()
    assert batch.steps() == [f"step {step}" for step in range(60)]
    assert [path for path in (batch.store / "packs").rglob("*") if path.is_file()] == []


def test_a_store_htcondor_did_not_bring(batch: Batch) -> None:
    """There was no snapshot when the job left its last allocation, so it starts over."""
    scratch: dict[str, Any] = {"_CONDOR_SCRATCH_DIR": str(batch.folder)}
    for code in (1, 0):
        batch.start(code=code, **scratch)
        assert batch.end() == code, batch.errors()
        shutil.rmtree(batch.store)


def test_a_code_for_checkpoints_needs_an_interval(batch: Batch) -> None:
    batch.start("--checkpoint-exit", "85")
    assert batch.end() == 2
    assert "--checkpoint-exit needs --every" in batch.errors()

"""What goes wrong around `gpucr batch`: a line in the job's log, the right exit code, the last snapshot kept."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gpucr
from gpucr.jobs.registered import registry
from gpucr.linux import processes
from gpucr.sim import build as simulator
from tests.batch.system import COUNTS, SUMS, Batch, wait_for_line
from tests.conftest import skip_or_fail
from tests.counter import processes_in, wait_until
from tests.ordinary_user import CannotHaveUsers, machine_with_helper
from tests.storm import later, sample

pytestmark = [pytest.mark.criu, pytest.mark.usefixtures("own_state")]

ALL = [f"step {step}" for step in range(60)]


def dumped_once(batch: Batch) -> None:
    """A job waiting at step 30, with a snapshot."""
    output = batch.start("--every", "200ms", stop_at=30)
    wait_for_line(output, "step 30")
    before = batch.errors().count("dumped to")
    wait_until(lambda: batch.errors().count("dumped to") >= before + 2, batch.errors)  # one of them began at step 30


def put_away(batch: Batch) -> Callable[[], Path]:
    """Make the store unreachable until the returned function is called."""
    away = batch.store.rename(batch.folder / "away")
    return lambda: away.rename(batch.store)


def test_a_store_the_next_node_cannot_reach(batch: Batch) -> None:
    dumped_once(batch)
    batch.starts[-1].send_signal(signal.SIGTERM)
    assert batch.end() == 99, batch.errors()
    bring_back = put_away(batch)
    batch.start(stop_at=30)
    assert batch.end() == 5, batch.errors()
    assert "this is not the first start of the job" in batch.errors()
    assert "GPUCR-BATCH-NO-STORE" in batch.errors()
    assert not batch.store.exists(), "a second store would hide the first one"
    bring_back()
    (batch.folder / "go").touch()
    batch.start(stop_at=30)
    assert batch.end() == 0, batch.errors()
    assert batch.steps() == ALL


def test_a_grace_time_that_is_too_short(batch: Batch) -> None:
    """The job has a snapshot, and continues from that."""
    output = batch.start("--every", "200ms", "--grace", "0.001s", stop_at=30)
    wait_for_line(output, "step 30")
    before = batch.errors().count("dumped to")
    wait_until(lambda: batch.errors().count("dumped to") >= before + 2, batch.errors)
    batch.starts[-1].send_signal(signal.SIGUSR1)
    assert batch.end() == 99, batch.errors()
    assert "the job could not be dumped in time, and is ended: the next start continues from the snapshot of" in (
        batch.errors()
    )
    assert processes_in(batch.folder) == []
    assert len(batch.snapshots()) == 1
    (batch.folder / "go").touch()
    batch.start(stop_at=30)
    assert batch.end() == 0, batch.errors()
    assert f"restored from {batch.store}#" in batch.errors()
    assert batch.steps() == ALL


@pytest.mark.parametrize("code", [later(0), 7])
def test_a_job_that_ends_during_the_grace_time(batch: Batch, code: int) -> None:
    """Its own exit code counts. A job that ends with 0 may have obeyed the signal instead of finishing."""
    output = batch.start("--every", "200ms", stop_at=30, code=code)
    wait_for_line(output, "step 30")
    wait_until(lambda: "dumped to" in batch.errors(), batch.errors)
    bring_back = put_away(batch)
    batch.starts[-1].send_signal(signal.SIGTERM)
    wait_until(lambda: "SIGTERM: the job is dumped" in batch.errors(), batch.errors)
    wait_until(lambda: "no dump: " in batch.errors().partition("SIGTERM")[2], batch.errors)
    (batch.folder / "go").touch()
    assert batch.end() == code, batch.errors()
    told = "the job ended with 0 after SIGTERM, and its snapshot stays" if code == 0 else "the job ended with 7; "
    assert told in batch.errors()
    bring_back()
    assert batch.snapshots() == ["slurm-77"]


def test_a_signal_that_ends_both_gpucr_and_the_job(batch: Batch) -> None:
    """Like `scontrol requeue` does."""
    dumped_once(batch)
    (job,) = registry().jobs()
    assert job.record is not None
    batch.starts[-1].send_signal(signal.SIGTERM)
    os.kill(job.record.pid, signal.SIGTERM)
    assert batch.end() == 99, batch.errors()
    assert batch.snapshots() == ["slurm-77"]
    (batch.folder / "go").touch()
    batch.start(stop_at=30)
    assert batch.end() == 0, batch.errors()
    assert batch.steps() == ALL


def test_a_signal_before_the_first_step(batch: Batch) -> None:
    """As soon as gpucr handles signals; the job may have started or not."""
    batch.start(stop_at=30)
    number = signal.SIGUSR1 - 1
    wait_until(lambda: bool(_caught_by(batch.starts[-1].pid) >> number & 1), "gpucr to listen")
    batch.starts[-1].send_signal(signal.SIGUSR1)
    assert batch.end() == 99, batch.errors()
    assert "has to be started again" in batch.errors() or batch.snapshots() == ["slurm-77"]
    assert processes_in(batch.folder) == []
    (batch.folder / "go").touch()
    batch.start(stop_at=30)
    assert batch.end() == 0, batch.errors()
    assert batch.steps() == ALL


def test_a_signal_while_slurm_is_queried_for_the_time_limit(batch: Batch) -> None:
    """A controller that is busy answers late."""
    squeue = batch.folder / "bin" / "squeue"
    squeue.parent.mkdir()
    squeue.write_text(f"#!/bin/sh\ntouch {batch.folder}/asked\nexec sleep 15\n")
    squeue.chmod(0o755)
    batch.start(PATH=f"{squeue.parent}:{os.environ['PATH']}")
    wait_until((batch.folder / "asked").exists, "squeue")
    batch.starts[-1].send_signal(signal.SIGTERM)
    assert batch.end() == 99, batch.errors()
    assert "it has to be started again" in batch.errors()
    assert registry().jobs() == ()


def test_a_signal_before_the_job_is_restored(batch: Batch) -> None:
    """The start undoes the restore so far, or dumps the job again: either way the job continues from there."""
    dumped_once(batch)
    batch.starts[-1].send_signal(signal.SIGTERM)
    assert batch.end() == 99, batch.errors()
    batch.start(stop_at=30)
    wait_until(lambda: bool(_caught_by(batch.starts[-1].pid) >> (signal.SIGUSR1 - 1) & 1), "gpucr to listen")
    batch.starts[-1].send_signal(signal.SIGTERM)
    assert batch.end() == 99, batch.errors()
    assert "SIGTERM came before the job ran: it has to be started again" in batch.errors() or (
        "SIGTERM: the job is dumped" in batch.errors()
    )
    assert processes_in(batch.folder) == []
    assert batch.snapshots() == ["slurm-77"]
    (batch.folder / "go").touch()
    batch.start(stop_at=30)
    assert batch.end() == 0, batch.errors()
    assert batch.steps() == ALL


def _caught_by(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next((int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")), 0)


def test_an_allocation_lost_while_the_dump_is_written(batch: Batch) -> None:
    """The whole job is killed at once, as Slurm does after its kill timeout."""
    dumped_once(batch)
    batch.starts[-1].send_signal(signal.SIGUSR1)
    wait_until(lambda: "SIGUSR1: the job is dumped" in batch.errors(), batch.errors)
    for process in reversed(processes.tree(batch.starts[-1].pid)):
        os.kill(process.pid, signal.SIGKILL)
    assert batch.end() == -signal.SIGKILL
    wait_until(lambda: processes_in(batch.folder) == [], "the job to end")
    assert "slurm-77" in batch.snapshots()
    (batch.folder / "go").touch()
    batch.start(stop_at=30)
    assert batch.end() == 0, batch.errors()
    assert batch.steps() == ALL


@pytest.mark.parametrize("moment", ["restored", later("first start"), later("while it is dumped")])
@pytest.mark.parametrize("isolate", ["--isolate", "--no-isolate"])
def test_a_killed_gpucr_takes_the_job_with_it(batch: Batch, isolate: str, moment: str) -> None:
    """Only gpucr is killed: a batch system that follows parents does not find the processes that it restored."""
    batch.start("--every", "200ms", isolate, stop_at=30)
    wait_until(lambda: batch.errors().count("dumped to") >= 2, batch.errors)
    if moment == "restored":
        batch.starts[-1].send_signal(signal.SIGUSR1)
        assert batch.end() == 99, batch.errors()
        batch.start(isolate, stop_at=30)
        wait_until(lambda: "restored from" in batch.errors(), batch.errors)
    elif moment == "while it is dumped":
        batch.starts[-1].send_signal(signal.SIGUSR1)
        wait_until(lambda: "SIGUSR1: the job is dumped" in batch.errors(), batch.errors)
    batch.starts[-1].kill()
    assert batch.end() == -signal.SIGKILL
    wait_until(lambda: processes_in(batch.folder) == [], "the job to end")
    assert "slurm-77" in batch.snapshots()
    (batch.folder / "go").touch()
    batch.start(isolate, stop_at=30)
    assert batch.end() == 0, batch.errors()
    assert "restored from" in batch.errors()
    assert batch.steps()[-30:] == ALL[30:]


@pytest.mark.root
def test_a_snapshot_of_another_user() -> None:
    """In a store that their group shares."""
    with contextlib.ExitStack() as opened:
        try:
            machines = [opened.enter_context(machine_with_helper()) for _ in range(2)]
        except CannotHaveUsers as e:
            skip_or_fail("root", f"the tests may not mount here: {e}")
        for each in machines:
            each.user.groups = (1,)
        first, second = (each.user for each in machines)
        place = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        place.chmod(0o755)
        gpucr.init_store(place / "store", shared_with_group="daemon")
        program = COUNTS.format(steps=60, stop_at=30, code=0)
        command = (
            "env", "SLURM_JOB_ID=77", "SLURM_RESTART_COUNT=1", sys.executable, "-m", "gpucr", "batch",
            "--to", str(place / "store"), "--", sys.executable, "-I", "-S", "-c", program,
        )  # fmt: skip
        pid = first.start(*command)
        wait_for_line(first.home / "out", "step 30")
        os.kill(pid, signal.SIGUSR1)
        wait_until(lambda: "dumped to" in (first.home / "out").read_text(), (first.home / "out").read_text)
        done = second.run(*command)
        assert done.returncode == 3, done.stderr
        assert f"the job ran as uid {first.uid}" in done.stderr
        assert done.stderr.endswith("code:  GPUCR-ONLY-ROOT\n")
        assert [each.name for each in gpucr.list_snapshots(place / "store").snapshots] == ["slurm-77"]


@pytest.mark.usefixtures("sim_only")
@pytest.mark.parametrize(
    ("node", "exit_code", "code"),
    sample(
        [
            ({"GPUCR_SIM_MODEL": "Another GPU"}, 3, "GPUCR-NO-GPU"),
            ({"GPUCR_SIM_GPUS": "1x1GiB"}, 3, "GPUCR-NO-GPU"),
            ({"LD_LIBRARY_PATH": ""}, 2, "GPUCR-BAD-GPU"),
            ({"GPUCR_CRIU": "/usr/sbin/no-criu"}, 4, "GPUCR-NO-CRIU"),
        ],
        3,
    ),
)
def test_a_node_that_cannot_restore_the_job(batch: Batch, node: dict[str, str], exit_code: int, code: str) -> None:
    """It says why, and the snapshot stays for one that can."""
    output = batch.start("--isolate", program=SUMS, GPUCR_SIM_GPUS="2x1GiB", CUDA_VISIBLE_DEVICES="0")
    wait_for_line(output, "step 9")
    batch.starts[-1].send_signal(signal.SIGUSR1)
    assert batch.end() == 99, batch.errors()
    variables: dict[str, Any] = {"GPUCR_SIM_GPUS": "2x1GiB", "CUDA_VISIBLE_DEVICES": "0", **node}
    batch.start(program=SUMS, **variables)
    assert batch.end() == exit_code, batch.errors()
    assert f"code:  {code}" in batch.errors()
    assert batch.snapshots() == ["slurm-77"]
    for step in range(9, 40, 10):
        (batch.folder / f"go-{step}").touch()
    batch.start(program=SUMS, GPUCR_SIM_GPUS="2x1GiB", CUDA_VISIBLE_DEVICES="0")
    assert batch.end() == 0, batch.errors()
    assert batch.steps() == ALL[:40]


@pytest.mark.usefixtures("sim_only")
def test_a_node_with_another_driver(batch: Batch) -> None:
    """The job has the driver's library mapped, whose name has the version in it: that file is missing."""
    here = Path(simulator.environment()["LD_LIBRARY_PATH"].partition(":")[0])
    driver = Path(shutil.copytree(here, batch.folder / "driver", symlinks=True))
    output = batch.start("--isolate", program=SUMS, LD_LIBRARY_PATH=str(driver))
    wait_for_line(output, "step 9")
    batch.starts[-1].send_signal(signal.SIGUSR1)
    assert batch.end() == 99, batch.errors()
    away = driver.rename(batch.folder / "away")
    batch.start(program=SUMS)
    assert batch.end() == 3, batch.errors()
    assert "libcuda" in batch.errors()
    assert batch.snapshots() == ["slurm-77"]
    away.rename(driver)
    for step in range(9, 40, 10):
        (batch.folder / f"go-{step}").touch()
    batch.start(program=SUMS)
    assert batch.end() == 0, batch.errors()
    assert batch.steps() == ALL[:40]

"""Jobs whose processes wait for each other on the GPU: frozen, restored, or left alone if that is impossible."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import gpucr
from gpucr.driver.cuda import CudaDriver
from gpucr.gang import Gang
from gpucr.linux.claims import claimed
from gpucr.model import CudaState, GangMember
from tests.children import identity
from tests.command import run_json, start
from tests.counter import wait_until
from tests.ranks import Ranks, RanksFactory
from tests.storm import later, sample

pytestmark = pytest.mark.in_turn

RUNNING, LOCKED, CHECKPOINTED = CudaState.RUNNING, CudaState.LOCKED, CudaState.CHECKPOINTED


def states(driver: CudaDriver, job: Ranks) -> set[CudaState | None]:
    return {driver.state(pid) for pid in job.ranks}


def lock(driver: CudaDriver, job: Ranks, limit_s: float = 60.0) -> Gang:
    gang = Gang(driver, job.members, deadline=time.monotonic() + limit_s)
    gang.lock()
    return gang


# --- it gets there ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "arguments"),
    sample(
        [
            pytest.param(2, (), id="2"),
            pytest.param(64, ("--step-us", "20000"), id="64"),
            pytest.param(8, (), id="8"),
            pytest.param(2, ("--queue", "1"), id="strict"),
            pytest.param(8, ("--queue", "1", "--step-us", "1000"), id="8 strict"),
            pytest.param(2, ("--queue", "1", "--step-us", "0"), id="no pause"),
            pytest.param(8, ("--queue", "8", "--step-us", "2000", "--skew-percent", "100"), id="8 far apart"),
            pytest.param(4, ("--gpu-us", "50000", "--skew-percent", "90"), id="4 busy"),
        ],
        3,
    ),
)
def test_all_are_locked_and_nothing_is_lost(
    ranks: RanksFactory, driver: CudaDriver, count: int, arguments: tuple[str, ...]
) -> None:
    job = ranks(count, *arguments)
    for _ in range(2):
        gang = lock(driver, job)
        assert states(driver, job) == {LOCKED}
        assert gang.first_lock is not None
        assert gang.first_lock.processes == count
        gang.unlock(down_to=lambda member: member.found)
        job.assert_goes_on()


def test_members_locked_or_checkpointed_before_stay_so(ranks: RanksFactory, driver: CudaDriver) -> None:
    job = ranks(4)
    lock(driver, job)
    driver.checkpoint(job.ranks[0])
    for pid in job.ranks[2:]:
        driver.unlock(pid)
    job.wait_standstill()  # the two that run have submitted what the two others hold up
    found = {pid: driver.state(pid) for pid in job.ranks}
    members = [GangMember(identity(pid), state) for pid, state in found.items() if state is not None]
    with pytest.raises(gpucr.DeadlineExceeded):
        Gang(driver, members, deadline=time.monotonic() + 0.3).lock()
    assert {pid: driver.state(pid) for pid in job.ranks} == found
    driver.restore(job.ranks[0])
    for pid in job.ranks[:2]:
        driver.unlock(pid)
    job.assert_goes_on()


def test_the_undo_of_a_resume_locks_them_in_the_same_way(ranks: RanksFactory, driver: CudaDriver) -> None:
    job = ranks(8)
    gang = Gang(driver, [GangMember(member.id, CHECKPOINTED) for member in job.members])
    gang.return_to_found()  # they run, as after an unlock that was cut off
    assert states(driver, job) == {CHECKPOINTED}
    gpucr.resume(job.pid)
    job.assert_goes_on()


def test_the_undo_of_a_partly_finished_resume(ranks: RanksFactory, driver: CudaDriver) -> None:
    job = ranks(4)
    gang = lock(driver, job)
    for pid in job.ranks[1:]:
        driver.unlock(pid)
    job.wait_standstill()  # they wait for the one that is locked
    Gang(driver, [GangMember(member.id, CHECKPOINTED) for member in job.members]).return_to_found()
    assert states(driver, job) == {CHECKPOINTED}
    gang.return_to_found()
    job.assert_goes_on()


@pytest.mark.parametrize("count", [2, 8])
def test_suspend_and_resume(ranks: RanksFactory, driver: CudaDriver, count: int) -> None:
    job = ranks(count, "--mib", "1", "--step-us", "2000")
    notes: list[str] = []
    report = gpucr.suspend(job.pid, on_progress=lambda p: notes.append(p.description) if p.event == "note" else None)
    assert states(driver, job) == {CHECKPOINTED}
    assert report.lock is not None
    assert report.lock.processes == count
    assert any("were locked in" in note for note in notes) == (report.lock.attempts > 1)
    gpucr.resume(job.pid)
    job.assert_goes_on(20)


def test_the_lock_is_in_the_json(ranks: RanksFactory) -> None:
    job = ranks(3)
    told = run_json("suspend", job.pid)["lock"]
    assert told["process_count"] == 3
    assert told["attempts"] >= 1
    assert told["seconds"] > 0
    assert run_json("resume", job.pid)["lock"] is None
    job.assert_goes_on()


@pytest.mark.criu
@pytest.mark.parametrize("count", [2, later(8)])
def test_dump_and_restore(ranks: RanksFactory, driver: CudaDriver, tmp_path: Path, count: int) -> None:
    job = ranks(count, "--mib", "1", "--step-us", "2000")
    report = gpucr.dump(job.pid, tmp_path / "s")
    assert report.lock is not None
    assert report.lock.processes == count
    job.reap()
    wait_until(lambda: not job.processes(), "the ranks to end")
    gpucr.restore(tmp_path / "s")
    assert states(driver, job) == {RUNNING}
    job.assert_goes_on(20)


@pytest.mark.criu
def test_dump_and_leave_running(ranks: RanksFactory, driver: CudaDriver, tmp_path: Path) -> None:
    job = ranks(4, "--mib", "1", "--step-us", "2000")
    gpucr.dump(job.pid, tmp_path / "s", leave_running=True)
    job.assert_goes_on(20)
    job.close()
    gpucr.restore(tmp_path / "s")
    assert states(driver, job) == {RUNNING}
    job.assert_goes_on(20)


# --- it does not: the job continues ---------------------------------------------------------------------------------


def test_a_stuck_job_is_left_running(ranks: RanksFactory, driver: CudaDriver) -> None:
    job = ranks(4)
    job.pause(1)
    job.wait_standstill()
    with pytest.raises(gpucr.DeadlineExceeded, match="only 1 of 4 CUDA processes could be locked in") as caught:
        gpucr.suspend(job.pid, timeout_s=1.0)
    assert isinstance(caught.value.__cause__, gpucr.LockTimeout)
    assert states(driver, job) == {RUNNING}
    job.go_on(1)
    job.assert_goes_on()


def test_without_a_deadline_it_is_a_lock_timeout(
    ranks: RanksFactory, driver: CudaDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpucr.gang.actions.DEFAULT_LOCK_TIMEOUT_S", 0.5)
    job = ranks(2)
    job.pause(0)
    job.wait_standstill()
    with pytest.raises(gpucr.LockTimeout, match="only 1 of 2 CUDA processes could be locked") as caught:
        Gang(driver, job.members).lock()
    assert caught.value.pid == job.ranks[1]
    assert states(driver, job) == {RUNNING}
    job.go_on(0)
    job.assert_goes_on()


def test_a_rank_dies_midway(ranks: RanksFactory, driver: CudaDriver) -> None:
    job = ranks(3)
    job.pause(0)
    job.wait_standstill()
    outcome: list[Exception] = []

    def suspend() -> None:
        try:
            gpucr.suspend(job.pid, timeout_s=30.0)
        except gpucr.GpucrError as error:
            outcome.append(error)

    suspending = threading.Thread(target=suspend)
    suspending.start()
    wait_until(lambda: driver.state(job.ranks[0]) is LOCKED, "the rank that is behind to be locked")
    os.kill(job.ranks[0], signal.SIGKILL)
    suspending.join()
    assert isinstance(outcome[0], gpucr.JobDamaged)
    (lost,) = outcome[0].failures
    assert re.fullmatch(rf"process {job.ranks[0]} \(.*\) (was ended by SIGKILL|ended, nobody can say how)", lost)
    assert {driver.state(pid) for pid in job.ranks[1:]} == {RUNNING}


def test_ctrl_c_midway(ranks: RanksFactory, driver: CudaDriver) -> None:
    job = ranks(3)
    job.pause(0)
    job.wait_standstill()
    with start("suspend", job.pid) as command:
        wait_until(lambda: driver.state(job.ranks[0]) is LOCKED, "the rank that is behind to be locked")
        command.send_signal(signal.SIGINT)
        _, said = command.communicate(timeout=60)
    assert command.returncode == 130, said
    assert states(driver, job) == {RUNNING}
    job.go_on(0)
    job.assert_goes_on()


LOCKER = "import sys, gpucr; gpucr.suspend(int(sys.argv[1]), timeout_s=300)"


def test_killed_with_some_locked_and_others_pending(ranks: RanksFactory, driver: CudaDriver) -> None:
    job = ranks(4)
    job.pause(2)
    job.wait_standstill()
    with subprocess.Popen([sys.executable, "-c", LOCKER, str(job.pid)]) as locker:
        wait_until(lambda: driver.state(job.ranks[2]) is LOCKED, "the rank that is behind to be locked")
        locker.kill()
    wait_until(lambda: not _is_claimed(job), "the guard to be done")
    assert states(driver, job) == {RUNNING}
    job.go_on(2)
    job.assert_goes_on()
    gpucr.suspend(job.pid)
    gpucr.resume(job.pid)
    job.assert_goes_on()


def _is_claimed(job: Ranks) -> bool:
    try:
        with claimed(job.processes()):
            return False
    except gpucr.Unsupported:
        return True

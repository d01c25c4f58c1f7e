"""A CRIU that gets nowhere is ended, and the job runs on: no wait is without end while a job stands still."""

from __future__ import annotations

import fcntl
import os
import signal
from pathlib import Path

import pytest

import gpucr
from gpucr.criu import engine, progress
from gpucr.criu.service import CriuService
from gpucr.diagnosis import preflight
from tests.counter import kill_at_once, wait_until
from tests.stepping import Job, StartJob

pytestmark = pytest.mark.criu

WAITS_FOR_EXEC = """
import os, threading
def start():
    "Until somebody opens the other end, this process waits in vfork(2), where nobody can stop it."
    opened = [(os.POSIX_SPAWN_OPEN, 0, "fifo", os.O_RDONLY, 0)]
    os.waitpid(os.posix_spawn("/bin/true", ["true"], {}, file_actions=opened), 0)
os.mkfifo("fifo")
done()
step()
start()
done("it continues")
step()
"""


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "STALL_LIMIT_S", 1.0)
    monkeypatch.setattr(progress, "LOOK_EVERY_S", 0.1)
    monkeypatch.setattr(engine, "_STALLED_UNDO_LIMIT_S", 0.5)


def waiting(start: StartJob) -> Job:
    """A program whose process cannot be stopped, as one in the state D."""
    job = start(WAITS_FOR_EXEC)
    (job.folder / "go-1").touch()
    wait_until(lambda: len(job.pids()) == 2, "the child in vfork")
    return job


def let_go(job: Job) -> None:
    os.close(os.open(job.folder / "fifo", os.O_WRONLY))
    job._turn = 1
    assert job.wait_done() == "it continues"


def test_a_dump_of_a_process_that_does_not_stop(start: StartJob, tmp_path: Path) -> None:
    job = waiting(start)
    with pytest.raises(gpucr.Unsupported, match="both of the job, share their memory") as caught:
        gpucr.dump(job.pid, tmp_path / "s")
    assert caught.value.code == "GPUCR-SHARED-OUTSIDE"
    with pytest.raises(gpucr.DeadlineExceeded, match="CRIU has done nothing for 1 s in the middle of a dump"):
        gpucr.dump(job.pid, tmp_path / "s", force=True)
    assert not (tmp_path / "s").exists()
    let_go(job)


def test_a_restore_that_waits_for_a_lock(start: StartJob, tmp_path: Path) -> None:
    job = start(
        "import fcntl\nf = open('lock', 'w')\nfcntl.flock(f, fcntl.LOCK_EX)\ndone()\nstep()\ndone('it continues')"
    )
    job.dump_and_end(tmp_path / "s")
    with (job.folder / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(gpucr.DeadlineExceeded, match="in the middle of a restore"):
            gpucr.restore(tmp_path / "s", force=True)
        wait_until(lambda: not job.pids(), "the half-restored job to be gone")
    gpucr.restore(tmp_path / "s")
    assert job.go_on() == "it continues"


def test_a_criu_that_cannot_be_killed_holds_the_job(
    start: StartJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It hangs in the kernel (state D), and is not waited for."""
    monkeypatch.setattr(engine, "_KILLED_LIMIT_S", 0.5)
    spared: dict[int, signal.Signals] = {}
    monkeypatch.setattr(CriuService, "signal", lambda self, number: spared.update({self.pid: number}))
    monkeypatch.setattr(CriuService, "refuse_writes", lambda _: None)
    job = waiting(start)
    monkeypatch.setattr(preflight, "require_no_blocking", lambda *_, **__: None)
    try:
        with pytest.raises(gpucr.JobDamaged, match="hangs in the kernel, cannot be ended, and holds the job"):
            gpucr.dump(job.pid, tmp_path / "s")
    finally:
        kill_at_once(spared)
        for pid in spared:
            os.waitpid(pid, 0)
    assert list(spared.values()) == [signal.SIGKILL]
    let_go(job)

"""gpucr is killed at every step of every operation: its guard brings the job back to how it was found."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

import gpucr
from gpucr.driver.cuda import CudaDriver
from gpucr.gpu_state.staging.attach import traced
from gpucr.linux import descriptors, processes
from gpucr.linux.claims import claimed
from gpucr.linux.descriptors import send_descriptor
from gpucr.linux.ptrace import TracedThread
from gpucr.linux.tmpfs import StagingFile
from gpucr.model import CudaState
from gpucr.operations.dump import plan_dump
from tests.command import python
from tests.counter import Counter, CounterFactory, wait_until
from tests.storm import later, sample

RUNNING, CHECKPOINTED = CudaState.RUNNING, CudaState.CHECKPOINTED

KILLER = """
import os, signal, sys, gpucr
event, phase, operation, *arguments = sys.argv[1:]
seen = []
def listen(progress):
    if (progress.event, progress.phase) == (event, phase):
        os.kill(os.getpid(), signal.SIGKILL)
options = {"keep": {"leave_running": True}, "move": {"gpu": "1"}}.get(operation, {})
operation = {"keep": "dump", "sync": "dump"}.get(operation, operation)
target = int(arguments[0]) if arguments[0].isdigit() else arguments[0]
getattr(gpucr, operation)(target, *arguments[1:], on_progress=listen, **options)
"""


def killed(event: str, phase: str, *command: object) -> None:
    """Run an operation in a process of its own, which is killed when the phase begins or ends."""
    done = python(KILLER, event, phase, *command)
    assert done.returncode == -signal.SIGKILL, done.stderr


def is_unharmed(job: Counter) -> bool:
    """No thread of it is stopped or traced."""
    for pid in job.processes():
        for tid in processes.threads(pid):
            stat = processes.read_stat(tid)
            if stat is None or stat.status in "tT" or processes.tracer_pid(tid):
                return False
    return True


def is_claimed(pids: list[int]) -> bool:
    """Whether a gpucr, or the guard of one, is at work on them."""
    try:
        with claimed(pids):
            return False
    except gpucr.Unsupported:
        return True


def assert_goes_on(job: Counter, driver: CudaDriver, pids: list[int], expected: int) -> None:
    assert job.ask() == expected  # waits until it runs
    wait_until(lambda: not is_claimed(pids), "the guard to be done")
    assert is_unharmed(job)
    assert job.processes() == pids
    assert {driver.state(pid) for pid in pids} == {RUNNING}
    assert job.send("verify") == "ok"


@pytest.mark.parametrize("event", [later("begin"), "end"])
@pytest.mark.parametrize("phase", ["lock", "checkpoint"])
def test_in_a_suspend(counter: CounterFactory, driver: CudaDriver, event: str, phase: str) -> None:
    job = counter("--mib", "4", "--fork", "1")
    pids = job.processes()
    killed(event, phase, "suspend", job.pid)
    assert_goes_on(job, driver, pids, 101)
    gpucr.suspend(job.pid)
    gpucr.resume(job.pid)
    assert_goes_on(job, driver, pids, 102)


@pytest.mark.parametrize(("event", "phase"), [later("begin", "restore"), ("end", "restore"), ("begin", "unlock")])
def test_in_a_resume(counter: CounterFactory, driver: CudaDriver, event: str, phase: str) -> None:
    job = counter("--mib", "4", "--fork", "1")
    pids = job.processes()
    gpucr.suspend(job.pid)
    killed(event, phase, "resume", job.pid)
    wait_until(lambda: not is_claimed(pids), "the guard to be done")
    assert {driver.state(pid) for pid in pids} == {CHECKPOINTED}
    gpucr.resume(job.pid)
    assert_goes_on(job, driver, pids, 101)


DUMP_PHASES = ["prepare", "allocate", "lock", "checkpoint", "detach", "stop", "dump"]
THAW_PHASES = ["hold", "attach", "restore", "unlock", "release", "save"]


KILLED_IN_THE_CALL = """
import os, signal, sys, gpucr
from gpucr.linux import descriptors
from gpucr.gpu_state.staging.capture import Capture
def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[1] == "watching":
    Capture._watch = die
else:
    descriptors._receive = die
getattr(gpucr, sys.argv[2])(int(sys.argv[3]), *sys.argv[4:])
"""


def _open(pid: int) -> dict[str, str]:
    return {entry.name: os.readlink(entry.path) for entry in os.scandir(f"/proc/{pid}/fd")}


def _staging_files(pid: int) -> list[str]:
    return [link for link in _open(pid).values() if "gpucr-staging" in link]


@pytest.mark.criu
@pytest.mark.parametrize(
    ("point", "operation"),
    [("watching", "dump"), ("sending", "suspend"), later("watching", "suspend"), later("sending", "dump")],
)
def test_with_the_staging_file_open_or_being_sent(
    counter: CounterFactory, driver: CudaDriver, tmp_path: Path, operation: str, point: str
) -> None:
    """It would keep that memory, and could never be dumped again."""
    job = counter("--mib", "4")
    pids, before = job.processes(), _open(job.pid)
    arguments = [point, operation, str(job.pid), *([str(tmp_path / "s")] if operation == "dump" else [])]
    done = python(KILLED_IN_THE_CALL, *arguments)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert_goes_on(job, driver, pids, 101)
    assert _open(job.pid).keys() == before.keys()
    gpucr.dump(job.pid, tmp_path / "t")
    job.reap()
    gpucr.restore(tmp_path / "t")
    assert_goes_on(job, driver, pids, 102)


@pytest.mark.criu
def test_a_staging_file_left_open_is_closed_by_the_next_dump(
    counter: CounterFactory, driver: CudaDriver, tmp_path: Path
) -> None:
    job = counter("--mib", "4")
    pids = job.processes()
    with traced(driver.restore_thread_id(job.pid)) as thread:
        file = StagingFile.create(1 << 20)
        send_descriptor(thread, file.fd)
        file.close()
    assert len(_staging_files(job.pid)) == 1
    gpucr.dump(job.pid, tmp_path / "s")
    job.reap()
    gpucr.restore(tmp_path / "s")
    assert_goes_on(job, driver, pids, 101)
    assert _staging_files(job.pid) == []


@pytest.mark.criu
@pytest.mark.parametrize("suspended", [False, True])
def test_a_socket_left_open_is_closed_by_the_next_dump(
    counter: CounterFactory, driver: CudaDriver, tmp_path: Path, suspended: bool
) -> None:
    """Also in a process that was suspended before, whose staging nobody captures."""
    job = counter("--mib", "4")
    pids = job.processes()
    if suspended:
        gpucr.suspend(job.pid)
    before = _open(job.pid)
    sender = os.fork()
    if sender == 0:
        descriptors._receive = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
        send_descriptor(TracedThread.seize(job.pid), StagingFile.create(1 << 20).fd)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(sender, 0)[1]) == -signal.SIGKILL
    assert len(_open(job.pid)) == len(before) + 1
    gpucr.dump(job.pid, tmp_path / "s", leave_running=True)
    assert _open(job.pid).keys() == before.keys()
    if suspended:
        gpucr.resume(job.pid)
    assert_goes_on(job, driver, pids, 101)


@pytest.mark.criu
def test_the_phases_of_a_dump(counter: CounterFactory, tmp_path: Path) -> None:
    job = counter()
    report = gpucr.dump(job.pid, tmp_path / "s", leave_running=True)
    assert [phase.name for phase in report.phases] == [*DUMP_PHASES, *THAW_PHASES]
    assert len(plan_dump(job.pid, tmp_path / "t").steps) == len(DUMP_PHASES)


@pytest.mark.criu
@pytest.mark.parametrize("phase", sample(DUMP_PHASES, 5))
def test_in_a_dump(counter: CounterFactory, driver: CudaDriver, tmp_path: Path, phase: str) -> None:
    job = counter("--mib", "4", "--fork", "1")
    pids = job.processes()
    killed("begin", phase, "dump", job.pid, tmp_path / "s")
    assert_goes_on(job, driver, pids, 101)
    wait_until(lambda: not (tmp_path / "s").exists(), "the unfinished snapshot to be removed")
    gpucr.dump(job.pid, tmp_path / "s")
    job.reap()
    gpucr.restore(tmp_path / "s")
    assert_goes_on(job, driver, pids, 102)


@pytest.mark.criu
@pytest.mark.parametrize("phase", sample([*DUMP_PHASES[3:], *THAW_PHASES], 8))
def test_in_a_dump_that_leaves_the_job_running(
    counter: CounterFactory, driver: CudaDriver, tmp_path: Path, phase: str
) -> None:
    job = counter("--mib", "4", "--fork", "1")
    pids = job.processes()
    killed("begin" if phase != "dump" else "end", phase, "keep", job.pid, tmp_path / "s")
    assert_goes_on(job, driver, pids, 101)
    wait_until(lambda: not (tmp_path / "s").exists(), "the unfinished snapshot to be removed")


RESTORE_PHASES = ["load", "verify", "keeper", "criu", "hold", "restore", "unlock", "release", "keep"]


@pytest.mark.criu
@pytest.mark.parametrize("phase", sample(RESTORE_PHASES, 9))
def test_in_a_restore(counter: CounterFactory, driver: CudaDriver, tmp_path: Path, phase: str) -> None:
    job = counter("--mib", "4", "--fork", "1")
    pids = job.processes()
    gpucr.dump(job.pid, tmp_path / "s")
    job.reap()
    killed("begin", phase, "restore", tmp_path / "s")
    wait_until(lambda: not job.processes(), "the half-restored processes to be ended")
    gpucr.restore(tmp_path / "s")
    assert_goes_on(job, driver, pids, 101)

"""Few descriptors: at every limit the exit code is true, and operations raise only their own errors."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import gpucr
from gpucr.driver.cuda import CudaDriver
from gpucr.gpu_state import steps
from gpucr.linux import descriptor_limit, processes
from gpucr.linux.descriptor_limit import Reserve
from gpucr.model import CudaState
from gpucr.undo.guard import Guard
from tests import command
from tests.counter import Counter, CounterFactory, wait_until
from tests.scenarios.test_killed import is_claimed
from tests.stepping import StartJob
from tests.storm import later, sample

pytestmark = pytest.mark.in_turn

RUNNING, CHECKPOINTED = CudaState.RUNNING, CudaState.CHECKPOINTED
_PLENTY = [*range(4, 20, 2), *range(21, 80, 7), *range(80, 200, 40)]


def run_with_limit(limit: int, *arguments: object) -> subprocess.CompletedProcess[str]:
    """`gpucr` with so few descriptors, soft and hard, and nobody to raise them."""
    limited = ["prlimit", f"--nofile={limit}:{limit}", *command.command(*arguments)]
    return subprocess.run(limited, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False)


def _python_starts(limit: int) -> bool:
    started = ["prlimit", f"--nofile={limit}:{limit}", sys.executable, "-c", "import traceback, click"]
    return subprocess.run(started, capture_output=True, check=False).returncode == 0


@pytest.fixture(scope="module")
def limits() -> list[int]:
    """From the lowest with which Python itself starts to what is plenty for the job of these tests."""
    lowest = next(limit for limit in _PLENTY if _python_starts(limit))
    return sample([limit for limit in _PLENTY if limit >= lowest], 5)


def states(driver: CudaDriver, job: Counter) -> set[CudaState | None]:
    return {driver.state(pid) for pid in job.processes()}


def test_suspend_and_resume_at_every_limit(counter: CounterFactory, driver: CudaDriver, limits: list[int]) -> None:
    job = counter("--mib", "1", "--fork", "3")
    done = {"suspend": 0, "resume": 0}
    for limit in limits:
        for action, before, after in (("suspend", RUNNING, CHECKPOINTED), ("resume", CHECKPOINTED, RUNNING)):
            if states(driver, job) != {before}:
                continue  # it was not suspended at this limit
            ended = run_with_limit(limit, action, job.pid)
            assert "Traceback" not in ended.stderr, f"{action}, limit {limit}: {ended.stderr}"
            assert ended.returncode in (0, 1, 3, 4), f"{action}, limit {limit}: {ended.stderr}"
            expected = after if ended.returncode == 0 else before
            assert states(driver, job) == {expected}, f"{action}, limit {limit}: {ended.returncode} {ended.stderr}"
            done[action] += ended.returncode == 0
        if states(driver, job) == {CHECKPOINTED}:
            gpucr.resume(job.pid)
    assert done["suspend"]
    assert done["resume"]
    assert job.send("verify") == "ok"


@pytest.mark.criu
@pytest.mark.parametrize("is_store", [False, later(True)], ids=["folder", "store"])
def test_dump_at_every_limit(
    counter: CounterFactory, driver: CudaDriver, tmp_path: Path, limits: list[int], *, is_store: bool
) -> None:
    job = counter("--mib", "1", "--fork", "1")
    store = tmp_path / "store"
    gpucr.init_store(store)
    done = 0
    for limit in limits[::2]:
        to = f"{store}#at-{limit}" if is_store else tmp_path / f"at-{limit}"
        ended = run_with_limit(limit, "dump", job.pid, "--to", to, "--leave-running")
        assert "Traceback" not in ended.stderr, f"limit {limit}: {ended.stderr}"
        assert ended.returncode in (0, 1, 3, 4, 5), f"limit {limit}: {ended.stderr}"
        assert states(driver, job) == {RUNNING}, f"limit {limit}: {ended.returncode} {ended.stderr}"
        done += ended.returncode == 0
    assert done
    assert job.send("verify") == "ok"


@pytest.mark.criu
def test_restore_at_every_limit(counter: CounterFactory, driver: CudaDriver, tmp_path: Path, limits: list[int]) -> None:
    job = counter("--mib", "1", "--fork", "1")
    gpucr.dump(job.pid, tmp_path / "s")
    job.reap()
    said: list[str] = []
    for limit in sorted({*limits[::2], limits[-1]}):
        ended = run_with_limit(limit, "restore", tmp_path / "s")
        assert "Traceback" not in ended.stderr, f"limit {limit}: {ended.stderr}"
        if ended.returncode == 0:
            break
        said.append(f"limit {limit}: {ended.stderr}")
        wait_until(lambda: not job.processes(), f"nothing to be left of a restore at the limit {limit}")
    else:
        pytest.fail("\n".join(said))
    assert states(driver, job) == {RUNNING}
    assert job.send("verify") == "ok"


def test_the_refusal_says_what_to_do(counter: CounterFactory) -> None:
    job = counter("--mib", "1", "--fork", "3")
    ended = run_with_limit(24, "suspend", job.pid, "--json")
    assert ended.returncode == 3
    assert json.loads(ended.stdout)["code"] == "GPUCR-OPEN-FILES"
    assert "ulimit -Hn" in ended.stderr


def test_the_soft_limit_is_raised_for_the_operation_only(counter: CounterFactory) -> None:
    job = counter("--mib", "1")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    hard = before[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
    seen: set[int] = set()
    try:
        gpucr.suspend(job.pid, on_progress=lambda _: seen.add(resource.getrlimit(resource.RLIMIT_NOFILE)[0]))
        after = resource.getrlimit(resource.RLIMIT_NOFILE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert seen == {min(hard, 1 << 16)}
    assert after == (200, hard)
    gpucr.resume(job.pid)


def test_two_concurrent_operations_leave_the_limit_unchanged() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    first, second = descriptor_limit.raised(), descriptor_limit.raised()
    with first:
        second.__enter__()
        assert descriptor_limit.of_others() == before[0]
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= before[0]
    assert descriptor_limit.of_others() == before[0]
    second.__exit__(None, None, None)
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == before


def test_a_failed_reserve_holds_no_descriptors() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = len(processes.open_files(os.getpid()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (count + 20, before[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            Reserve(1000)
        reserve = Reserve(10)
        reserve.release()
        reserve.release()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert len(processes.open_files(os.getpid())) == count


OWN_LIMIT = """
import resource
done(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
while True:
    step()
    done(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


@pytest.mark.criu
@pytest.mark.parametrize("kind", ["start", "start_sandboxed"])
def test_a_restored_job_keeps_its_limit(request: pytest.FixtureRequest, tmp_path: Path, kind: str) -> None:
    start_job: StartJob = request.getfixturevalue(kind)
    job = start_job(OWN_LIMIT)
    own = int(job.go_on())
    job.dump_and_end(tmp_path / "snapshot")
    gpucr.restore(tmp_path / "snapshot")
    assert int(job.go_on()) == own


RUN_DURING_AN_OPERATION = """
import sys
from gpucr import run_job
from gpucr.linux import descriptor_limit
with descriptor_limit.raised():
    print(run_job([sys.executable, "-c", "import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"],
                  log=sys.argv[1]).record.name)
"""


def test_a_started_job_gets_the_callers_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    log = tmp_path / "log"
    started = ["prlimit", "--nofile=300:2000", sys.executable, "-c", RUN_DURING_AN_OPERATION, str(log)]
    subprocess.run(started, check=True, capture_output=True, timeout=60)
    wait_until(lambda: log.exists() and log.read_text().endswith("\n"), "the job to print its limit")
    assert log.read_text() == "300\n"


# --- an undo that fails ----------------------------------------------------------------------------------------


def _fail(*_: object) -> None:
    raise gpucr.GpucrError("out of everything")


def test_the_guard_does_the_undo_the_operation_cannot(
    counter: CounterFactory, driver: CudaDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And then the job is as it was found, so that the exit code is that of the failure."""
    job = counter("--mib", "1", "--fork", "1")
    monkeypatch.setattr(steps.CheckpointGang, "_late_members", _fail)
    monkeypatch.setattr(steps.CheckpointGang, "undo", _fail)
    monkeypatch.setattr(steps.LockGang, "undo", _fail)
    with pytest.raises(gpucr.GpucrError, match=r"^out of everything$") as caught:
        gpucr.suspend(job.pid)
    assert caught.value.exit_code == 1
    assert states(driver, job) == {RUNNING}
    assert job.send("verify") == "ok"


LET_THE_GUARD_FAIL = """
import os, sys, gpucr
from gpucr.gpu_state import steps
from gpucr.undo import guard
def fail(*_):
    raise gpucr.GpucrError("out of everything")
steps.CheckpointGang._late_members = steps.CheckpointGang.undo = steps.LockGang.undo = fail
guard.Guard.recover.__defaults__ = (0.0,)
try:
    gpucr.suspend(int(sys.argv[1]))
except gpucr.JobDamaged as error:
    sys.exit(error.exit_code)
"""


def test_a_needed_guard_is_not_dismissed(counter: CounterFactory, driver: CudaDriver) -> None:
    job = counter("--mib", "1", "--fork", "1")
    pids = job.processes()
    ended = subprocess.run([sys.executable, "-c", LET_THE_GUARD_FAIL, str(job.pid)], check=False, timeout=60)
    assert ended.returncode == 10
    wait_until(lambda: not is_claimed(pids), "the guard to be done")
    assert states(driver, job) == {RUNNING}
    assert job.send("verify") == "ok"


def test_a_guard_without_a_reserve_refuses(tmp_path: Path) -> None:
    guard = Guard()
    try:
        guard.wait_ready()
        subprocess.run(["prlimit", f"--pid={guard.pid}", "--nofile=16:16"], check=True)
        with (tmp_path / "f").open("wb") as file, pytest.raises(gpucr.BrokenInstall, match=r"took only 0 of 4"):
            guard.hold([file.fileno()] * 4)
    finally:
        guard.dismiss()

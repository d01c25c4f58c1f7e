"""A job named by several trees, or by its cgroup, is one gang."""

from __future__ import annotations

import contextlib
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import gpucr
from gpucr import JobSelector
from gpucr.driver.cuda import CudaDriver
from gpucr.model import CudaState
from tests import command
from tests.children import sleeper
from tests.counter import Counter, CounterFactory, wait_until
from tests.memory_cgroup import limited
from tests.ranks import RanksFactory

RUNNING, LOCKED, CHECKPOINTED = CudaState.RUNNING, CudaState.LOCKED, CudaState.CHECKPOINTED

KILLED = """
import os, signal, sys, gpucr
def die(progress):
    if progress.phase == "checkpoint" and progress.event == sys.argv[1]:
        os.kill(os.getpid(), signal.SIGKILL)
gpucr.suspend(gpucr.JobSelector(*map(int, sys.argv[2:])), force=True, on_progress=die)
"""


def states(driver: CudaDriver, *jobs: Counter) -> set[CudaState | None]:
    return {driver.state(pid) for job in jobs for pid in job.processes()}


def test_ranks_that_wait_for_each_other_without_a_common_root(ranks: RanksFactory, driver: CudaDriver) -> None:
    """One by one they could not be locked: each waits for the others on the GPU."""
    job = ranks(4, "--queue", "1")
    done = command.run("suspend", *job.ranks, "--as-one")
    assert done.returncode == 0, done.stderr
    assert {driver.state(pid) for pid in job.ranks} == {CHECKPOINTED}
    assert len(gpucr.job_states(JobSelector(*job.ranks))) == 4
    report = gpucr.resume(JobSelector(*job.ranks))
    assert report.pid == job.ranks[0]
    assert [each.pid for each in report.processes] == list(job.ranks)
    job.assert_goes_on()


def test_a_failure_in_one_tree_is_undone_in_all(
    counter: CounterFactory, driver: CudaDriver, sim_environment: Callable[..., dict[str, str]]
) -> None:
    good, bad = counter("--fork", "1"), counter(env=sim_environment(faults="checkpoint=999"))
    with pytest.raises(gpucr.DriverError):
        gpucr.suspend(JobSelector(good.pid, bad.pid), force=True)  # they are on one GPU, and might share memory
    assert states(driver, good, bad) == {RUNNING}
    assert (good.ask(), bad.ask()) == (101, 101)


@pytest.mark.parametrize("event", ["begin", "end"])
def test_the_guard_brings_all_trees_back(counter: CounterFactory, driver: CudaDriver, event: str) -> None:
    jobs = [counter("--mib", "8"), counter("--mib", "8", "--fork", "1")]
    pids = [job.pid for job in jobs]
    done = subprocess.run([sys.executable, "-c", KILLED, event, *map(str, pids)], timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    assert [job.ask() for job in jobs] == [101, 101]
    wait_until(lambda: states(driver, *jobs) == {RUNNING}, "the guard to bring them back")


def test_nested_trees_are_one_tree(counter: CounterFactory, tmp_path: Path) -> None:
    job = counter("--fork", "1")
    child = next(pid for pid in job.processes() if pid != job.pid)
    assert gpucr.plan_dump(JobSelector(child, job.pid), tmp_path / "s").pid == job.pid
    assert len(gpucr.job_states(JobSelector(job.pid, child))) == 2


def test_several_users_are_not_one_job(counter: CounterFactory) -> None:
    mine = counter()
    several = pytest.raises(gpucr.InvalidRequest, match="users 5, 65534")
    with _of_user(65534) as pid, _of_user(5) as other, several as caught:
        gpucr.suspend(JobSelector(mine.pid, pid, other))
    assert caught.value.code == "GPUCR-NOT-ONE-JOB"


@contextlib.contextmanager
def _of_user(uid: int) -> Iterator[int]:
    with subprocess.Popen(["sleep", "1000"], user=uid) as child:
        try:
            yield child.pid
        finally:
            child.kill()


# --- cgroups -------------------------------------------------------------------------------------------------------


@pytest.fixture
def cgroup() -> Iterator[Path]:
    with limited(1 << 34) as (folder, _):
        yield folder


def _move(pid: int, folder: Path) -> None:
    (folder / "cgroup.procs").write_text(str(pid))


def test_a_cgroup_is_a_job(counter: CounterFactory, driver: CudaDriver, cgroup: Path, tmp_path: Path) -> None:
    """As with a batch system, whose processes are in the cgroup and in others below it."""
    below = cgroup / f"task-{secrets.token_hex(4)}"
    below.mkdir()
    first, second, outside = counter(), counter("--fork", "1"), counter()
    try:
        _move(first.pid, cgroup)
        _move(second.pid, below)  # its child stays outside, and belongs to it
        done = command.run("suspend", "--cgroup", cgroup, "--force")  # they are on one GPU
        assert done.returncode == 0, done.stderr
        assert states(driver, first, second) == {CHECKPOINTED}
        assert states(driver, outside) == {RUNNING}
        gpucr.resume(JobSelector(cgroup=cgroup))
        assert (first.ask(), second.ask()) == (101, 101)
        plan = gpucr.plan_dump(JobSelector(cgroup=cgroup), tmp_path / "s", force=True)
        assert any("3 processes in 2 trees" in step for step in plan.steps)
    finally:
        for job in (first, second):
            job.kill()
        wait_until(lambda: not (below / "cgroup.procs").read_text(), "the cgroup to be empty")
        below.rmdir()


@pytest.mark.criu
def test_a_cgroup_with_one_tree_is_dumped(cgroup: Path, counter: CounterFactory, tmp_path: Path) -> None:
    job = counter()
    _move(job.pid, cgroup)
    done = command.run("dump", "--cgroup", cgroup, "--to", tmp_path / "s")
    assert done.returncode == 0, done.stderr
    job.reap()
    assert gpucr.restore(tmp_path / "s").pid == job.pid
    assert job.ask() == 101


def test_a_path_that_is_not_a_cgroup_is_refused(cgroup: Path, tmp_path: Path) -> None:
    with sleeper() as child:
        (tmp_path / "cgroup.procs").write_text(str(child.pid))  # anybody can write such a file
        for folder, why in (
            (tmp_path, "not the folder of a cgroup"),
            (tmp_path / "none", "No such file"),
            (cgroup, "no process runs in the cgroup"),
        ):
            with pytest.raises(gpucr.InvalidRequest, match=why) as caught:
                gpucr.job_states(JobSelector(cgroup=folder))
            assert "/sys/fs/cgroup" in str(caught.value.hint)


# --- how it is written ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("state", "100", "200"), "with --as-one only"),
        (("suspend", "100", "--cgroup", "/sys/fs/cgroup/x"), "name a job in one way"),
        (("resume", "--cgroup", "/sys/fs/cgroup/x", "--container", "x"), "name a job in one way"),
        (("state", "100", "--runtime-root", "/x"), "go with --container"),
        (("state",), "name a job: PID or NAME, or --cgroup"),
        (("dump", "--container", "x", "--cgroup", "/y", "--to", "/z"), "cannot be combined with --container"),
    ],
)
def test_a_job_is_named_in_one_way(arguments: tuple[str, ...], why: str) -> None:
    done = command.run(*arguments)
    assert done.returncode == 2
    assert why in done.stderr


def test_a_selector_must_not_be_empty() -> None:
    for trees, cgroup in (((), None), ((1,), "/x")):
        with pytest.raises(gpucr.InvalidRequest, match="by its trees, or by its cgroup"):
            JobSelector(*trees, cgroup=cgroup)
    assert JobSelector(7, "name") == JobSelector(7, "name") != JobSelector("name", 7)


def test_only_takes_a_single_process(counter: CounterFactory) -> None:
    jobs = [counter(), counter()]
    with pytest.raises(gpucr.InvalidRequest, match="--only is for one process"):
        gpucr.suspend(JobSelector(*(job.pid for job in jobs)), only=True)

"""Suspend and resume of whole jobs, and the state after failures."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import gpucr
from gpucr.driver.cuda import CudaDriver
from gpucr.driver.gpus import gpu_processes
from gpucr.jobs.selection import find_job
from gpucr.linux import processes
from gpucr.model import CudaState
from tests import command
from tests.children import sleeper
from tests.counter import Counter, CounterFactory, out_of_time, wait_until
from tests.storm import later

RUNNING, LOCKED, CHECKPOINTED = CudaState.RUNNING, CudaState.LOCKED, CudaState.CHECKPOINTED


def states(driver: CudaDriver, counter: Counter) -> set[CudaState | None]:
    return {driver.state(pid) for pid in counter.processes()}


@pytest.mark.by_user
def test_suspend_frees_the_gpu_and_resume_continues(counter: CounterFactory, driver: CudaDriver) -> None:
    job = counter("--mib", "32")
    assert job.ask() == 101
    report = gpucr.suspend(job.pid)
    assert driver.state(job.pid) is CHECKPOINTED
    assert [(p.found, p.now) for p in report.processes] == [(RUNNING, CHECKPOINTED)]
    assert report.size_bytes >= 32 << 20
    assert job.pid not in {use.pid for use in gpu_processes()}
    report = gpucr.resume(job.pid)
    assert [(p.found, p.now) for p in report.processes] == [(CHECKPOINTED, RUNNING)]
    assert job.ask() == 102
    assert job.send("verify") == "ok"


@pytest.mark.by_user
def test_a_pid_stands_for_its_whole_tree(counter: CounterFactory, driver: CudaDriver) -> None:
    job = counter("--fork", "2")
    pids = job.processes()
    assert len(pids) == 3
    report = gpucr.suspend(job.pid)
    assert {p.pid for p in report.processes} == set(pids)
    assert states(driver, job) == {CHECKPOINTED}
    gpucr.resume(job.pid)
    assert states(driver, job) == {RUNNING}
    assert job.ask() == 101


def test_a_process_of_the_tree_ends_during_discovery(
    counter: CounterFactory, driver: CudaDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = counter("--mib", "1")
    with sleeper() as gone:
        ended = processes.describe(gone.pid)
    tree = processes.tree
    monkeypatch.setattr(processes, "tree", lambda pid: (*tree(pid), ended))
    assert find_job(job.pid).job.pids == (job.pid,)


def test_only_leaves_the_descendants_alone(counter: CounterFactory, driver: CudaDriver) -> None:
    job = counter("--fork", "1")
    gpucr.suspend(job.pid, only=True)
    child = next(pid for pid in job.processes() if pid != job.pid)
    assert driver.state(job.pid) is CHECKPOINTED
    assert driver.state(child) is RUNNING
    gpucr.resume(job.pid, only=True)
    assert driver.state(job.pid) is RUNNING


@pytest.mark.by_user
def test_suspending_twice_changes_nothing(counter: CounterFactory, driver: CudaDriver) -> None:
    job = counter()
    gpucr.suspend(job.pid)
    said: list[str] = []
    report = gpucr.suspend(job.pid, on_progress=lambda progress: said.append(progress.description))
    assert [(p.found, p.now) for p in report.processes] == [(CHECKPOINTED, CHECKPOINTED)]
    assert not [each for each in said if str(job.pid) in each], "it does not say that it does anything"
    gpucr.resume(job.pid)
    assert job.ask() == 101


@pytest.mark.parametrize("found", [LOCKED, CHECKPOINTED])
def test_a_checkpointed_state_is_restored_and_a_lock_is_not(
    counter: CounterFactory, driver: CudaDriver, found: CudaState
) -> None:
    job = counter("--fork", "1")
    child = next(pid for pid in job.processes() if pid != job.pid)
    driver.lock(child, 5000)
    if found is CHECKPOINTED:
        driver.checkpoint(child)
    report = gpucr.suspend(job.pid)
    assert states(driver, job) == {CHECKPOINTED}
    said = [each for each in report.warnings if f"process {child} is locked" in each]
    assert all(f"gpucr resume {job.pid}" in each for each in said)
    assert len(said) == (found is LOCKED)
    gpucr.resume(job.pid)
    assert driver.state(job.pid) is RUNNING
    assert driver.state(child) is (RUNNING if found is LOCKED else found)
    gpucr.resume(job.pid)
    assert states(driver, job) == {RUNNING}


def test_pending_work_causes_a_timeout_and_the_job_keeps_running(counter: CounterFactory, driver: CudaDriver) -> None:
    job = counter("--fork", "1")

    def suspend(timeout_s: float) -> None:
        job.send(f"busy {3000 + timeout_s * 1000:.0f}")
        gpucr.suspend(job.pid, timeout_s=timeout_s)

    out_of_time(suspend, f"process {job.pid} still had GPU work pending", (0.3, 2, 8))
    assert states(driver, job) == {RUNNING}
    assert job.ask() == 101


@pytest.mark.by_user
def test_managed_memory_is_refused_by_the_driver_and_undone(counter: CounterFactory, driver: CudaDriver) -> None:
    job = counter("--managed")
    with pytest.raises(gpucr.NotSupportedByDriver) as failure:
        gpucr.suspend(job.pid)
    assert failure.value.result == 801
    assert failure.value.hint is not None
    assert "managed" in failure.value.hint
    assert driver.state(job.pid) is RUNNING
    assert job.ask() == 101


@pytest.mark.by_user
@pytest.mark.parametrize("action", ["lock", "checkpoint"])
def test_one_failing_process_undoes_all(
    sim_only: None, counter: CounterFactory, driver: CudaDriver, monkeypatch: pytest.MonkeyPatch, action: str
) -> None:
    job = counter("--fork", "2")
    failing = job.processes()[1]
    monkeypatch.setenv("GPUCR_SIM_CALLER_FAULTS", f"{action}@{failing}=999")
    with pytest.raises(gpucr.DriverError) as failure:
        gpucr.suspend(job.pid)
    assert (failure.value.pid, failure.value.action, failure.value.result) == (failing, action, 999)
    assert states(driver, job) == {RUNNING}
    assert job.ask() == 101


@pytest.mark.parametrize(("action", "slow"), [later("restore", None), ("unlock", None), ("unlock", "lock=delay:50")])
def test_a_failed_resume_leaves_the_job_suspended(
    sim_only: None,
    counter: CounterFactory,
    driver: CudaDriver,
    monkeypatch: pytest.MonkeyPatch,
    sim_environment: Callable[..., dict[str, str]],
    action: str,
    slow: str | None,
) -> None:
    """Even if those that ran again cannot be locked at once: one that could not be unlocked does not take part."""
    job = counter("--fork", "2", env=sim_environment(faults=slow) if slow else None)
    gpucr.suspend(job.pid)
    monkeypatch.setenv("GPUCR_SIM_CALLER_FAULTS", f"{action}@{job.processes()[1]}=999")
    with pytest.raises(gpucr.DriverError, match="999"):
        gpucr.resume(job.pid)
    assert states(driver, job) == {CHECKPOINTED}
    monkeypatch.delenv("GPUCR_SIM_CALLER_FAULTS")
    gpucr.resume(job.pid)
    assert job.ask() == 101


@pytest.mark.by_user
@pytest.mark.parametrize("action", ["lock", "checkpoint"])
def test_a_process_that_dies_midway_is_named(
    sim_only: None, counter: CounterFactory, action: str, sim_environment: Callable[..., dict[str, str]]
) -> None:
    job = counter(env=sim_environment(faults=f"{action}=die"))
    with pytest.raises(gpucr.JobDamaged, match=f"process {job.pid} ended during the {action}") as failure:
        gpucr.suspend(job.pid)
    (lost,) = failure.value.failures
    assert lost.startswith(f"process {job.pid} (")


def test_a_process_that_starts_cuda_meanwhile_is_included(
    counter: CounterFactory, driver: CudaDriver, sim_environment: Callable[..., dict[str, str]], tmp_path: Path
) -> None:
    start = tmp_path / "start"
    job = counter("--fork", "1", "--cuda-after", str(start), env=sim_environment(faults="checkpoint#1=delay:700"))
    # Only the process that is asked first after the file appeared begins with CUDA: the root.
    start.touch()
    wait_until(lambda: job.ask() > 0 and driver.state(job.pid) is RUNNING, "the root to use CUDA")
    start.unlink()
    late = threading.Thread(target=_touch_when_locked, args=(driver, job, start))
    late.start()
    report = gpucr.suspend(job.pid)
    late.join()
    assert {p.pid for p in report.processes} == set(job.processes())
    assert states(driver, job) == {CHECKPOINTED}
    gpucr.resume(job.pid)
    assert states(driver, job) == {RUNNING}


def _touch_when_locked(driver: CudaDriver, job: Counter, file: Path) -> None:
    wait_until(lambda: driver.state(job.pid) is LOCKED, "the root to be locked")
    file.touch()


def test_a_resume_without_room_is_refused_beforehand(
    counter: CounterFactory,
    driver: CudaDriver,
    sim_environment: Callable[..., dict[str, str]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    # A machine of its own: a job in a pid namespace that was killed counts until somebody can tell that it has ended.
    environment = sim_environment("1x512MiB", state_dir=tmp_path / "machine")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    job = counter("--mib", "256")
    gpucr.suspend(job.pid)
    other = counter("--mib", "256")
    with pytest.raises(gpucr.Unsupported, match="are missing; running out would lose the job"):
        gpucr.resume(job.pid)
    assert driver.state(job.pid) is CHECKPOINTED
    other.kill()
    gpucr.resume(job.pid)
    assert job.ask() == 101


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_midway_undoes_and_exits_with_130(
    counter: CounterFactory,
    driver: CudaDriver,
    sim_environment: Callable[..., dict[str, str]],
    tmp_path: Path,
    number: signal.Signals,
) -> None:
    job = counter(env=sim_environment(faults=f"checkpoint=until:{tmp_path / 'go'}"))
    gpucr_process = command.start("suspend", job.pid)
    wait_until(lambda: driver.state(job.pid) is LOCKED, "the job to be locked")
    os.kill(gpucr_process.pid, number)
    (tmp_path / "go").touch()
    _, err = gpucr_process.communicate(timeout=30)
    assert gpucr_process.returncode == 130
    assert "interrupted; the job is as it was found" in err
    assert driver.state(job.pid) is RUNNING
    assert job.ask() == 101


def test_a_second_signal_does_not_cut_the_undo_short(
    counter: CounterFactory, driver: CudaDriver, sim_environment: Callable[..., dict[str, str]], tmp_path: Path
) -> None:
    saved, back = tmp_path / "saved", tmp_path / "back"
    job = counter(env=sim_environment(faults=f"checkpoint=until:{saved},restore=until:{back}"))
    gpucr_process = command.start("suspend", job.pid)
    assert gpucr_process.stderr is not None
    while "checkpoint process" not in gpucr_process.stderr.readline():
        assert gpucr_process.poll() is None
    os.kill(gpucr_process.pid, signal.SIGINT)
    saved.touch()
    while "undoing: checkpoint" not in gpucr_process.stderr.readline():
        assert gpucr_process.poll() is None
    os.kill(gpucr_process.pid, signal.SIGINT)
    back.touch()
    _, err = gpucr_process.communicate(timeout=30)
    assert gpucr_process.returncode == 130
    assert "cannot be cut short" in err
    assert driver.state(job.pid) is RUNNING


@pytest.mark.by_user
def test_the_job_of_a_killed_gpucr_runs_again_by_itself(
    counter: CounterFactory, driver: CudaDriver, sim_environment: Callable[..., dict[str, str]], tmp_path: Path
) -> None:
    job = counter(env=sim_environment(faults=f"checkpoint=until:{tmp_path / 'go'}"))
    gpucr_process = command.start("suspend", job.pid)
    wait_until(lambda: driver.state(job.pid) is LOCKED, "the job to be locked")
    gpucr_process.kill()
    gpucr_process.communicate(timeout=30)
    (tmp_path / "go").touch()
    assert job.ask() == 101
    assert driver.state(job.pid) is RUNNING


def test_a_second_gpucr_is_refused_while_the_first_works(
    counter: CounterFactory, driver: CudaDriver, sim_environment: Callable[..., dict[str, str]], tmp_path: Path
) -> None:
    job = counter("--fork", "1", env=sim_environment(faults=f"checkpoint=until:{tmp_path / 'go'}"))
    child = next(pid for pid in job.processes() if pid != job.pid)
    first = command.start("suspend", job.pid)
    wait_until(lambda: driver.state(child) is LOCKED, "the job to be locked")
    for second in (["suspend", job.pid], ["resume", child], ["dump", job.pid, "--to", tmp_path / "s"]):
        refused = command.run(*second)
        assert refused.returncode == 3, refused.stderr
        assert "another gpucr is at work on process" in refused.stderr
    (tmp_path / "go").touch()
    first.communicate(timeout=30)
    assert first.returncode == 0
    assert states(driver, job) == {CHECKPOINTED}
    gpucr.resume(job.pid)
    assert states(driver, job) == {RUNNING}


def test_a_stopped_process_is_refused_at_once(counter: CounterFactory, driver: CudaDriver) -> None:
    job = counter()
    os.kill(job.pid, signal.SIGSTOP)
    processes.wait_for_stop([job.pid], 10)
    with pytest.raises(gpucr.Unsupported, match="is stopped") as failure:
        gpucr.suspend(job.pid)
    assert failure.value.hint is not None
    assert f"kill -CONT {job.pid}" in failure.value.hint
    os.kill(job.pid, signal.SIGCONT)
    gpucr.suspend(job.pid)
    gpucr.resume(job.pid)
    assert job.ask() == 101

"""The jobs that use GPUs, as `gpucr.list_gpu_jobs` and `gpucr ps` show them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import gpucr
from gpucr.cli import ps
from gpucr.driver.gpus import list_gpus
from gpucr.linux import memory, processes
from gpucr.model import CudaState
from gpucr.operations import listing
from gpucr.operations.gpu_jobs import beside, findings_of
from tests import command
from tests.children import Child, identity, tracer_of
from tests.command import run, run_json
from tests.counter import Counter, CounterFactory, wait_until
from tests.ranks import RanksFactory
from tests.sandboxed import end_all_in, start_counter
from tests.terminal import Terminal

MIB = 1 << 20


def job_with(pid: int, **options: Any) -> gpucr.GpuJob:
    (found,) = [job for job in gpucr.list_gpu_jobs(**options) if pid in [each.process.pid for each in job.processes]]
    return found


@pytest.fixture
def child_stopped(counter: CounterFactory) -> Counter:
    """A job of two processes, one of them suspended."""
    job = counter("--mib", "2", "--fork", "1")
    gpucr.suspend(job.processes()[1])
    return job


def test_a_job_is_a_cuda_process_with_its_descendants(counter: CounterFactory) -> None:
    program = counter("--mib", "2", "--fork", "2")
    for pid in program.processes():
        job = job_with(pid)
        assert job.pid == program.pid
        assert [each.process.pid for each in job.processes] == sorted(program.processes())
    assert (job.name, job.findings, job.is_checkpointable) == (None, None, None)
    assert (job.states, job.state_word) == ((CudaState.RUNNING,), "running")
    uuid = list_gpus()[0].uuid
    assert job.device_bytes == {uuid: sum(each.device_bytes[uuid] for each in job.processes)}
    assert job.device_bytes[uuid] >= 3 * 2 * MIB
    assert job.resident_bytes == sum(each.resident_bytes for each in job.processes) > 0


def test_the_age_of_a_job(counter: CounterFactory) -> None:
    program = counter("--mib", "1")
    first = job_with(program.pid).age_s
    assert 0 < first < 600
    stat = processes.read_stat(program.pid)
    assert stat is not None
    wait_until(lambda: job_with(program.pid).age_s > first, "time to go by")


def test_processes_in_different_states(child_stopped: Counter) -> None:
    job = job_with(child_stopped.pid)
    assert job.states == (CudaState.RUNNING, CudaState.CHECKPOINTED)
    assert job.state_word == "mixed"


def test_ranks_below_a_launcher_without_cuda_belong_together(ranks: RanksFactory) -> None:
    launched = ranks(3)
    jobs = gpucr.list_gpu_jobs()
    ours = [job for job in jobs if job.pid in launched.ranks]
    assert len(ours) == 3
    assert {other.pid for other in beside(ours[0], jobs)} == set(launched.ranks) - {ours[0].pid}
    parent = ours[0].parent
    assert parent is not None
    assert parent.pid == launched.pid


def test_programs_of_one_shell_are_not_ranks(counter: CounterFactory) -> None:
    """Both are children of this process, like a shell's programs; so is gpucr."""
    one, other = counter("--mib", "1"), counter("--mib", "1")
    jobs = gpucr.list_gpu_jobs()
    (job,) = [job for job in jobs if job.pid == one.pid]
    assert job.root.parent_pid == os.getpid()
    assert other.pid in {each.pid for each in jobs}
    assert beside(job, jobs) == ()


def test_a_gpu_monitor_is_not_listed(counter: CounterFactory) -> None:
    """NVML gives it a CUDA state (driver 580), and the jobs that it has started would be one job, its own."""
    program = counter("--mib", "1")
    code = "import pynvml, signal; pynvml.nvmlInit(); print('watching', flush=True); signal.pause()"
    with contextlib.closing(Child([sys.executable, "-c", code])) as watcher:
        listed = {each.process.pid for each in gpucr.list_cuda_processes()}
        assert program.pid in listed
        assert watcher.pid not in listed


def test_telling_cuda_from_nvml(counter: CounterFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that NVML knows (in most containers it does not), or mapped device files; suspended ones have neither."""
    running, suspended = counter("--mib", "1"), counter("--mib", "1")
    gpucr.suspend(suspended.pid)

    def listed() -> set[int]:
        return {each.process.pid for each in gpucr.list_cuda_processes()} & {running.pid, suspended.pid}

    assert listed() == {running.pid, suspended.pid}
    monkeypatch.setattr(listing, "gpu_processes", lambda: ())
    monkeypatch.setattr(memory, "has_mapped", has_mapped_all_but_devices)
    assert listed() == {suspended.pid}
    monkeypatch.undo()
    monkeypatch.setattr(listing, "gpu_processes", lambda: ())
    monkeypatch.setattr(memory, "has_mapped", lambda _pid, _name: True)
    assert listed() == {running.pid, suspended.pid}


def has_mapped_all_but_devices(pid: int, name: str) -> bool:
    return name != "/dev/nvidia" and any(name in mapping.path for mapping in memory.read_maps(pid))


def test_a_job_started_by_gpucr_has_its_name(sim_only: None, tmp_path: Path, state_home: Path) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    try:
        with start_counter(folder, "--mib", "1", "--fork", "1", "--cpu-parent", name="train", isolate=False) as started:
            (job,) = [job for job in gpucr.list_gpu_jobs() if job.name == "train"]
            assert job.pid == started.pid, "its first process, though that has no CUDA"
            assert [each.process.parent_pid for each in job.processes] == [started.pid]
            assert beside(job, gpucr.list_gpu_jobs()) == ()
            by_name, by_pid = run_json("ps", "--job", "train"), run_json("ps", "--job", started.pid)
            assert [each["name"] for each in by_name["jobs"]] == ["train"]
            assert [each["job_pid"] for each in by_pid["processes"]] == [started.pid]
            assert "train" in run("ps", "--job", "train").stdout.splitlines()[1].split()
    finally:
        end_all_in(folder)


def test_no_findings(counter: CounterFactory) -> None:
    program = counter("--mib", "1")
    found = findings_of(program.pid)
    assert [finding for finding in found if finding.severity == "blocking"] == []
    (printed,) = run_json("ps", "--check", "--job", program.pid)["jobs"]
    assert printed["checkpointable"] is True


def test_findings(counter: CounterFactory) -> None:
    program = counter("--mib", "1")
    with tracer_of(program.pid):
        job = job_with(program.pid, check=True)
        assert job.is_checkpointable is False
        what = f"process {program.pid} (counter) is being traced"
        assert what in [finding.what for finding in job.findings or ()]
        heading, line, reason = run("ps", "--check", "--job", program.pid).stdout.splitlines()
        assert line[heading.index("CHECKPOINTABLE") :].split()[0] == "no"
        assert reason.startswith(f"{program.pid}: {what}")
        (printed,) = run_json("ps", "--check", "--job", program.pid)["jobs"]
        assert printed["checkpointable"] is False
        assert "detach the debugger" in printed["findings"][0]["remedy"]


def test_an_inaccessible_process_is_a_finding(process_without_cuda: int) -> None:
    os.kill(process_without_cuda, signal.SIGKILL)
    wait_until(lambda: not processes.is_alive(identity(process_without_cuda)), "its end")
    (finding,) = findings_of(process_without_cuda)
    assert finding.severity == "blocking"
    assert "is a zombie" in finding.what


# --- gpucr ps --------------------------------------------------------------------------------------------------


def pids_of(*options: object) -> set[int]:
    done = CliRunner().invoke(ps.command, [*map(str, options), "--json"], catch_exceptions=False)
    return {each["pid"] for each in json.loads(done.stdout)["processes"]}


def test_filters(child_stopped: Counter) -> None:
    root, child = child_stopped.processes()
    assert {root, child} <= pids_of()
    assert {root, child} & pids_of("--state", "running") == {root}
    assert {root, child} & pids_of("--state", "checkpointed") == {child}
    assert {root, child} & pids_of("--gpu", 0) == {root}
    assert {root, child} & pids_of("--gpu", list_gpus()[0].uuid) == {root}
    assert {root, child} & pids_of("--user", os.getuid()) == {root, child}
    assert pids_of("--user", 64999) == set()
    assert pids_of("--job", child) == {root, child}
    assert pids_of("--job", child, "--state", "running") == {root}
    (job,) = run_json("ps", "--job", root)["jobs"]
    assert job["pids"] == sorted([root, child])
    assert (job["state"], job["checkpointable"], job["findings"]) == ("mixed", None, None)


def test_a_stopped_job(counter: CounterFactory) -> None:
    """The driver cannot be asked about it, but it has its GPU as before."""
    program = counter("--mib", "2")
    os.kill(program.pid, signal.SIGSTOP)
    processes.wait_for_stop([program.pid], 10)
    job = job_with(program.pid, check=True)
    (process,) = job.processes
    assert (process.state, process.halt, process.word) == (None, "stopped", "stopped")
    assert (job.states, job.state_word, job.is_checkpointable) == ((), "stopped", False)
    assert sum(job.device_bytes.values()) >= 2 * MIB
    (finding,) = job.findings or ()
    assert f"kill -CONT {program.pid}" in finding.remedy
    assert program.pid in pids_of("--state", "stopped")
    assert program.pid not in pids_of("--state", "running")
    heading, line = run("ps", "--job", program.pid).stdout.splitlines()
    assert line[heading.index("STATE") :].split()[0] == "stopped"
    os.kill(program.pid, signal.SIGCONT)
    wait_until(lambda: job_with(program.pid).state_word == "running", "it to continue")


def test_a_job_with_a_stopped_process(counter: CounterFactory) -> None:
    program = counter("--mib", "2", "--fork", "1")
    _, child = program.processes()
    os.kill(child, signal.SIGSTOP)
    processes.wait_for_stop([child], 10)
    job = job_with(program.pid)
    assert (job.states, job.state_word) == ((CudaState.RUNNING,), "mixed")


def test_filters_without_matches() -> None:
    done = run("ps", "--user", "64999")
    assert (done.returncode, done.stdout) == (0, "no process that uses CUDA fits\n")
    done = run("ps", "--user", "nobody-at-all")
    assert done.returncode == 2
    assert "there is no user 'nobody-at-all'" in done.stderr
    done = run("ps", "--gpu", "17")
    assert done.returncode == 2
    assert "there is no GPU '17'" in done.stderr


def test_one_line_per_process(counter: CounterFactory) -> None:
    if len(list_gpus()) < 2:
        pytest.skip("needs 2 GPUs")
    program = counter("--mib", "2", "--devices", "0,1")
    heading, line = run("ps", "--job", program.pid).stdout.splitlines()
    assert heading.split() == ["PID", "JOB", "STATE", "USER", "AGE", "GPUS", "DEVICE", "HOST", "WAY", "COMMAND"]
    pid, job, state, *_ = line.split()
    assert (pid, job, state) == (str(program.pid), str(program.pid), "running")
    assert line[heading.index("GPUS") :].startswith("0,1 ")
    assert "counter --port 0 --mib 2" in line


@pytest.mark.parametrize(("columns", "shown"), [(100, "AGE"), (60, "STATE")])
def test_a_narrow_terminal(counter: CounterFactory, columns: int, shown: str) -> None:
    program = counter("--mib", "2")
    terminal = Terminal(command.command("ps", "--job", program.pid), columns=columns, lines=5)
    try:
        assert terminal.wait_ended() == 0
        heading, line, *rest = [each.rstrip() for each in terminal.text().splitlines()]
        assert shown in heading
        assert heading.endswith("COMMAND")
        assert heading.startswith("  PID") or heading.split()[0] == "PID"
        assert line.split()[0] == str(program.pid)
        assert rest == ["", "", ""], "no line is wrapped"
    finally:
        terminal.close()

"""A job's threads: none is left stopped or traced, and none runs without its device memory.

The simulator has a thread that CRIU's interruption kills while device memory is away (tests/sim/README.md), so
a job that survives here was held all the time.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import gpucr
from gpucr.criu.engine import Criu
from gpucr.driver.cuda import CudaDriver
from gpucr.linux import processes
from gpucr.model import CudaState
from gpucr.sim import build as simulator
from tests import command
from tests.counter import Counter, CounterFactory, wait_until
from tests.storm import IS_STORM, later, long

pytestmark = pytest.mark.criu
RUNNING, LOCKED, CHECKPOINTED = CudaState.RUNNING, CudaState.LOCKED, CudaState.CHECKPOINTED
Environment = Callable[..., dict[str, str]]


def assert_untouched(pids: list[int]) -> None:
    """No thread of these processes is stopped or traced."""
    for pid in pids:
        threads = processes.threads(pid)
        assert threads, f"process {pid} has ended"
        for tid in threads:
            stat = processes.read_stat(tid)
            assert stat is None or stat.status not in "Tt", f"thread {tid} of {pid} is stopped"
            assert processes.tracer_pid(tid) == 0, f"thread {tid} of {pid} is traced"


def assert_as_before(job: Counter, driver: CudaDriver, answer: int) -> None:
    assert_untouched(job.processes())
    assert {driver.state(pid) for pid in job.processes()} == {RUNNING}
    assert job.ask() == answer
    assert job.send("verify") == "ok"


def children_of(job: Counter) -> dict[int, int]:
    """The port of each child, per pid, as the program printed them."""
    pairs = re.findall(r"(\d+):(\d+)", (job.folder / "stdout").read_text().partition("children=")[2])
    return {int(pid): int(port) for pid, port in pairs}


# --- cycles ----------------------------------------------------------------------------------------------------


@long
def test_many_dumps_and_restores_of_one_job(counter: CounterFactory, driver: CudaDriver, tmp_path: Path) -> None:
    job = counter("--mib", "8", "--fork", "1")
    pids = job.processes()
    for cycle in range(5):
        gpucr.dump(job.pid, tmp_path / str(cycle))
        job.reap()
        gpucr.restore(tmp_path / str(cycle))
        assert job.processes() == pids
        assert_as_before(job, driver, 101 + cycle)


def test_many_dumps_that_leave_one_job_running(counter: CounterFactory, driver: CudaDriver, tmp_path: Path) -> None:
    job = counter("--mib", "8", "--fork", "1")
    pids = job.processes()
    cycles = 5 if IS_STORM else 2
    for cycle in range(cycles):
        gpucr.dump(job.pid, tmp_path / str(cycle), leave_running=True)
        assert job.processes() == pids
        assert_as_before(job, driver, 101 + cycle)
    job.kill()
    gpucr.restore(tmp_path / str(cycles - 1))
    assert_as_before(job, driver, 100 + cycles)


def test_a_suspended_job_survives_and_stays_suspended(
    counter: CounterFactory, driver: CudaDriver, tmp_path: Path
) -> None:
    job = counter("--mib", "8")
    gpucr.suspend(job.pid)
    for cycle in range(2):
        gpucr.dump(job.pid, tmp_path / f"{cycle}-running", leave_running=True)
        assert driver.state(job.pid) is CHECKPOINTED
        assert_untouched([job.pid])
        gpucr.dump(job.pid, tmp_path / f"{cycle}")
        job.reap()
        gpucr.restore(tmp_path / f"{cycle}")
        assert driver.state(job.pid) is CHECKPOINTED
        assert_untouched([job.pid])
    gpucr.resume(job.pid)
    assert_as_before(job, driver, 101)


@pytest.mark.parametrize("action", ["checkpoint", "restore"])
@pytest.mark.parametrize("leave_running", [False, later(True)])
def test_the_driver_works_while_all_other_threads_are_held(
    counter: CounterFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, action: str, leave_running: bool
) -> None:
    job = counter("--fork", "1")
    calls: list[int] = []
    real_action = getattr(CudaDriver, action)

    def act(self: CudaDriver, pid: int, *arguments: Any) -> None:
        calls.append(pid)
        others = set(processes.threads(pid)) - {self.restore_thread_id(pid)}
        assert {stat.status for tid in others if (stat := processes.read_stat(tid))} == {"t"}
        real_action(self, pid, *arguments)

    monkeypatch.setattr(CudaDriver, action, act)
    gpucr.dump(job.pid, tmp_path / "s", leave_running=leave_running)
    if not leave_running:
        job.reap()
        gpucr.restore(tmp_path / "s")
    assert sorted(calls) == sorted(job.processes())
    assert job.ask() == 101


# --- failures --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("action", ["lock", "checkpoint", "restore", "unlock"])
def test_after_a_fault_of_the_driver(
    counter: CounterFactory, driver: CudaDriver, tmp_path: Path, sim_environment: Environment, action: str
) -> None:
    job = counter("--fork", "1", env=sim_environment(faults=f"{action}#1=999"))
    with pytest.raises(gpucr.DriverError, match="999"):
        gpucr.dump(job.pid, tmp_path / "s", leave_running=True)
    assert_as_before(job, driver, 101)


@pytest.mark.parametrize("leave_running", [False, True])
def test_after_a_refusal_once_criu_has_dumped_everything(
    counter: CounterFactory,
    driver: CudaDriver,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    leave_running: bool,
) -> None:
    job = counter("--fork", "1")
    real_dump = Criu.dump

    def dump(self: Criu, *args: Any, on_notify: Callable[[str, int], None], **kwargs: Any) -> None:
        def refuse(hook: str, pid: int) -> None:
            on_notify(hook, pid)
            if hook == "pre-dump":
                return
            raise OSError(28, "No space left on device")

        real_dump(self, *args, on_notify=refuse, **kwargs)

    monkeypatch.setattr(Criu, "dump", dump)
    with pytest.raises(OSError, match="No space left"):
        gpucr.dump(job.pid, tmp_path / "s", leave_running=leave_running)
    assert_as_before(job, driver, 101)


def test_after_an_error_of_criu(
    counter: CounterFactory, driver: CudaDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = counter("--fork", "1")
    real_dump = Criu.dump

    def dump_without_room(self: Criu, pid: int, images_dir: Path, *args: Any, **kwargs: Any) -> None:
        (images_dir / "pagemap-1.img").mkdir(parents=True)  # CRIU cannot write over a folder
        for process in job.processes():
            (images_dir / f"core-{process}.img").mkdir()
        real_dump(self, pid, images_dir, *args, **kwargs)

    monkeypatch.setattr(Criu, "dump", dump_without_room)
    with pytest.raises(gpucr.CriuError):
        gpucr.dump(job.pid, tmp_path / "s")
    assert_as_before(job, driver, 101)


def test_after_the_deadline(
    counter: CounterFactory, driver: CudaDriver, tmp_path: Path, sim_environment: Environment
) -> None:
    job = counter("--fork", "1", env=sim_environment(faults="checkpoint=delay:600"))
    with pytest.raises(gpucr.DeadlineExceeded):
        gpucr.dump(job.pid, tmp_path / "s", timeout_s=0.4)
    assert_as_before(job, driver, 101)


@pytest.mark.parametrize("action", ["checkpoint", "restore"])
def test_after_ctrl_c(
    counter: CounterFactory, driver: CudaDriver, tmp_path: Path, sim_environment: Environment, action: str
) -> None:
    job = counter("--fork", "1", env=sim_environment(faults=f"{action}#1=until:{tmp_path / 'go'}"))
    process = command.start("dump", job.pid, "--to", tmp_path / "s", "--leave-running")
    assert process.stderr is not None
    while f"{action} process" not in process.stderr.readline():
        assert process.poll() is None
    os.kill(process.pid, signal.SIGINT)
    (tmp_path / "go").touch()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert_as_before(job, driver, 101)


def test_a_killed_gpucr_leaves_no_thread_held(
    counter: CounterFactory, driver: CudaDriver, tmp_path: Path, sim_environment: Environment
) -> None:
    job = counter(env=sim_environment(faults=f"checkpoint=until:{tmp_path / 'go'}"))
    process = command.start("dump", job.pid, "--to", tmp_path / "s")
    tid = driver.restore_thread_id(job.pid)
    others = [thread for thread in processes.threads(job.pid) if thread != tid]
    wait_until(lambda: all(processes.tracer_pid(thread) for thread in others), "the threads to be held")
    process.kill()
    process.communicate(timeout=60)
    (tmp_path / "go").touch()
    assert job.ask() == 101  # by itself
    wait_until(lambda: not any(processes.tracer_pid(thread) for thread in others), "its guard to let go of them")
    assert_as_before(job, driver, 102)


@pytest.mark.parametrize("action", ["restore", "unlock"])
def test_a_failed_restore_leaves_no_process(
    sim_only: None, counter: CounterFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, action: str
) -> None:
    job = counter("--fork", "1", "--cpu-parent")
    (child,) = children_of(job)
    gpucr.dump(job.pid, tmp_path / "s")
    job.reap()
    monkeypatch.setenv("GPUCR_SIM_CALLER_FAULTS", f"{action}@{child}=999")
    with pytest.raises(gpucr.DriverError, match="999"):
        gpucr.restore(tmp_path / "s")
    assert not job.processes()


# --- members without CUDA --------------------------------------------------------------------------------------


@pytest.mark.parametrize("leave_running", [False, True])
def test_a_member_without_cuda_runs_again(
    counter: CounterFactory, driver: CudaDriver, tmp_path: Path, leave_running: bool
) -> None:
    job = counter("--fork", "1", "--cpu-parent")
    (child,) = children_of(job)
    assert driver.state(job.pid) is None
    gpucr.dump(job.pid, tmp_path / "s", leave_running=leave_running)
    if not leave_running:
        job.reap()
        gpucr.restore(tmp_path / "s")
    assert job.ask() == 101
    assert driver.state(child) is RUNNING
    assert_untouched([job.pid, child])


@pytest.mark.parametrize("leave_running", [False, True])
def test_a_member_without_cuda_that_was_stopped_is_stopped_again(
    counter: CounterFactory, driver: CudaDriver, tmp_path: Path, leave_running: bool
) -> None:
    job = counter("--fork", "1", "--cpu-parent")
    (child,) = children_of(job)
    os.kill(job.pid, signal.SIGSTOP)
    wait_until(lambda: _status(job.pid) == "T", "the parent to stop")
    gpucr.dump(job.pid, tmp_path / "s", leave_running=leave_running)
    if not leave_running:
        job.reap()
        gpucr.restore(tmp_path / "s")
    assert _status(job.pid) == "T"
    assert driver.state(child) is RUNNING
    assert_untouched([child])
    os.kill(job.pid, signal.SIGCONT)
    assert job.ask() == 101


def _status(pid: int) -> str:
    stat = processes.read_stat(pid)
    assert stat is not None
    return stat.status


# --- on a terminal ---------------------------------------------------------------------------------------------


_SHELL = """
import os, socket, subprocess, sys
job = subprocess.Popen([sys.argv[1], "--port", "0"])
asked = socket.socket(fileno=int(sys.argv[2]))
asked.send(str(job.pid).encode())
while asked.recv(1):
    # A stop that has ended since would still show as WCONTINUED.
    seen = os.waitid(os.P_PID, job.pid, os.WSTOPPED | os.WCONTINUED | os.WEXITED | os.WNOHANG | os.WNOWAIT)
    asked.send(str(seen).encode())
"""


class Shell:
    """The leader of a session with a terminal, and the parent of a counter there. ``pid`` is the counter's."""

    def __init__(self) -> None:
        program = str(simulator.build() / "counter")
        self._terminal, slave = os.openpty()
        self._socket, other = socket.socketpair()
        with other, open(slave, "r+b", buffering=0) as tty:
            self._process = subprocess.Popen(
                ["setsid", "--ctty", sys.executable, "-c", _SHELL, program, str(other.fileno())],
                stdin=tty,
                stdout=tty,
                stderr=tty,
                pass_fds=[other.fileno()],
            )
        self.pid = int(self._socket.recv(100))
        printed = b""
        while b"ready" not in printed:
            printed += os.read(self._terminal, 4096)

    def has_seen(self) -> str:
        """What the parent would learn now about the counter: ``None`` if nothing has become of it."""
        self._socket.send(b"?")
        return self._socket.recv(1000).decode()

    def close(self) -> None:
        """End the counter and the session."""
        processes.kill_tree(self._process.pid, including_root=True)
        self._process.wait()
        self._socket.close()
        os.close(self._terminal)


@pytest.fixture
def shell(sim_only: None) -> Iterator[Shell]:
    shell = Shell()
    yield shell
    shell.close()


def test_a_job_on_a_terminal_continues_with_a_warning_about_its_shell(
    shell: Shell, driver: CudaDriver, tmp_path: Path
) -> None:
    assert processes.has_terminal(shell.pid)
    for cycle in range(3):
        report = gpucr.dump(shell.pid, tmp_path / str(cycle), leave_running=True)
        (warning,) = [each for each in report.warnings if "has a controlling terminal" in each]
        assert "moves it to the background" in warning
        assert "hint: `fg`" in warning
        assert driver.state(shell.pid) is RUNNING
        assert_untouched([shell.pid])
    # What the parent sees last is that the job continues.
    assert f"si_status={int(signal.SIGCONT)}" in shell.has_seen()


def test_a_job_is_stopped_for_criu_and_continues(counter: CounterFactory, tmp_path: Path) -> None:
    job = counter()
    gpucr.dump(job.pid, tmp_path / "s", leave_running=True)
    seen = os.waitid(os.P_PID, job.pid, os.WSTOPPED | os.WCONTINUED | os.WNOHANG | os.WNOWAIT)
    assert seen is not None
    assert seen.si_status == signal.SIGCONT

"""`gpucr top` on a pseudo-terminal."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpucr.driver.cuda import CudaDriver
from gpucr.model import CudaState
from tests.command import command, run
from tests.counter import DEADLINE_S, Counter, CounterFactory, wait_until
from tests.ranks import RanksFactory
from tests.terminal import Terminal

RUNNING, CHECKPOINTED = CudaState.RUNNING, CudaState.CHECKPOINTED
Top = Callable[..., Terminal]


@pytest.fixture
def top() -> Iterator[Top]:
    """Start `gpucr top` for these jobs, and wait until it shows them."""
    terminals: list[Terminal] = []

    def start(*pids: int, program: list[str] | None = None, **options: Any) -> Terminal:
        arguments = program or command("top", *pids, "--interval", "0.1")
        terminal = Terminal(arguments, **options)
        terminals.append(terminal)
        terminal.wait_for("q quit")
        return terminal

    yield start
    for terminal in terminals:
        terminal.close()


def assert_given_back(terminal: Terminal) -> None:
    """Assert that the terminal's settings, cursor and previous screen are restored."""
    assert terminal.modes == terminal.modes_before
    assert terminal.raw.rindex(b"\x1b[?25h") > terminal.raw.rindex(b"\x1b[?25l"), "the cursor is hidden"
    if b"\x1b[?1049h" in terminal.raw:
        assert terminal.raw.rindex(b"\x1b[?1049l") > terminal.raw.rindex(b"\x1b[?1049h")


def test_suspend_and_resume_by_key(counter: CounterFactory, driver: CudaDriver, top: Top) -> None:
    job = counter("--mib", "2", "--fork", "1")
    root, child = job.processes()
    terminal = top(job.pid)
    text = terminal.wait_for("running")
    assert f"{job.pid}  -     2  running" in text
    terminal.press("s")
    terminal.wait_for(f"suspend job {job.pid}, 2 processes:")
    terminal.wait_for(f"nothing stands in the way of a checkpoint of job {job.pid}")
    assert driver.state(root) is RUNNING, "not before the answer"
    terminal.press("y")
    terminal.wait_for(f"{root} checkpointed, {child} checkpointed: ")
    assert (driver.state(root), driver.state(child)) == (CHECKPOINTED, CHECKPOINTED)
    row = [str(job.pid), "-", "2", "checkpointed"]
    terminal.wait_for(lambda text: row in [line.split()[:4] for line in text.splitlines()], "the table to show it")
    terminal.press("r")
    terminal.wait_for(f"resume job {job.pid}")
    terminal.press("y")
    terminal.wait_for(f"{root} running, {child} running: ")
    assert (driver.state(root), driver.state(child)) == (RUNNING, RUNNING)
    assert job.ask() == 101
    terminal.press("q")
    assert terminal.wait_ended() == 0
    assert f"{root} checkpointed, {child} checkpointed" in terminal.text(), "what was done is said once more"
    assert_given_back(terminal)


def test_answering_no_does_nothing(counter: CounterFactory, driver: CudaDriver, top: Top) -> None:
    job = counter("--mib", "1")
    terminal = top(job.pid)
    terminal.press("s")
    terminal.wait_for("y yes   n no")
    terminal.press("n")
    terminal.wait_for(lambda text: "y yes   n no" not in text, "the question to go")
    terminal.press("q")
    assert terminal.wait_ended() == 0
    assert driver.state(job.pid) is RUNNING


def test_arrow_keys_select(counter: CounterFactory, driver: CudaDriver, top: Top) -> None:
    one, other = sorted((counter("--mib", "1"), counter("--mib", "1")), key=lambda job: job.pid)
    terminal = top(one.pid, other.pid, env_term="xterm-256color")
    terminal.press("\x1bOB")  # as a terminal sends it in the mode that curses puts it in
    terminal.press("s")
    terminal.wait_for(f"suspend job {other.pid}")
    terminal.press("\x1b")
    terminal.wait_for(lambda text: "y yes   n no" not in text, "the question to go")
    terminal.press("\x1bOA")
    terminal.press("s")
    terminal.wait_for(f"suspend job {one.pid}")


def test_an_error_is_shown_in_its_place(counter: CounterFactory, sim_only: None, driver: CudaDriver, top: Top) -> None:
    job = counter("--mib", "1", env={"GPUCR_SIM_FAULTS": "checkpoint=801"})
    terminal = top(job.pid)
    terminal.press("sy")
    terminal.wait_for(lambda text: f"suspend {job.pid}: " in text and "hint:" in text, "the error")
    assert job.ask() == 101
    assert driver.state(job.pid) is RUNNING
    terminal.press("q")
    assert terminal.wait_ended() == 0
    assert f"suspend {job.pid}: " in terminal.text()


@pytest.fixture
def go(tmp_path: Path) -> Path:
    """Made by a test, it lets the checkpoint of `slow_job` begin."""
    return tmp_path / "go"


@pytest.fixture
def slow_job(counter: CounterFactory, sim_environment: Callable[..., dict[str, str]], go: Path) -> Counter:
    """A job that stays locked before its checkpoint until the test says so."""
    return counter("--mib", "1", env=sim_environment(faults=f"checkpoint=until:{go}"))


def begin_suspend(terminal: Terminal, job: Counter, driver: CudaDriver) -> None:
    terminal.press("sy")
    wait_until(lambda: driver.state(job.pid) is CudaState.LOCKED, "the job to be locked")
    terminal.wait_for("checkpoint process")  # before that nothing waits for the driver, and it can be left at once


def test_cancelling_undoes_the_operation(slow_job: Counter, driver: CudaDriver, top: Top, go: Path) -> None:
    terminal = top(slow_job.pid)
    begin_suspend(terminal, slow_job, driver)
    terminal.press("x")
    terminal.wait_for("cancelled, it is undone")
    go.touch()
    terminal.wait_for("the job is as it was found")
    assert driver.state(slow_job.pid) is RUNNING
    terminal.press("q")
    assert terminal.wait_ended() == 0


def test_during_an_operation_it_cannot_be_quit(slow_job: Counter, driver: CudaDriver, top: Top, go: Path) -> None:
    terminal = top(slow_job.pid)
    begin_suspend(terminal, slow_job, driver)
    terminal.press("q\x1bsrn")
    terminal.wait_read()
    go.touch()
    terminal.wait_for(f"{slow_job.pid} checkpointed: ")
    assert driver.state(slow_job.pid) is CHECKPOINTED


def test_it_survives_the_end_of_a_job(counter: CounterFactory, top: Top) -> None:
    job = counter("--mib", "1")
    terminal = top(job.pid)
    terminal.press("s")
    terminal.wait_for("y yes   n no")
    job.kill()
    terminal.wait_for(f"job {job.pid} has ended")
    terminal.wait_for("no process uses CUDA")
    terminal.press("syq")
    assert terminal.wait_ended() == 0


def test_ranks_can_be_selected_together(ranks: RanksFactory, driver: CudaDriver, top: Top) -> None:
    job = ranks(2)
    terminal = top(*job.ranks)
    terminal.press("s")
    terminal.wait_for(f"its parent {job.pid} started 1 other job too")
    terminal.press("p")
    terminal.wait_for(lambda text: text.count("checkpointed: ") == 1, "both to be suspended")
    assert {driver.state(pid) for pid in job.ranks} == {CHECKPOINTED}


def test_control_c_restores_the_terminal(counter: CounterFactory, top: Top) -> None:
    terminal = top(counter("--mib", "1").pid)
    terminal.press("\x03")
    assert terminal.wait_ended() == 130
    assert "error: interrupted" in terminal.text()
    assert_given_back(terminal)


def test_control_c_does_not_wait_for_the_driver(
    counter: CounterFactory, driver: CudaDriver, sim_only: None, tmp_path: Path
) -> None:
    """Neither at the first look, before there is a screen, nor later, nor while Python exits."""
    job = counter("--mib", "1")
    for nth in (1, 3):
        log = tmp_path / f"asked-{nth}"
        program = [sys.executable, "-c", HANGING, str(log), str(nth), str(job.pid)]
        terminal = Terminal(program)
        try:
            wait_until(log.exists, "the driver to be asked")
            terminal.press("\x03")
            assert terminal.wait_ended() == 130
            assert "error: interrupted" in terminal.text()
        finally:
            terminal.close()
    assert driver.state(job.pid) is RUNNING


def test_another_control_c_leaves_the_undo_to_the_guard(
    slow_job: Counter, driver: CudaDriver, top: Top, go: Path
) -> None:
    terminal = top(slow_job.pid)
    begin_suspend(terminal, slow_job, driver)
    terminal.press("\x03")
    terminal.wait_for("press Ctrl-C again")
    terminal.press("\x03")
    terminal.wait_for("the guard of what was under way brings the job back")
    assert terminal.wait_ended() == 130
    assert_given_back(terminal)
    go.touch()
    wait_until(lambda: driver.state(slow_job.pid) is RUNNING, "the guard to bring the job back")
    assert slow_job.ask() == 101


def test_control_z_does_not_stop_an_operation_midway(counter: CounterFactory, top: Top) -> None:
    terminal = top(counter("--mib", "1").pid)
    terminal.press("\x1as")
    terminal.wait_for("y yes   n no")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_undoes_the_operation(
    slow_job: Counter, driver: CudaDriver, top: Top, go: Path, number: signal.Signals
) -> None:
    terminal = top(slow_job.pid)
    begin_suspend(terminal, slow_job, driver)
    os.kill(terminal.process.pid, number)
    terminal.wait_for("is being undone")  # else it may have ended before Python takes the signal
    go.touch()
    assert terminal.wait_ended() == 130
    assert driver.state(slow_job.pid) is RUNNING
    assert "the job is as it was found" in terminal.text()
    assert_given_back(terminal)


def test_a_vanished_terminal_undoes_the_operation(slow_job: Counter, driver: CudaDriver, top: Top, go: Path) -> None:
    terminal = top(slow_job.pid)
    begin_suspend(terminal, slow_job, driver)
    terminal.hang_up()
    go.touch()
    assert terminal.process.wait(DEADLINE_S) == 130
    assert driver.state(slow_job.pid) is RUNNING


def test_a_vanished_terminal(counter: CounterFactory, top: Top) -> None:
    terminal = top(counter("--mib", "1").pid)
    terminal.hang_up()
    assert terminal.process.wait(DEADLINE_S) == 130


HANGING = """
import os, sys, threading
from pathlib import Path
from gpucr.cli.main import main
from gpucr.driver.cuda import CudaDriver
log, nth, pid = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
state, asked, about_to = CudaDriver.state, [], threading.Event()
def tell():
    about_to.wait()
    log.touch()
threading.Thread(target=tell, daemon=True).start()
def counted(self, each):
    if each == pid:
        asked.append(each)
        if len(asked) == nth:
            os.environ["GPUCR_SIM_CALLER_FAULTS"] = f"state@{pid}=hang"
            sys.setswitchinterval(1000)  # no other thread runs before this one has left Python
            about_to.set()
    return state(self, each)
CudaDriver.state = counted
sys.argv[:] = ["gpucr", "top", "--interval", "0.1", str(pid)]
main()
"""
"""Makes a file while the driver does not answer the nth question for the state of a process."""

FAILING = """
from gpucr.cli.main import main
from gpucr.cli.top_state import TopState
import sys
def fail(state, key):
    if key == "s":
        raise RuntimeError("a defect")
TopState.press = fail
sys.argv[:] = ["gpucr", "top", "--interval", "0.1", *sys.argv[1:]]
main()
"""


def test_an_internal_error_restores_the_terminal(counter: CounterFactory, top: Top) -> None:
    terminal = top(program=[sys.executable, "-c", FAILING, str(counter("--mib", "1").pid)])
    terminal.press("s")
    assert terminal.wait_ended() == 1
    assert "RuntimeError: a defect" in terminal.text()
    assert_given_back(terminal)


def test_a_resized_terminal(counter: CounterFactory, top: Top) -> None:
    assert_it_follows_the_size(top(counter("--mib", "1").pid))


def test_a_terminal_resized_without_a_signal(counter: CounterFactory, top: Top) -> None:
    job = counter("--mib", "1")
    block = "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGWINCH])"
    start = f"import os, signal, sys; {block}; os.execv(sys.argv[1], sys.argv[1:])"
    terminal = top(program=[sys.executable, "-c", start, *command("top", job.pid, "--interval", "0.1")])
    assert signal.SIGWINCH in blocked_signals(terminal.process.pid)
    assert_it_follows_the_size(terminal)


def assert_it_follows_the_size(terminal: Terminal) -> None:
    assert "HOST  COMMAND" in terminal.text()
    terminal.resize(50, 12)  # cuts off everything from HOST on: only COMMAND tells that it was drawn again
    terminal.wait_for(lambda text: "DEVICE  COMMAND" in text, "fewer columns")
    assert "HOST" not in terminal.text()
    terminal.resize(120, 30)
    terminal.wait_for(lambda text: "HOST  COMMAND" in text and "q quit" in text, "all columns again")


def blocked_signals(pid: int) -> set[int]:
    """The numbers in SigBlk of proc_pid_status(5): those of the main thread."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    (mask,) = (int(line.split()[1], 16) for line in status if line.startswith("SigBlk:"))
    return {number for number in range(1, 65) if mask >> (number - 1) & 1}


# --- without a terminal ----------------------------------------------------------------------------------------


def test_without_a_terminal_it_is_refused() -> None:
    done = run("top")
    assert (done.returncode, done.stdout) == (2, "")
    assert "gpucr top needs a terminal" in done.stderr
    assert "gpucr top --once" in done.stderr


@pytest.mark.parametrize("term", ["", "no-such-terminal"])
def test_an_unknown_terminal_type(term: str, top: Top) -> None:
    terminal = Terminal(command("top"), env_term=term)
    try:
        assert terminal.wait_ended() == 2
        assert "cannot be used" in terminal.text()
    finally:
        terminal.close()


def test_once(counter: CounterFactory) -> None:
    job = counter("--mib", "2", "--fork", "1")
    done = run("top", job.pid, "--once")
    assert (done.returncode, done.stderr) == (0, "")
    heading, line = done.stdout.splitlines()
    assert heading.split()[:4] == ["PID", "NAME", "N", "STATE"]
    assert line.split()[:4] == [str(job.pid), "-", "2", "running"]

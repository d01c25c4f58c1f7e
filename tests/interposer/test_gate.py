"""The gate: a thread that leaves a driver call in any way is out; waiting threads continue when it opens."""

from __future__ import annotations

import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from gpucr.interposer.client import Agent
from tests.counter import wait_until
from tests.interposer.conftest import Start
from tests.storm import IS_STORM


def begin(start: Start, gate_program: Path, case: str) -> subprocess.Popen[str]:
    return start(str(gate_program), case, LD_LIBRARY_PATH=str(gate_program.parent))


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def go_on(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


@pytest.mark.parametrize(
    "case",
    ["longjmp", "longjmp-twice", "longjmp-from-signal-stack", "pthread-exit", "raw-exit", "cancel", "many-threads",
     "signals",
     "failed-capture", "capture-of-destroyed-stream"],
)  # fmt: skip
def test_a_call_left_abnormally_does_not_count(start: Start, gate_program: Path, case: str) -> None:
    process = begin(start, gate_program, case)
    assert line(process) == "ready"
    with Agent(process.pid) as agent:
        assert agent.close_gate(30).is_empty
        agent.open_gate()
    go_on(process)
    assert (line(process), process.wait(10)) == ("done", 0)


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_an_exception_uncounts_the_call_it_leaves(start: Start, gate_program: Path) -> None:
    process = start(str(gate_program.with_name("throws")), LD_LIBRARY_PATH=str(gate_program.parent))
    assert line(process) == "ready"
    with Agent(process.pid) as agent:
        assert agent.close_gate(5).is_empty


def test_arguments_and_frames_are_kept_and_no_code_is_writable(start: Start, gate_program: Path) -> None:
    process = begin(start, gate_program, "arguments")
    weighted = sum(i * i for i in range(1, 17)) + 50 + 250
    assert [line(process) for _ in range(4)] == [f"sum {weighted}", f"struct 7 {3 * 64}", "frames enough", "rwx 0"]


def test_a_call_from_a_callback_passes_the_closed_gate(start: Start, gate_program: Path) -> None:
    process = begin(start, gate_program, "nested")
    assert line(process) == "inside"
    with Agent(process.pid) as agent:
        assert agent.close_gate(0).inside == 1
        go_on(process)
        assert (line(process), line(process)) == ("nested", "ready")
        assert agent.close_gate(5).is_empty


def test_calls_pass_while_a_stream_is_captured(start: Start, gate_program: Path) -> None:
    process = begin(start, gate_program, "capture")
    assert line(process) == "ready"
    with Agent(process.pid) as agent:
        assert agent.close_gate(0).captures == 1
        go_on(process)
        assert line(process) == "passed"
        assert agent.close_gate(5).is_empty  # the capture has ended; the last call waits in front of the gate
        agent.open_gate()
        assert line(process) == "done"


def test_a_forked_child_has_an_open_gate(start: Start, gate_program: Path) -> None:
    process = begin(start, gate_program, "fork")
    assert line(process) == "ready"
    with Agent(process.pid) as agent:
        assert agent.close_gate(5).is_empty
        go_on(process)
        assert line(process) == "child passed"


def test_a_closed_gate_is_a_lease(start: Start, gate_program: Path) -> None:
    process = begin(start, gate_program, "none")
    assert line(process) == "ready"
    with Agent(process.pid) as agent:
        assert agent.close_gate(5).is_empty
        go_on(process)
        assert (agent.status().gate_closed, agent.status().inside) == (1, 0)
    assert (line(process), process.wait(10)) == ("done", 0)


def test_a_signal_handler_may_call_cuda_while_its_thread_waits(start: Start, gate_program: Path) -> None:
    process = begin(start, gate_program, "signal-in-the-gate")
    assert line(process) == "ready"
    with Agent(process.pid) as agent:
        assert agent.close_gate(5).is_empty
        go_on(process)
        wait_until(lambda: Path(f"/proc/{process.pid}/wchan").read_text().startswith("futex"), "it to wait at the gate")
        process.send_signal(signal.SIGUSR1)
        assert line(process) == "handler"
        assert agent.close_gate(5).is_empty
        agent.open_gate()
    assert (line(process), process.wait(10)) == ("done", 0)


def test_repeated_attempts_at_the_closed_gate_do_not_count_as_inside(start: Start, gate_program: Path) -> None:
    """A call is counted briefly before it waits, and the agent may look just then."""
    process = begin(start, gate_program, "interrupted-threads")
    assert [line(process), line(process)] == ["ready", "busy"]
    with Agent(process.pid) as agent:
        for _ in range(3):
            assert agent.close_gate(5).is_empty
            for _ in range(1000 if IS_STORM else 100):
                assert list(agent.export()) == [[]]  # one batch, and not refused
                assert agent.status().inside == 0
            agent.open_gate()
    go_on(process)
    go_on(process)
    assert (line(process), process.wait(10)) == ("done", 0)


def test_64_constantly_calling_threads_are_found_outside(start: Start, gate_program: Path) -> None:
    process = begin(start, gate_program, "busy-threads")
    assert [line(process), line(process)] == ["ready", "busy"]
    with Agent(process.pid) as agent:
        for _ in range(8 if IS_STORM else 3):
            assert agent.close_gate(5).is_empty
            assert agent.status().inside == 0
            agent.open_gate()
    go_on(process)
    go_on(process)
    assert (line(process), process.wait(10)) == ("done", 0)

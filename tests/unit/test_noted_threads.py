"""A tracer that runs code of its own in a stopped process is killed: what can be put back, and what not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gpucr import records
from gpucr.linux import memory, processes
from gpucr.linux.noted_threads import NotedProcess, note_stopped, put_back
from tests.counter import wait_until
from tests.unit.counting import Counting

pytestmark = pytest.mark.skipif(os.uname().machine != "x86_64", reason="x86-64 registers")

TRACER = """
import os, sys, time
from gpucr.linux.ptrace import StopKind, TracedThread
tid, address, call = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
thread = TracedThread.seize(tid)
thread.write_memory(address, bytes.fromhex("0f05cccccccccccc"))  # syscall; int3, as CRIU does
thread.set_signal_mask(~(1 << 4) & (1 << 64) - 1)                # all but SIGTRAP
thread.set_registers(thread.registers().for_call(address, thread.registers().rsp, call, (0, 0, 0, 0)))
thread.resume()
while (stop := thread.wait(0.2)) is not None and stop.kind is StopKind.GROUP_STOP:
    thread.resume()                                              # what was pending when it was seized
print("runs", flush=True)                                        # no stop was collected: CRIU was not told of it
time.sleep(600)
"""
PAUSE, GETPID = 34, 39


@pytest.fixture
def stopped(target: Counting) -> NotedProcess:
    os.kill(target.pid, signal.SIGSTOP)
    processes.wait_for_stop([target.pid], 10)
    noted = note_stopped(target.pid)
    assert noted is not None
    assert records.decode(records.encode(noted), NotedProcess) == noted
    return noted


def run_and_die(noted: NotedProcess, tid: int, call: int, state: str) -> None:
    """Run this system call at the start of the process's code, and be killed when the thread is in this state."""
    words = [sys.executable, "-c", TRACER, str(tid), str(noted.code_address), str(call)]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as tracer:
        assert tracer.stdout is not None
        assert tracer.stdout.readline()
        wait_until(lambda: _state(tid) == state, f"thread {tid} to be in state {state}")
        tracer.kill()


def _state(tid: int) -> str:
    stat = processes.read_stat(tid)
    return stat.status if stat is not None else "-"


def _code(noted: NotedProcess) -> bytes:
    with Path(f"/proc/{noted.id.pid}/mem").open("rb", buffering=0) as file:
        return os.pread(file.fileno(), len(noted.code), noted.code_address)


@pytest.mark.parametrize("which", ["main", "worker"])
def test_a_thread_in_a_call_of_the_killed_tracers_is_put_back(
    target: Counting, stopped: NotedProcess, which: str
) -> None:
    tid = target.pid if which == "main" else target.workers[0]
    run_and_die(stopped, tid, PAUSE, "S")
    wait_until(lambda: _state(tid) == "T", "the stop to hold it again")
    assert _code(stopped) != stopped.code
    put_back(stopped)
    assert _code(stopped) == stopped.code
    assert memory.read_maps(target.pid)
    os.kill(target.pid, signal.SIGCONT)
    target.assert_untouched()


def test_a_thread_that_is_not_in_criu_is_left_alone(target: Counting, stopped: NotedProcess) -> None:
    put_back(stopped)
    os.kill(target.pid, signal.SIGCONT)
    target.assert_untouched()


def test_a_breakpoint_that_the_tracer_has_not_been_told_of_is_deadly(target: Counting, stopped: NotedProcess) -> None:
    """The kernel delivers its SIGTRAP as it detaches the thread, before anybody else could trace it."""
    run_and_die(stopped, target.workers[0], GETPID, "t")
    wait_until(lambda: not processes.is_alive(stopped.id), "the process to end")
    put_back(stopped)

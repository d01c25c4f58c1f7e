"""An idle agent is in one system call without an end, so that a program may forbid itself nearly all of them."""

from __future__ import annotations

import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gpucr.interposer.client import Agent
from tests.counter import wait_until
from tests.interposer.conftest import PROGRAM, Job, Start, is_waiting, taken

MIB = 1 << 20

# seccomp(SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC): one of these calls, in any thread, ends the process
FORBIDS = """
import ctypes, platform, struct
class Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))
def forbid(numbers):
    step = lambda code, operand, yes=0: struct.pack("=HBBI", code, yes, 0, operand)
    steps = [step(0x20, 0)] + [step(0x15, each, len(numbers) - place) for place, each in enumerate(numbers)]
    steps += [step(0x06, 0x7FFF0000), step(0x06, 0x80000000)]
    libc = ctypes.CDLL(None)
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    seccomp = {"x86_64": 317, "aarch64": 277}[platform.machine()]
    assert libc.syscall(seccomp, 1, 1, ctypes.byref(Program(len(steps), b"".join(steps)))) == 0
"""
LOOKS = {"x86_64": (4, 6, 262, 332), "aarch64": (79, 291)}[platform.machine()]  # stat, lstat, newfstatat, statx


@pytest.fixture
def forbidding(start: Start, sim_only: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Job:
    monkeypatch.setenv("GPUCR_SIM_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("GPUCR_SIM_FIXED_COST_MS", "1")
    code = PROGRAM.replace('print("ready"', f'{FORBIDS}\nforbid({LOOKS})\nprint("ready"')
    process = start(sys.executable, "-c", code, str(5 * MIB))
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "ready"
    return Job(process)


def test_an_agent_waits_in_one_call(job: Callable[..., Job]) -> None:
    process = job(5 * MIB)
    wait_until(lambda: is_waiting(process.pid), "the agent's poll")
    with Agent(process.pid) as agent:
        agent.give_back(taken(agent), renew=True)
        agent.open_gate()
    wait_until(lambda: is_waiting(process.pid), "the agent's poll")


def test_the_agent_looks_at_no_path(forbidding: Job, agents: Path) -> None:
    """Not while gpucr works on the process either, or makes it listen again. (The simulated driver does.)"""
    wait_until(lambda: is_waiting(forbidding.pid), "the agent's poll")
    for is_lost in (False, True):
        if is_lost:
            shutil.rmtree(agents)
        with Agent(forbidding.pid) as agent:
            assert agent.status().blocks == len(agent.blocks()) == 1
            assert agent.close_gate(5).is_empty
            fd = os.memfd_create("kept")
            agent.keep(fd)
            os.close(fd)
            agent.keep(None)
            agent.open_gate()
        assert forbidding.is_right()
        wait_until(lambda: is_waiting(forbidding.pid), "the agent's poll")


def test_the_filter_of_this_test_works() -> None:
    code = f"import os\n{FORBIDS}\nforbid({LOOKS})\nos.stat('/')\n"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=30).returncode == -signal.SIGSYS

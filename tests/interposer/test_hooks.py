"""A program's own functions that are called before it is frozen, and when it continues."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import gpucr
from gpucr.gpu_state.interposed import hooks as called
from gpucr.interposer.build import SOURCES
from gpucr.interposer.client import Agent, ask_status
from gpucr.interposer.protocol import Code, Hooks, Refused
from gpucr.jobs.registered import registry
from gpucr.linux import processes
from tests import command
from tests.counter import wait_until
from tests.interposer.conftest import Start
from tests.lines import complete_lines
from tests.sandboxed import end_all_in

pytestmark = [pytest.mark.usefixtures("sim_only"), pytest.mark.in_turn]

PROGRAM = """
import ctypes, os, sys, time
import gpucr
cuda = ctypes.CDLL("libcuda.so.1")
context, pointer = ctypes.c_void_p(), ctypes.c_uint64()
cuda.cuInit(0), cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0), cuda.cuCtxSetCurrent(context)
assert cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(8 << 20)) == 0
data = bytes(range(256)) * 16
assert cuda.cuMemcpyHtoD_v2(pointer, data, ctypes.c_size_t(4096)) == 0
def memory():
    found = ctypes.create_string_buffer(4096)
    cuda.cuCtxSetCurrent(context)
    result = cuda.cuMemcpyDtoH_v2(found, pointer, ctypes.c_size_t(4096))
    return "right" if (result, found.raw) == (0, data) else f"wrong ({result})"
@gpucr.before_freeze
def before():
    print("before", memory(), flush=True)
    HOW
@gpucr.after_restore
def after():
    print("after", memory(), flush=True)
print("ready", flush=True)
while True:
    time.sleep(0.01)
"""
StartProgram = Callable[..., "Program"]


class Program:
    """A job of `gpucr run` with hooks."""

    def __init__(self, folder: Path, how: str) -> None:
        code = PROGRAM.replace("HOW", how)
        started = gpucr.run_job([sys.executable, "-c", code], name="hooked", cwd=folder, isolate=False, interpose=True)
        self.pid = started.record.pid
        wait_until(lambda: self.lines() == ["ready"], lambda: f"the program: {self.lines()}")

    def lines(self) -> list[str]:
        """What it has printed."""
        record = registry().find("hooked").record
        assert record is not None
        return complete_lines(record.log)


@pytest.fixture
def program(tmp_path: Path, state_home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StartProgram]:
    monkeypatch.setenv("GPUCR_INTERPOSER_DIR", str(tmp_path / "a"))
    work = tmp_path / "work"
    work.mkdir()
    yield lambda how="pass": Program(work, how)
    end_all_in(work)


TOLD = ["ready", "before right", "after right"]


def test_a_suspend_and_a_resume(program: StartProgram) -> None:
    job = program()
    report = gpucr.suspend(job.pid)
    assert job.lines() == TOLD[:2]
    assert [phase.name for phase in report.phases][:3] == ["first-pass", "before-freeze", "lock"]
    assert report.warnings == ()
    resumed = gpucr.resume(job.pid)
    assert job.lines() == TOLD
    assert resumed.warnings == ()


def test_a_move(program: StartProgram) -> None:
    job = program()
    gpucr.move(job.pid, gpu="1")
    assert job.lines() == TOLD


def test_a_freeze_and_a_thaw(program: StartProgram) -> None:
    job = program()
    with gpucr.freeze(job.pid):
        assert job.lines() == TOLD[:2]
    assert job.lines() == TOLD


@pytest.mark.criu
@pytest.mark.parametrize("persist", ["sync", "background"])
def test_a_dump_that_leaves_the_job_running(program: StartProgram, tmp_path: Path, persist: gpucr.Persist) -> None:
    job = program()
    report = gpucr.dump(job.pid, tmp_path / "s", leave_running=True, persist=persist)
    assert job.lines() == TOLD
    seconds = {phase.name: phase.seconds for phase in report.phases}
    assert report.downtime_s <= sum(seconds.values()) - seconds["before-freeze"] - seconds["after-restore"] + 1e-6


@pytest.mark.criu
def test_a_restore(program: StartProgram, tmp_path: Path) -> None:
    job = program()
    gpucr.dump(job.pid, tmp_path / "s")
    assert job.lines() == TOLD[:2]
    report = gpucr.restore(tmp_path / "s")
    assert report.warnings == ()
    assert job.lines() == TOLD


@pytest.mark.criu
@pytest.mark.parametrize("leave_running", [False, True])
def test_a_dump_while_it_is_suspended(leave_running: bool, program: StartProgram, tmp_path: Path) -> None:
    """Neither it nor its restore calls one: the program is told when it is resumed, and only once."""
    job = program()
    for number in range(2):
        gpucr.suspend(job.pid)
        gpucr.dump(job.pid, tmp_path / f"s{number}", leave_running=leave_running)
        if not leave_running:
            gpucr.restore(tmp_path / f"s{number}")
        assert job.lines() == [*TOLD, *TOLD[1:]][: 2 + 2 * number]
        assert gpucr.resume(job.pid).warnings == ()
        assert job.lines() == [*TOLD, *TOLD[1:]][: 3 + 2 * number]


def test_refused_and_dry_run_operations_call_no_hook(program: StartProgram, tmp_path: Path) -> None:
    job = program()
    with pytest.raises(gpucr.InvalidRequest):
        gpucr.move(job.pid, gpu="7")
    assert command.run("dump", job.pid, "--to", tmp_path / "s", "--dry-run").returncode == 0
    assert job.lines() == TOLD[:1]


def test_a_freeze_that_fails(program: StartProgram, monkeypatch: pytest.MonkeyPatch) -> None:
    job = program()

    def fail(*_: object) -> None:
        raise gpucr.GpucrError("for the test")

    monkeypatch.setattr("gpucr.gpu_state.steps.CheckpointGang.run", fail)
    with pytest.raises(gpucr.GpucrError, match="for the test"):
        gpucr.suspend(job.pid)
    assert job.lines() == TOLD


SUSPENDS_FOR_EVER = """
import sys, time
import gpucr
from gpucr.gpu_state.steps import CheckpointGang
CheckpointGang.run = lambda *_: print("locked", flush=True) or time.sleep(600)
gpucr.suspend(int(sys.argv[1]))
"""


def test_the_guard_calls_hooks_too(program: StartProgram) -> None:
    job = program()
    with subprocess.Popen([sys.executable, "-c", SUSPENDS_FOR_EVER, str(job.pid)], stdout=subprocess.PIPE) as suspends:
        assert suspends.stdout is not None
        assert suspends.stdout.readline() == b"locked\n"
        suspends.kill()
    wait_until(lambda: job.lines() == TOLD, lambda: str(job.lines()))


def test_a_failing_hook_is_reported_and_the_freeze_continues(program: StartProgram) -> None:
    job = program("raise ValueError('no')")
    done = command.run("suspend", job.pid)
    assert done.returncode == 0
    assert f"warning: process {job.pid}: 1 of 1 function of before_freeze failed" in done.stderr
    assert job.lines()[-1] == "ValueError: no"
    gpucr.resume(job.pid)
    assert job.lines()[-1] == "after right"


def test_a_slow_hook_is_not_waited_for(program: StartProgram, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    enough = tmp_path / "enough"
    job = program(f"while not os.path.exists({str(enough)!r}): time.sleep(0.01)")
    monkeypatch.setattr(called, "LIMIT_S", 0.1)
    report = gpucr.suspend(job.pid)
    assert report.warnings == (f"process {job.pid}: what it registered with before_freeze takes longer than 0.1 s",)
    resumed = gpucr.resume(job.pid)
    assert resumed.warnings == (f"process {job.pid}: what it registered with after_restore takes longer than 0.1 s",)
    enough.touch()
    with Agent(job.pid) as agent:
        wait_until(lambda: _calls(agent) == (1, 0), "the first one to end")
    assert job.lines()[-1] == "after right"


def _calls(agent: Agent) -> tuple[int, int] | None:
    try:
        return agent.call_hooks(Hooks.AFTER_RESTORE, 0.05)
    except Refused as e:
        return None if e.code == Code.TOO_SLOW else (-1, -1)


def test_hooks_are_not_called_behind_a_closed_gate(program: StartProgram) -> None:
    job = program()
    with Agent(job.pid) as agent:
        assert agent.close_gate(5).is_empty
        with pytest.raises(Refused, match="gate is closed"):
            agent.call_hooks(Hooks.BEFORE_FREEZE, 1)
        agent.open_gate()
        for which, wait_s in ((2, 1.0), (Hooks.BEFORE_FREEZE, 61.0)):
            with pytest.raises(Refused, match="malformed"):
                agent.call_hooks(which, wait_s)  # type: ignore[arg-type]
    assert job.lines() == TOLD[:1]


def test_signals_reach_processes_a_hook_starts(program: StartProgram) -> None:
    """The agent itself blocks all of them."""
    job = program("os.system('grep SigBlk: /proc/self/status')")
    gpucr.suspend(job.pid)
    assert job.lines()[-1].split() == ["SigBlk:", "0" * 16]


def test_a_child_does_not_inherit_hooks(program: StartProgram) -> None:
    job = program("child = os.fork()\n    if child == 0: time.sleep(600)")
    gpucr.suspend(job.pid)
    gpucr.resume(job.pid)
    (child,) = (each for each in processes.tree(job.pid) if each.pid != job.pid)
    assert ask_status(child.pid) is None
    os.kill(child.pid, signal.SIGKILL)
    assert [line for line in job.lines() if line in TOLD] == TOLD  # newer Pythons warn of a fork beside threads


def test_at_most_sixteen_hooks_are_registered(program: StartProgram) -> None:
    job = program("[gpucr.after_restore(after) for _ in range(20)]")
    report = gpucr.suspend(job.pid)
    assert report.warnings == (f"process {job.pid}: 1 of 1 function of before_freeze failed",)
    assert job.lines()[-1] == "ValueError: 16 functions are registered already"
    gpucr.resume(job.pid)
    assert job.lines().count("after right") == 16


def test_without_the_interposer_nothing_happens() -> None:
    assert gpucr.before_freeze(print) is print
    assert gpucr.after_restore(print) is print


C_PROGRAM = """
#include <stdio.h>
#include "gpucr.h"
static int hook(void *data) { return *(int *)data; }
int main(void) {
    int number = 1;
    if (gpucr_before_freeze == NULL) { puts("none"); return 0; }
    int first = gpucr_before_freeze(hook, &number);
    printf("%d %d %d\\n", first, gpucr_after_restore(hook, &number), gpucr_after_restore(NULL, NULL));
    return 0;
}
"""


@pytest.mark.parametrize("compiler", ["cc", "c++"])
def test_a_c_program_links_nothing(start: Start, tmp_path: Path, compiler: str) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"there is no {compiler}")
    source = tmp_path / ("program.c" if compiler == "cc" else "program.cc")
    source.write_text(C_PROGRAM)
    binary = tmp_path / "program"
    subprocess.run([compiler, "-Wall", "-Werror", f"-I{SOURCES}", "-o", binary, source], check=True, timeout=60)
    assert start(str(binary)).communicate()[0] == "0 0 -1\n"
    assert subprocess.run([binary], capture_output=True, text=True, check=True).stdout == "none\n"

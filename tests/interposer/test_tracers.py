"""Tracing of processes with an interposer under Yama's limits. A filter in the program stands in for Yama."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import gpucr
from gpucr.diagnosis import preflight
from gpucr.diagnosis.preflight import unprivileged
from gpucr.errors import GpucrError
from gpucr.interposer.client import Agent, ask_status
from gpucr.interposer.protocol import Refused
from gpucr.linux import capabilities, tracing
from tests.children import Child
from tests.command import python
from tests.counter import wait_until
from tests.interposer.conftest import Start

ANYBODY, NOBODY = 0xFFFFFFFF, 0
A_DEBUGGER = 4242

# prctl(PR_SET_PTRACER, one of these) succeeds, and does nothing; every other one fails as on a kernel without Yama.
YAMA = """
import ctypes, os, struct, sys
accepted = [int(word) for word in sys.argv[1].split(",") if word]
def step(code, operand, if_true=0, if_false=0):
    return struct.pack("=HBBI", code, if_true, if_false, operand)
count = len(accepted)
steps = [step(0x20, 0), step(0x15, 157, 0, 3 + count + 1), step(0x20, 16), step(0x15, 0x59616D61, 0, 1 + count + 1)]
steps += [step(0x20, 24)] + [step(0x15, each, count - place) for place, each in enumerate(accepted)]
steps += [step(0x06, 0x50016), step(0x06, 0x50000), step(0x06, 0x7FFF0000)]
steps[1] = step(0x15, 157, 0, len(steps) - 3)
steps[3] = step(0x15, 0x59616D61, 0, len(steps) - 5)
class Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))
prctl = ctypes.CDLL(None).prctl
assert prctl(38, 1, 0, 0, 0) == 0
assert prctl(22, 2, ctypes.byref(Program(len(steps), b"".join(steps))), 0, 0) == 0
os.execv(sys.argv[2], sys.argv[2:])
"""

PROGRAM = """
import ctypes, os, sys
cuda, libc = ctypes.CDLL("libcuda.so.1"), ctypes.CDLL(None)
context = ctypes.c_void_p()
cuda.cuInit(0), cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0), cuda.cuCtxSetCurrent(context)
pointer = ctypes.c_uint64()
assert cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(4 << 20)) == 0
print("ready", flush=True)
for line in sys.stdin:
    tracer = int(line)
    print(libc.prctl(0x59616D61, ctypes.c_ulong(tracer), 0, 0, 0), flush=True)
"""

Begin = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def job(start: Start, sim_only: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Begin:
    """A CUDA program on a kernel that accepts these tracers."""
    monkeypatch.setenv("GPUCR_SIM_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("GPUCR_SIM_FIXED_COST_MS", "1")

    def begin(*accepted: int) -> subprocess.Popen[str]:
        words = ",".join(map(str, accepted))
        process = start(sys.executable, "-c", YAMA, words, sys.executable, "-c", PROGRAM)
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "ready"
        return process

    return begin


def say(process: subprocess.Popen[str], line: object) -> str:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()
    return process.stdout.readline().strip()


def is_open(pid: int) -> bool:
    status = ask_status(pid)
    assert status is not None
    return bool(status.traceable)


def test_tracing_is_allowed_and_revoked(job: Begin) -> None:
    process = job(ANYBODY, NOBODY)
    with Agent(process.pid) as agent:
        agent.open_to_tracers(is_open=True)
    assert is_open(process.pid)
    with Agent(process.pid) as agent:
        agent.open_to_tracers(is_open=False)
    assert not is_open(process.pid)


def test_the_programs_own_tracer_is_restored(job: Begin) -> None:
    process = job(ANYBODY, A_DEBUGGER)  # to nobody it cannot be closed: that would be another choice than the program's
    assert say(process, A_DEBUGGER) == "0"
    with Agent(process.pid) as agent:
        agent.open_to_tracers(is_open=True)
        agent.open_to_tracers(is_open=False)
    assert not is_open(process.pid)


def test_a_tracer_chosen_meanwhile_is_restored_too(job: Begin) -> None:
    process = job(ANYBODY, A_DEBUGGER)
    with Agent(process.pid) as agent:
        agent.open_to_tracers(is_open=True)
        assert say(process, A_DEBUGGER) == "0"
        agent.open_to_tracers(is_open=False)


def test_an_ended_tracer_is_not_restored(job: Begin) -> None:
    process = job(ANYBODY, NOBODY)
    assert say(process, A_DEBUGGER) == "-1"
    with Agent(process.pid) as agent:
        agent.open_to_tracers(is_open=True)
        agent.open_to_tracers(is_open=False)


def test_a_kernel_without_yama_is_reported(job: Begin) -> None:
    process = job()
    with Agent(process.pid) as agent, pytest.raises(Refused, match="not here"):
        agent.open_to_tracers(is_open=True)
    assert not is_open(process.pid)


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[bool]:
    """This machine has Yama, and gpucr no privilege against it. Returns whether the job was open at each preflight."""
    (tmp_path / "scope").write_text("1\n")
    monkeypatch.setattr(tracing, "PTRACE_SCOPE", tmp_path / "scope")
    monkeypatch.setattr(tracing, "takes_a_grant", lambda: True)
    seen: list[bool] = []
    real = unprivileged.check_ptrace

    def check(pids: list[int]) -> object:
        named = list(pids)
        seen.extend(is_open(pid) for pid in named)
        return real(named)

    monkeypatch.setattr(preflight, "check_ptrace", check)
    return seen


def test_a_job_is_traceable_during_an_operation(job: Begin, limited: list[bool]) -> None:
    process = job(ANYBODY, NOBODY)
    gpucr.freeze(process.pid).thaw()
    assert limited == [True]
    assert not is_open(process.pid)


def test_tracing_is_revoked_when_the_operation_fails(
    job: Begin, limited: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    process = job(ANYBODY, NOBODY)
    monkeypatch.setattr(tracing, "is_allowed", lambda pid: pid != process.pid)
    with pytest.raises(GpucrError, match=f"attach to process {process.pid}") as refused:
        gpucr.freeze(process.pid)
    assert refused.value.code == "GPUCR-ONLY-ROOT"
    assert "kernel.yama.ptrace_scope is 1" in f"{refused.value} {refused.value.hint}"
    assert limited == [True]
    assert not is_open(process.pid)


def test_the_guard_revokes_tracing_when_gpucr_is_killed(job: Begin, limited: list[bool]) -> None:
    process = job(ANYBODY, NOBODY)
    code = (
        "import os, sys, gpucr\n"
        "from gpucr.linux import tracing\n"
        "tracing.takes_a_grant = lambda: True\n"
        "frozen = gpucr.freeze(int(sys.argv[1]))\n"
        "os.kill(os.getpid(), 9)\n"
    )
    assert python(code, process.pid).returncode in (-signal.SIGKILL, 128 + signal.SIGKILL)
    wait_until(lambda: (status := ask_status(process.pid)) is not None and not status.traceable, "the guard")


def test_no_agent_is_asked_where_tracing_is_allowed(job: Begin) -> None:
    process = job(ANYBODY)  # to close it again would fail
    done = python("import sys, gpucr; gpucr.freeze(int(sys.argv[1])).thaw()", process.pid)
    assert done.returncode == 0, done.stderr
    assert not is_open(process.pid)


# --- without an interposer ---------------------------------------------------------------------------------------


def test_tracing_is_tried_instead_of_inferred(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "scope").write_text("1\n")
    monkeypatch.setattr(tracing, "PTRACE_SCOPE", tmp_path / "scope")
    child = Child([sys.executable, "-c", "import signal; print('ready', flush=True); signal.pause()"])
    try:
        assert tracing.is_allowed(child.pid)
        assert unprivileged.check_ptrace([child.pid]) == []  # regardless of Yama's setting
        monkeypatch.setattr(tracing, "is_allowed", lambda pid: False)
        (finding,) = unprivileged.check_ptrace([child.pid])
        assert (finding.pid, finding.code) == (child.pid, "GPUCR-ONLY-ROOT")
        assert "gpucr run" in finding.remedy
    finally:
        child.close()
    (tmp_path / "scope").unlink()
    assert unprivileged.check_ptrace([os.getpid()]) == []


def test_a_process_that_denies_tracing_is_found(job: Begin) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to be another user")
    process = job()
    code = (
        "import os, sys\n"
        "from gpucr.linux import tracing\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "print(tracing.is_allowed(int(sys.argv[1])), tracing.is_allowed(999999999))\n"
    )
    assert python(code, process.pid).stdout.split() == ["False", "True"]


@pytest.mark.parametrize(("scope", "has"), [("0", False), ("1", True), ("2", True), ("3", True)])
def test_a_refusal_names_the_setting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, scope: str, *, has: bool) -> None:
    (tmp_path / "scope").write_text(f"{scope}\n")
    monkeypatch.setattr(tracing, "PTRACE_SCOPE", tmp_path / "scope")
    (tmp_path / "status").write_text(
        "Uid:\t1000\t1000\t1000\nNoNewPrivs:\t0\nSeccomp:\t2\n"
        + "".join(f"{name}:\t0\n" for name in ("CapPrm", "CapEff", "CapInh", "CapBnd", "CapAmb"))
    )
    monkeypatch.setattr(capabilities, "STATUS", tmp_path / "status")
    limits = tracing.limits()
    assert (f"kernel.yama.ptrace_scope is {scope}" in limits) is has
    assert "seccomp=unconfined" in limits


def test_without_yama_nothing_is_limited(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tracing, "PTRACE_SCOPE", tmp_path / "none")
    assert tracing.yama_scope() is None
    assert not tracing.takes_a_grant()

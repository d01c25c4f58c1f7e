"""Memory limits, and memory that runs out at any moment: a clear error, and the job as it was found."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import gpucr
from gpucr.driver.cuda import CudaDriver
from gpucr.errors import OutputLost
from gpucr.model import CudaState
from tests import command
from tests.counter import Counter, CounterFactory, wait_until
from tests.storm import later, long, sample

pytestmark = pytest.mark.in_turn

LIMITS_MIB = (20, 32, 40, 48, 56, 72, 88, 104, 136, 192)
_SMALL_MIB = 48
"""Below, what grows may be the stack, which the kernel answers with SIGSEGV, or Python gives up (SIGABRT)."""

DONE, FAILED, BROKEN = 0, 1, 4

FAILING = """
import sys
left = int(sys.argv[1])
def count(frame, event, argument):
    global left
    file = frame.f_code.co_filename
    if event == "call" and "/gpucr/" in file and not file.endswith("__main__.py"):
        if sys.is_finalizing():
            return
        left -= 1
        if left == 0:
            raise MemoryError
sys.argv[1:] = sys.argv[2:]
from gpucr.__main__ import main
import gpucr.cli.main
sys.setprofile(count)
main()
"""

WITHOUT_ANY = """
import resource
from pathlib import Path
import gpucr.__main__
gpucr.__main__._load_msgspec = lambda: fill()
taken = [None]
def fill():
    resource.setrlimit(resource.RLIMIT_AS, (int(Path("/proc/self/statm").read_text().split()[0]) * 4096,) * 2)
    for size in (1 << 20, 4096, 64, 1):
        try:
            while True:
                taken[0] = (taken[0], bytes(size))
        except MemoryError:
            pass
    raise MemoryError
gpucr.__main__.main()
"""

FAILING_AT = """
import sys
kind, wanted = sys.argv[1:3]
del sys.argv[1:3]
from gpucr.cli.main import main
def fail(frame, event, argument):
    if event == kind and frame.f_code.co_name == wanted:
        sys.setprofile(None)
        raise MemoryError
sys.setprofile(fail)
main()
"""


def limited(mib: int, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a command with so much address space."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (mib << 20, mib << 20))

    return subprocess.run(
        command.command(*arguments),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=command.TIMEOUT_S,
        check=False,
        preexec_fn=limit,
    )


def ended_before_gpucr_could_help_it(done: subprocess.CompletedProcess[str]) -> bool:
    gave_up = done.returncode == -signal.SIGABRT and "Cannot recover from MemoryErrors" in done.stderr
    return gave_up or done.returncode == -signal.SIGSEGV


def assert_said(done: subprocess.CompletedProcess[str]) -> None:
    """It ended as documented, with an error in words where it failed."""
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr
    assert done.returncode in (DONE, FAILED, BROKEN), done.stderr
    if done.returncode != DONE:
        assert "error: " in done.stderr


@pytest.mark.parametrize("mib", sample(LIMITS_MIB, 12))
def test_a_limit_on_the_address_space(counter: CounterFactory, driver: CudaDriver, state_home: Path, mib: int) -> None:
    job = counter("--mib", "2")
    for arguments in (("suspend", job.pid), ("resume", job.pid), ("ps",), ("jobs",), ("state", job.pid), ("--help",)):
        before = driver.state(job.pid)
        done = limited(mib, *arguments)
        if mib < _SMALL_MIB and ended_before_gpucr_could_help_it(done):
            continue
        assert_said(done)
        assert driver.state(job.pid) in (CudaState.RUNNING, CudaState.CHECKPOINTED)
        if done.returncode != DONE:
            assert driver.state(job.pid) is before
    if driver.state(job.pid) is CudaState.CHECKPOINTED:
        gpucr.resume(job.pid)
    assert job.send("verify") == "ok"


def test_not_a_byte_is_left_while_it_loads() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_ANY], capture_output=True, text=True, timeout=60, check=False)
    assert_said(done)
    assert done.returncode == BROKEN


@pytest.mark.criu
@pytest.mark.parametrize("mib", sample(LIMITS_MIB[1:], 12))
def test_a_dump_within_a_limit(
    counter: CounterFactory, driver: CudaDriver, tmp_path: Path, state_home: Path, mib: int
) -> None:
    job = counter("--mib", "2")
    done = limited(mib, "dump", job.pid, "--to", tmp_path / "s", "--leave-running")
    if mib >= _SMALL_MIB or not ended_before_gpucr_could_help_it(done):
        assert_said(done)
    assert (tmp_path / "s").exists() is (done.returncode == DONE)
    assert driver.state(job.pid) is CudaState.RUNNING
    assert job.send("verify") == "ok"


@pytest.mark.parametrize("first", [later(2), 3, later(5)])
def test_memory_runs_out_at_any_moment(counter: CounterFactory, driver: CudaDriver, first: int) -> None:
    """At one call of a function of gpucr's, the further apart the later it is."""
    job = counter("--mib", "2")
    call = first
    while True:
        done = failing(call, job)
        state = driver.state(job.pid)
        if done.returncode == OutputLost.exit_code:  # after the last step
            assert state is CudaState.CHECKPOINTED, (call, done.stderr)
            assert "the operation succeeded" in done.stderr
        else:
            assert_said(done)
        assert state in (CudaState.RUNNING, CudaState.CHECKPOINTED), (call, done.stderr)
        if state is CudaState.CHECKPOINTED:
            gpucr.resume(job.pid)
        if done.returncode == DONE and "too little memory" not in done.stderr:
            break
        call = call * 2 + first
    assert job.send("verify") == "ok"


def test_memory_runs_out_at_the_very_end() -> None:
    program = FAILING_AT.replace("gpucr.cli.main", "gpucr.__main__")
    done = run_failing_at(program, "call", "_end_at_once", "--version")
    assert (done.returncode, done.stderr) == (DONE, "")


def failing(call: int, job: Counter) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", FAILING, str(call), "suspend", str(job.pid)],
        env={**os.environ, "PYTHONPATH": str(Path(gpucr.__file__).parents[1])},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=command.TIMEOUT_S,
        check=False,
    )


LATE = (("return", "run_steps"), ("call", "dismiss"))
"""What follows the last step; then the command prints."""


def run_failing_at(program: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return command.python(program, *arguments)


def fails_late(moment: tuple[str, str], *arguments: object) -> None:
    """Memory runs out when everything has been done: the exit code says so."""
    done = run_failing_at(FAILING_AT, *moment, *arguments)
    expected = DONE if moment == ("call", "dismiss") else OutputLost.exit_code  # the guard is dismissed once more
    assert done.returncode == expected, f"{arguments[0]}, {moment}: {done.returncode} {done.stderr}"
    assert ("the operation succeeded" in done.stderr) is (expected != DONE)


@long
def test_memory_runs_out_after_the_last_step(counter: CounterFactory, driver: CudaDriver) -> None:
    job = counter("--mib", "1", "--fork", "1")
    report = (("return", "change_report"), ("call", "print_change"), ("return", "print_change"))
    for moment in (*LATE, ("call", "remember"), *report):
        fails_late(moment, "suspend", job.pid)
        assert {driver.state(pid) for pid in job.processes()} == {CudaState.CHECKPOINTED}
        gpucr.resume(job.pid)
    for moment in (*LATE, ("call", "forget"), *report):
        gpucr.suspend(job.pid)
        fails_late(moment, "resume", job.pid)
        assert {driver.state(pid) for pid in job.processes()} == {CudaState.RUNNING}
    assert job.send("verify") == "ok"


@long
@pytest.mark.criu
def test_memory_runs_out_after_a_dump_and_a_restore(counter: CounterFactory, tmp_path: Path) -> None:
    job = counter("--mib", "1", "--fork", "1")
    moments = sample((*LATE, ("call", "say_warnings"), ("call", "print_phases")), 2)
    for number, moment in enumerate(moments):
        kept = tmp_path / f"kept-{number}"
        fails_late(moment, "dump", job.pid, "--to", kept, "--leave-running")
        assert job.send("verify") == "ok"
        gpucr.inspect(kept)
    for number, moment in enumerate(moments):
        snapshot = tmp_path / f"s-{number}"
        fails_late(moment, "dump", job.pid, "--to", snapshot)
        if number == 0:
            job.reap()
        wait_until(lambda: not job.processes(), "the job to be gone")
        fails_late(moment, "restore", snapshot)
        assert job.send("verify") == "ok"


def test_memory_runs_out_while_the_error_is_made(counter: CounterFactory, driver: CudaDriver) -> None:
    job = counter("--mib", "1")
    no_error = (
        "import gpucr.cli.failures\ndef fail(*_, **__):\n    raise MemoryError\ngpucr.cli.failures.unexpected = fail\n"
    )
    for arguments, name, expected in (
        (("suspend", job.pid), "print_change", OutputLost.exit_code),
        (("resume", job.pid), "run_steps", FAILED),
    ):
        done = run_failing_at(no_error + FAILING_AT, "call", name, *arguments)
        assert (done.returncode, done.stderr.splitlines()[-1]) == (expected, "error: out of memory"), done.stderr
        assert driver.state(job.pid) is CudaState.CHECKPOINTED
    gpucr.resume(job.pid)

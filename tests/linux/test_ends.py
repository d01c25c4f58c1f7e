"""gpucr.linux.ends, on real processes that are no children of the code that asks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from gpucr.linux import capabilities, ends, processes
from gpucr.model import ProcessId
from tests.counter import wait_until

TELLS_AFTERWARDS = tuple(map(int, os.uname().release.split(".")[:2])) >= (6, 15)


@contextmanager
def started(code: str) -> Iterator[tuple[subprocess.Popen[bytes], ProcessId, int]]:
    """A Python that waits for its input to end and then runs ``code``, its identity and a pidfd."""
    child = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", f"import os, sys; sys.stdin.read(); {code}"], stdin=subprocess.PIPE
    )
    pidfd = os.pidfd_open(child.pid)
    stat = processes.read_stat(child.pid)
    assert stat is not None
    try:
        yield child, ProcessId(child.pid, stat.start_time_ticks), pidfd
    finally:
        child.kill()
        child.communicate()
        os.close(pidfd)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("os._exit(0)", "exited with 0"),
        ("os._exit(3)", "exited with 3"),
        ("os.kill(os.getpid(), 9)", "was ended by SIGKILL"),
        ("os.kill(os.getpid(), 40)", "was ended by signal 40"),
    ],
)
def test_how_a_process_ended(code: str, said: str) -> None:
    with started(code) as (child, process, pidfd):
        assert ends.wait_status(process, pidfd) is None
        assert child.stdin is not None
        child.stdin.close()
        child.stdin = None
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        if capabilities.can_checkpoint_processes():
            assert ends.how(ends.wait_status(process, None)) == said
        child.wait()
        assert ends.wait_status(process, None) is None
        assert ends.how(ends.wait_status(process, pidfd)) == (said if TELLS_AFTERWARDS else ends.how(None))


def test_a_process_that_reuses_the_pid_does_not_count() -> None:
    with started("os._exit(0)") as (_, process, _pidfd):
        assert ends.wait_status(ProcessId(process.pid, process.start_time_ticks - 2), None) is None


def test_run_time_tells_a_stopped_process_from_a_computing_one() -> None:
    with started("exec('while True: pass')") as (child, process, _):
        assert child.stdin is not None
        child.stdin.close()
        child.stdin = None
        os.kill(child.pid, signal.SIGSTOP)
        wait_until(lambda: (stat := processes.read_stat(child.pid)) is not None and stat.status == "T", "the stop")
        before = ends._cpu_ns(child.pid, child.pid)
        ends.wait_until_they_ran([process], 0.05)
        assert ends._cpu_ns(child.pid, child.pid) == before
        os.kill(child.pid, signal.SIGCONT)
        ends.wait_until_they_ran([process], 60.0)
        assert ends._cpu_ns(child.pid, child.pid) > before

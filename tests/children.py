"""Real processes for unit tests: small programs that say when they are ready, and end with their whole group."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from gpucr.linux.processes import read_stat
from gpucr.model import ProcessId
from tests.counter import wait_until

NOBODY_UID = 65534
"""A user without privileges; it needs no entry in /etc/passwd."""

PTRACE_O_TRACEEXIT = 0x40
"""For `tracer_of`: the process is held at its exit."""

WITH_A_THREAD = """
import threading, signal
thread = threading.Thread(target=threading.Event().wait, daemon=True)
thread.start()
print(thread.native_id, flush=True)
signal.pause()
"""
"""For `python`: it prints the id of its second thread."""


class Child:
    """A running program, leader of a process group of its own. ``words`` is what it printed when it was ready."""

    def __init__(self, arguments: list[str]) -> None:
        self._process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, start_new_session=True)
        assert self._process.stdout is not None
        self.pid = self._process.pid
        self.words = tuple(self._process.stdout.readline().split())
        if not self.words:
            self.close()
            pytest.fail(f"{arguments} ended before it was ready")

    @property
    def id(self) -> ProcessId:
        """Pid and start time."""
        return identity(self.pid)

    @property
    def numbers(self) -> tuple[int, ...]:
        """What it printed, as numbers."""
        return tuple(map(int, self.words))

    def line(self) -> str:
        """The next line that it, or a child of it, prints."""
        assert self._process.stdout is not None
        return self._process.stdout.readline().rstrip("\n")

    def make_zombie(self) -> None:
        """Kill it without collecting it."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)

    def reap(self) -> int:
        """Wait for its end; the pid is free afterwards."""
        return self._process.wait()

    def close(self) -> None:
        """Kill its group and collect it."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


@contextlib.contextmanager
def python(code: str, *arguments: object) -> Iterator[Child]:
    """A bare Python (no site-packages) that runs ``code``, which prints one line when it is ready."""
    child = Child([sys.executable, "-I", "-S", "-c", code, *map(str, arguments)])
    try:
        yield child
    finally:
        child.close()


@contextlib.contextmanager
def sleeper() -> Iterator[Child]:
    """A process that does nothing until it is killed."""
    child = Child(["/bin/sh", "-c", "echo ready; exec sleep 1000"])
    try:
        wait_until(lambda: _name(child.pid) == "sleep", "sh to become sleep")
        yield child
    finally:
        child.close()


def _name(pid: int) -> str | None:
    stat = read_stat(pid)
    return stat.name if stat is not None else None


def status_of(pid: int) -> str:
    """The state letter of a process or thread."""
    stat = read_stat(pid)
    return stat.status if stat is not None else "gone"


def tracer_of(pid: int, options: int = 0) -> contextlib.AbstractContextManager[Child]:
    """A process that traces another one (PTRACE_SEIZE, as strace and gdb do)."""
    code = (
        "import ctypes, signal, sys; libc = ctypes.CDLL(None)\n"
        "assert libc.ptrace(0x4206, int(sys.argv[1]), None, ctypes.c_void_p(int(sys.argv[2]))) == 0\n"
        "print('tracing', flush=True); signal.pause()"
    )
    return python(code, pid, options)


def identity(pid: int) -> ProcessId:
    """The identity of a process that is there."""
    stat = read_stat(pid)
    assert stat is not None
    return ProcessId(pid, stat.start_time_ticks)


def unused_pid() -> int:
    """A pid that no process has: that of a process which has just ended (the kernel hands out pids in turn)."""
    with sleeper() as child:
        return child.pid

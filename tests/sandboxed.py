"""The counter program in a sandbox, and how to talk to it there."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import gpucr
from gpucr.jobs import sandbox
from gpucr.linux import namespaces
from gpucr.sim import build as simulator
from tests.counter import DEADLINE_S, processes_in, wait_until

_READY = re.compile(r"^ready pid=(\d+) port=(\d+) ", re.MULTILINE)


def in_network_of(pid: int, action: Callable[[], socket.socket]) -> socket.socket:
    """A socket that is made in a process's network namespace, by a thread that goes there for it."""
    made: list[socket.socket] = []

    def work() -> None:
        with namespaces.opened(pid, "net") as fds:
            namespaces.enter(fds["net"], "net")
            made.append(action())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return made[0]


class SandboxedCounter:
    """A job with this pid, started by `gpucr.run_job` or restored from a snapshot of such a one."""

    def __init__(self, pid: int, port: int) -> None:
        self.pid = pid
        self.port = port

        def connect() -> socket.socket:
            made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            made.connect(("127.0.0.1", port))
            return made

        self._socket = in_network_of(pid, connect)

    def __enter__(self) -> SandboxedCounter:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    @property
    def sandbox(self) -> sandbox.Sandbox:
        found = sandbox.of(self.pid)
        assert found is not None
        return found

    def send(self, text: str) -> str:
        """Send one packet and return the answer."""
        self._socket.send(text.encode())
        if not select.select([self._socket], [], [], DEADLINE_S)[0]:
            pytest.fail(f"counter {self.pid} did not answer within {DEADLINE_S:g} s")
        return self._socket.recv(4096).decode().strip()

    def ask(self) -> int:
        """The incremented counter; the first answer is 101."""
        return int(self.send("hello"))


def start_counter(folder: Path, *arguments: str, name: str = "counter", **options: object) -> SandboxedCounter:
    """Run the counter below a keeper, in ``folder``, and wait until it is ready."""
    started = gpucr.run_job(
        [str(simulator.build() / "counter"), "--port", "0", *arguments],
        name=name,
        cwd=folder,
        **options,  # type: ignore[arg-type]
    )
    return SandboxedCounter(started.record.pid, wait_ready(started.record.log))


def wait_ready(output: Path) -> int:
    """Wait until the counter that prints to this file is ready. Returns its port."""
    wait_until(lambda: output.exists() and _READY.search(output.read_text()) is not None, "the counter to be ready")
    ready = _READY.search(output.read_text())
    assert ready is not None
    return int(ready[2])


def end_all_in(folder: Path) -> None:
    """Kill every process whose working folder this is, also those that one of them has just started."""

    def are_gone() -> bool:
        for pid in processes_in(folder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not processes_in(folder)

    wait_until(are_gone, "the jobs to end")

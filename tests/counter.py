"""The CUDA program that the tests act on, real or simulated: it keeps a counter in device memory."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from gpucr.errors import DeadlineExceeded
from gpucr.linux.processes import all_pids, read_stat
from gpucr.sim import build as simulator
from tests.patience import PATIENCE

DEADLINE_S = 60.0 * PATIENCE
_READY = re.compile(r"^ready pid=\d+ port=(\d+) .*\n", re.MULTILINE)


def wait_until(
    condition: Callable[[], bool],
    what: str | Callable[[], str],
    timeout_s: float = DEADLINE_S,
    every_s: float = 0.002,
) -> None:
    """Poll until the condition holds; fail the test, naming ``what`` it waited for, after ``timeout_s``.

    Most of the time is slept, however long a look takes: what is waited for needs the processor.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        begin = time.monotonic()
        if condition():
            return
        end = time.monotonic()
        if end > deadline:
            pytest.fail(f"waited {timeout_s:g} s without success for {what if isinstance(what, str) else what()}")
        time.sleep(max(every_s, 2 * (end - begin)))


def processes_in(folder: Path) -> list[int]:
    """The pids of all processes whose working folder this is, a root first, then in the order of their creation.

    That is not the order of their numbers: after the largest pid the kernel continues with small ones. Zombies are left
    out. The folder is known by its inode: in another root folder, a process can have one of the same name.
    """
    parents: dict[int, int] = {}
    try:
        wanted = folder.stat()
    except FileNotFoundError:
        return []
    for pid in all_pids():  # hundreds, and a test looks often: no Path is made of them
        with contextlib.suppress(OSError):  # gone meanwhile, a kernel thread, or another user's
            if os.path.samestat(os.stat(f"/proc/{pid}/cwd"), wanted) and (stat := read_stat(pid)) is not None:
                parents[pid] = stat.parent_pid
    root = min((pid for pid, parent in parents.items() if parent not in parents), default=0)
    largest = int(Path("/proc/sys/kernel/pid_max").read_text())
    return sorted(parents, key=lambda pid: (pid - root) % largest)


def processes_of_this_test() -> list[int]:
    """The pids of all processes that inherited the running test's environment; other tests may run beside it."""
    mark = f"PYTEST_CURRENT_TEST={os.environ['PYTEST_CURRENT_TEST'].rpartition(' ')[0]} ".encode()
    pids = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # gone meanwhile, or another user's
            if entry.name.isdigit() and any(
                member.startswith(mark) for member in (entry / "environ").read_bytes().split(b"\0")
            ):
                pids.append(int(entry.name))
    return sorted(pids)


def state_in(path: Path) -> dict[str, Any]:
    """What a running program last wrote into ``path`` as JSON, in one write at offset 0.

    Reading beside a write may give a mix of old and new; the same twice is none.
    """
    text = path.read_text()
    while text != (text := path.read_text()):
        pass
    state: dict[str, Any] = json.loads(text)
    return state


def out_of_time(operation: Callable[[float], object], message: str, limits_s: Sequence[float]) -> None:
    """Assert that the operation, given such a limit, ends with DeadlineExceeded and this message.

    On a busy machine the time may be over before what the message reports: then again with the next limit.
    """
    for limit_s in limits_s:
        with pytest.raises(DeadlineExceeded) as caught:
            operation(limit_s)
        if message in caught.value.message:
            return
    pytest.fail(f"{message!r} is not in: {caught.value.message}")


class Counter:
    """A running counter program. It is the leader of its own session and process group.

    Its working folder is private, which tells its processes from all others even after a restore under CRIU.
    """

    def __init__(self, folder: Path, arguments: tuple[str, ...], env: dict[str, str] | None) -> None:
        self.folder = folder
        program = str(simulator.build() / "counter")
        with (folder / "stdout").open("wb") as out, (folder / "stderr").open("wb") as err:
            self._child = subprocess.Popen(
                [program, "--port", "0", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                cwd=folder,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )
        self.pid, self.port = self._child.pid, 0
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)

    def wait_ready(self) -> None:
        """Wait for the program's ready line, which has its port."""
        wait_until(self._is_ready, f"counter {self.pid} to become ready")
        self._socket.connect(("127.0.0.1", self.port))

    def _is_ready(self) -> bool:
        if self._child.poll() is not None:
            pytest.fail(f"counter ended with {self._child.returncode}: {(self.folder / 'stderr').read_text()}")
        ready = _READY.search((self.folder / "stdout").read_text())
        if ready:
            self.port = int(ready[1])
        return ready is not None

    @property
    def alive(self) -> bool:
        """Whether the process runs (a zombie does not)."""
        return self.pid in self.processes()

    def processes(self) -> list[int]:
        """The pids of the program's tree, also after a restore, without zombies."""
        return processes_in(self.folder)

    def ask(self) -> int:
        """The incremented counter; the first answer is 101."""
        return int(self.send("hello"))

    def send(self, text: str, timeout_s: float = DEADLINE_S) -> str:
        """Send one packet and return the answer."""
        self.post(text)
        return self.answer(timeout_s)

    def post(self, text: str = "hello") -> None:
        """Send one packet and do not wait for its answer."""
        self._socket.send(text.encode())

    def answers_within(self, timeout_s: float) -> bool:
        """Whether an answer to a posted packet arrives in this time."""
        return bool(select.select([self._socket], [], [], timeout_s)[0])

    def answer(self, timeout_s: float = DEADLINE_S) -> str:
        """The answer to a posted packet."""
        if not self.answers_within(timeout_s):
            pytest.fail(f"counter {self.pid} did not answer within {timeout_s:g} s")
        return self._socket.recv(4096).decode().strip()

    def kill(self) -> None:
        """End every process of the tree and wait until they are gone and reaped."""
        pids = self.processes()
        kill_at_once(pids)
        self.reap()
        for pid in pids:
            _reap(pid)
        wait_until(lambda: not self.processes(), f"the processes of counter {self.pid} to end")

    def reap(self) -> None:
        """Wait for the end of the process that was started here: its pid is taken until then."""
        self._child.wait(DEADLINE_S)

    def close(self) -> None:
        """Kill what is left and close the socket."""
        self.kill()
        self._socket.close()


def kill_at_once(pids: Iterable[int]) -> None:
    """SIGKILL them once all are stopped: a survivor might record the death of another."""
    pids = tuple(pids)
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def _reap(pid: int) -> None:
    """Wait for a process that became this one's child by a restore (rst_sibling); others have their own parent."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


CounterFactory = Callable[..., Counter]

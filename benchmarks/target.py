"""The program that is measured: gpucr's counter, whose device memory is filled with random bytes that it can check."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from gpucr.linux.processes import read_stat
from gpucr.sim.build import build

LEAST_PATIENCE_S = 60.0
PATIENCE_S_PER_GIB = 5.0

_READY_LINE = re.compile(r"^ready .*\bport=(\d+).*\n", re.MULTILINE)


class TargetFailed(Exception):
    """The program ended, did not answer, or came back with another state than it had."""


class Target:
    """A running counter program with ``mib`` MiB of random bytes in device memory, on the GPU or on the simulator.

    The bytes do not compress and hold no page of zeros or page twice, so that no tool can save itself work. ``folder``
    must be empty and stay: it is the program's working folder, and tells it from all other processes. ``command`` is
    another program that answers as the counter does.
    """

    def __init__(
        self, folder: Path, mib: int, environment: Mapping[str, str], command: Sequence[str] | None = None
    ) -> None:
        self._folder = folder
        self._patience_s = LEAST_PATIENCE_S + PATIENCE_S_PER_GIB * mib / 1024
        self._port = 0
        self._number = 100
        # A file, not a pipe: the other end of a pipe would be this process, which is not part of what is dumped.
        with self._log.open("wb") as log:
            self._child = subprocess.Popen(
                command or [str(build() / "counter"), "--port", "0", "--mib", str(mib), "--start", str(self._number)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        self.pid = self._child.pid

    @property
    def _log(self) -> Path:
        return self._folder / "output"

    def wait_until_ready(self) -> None:
        """Wait until device memory is filled. Raises TargetFailed if the program ends or takes too long."""
        deadline = time.monotonic() + self._patience_s
        while not (ready := _READY_LINE.search(self._log.read_text(errors="replace"))):
            if self._child.poll() is not None:
                last_words = self._log.read_text(errors="replace").strip()
                raise TargetFailed(f"the counter program ended before it was ready: {last_words}")
            if time.monotonic() > deadline:
                raise TargetFailed(f"the counter program was not ready after {self._patience_s:.0f} s")
            time.sleep(0.01)
        self._port = int(ready[1])

    def check(self) -> None:
        """Compare every byte of device memory and see that it counts on. Raises TargetFailed if one is wrong."""
        intact = self._ask("verify")
        if intact != "ok":
            raise TargetFailed(f"device memory is not what it was: the program says {intact!r}")
        self._number += 1
        number = self._ask("next")
        if number != str(self._number):
            raise TargetFailed(f"the program answered {number!r} where {self._number} comes next")

    def _ask(self, question: str) -> str:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
            client.settimeout(self._patience_s)
            client.connect(("127.0.0.1", self._port))
            try:
                client.send(question.encode())
                return client.recv(100).decode(errors="replace").strip()
            except OSError as e:
                raise TargetFailed(f"the program does not answer {question!r}: {e}") from e

    def wait_until_gone(self) -> None:
        """Reap the dumped program: only then is its memory free, and its pid. Raises TargetFailed if it stays."""
        try:
            self._child.wait(self._patience_s)
        except subprocess.TimeoutExpired as e:
            raise TargetFailed(f"process {self.pid} is still there after its dump") from e

    def kill(self) -> None:
        """End it, the first one or a restored one, and wait until it has ended. Raises TargetFailed if it stays."""
        if self._child.poll() is None:
            self._child.kill()
            self._child.wait()
            return
        if not self._is_restored():
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        deadline = time.monotonic() + self._patience_s
        while self._is_restored():
            if time.monotonic() > deadline:
                raise TargetFailed(f"process {self.pid} does not end")
            time.sleep(0.001)
        with contextlib.suppress(ChildProcessError):  # whose child it is depends on who restored it
            os.waitpid(self.pid, os.WNOHANG)

    def _is_restored(self) -> bool:
        """Whether the pid is this program again: another process may have it by now."""
        try:
            same = Path(f"/proc/{self.pid}/cwd").readlink() == self._folder
        except OSError:  # no such process, or a zombie
            return False
        stat = read_stat(self.pid)
        return same and stat is not None

"""A process that has gpucr loaded and forks for each command: loading it takes most of a short command's time.

What a fork cannot take over is started anew by tests.command: another loader, interpreter or locale.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import pkgutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import BinaryIO

_REQUEST_LIMIT_BYTES = 1 << 20
_AT_START = ("LD_", "PYTHON", "LANG", "LC_", "MALLOC_", "GLIBC_")
"""Variables that only the start of a program looks at."""


class Loaded:
    """The process. It has the environment, limits and namespaces of the one that made this."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._at_start = _at_start(dict(os.environ))
        self.pid = os.getpid()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.loaded", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                cwd=Path(__file__).parents[1],
                stdin=subprocess.DEVNULL,
            )
        atexit.register(self.close)

    def fits(self, environment: dict[str, str]) -> bool:
        """Whether a command with this environment can be one of its forks."""
        return self.pid == os.getpid() and _at_start(environment) == self._at_start and self._process.poll() is None

    def run(self, words: list[str], environment: dict[str, str], timeout_s: float) -> subprocess.CompletedProcess[str]:
        """Run `gpucr WORDS` here to its end. Raises TimeoutExpired once it has been killed."""
        with _file() as out, _file() as err:
            with _file() as told:  # an environment can be larger than a message
                told.write(json.dumps([words, environment]).encode())
                told.flush()
                folder = os.open(".", os.O_PATH | os.O_CLOEXEC)  # which may have been removed
                socket.send_fds(self._socket, [b"run"], [told.fileno(), out.fileno(), err.fileno(), folder])
                os.close(folder)
            pid = int(self._socket.recv(64))
            self._socket.settimeout(timeout_s)
            try:
                status = int(self._socket.recv(64))
            except TimeoutError:
                os.kill(pid, signal.SIGKILL)
                self._socket.settimeout(None)
                self._socket.recv(64)
                raise subprocess.TimeoutExpired(words, timeout_s) from None
            finally:
                self._socket.settimeout(None)
            said = []
            for file in (out, err):
                file.seek(0)
                said.append(file.read().decode())
        return subprocess.CompletedProcess(["gpucr", *words], os.waitstatus_to_exitcode(status), *said)

    def close(self) -> None:
        """End it."""
        if self.pid == os.getpid() and self._process.poll() is None:
            self._socket.close()
            self._process.wait()


def _file() -> BinaryIO:
    return os.fdopen(os.memfd_create("gpucr-test"), "w+b")


def _at_start(environment: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(_AT_START)}


def serve(connection: socket.socket) -> None:
    """Fork for each request until the other end is closed."""
    import gpucr.cli
    from gpucr.__main__ import main

    for module in pkgutil.iter_modules(gpucr.cli.__path__):
        __import__(f"gpucr.cli.{module.name}")
    gc.collect()
    gc.freeze()
    while True:
        message, fds, _, _ = socket.recv_fds(connection, 16, 4)
        if not message:
            return
        pid = os.fork()
        if pid == 0:
            connection.close()
            _become(fds)
            main()
            os._exit(0)
        for fd in fds:
            os.close(fd)
        connection.send(str(pid).encode())
        _, status = os.waitpid(pid, 0)
        with contextlib.suppress(BrokenPipeError):
            connection.send(str(status).encode())


def _become(fds: list[int]) -> None:
    """This process is `gpucr` as if it had just been started with what the first file tells."""
    told, out, err, folder = fds
    words, environment = json.loads(os.pread(told, _REQUEST_LIMIT_BYTES, 0))
    os.fchdir(folder)
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.closerange(3, 1 << 16)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["gpucr", *words]


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))

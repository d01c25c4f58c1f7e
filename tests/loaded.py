"""A process that has gpucr loaded and forks for each command: loading it takes most of a short command's time.

A fork has the arguments, environment, folder and pipes that a start of its own would have; its parent is another one.
What it cannot take over from the process of the tests, `Loaded.fits` refuses: `tests.command` starts that again.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import pkgutil
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

_AT_START = ("LD_", "PYTHON", "LANG", "LC_", "MALLOC_", "GLIBC_", "COVERAGE_")
"""Variables that only the start of a program looks at."""

_INHERITED = ("Umask:", "SigBlk:", "SigIgn:", "Cap", "NoNewPrivs:", "Seccomp:", "Uid:", "Gid:", "Groups:")
"""Lines of /proc/PID/status."""


class Loaded:
    """The process. It stays as the one that made it was then: in its cgroups, with its limits, signals and user."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._begun = _inherited(dict(os.environ))
        self._busy = threading.Lock()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.loaded", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                cwd=Path(__file__).parents[1],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )

    def fits(self, environment: dict[str, str]) -> bool:
        """Whether a command with this environment, started by this process as it is now, can be a fork."""
        is_free = self._process.poll() is None and not self._busy.locked()
        return is_free and _inherited(environment) == self._begun

    def run(
        self, words: list[str], environment: dict[str, str], timeout_s: float, *, code: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run `gpucr WORDS`, or `python3 -c CODE WORDS`, here until it has ended and nobody holds its pipes.

        Raises TimeoutExpired.
        """
        with self._busy, contextlib.ExitStack() as opened:
            pipes = [os.pipe(), os.pipe()]
            readers = [opened.enter_context(open(reader, "rb", buffering=0)) for reader, _ in pipes]
            writers = [opened.enter_context(open(writer, "wb", buffering=0)) for _, writer in pipes]
            told = opened.enter_context(open(os.memfd_create("gpucr-test"), "w+b"))  # too large for a message
            told.write(json.dumps([words, environment, code]).encode())
            told.flush()
            folder = os.open(".", os.O_PATH | os.O_CLOEXEC)  # which may have been removed
            opened.callback(os.close, folder)
            socket.send_fds(self._socket, [b"run"], [told.fileno(), *(end.fileno() for end in writers), folder])
            pid = int(self._socket.recv(64))
            for end in writers:
                end.close()
            try:
                out, err = _read(readers[0].fileno(), readers[1].fileno(), time.monotonic() + timeout_s)
            except TimeoutError:
                if not select.select([self._socket], [], [], 0)[0]:  # it has not ended
                    os.kill(pid, signal.SIGKILL)
                raise subprocess.TimeoutExpired(words, timeout_s) from None
            finally:
                status = int(self._socket.recv(64))
        return subprocess.CompletedProcess(words, os.waitstatus_to_exitcode(status), out, err)

    def close(self) -> None:
        """End it."""
        self._socket.close()
        self._process.wait()


def _inherited(environment: dict[str, str]) -> tuple[object, ...]:
    """What a process that starts now takes over and a fork of an older one does not."""
    own = Path("/proc/self")
    return (
        {name: value for name, value in environment.items() if name.startswith(_AT_START)},
        [line for line in (own / "status").read_text().splitlines() if line.startswith(_INHERITED)],
        *((own / name).read_text() for name in ("cgroup", "limits", "oom_score_adj", "timens_offsets")),
        *((own / "ns" / name).readlink() for name in ("mnt", "net", "pid_for_children", "user")),
        os.getpid(),
        os.getsid(0),
        os.getpgrp(),
        os.nice(0),
    )


def _read(out: int, err: int, deadline: float) -> tuple[str, str]:
    """What comes out of both until all have closed them. Raises TimeoutError."""
    said = {out: b"", err: b""}
    with selectors.DefaultSelector() as selector:
        for fd in said:
            selector.register(fd, selectors.EVENT_READ)
        while selector.get_map():
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError
            for key, _ in ready:
                piece = os.read(key.fd, 1 << 16)
                said[key.fd] += piece
                if not piece:
                    selector.unregister(key.fd)
    return said[out].decode(), said[err].decode()


def serve(connection: socket.socket) -> None:
    """Fork for each request until the other end is closed."""
    from gpucr import cli, operations

    for package in (cli, operations):
        for module in pkgutil.iter_modules(package.__path__):
            __import__(f"{package.__name__}.{module.name}")
    gc.collect()
    gc.freeze()
    while True:
        message, fds, _, _ = socket.recv_fds(connection, 16, 4)
        if not message:
            return
        pid = os.fork()
        if pid == 0:
            connection.close()
            _become(*fds)
            sys.exit(0)
        for fd in fds:
            os.close(fd)
        connection.send(str(pid).encode())
        _, status = os.waitpid(pid, 0)
        connection.send(str(status).encode())


def _become(told: int, out: int, err: int, folder: int) -> None:
    """This process is what the first file tells, as if it had just been started."""
    with open(told, "rb") as file:
        file.seek(0)
        words, environment, code = json.load(file)
    os.fchdir(folder)
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.closerange(3, 1 << 12)  # its own, and those of this request
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["gpucr" if code is None else "-c", *words]
    if code is None:
        from gpucr.__main__ import main

        main()
    else:
        sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(code, "<string>", "exec"), vars(sys.modules["__main__"]))  # noqa: S102 - a test's own


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))

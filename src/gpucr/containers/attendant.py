"""The process that does the GPU part of a container's dump, from CRIU's pre-dump hook until CRIU has ended.

A hook is over when CRIU continues, but its work is not: some process must hold the files with device memory open and
keep the claims, and if CRIU fails, no hook is called. The attendant is that process. It has its own guard, like every
operation that changes a job.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
from collections.abc import Iterator
from pathlib import Path

from gpucr.containers import meeting
from gpucr.containers.dump import dump_for_runtime
from gpucr.errors import BrokenInstall
from gpucr.linux import own_process
from gpucr.model import ProcessId
from gpucr.undo.logs import append_to_log

FIRST_CALL_LIMIT_S = 60.0
"""How long the hook that started the attendant may take to call it."""


def start(criu: ProcessId, root_pid: int, images: Path, claim: int) -> None:
    """Start the attendant of this dump; `meeting.call` reaches it at once. Raises BrokenInstall.

    ``claim`` is a descriptor of `gpu_part.claimed`, passed on as a copy.
    """
    try:
        with meeting.listen(criu) as listening:
            about = (criu.pid, criu.start_time_ticks, root_pid, claim, os.fspath(images))
            own_process.start(__name__, listening.fileno(), *about, pass_fds=[listening.fileno(), claim])
    except OSError as e:
        raise BrokenInstall(
            f"the process that handles the container's GPU state cannot be started: {e.strerror or e}",
            hint="check that root can write to /run/gpucr and start processes",
        ) from e


def main(*arguments: str) -> None:
    """Handle one dump.

    Arguments: the listening socket, CRIU's pid and start time, the container's pid, the claim, the images.
    """
    socket_fd, criu_pid, start_time_ticks, root_pid, claim = map(int, arguments[:5])
    criu = ProcessId(criu_pid, start_time_ticks)
    with socket.socket(fileno=socket_fd) as listening, _meeting_ended(criu):
        hooks = CriuHooks(criu, listening)
        if not hooks.wait_for_call(FIRST_CALL_LIMIT_S):
            return  # the hook was killed: nothing has happened yet
        try:
            dump_for_runtime(root_pid, Path(arguments[5]), hooks, claim=claim)
        except BaseException as error:  # noqa: BLE001 - there is no caller; the log and CRIU's hook report it
            if not hooks.answer(error):
                append_to_log("hook", f"the dump of the container with pid {root_pid}: {type(error).__name__}: {error}")


class CriuHooks:
    """The hooks of one dump, arriving over the socket."""

    def __init__(self, criu: ProcessId, listening: socket.socket) -> None:
        self.criu = criu
        self._listening = listening
        self._waiting: socket.socket | None = None
        self._lines: list[str] = []

    def wait_for_call(self, timeout_s: float) -> bool:
        """Accept the next hook. False: none called in this time."""
        if not select.select([self._listening], [], [], timeout_s)[0]:
            return False
        connection, _ = self._listening.accept()
        if not connection.recv(meeting.MESSAGE_LIMIT_BYTES):  # it died in the middle
            connection.close()
            return False
        self._waiting = connection
        return True

    def say(self, line: str) -> None:
        """Print a line for CRIU's log."""
        self._lines.append(line)

    def answer(self, error: BaseException | None) -> bool:
        """Answer the waiting hook. False: there is none, or it has died."""
        if self._waiting is None:
            return False
        connection, self._waiting = self._waiting, None
        lines, self._lines = self._lines, []
        with connection, contextlib.suppress(OSError):
            connection.send(meeting.encode_answer(lines, error))
            return True
        return False


@contextlib.contextmanager
def _meeting_ended(criu: ProcessId) -> Iterator[None]:
    try:
        yield
    finally:
        meeting.forget(criu)

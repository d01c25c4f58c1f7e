"""A keeper that is being started, and the socket to it: what it is started with, by whom, and what it says."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

from gpucr.criu.install import CriuInstall
from gpucr.errors import BrokenInstall, GpucrError, InvalidRequest, Unsupported
from gpucr.jobs.sandbox import known_keepers
from gpucr.jobs.sandbox.keeper import FIRST_LAST_PID, MESSAGE_LIMIT_BYTES
from gpucr.json_text import parse
from gpucr.linux import descriptor_limit, own_process, processes
from gpucr.model import ProcessId

ANSWER_LIMIT_S = 60.0
"""How long the keeper may take for an answer: long enough for a machine that swaps."""

_CREDENTIALS = struct.Struct("3i")  # struct ucred of unix(7): pid, uid, gid
_FD = struct.Struct("i")


_SAID: Mapping[str, type] = {
    **dict.fromkeys(("forked", "started", "spawned", "failed", "exit_code"), int),
    "empty": bool,
    "error": str,
    "part": str,
}
"""The members of the keeper's messages (keeper.py)."""


class StartedKeeper:
    """A keeper that is being started, and the socket to it. Closing the socket early ends it.

    ``answer`` is what it said first, when it was ready.
    """

    is_ready = False
    _collect_starter: Callable[[], object] | None = None
    """Of the process that forks it: it ends when it has, or when there is no socket any more."""

    def __init__(self, specification: Mapping[str, Any]) -> None:
        theirs = self._make_ready(specification)
        try:
            with theirs:
                self._collect_starter = self._spawn(theirs.fileno())
        except BaseException:
            self.close()
            raise

    def wait_ready(self) -> None:
        """Wait for its answer. It is closed where this raises something."""
        try:
            self.answer = self._first_word()
            if self._collect_starter is not None:
                self._collect_starter()
            self._identify()
        except BaseException:
            self.close()
            raise

    def _first_word(self) -> dict[str, Any]:
        return self.receive("forked" if self._specification["command"] else "empty")

    def _make_ready(self, specification: Mapping[str, Any]) -> socket.socket:
        """Returns its end of the socket."""
        self._specification = {**specification, "open_files": descriptor_limit.of_others()}
        self._output_fd = os.memfd_create("gpucr-keeper-output", os.MFD_CLOEXEC)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(ANSWER_LIMIT_S)
        # The kernel says who sent a message, and translates the pid: the keeper itself knows only its inner one.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        return theirs

    def _identify(self) -> None:
        found = identity(self._sender_pid)
        if found is None:
            raise self.lost()
        self.id = found
        self._note()
        self.is_ready = True

    def _note(self) -> None:
        try:
            known_keepers.note(self.id)
        except OSError as e:
            raise BrokenInstall(
                f"the keeper process of the job cannot be noted: {e.strerror} ({e.filename})",
                hint="check that root can write to /run/gpucr, and nobody else",
                code="GPUCR-KEEPER",
            ) from e

    def __enter__(self) -> StartedKeeper:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the socket. Safe to call again."""
        if self._socket.fileno() >= 0:
            self._socket.close()
            os.close(self._output_fd)
            if self._collect_starter is not None:
                self._collect_starter()

    def send(self, **message: object) -> None:
        """Raises BrokenInstall where the keeper has ended."""
        self.send_fds((), **message)

    def send_fds(self, fds: Sequence[int], **message: object) -> None:
        """As `send`, with descriptors."""
        try:
            socket.send_fds(self._socket, [json.dumps(message).encode()], fds)
        except ConnectionError as e:
            raise self.lost() from e

    def receive(self, *wanted: str) -> dict[str, Any]:
        """The keeper's next message, or the next one with a member ``wanted``: a question may have been asked twice.

        Raises what it says went wrong; BrokenInstall where it has ended.
        """
        while True:
            message = self._receive()
            if not wanted or any(name in message for name in wanted):
                return message

    def _receive(self) -> dict[str, Any]:
        space_bytes = socket.CMSG_SPACE(_CREDENTIALS.size) + socket.CMSG_SPACE(_FD.size)
        try:
            data, ancillary, flags, _ = self._socket.recvmsg(MESSAGE_LIMIT_BYTES, space_bytes, socket.MSG_CMSG_CLOEXEC)
        except TimeoutError as e:
            raise BrokenInstall(
                f"the keeper process has not answered for {ANSWER_LIMIT_S:g} s",
                hint="check what stops it (`ps`), or try again when the machine is less busy",
                code="GPUCR-KEEPER",
            ) from e
        except ConnectionError as e:
            raise self.lost() from e
        if not data:
            raise self.lost()
        by_kind = {kind: each for _, kind, each in ancillary}
        self.received_fds = tuple(each for (each,) in _FD.iter_unpack(by_kind.get(socket.SCM_RIGHTS, b"")))
        try:
            self._sender_pid = _CREDENTIALS.unpack(by_kind[socket.SCM_CREDENTIALS])[0]
            message: Any = parse(data)
            if flags & socket.MSG_TRUNC or not _is_understood(message):
                raise ValueError("the keeper has no such message")
            if flags & socket.MSG_CTRUNC or ("spawned" in message) != bool(self.received_fds):
                raise ValueError("its descriptor did not arrive (ulimit -n)")
        except (KeyError, ValueError) as e:
            for fd in self.received_fds:
                os.close(fd)
            raise BrokenInstall(
                f"the keeper process of the job says what this gpucr does not understand: {e}",
                hint="gpucr may have been updated while it started: try again",
                code="GPUCR-KEEPER",
            ) from e
        if "error" in message:
            raise self._error(message.get("part", ""), message["error"])
        return dict(message)

    def lost(self) -> BrokenInstall:
        """The keeper has ended without a word."""
        said = os.pread(self._output_fd, 1 << 16, 0).decode(errors="replace").strip().rpartition("\n")[2]
        return BrokenInstall(
            "the keeper process of the job ended" + (f": {said}" if said else ""),
            hint="it may have been killed because memory ran out (dmesg)",
            code="GPUCR-KEEPER",
        )

    @contextlib.contextmanager
    def _fds(self, socket_fd: int) -> Iterator[tuple[int, int, int]]:
        """The descriptors that a keeper is started with."""
        with contextlib.ExitStack() as opened:
            specification_fd = os.memfd_create("gpucr-specification", os.MFD_CLOEXEC)
            opened.callback(os.close, specification_fd)
            with open(specification_fd, "wb", closefd=False) as file:
                file.write(json.dumps(self._specification).encode())
            operation_fd = os.pidfd_open(os.getpid())
            opened.callback(os.close, operation_fd)
            yield specification_fd, socket_fd, operation_fd

    def _spawn(self, socket_fd: int) -> Callable[[], object]:
        """Start it. Returns what waits for the end of the process that forks it."""
        with self._fds(socket_fd) as fds:
            own_session = self._specification["own_session"]
            try:
                starter = own_process.start(
                    "gpucr.jobs.sandbox.keeper",
                    *fds,
                    pass_fds=fds,
                    stdin=subprocess.DEVNULL if own_session else None,
                    stderr=self._output_fd,
                    own_session=own_session,
                )
                return starter.wait
            except OSError as e:
                raise BrokenInstall(
                    f"the keeper process cannot be started: {e.strerror}",
                    hint="gpucr starts its own Python a second time; see that sys.executable names it",
                    code="GPUCR-KEEPER",
                ) from e

    def _error(self, part: str, said: str) -> GpucrError:
        if part == "namespaces":
            return Unsupported(
                f"the job's namespaces cannot be made: {said}",
                hint="that needs root (CAP_SYS_ADMIN), a /dev/shm, and a container that allows it; "
                "--no-isolate does without",
                code="GPUCR-NO-SANDBOX",
            )
        if part == "view":
            return Unsupported(
                f"the machine's file systems cannot be shown to a rehearsal: {said}",
                hint="it needs Linux 5.12 or newer and overlays on the file systems of the job's files: not all "
                "of them, and not all containers, allow that",
                code="GPUCR-NO-REHEARSAL",
            )
        if part == "log":
            return InvalidRequest(
                f"the log {self._specification['log_path']} cannot be used: {said}", hint="give another file with --log"
            )
        program = next(iter(self._specification["command"]), "the program")
        return InvalidRequest(
            f"{program} cannot be run: {said}",
            hint="see its mode, and its interpreter's if a script",
            code="GPUCR-NO-PROGRAM",
        )


class KeeperByHelper(StartedKeeper):
    """A keeper that the helper becomes when it has restored a job, with what `given` gives."""

    def __init__(self, specification: Mapping[str, Any]) -> None:
        self._theirs = self._make_ready(specification)

    def given(self) -> contextlib.AbstractContextManager[tuple[int, int, int]]:
        """The descriptors that it is started with, for a block."""
        return self._fds(self._theirs.fileno())

    def begin(self) -> None:
        """It has been started: hear what it says first. Raises BrokenInstall."""
        self._theirs.close()
        self.answer = self._first_word()
        self._identify()

    def close(self) -> None:
        """Close it like any other keeper."""
        self._theirs.close()
        super().close()


class SandboxByHelper(StartedKeeper):
    """A keeper in a sandbox that the helper makes. Raises Unsupported where it does not."""

    def __init__(self, specification: Mapping[str, Any], helper: CriuInstall) -> None:
        self._helper = helper
        super().__init__(specification)

    def _spawn(self, socket_fd: int) -> Callable[[], object]:
        from gpucr.helper.client import isolate

        with self._fds(socket_fd) as fds:
            specification = self._specification
            last_pid = specification["last_pid"] or FIRST_LAST_PID
            network, terminals = specification["network"], specification["terminals"]
            isolate(self._helper, fds, network=network, last_pid=last_pid, terminals=terminals)
        return lambda: None


def _is_understood(message: object) -> bool:
    return isinstance(message, dict) and all(type(value) is _SAID.get(name) for name, value in message.items())


def identity(pid: int) -> ProcessId | None:
    """The identity of a process by its pid; None if it has ended."""
    stat = processes.read_stat(pid)
    return None if stat is None else ProcessId(pid, stat.start_time_ticks)

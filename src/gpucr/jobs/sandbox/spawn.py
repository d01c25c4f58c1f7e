"""Start a job with a keeper, or a sandbox that is empty until a restore has filled it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import subprocess
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, TypeVar

from msgspec import Struct

from gpucr.errors import BrokenInstall, GpucrError, InvalidRequest, Unsupported
from gpucr.jobs.sandbox import known_keepers
from gpucr.jobs.sandbox.keeper import MESSAGE_LIMIT_BYTES
from gpucr.jobs.sandbox.lookup import Sandbox
from gpucr.linux import descriptor_limit, own_python, processes
from gpucr.linux.namespaces import PidNamespace
from gpucr.model import ProcessId

Network = Literal["own", "host"]
"""The network of an isolated job: a loopback of its own, or the machine's network."""

ANSWER_LIMIT_S = 60.0
"""How long the keeper may take for an answer: long enough for a machine that swaps."""


_CREDENTIALS = struct.Struct("3i")  # struct ucred of unix(7): pid, uid, gid
_FD = struct.Struct("i")


class Started(Struct, frozen=True):
    """A job that was started: its keeper and its first process, which may have ended by now."""

    keeper: ProcessId
    root: ProcessId


def start(
    command: Sequence[str],
    *,
    cwd: str,
    environment: Mapping[str, str],
    log_path: str,
    status_path: str,
    network: Network = "own",
    isolate: bool = True,
    refuse_io_uring: bool = True,
    ends_with_caller: bool = False,
    before_run: Callable[[Started], None] | None = None,
) -> Started:
    """Start a job below a keeper of its own, with ``isolate`` in a sandbox.

    It goes on when the calling process ends; with ``ends_with_caller`` it is killed then.

    ``command`` begins with the path of a program. It gets exactly ``environment``, a session of its own, nothing to
    read, and the file ``log_path`` (appended to; mode 0600 where it is made) for its output; no other descriptor. How
    it ended is written to ``status_path``: ``{"exit_code": N, "ended": TIME}``, or ``signal`` instead of ``exit_code``.
    ``isolate`` needs CAP_SYS_ADMIN, ``refuse_io_uring`` what `gpucr.linux.seccomp` says; anything else needs nothing.
    ``before_run`` is called when both processes are there and nothing of the program has run.

    Raises Unsupported (the namespaces cannot be made), InvalidRequest (the log or the program), BrokenInstall (the
    keeper does not start), and what ``before_run`` raises. Then nothing runs.
    """
    keeper = _Keeper(
        _specification(
            log_path,
            status_path,
            ends_with_caller,
            command=list(command),
            cwd=cwd,
            environment=dict(environment),
            network=network if isolate else "host",
            isolate=isolate,
            refuse_io_uring=refuse_io_uring,
        )
    )
    with keeper:
        inner = int(keeper.answer["forked"])
        outer = PidNamespace(keeper.id.pid).outer_pid(inner) if isolate else inner
        root = _identity(outer) if outer is not None else None
        if root is None:
            raise keeper.lost()
        started = Started(keeper.id, root)
        if before_run is not None:
            before_run(started)
        keeper.send(go=True)
        keeper.receive()
    return started


def empty(
    *,
    log_path: str | None,
    status_path: str | None,
    lineage: str,
    last_pid: int,
    network: Network = "own",
    ends_with_caller: bool = False,
) -> EmptySandbox:
    """Make a sandbox with nothing in it but its keeper, for a restore. Needs CAP_SYS_ADMIN.

    ``log_path`` is only what is told of the job. Pids are given above ``last_pid`` in it. Raises Unsupported where the
    namespaces cannot be made, BrokenInstall.
    """
    return EmptySandbox(
        _Keeper(
            _specification(
                log_path,
                status_path,
                ends_with_caller,
                network=network,
                isolate=True,
                lineage=lineage,
                last_pid=last_pid,
            )
        ),
        lineage=lineage,
        network=network,
        log_path=log_path,
    )


def bare_keeper(
    *, log_path: str | None, status_path: str | None, own_session: bool = True, ends_with_caller: bool = False
) -> BareKeeper:
    """Start a keeper without a sandbox, for a restore. Needs no privileges. Raises BrokenInstall.

    Without ``own_session`` it stays in the caller's session, in a process group of its own, and so does what it spawns:
    for a job that is to be there as well.
    """
    return BareKeeper(_Keeper(_specification(log_path, status_path, ends_with_caller, own_session=own_session)))


def helped_keeper(*, log_path: str | None, status_path: str | None, ends_with_caller: bool = False) -> HelpedKeeper:
    """A keeper that the privileged helper will become, for a restore by it. Nothing is started yet."""
    return HelpedKeeper(_HelpedKeeper(_specification(log_path, status_path, ends_with_caller)))


def _specification(
    log_path: str | None, status_path: str | None, ends_with_caller: bool, **given: object
) -> dict[str, object]:
    """What a keeper is told; without more it waits for a restore, in no sandbox. ``ends_with_caller``: see `start`."""
    return {
        "command": [],
        "log_path": log_path or "",
        "status_path": status_path,
        "network": "host",
        "isolate": False,
        "lineage": uuid.uuid4().hex,
        "last_pid": 0,
        "own_session": True,
        "ends_with_gpucr": ends_with_caller,
        **given,
    }


W = TypeVar("W", bound="_Waiting")


class _Waiting:
    """A keeper that ends with its maker, and what is below it too, until it is told which process is the job's first.

    Use as a context manager: everything below it is ended where it was left without `adopt`.
    """

    def __init__(self, keeper: _Keeper) -> None:
        self._keeper = keeper
        self._is_adopted = False

    @property
    def id(self) -> ProcessId:
        """The keeper's own identity."""
        return self._keeper.id

    def adopt(self, root_pids: Sequence[int], *, inner_pids: Sequence[int]) -> None:
        """The first of these is the job's first process: from now on the job does not depend on the caller.

        It may have ended already: then the keeper has collected it, and tells how. The others are the roots of the
        job's other trees. ``root_pids`` are the caller's pids for them, ``inner_pids`` their own in a sandbox. Raises
        BrokenInstall where the keeper has ended.
        """
        first, *others = self._as_the_keeper_knows(root_pids, inner_pids)
        self._keeper.send(adopt=first, others=others)
        self._keeper.receive("started")
        self._is_adopted = True
        self._keeper.close()

    def _as_the_keeper_knows(self, pids: Sequence[int], inner_pids: Sequence[int]) -> Sequence[int]:
        return pids

    def end(self) -> bool:
        """End everything below it, unless it has been adopted. False where something hangs in the kernel."""
        if self._is_adopted:
            return True
        left = self._kill()
        self._keeper.close()
        return not left

    def _kill(self) -> tuple[ProcessId, ...]:
        if not processes.is_alive(self.id):
            return ()
        # The keeper itself is never stopped: if the caller is killed now, it ends the rest.
        left = processes.kill_tree(self.id.pid, including_root=False)
        return (*left, *processes.kill_and_wait([self.id]))

    def __enter__(self: W) -> W:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()


class EmptySandbox(_Waiting):
    """A sandbox with nothing in it but its keeper."""

    def __init__(self, keeper: _Keeper, *, lineage: str, network: Network, log_path: str | None) -> None:
        super().__init__(keeper)
        self.sandbox = Sandbox(keeper.id, None, lineage, network, log_path)

    def _as_the_keeper_knows(self, pids: Sequence[int], inner_pids: Sequence[int]) -> Sequence[int]:
        return inner_pids

    def _kill(self) -> tuple[ProcessId, ...]:
        return processes.kill_and_wait([self.id])  # the kernel ends the rest, also what is not below it


class BareKeeper(_Waiting):
    """A keeper without a sandbox, below which CRIU makes a job (`criu.service.Parent`)."""

    def spawn(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        blocked_signals: Sequence[int],
        fds: tuple[int, int],
    ) -> tuple[int, int]:
        """Start a process below it. Returns its pid and a pidfd. Raises OSError, BrokenInstall.

        It has its end of a socket, the first of ``fds``, as descriptor 3, its output goes to the second one.
        """
        request = {"command": list(command), "environment": dict(environment), "blocked_signals": list(blocked_signals)}
        request_fd = os.memfd_create("gpucr-spawn", os.MFD_CLOEXEC)
        try:
            with open(request_fd, "wb", closefd=False) as file:
                file.write(json.dumps(request).encode())
            self._keeper.send_fds((request_fd, *fds), spawn=True)
        finally:
            os.close(request_fd)
        answer = self._keeper.receive("spawned", "failed")
        if "failed" in answer:
            raise OSError(answer["failed"], os.strerror(answer["failed"]))
        return int(answer["spawned"]), self._keeper.received_fds[0]

    def exit_code(self, pid: int) -> int:
        """The exit code of what was started below it and has ended, negative for a signal. Raises BrokenInstall."""
        self._keeper.send(exit_code_of=pid)
        return int(self._keeper.receive("exit_code")["exit_code"])


class HelpedKeeper(_Waiting):
    """The keeper of what the privileged helper has restored (`helper.client.Keeper`)."""

    def __init__(self, keeper: _HelpedKeeper) -> None:
        super().__init__(keeper)
        self._helped = keeper
        self._is_begun = False

    def given(self) -> contextlib.AbstractContextManager[tuple[int, int, int]]:
        """The descriptors that it is started with, for a block."""
        return self._helped.given()

    def begun(self) -> None:
        """Take note of it: the helper has become it. Raises BrokenInstall."""
        self._helped.begin()
        self._is_begun = True

    def end(self) -> bool:
        """End everything below it; before it has begun there is nothing."""
        if self._is_begun:
            return super().end()
        self._keeper.close()
        return True


class _Keeper:
    """A keeper that is being started, and the socket to it. Closing the socket early ends it.

    ``answer`` is what it said first.
    """

    def __init__(self, specification: Mapping[str, Any]) -> None:
        theirs = self._make_ready(specification)
        try:
            with theirs:
                self._starter = self._spawn(theirs.fileno())
            try:
                self.answer = self.receive()
            finally:
                self._starter.wait()
            self._identify()
        except BaseException:
            self.close()
            raise

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
        found = _identity(self._sender_pid)
        if found is None:
            raise self.lost()
        self.id = found
        self._note()

    def _note(self) -> None:
        try:
            known_keepers.note(self.id)
        except OSError as e:
            raise BrokenInstall(
                f"the keeper process of the job cannot be noted: {e.strerror} ({e.filename})",
                hint="check that root can write to /run/gpucr, and nobody else",
                code="GPUCR-KEEPER",
            ) from e

    def __enter__(self) -> _Keeper:
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
            data, ancillary, _, _ = self._socket.recvmsg(MESSAGE_LIMIT_BYTES, space_bytes, socket.MSG_CMSG_CLOEXEC)
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
        self._sender_pid = _CREDENTIALS.unpack(by_kind[socket.SCM_CREDENTIALS])[0]
        self.received_fds = _FD.unpack(by_kind[socket.SCM_RIGHTS]) if socket.SCM_RIGHTS in by_kind else ()
        message: dict[str, Any] = json.loads(data)
        if "error" in message:
            raise self._error(message["part"], message["error"])
        return message

    def lost(self) -> BrokenInstall:
        """The keeper has ended without a word."""
        said = os.pread(self._output_fd, 1 << 16, 0).decode(errors="replace").strip().rpartition("\n")[2]
        return BrokenInstall(
            "the keeper process of the job ended" + (f": {said}" if said else ""),
            hint="it may have been killed for want of memory (dmesg)",
            code="GPUCR-KEEPER",
        )

    @contextlib.contextmanager
    def _fds(self, socket_fd: int) -> Iterator[tuple[int, int, int]]:
        """What a keeper is started with."""
        with contextlib.ExitStack() as opened:
            specification_fd = os.memfd_create("gpucr-specification", os.MFD_CLOEXEC)
            opened.callback(os.close, specification_fd)
            with open(specification_fd, "wb", closefd=False) as file:
                file.write(json.dumps(self._specification).encode())
            operation_fd = os.pidfd_open(os.getpid())
            opened.callback(os.close, operation_fd)
            yield specification_fd, socket_fd, operation_fd

    def _spawn(self, socket_fd: int) -> subprocess.Popen[bytes]:
        with self._fds(socket_fd) as fds:
            own_session = self._specification["own_session"]
            try:
                return subprocess.Popen(
                    own_python.command("gpucr.jobs.sandbox.keeper", *fds),
                    stdin=subprocess.DEVNULL if own_session else None,
                    stdout=subprocess.DEVNULL,
                    stderr=self._output_fd,
                    pass_fds=fds,
                    start_new_session=own_session,
                    cwd="/",
                    env=own_python.environment(),
                )
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
        if part == "log":
            return InvalidRequest(
                f"the log {self._specification['log_path']} cannot be used: {said}", hint="give another file with --log"
            )
        program = self._specification["command"][0]
        return InvalidRequest(
            f"{program} cannot be run: {said}",
            hint="see its mode, and its interpreter's if a script",
            code="GPUCR-NO-PROGRAM",
        )


class _HelpedKeeper(_Keeper):
    """A keeper that somebody else starts, with what `given` gives."""

    def __init__(self, specification: Mapping[str, Any]) -> None:
        self._theirs = self._make_ready(specification)

    def given(self) -> contextlib.AbstractContextManager[tuple[int, int, int]]:
        return self._fds(self._theirs.fileno())

    def begin(self) -> None:
        self._theirs.close()
        self.answer = self.receive()
        self._identify()

    def close(self) -> None:
        self._theirs.close()
        super().close()


def _identity(pid: int) -> ProcessId | None:
    stat = processes.read_stat(pid)
    return None if stat is None else ProcessId(pid, stat.start_time_ticks)

"""Start a job with a keeper, or an empty sandbox for a restore."""

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
"""How long the keeper may take to answer: enough for a machine that swaps."""


_CREDENTIALS = struct.Struct("3i")  # struct ucred of unix(7): pid, uid, gid
_FD = struct.Struct("i")


class Started(Struct, frozen=True):
    """A started job: its keeper and its first process, which may have ended by now."""

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
    before_run: Callable[[Started], None] | None = None,
) -> Started:
    """Start a job below its own keeper, with ``isolate`` in a sandbox. It outlives the caller.

    ``command`` begins with the path of a program. It gets exactly ``environment``, its own session, an empty stdin, and
    the file ``log_path`` (appended to; created with mode 0600) for its output; no other descriptor. Its exit status is
    written to ``status_path``: ``{"exit_code": N, "ended": TIME}``, or ``signal`` instead of ``exit_code``. ``isolate``
    needs CAP_SYS_ADMIN, ``refuse_io_uring`` what `gpucr.linux.seccomp` says; everything else needs no privileges.
    ``before_run`` is called when both processes exist and the program has not run yet.

    Raises Unsupported (the namespaces cannot be made), InvalidRequest (the log or the program), BrokenInstall (the
    keeper does not start), and what ``before_run`` raises. Then nothing runs.
    """
    keeper = _Keeper(
        {
            "command": list(command),
            "cwd": cwd,
            "environment": dict(environment),
            "log_path": log_path,
            "status_path": status_path,
            "network": network if isolate else "host",
            "isolate": isolate,
            "refuse_io_uring": refuse_io_uring,
            "lineage": uuid.uuid4().hex,
            "last_pid": 0,
            "own_session": True,
        }
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
    *, log_path: str | None, status_path: str | None, lineage: str, last_pid: int, network: Network = "own"
) -> EmptySandbox:
    """Make a sandbox with only its keeper, for a restore. Needs CAP_SYS_ADMIN.

    ``log_path`` is only recorded. Pids in it start above ``last_pid``. Raises Unsupported if the namespaces cannot be
    made, BrokenInstall.
    """
    return EmptySandbox(
        _Keeper(
            {
                "command": [],
                "log_path": log_path or "",
                "status_path": status_path,
                "network": network,
                "isolate": True,
                "lineage": lineage,
                "last_pid": last_pid,
                "own_session": True,
            }
        ),
        lineage=lineage,
        network=network,
        log_path=log_path,
    )


def bare_keeper(*, log_path: str | None, status_path: str | None, own_session: bool = True) -> BareKeeper:
    """Start a keeper without a sandbox, for a restore. Needs no privileges. Raises BrokenInstall.

    Without ``own_session`` it and what it spawns stay in the caller's session, in a separate process group, for a job
    that belongs there.
    """
    return BareKeeper(
        _Keeper(
            {
                "command": [],
                "log_path": log_path or "",
                "status_path": status_path,
                "network": "host",
                "isolate": False,
                "lineage": uuid.uuid4().hex,
                "last_pid": 0,
                "own_session": own_session,
            }
        )
    )


def helped_keeper(*, log_path: str | None, status_path: str | None) -> HelpedKeeper:
    """A keeper that the privileged helper will turn into, for a restore by it. Starts nothing yet."""
    return HelpedKeeper(
        _HelpedKeeper(
            {
                "command": [],
                "log_path": log_path or "",
                "status_path": status_path,
                "network": "host",
                "isolate": False,
                "lineage": uuid.uuid4().hex,
                "last_pid": 0,
                "own_session": True,
            }
        )
    )


W = TypeVar("W", bound="_Waiting")


class _Waiting:
    """A keeper that ends with its maker, together with everything below it, until it is told the job's first process.

    Use as a context manager: without `adopt` everything below it is ended.
    """

    def __init__(self, keeper: _Keeper) -> None:
        self._keeper = keeper
        self._is_adopted = False

    @property
    def id(self) -> ProcessId:
        """The keeper's own identity."""
        return self._keeper.id

    def adopt(self, root_pids: Sequence[int], *, inner_pids: Sequence[int]) -> None:
        """The first of these is the job's first process: from now on the job is independent of the caller.

        It may have ended already: then the keeper has reaped it, and records that. The others are the roots of the
        job's other trees. ``root_pids`` are the caller's pids for them, ``inner_pids`` their own in a sandbox. Raises
        BrokenInstall if the keeper has ended.
        """
        first, *others = self._as_the_keeper_knows(root_pids, inner_pids)
        self._keeper.send(adopt=first, others=others)
        self._keeper.receive("started")
        self._is_adopted = True
        self._keeper.close()

    def _as_the_keeper_knows(self, pids: Sequence[int], inner_pids: Sequence[int]) -> Sequence[int]:
        return pids

    def end(self) -> bool:
        """End everything below it, unless it was adopted. False if something hangs in the kernel."""
        if self._is_adopted:
            return True
        left = self._kill()
        self._keeper.close()
        return not left

    def _kill(self) -> tuple[ProcessId, ...]:
        if not processes.is_alive(self.id):
            return ()
        # Never stop the keeper itself: if the caller is killed now, it ends the rest.
        left = processes.kill_tree(self.id.pid, including_root=False)
        return (*left, *processes.kill_and_wait([self.id]))

    def __enter__(self: W) -> W:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()


class EmptySandbox(_Waiting):
    """A sandbox with only its keeper."""

    def __init__(self, keeper: _Keeper, *, lineage: str, network: Network, log_path: str | None) -> None:
        super().__init__(keeper)
        self.sandbox = Sandbox(keeper.id, None, lineage, network, log_path)

    def _as_the_keeper_knows(self, pids: Sequence[int], inner_pids: Sequence[int]) -> Sequence[int]:
        return inner_pids

    def _kill(self) -> tuple[ProcessId, ...]:
        return processes.kill_and_wait([self.id])  # the kernel ends the rest, even what is not below it


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

        Its descriptor 3 is a socket, the first of ``fds``; its output goes to the second.
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
        """The exit code of an ended process started below it, negative for a signal. Raises BrokenInstall."""
        self._keeper.send(exit_code_of=pid)
        return int(self._keeper.receive("exit_code")["exit_code"])


class HelpedKeeper(_Waiting):
    """The keeper of a job restored by the privileged helper (`helper.client.Keeper`)."""

    def __init__(self, keeper: _HelpedKeeper) -> None:
        super().__init__(keeper)
        self._helped = keeper
        self._is_begun = False

    def given(self) -> contextlib.AbstractContextManager[tuple[int, int, int]]:
        """The descriptors that it starts with, for a block."""
        return self._helped.given()

    def begun(self) -> None:
        """Connect to it: the helper has become the keeper. Raises BrokenInstall."""
        self._helped.begin()
        self._is_begun = True

    def end(self) -> bool:
        """End everything below it; nothing before it has started."""
        if self._is_begun:
            return super().end()
        self._keeper.close()
        return True


class _Keeper:
    """A keeper being started, and the socket to it. Closing the socket early ends it.

    ``answer``: its first message.
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
        # The kernel reports a message's sender with a translated pid: the keeper itself knows only its inner one.
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
        """Raises BrokenInstall if the keeper has ended."""
        self.send_fds((), **message)

    def send_fds(self, fds: Sequence[int], **message: object) -> None:
        """Like `send`, with descriptors."""
        try:
            socket.send_fds(self._socket, [json.dumps(message).encode()], fds)
        except ConnectionError as e:
            raise self.lost() from e

    def receive(self, *wanted: str) -> dict[str, Any]:
        """The keeper's next message, or the next one with a member ``wanted``: a request may have been sent twice.

        Raises the error that it reports; BrokenInstall if it has ended.
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
        """The keeper has ended without a message."""
        said = os.pread(self._output_fd, 1 << 16, 0).decode(errors="replace").strip().rpartition("\n")[2]
        return BrokenInstall(
            "the keeper process of the job ended" + (f": {said}" if said else ""),
            hint="it may have been killed for lack of memory (dmesg)",
            code="GPUCR-KEEPER",
        )

    @contextlib.contextmanager
    def _fds(self, socket_fd: int) -> Iterator[tuple[int, int, int]]:
        """A keeper's specification."""
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
    """A keeper that somebody else starts, with the descriptors of `given`."""

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

"""One CRIU process that serves one request: ``criu swrk FD`` on a SOCK_SEQPACKET socket, one message a packet.

Protocol: https://criu.org/RPC. The messages are in rpc.proto.

CRIU for a sandboxed job runs in the job's own pid, mount and network namespaces, and sees a plain tree there. It starts
in the pid namespace as a child of gpucr, enters the others before it becomes CRIU (in_namespaces.py), and is signalled
and awaited by its outer pid.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import select
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol

from google.protobuf.message import DecodeError
from msgspec import Struct

from gpucr.criu import in_namespaces, rpc_pb2
from gpucr.criu.install import CriuInstall
from gpucr.criu.remains import SERVICE_WORD, kill_session
from gpucr.errors import BrokenInstall
from gpucr.linux import namespaces, own_python, processes
from gpucr.linux.namespaces import Kind, PidNamespace
from gpucr.model import ProcessId

# The number of CRIU's end of the socket, and the lowest number for our ends, so that no dup2 overwrites another.
_CHILD_SOCKET_FD = 3
_FIRST_FREE_FD = 10

START_LIMIT_S = 60.0
"""How long CRIU may take to start in a sandbox without a deadline: enough for a machine that swaps."""

_MESSAGE_LIMIT_BYTES = 64 * 1024
_OUTPUT_LIMIT_BYTES = 16 * 1024

# A signal that ends CRIU while it holds tasks leaves them to ptrace's cleanup. So CRIU starts with these blocked: PIPE
# - when gpucr is killed, CRIU must find its answer undeliverable (EPIPE) and undo, not die of the write; XFSZ  -
#   `refuse_writes` makes writes fail with EFBIG instead of killing; the others come from terminals, service managers
#   and users, and gpucr handles them.
_BLOCKED_SIGNALS = (
    signal.SIGPIPE,
    signal.SIGXFSZ,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGHUP,
)


class Parent(Protocol):
    """A process below which CRIU is started: it becomes the parent of what CRIU restores."""

    def spawn(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        blocked_signals: Sequence[int],
        fds: tuple[int, int],
    ) -> tuple[int, int]:
        """Start it outside the caller's process group. Returns its pid and a pidfd. Raises OSError.

        ``fds``: its socket, which becomes its descriptor 3, and the file for its output.
        """

    def exit_code(self, pid: int) -> int:
        """The exit code of the ended process that `spawn` started; negative for a signal."""


class Files(Struct, frozen=True):
    """What CRIU opens through its client's descriptors, by their numbers there.

    ``outputs``: files that the restored job gets in place of its own.
    """

    images: int
    work: int
    outputs: tuple[int, ...] = ()


class Entered(Struct, frozen=True):
    """The namespaces of a sandbox, by somebody who has opened and checked them. ``pid`` and ``mnt`` are among them.

    ``capabilities``: those that CRIU gets there; nothing that it makes gains others (no_new_privs).
    """

    fds: Mapping[Kind, int]
    capabilities: int


def _decoded(packet: bytes) -> rpc_pb2.Response:
    try:
        return rpc_pb2.Response.FromString(packet)
    except DecodeError as e:
        raise BrokenInstall(
            "CRIU says what is no message of CRIU's", hint="`gpucr criu` says which program it is: see that it is CRIU"
        ) from e


class CriuService:
    """A running ``criu swrk``. Use as a context manager: it is ended and reaped at the end of the block.

    ``images_fd`` and ``work_fd`` are its folders; `files` says how the request names them. With ``sandbox`` it runs in
    the namespaces of that pid namespace's first process, or in those ``entered``, and ``outputs`` are paths there,
    which it has open to append.

    ``own_session`` starts CRIU in a new session. A restore of a terminal job must stay in the caller's session, where
    CRIU puts the job; it gets a new process group instead, and the caller's stdin, which CRIU gives to the job as its
    terminal. With a ``parent``, that one decides; in a sandbox CRIU always has its own session.

    Raises OSError if CRIU cannot be started, TimeoutError if that takes past ``deadline`` (time.monotonic).
    """

    def __init__(
        self,
        install: CriuInstall,
        images_fd: int,
        work_fd: int,
        *,
        own_session: bool = True,
        sandbox: PidNamespace | None = None,
        entered: Entered | None = None,
        outputs: Sequence[Path] = (),
        parent: Parent | None = None,
        deadline: float | None = None,
    ) -> None:
        self._parent = parent
        self._output_fd = os.memfd_create("criu-output", os.MFD_CLOEXEC)
        self._exit_status: int | None = None
        # The kernel makes a socket readable when the peer is closed, but a process that CRIU forked may still hold
        # CRIU's end (a tree being restored does): only the pidfd reliably shows that CRIU has ended.
        try:
            self.sandbox = sandbox
            if sandbox is None:
                # CRIU opens the folders through /proc/OUR-PID/fd, so that no path is resolved twice.
                self.files = Files(images_fd, work_fd)
                self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                with theirs:
                    if parent is None:
                        self.pid = _spawn(install.command, theirs.fileno(), self._output_fd, own_session=own_session)
                    else:
                        argv = [*_arguments(install.command), str(_CHILD_SOCKET_FD)]
                        fds = (theirs.fileno(), self._output_fd)
                        self.pid, self._pidfd = parent.spawn(argv, _environment(), _BLOCKED_SIGNALS, fds)
            else:
                self.files, self.pid, self._socket = _spawn_inside(
                    install.command, sandbox, entered, (images_fd, work_fd), outputs, self._output_fd, deadline
                )
            if parent is None:
                self._pidfd = os.pidfd_open(self.pid)
            stat = processes.read_stat(self.pid)
            self._start_time_ticks = stat.start_time_ticks if stat is not None else 0
        except BaseException:
            if hasattr(self, "_socket"):
                self._socket.close()
            os.close(self._output_fd)
            raise

    def __enter__(self) -> CriuService:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end()
        os.close(self._pidfd)
        os.close(self._output_fd)

    def send(self, request: rpc_pb2.Request) -> None:
        """Send one message. Does not raise if CRIU has ended: the next `receive` shows it."""
        try:
            self._socket.send(request.SerializeToString(), socket.MSG_NOSIGNAL)
        except (BrokenPipeError, ConnectionResetError):
            return

    def receive(self, deadline: float | None) -> rpc_pb2.Response | None:
        """The next message; None once CRIU has ended.

        Raises TimeoutError when ``deadline`` (monotonic) passes, BrokenInstall where this is no CRIU.
        """
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        poller.register(self._pidfd, select.POLLIN)
        timeout_ms = None if deadline is None else max(0.0, (deadline - time.monotonic()) * 1000)
        ready = dict(poller.poll(timeout_ms))
        if not ready:
            raise TimeoutError("CRIU is still at work")
        if self._socket.fileno() in ready:
            try:
                packet = self._socket.recv(_MESSAGE_LIMIT_BYTES, socket.MSG_DONTWAIT)
            except (BlockingIOError, ConnectionResetError):
                packet = b""
            if packet:
                return _decoded(packet)
        return None

    def refuse_writes(self) -> None:
        """Make CRIU's file writes fail with EFBIG, by its file size limit: it then undoes a dump itself.

        Seen with CRIU 4.1.1: image writes and splices fail, CRIU cures and resumes the tasks and answers "failed".
        """
        try:
            _, hard = resource.prlimit(self.pid, resource.RLIMIT_FSIZE)
            resource.prlimit(self.pid, resource.RLIMIT_FSIZE, (0, hard))
        except ProcessLookupError:
            return

    def signal(self, number: signal.Signals) -> None:
        """Send CRIU a signal, if it has not ended."""
        if self._exit_status is None:
            signal.pidfd_send_signal(self._pidfd, number)

    def has_ended(self, timeout_s: float) -> bool:
        """Wait up to ``timeout_s`` until CRIU has ended: then `wait` returns at once."""
        poller = select.poll()
        poller.register(self._pidfd, select.POLLIN)
        return self._exit_status is not None or bool(poller.poll(timeout_s * 1000))

    def give_up(self) -> None:
        """Do not wait for its end at the end of the block: it hangs in the kernel."""
        self._exit_status = -signal.SIGKILL

    def wait(self) -> int:
        """Wait until CRIU has ended and reap it. Returns its exit code, negative for a signal.

        If it was killed, its children are, too.
        """
        if self._exit_status is None:
            self._exit_status = self._reap()
            if self._exit_status < 0:
                kill_session(ProcessId(self.pid, self._start_time_ticks))
        return self._exit_status

    def _reap(self) -> int:
        if self._parent is not None:
            _wait_for(self._pidfd)
            try:
                return self._parent.exit_code(self.pid)
            except BrokenInstall:  # the parent was killed: the exit code is unknown; look for what CRIU may have left
                return -signal.SIGKILL
        try:
            _, status = os.waitpid(self.pid, 0)
        except ChildProcessError:  # the embedding program ignores SIGCHLD: the kernel reaped it
            return 0
        return os.waitstatus_to_exitcode(status)

    def end(self) -> int:
        """Close the socket, which makes a working CRIU undo at its next hook, and wait. Returns its exit code."""
        self._socket.close()
        return self.wait()

    def output(self) -> str:
        """CRIU's stdout and stderr, from before it opened its log: for example why it did not start."""
        return os.pread(self._output_fd, _OUTPUT_LIMIT_BYTES, 0).decode(errors="replace")


def _wait_for(pidfd: int) -> None:
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    poller.poll()


def _arguments(command: Sequence[str]) -> list[str]:
    """The number of its socket follows these."""
    return [*command, "--no-default-config", SERVICE_WORD]


def _environment() -> dict[str, str]:
    """gpucr owns the GPU side: a CUDA plugin of this CRIU must not act on the same processes.

    CRIU has only this variable, no request field, for its plugin folder; our package's folder holds no shared object.
    """
    return {**own_python.environment(), "CRIU_LIBS_DIR": str(Path(__file__).parent)}


def _spawn(command: tuple[str, ...], socket_fd: int, output_fd: int, *, own_session: bool) -> int:
    """Start CRIU. posix_spawn, because it sets the signal mask without running Python between fork and exec."""
    high_socket_fd = fcntl.fcntl(socket_fd, fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE_FD)
    high_output_fd = fcntl.fcntl(output_fd, fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE_FD)
    file_actions: list[tuple[int, ...] | tuple[int, int, str, int, int]] = [
        (os.POSIX_SPAWN_DUP2, high_output_fd, 1),
        (os.POSIX_SPAWN_DUP2, high_output_fd, 2),
        (os.POSIX_SPAWN_DUP2, high_socket_fd, _CHILD_SOCKET_FD),
    ]
    if own_session:
        file_actions.append((os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0))
    environment, argv = _environment(), [*_arguments(command), str(_CHILD_SOCKET_FD)]
    try:
        if own_session:
            return os.posix_spawn(
                argv[0], argv, environment, file_actions=file_actions, setsid=True, setsigmask=_BLOCKED_SIGNALS
            )
        return os.posix_spawn(
            argv[0], argv, environment, file_actions=file_actions, setpgroup=0, setsigmask=_BLOCKED_SIGNALS
        )
    finally:
        os.close(high_socket_fd)
        os.close(high_output_fd)


def _spawn_inside(
    command: tuple[str, ...],
    sandbox: PidNamespace,
    entered: Entered | None,
    folder_fds: tuple[int, int],
    outputs: Sequence[Path],
    output_fd: int,
    deadline: float | None,
) -> tuple[Files, int, socket.socket]:
    """Start CRIU in a sandbox. Returns its files' numbers, its pid here, and our end of its socket."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with contextlib.ExitStack() as opened:
        opened.enter_context(ours)
        opened.enter_context(theirs)
        fds = (
            entered.fds
            if entered is not None
            else opened.enter_context(namespaces.opened(sandbox.init_pid, "pid", "mnt", "net"))
        )
        kinds = [kind for kind in fds if kind != "pid"]
        given = [*folder_fds, theirs.fileno(), *(fds[kind] for kind in kinds)]
        images, work, to_gpucr, *numbers = range(_CHILD_SOCKET_FD, _CHILD_SOCKET_FD + len(given))
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE_FD) for fd in (*given, output_fd)]
        file_actions: list[tuple[int, ...] | tuple[int, int, str, int, int]] = [
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_DUP2, high[-1], 1),
            (os.POSIX_SPAWN_DUP2, high[-1], 2),
            *((os.POSIX_SPAWN_DUP2, fd, images + place) for place, fd in enumerate(high[:-1])),
        ]
        argv = own_python.command(
            in_namespaces.__name__,
            ",".join(f"{kind}={number}" for kind, number in zip(kinds, numbers, strict=True)),
            to_gpucr,
            entered.capabilities if entered is not None else "",
            in_namespaces.identities(command),
            len(outputs),
            *outputs,
            *_arguments(command),
        )

        def spawn() -> int:
            return os.posix_spawn(
                argv[0], argv, _environment(), file_actions=file_actions, setsid=True, setsigmask=_BLOCKED_SIGNALS
            )

        pids: list[int] = []
        try:
            try:
                namespaces.in_namespace(fds["pid"], "pid", lambda: pids.append(spawn()))
            finally:
                for fd in high:
                    os.close(fd)
            theirs.close()
            ours.settimeout(START_LIMIT_S if deadline is None else max(deadline - time.monotonic(), 0.001))
            message, received, _, _ = socket.recv_fds(ours, _MESSAGE_LIMIT_BYTES, 1)
        except BaseException:  # usually Ctrl-C
            # A pid namespace ends only when all processes started in it have been reaped by their parents.
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            raise
    (pid,) = pids
    if not received:
        os.waitpid(pid, 0)
        said = os.pread(output_fd, _OUTPUT_LIMIT_BYTES, 0).decode(errors="replace").strip().rpartition("\n")[2]
        raise OSError(said or "it was killed")
    return Files(images, work, tuple(map(int, message.split()[1:]))), pid, socket.socket(fileno=received[0])

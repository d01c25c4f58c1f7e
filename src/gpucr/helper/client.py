"""The user's side of the helper: root's CRIU behind a socket."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from gpucr.criu.engine import Check, Criu, OnNotify, OnStart
from gpucr.criu.image_entries import OpenImage
from gpucr.criu.images import FilesImage
from gpucr.criu.install import CriuInstall
from gpucr.criu.options import DumpOptions, RestoreOptions
from gpucr.errors import BrokenInstall, CriuError, DeadlineExceeded, ProcessNotFound, Unsupported
from gpucr.helper.access import SOCKET, socket_path
from gpucr.helper.messages import (
    MAX_CLOSED,
    MAX_DESCRIPTORS,
    MAX_FILES,
    SIGNATURE_NAME,
    Answer,
    Ask,
    BadMessage,
    Connection,
    Done,
    Dump,
    Failed,
    Files,
    Here,
    Hook,
    HungUp,
    Isolate,
    Network,
    Restore,
    Stop,
)
from gpucr.helper.opened import OpenedFiles
from gpucr.linux import processes, sockets
from gpucr.linux.namespaces import PidNamespace
from gpucr.model import ProcessId

REFUSED = "GPUCR-HELPER-REFUSED"
_ANSWER_S, _CHECK_EVERY_S = 30.0, 0.1
_CREDENTIALS = struct.Struct("3i")


def find_helper() -> CriuInstall:
    """Root's CRIU through the helper, for a user who has one (`access`). Raises BrokenInstall, Unsupported."""
    path = socket_path() or SOCKET
    with _connected(path) as connection:
        reply = _converse(connection, Ask(), ())
    return CriuInstall((), reply.version, "helper", path)


def is_signed(open_image: OpenImage) -> bool:
    """Whether the helper has written these images."""
    try:
        open_image(SIGNATURE_NAME).close()
    except OSError:
        return False
    return True


class Keeper(Protocol):
    """The keeper that the helper's process becomes when CRIU has restored a job."""

    def given(self) -> contextlib.AbstractContextManager[tuple[int, int, int]]:
        """The descriptors that it is started with."""

    def begun(self) -> None:
        """Raise BrokenInstall unless it has started."""


class Keepers(Protocol):
    """The keepers of a job, one per process tree."""

    def another(self) -> Keeper:
        """The keeper of the next tree."""


class HelperCriu(Criu):
    """Like `Criu`, for the caller's own processes. It restores what it has signed (`use_signed`).

    A restore may use modified images, in which file sizes differ or connections are closed.
    """

    def __init__(
        self, install: CriuInstall, sandbox: PidNamespace | None = None, *, keepers: Keepers | None = None
    ) -> None:
        super().__init__(install, sandbox)
        self._keepers = keepers
        self._sandbox_pid = sandbox.init_pid if sandbox is not None else 0
        self._signed: Path | None = None

    def use_signed(self, folder: Path) -> None:
        """Where the images are as the helper wrote them; those to restore may have been changed."""
        self._signed = folder

    def dump(
        self,
        pid: int,
        images_dir: Path,
        options: DumpOptions,
        *,
        log_path: Path,
        on_start: OnStart | None = None,
        on_notify: OnNotify | None = None,
        check: Check | None = None,
        deadline: float | None = None,
    ) -> None:
        """Like `Criu.dump`. Raises Unsupported if the helper does not dump this tree."""
        stat = processes.read_stat(pid)
        if stat is None:
            raise ProcessNotFound(f"there is no process {pid}", pid=pid)
        limit_bytes = options.ghost_limit_bytes
        request = Dump(pid, stat.start_time_ticks, options.leave_running, limit_bytes, self._sandbox_pid)
        with _connected(self.install.path) as connection, _opened(images_dir, log_path) as fds:
            here = _converse(connection, request, fds)
            if on_start is not None:
                on_start(ProcessId(here.pid, here.start_time_ticks))
            _Conversation(connection, "dump", log_path, on_notify, check, deadline, hook_pid=pid).run()

    def restore(
        self,
        images_dir: Path,
        options: RestoreOptions,
        *,
        log_path: Path,
        outputs: Mapping[Path, Path] | None = None,
        inherited: Mapping[str, int] | None = None,
        on_start: OnStart | None = None,
        on_notify: OnNotify | None = None,
        check: Check | None = None,
        deadline: float | None = None,
    ) -> int:
        """Like `Criu.restore`. Outside a sandbox the tree gets its own keeper."""
        if (self._keepers is None) != bool(self._sandbox_pid) or inherited:
            raise AssertionError("the helper restores into a sandbox or below a keeper, and has its own way with files")
        root = f"/proc/{self._sandbox_pid}/root" if self._sandbox_pid else ""
        signed = self._signed or images_dir
        keeper = self._keepers.another() if self._keepers is not None else None
        closed = _closed(FilesImage.read(signed), FilesImage.read(images_dir))
        with (
            OpenedFiles.of(images_dir, root, outputs) as files,
            _connected(self.install.path) as connection,
            _opened(signed, log_path) as fds,
            keeper.given() if keeper is not None else contextlib.nullcontext(()) as keeper_fds,
        ):
            if len(closed) > MAX_CLOSED or len(files.fds) > MAX_FILES:
                raise Unsupported("the job has more connections or files than the helper restores", code=REFUSED)
            request = Restore(options.leave_stopped, closed, len(files.fds), self._sandbox_pid)
            here = _converse(connection, request, (*fds, *keeper_fds), files.fds)
            if on_start is not None:
                on_start(ProcessId(here.pid, here.start_time_ticks))
            root_pid = _Conversation(connection, "restore", log_path, on_notify, check, deadline).run()
        if keeper is not None:
            keeper.begun()
        return root_pid


def isolate(
    install: CriuInstall, keeper_fds: Sequence[int], *, network: Network, last_pid: int, terminals: bool
) -> None:
    """Ask the helper for a sandbox. On return its keeper has been started with these descriptors.

    Raises Unsupported if the helper refuses, BrokenInstall.
    """
    with _connected(install.path) as connection:
        _converse(connection, Isolate(network, last_pid, terminals), keeper_fds)
        try:
            reply, _ = connection.receive(Done, Failed, until=time.monotonic() + _ANSWER_S)
        except (HungUp, BadMessage, TimeoutError) as e:
            raise _lost(e) from e
    if isinstance(reply, Failed):
        raise _failure(reply, "isolate", None)


def _closed(signed: FilesImage, wanted: FilesImage) -> tuple[int, ...]:
    kept = {each.inode for each in wanted.tcp_sockets() if each.is_connection}
    return tuple(each.inode for each in signed.tcp_sockets() if each.is_connection and each.inode not in kept)


@contextlib.contextmanager
def _opened(images_dir: Path, log_path: Path) -> Iterator[tuple[int, int]]:
    log_path.parent.mkdir(parents=True, exist_ok=True)
    images = os.open(images_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            yield images, log
        finally:
            os.close(log)
    finally:
        os.close(images)


def _connected(path: Path) -> Connection:
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        connected.settimeout(_ANSWER_S)
        sockets.connect(connected, os.fspath(path), limit_s=_ANSWER_S)
        data = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    except OSError as e:
        connected.close()
        raise BrokenInstall(
            f"the privileged helper does not answer at {path}: {e.strerror or 'timed out'}",
            hint="have root look at it (`gpucr helper status`), or do without: GPUCR_HELPER=off",
            code="GPUCR-HELPER",
        ) from e
    if _CREDENTIALS.unpack(data)[1] != 0:
        connected.close()
        raise BrokenInstall(
            f"the process listening at {path} does not belong to root",
            hint="unset GPUCR_HELPER, or name root's socket",
            code="GPUCR-HELPER",
        )
    return Connection(connected)


def _converse(
    connection: Connection,
    request: Ask | Dump | Isolate | Restore,
    fds: Sequence[int],
    files: Mapping[int, int] | None = None,
) -> Here:
    """Send a request and wait until the helper has accepted it. Raises Unsupported, BrokenInstall."""
    try:
        connection.send(request, fds)
        items = list((files or {}).items())
        for start in range(0, len(items), MAX_DESCRIPTORS):
            part = items[start : start + MAX_DESCRIPTORS]
            connection.send(Files(tuple(number for number, _ in part)), [fd for _, fd in part])
        reply, _ = connection.receive(Here, Failed, until=time.monotonic() + _ANSWER_S)
    except (HungUp, BadMessage, TimeoutError) as e:
        raise _lost(e) from e
    if isinstance(reply, Failed):
        raise _failure(reply, "dump" if isinstance(request, Dump) else "restore", None)
    here: Here = reply
    return here


class _Conversation:
    """A running request: answers its hooks, and stops it if it must not continue."""

    def __init__(
        self,
        connection: Connection,
        phase: str,
        log_path: Path,
        on_notify: OnNotify | None,
        check: Check | None,
        deadline: float | None,
        *,
        hook_pid: int | None = None,
    ) -> None:
        self._connection = connection
        self._phase = phase
        self._log_path = log_path
        self._on_notify = on_notify
        self._check = check
        self._deadline = deadline
        self._hook_pid = hook_pid
        self._reason: BaseException | None = None

    def run(self) -> int:
        """Run to the end. Returns the root's pid. Raises what a hook or the check raised, or the failure."""
        while True:
            try:
                reply, _ = self._connection.receive(Hook, Done, Failed, until=time.monotonic() + _CHECK_EVERY_S)
                if not isinstance(reply, Hook):
                    break
                proceed = self._answer(reply)
                self._connection.send(Answer(proceed))
            except TimeoutError:
                self._look()
            except KeyboardInterrupt as e:
                self._stop(e)
            except (HungUp, BadMessage) as e:
                raise self._reason or _lost(e) from e
        if self._reason is not None:
            raise self._reason
        if isinstance(reply, Failed):
            raise _failure(reply, self._phase, self._log_path)
        return int(reply.pid)

    def _answer(self, hook: Hook) -> bool:
        if self._reason is not None:
            return False
        try:
            if self._on_notify is not None:
                self._on_notify(hook.name, hook.pid if self._hook_pid is None else self._hook_pid)
        except BaseException as e:  # noqa: BLE001 - CRIU must undo before any error reaches the caller
            self._reason = e
            return False
        return True

    def _look(self) -> None:
        if self._reason is not None:
            return
        if self._deadline is not None and time.monotonic() >= self._deadline:
            self._stop(
                DeadlineExceeded(
                    f"timed out while CRIU was at work on the {self._phase}", hint="allow more time with --timeout"
                )
            )
        elif self._check is not None:
            try:
                self._check()
            except BaseException as e:  # noqa: BLE001 - as for a hook
                self._stop(e)

    def _stop(self, reason: BaseException) -> None:
        if self._reason is None:
            self._reason = reason
            with contextlib.suppress(HungUp):
                self._connection.send(Stop())


def _lost(why: Exception) -> BrokenInstall:
    if isinstance(why, TimeoutError):
        return BrokenInstall(
            f"the privileged helper has not answered for {_ANSWER_S:g} s",
            hint="try again when the machine has less to do; or do without: GPUCR_HELPER=off",
            code="GPUCR-HELPER",
        )
    return BrokenInstall(
        "the privileged helper has ended without an answer",
        hint="have root look into its journal: journalctl -u gpucr-helper",
        code="GPUCR-HELPER",
    )


def _failure(reply: Failed, phase: str, log_path: Path | None) -> Exception:
    if reply.because == "refused":
        return Unsupported(
            f"the privileged helper does not do it: {reply.message}",
            hint="`gpucr explain GPUCR-HELPER-REFUSED` lists what it does; root can run the same command with sudo",
            code=REFUSED,
        )
    return CriuError(
        reply.message,
        phase=phase,
        reason=reply.reason,
        log_path=str(log_path) if log_path is not None else None,
        hint=reply.hint,
        code=reply.code,
    )

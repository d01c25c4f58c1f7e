"""The helper's process for one request: from the accepted socket to the answer."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from gpucr.criu.engine import Criu
from gpucr.criu.image_entries import ImageError, images_in
from gpucr.criu.images import NAME as FILES_IMAGE
from gpucr.criu.images import FilesImage
from gpucr.criu.linked_files import REMAP_IMAGE
from gpucr.criu.options import DumpOptions, RestoreOptions, is_shell_job
from gpucr.criu.pids import joins_a_session
from gpucr.criu.service import Entered
from gpucr.criu.tcp_streams import correct_streams
from gpucr.errors import CriuError, GpucrError
from gpucr.helper.messages import (
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
    Restore,
    Stop,
    close_all,
)
from gpucr.linux import capabilities, descriptor_limit, processes
from gpucr.linux.held_folder import HeldFolder
from gpucr.linux.tcp_repair import sockets_released
from gpucr.privileged import copied_criu, folders, inspected, limits, mounts, peer, ports, sandboxes, session, terminals
from gpucr.privileged.inheritance import (
    adopt_descendants,
    as_peer_with,
    become_keeper,
    join_cgroups_of,
    leave_keyring,
    needed,
)
from gpucr.privileged.keys import KEYS_FOLDER, Keys, Signature, SignedFile, signature
from gpucr.privileged.owned import require_owned
from gpucr.privileged.peer import Peer
from gpucr.privileged.rights import Refused
from gpucr.privileged.sandboxes import Sandbox

REQUEST_LIMIT_S = 60.0
"""How long a client may take for its request."""

MAX_LOG_BYTES = 16 << 20
_FIRST_FREE_FD = 10
_LOG_NAME = "criu.log"
_LOG_AT, _KEEPER_AT, _KEEPER_FDS = 1, 2, 3


class Stopped(Exception):
    """The client has asked to stop, or has disconnected."""


class Settings(Struct, frozen=True):
    """The folders of root's keys and of the helper's working files."""

    keys: Path = KEYS_FOLDER
    work: Path = folders.WORK_FOLDER


def serve(connected: socket.socket, settings: Settings, announce: folders.Announce) -> None:
    """Serve this connection's one request. After a restore, become the job's keeper and do not return."""
    with Connection(connected) as connection:
        try:
            with limits.place_of(peer.uid_of(connected)) as is_free, descriptor_limit.raised():
                if not is_free:
                    raise Refused(limits.TOO_MANY_OF_YOURS)
                _Request(connection, settings, announce).run()
        except (HungUp, BadMessage, Stopped, TimeoutError) as e:
            _tell(connection, Failed("stopped", _cut(str(e)) or type(e).__name__))
        except Refused as e:
            _tell(connection, Failed("refused", _cut(str(e))))
        except CriuError as e:
            hint = e.hint if e.hint is not None and _LOG_NAME not in e.hint else None  # one of the helper's own paths
            _tell(connection, Failed("criu", _cut(e.message), _cut(e.reason or ""), _cut(hint or "") or None, e.code))
        except (GpucrError, OSError, ImageError) as e:
            print(f"gpucr helper: {e!r}", file=sys.stderr)  # noqa: T201 - the journal
            _tell(connection, Failed("criu", f"the helper failed: {_cut(str(e))}"))


def _tell(connection: Connection, reply: Failed) -> None:
    with contextlib.suppress(HungUp, OSError):
        connection.send(reply)


def _cut(text: str) -> str:
    """As a message can hold it: names of files need not be text."""
    return text.encode(errors="backslashreplace").decode()[:4000]


class _Request:
    """A request, starting with the check of its peer."""

    def __init__(self, connection: Connection, settings: Settings, announce: folders.Announce) -> None:
        self._connection = connection
        self._settings = settings
        self._announce = announce
        self._keys = Keys(settings.keys)

    def run(self) -> None:
        until = time.monotonic() + REQUEST_LIMIT_S
        request, fds = self._connection.receive(Ask, Dump, Isolate, Restore, until=until)
        try:
            if len(fds) != _descriptors_of(request):
                raise BadMessage("another number of descriptors")
            mounts.join(self._connection.socket)
            self._peer = peer.of(self._connection.socket)
            if isinstance(request, Ask):
                self._here()
                return
            if isinstance(request, Isolate):
                self._isolate(request, fds)
                return
            folders.require_users_folder(fds[0], self._peer)
            folders.require_log(fds[_LOG_AT])
            self._leave_for_peer()
            self._criu = copied_criu.find()
            self._key = self._keys.own()
            if isinstance(request, Dump):
                self._dump(request, fds)
            elif isinstance(request, Restore):
                self._restore(request, fds, until)
        finally:
            close_all(fds)

    def _leave_for_peer(self) -> None:
        join_cgroups_of(self._peer.pid)
        peer.of(self._connection.socket)  # it is still alive, so those were its own cgroups
        leave_keyring()

    def _isolate(self, request: Isolate, fds: Sequence[int]) -> None:
        self._leave_for_peer()
        self._connection.send(self._myself())
        keeper = sandboxes.make(self._peer, request, fds)
        self._connection.send(Done(keeper.pid))

    def _here(self) -> None:
        self._keys.own()
        self._connection.send(self._myself())

    @staticmethod
    def _myself() -> Here:
        me = processes.this_process()
        return Here(copied_criu.find().version, me.pid, max(me.start_time_ticks, 0))

    # --- dump ---

    def _dump(self, request: Dump, fds: Sequence[int]) -> None:
        stat = processes.read_stat(request.pid)
        if stat is None or stat.start_time_ticks != request.start_time_ticks:
            raise Refused(f"there is no process {request.pid}")
        with self._in_sandbox(request.keeper) as sandbox:
            self._dump_from(request, fds, sandbox)

    def _dump_from(self, request: Dump, fds: Sequence[int], sandbox: Sandbox | None) -> None:
        rights = require_owned(request.pid, self._peer, sandbox)
        self._connection.send(self._myself())
        wanted = needed(has_filter=any(each.has_filter for each in rights.values()))
        pids = [each.pid for each in processes.tree(request.pid)]
        joins = sandbox is None and is_shell_job(request.pid, pids)
        terminals.require_restorable(pids, wanted, joins=joins)
        options = DumpOptions(
            leave_running=request.leave_running,
            shell_job=joins,
            ghost_limit_bytes=request.ghost_limit_bytes,
            link_remap=False,  # it would create names, as root, in the job's folders
        )
        with (
            sockets_released([process.id for process in processes.tree(request.pid)]),
            folders.private_folder(self._settings.work) as private,
            _log_given(private, self._peer, fds[_LOG_AT]) as log_path,
            folders.folder_within(fds[0], self._peer, self._announce) as (own, remove),
            as_peer_with(self._peer, wanted | _to_enter(sandbox)),
        ):

            def on_notify(hook: str, pid: int) -> None:
                if hook == "post-dump":
                    self._sign_and_hand_over(request.pid, sandbox, own, fds[0])
                    remove()  # the empty remainder would confuse readers of the user's folder
                self._ask(hook, pid)

            self._criu_in(sandbox, wanted).dump(
                request.pid,
                Path(f"/proc/self/fd/{own}"),
                options,
                log_path=log_path,
                on_notify=on_notify,
                check=self._check,
            )
        self._connection.send(Done(request.pid))

    def _sign_and_hand_over(self, root_pid: int, sandbox: Sandbox | None, own: int, users: int) -> None:
        """CRIU holds the tree and has written all images; only root has seen them so far."""
        folder = Path(f"/proc/self/fd/{own}")
        correct_streams(folder)
        inspected.require_inspected(folder, self._peer, require_owned(root_pid, self._peer, sandbox))
        if sandbox is not None:
            sandbox.require_nothing_in_memory()
        network = sandbox.network if sandbox is not None else "host"
        names = inspected.image_names(folder)
        described = folders.described(own, names, self._check)
        (folder / SIGNATURE_NAME).write_bytes(signature(described, self._peer.uid, network, self._key))
        folders.hand_over(own, (*names, SIGNATURE_NAME), users)

    # --- restore ---

    def _restore(self, request: Restore, fds: Sequence[int], until: float) -> None:
        given = self._receive_files(request.files, until)
        signed = self._keys.verified(folders.read_signature(fds[0]), self._peer.uid)
        with self._in_sandbox(request.keeper) as sandbox:
            if signed.network == "own" and (sandbox is None or sandbox.network != "own"):
                raise Refused("the job had a network of its own, whose connections are not the machine's")
            self._restore_into(request, fds, given, signed, sandbox)

    def _restore_into(
        self,
        request: Restore,
        fds: Sequence[int],
        given: Mapping[int, int],
        signed: Signature,
        sandbox: Sandbox | None,
    ) -> None:
        self._connection.send(self._myself())
        with (
            folders.private_folder(self._settings.work) as private,
            _log_given(private, self._peer, fds[_LOG_AT]) as log_path,
        ):
            images = private / "images"
            images.mkdir(0o755)
            images.chmod(0o755)  # the peer's CRIU reaches it by descriptor; the path leads through a root-only folder
            folders.copy_verified(fds[0], signed.files, images, self._check)
            has_filter = inspected.require_inspected(images, self._peer)
            joins = sandbox is None and joins_a_session(images_in(images))  # this process's, which has no terminal
            inherited = self._fit(images, signed.files, request, given, sandbox)
            if sandbox is None or sandbox.network == "host":
                bound = [each.local for each in FilesImage.read(images).tcp_sockets() if each.local.port]
                ports.free(bound, self._check)
            if sandbox is None:
                adopt_descendants()
            held = HeldFolder.open(images)
            wanted = needed(has_filter=has_filter)
            try:
                with as_peer_with(self._peer, wanted | _to_enter(sandbox)):
                    root_pid = self._criu_in(sandbox, wanted).restore(
                        held.path,
                        RestoreOptions(shell_job=joins, link_remap=False, leave_stopped=request.leave_stopped),
                        log_path=log_path,
                        inherited=inherited,
                        on_notify=lambda hook, pid: self._on_restoring(hook, pid, sandbox),
                        check=self._check,
                    )
            except BaseException:
                _collect_ended()
                raise
            held.close()
        close_all(tuple({*given.values(), *inherited.values()}))
        try:
            self._connection.send(Done(root_pid))
            if sandbox is None:
                become_keeper(self._peer, fds[_KEEPER_AT:], "with-children")
        except BaseException:
            processes.kill_tree(root_pid, including_root=True)
            raise

    def _receive_files(self, count: int, until: float) -> Mapping[int, int]:
        """The job's files by their numbers in the images, as descriptors that CRIU can inherit."""
        given: dict[int, int] = {}
        while len(given) < count:
            message, fds = self._connection.receive(Files, until=until)
            try:
                if len(fds) != len(message.ids) or set(message.ids) & set(given):
                    raise BadMessage("files without descriptors, or twice")
                for number, fd in zip(message.ids, fds, strict=True):
                    given[number] = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE_FD)
            finally:
                close_all(fds)
        return given

    @staticmethod
    def _fit(
        images: Path,
        files: tuple[SignedFile, ...],
        request: Restore,
        given: Mapping[int, int],
        sandbox: Sandbox | None,
    ) -> Mapping[str, int]:
        """Remove the user's paths from the images: descriptors replace all of them, and root's the root folder.

        This includes deleted files, so CRIU creates none.
        """
        image = FilesImage.read(images)
        roots = inspected.roots_in([each.name for each in files], images_in(images))
        wanted = set(image.paths()) - image.terminals()
        if set(given) | roots != wanted | roots or not roots <= wanted:
            raise Refused("the files that came are not those of the job")
        opened = dict(given)
        root = os.open("/", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC) if sandbox is None else sandbox.open_root()
        for number in roots:  # one each: CRIU closes what it has inherited
            opened[number] = fcntl.fcntl(root, fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE_FD)
        os.close(root)
        names = {number: f"/gpucr-helper/{number}" for number in wanted}
        image.rename(names)
        image.close_connections([each for each in image.tcp_sockets() if each.inode in request.closed])
        for name in (FILES_IMAGE, REMAP_IMAGE):
            (images / name).unlink(missing_ok=True)
        (images / FILES_IMAGE).write_bytes(image.encode())
        (images / FILES_IMAGE).chmod(0o444)
        inherited = {names[number]: opened[number] for number in wanted}
        for fd in inherited.values():
            os.set_inheritable(fd, True)
        return inherited

    def _on_restoring(self, hook: str, pid: int, sandbox: Sandbox | None) -> None:
        """Check the job's privileges with the kernel, and lower its limits, before its first instruction runs."""
        if hook == "pre-resume":
            require_owned(pid, self._peer, sandbox)
            for each in processes.tree(pid):
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a zombie has nothing any more
                    session.hold_within(each.pid, self._peer.session)
        self._ask(hook, pid)

    # --- both ---

    @contextlib.contextmanager
    def _in_sandbox(self, keeper_pid: int) -> Iterator[Sandbox | None]:
        """The sandbox of this keeper; None for 0."""
        if not keeper_pid:
            yield None
            return
        with sandboxes.held(keeper_pid, self._peer) as found:
            yield found

    def _criu_in(self, sandbox: Sandbox | None, wanted: int) -> Criu:
        """CRIU with the capabilities ``wanted``, in the sandbox if there is one."""
        if sandbox is None:
            return Criu(self._criu)
        return Criu(self._criu, sandbox.pids, entered=Entered(sandbox.fds, wanted))

    def _ask(self, hook: str, pid: int) -> None:
        """Report a hook to the client and wait for its answer, without a time limit while the client lives."""
        self._connection.send(Hook(hook, pid))
        message, fds = self._connection.receive(Answer, Stop)
        close_all(fds)
        if not isinstance(message, Answer) or not message.proceed:
            raise Stopped("the client has given up")

    def _check(self) -> None:
        """Raise Stopped if the client has sent it or has disconnected. Called several times a second."""
        try:
            message, fds = self._connection.receive(Stop, until=time.monotonic())
        except TimeoutError:
            return
        close_all(fds)
        raise Stopped(f"the client has sent {type(message).__name__}")


def _descriptors_of(request: Ask | Dump | Isolate | Restore) -> int:
    if isinstance(request, Ask):
        return 0
    if isinstance(request, Isolate):
        return _KEEPER_FDS
    keeper_fds = 0 if isinstance(request, Dump) or request.keeper else _KEEPER_FDS
    return _KEEPER_AT + keeper_fds


def _collect_ended() -> None:
    """Reap the processes that CRIU has killed: only then are their pids free for the next attempt."""
    processes.kill_tree(os.getpid(), including_root=False)
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _to_enter(sandbox: Sandbox | None) -> int:
    """The capabilities needed to enter a sandbox; CRIU does not get them."""
    return 0 if sandbox is None else capabilities.mask("SYS_ADMIN", "SYS_CHROOT")


@contextlib.contextmanager
def _log_given(private: Path, peer: Peer, fd: int) -> Iterator[Path]:
    """A path for CRIU's log, for a block. At the end the log is copied to the file that the user has opened."""
    folder = folders.make_log_folder(private, peer)
    path = Path(f"/proc/self/fd/{folder}/{_LOG_NAME}")
    try:
        yield path
    finally:
        with contextlib.suppress(OSError):
            data = path.read_bytes()[-MAX_LOG_BYTES:]
            while data:
                data = data[os.write(fd, data) :]
        os.close(folder)


def prepare_process() -> None:
    """Prepare a serving process: it ignores termination signals; the client ends it by disconnecting."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    os.umask(0o077)
    os.chdir("/")

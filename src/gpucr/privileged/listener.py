"""The helper's socket: one process per request, and a limit for each user before one is started.

A service manager may pass the listening socket (sd_listen_fds(3)). systemd's Accept=yes would start a process of root's
for every connection: before systemd 257 it counts them for all users of a local socket together.
"""

from __future__ import annotations

import contextlib
import errno
import grp
import os
import select
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from gpucr.errors import InvalidRequest, NotPermitted
from gpucr.helper.messages import MAX_REQUESTS_PER_USER, Connection, Failed, HungUp
from gpucr.linux import capabilities, own_process, trusted_paths
from gpucr.privileged import limits, peer
from gpucr.privileged.served import Settings

_BACKLOG = 128
_LOOK_EVERY_S = 0.5
_IDLE_S = 60.0
_FIRST_PASSED_FD = 3  # SD_LISTEN_FDS_START


def require_root() -> None:
    """Raise NotPermitted unless the caller has the privileges that root's CRIU needs."""
    if os.geteuid() != 0 or not capabilities.can_checkpoint_processes():
        raise NotPermitted("the privileged helper is root's", pid=os.getpid(), hint="run the same command with sudo -H")


def group_id(name: str) -> int:
    """The id of a group. Raises InvalidRequest."""
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError as e:
        raise InvalidRequest(f"there is no group {name}", hint="getent group lists them") from e


def listen(path: Path, settings: Settings, *, group: str | None, on_ready: Callable[[], None]) -> None:
    """Serve until SIGTERM or SIGINT. ``group``: the group that may connect; None: everybody. Needs root.

    On a socket that a service manager has passed it also ends when nobody has come for a while; ``path`` and ``group``
    are then that manager's. Raises NotPermitted, InvalidRequest.
    """
    require_root()
    gid = group_id(group) if group is not None else None
    passed = passed_socket()
    with passed or _bound(path, gid) as listening:
        ends, wakes = socket.socketpair()
        for each in (ends, wakes):
            each.setblocking(False)
        signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        on_ready()
        _Listener(listening, settings).run(ends, idle_s=None if passed is None else _IDLE_S)
    if passed is None:
        with contextlib.suppress(OSError):
            path.unlink()


def passed_socket() -> socket.socket | None:
    """The listening socket that a service manager has passed to this process; None: it has passed none.

    Raises InvalidRequest for another kind of socket.
    """
    if os.environ.get("LISTEN_PID") != str(os.getpid()) or os.environ.get("LISTEN_FDS") != "1":
        return None
    passed = socket.socket(fileno=_FIRST_PASSED_FD)
    passed.set_inheritable(False)
    listens = passed.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    if (passed.family, passed.type, listens) != (socket.AF_UNIX, socket.SOCK_SEQPACKET, 1):
        passed.close()
        raise InvalidRequest(
            "the service manager has passed another kind of socket",
            hint="systemd: ListenSequentialPacket= and Accept=no, as `gpucr helper install` writes them",
        )
    return passed


class _AtWork(Struct, frozen=True):
    uid: int
    process: subprocess.Popen[bytes]


class _Listener:
    def __init__(self, listening: socket.socket, settings: Settings) -> None:
        self._listening = listening
        self._settings = settings
        self._at_work: list[_AtWork] = []

    def run(self, ends: socket.socket, *, idle_s: float | None) -> None:
        """``idle_s``: end when nobody was served for this time."""
        last_s = time.monotonic()
        while True:
            ready, _, _ = select.select([self._listening, ends], [], [], _LOOK_EVERY_S)
            self._at_work = [each for each in self._at_work if each.process.poll() is None]
            if ends in ready:
                return
            if self._listening in ready:
                with contextlib.suppress(OSError):
                    self._serve(self._listening.accept()[0])
            if self._at_work or self._listening in ready:
                last_s = time.monotonic()
            elif idle_s is not None and time.monotonic() - last_s > idle_s:
                return

    def _why_not(self, uid: int) -> str | None:
        """Why no more of this user's requests is served now."""
        if sum(each.uid == uid for each in self._at_work) >= MAX_REQUESTS_PER_USER:
            return limits.TOO_MANY_OF_YOURS
        if len(self._at_work) >= limits.MAX_REQUESTS:
            return f"{limits.MAX_REQUESTS} requests are served already"
        return None

    def _serve(self, connected: socket.socket) -> None:
        with connected:
            uid = peer.uid_of(connected)
            if (why_not := self._why_not(uid)) is not None:
                connected.setblocking(False)
                with contextlib.suppress(HungUp):
                    Connection(connected).send(Failed("refused", why_not))
                return
            settings = self._settings
            started = own_process.start(
                "gpucr.privileged.entry", settings.keys, settings.work, stdin=connected.fileno(), stderr=None
            )
        self._at_work.append(_AtWork(uid, started))


def _bound(path: Path, gid: int | None) -> socket.socket:
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        trusted_paths.require_ours(path.parent)
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISSOCK(path.lstat().st_mode):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), os.fspath(path))
            path.unlink()  # left by a killed listener
        before = os.umask(0o777)
        try:
            listening.bind(os.fspath(path))
        finally:
            os.umask(before)
        if gid is not None:
            os.chown(path, -1, gid)
        path.chmod(0o666 if gid is None else 0o660)
        listening.listen(_BACKLOG)
    except OSError as e:
        listening.close()
        raise InvalidRequest(
            f"the helper cannot listen at {path}: {e.strerror}",
            hint="name a path with --socket in a folder that only root can change",
        ) from e
    return listening

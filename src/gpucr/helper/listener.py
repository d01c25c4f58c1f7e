"""The helper's socket without a service manager: one process per request, like systemd's Accept=yes."""

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
from collections.abc import Callable
from pathlib import Path

from gpucr.errors import InvalidRequest, NotPermitted
from gpucr.helper import limits
from gpucr.helper.served import Settings
from gpucr.linux import own_python, processes, trusted_paths

_BACKLOG = 16
_LOOK_EVERY_S = 0.5


def require_root() -> None:
    """Raise NotPermitted unless the caller has the privileges that root's CRIU needs."""
    if os.geteuid() != 0 or not processes.can_checkpoint_processes():
        raise NotPermitted("the privileged helper is root's", pid=os.getpid(), hint="run the same command with sudo -H")


def group_id(name: str) -> int:
    """The id of a group. Raises InvalidRequest."""
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError as e:
        raise InvalidRequest(f"there is no group {name}", hint="getent group lists them") from e


def listen(path: Path, settings: Settings, *, group: str | None, on_ready: Callable[[], None]) -> None:
    """Serve until SIGTERM or SIGINT. ``group``: the group that may connect; None: everybody. Needs root.

    Raises NotPermitted, InvalidRequest.
    """
    require_root()
    gid = group_id(group) if group is not None else None
    with _bound(path, gid) as listening:
        ends, wakes = socket.socketpair()
        for each in (ends, wakes):
            each.setblocking(False)
        signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        on_ready()
        _Listener(listening, settings).run(ends)
    with contextlib.suppress(OSError):
        path.unlink()


class _Listener:
    def __init__(self, listening: socket.socket, settings: Settings) -> None:
        self._listening = listening
        self._settings = settings
        self._at_work: list[subprocess.Popen[bytes]] = []

    def run(self, ends: socket.socket) -> None:
        while True:
            ready, _, _ = select.select([self._listening, ends], [], [], _LOOK_EVERY_S)
            self._at_work = [each for each in self._at_work if each.poll() is None]
            if ends in ready:
                return
            if self._listening in ready:
                with contextlib.suppress(OSError):
                    self._serve(self._listening.accept()[0])

    def _serve(self, connected: socket.socket) -> None:
        with connected:
            if len(self._at_work) >= limits.MAX_REQUESTS:
                return
            started = subprocess.Popen(
                own_python.command("gpucr.helper.entry", self._settings.keys, self._settings.work),
                stdin=connected.fileno(),
                stdout=subprocess.DEVNULL,
                env=own_python.environment(),
                cwd="/",
                start_new_session=True,
            )
        self._at_work.append(started)


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

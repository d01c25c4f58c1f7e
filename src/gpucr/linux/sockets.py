"""Local sockets."""

from __future__ import annotations

import contextlib
import re
import socket
import time
from collections.abc import Iterable
from pathlib import Path

from gpucr.linux import proc_text
from gpucr.linux.one_look import OneLook
from gpucr.linux.processes import open_files

_SOCKET = re.compile(r"^socket:\[(\d+)\]$")
_TRY_AGAIN_S = 0.01


def connect(connecting: socket.socket, address: str, *, limit_s: float) -> None:
    """Connect a local socket, after others that wait for the same listener.

    A socket with a time limit of its own waits for no room in a full queue: connect(2) fails with EAGAIN at once (seen
    on Linux 6.18). Raises TimeoutError, and OSError for any other failure.
    """
    until = time.monotonic() + limit_s
    while True:
        try:
            connecting.connect(address)
            return
        except BlockingIOError as e:
            if time.monotonic() > until:
                raise TimeoutError("too many others wait for it") from e
        time.sleep(_TRY_AGAIN_S)


def bound_socket_paths(
    pids: Iterable[int], *, is_sandboxed: bool = False, look: OneLook | None = None
) -> tuple[Path, ...]:
    """The absolute paths to which local sockets of these processes are bound, as seen by this process.

    Processes with another root or mount namespace are left out: their paths mean something else here. Not if
    ``is_sandboxed``: in a gpucr sandbox, paths are the same as here. Reads ``/proc/PID/net/unix`` (proc_pid_net(5)); a
    process that has ended is skipped.
    """
    look = look or OneLook()
    found: set[Path] = set()
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            inodes = {match[1] for file in look.files(pid) if (match := _SOCKET.match(file.target))}
            if inodes and (is_sandboxed or look.sees_our_files(pid)):
                found.update(_bound(pid, inodes))
    return tuple(sorted(found))


def abstract_names(pid: int) -> tuple[str, ...]:
    """The names of the process's abstract local sockets, each with a leading ``@``."""
    inodes = {match[1] for file in open_files(pid) if (match := _SOCKET.match(file.target))}
    return tuple(name for name in _names(pid, inodes) if name.startswith("@"))


def _bound(pid: int, inodes: set[str]) -> Iterable[Path]:
    return (Path(name) for name in _names(pid, inodes) if name.startswith("/"))


def _names(pid: int, inodes: set[str]) -> Iterable[str]:
    for inode, names in proc_text.unix_socket_names(pid).items() if inodes else ():
        if inode in inodes:
            yield from names

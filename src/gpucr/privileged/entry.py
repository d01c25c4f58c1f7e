"""The program of the helper's processes. Standard input is the connection, as systemd and `listener` pass it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from gpucr.privileged import folders, served

_FIRST_FREE_FD, _MAX_NAME_BYTES = 10, 256
_REMOVE = b"remove"


def main(keys: str, work: str) -> None:
    """Serve this connection's request. On return the child may have become a job's keeper."""
    connected = socket.socket(fileno=fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE_FD))
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    os.dup2(null, 0)
    served.prepare_process()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    child = os.fork()  # a service manager counts running requests, not restored jobs
    if child == 0:
        ours.close()
        try:
            os.setsid()
            settings = served.Settings(Path(keys), Path(work))
            served.serve(connected, settings, lambda fd, name: _announce(theirs, fd, name))
        finally:
            os._exit(0)
    connected.close()
    theirs.close()
    _clean_up_after(ours)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(child, os.WNOHANG)


def _announce(parent: socket.socket, fd: int, name: str) -> Callable[[], None]:
    def remove() -> None:
        parent.send(_REMOVE)
        parent.recv(len(_REMOVE))

    socket.send_fds(parent, [name.encode("ascii")], [fd])
    return remove


def _clean_up_after(child: socket.socket) -> None:
    """Remove the child's folder on request and at its end: the user can kill the child."""
    made: list[tuple[int, str]] = []
    while True:
        data, fds, _, _ = socket.recv_fds(child, _MAX_NAME_BYTES, 1)
        if fds:
            made.append((fds[0], data.decode("ascii")))
            continue
        for fd, name in made:
            folders.remove_within(fd, name)
        if not data:
            return
        with contextlib.suppress(OSError):
            child.send(_REMOVE, socket.MSG_NOSIGNAL)


if __name__ == "__main__":
    main(*sys.argv[1:])

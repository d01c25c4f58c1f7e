"""The guard's own process: it holds what it is given, and waits for its operation to dismiss it or to die.

Nothing is imported here that waiting does not need: the guard is ready 20 ms after its start and takes 10 MiB. What
recovers the job is imported when it is needed.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import socket

from gpucr.linux import oom

MESSAGE_LIMIT_BYTES = 64
RECORD_LIMIT_BYTES = 64 << 20
DESCRIPTORS_A_MESSAGE = 250
"""The kernel passes on at most 253 at once (SCM_MAX_FD)."""

_EXIT_LIMIT_S = 60.0
"""How long the end of the operation's process is waited for once its socket is closed."""


class Post:
    """What the operation has sent so far: the record, and the descriptors under their numbers.

    Messages: ``hold SEQUENCE FIRST`` with descriptors, the first of which gets number FIRST; ``record SEQUENCE`` with
    the descriptor of a file that holds it. Each is answered with ``SEQUENCE COUNT``, COUNT descriptors having arrived.
    """

    def __init__(self) -> None:
        self.record = b""
        self.descriptors: dict[int, int] = {}

    def take(self, message: str, fds: list[int]) -> str:
        """Take in one message. Returns the answer."""
        kind, sequence, *rest = message.split()
        if kind == "hold":
            self.descriptors.update(enumerate(fds, int(rest[0])))
        else:
            for fd in fds:
                self.record = os.pread(fd, RECORD_LIMIT_BYTES, 0)
                os.close(fd)
        return f"{sequence} {len(fds)}"


def main(*numbers: str) -> None:
    """Guard the operation at the other end of a socket, with this number. The others: its pidfd, and its pid."""
    socket_fd, operation_fd, operation_pid = map(int, numbers)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    oom.spare()
    _be_sure_of_memory()
    post = Post()
    with socket.socket(fileno=socket_fd) as connection:
        connection.send(b"ready")
        _serve_until_death(connection, operation_fd, post)
    if post.record:
        from gpucr.operations.recovery import recover

        recover(post.record, post.descriptors, operation_pid)


def _be_sure_of_memory() -> None:
    """The recovery must not run out of memory for a limit that was meant for gpucr, or the shell that it came from.

    Where such a limit cannot be lifted (root may), all that a recovery needs is loaded now: if that is too much, the
    operation has no guard, and ends before it has changed anything.
    """
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    for limit in (resource.RLIMIT_AS, resource.RLIMIT_DATA):
        try:
            resource.setrlimit(limit, unlimited)
        except (ValueError, OSError):
            from gpucr import staging  # noqa: F401 - loaded for later
            from gpucr.criu import abandoned  # noqa: F401
            from gpucr.operations import recovery  # noqa: F401


def _serve_until_death(connection: socket.socket, operation_fd: int, post: Post) -> None:
    """Returns when the operation's process has ended. A dismissal is a SIGKILL, and does not return from here.

    The socket alone would not tell: a child that the operation has forked may hold its end as well. And it is closed
    before the kernel has let go of the threads that the operation traced.
    """
    poller = select.poll()
    poller.register(connection, select.POLLIN)
    poller.register(operation_fd, select.POLLIN)
    while connection.fileno() in dict(poller.poll()):
        try:
            message, fds, _, _ = socket.recv_fds(connection, MESSAGE_LIMIT_BYTES, DESCRIPTORS_A_MESSAGE)
            if not message:
                break
            connection.send(post.take(message.decode(), fds).encode())
        except ConnectionError:
            break
    poller.unregister(connection)
    poller.poll(_EXIT_LIMIT_S * 1000)

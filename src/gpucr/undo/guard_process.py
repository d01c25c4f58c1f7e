"""The guard process: holds what it is given, and waits for its operation to dismiss it or die.

Only what waiting needs is imported here: the guard is ready 17 ms after its start and takes 10 MiB. Recovery code is
imported when it is needed.
"""

from __future__ import annotations

import os
import select
import signal
import socket

from gpucr.linux import oom

MESSAGE_LIMIT_BYTES = 64
RECORD_LIMIT_BYTES = 64 << 20
DESCRIPTORS_A_MESSAGE = 250
"""The kernel passes at most 253 at once (SCM_MAX_FD)."""

RECOVERED, NOT_RECOVERED = "recovered", "not-recovered"
"""Answers to ``recover``."""

RESERVE_A_DESCRIPTOR, RESERVE_AT_MOST = 4, 1024
"""Spare descriptors reserved for the recovery per held descriptor. One that only passes them on needs no more."""

_EXIT_LIMIT_S = 60.0
"""How long to wait for the end of the operation's process after its socket closed."""


class Post:
    """What the operation has sent so far: the record, and numbered descriptors.

    Messages: ``hold SEQUENCE FIRST`` with descriptors, numbered from FIRST; ``record SEQUENCE`` with the descriptor of
    a file that holds it. Each is answered with ``SEQUENCE COUNT``, COUNT descriptors having arrived. ``drop SEQUENCE
    FIRST COUNT``: close these. ``recover SEQUENCE``: do now what the record says, and answer ``SEQUENCE recovered`` if
    that fully succeeded. ``attend SEQUENCE PID``: see that this process is killed before it releases anything; answered
    with ``SEQUENCE 1``, or 0 if it cannot be traced.
    """

    def __init__(self, operation_pid: int, *, loads_at_once: bool = False) -> None:
        self.record = b""
        self.descriptors: dict[int, int] = {}
        self._operation_pid = operation_pid
        self._loads_at_once = loads_at_once
        self._reserve: list[int] = []

    def take(self, message: str, fds: list[int]) -> str:
        """Handle one message. Returns the answer."""
        kind, sequence, *rest = message.split()
        if kind == "attend":
            return f"{sequence} {self._attend(int(rest[0]))}"
        if kind == "recover":
            return f"{sequence} {RECOVERED if self.recover(is_dead=False) else NOT_RECOVERED}"
        if kind == "hold":
            return f"{sequence} {self._hold(fds, int(rest[0]))}"
        if kind == "drop":
            return f"{sequence} {self._drop(int(rest[0]), int(rest[1]))}"
        for fd in fds:
            record = os.pread(fd, RECORD_LIMIT_BYTES, 0)
            os.close(fd)
            if self._loads_at_once:
                from gpucr.undo import recovery

                recovery.load(recovery.decode(record).entries)
            self.record = record
        return f"{sequence} {len(fds)}"

    def _hold(self, fds: list[int], first: int) -> int:
        """How many are held: fewer than were sent if the recovery would be short of descriptors."""
        self.descriptors.update(enumerate(fds, first))
        try:
            for _ in range(min(RESERVE_A_DESCRIPTOR * len(fds), RESERVE_AT_MOST - len(self._reserve))):
                self._reserve.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        except OSError:
            return 0
        return len(fds)

    def _attend(self, pid: int) -> int:
        """1 if the process is traced now."""
        from gpucr.linux.attended import begin_to_attend  # hardly any operation needs this

        return int(begin_to_attend(pid, self._before_release))

    def _before_release(self) -> None:
        if self.record:
            from gpucr.undo.recovery import before_release

            before_release(self.record, self.descriptors)

    def _drop(self, first: int, count: int) -> int:
        """How many were closed, with what was reserved for them."""
        dropped = [self.descriptors.pop(number) for number in range(first, first + count) if number in self.descriptors]
        for fd in dropped:
            os.close(fd)
        for _ in range(min(len(self._reserve), RESERVE_A_DESCRIPTOR * len(dropped))):
            os.close(self._reserve.pop())
        return len(dropped)

    def recover(self, *, is_dead: bool) -> bool:
        """Do what the record says: the operation is dead, or its undo failed. True: nothing is left to do."""
        while self._reserve:
            os.close(self._reserve.pop())
        if self.record:
            from gpucr.undo import left_behind, recovery

            if recovery.recover(self.record, self.descriptors, self._operation_pid, is_dead=is_dead):
                self.record = b""
                left_behind.forget_own()
        return not self.record


def main(*numbers: str) -> None:
    """Guard the operation at the other end of this socket. The other arguments: its pidfd and its pid."""
    socket_fd, operation_fd, operation_pid = map(int, numbers)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    oom.spare()
    # The recovery must not fail on a memory limit meant for gpucr or the shell that started it. If the limit cannot be
    # lifted (only root may), an action's modules are loaded as soon as it is named: if that exceeds the limit, the
    # operation loses its guard and ends before it has made that change.
    post = Post(operation_pid, loads_at_once=not oom.lift_memory_limits())
    with socket.socket(fileno=socket_fd) as connection:
        connection.send(b"ready")
        _serve_until_death(connection, operation_fd, post)
    post.recover(is_dead=True)


def _serve_until_death(connection: socket.socket, operation_fd: int, post: Post) -> None:
    """Returns when the operation's process has ended. A dismissal is a SIGKILL, so this never returns from one.

    The socket alone is not enough: a child that the operation forked may hold its end too. And it closes before the
    kernel has detached the threads that the operation traced.
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

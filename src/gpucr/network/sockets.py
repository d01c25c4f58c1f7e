"""The TCP sockets of a job, in all of its network namespaces."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence

from msgspec import Struct

from gpucr.linux import sock_diag
from gpucr.linux.namespaces import namespace_id
from gpucr.linux.sock_diag import TcpSocket
from gpucr.model import Endpoint
from gpucr.network.filters import Namespace


class JobSockets(Struct, frozen=True):
    """What a job has open in one network namespace, as seen at one moment."""

    sockets: tuple[TcpSocket, ...] = ()

    @property
    def listeners(self) -> tuple[Endpoint, ...]:
        """Where it accepts connections."""
        return tuple(dict.fromkeys(each.local for each in self.sockets if each.is_listening))

    @property
    def connected(self) -> tuple[TcpSocket, ...]:
        """The sockets that have a peer."""
        return tuple(each for each in self.sockets if each.is_connection)

    @property
    def not_accepted(self) -> tuple[Endpoint, ...]:
        """Listeners with connections that the job has not accepted yet: CRIU cannot dump these."""
        return tuple(each.local for each in self.sockets if each.is_listening and each.waiting)


def pids_by_namespace(pids: Iterable[int]) -> dict[int, list[int]]:
    """These processes by the number of their network namespace. Leaves out those that have ended or may not be seen."""
    found: dict[int, list[int]] = {}
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            found.setdefault(namespace_id(pid, "net"), []).append(pid)
    return found


def look(pids: Sequence[int], there: Namespace) -> JobSockets:
    """The sockets of these processes in a namespace. Raises OSError if the caller may not enter it."""
    inodes = set(sock_diag.inodes_of(pids))
    sockets = there.visit(sock_diag.tcp_sockets) if inodes else ()
    return JobSockets(tuple(each for each in sockets if each.inode in inodes))

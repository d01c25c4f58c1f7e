"""Where a job's nodes meet, and which node this is."""

from __future__ import annotations

import contextlib
import errno
import random
import socket
from dataclasses import dataclass, field

from gpucr.errors import InvalidRequest, NodeFailed
from gpucr.nodes import secret as secrets
from gpucr.nodes.wire import MAX_MEETING
from gpucr.quantities import whole_number

_KEEP_ALIVE = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))
_UNANSWERED_MS = 20_000
"""A machine that loses power sends nothing: after about this time its connection counts as lost."""

_FROM_PORTS, _TRIES = range(15_000, 20_000), 4
"""Ports of this side of a connection to node 0, and how many of them are tried."""


@dataclass(frozen=True)
class Rendezvous:
    """Node ``node`` of ``node_count``. Node 0 listens at ``port``, the others connect to it at ``host``.

    ``secret``: at least 16 bytes that all nodes know. ``meet_s``: how long the nodes wait for each other at the start.
    Raises InvalidRequest.
    """

    host: str
    port: int
    node: int
    node_count: int
    secret: bytes = field(repr=False)
    meet_s: float = 60.0

    def __post_init__(self) -> None:
        secrets.check(self.secret)
        if not 1 <= self.port < 1 << 16 or not self.host:
            raise InvalidRequest(f"{self.address} is not an address", hint="name node 0 and a free port: HOST:PORT")
        if not 1 <= self.node_count <= MAX_MEETING:
            raise InvalidRequest(
                f"{self.node_count} nodes cannot meet", hint=f"up to {MAX_MEETING} can; say how many: --nodes N"
            )
        if not 0 <= self.node < self.node_count:
            raise InvalidRequest(
                f"there is no node {self.node} of {self.node_count}", hint="nodes are numbered from 0: --node K"
            )

    @classmethod
    def at(cls, address: str, *, node: int, node_count: int, secret: bytes, meet_s: float = 60.0) -> Rendezvous:
        """With ``HOST:PORT``; an IPv6 address is in brackets. Raises InvalidRequest."""
        host, _, port = address.rpartition(":")
        number = whole_number(port) or 0
        if not host or number == 0:
            raise InvalidRequest(f"{address!r} is not an address", hint="give node 0's name and a free port: HOST:PORT")
        return cls(host.removeprefix("[").removesuffix("]"), number, node, node_count, secret, meet_s)

    @property
    def address(self) -> str:
        """Like `at` takes it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def listen(at: Rendezvous) -> socket.socket:
    """The socket of node 0, on all of its addresses: nodes may resolve a name differently. Raises NodeFailed."""
    try:
        if socket.has_dualstack_ipv6():
            with contextlib.suppress(OSError):  # IPv6 may be switched off
                return socket.create_server(("", at.port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", at.port))
    except OSError as e:
        raise NodeFailed(
            f"node 0 cannot listen at port {at.port}: {e.strerror}",
            node=0,
            hint="another set may be under way there: name another port with --rendezvous",
            code="GPUCR-RENDEZVOUS",
        ) from e


def connect(to: Rendezvous, limit_s: float) -> socket.socket:
    """One attempt to reach node 0. Raises OSError."""
    connection = _connected(to, limit_s)
    notice_its_end(connection)
    return connection


def _connected(to: Rendezvous, limit_s: float) -> socket.socket:
    """From a port below those that systems give to connections: the job that is restored may need any of these."""
    for _ in range(_TRIES):
        port = random.choice(_FROM_PORTS)  # noqa: S311 - not for secrets
        try:
            return socket.create_connection((to.host, to.port), timeout=limit_s, source_address=("", port))
        except OSError as e:
            if e.errno not in (errno.EADDRINUSE, errno.EADDRNOTAVAIL):
                raise
    return socket.create_connection((to.host, to.port), timeout=limit_s)


def notice_its_end(connection: socket.socket) -> None:
    """Make a connection fail when the other machine disappears silently."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (*_KEEP_ALIVE, (socket.TCP_USER_TIMEOUT, _UNANSWERED_MS), (socket.TCP_NODELAY, 1)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)

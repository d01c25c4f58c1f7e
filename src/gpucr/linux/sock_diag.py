"""List and destroy TCP sockets of this network namespace (sock_diag(7)).

Unlike /proc/net/tcp, this can also end a connection that nobody holds any more and that would keep its port for a
minute (TIME_WAIT).
"""

from __future__ import annotations

import contextlib
import enum
import ipaddress
import socket
import struct
from collections.abc import Collection, Iterable, Iterator

from msgspec import Struct

from gpucr.linux import netlink
from gpucr.linux.one_look import OneLook
from gpucr.model import Connection, Endpoint

_SOCK_DESTROY = 21  # include/uapi/linux/sock_diag.h
_REQUEST = struct.Struct("=BBBxI48s")  # struct inet_diag_req_v2: family, protocol, extensions, states, id
_MESSAGE = struct.Struct("=BBxx48sIIIII")  # struct inet_diag_msg: family, state, id, expires, queues, uid, inode
_ID = struct.Struct(">HH16s16s12s")  # struct inet_diag_sockid: ports, addresses, interface and cookie

_ALL_STATES = (1 << 32) - 1

TIME_WAIT_LIMIT_S = 70.0
"""The kernel keeps a closed connection for 60 s (TCP_TIMEWAIT_LEN)."""


class TcpState(enum.IntEnum):
    """The states of include/net/tcp_states.h that gpucr distinguishes."""

    ESTABLISHED = 1
    SYN_SENT = 2
    SYN_RECV = 3
    FIN_WAIT1 = 4
    FIN_WAIT2 = 5
    TIME_WAIT = 6
    CLOSE = 7
    CLOSE_WAIT = 8
    LAST_ACK = 9
    LISTEN = 10
    CLOSING = 11
    NEW_SYN_RECV = 12
    BOUND_INACTIVE = 13


_NO_CONNECTION = (TcpState.TIME_WAIT, TcpState.CLOSE, TcpState.LISTEN, TcpState.BOUND_INACTIVE)
_NOT_YET_RECEIVED = (TcpState.FIN_WAIT1, TcpState.CLOSING, TcpState.LAST_ACK)
_PEER_HAS_CLOSED = (TcpState.CLOSE_WAIT, TcpState.LAST_ACK, TcpState.CLOSING)


class TcpSocket(Struct, frozen=True):
    """One TCP socket. ``inode`` is 0 if no process has it open; ``key`` is the kernel's identifier.

    ``waiting``: bytes that were received and not read; of a listening socket, connections that were not accepted.
    """

    family: int
    state: int
    local: Endpoint
    remote: Endpoint
    inode: int
    key: bytes = b""
    waiting: int = 0

    @property
    def is_listening(self) -> bool:
        """Whether it accepts connections."""
        return self.state == TcpState.LISTEN

    @property
    def is_connection(self) -> bool:
        """Whether it has a peer."""
        return self.state not in _NO_CONNECTION and self.remote.port != 0

    @property
    def is_being_emptied(self) -> bool:
        """Whether its process has closed it before the other side had received all of it."""
        return self.inode == 0 and self.state in _NOT_YET_RECEIVED

    @property
    def peer_has_closed(self) -> bool:
        """Whether the other side has said that it sends no more."""
        return self.state in _PEER_HAS_CLOSED

    @property
    def is_left_over(self) -> bool:
        """Whether it is the remainder of a connection that its process has closed."""
        return self.state == TcpState.TIME_WAIT or (self.inode == 0 and self.state not in _NO_CONNECTION)

    @property
    def connection(self) -> Connection:
        """Its two ends."""
        return Connection(self.local, self.remote)


def tcp_sockets() -> tuple[TcpSocket, ...]:
    """All TCP sockets of the caller's network namespace. Needs no privileges. Raises OSError."""
    with netlink.opened(netlink.SOCK_DIAG) as diag:
        found = [parsed for family in (socket.AF_INET, socket.AF_INET6) for parsed in _dump(diag, family)]
    return tuple(found)


def destroy(left_over: Iterable[TcpSocket]) -> None:
    """End these sockets, which were listed by `tcp_sockets`. Those that have ended are skipped.

    Needs CAP_NET_ADMIN and CONFIG_INET_DIAG_DESTROY; OSError (EPERM, EOPNOTSUPP) if one of the two is missing.
    """
    with netlink.opened(netlink.SOCK_DIAG) as diag:
        for each in left_over:
            request = _REQUEST.pack(each.family, socket.IPPROTO_TCP, 0, _ALL_STATES, each.key)
            diag.send(netlink.message(_SOCK_DESTROY, netlink.ACK, request))
            with contextlib.suppress(FileNotFoundError):
                for _ in netlink.answers(diag):
                    pass


def sockets_of(pids: Iterable[int], look: OneLook | None = None) -> tuple[TcpSocket, ...]:
    """The TCP sockets that these processes have open, in this network namespace."""
    inodes = set(inodes_of(pids, look))
    return tuple(each for each in tcp_sockets() if each.inode in inodes) if inodes else ()


def inodes_of(pids: Iterable[int], look: OneLook | None = None) -> Iterator[int]:
    """The inodes of all sockets that these processes have open."""
    look = look or OneLook()
    for pid in pids:
        for file in look.files(pid):
            if file.target.startswith("socket:["):
                yield int(file.target[len("socket:[") : -1])


def outside_connections(sockets: Collection[TcpSocket]) -> tuple[TcpSocket, ...]:
    """A job's sockets whose peer is outside the job.

    If the peer was on this machine and has been closed, nobody can notice anything: such a connection counts as
    internal.
    """
    ends = {each.connection for each in sockets}
    return tuple(
        each
        for each in sockets
        if each.is_connection
        and Connection(each.remote, each.local) not in ends
        and not (each.state in _PEER_HAS_CLOSED and ipaddress.ip_address(each.remote.address).is_loopback)
    )


def left_over_at(endpoints: Collection[Endpoint]) -> tuple[TcpSocket, ...]:
    """Remnants of closed connections that keep anything from being bound there, where nobody has a socket.

    They end within `TIME_WAIT_LIMIT_S`. Raises OSError.
    """
    found = tcp_sockets()
    held = {each.local for each in found if not each.is_left_over}
    return in_the_way([each for each in found if each.is_left_over and each.local not in held], endpoints)


def in_the_way(sockets: Iterable[TcpSocket], endpoints: Collection[Endpoint]) -> tuple[TcpSocket, ...]:
    """The sockets that occupy a port to which something is to be bound."""
    wanted: dict[int, list[Endpoint]] = {}
    for each in endpoints:
        wanted.setdefault(each.port, []).append(each)
    return tuple(s for s in sockets if any(overlap(s.local, each) for each in wanted.get(s.local.port, ())))


def is_local_address(address: str) -> bool:
    """Whether a socket can be bound to the address on this machine."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def overlap(one: Endpoint, other: Endpoint) -> bool:
    """Whether sockets bound to these two addresses can conflict."""
    if one.port != other.port:
        return False
    addresses = ipaddress.ip_address(one.address), ipaddress.ip_address(other.address)
    return addresses[0] == addresses[1] or any(address.is_unspecified for address in addresses)


def endpoint(raw_address: bytes, port: int) -> Endpoint:
    """From an address of 4 or 16 bytes in network order. An IPv4-mapped IPv6 address is shown as IPv4."""
    address = ipaddress.ip_address(raw_address)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return Endpoint(str(mapped or address), port)


def _dump(diag: socket.socket, family: int) -> Iterator[TcpSocket]:
    request = _REQUEST.pack(family, socket.IPPROTO_TCP, 0, _ALL_STATES, bytes(_ID.size))
    diag.send(netlink.message(netlink.SOCK_DIAG_BY_FAMILY, netlink.DUMP, request))
    for body in netlink.answers(diag):
        yield _parse(body)


def _parse(body: bytes) -> TcpSocket:
    family, state, key, _expires, waiting, _send_queue, _uid, inode = _MESSAGE.unpack_from(body)
    local_port, remote_port, local, remote, _rest = _ID.unpack(key)
    length = 4 if family == socket.AF_INET else 16
    return TcpSocket(
        family,
        state,
        endpoint(local[:length], local_port),
        endpoint(remote[:length], remote_port),
        inode,
        key,
        waiting,
    )

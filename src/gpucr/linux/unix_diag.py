"""Local sockets (AF_UNIX): their names, and which socket is at the other end (sock_diag(7), "UNIX sockets")."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterable

from msgspec import Struct

from gpucr.linux import namespaces, netlink

_REQUEST = struct.Struct("=BBHIII8s")  # struct unix_diag_req: family, protocol, padding, states, inode, show, cookie
_MESSAGE = struct.Struct("=BBBxI8s")  # struct unix_diag_msg: family, type, state, padding, inode, cookie
_NAME, _PEER, _NOT_ACCEPTED, _SHUTDOWN = 0, 2, 3, 6  # UNIX_DIAG_* of include/uapi/linux/unix_diag.h
_SHOW = 0x1 | 0x4 | 0x8  # UDIAG_SHOW_NAME, _PEER, _ICONS
_ALL_STATES, _NO_COOKIE = (1 << 32) - 1, b"\xff" * 8
_ESTABLISHED = 1  # TCP_ESTABLISHED of include/net/tcp_states.h
_INODE = struct.Struct("=I")
_BOTH_WAYS = 3  # SHUTDOWN_MASK of include/net/sock.h


class UnixSocket(Struct, frozen=True):
    """One local socket. ``kind`` is that of socket(2); ``peer_inode`` is 0 without a peer.

    ``name`` begins with ``@`` if it is abstract, and is empty if the socket is not bound. ``is_waiting``: the other
    side has not accepted its connection yet; ``not_accepted``: the inodes of those that wait for this one.
    """

    inode: int
    kind: int
    name: str = ""
    peer_inode: int = 0
    is_waiting: bool = False
    not_accepted: tuple[int, ...] = ()

    @property
    def is_stream(self) -> bool:
        """Whether it belongs to one connection, and not to whoever sends to it."""
        return self.kind != socket.SOCK_DGRAM


def unix_sockets(inodes: Iterable[int], *, network_of: int | None = None) -> dict[int, UnixSocket]:
    """Those of the sockets that are local ones, by inode.

    ``network_of``: a process whose network namespace has them; None: the caller's has. Another one needs CAP_SYS_ADMIN.
    Raises OSError.
    """
    found: dict[int, UnixSocket] = {}
    with _open(network_of) as diag:
        for inode in inodes:
            request = _REQUEST.pack(socket.AF_UNIX, 0, 0, _ALL_STATES, inode, _SHOW, _NO_COOKIE)
            diag.send(netlink.message(netlink.SOCK_DIAG_BY_FAMILY, netlink.ACK, request))
            with contextlib.suppress(FileNotFoundError):  # closed, or of another family
                for body in netlink.answers(diag):
                    found[inode] = _parse(body)
    return found


def _open(network_of: int | None) -> socket.socket:
    """A socket stays in the network namespace of the thread that made it."""
    if network_of is None:
        return netlink.opened(netlink.SOCK_DIAG)
    with namespaces.opened(network_of, "net") as fds:
        return namespaces.in_namespace(fds["net"], "net", lambda: netlink.opened(netlink.SOCK_DIAG))


def _parse(body: bytes) -> UnixSocket:
    _family, kind, state, inode, _cookie = _MESSAGE.unpack_from(body)
    values = netlink.attributes(body[_MESSAGE.size :])
    name = os.fsdecode(values.get(_NAME, b""))
    name = f"@{name[1:]}" if name.startswith("\0") else name.rstrip("\0")
    peers = _inodes(values.get(_PEER, b""))
    is_shut = values.get(_SHUTDOWN, b"\0")[0] == _BOTH_WAYS
    is_waiting = kind != socket.SOCK_DGRAM and state == _ESTABLISHED and not any(peers) and not is_shut
    not_accepted = _inodes(values.get(_NOT_ACCEPTED, b""))
    return UnixSocket(inode, kind, name, peers[0] if peers else 0, is_waiting, not_accepted)


def _inodes(value: bytes) -> tuple[int, ...]:
    whole = len(value) // _INODE.size * _INODE.size
    return tuple(inode for (inode,) in _INODE.iter_unpack(value[:whole]))

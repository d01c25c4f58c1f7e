"""Messages of sock_diag(7): what the kernel knows about the sockets of a network namespace."""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Iterator

SOCK_DIAG_BY_FAMILY = 20  # include/uapi/linux/sock_diag.h
NLM_F_ACK, NLM_F_DUMP = 0x4, 0x300

_NETLINK_SOCK_DIAG = 4
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_NLM_F_REQUEST = 0x1

_HEADER = struct.Struct("=IHHII")  # struct nlmsghdr: length, type, flags, sequence, port
_ERROR = struct.Struct("=i")
_RECEIVE_BYTES = 1 << 16


def open_diag() -> socket.socket:
    """A socket for requests about this thread's network namespace. Needs no privileges. Raises OSError."""
    return socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG)


def send(diag: socket.socket, kind: int, flags: int, body: bytes) -> None:
    """Send one request."""
    diag.send(_HEADER.pack(_HEADER.size + len(body), kind, _NLM_F_REQUEST | flags, 1, 0) + body)


def answers(diag: socket.socket) -> Iterator[bytes]:
    """The bodies of the messages that answer one request. Raises OSError for an error message."""
    while True:
        packet = diag.recv(_RECEIVE_BYTES)
        while packet:
            length, kind, _, _, _ = _HEADER.unpack_from(packet)
            if not _HEADER.size <= length <= len(packet):
                raise OSError(errno.EBADMSG, "a netlink message is cut off")
            body = packet[_HEADER.size : length]
            packet = packet[(length + 3) & ~3 :]
            if kind == _NLMSG_DONE:
                return
            if kind == _NLMSG_ERROR:
                (error,) = _ERROR.unpack_from(body)
                if error:
                    raise OSError(-error, f"sock_diag: {os.strerror(-error)}")
                return
            yield body

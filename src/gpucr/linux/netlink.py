"""Messages of netlink sockets (netlink(7)): their frames, attributes and answers. The kernel answers while it is sent.

Users: sock_diag.py, unix_diag.py, nftables.py.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Iterator

REQUEST, ACK, DUMP, CREATE, APPEND = 0x1, 0x4, 0x300, 0x400, 0x800
"""NLM_F_* of include/uapi/linux/netlink.h."""

SOCK_DIAG, SOCK_DIAG_BY_FAMILY = 4, 20
"""A protocol, and its question (sock_diag(7)). Nothing of it needs privileges."""

_ERROR_KIND, _DONE_KIND = 2, 3  # NLMSG_ERROR, NLMSG_DONE
_HEADER = struct.Struct("=IHHII")  # struct nlmsghdr: length, type, flags, sequence, port
_ATTRIBUTE = struct.Struct("=HH")  # struct nlattr: length, type
_NESTED = 0x8000
_ERROR = struct.Struct("=i")
_RECEIVE_BYTES = 1 << 16


def opened(protocol: int) -> socket.socket:
    """A netlink socket of the calling thread's network namespace, wherever it is used later."""
    return socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, protocol)


def message(kind: int, flags: int, body: bytes) -> bytes:
    """One request."""
    return _padded(_HEADER.pack(_HEADER.size + len(body), kind, REQUEST | flags, 1, 0) + body)


def attribute(kind: int, value: bytes) -> bytes:
    """One attribute. Numbers are the kernel's, of the family's header file."""
    return _padded(_ATTRIBUTE.pack(_ATTRIBUTE.size + len(value), kind) + value)


def nested(kind: int, *attributes: bytes) -> bytes:
    """An attribute that consists of others."""
    return attribute(kind | _NESTED, b"".join(attributes))


def attributes(data: bytes) -> dict[int, bytes]:
    """The attributes in a message's body, by number. Raises OSError for what is cut off."""
    found: dict[int, bytes] = {}
    while len(data) >= _ATTRIBUTE.size:
        length, kind = _ATTRIBUTE.unpack_from(data)
        if not _ATTRIBUTE.size <= length <= len(data):
            raise _cut_off()
        found[kind & ~_NESTED] = data[_ATTRIBUTE.size : length]
        data = data[_aligned(length) :]
    return found


def answers(connection: socket.socket) -> Iterator[bytes]:
    """The bodies of the messages that answer one request. Raises OSError for an error message."""
    while True:
        for kind, body in _messages(connection.recv(_RECEIVE_BYTES)):
            if kind == _DONE_KIND:
                return
            if kind == _ERROR_KIND:
                _raise_for(body)
                return
            yield body


def require_done(connection: socket.socket) -> None:
    """Raise the first error in the answers to a batch of requests, which the kernel has processed."""
    while True:
        try:
            packet = connection.recv(_RECEIVE_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        for kind, body in _messages(packet):
            if kind == _ERROR_KIND:
                _raise_for(body)


def drain(connection: socket.socket) -> None:
    """Forget answers that were not read because an earlier one was an error."""
    try:
        while connection.recv(_RECEIVE_BYTES, socket.MSG_DONTWAIT):
            pass
    except BlockingIOError:
        return


def _messages(packet: bytes) -> Iterator[tuple[int, bytes]]:
    while packet:
        if len(packet) < _HEADER.size:
            raise _cut_off()
        length, kind, _, _, _ = _HEADER.unpack_from(packet)
        if not _HEADER.size <= length <= len(packet):
            raise _cut_off()
        yield kind, packet[_HEADER.size : length]
        packet = packet[_aligned(length) :]


def _raise_for(body: bytes) -> None:
    (error,) = _ERROR.unpack_from(body)
    if error:
        raise OSError(-error, os.strerror(-error))


def _cut_off() -> OSError:
    return OSError(errno.EBADMSG, "a netlink message is cut off")


def _padded(data: bytes) -> bytes:
    return data + bytes(_aligned(len(data)) - len(data))


def _aligned(length: int) -> int:
    return (length + 3) & ~3

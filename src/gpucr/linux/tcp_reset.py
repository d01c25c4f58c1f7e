"""Tell the other end of a TCP connection that nobody has this end any more. Needs CAP_NET_RAW."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import struct

from gpucr.model import Connection

_HEADER = struct.Struct(">HH4sIBBHHH")  # struct tcphdr: ports, numbers, length, flags, window, checksum, urgent pointer
_LENGTH, _SYN, _WINDOW = 5 << 4, 0x02, 1024


def reset_peer(connection: Connection) -> None:
    """Make the other end get a reset, from this machine's kernel.

    A SYN in the middle of a connection is answered by the other end with the number that it expects (RFC 5961, section
    4), and that answer by this kernel, which has no such connection, with a reset that has this number. So no number
    need be known. Works in the calling thread's network namespace, unless a packet filter drops the packets. Does
    nothing if the local address is not this machine's. Raises OSError.
    """
    family = socket.AF_INET6 if ":" in connection.local.address else socket.AF_INET
    with socket.socket(family, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.IPPROTO_TCP) as raw:
        try:
            raw.bind((connection.local.address, 0))
        except OSError as e:
            if e.errno != errno.EADDRNOTAVAIL:
                raise
            return
        raw.sendto(_syn(connection), (connection.remote.address, 0))


def _syn(connection: Connection) -> bytes:
    local, remote = connection.local, connection.remote
    addresses = [ipaddress.ip_address(each.address).packed for each in (local, remote)]
    number = os.urandom(4)

    def header(checksum: int) -> bytes:
        return _HEADER.pack(local.port, remote.port, number, 0, _LENGTH, _SYN, _WINDOW, checksum, 0)

    return header(_checksum(b"".join(addresses) + struct.pack(">II", socket.IPPROTO_TCP, _HEADER.size) + header(0)))


def _checksum(data: bytes) -> int:
    """Of RFC 1071: a sum, so it does not matter where the pseudo headers of IPv4 and IPv6 have the same parts."""
    total = sum(data[::2]) * 256 + sum(data[1::2])
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF

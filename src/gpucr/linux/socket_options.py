"""Options of other processes' internet sockets (socket(7), tcp(7), udp(7), ip(7), ipv6(7)). Needs ptrace access.

Here are those that a program sets and can ask for, and that say nothing about other sockets. As bytes: some are numbers
of four bytes, some of eight, some names.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

MOST_BYTES = 16


class _Option(NamedTuple):
    level: int
    number: int


_OF_ALL = {
    "SO_TIMESTAMP": _Option(socket.SOL_SOCKET, 29),
    "SO_TIMESTAMPNS": _Option(socket.SOL_SOCKET, 35),
    "SO_TIMESTAMPING": _Option(socket.SOL_SOCKET, 37),
    "SO_RXQ_OVFL": _Option(socket.SOL_SOCKET, 40),
    "SO_BUSY_POLL": _Option(socket.SOL_SOCKET, 46),
    "SO_MAX_PACING_RATE": _Option(socket.SOL_SOCKET, 47),
    "SO_ZEROCOPY": _Option(socket.SOL_SOCKET, 60),
    "SO_PREFER_BUSY_POLL": _Option(socket.SOL_SOCKET, 69),
    "SO_TXREHASH": _Option(socket.SOL_SOCKET, 74),
    "SO_RCVMARK": _Option(socket.SOL_SOCKET, 75),
}
_OF_TCP = {
    "TCP_SYNCNT": _Option(socket.IPPROTO_TCP, 7),
    "TCP_LINGER2": _Option(socket.IPPROTO_TCP, 8),
    "TCP_DEFER_ACCEPT": _Option(socket.IPPROTO_TCP, 9),
    "TCP_CONGESTION": _Option(socket.IPPROTO_TCP, 13),
    "TCP_THIN_LINEAR_TIMEOUTS": _Option(socket.IPPROTO_TCP, 16),
    "TCP_USER_TIMEOUT": _Option(socket.IPPROTO_TCP, 18),
    "TCP_FASTOPEN": _Option(socket.IPPROTO_TCP, 23),
    "TCP_NOTSENT_LOWAT": _Option(socket.IPPROTO_TCP, 25),
    "TCP_SAVE_SYN": _Option(socket.IPPROTO_TCP, 27),
    "TCP_INQ": _Option(socket.IPPROTO_TCP, 36),
    "TCP_TX_DELAY": _Option(socket.IPPROTO_TCP, 37),
}
_OF_UDP = {
    "IP_MULTICAST_TTL": _Option(socket.IPPROTO_IP, 33),
    "IP_MULTICAST_LOOP": _Option(socket.IPPROTO_IP, 34),
    "UDP_SEGMENT": _Option(socket.IPPROTO_UDP, 103),
    "UDP_GRO": _Option(socket.IPPROTO_UDP, 104),
}
_OF_IP = {
    "IP_TOS": _Option(socket.IPPROTO_IP, 1),
    "IP_TTL": _Option(socket.IPPROTO_IP, 2),
    "IP_MTU_DISCOVER": _Option(socket.IPPROTO_IP, 10),
    "IP_RECVERR": _Option(socket.IPPROTO_IP, 11),
    "IP_RECVTTL": _Option(socket.IPPROTO_IP, 12),
    "IP_RECVTOS": _Option(socket.IPPROTO_IP, 13),
    "IP_TRANSPARENT": _Option(socket.IPPROTO_IP, 19),
    "IP_RECVORIGDSTADDR": _Option(socket.IPPROTO_IP, 20),
    "IP_MINTTL": _Option(socket.IPPROTO_IP, 21),
    "IP_BIND_ADDRESS_NO_PORT": _Option(socket.IPPROTO_IP, 24),
}
_OF_UDP_OVER_IPV6 = {
    "IPV6_MULTICAST_HOPS": _Option(socket.IPPROTO_IPV6, 18),
    "IPV6_MULTICAST_LOOP": _Option(socket.IPPROTO_IPV6, 19),
}
_OF_IPV6 = {
    "IPV6_UNICAST_HOPS": _Option(socket.IPPROTO_IPV6, 16),
    "IPV6_MTU_DISCOVER": _Option(socket.IPPROTO_IPV6, 23),
    "IPV6_RECVERR": _Option(socket.IPPROTO_IPV6, 25),
    "IPV6_RECVPKTINFO": _Option(socket.IPPROTO_IPV6, 49),
    "IPV6_RECVHOPLIMIT": _Option(socket.IPPROTO_IPV6, 51),
    "IPV6_DONTFRAG": _Option(socket.IPPROTO_IPV6, 62),
    "IPV6_RECVTCLASS": _Option(socket.IPPROTO_IPV6, 66),
    "IPV6_TCLASS": _Option(socket.IPPROTO_IPV6, 67),
    "IPV6_TRANSPARENT": _Option(socket.IPPROTO_IPV6, 75),
}
_TCP, _UDP = (socket.SOCK_STREAM, socket.IPPROTO_TCP), (socket.SOCK_DGRAM, socket.IPPROTO_UDP)
_OPTIONS: dict[tuple[int, int, int], dict[str, _Option]] = {
    (socket.AF_INET, *_TCP): _OF_ALL | _OF_TCP | _OF_IP,
    (socket.AF_INET6, *_TCP): _OF_ALL | _OF_TCP | _OF_IP | _OF_IPV6,
    (socket.AF_INET, *_UDP): _OF_ALL | _OF_UDP | _OF_IP,
    (socket.AF_INET6, *_UDP): _OF_ALL | _OF_UDP | _OF_UDP_OVER_IPV6 | _OF_IP | _OF_IPV6,
}


class Defaults:
    """What new sockets of this network namespace have. Only those of TCP and UDP have options here."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int, int], Mapping[str, bytes]] = {}

    def changed(self, found: socket.socket) -> dict[str, bytes]:
        """The options of a socket that have other values than a new one of its kind."""
        kind = _kind(found)
        if kind not in self._known and _options_of(found):
            with socket.socket(*kind) as new:
                self._known[kind] = MappingProxyType(_read(new))
        return {name: value for name, value in _read(found).items() if self._known[kind].get(name) != value}


def set_options(found: socket.socket, options: Mapping[str, bytes]) -> dict[str, OSError]:
    """Set these where they are different now. Returns those that could not be set, and why."""
    known, refused = _options_of(found), {}
    for name, value in options.items():
        option = known.get(name)
        try:
            if option is None:
                raise OSError(None, "gpucr does not know it for this socket")
            if found.getsockopt(*option, MOST_BYTES) != value:
                found.setsockopt(*option, value)
        except OSError as e:
            refused[name] = e
    return refused


def _read(found: socket.socket) -> dict[str, bytes]:
    """The options that this kernel has for it."""
    read = {}
    for name, option in _options_of(found).items():
        with contextlib.suppress(OSError):
            read[name] = found.getsockopt(*option, MOST_BYTES)
    return read


def _options_of(found: socket.socket) -> Mapping[str, _Option]:
    return _OPTIONS.get(_kind(found), {})


def _kind(found: socket.socket) -> tuple[int, int, int]:
    """As the kernel has it: `socket.proto` may be 0, which means the usual one."""
    return found.family, found.type, found.getsockopt(socket.SOL_SOCKET, socket.SO_PROTOCOL)

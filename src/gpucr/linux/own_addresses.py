"""The addresses of the caller's network namespace (rtnetlink(7)). Needs no privileges."""

from __future__ import annotations

import ipaddress
import socket
import struct

from gpucr.linux import netlink

_ROUTE = 0  # NETLINK_ROUTE
_GET_ADDRESS = 22  # RTM_GETADDR
_HEADER = struct.Struct("=BBBBI")  # struct ifaddrmsg: family, prefix length, flags, scope, interface
_ADDRESS, _LOCAL = 1, 2  # IFA_ADDRESS, IFA_LOCAL: this end of a point-to-point link


def own_addresses() -> tuple[str, ...]:
    """All of them but loopback, each in its shortest form. Raises OSError."""
    found: list[str] = []
    with netlink.opened(_ROUTE) as route:
        request = _HEADER.pack(socket.AF_UNSPEC, 0, 0, 0, 0)
        route.send(netlink.message(_GET_ADDRESS, netlink.DUMP, request))
        for body in netlink.answers(route):
            attributes = netlink.attributes(body[_HEADER.size :])
            packed = attributes.get(_LOCAL, attributes.get(_ADDRESS, b""))
            if len(packed) in (4, 16) and not (address := ipaddress.ip_address(packed)).is_loopback:
                found.append(str(address))
    return tuple(dict.fromkeys(found))

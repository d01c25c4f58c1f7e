"""Network namespaces with a link between them, without any tool: hardware machines may have no `ip`."""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
import subprocess

from gpucr.linux import namespaces, netlink
from gpucr.linux.netlink import attribute, nested

_ROUTE = 0  # NETLINK_ROUTE
_NEW_LINK, _NEW_ADDRESS = 16, 20  # RTM_NEWLINK, RTM_NEWADDR
_LINK = struct.Struct("=BxHiII")  # struct ifinfomsg
_ADDRESS = struct.Struct("=BBBBI")  # struct ifaddrmsg
_NAME, _LINKINFO, _NET_NS_PID = 3, 18, 19  # IFLA_*
_KIND, _DATA, _PEER = 1, 2, 1  # IFLA_INFO_KIND, IFLA_INFO_DATA, VETH_INFO_PEER
_UP = 1
INTERFACE = "eth"


class Node:
    """A network namespace with the interface ``eth`` and one IPv4 address."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._holder = subprocess.Popen(["unshare", "--net", "sh", "-c", "echo; exec sleep infinity"],
                                        stdout=subprocess.PIPE)  # fmt: skip
        assert self._holder.stdout is not None
        self._holder.stdout.readline()
        self._namespace = os.open(f"/proc/{self.pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        namespaces.in_namespace(self._namespace, "net", namespaces.bring_loopback_up)

    @property
    def pid(self) -> int:
        """Of a process in it."""
        return self._holder.pid

    def link_to(self, other: Node) -> None:
        """Both get an end of a veth pair, with their addresses, and are up."""
        name = INTERFACE.encode() + b"\0"
        peer = attribute(_PEER, _LINK.pack(0, 0, 0, 0, 0) + attribute(_NAME, name)
                         + attribute(_NET_NS_PID, struct.pack("=I", other.pid)))  # fmt: skip
        info = nested(_LINKINFO, attribute(_KIND, b"veth\0"), nested(_DATA, peer))
        self._ask(_NEW_LINK, _LINK.pack(0, 0, 0, 0, 0) + attribute(_NAME, name) + info)
        for node in (self, other):
            node._bring_up()

    def _bring_up(self) -> None:
        index = namespaces.in_namespace(self._namespace, "net", lambda: socket.if_nametoindex(INTERFACE))
        packed = ipaddress.ip_address(self.address).packed
        about = _ADDRESS.pack(socket.AF_INET, 24, 0, 0, index)
        self._ask(_NEW_ADDRESS, about + attribute(2, packed) + attribute(1, packed))  # IFA_LOCAL, IFA_ADDRESS
        self._ask(_NEW_LINK, _LINK.pack(0, 0, index, _UP, _UP))

    def _ask(self, kind: int, body: bytes) -> None:
        def ask() -> None:
            with netlink.opened(_ROUTE) as route:
                route.send(netlink.message(kind, netlink.CREATE | netlink.ACK, body))
                for _ in netlink.answers(route):
                    pass

        namespaces.in_namespace(self._namespace, "net", ask)

    def enter(self, command: list[str]) -> list[str]:
        """The command, in it."""
        return ["nsenter", f"--net=/proc/{self.pid}/ns/net", *command]

    def close(self) -> None:
        """The namespace ends with the last process in it."""
        os.close(self._namespace)
        self._holder.kill()
        self._holder.communicate(timeout=20)

"""Ports of programs that are dumped and restored, which no other program may take meanwhile.

The kernel gives a program that asks for any port, and each outgoing connection, one of its own range. A port of that
range can be somebody else's by the time of the restore, so these are taken from below it.
"""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

FIRST = 10_000
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def below_the_kernels() -> range:
    """The ports from 10000 up to where the kernel's own range begins: none where it begins lower."""
    return range(FIRST, int(_RANGE.read_text().split()[0]))


def lasting_port(kind: socket.SocketKind = socket.SOCK_STREAM, count: int = 1) -> int:
    """The first of ``count`` ports in a row that are free now, and that the kernel gives to nobody who asks for any."""
    numbers = random.SystemRandom()
    ports = below_the_kernels() or range(FIRST, 60_000)
    while True:
        first = numbers.choice(ports[: len(ports) - count])
        with contextlib.ExitStack() as opened, contextlib.suppress(OSError):
            for number in range(first, first + count):
                opened.enter_context(socket.socket(socket.AF_INET, kind)).bind(("127.0.0.1", number))
            return first

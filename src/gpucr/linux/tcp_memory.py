"""What all TCP connections of the machine may hold together (tcp(7), tcp_mem), in pages: low, pressure, high.

Above `pressure` the kernel refuses memory to a connection that holds more than its share, until all hold less than
`low` (net/core/sock.c, __sk_mem_raise_allocated). Connections that were full when their job was dumped need as much at
once when it is restored: 100 of them failed so on a machine with 1 GiB (ENOBUFS, Linux 6.1), and 400 on one with 24.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TextIO

from gpucr.linux import locks, namespaces, proc_text

LIMITS, IN_USE = Path("/proc/sys/net/ipv4/tcp_mem"), Path("/proc/net/sockstat")
"""The first is shown in the machine's own network namespace alone, the second in all."""
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_OVERHEAD = 2
"""The kernel counts whole buffers. Data that comes back in small pieces leaves half of them empty."""

_MOST_PAGES = os.sysconf("SC_PHYS_PAGES") // 2
"""The size of a snapshot's images is the choice of who made them."""

Limits = tuple[int, int, int]


def opened_limits() -> TextIO:
    """The file of the limits, to read and write them. Raises OSError where only the machine's root may."""

    def opened() -> TextIO:
        return LIMITS.open("r+", encoding="ascii")

    if LIMITS.exists():
        return opened()
    with namespaces.opened(1, "net") as fds:
        return namespaces.in_namespace(fds["net"], "net", opened)


def lock(file: TextIO, wait_s: float) -> None:
    """Lock them against all others who change them with this. Raises BlockingIOError."""
    locks.lock(file.fileno(), wait_s=wait_s)


def limits(file: TextIO) -> Limits:
    """As they are now. Raises OSError."""
    file.seek(0)
    low, pressure, high = map(int, file.read().split())
    return low, pressure, high


def set_limits(file: TextIO, new: Limits) -> None:
    """Raises OSError."""
    file.seek(0)
    file.truncate()
    file.write(" ".join(map(str, new)))
    file.flush()


def with_room(now: Limits, waiting_bytes: int) -> Limits:
    """The limits at which connections take that much more; the same ones if they do already. Raises OSError."""
    needed = min(-(-waiting_bytes * _OVERHEAD // _PAGE_BYTES), _MOST_PAGES)
    missing = max(0, _pages_in_use() + needed - now[0]) if waiting_bytes else 0
    return now[0] + missing, now[1] + missing, now[2] + missing


def _pages_in_use() -> int:
    for line in proc_text.lines(IN_USE):
        if line.startswith("TCP:"):
            words = line.split()
            return int(words[words.index("mem") + 1])
    return 0

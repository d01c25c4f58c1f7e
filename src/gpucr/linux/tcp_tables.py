"""Which TCP sockets processes hold, as /proc shows them: also in a network namespace that the caller cannot enter."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator, Sequence

from gpucr.linux import proc_text
from gpucr.linux.one_look import OneLook
from gpucr.linux.processes import PROC, OpenFile

# Field `st` of /proc/net/tcp.
_TIME_WAIT, _CLOSE, _LISTEN = "06", "07", "0A"

# Where a process has only these, the tables are not read: the kernel goes through the whole machine's, for 4 ms each.
_OTHER_PROTOCOLS = (b"UNIX", b"UDP", b"NETLINK", b"PACKET")


def has_sockets(pids: Sequence[int], look: OneLook | None = None) -> bool:
    """Whether a process of ``pids`` holds a TCP socket that is connected, is being connected, or listens."""
    return _holds(pids, look or OneLook(), without={_TIME_WAIT, _CLOSE})


def has_connections(pids: Sequence[int], look: OneLook | None = None) -> bool:
    """Whether a process of ``pids`` holds a TCP socket with a connection (established, half-closed, half-open)."""
    return _holds(pids, look or OneLook(), without={_TIME_WAIT, _CLOSE, _LISTEN})


def _holds(pids: Sequence[int], look: OneLook, *, without: Collection[str]) -> bool:
    sockets: set[str] = set()
    for target, files in look.files_of(pids).items():
        if target.startswith("socket:[") and not _protocol(files[0]).startswith(_OTHER_PROTOCOLS):
            sockets.add(target[8:-1])
    namespaces: dict[str, int] = {}
    for pid in pids if sockets else ():
        with contextlib.suppress(OSError):  # it has ended
            namespaces[look.namespace(pid, "net")] = pid
    return any(not sockets.isdisjoint(_inodes(pid, without)) for pid in namespaces.values())


def _protocol(file: OpenFile) -> bytes:
    """The kernel's name for it, as lsof asks for; none where it does not tell."""
    try:
        return os.getxattr(f"{PROC}/{file.pid}/fd/{file.fd}", "system.sockprotoname")
    except OSError:
        return b""


def _inodes(pid: int, without: Collection[str]) -> Iterator[str]:
    """Inodes of TCP sockets in the network namespace of ``pid`` (/proc/net/tcp: state in 4, inode in 10)."""
    for table in ("tcp", "tcp6"):
        for line in _lines(f"{PROC}/{pid}/net/{table}")[1:]:
            columns = line.split()
            if len(columns) > 9 and columns[3] not in without:
                yield columns[9]


def _lines(path: str) -> list[str]:
    try:
        return proc_text.lines(path)
    except OSError:
        return []

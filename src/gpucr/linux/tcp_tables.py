"""Which TCP sockets processes hold, as /proc shows them: also in a network namespace that the caller cannot enter."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from gpucr.linux import proc_text

# Field `st` of /proc/net/tcp.
_TIME_WAIT, _CLOSE, _LISTEN = "06", "07", "0A"

# Where a process has only these, the tables are not read: the kernel goes through the whole machine's, for 4 ms each.
_OTHER_PROTOCOLS = (b"UNIX", b"UDP", b"NETLINK", b"PACKET")


def has_sockets(pids: Sequence[int]) -> bool:
    """Whether a process of ``pids`` holds a TCP socket that is connected, is being connected, or listens."""
    return _holds(pids, without={_TIME_WAIT, _CLOSE})


def has_connections(pids: Sequence[int]) -> bool:
    """Whether a process of ``pids`` holds a TCP socket with a connection (established, half-closed, half-open)."""
    return _holds(pids, without={_TIME_WAIT, _CLOSE, _LISTEN})


def _holds(pids: Sequence[int], *, without: Collection[str]) -> bool:
    sockets: set[str] = set()
    namespaces: dict[str, int] = {}
    for pid in pids:
        sockets.update(
            target[8:-1]
            for path, target in _links(Path(f"/proc/{pid}/fd"))
            if target.startswith("socket:[") and not _protocol(path).startswith(_OTHER_PROTOCOLS)
        )
        try:
            namespaces[Path(f"/proc/{pid}/ns/net").readlink().name] = pid
        except OSError:
            continue
    if not sockets:
        return False
    return any(not sockets.isdisjoint(_inodes(pid, without)) for pid in namespaces.values())


def _protocol(socket_link: Path) -> bytes:
    """The kernel's name for it, as lsof asks for; none where it does not tell."""
    try:
        return os.getxattr(socket_link, "system.sockprotoname")
    except OSError:
        return b""


def _inodes(pid: int, without: Collection[str]) -> Iterator[str]:
    """Inodes of TCP sockets in the network namespace of ``pid`` (/proc/net/tcp: state in 4, inode in 10)."""
    for table in ("tcp", "tcp6"):
        for line in _lines(Path(f"/proc/{pid}/net/{table}"))[1:]:
            columns = line.split()
            if len(columns) > 9 and columns[3] not in without:
                yield columns[9]


def _links(folder: Path) -> Iterator[tuple[Path, str]]:
    try:
        entries = list(folder.iterdir())
    except OSError:
        return
    for path in entries:
        try:
            yield path, os.readlink(path)
        except OSError:
            continue


def _lines(path: Path) -> list[str]:
    try:
        return proc_text.lines(path)
    except OSError:
        return []

"""Sockets that two processes have open, and local sockets whose other end is outside the tree."""

from __future__ import annotations

from collections.abc import Iterator

from gpucr.diagnosis.preflight.support import ties as facts
from gpucr.diagnosis.preflight.ties.look import Seen, Tie, socket_inode
from gpucr.interposer.place import is_bound_name
from gpucr.linux.processes import OpenFile
from gpucr.linux.unix_diag import UnixSocket


def find(seen: Seen) -> Iterator[Tie]:
    """Shared and connected sockets. Connections of the network are kept or closed by a restore, and no tie."""
    waiting = {
        inode for each in seen.sockets.values() if _target(each.inode) in seen.files for inode in each.not_accepted
    }
    for target, mine in seen.files.items():
        inode = socket_inode(target)
        if not inode:
            continue
        others = seen.others.get(target, [])
        if others:
            other = seen.nearest(others)
            yield Tie(facts.SOCKET, mine[0].pid, other.pid, f"fd {mine[0].fd} is {target}, which is its fd {other.fd}")
        elif inode in seen.sockets:
            yield from _of_local_socket(seen, seen.sockets[inode], mine[0], waiting)


def _of_local_socket(seen: Seen, found: UnixSocket, file: OpenFile, waiting: set[int]) -> Iterator[Tie]:
    is_outside = bool(found.peer_inode) and _target(found.peer_inode) not in seen.files
    if found.is_waiting and found.inode not in waiting:
        yield Tie(facts.LOCAL_SOCKET, file.pid, 0, f"fd {file.fd} is a connection that was not accepted yet")
    elif is_outside and not _is_reached_by_name(seen, found) and not _is_of_the_agent(found):
        holders = seen.others.get(_target(found.peer_inode), [])
        other = seen.nearest(holders).pid if holders else 0
        named = found.name or (peer.name if (peer := seen.sockets.get(found.peer_inode)) is not None else "")
        yield Tie(facts.LOCAL_SOCKET, file.pid, other, f"fd {file.fd}, " + (named or "a socket without a name"))


def _is_reached_by_name(seen: Seen, found: UnixSocket) -> bool:
    """Whether CRIU connects it again: a datagram socket, to a name."""
    peer = seen.sockets.get(found.peer_inode)
    return not found.is_stream and peer is not None and bool(peer.name)


def _is_of_the_agent(found: UnixSocket) -> bool:
    """Whether it is a connection to the interposer's agent, which closes them before CRIU comes."""
    return is_bound_name(found.name)


def _target(inode: int) -> str:
    return f"socket:[{inode}]"

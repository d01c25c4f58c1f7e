"""The repair mode of other processes' TCP sockets (TCP_REPAIR, Linux 3.5). Needs CAP_NET_ADMIN and ptrace access.

CRIU reads a connection with its socket in repair mode, and a killed CRIU leaves it so: then a read fails with EPERM and
a write with EINVAL. A socket that is closed in this mode ends without a word to the other end. (Seen with 6.18.)
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
from collections.abc import Collection, Iterable, Iterator, Sequence

from gpucr.linux import capabilities, processes
from gpucr.linux.pidfds import copied_descriptor, copied_socket
from gpucr.linux.processes import open_files
from gpucr.linux.sock_diag import TcpState
from gpucr.model import ProcessId

_TCP_REPAIR = 19
_GONE = (errno.EBADF, errno.ESRCH, errno.ENOENT, errno.ENOTSOCK)
_SOCKET = "socket:["
_MOST_IP_OPTIONS = 40


def is_possible() -> bool:
    """Whether the caller has the capabilities, and the kernel the system call (pidfd_getfd, Linux 5.6)."""
    if not capabilities.can_repair_sockets():
        return False
    try:
        with socket.socket() as own:
            os.close(copied_descriptor(os.getpid(), own.fileno()))
    except OSError:
        return False
    return True


def reusing(ids: Iterable[ProcessId]) -> tuple[int, ...]:
    """The sockets that have SO_REUSEADDR, which the end of the repair mode takes away. Raises OSError."""
    found = [inode for inode, tcp in _sockets(ids) if tcp.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR)]
    return tuple(dict.fromkeys(found))


def with_urgent_data(ids: Iterable[ProcessId]) -> tuple[int, ...]:
    """The sockets with urgent data (MSG_OOB) that was not read, or was announced, by inode. Raises OSError.

    CRIU saves what was received before it, and neither it nor what came after. What is on its way would be sent again
    as ordinary data: it is announced up to 64 KiB ahead (seen with 4.2.1 and Linux 6.18).
    """
    return tuple(dict.fromkeys(inode for inode, tcp in _sockets(ids) if _is_urgent(tcp) or _is_announced(tcp)))


def _is_urgent(tcp: socket.socket) -> bool:
    """Whether such data is here; also one that is to be read as ordinary data (SO_OOBINLINE)."""
    poll = select.poll()
    poll.register(tcp, select.POLLPRI)
    return any(events & select.POLLPRI for _, events in poll.poll(0))


def _is_announced(tcp: socket.socket) -> bool:
    try:
        tcp.recv(1, socket.MSG_OOB | socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return True
    except OSError:  # there is none, or no connection
        pass
    return False


def begin(ids: Iterable[ProcessId], inodes: Collection[int]) -> None:
    """Put these sockets of the processes into repair mode. Raises OSError."""
    for inode, tcp in _sockets(ids):
        if inode in inodes:
            tcp.setsockopt(socket.IPPROTO_TCP, _TCP_REPAIR, 1)


def end(ids: Iterable[ProcessId], reusing: Collection[int]) -> int:
    """Take all sockets of the processes out of repair mode. Returns how many were in it. Raises OSError.

    ``reusing``: those that had SO_REUSEADDR.
    """
    count = 0
    for inode, tcp in _sockets(ids):
        if tcp.getsockopt(socket.IPPROTO_TCP, _TCP_REPAIR) == 1:
            tcp.setsockopt(socket.IPPROTO_TCP, _TCP_REPAIR, 0)
            tcp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, inode in reusing)
            count += 1
    return count


def use_full_segments(ids: Iterable[ProcessId]) -> None:
    """Have restored connections send segments as large as the path and the other end allow.

    A socket that connects in repair mode does not know the other end's limit yet, so that the kernel takes the least of
    the protocol: 536 bytes, and 1,220 over IPv6. What CRIU tells it afterwards (TCP_REPAIR_OPTIONS) counts when the
    path's MTU changes, which hardly ever happens (Linux 6.18). Setting the socket's own IP options makes the kernel
    look again (net/ipv4/ip_sockglue.c). Sockets that the caller may not copy stay as they are. Needs no capability.
    """
    for _, tcp in _sockets(ids):
        with contextlib.suppress(OSError):
            if tcp.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] not in (TcpState.LISTEN, TcpState.CLOSE):
                options = tcp.getsockopt(socket.IPPROTO_IP, socket.IP_OPTIONS, _MOST_IP_OPTIONS)
                tcp.setsockopt(socket.IPPROTO_IP, socket.IP_OPTIONS, options)


@contextlib.contextmanager
def sockets_released(ids: Sequence[ProcessId]) -> Iterator[None]:
    """Around a dump of these processes by CRIU: if it fails, none of their sockets is left in repair mode."""
    known: tuple[int, ...] = ()
    if may_help := is_possible():
        with contextlib.suppress(OSError):
            known = reusing(ids)
    try:
        yield
    except BaseException:
        if may_help:
            with contextlib.suppress(OSError):
                end(ids, known)
        raise


def _sockets(ids: Iterable[ProcessId]) -> Iterator[tuple[int, socket.socket]]:
    """Copies of the TCP sockets that these processes have open, with their inodes. Skips processes that have ended."""
    for process in ids:
        numbers = {file.fd: file.target for file in open_files(process.pid) if file.target.startswith(_SOCKET)}
        for number, target in numbers.items() if processes.is_alive(process) else ():
            try:
                found = copied_socket(process.pid, number)
            except OSError as e:
                if e.errno not in _GONE:
                    raise
                continue
            with found:
                if (found.type, found.proto) == (socket.SOCK_STREAM, socket.IPPROTO_TCP):
                    yield int(target[len(_SOCKET) : -1]), found

"""The sockets that a forwarder listens on: its own, or those that systemd hands over (sd_listen_fds(3))."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from collections.abc import Iterator, Sequence

from msgspec import Struct

from gpucr.errors import InvalidRequest, Unsupported, reason_of
from gpucr.linux import descriptor_limit
from gpucr.on_demand.address import Address
from gpucr.quantities import whole_number

_FIRST_HANDED = 3
_BACKLOG = 1024
_OWN_DESCRIPTORS, _LEAST_CONNECTIONS = 96, 8
"""For suspends and resumes, for what others ask, and for connections that are refused."""


class Listener(Struct, frozen=True):
    """An address, and the socket that listens there."""

    address: Address
    socket: socket.socket


@contextlib.contextmanager
def listening(addresses: Sequence[Address]) -> Iterator[tuple[Listener, ...]]:
    """Listen on all addresses in the block. Sockets that systemd handed over take the place of the first ones.

    Raises InvalidRequest if one is taken or is not this machine's, or systemd hands over another number of sockets.
    """
    with contextlib.ExitStack() as opened:
        handed = [opened.enter_context(each) for each in _handed_over()]
        if handed and len(handed) != len(addresses):
            raise InvalidRequest(
                f"systemd hands over {len(handed)} sockets, and there are {len(addresses)} addresses",
                hint="name as many with --listen as the unit has ListenStream=, in the same order",
                code="GPUCR-ADDRESS",
            )
        found = []
        for number, address in enumerate(addresses):
            made = handed[number] if handed else opened.enter_context(listen(address))
            if not handed and address.path is not None:
                opened.callback(_remove, address.path)
            made.setblocking(False)
            found.append(Listener(address, made))
        yield tuple(found)


def listen(address: Address) -> socket.socket:
    """A socket that listens there; a Unix socket of a forwarder that was killed is replaced. Raises InvalidRequest."""
    try:
        if address.path is not None:
            return _listen_unix(address.path)
        family, *_, where = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        made = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            made.bind(where)
            made.listen(_BACKLOG)
        except BaseException:
            made.close()
            raise
        return made
    except (OSError, UnicodeError) as e:
        is_taken = isinstance(e, OSError) and e.errno == errno.EADDRINUSE
        raise InvalidRequest(
            f"{address} cannot be listened on: {reason_of(e)}",
            hint="`ss -ltnp` shows who has it: end that, or name another address"
            if is_taken
            else "name an address of this machine, and a port that you may use",
            code="GPUCR-ADDRESS",
        ) from e


def most_connections() -> int:
    """How many connections fit into the limit on open files: each takes two. Raises Unsupported if hardly any do."""
    found = (descriptor_limit.most() - _OWN_DESCRIPTORS) // 2
    if found < _LEAST_CONNECTIONS:
        raise Unsupported(
            f"this process may open {descriptor_limit.most()} files: too few to forward connections",
            hint=f"raise the limit to {_OWN_DESCRIPTORS + 2 * _LEAST_CONNECTIONS} or more (`ulimit -n`, LimitNOFILE=)",
            code="GPUCR-OPEN-FILES",
        )
    return found


def _listen_unix(path: str) -> socket.socket:
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise FileExistsError(errno.EEXIST, "another file has this name")
        with socket.socket(socket.AF_UNIX) as asking:
            try:
                asking.connect(path)
            except ConnectionRefusedError:  # nobody listens any more
                os.unlink(path)
            else:
                raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        made.bind(path)
        os.chmod(path, 0o660)
        made.listen(_BACKLOG)
    except BaseException:
        made.close()
        raise
    return made


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


def _handed_over() -> list[socket.socket]:
    """Sockets of systemd's, if they are for this process."""
    if whole_number(os.environ.get("LISTEN_PID", "")) != os.getpid():
        return []
    count = whole_number(os.environ.get("LISTEN_FDS", "")) or 0
    for name in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"):  # not for a job that is started
        os.environ.pop(name, None)
    found = []
    for fd in range(_FIRST_HANDED, _FIRST_HANDED + count):
        try:
            os.set_inheritable(fd, False)
            found.append(socket.socket(fileno=fd))
        except OSError as e:
            raise InvalidRequest(
                f"what systemd hands over as descriptor {fd} is not a socket: {reason_of(e)}",
                hint="only ListenStream= of a .socket unit can be used",
                code="GPUCR-ADDRESS",
            ) from e
    return found

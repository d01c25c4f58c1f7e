"""gpucr.linux.sock_diag: the kernel's answers about real sockets, and connections that it destroys."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from gpucr.linux import sock_diag
from gpucr.linux.sock_diag import TcpSocket, TcpState, endpoint, outside_connections, overlap
from gpucr.model import Connection, Endpoint
from tests.children import NOBODY_UID
from tests.conftest import skip_or_fail
from tests.counter import wait_until

LOOPBACK = "127.0.0.1"
ANY = "0.0.0.0"  # noqa: S104 - nothing is bound


def local(sock: socket.socket) -> Endpoint:
    return Endpoint(*sock.getsockname()[:2])


def at(end: Endpoint) -> list[TcpSocket]:
    return [each for each in sock_diag.tcp_sockets() if each.local == end]


def between(end: Endpoint, other: Endpoint) -> list[TcpSocket]:
    """The one of this connection: a port may have others, of other tests, at the same time."""
    return [each for each in at(end) if each.remote == other]


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.socket() as sock:  # without SO_REUSEADDR
        sock.bind((LOOPBACK, 0))
        sock.listen()
        yield sock


def test_a_listener_and_both_ends_of_a_connection(listener: socket.socket) -> None:
    with socket.create_connection(listener.getsockname()) as client, listener.accept()[0] as server:
        (mine,) = between(local(client), local(server))
        assert (mine.state, mine.connection) == (TcpState.ESTABLISHED, Connection(local(client), local(server)))
        assert (mine.is_connection, mine.is_listening, mine.is_left_over) == (True, False, False)
        assert mine.inode == os.fstat(client.fileno()).st_ino
        states = {each.state for each in at(local(listener))}
        assert states == {TcpState.LISTEN, TcpState.ESTABLISHED}
        own = sock_diag.sockets_of([os.getpid()])
        assert {mine, *at(local(listener))} <= set(own)
        assert not {mine, *at(local(listener))} & set(sock_diag.sockets_of([os.getppid()]))


def test_ipv6_and_mapped_ipv4() -> None:
    if not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    try:
        listener = socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    except OSError:
        pytest.skip("this machine has no IPv6")
    port = listener.getsockname()[1]
    with listener, socket.create_connection((LOOPBACK, port)) as client, listener.accept()[0]:
        (mine,) = between(local(client), Endpoint(LOOPBACK, port))
        (theirs,) = between(Endpoint(LOOPBACK, port), local(client))
        assert theirs.family == socket.AF_INET6
        assert theirs.connection == Connection(mine.remote, mine.local)
        assert outside_connections([mine, theirs]) == ()


def test_a_closed_connection_keeps_its_port_until_destroyed(listener: socket.socket) -> None:
    if os.geteuid() != 0:
        skip_or_fail("root", "only root may end a connection")
    end = local(listener)
    client = socket.create_connection(end_of(end))
    listener.accept()[0].close()
    client.close()
    listener.close()
    wait_until(lambda: [each.state for each in at(end)] == [TcpState.TIME_WAIT], "TIME_WAIT")
    (left_over,) = at(end)
    assert left_over.is_left_over
    assert not left_over.is_connection
    with socket.socket() as again:
        with pytest.raises(OSError, match="in use"):
            again.bind(end_of(end))
        sock_diag.destroy([left_over])
        assert at(end) == []
        again.bind(end_of(end))
    sock_diag.destroy([left_over])  # a second time: it has ended, which is what was wanted


def end_of(end: Endpoint) -> tuple[str, int]:
    return end.address, end.port


def test_without_privileges_no_connection_is_destroyed(listener: socket.socket) -> None:
    if os.geteuid() != 0:
        skip_or_fail("root", "only root has privileges to drop")
    code = (
        "import os\nfrom gpucr.linux import sock_diag\n"
        f"os.setgid({NOBODY_UID}); os.setuid({NOBODY_UID})\n"
        f"found = [s for s in sock_diag.tcp_sockets() if s.local.port == {local(listener).port}]\n"
        "assert len(found) == 1\n"
        "try: sock_diag.destroy(found)\n"
        "except OSError as e: print(e.errno)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.split() == [str(errno.EPERM)], ended.stderr
    assert len(at(local(listener))) == 1


def test_more_sockets_than_one_packet_holds() -> None:
    with contextlib.ExitStack() as opened:
        sockets = [opened.enter_context(socket.create_server((LOOPBACK, 0))) for _ in range(700)]
        assert {local(each) for each in sockets} <= {each.local for each in sock_diag.sockets_of([os.getpid()])}


def tcp(local_port: int, remote_port: int, state: int = TcpState.ESTABLISHED, remote: str = "10.0.0.2") -> TcpSocket:
    return TcpSocket(socket.AF_INET, state, Endpoint("10.0.0.1", local_port), Endpoint(remote, remote_port), local_port)


def test_external_connections() -> None:
    inside = [
        TcpSocket(2, TcpState.ESTABLISHED, Endpoint("10.0.0.1", 1), Endpoint("10.0.0.1", 2), 1),
        TcpSocket(2, TcpState.CLOSE_WAIT, Endpoint("10.0.0.1", 2), Endpoint("10.0.0.1", 1), 2),
    ]
    neither = [tcp(3, 0, TcpState.LISTEN), tcp(4, 0, TcpState.CLOSE), tcp(5, 6, TcpState.TIME_WAIT)]
    closed_here = tcp(7, 8, TcpState.CLOSE_WAIT, remote="127.0.0.1")
    outside = [tcp(9, 10), tcp(11, 12, TcpState.SYN_SENT), tcp(13, 14, TcpState.CLOSE_WAIT)]
    assert list(outside_connections([*inside, *neither, closed_here, *outside])) == outside


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (("10.0.0.1", 1), ("10.0.0.1", 1), True),
        (("10.0.0.1", 1), ("10.0.0.1", 2), False),
        (("10.0.0.1", 1), ("10.0.0.2", 1), False),
        (("10.0.0.1", 1), (ANY, 1), True),
        (("::", 1), ("10.0.0.2", 1), True),
        (("::1", 1), ("10.0.0.2", 1), False),
    ],
)
def test_overlap(one: tuple[str, int], other: tuple[str, int], expected: bool) -> None:
    assert overlap(Endpoint(*one), Endpoint(*other)) is expected
    assert overlap(Endpoint(*other), Endpoint(*one)) is expected


def test_endpoints_are_formatted_conventionally() -> None:
    assert str(endpoint(bytes(15) + b"\1", 80)) == "[::1]:80"
    assert str(endpoint(bytes(10) + b"\xff\xff\x7f\0\0\1", 80)) == "127.0.0.1:80"


def test_local_addresses() -> None:
    assert sock_diag.is_local_address("127.0.0.1")
    assert not sock_diag.is_local_address("192.0.2.1")

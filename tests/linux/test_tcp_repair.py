"""Sockets of other processes in repair mode, and ends of connections that nobody has any more."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Iterator

import pytest

from gpucr.linux import sock_diag, tcp_repair
from gpucr.linux.sock_diag import TcpSocket
from gpucr.linux.tcp_reset import reset_peer
from gpucr.model import Connection, Endpoint
from tests.children import Child, python
from tests.counter import wait_until
from tests.own_network import own_network

pytestmark = pytest.mark.root

SERVER = """
import os, signal, socket
family, address = {}, {!r}
listener = socket.create_server((address, 0), family=family)  # which sets SO_REUSEADDR, and its connections have it too
other = socket.socketpair(), socket.socket(type=socket.SOCK_DGRAM), open(os.devnull)
print(listener.getsockname()[1], flush=True)
connection, _ = listener.accept()
print("accepted", flush=True)
signal.pause()
"""


@pytest.fixture(autouse=True)
def network() -> Iterator[None]:
    with own_network():
        yield


@contextlib.contextmanager
def served(family: socket.AddressFamily = socket.AF_INET) -> Iterator[tuple[Child, socket.socket, TcpSocket]]:
    """A server, a client here, and the server's end."""
    address = "::1" if family == socket.AF_INET6 else "127.0.0.1"
    with (
        python(SERVER.format(int(family), address)) as child,
        socket.create_connection((address, child.numbers[0])) as client,
    ):
        assert child.line() == "accepted"
        (end,) = [each for each in sock_diag.sockets_of([child.pid]) if each.is_connection]
        client.settimeout(60)
        yield child, client, end


MADE_IN_REPAIR = """
import signal, socket, struct
LEAST = {}
made = socket.socket({})
made.setsockopt(socket.IPPROTO_TCP, 19, 1)  # TCP_REPAIR
for queue in (1, 2):
    made.setsockopt(socket.IPPROTO_TCP, 20, queue)
    made.setsockopt(socket.IPPROTO_TCP, 21, 1000)
made.connect(({!r}, 9))
made.setsockopt(socket.IPPROTO_TCP, 22, struct.pack("=II", 2, 8960))  # TCP_REPAIR_OPTIONS: the other end's limit
others = socket.create_server(("127.0.0.1", 0)), socket.socket(), socket.socketpair()
def size():
    return struct.unpack_from("=I", made.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 20), 16)[0]
assert size() < LEAST, size()
print(0, flush=True)
signal.sigwait([signal.SIGUSR1])
print(size(), flush=True)
signal.pause()
"""


@pytest.mark.parametrize(
    ("family", "address", "least"),
    [(socket.AF_INET, "127.0.0.1", 536), (socket.AF_INET6, "::1", 1220), (socket.AF_INET6, "::ffff:127.0.0.1", 536)],
)
def test_segments_are_as_large_as_the_other_end_allows(family: socket.AddressFamily, address: str, least: int) -> None:
    with python(
        "import signal; signal.pthread_sigmask(0, [10])" + MADE_IN_REPAIR.format(least, int(family), address)
    ) as child:
        tcp_repair.use_full_segments([child.id])
        os.kill(child.pid, signal.SIGUSR1)
        assert 8900 < int(child.line()) <= 8960


def test_urgent_data_that_is_only_announced() -> None:
    """As long as the reader's buffer is full, it cannot come."""
    with served() as (child, client, end):
        assert tcp_repair.with_urgent_data([child.id]) == ()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
        client.settimeout(0)
        with contextlib.suppress(BlockingIOError):
            while True:
                client.send(bytes(1 << 16))
        client.settimeout(60)
        assert tcp_repair.with_urgent_data([child.id]) == ()
        client.send(b"!", socket.MSG_OOB)
        wait_until(lambda: tcp_repair.with_urgent_data([child.id]) == (end.inode,), "it to be announced")


def test_a_socket_is_usable_again_as_it_was() -> None:
    with served() as (child, client, end):
        assert tcp_repair.is_possible()
        assert end.inode in tcp_repair.reusing([child.id])
        tcp_repair.begin([child.id], {end.inode})
        assert tcp_repair.end([child.id], (end.inode,)) == 1
        assert tcp_repair.end([child.id], (end.inode,)) == 0
        assert end.inode in tcp_repair.reusing([child.id])
        client.sendall(b"x")
        assert sock_diag.sockets_of([child.pid])[0].inode


def test_a_process_that_has_ended_has_no_sockets() -> None:
    with served() as (child, _, end):
        known = child.id
        os.kill(child.pid, signal.SIGKILL)
        child.reap()
        tcp_repair.begin([known], {end.inode})
        assert tcp_repair.end([known], ()) == 0


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_the_other_end_learns_that_nobody_is_there(family: socket.AddressFamily) -> None:
    """It was ended without a word, as CRIU ends what it has dumped."""
    with served(family) as (child, client, end):
        tcp_repair.begin([child.id], {end.inode})
        os.kill(child.pid, signal.SIGKILL)
        child.reap()
        client.setblocking(False)
        with pytest.raises(BlockingIOError):
            client.recv(1)
        reset_peer(end.connection)
        client.settimeout(60)
        with pytest.raises(ConnectionResetError):
            client.recv(1)


def test_an_address_of_another_machine_is_left_alone() -> None:
    reset_peer(Connection(Endpoint("192.0.2.1", 80), Endpoint("127.0.0.1", 81)))


@pytest.mark.parametrize("is_failing", [True, False])
def test_sockets_after_a_dump(is_failing: bool) -> None:
    with served() as (child, _, end):
        with contextlib.suppress(ZeroDivisionError), tcp_repair.sockets_released([child.id]):
            tcp_repair.begin([child.id], {end.inode})
            if is_failing:
                raise ZeroDivisionError
        assert tcp_repair.end([child.id], ()) == (not is_failing)

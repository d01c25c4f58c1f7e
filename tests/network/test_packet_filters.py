"""gpucr.network.filters on real connections, with each way to block packets that this machine has."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpucr.linux import iptables, nftables
from gpucr.linux.namespaces import in_namespace
from gpucr.linux.sock_diag import endpoint
from gpucr.model import Connection, Endpoint
from gpucr.network.filters import Filter, Method, Namespace, find_method, find_namespace, names, remove_by_name
from tests.children import python
from tests.conftest import skip_or_fail
from tests.counter import wait_until
from tests.own_network import own_network

pytestmark = pytest.mark.root

NAME = "gpucr-1-0a1b2c3d"
ADDRESSES = {socket.AF_INET: "127.0.0.1", socket.AF_INET6: "::1"}


@pytest.fixture
def network() -> Iterator[Namespace]:
    with own_network(), Namespace() as there:
        yield there


@pytest.fixture(params=["nftables", "iptables-nft", "iptables-legacy"])
def method(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Method:
    """iptables has two variants, and usually one is on PATH."""
    if request.param == "nftables":
        return "nftables"
    for name in ("iptables", "ip6tables"):
        for tool in ("", "-restore"):
            program = shutil.which(request.param.replace("iptables", name, 1) + tool)
            if program is None:
                skip_or_fail("iptables", f"{request.param} is not installed")
            assert program is not None
            (tmp_path / f"{name}{tool}").symlink_to(program)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return "iptables"


@contextlib.contextmanager
def made(method: Method, there: Namespace, *, ends_alone: bool = False) -> Iterator[Filter]:
    found = Filter(NAME, method, there)
    try:
        found.make("a test", ends_alone=ends_alone)
        yield found
    finally:
        found.remove()
        found.close()


def end_of(address: tuple[str, int]) -> Endpoint:
    return Endpoint(address[0], address[1])


class Pair:
    """A connection of this process with itself."""

    def __init__(self, family: socket.AddressFamily) -> None:
        self.listener = socket.create_server((ADDRESSES[family], 0), family=family)
        self.client = socket.create_connection(self.listener.getsockname()[:2])
        self.server, _ = self.listener.accept()

    @property
    def connection(self) -> Connection:
        return Connection(end_of(self.client.getsockname()[:2]), end_of(self.server.getsockname()[:2]))

    def arrives(self) -> bool:
        """Whether a byte that was sent before is there. The kernel delivers on the loopback while it is sent."""
        try:
            return bool(self.server.recv(1, socket.MSG_DONTWAIT))
        except BlockingIOError:
            return False

    def close(self) -> None:
        for each in (self.client, self.server, self.listener):
            each.close()


@pytest.fixture(params=ADDRESSES, ids=["ipv4", "ipv6"])
def family(request: pytest.FixtureRequest) -> socket.AddressFamily:
    return socket.AddressFamily(request.param)


def test_packets_are_dropped_until_the_filter_is_removed(
    network: Namespace, method: Method, family: socket.AddressFamily
) -> None:
    with contextlib.closing(Pair(family)) as blocked, contextlib.closing(Pair(family)) as other:
        with made(method, network) as found:
            assert NAME in names(network)
            found.block([blocked.connection])
            for each in (blocked, other):
                each.client.sendall(b"x")
            wait_until(other.arrives, "a byte over another connection")
            assert not blocked.arrives()
        wait_until(blocked.arrives, "the byte to be sent again")
    assert NAME not in names(network)


@pytest.mark.parametrize("is_any", [False, True], ids=["an address", "all addresses"])
def test_new_connections_wait(network: Namespace, method: Method, family: socket.AddressFamily, is_any: bool) -> None:
    address = socket.inet_ntop(family, bytes(len(socket.inet_pton(family, ADDRESSES[family]))))
    if not is_any:
        address = ADDRESSES[family]
    with (
        socket.create_server((address, 0), family=family) as listener,
        socket.socket(family) as client,
        contextlib.closing(Pair(family)) as other,
    ):
        port = listener.getsockname()[1]
        listener.setblocking(False)
        client.setblocking(False)
        with made(method, network) as found:
            found.refuse_new([endpoint(socket.inet_pton(family, address), port)])
            with contextlib.suppress(BlockingIOError):
                client.connect((ADDRESSES[family], port))
            other.client.sendall(b"x")
            wait_until(other.arrives, "a byte over another connection")
            with pytest.raises(BlockingIOError):
                listener.accept()
        listener.settimeout(60)
        listener.accept()[0].close()


def test_many_connections(network: Namespace, method: Method) -> None:
    many = [Connection(Endpoint("127.0.0.1", port), Endpoint("192.0.2.1", 443)) for port in range(1, 1202)]
    with made(method, network) as found, contextlib.closing(Pair(socket.AF_INET)) as pair:
        found.block([*many, pair.connection])
        pair.client.sendall(b"x")
        assert not pair.arrives()


def test_an_owned_table_ends_with_its_last_handle(network: Namespace) -> None:
    found = Filter(NAME, "nftables", network)
    found.make("a test", ends_alone=True)
    with nftables.opened() as stranger, pytest.raises(PermissionError):
        nftables.remove(stranger, NAME)
    copy = os.dup(found.handle)
    found.close()
    assert NAME in names(network), "another process, here a copy, still has it"
    os.close(copy)
    assert NAME not in names(network)


def test_a_table_without_owner_stays(network: Namespace) -> None:
    found = Filter(NAME, "nftables", network)
    found.make("a test", ends_alone=False)
    found.close()
    assert NAME in names(network)
    remove_by_name(NAME, "nftables", network)
    remove_by_name(NAME, "nftables", network)
    assert NAME not in names(network)


def test_a_kernel_without_owners(network: Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    make = nftables.make

    def refuse(connection: socket.socket, table: str, *, comment: str, owned: bool) -> None:
        if owned:
            raise OSError(95, os.strerror(95))
        make(connection, table, comment=comment, owned=owned)

    monkeypatch.setattr(nftables, "make", refuse)
    with made("nftables", network, ends_alone=True):
        assert NAME in names(network)
    assert NAME not in names(network)


def test_the_way_to_block(network: Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_method() == ("nftables", "")

    def no_table(_: socket.socket) -> tuple[str, ...]:
        raise OSError(93, "Protocol not supported")

    monkeypatch.setattr(nftables, "tables", no_table)
    monkeypatch.setattr(iptables, "is_here", lambda: True)
    assert find_method() == ("iptables", "")
    monkeypatch.setattr(iptables, "is_here", lambda: False)
    method, why = find_method()
    assert (method, "iptables-restore is not on PATH" in why) == (None, True)


def test_a_namespace_is_found_by_its_processes() -> None:
    before = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    with own_network(), Namespace() as there, python("import signal; print('in', flush=True); signal.pause()") as child:
        inode = there.inode
        assert there.visit(lambda: names(there)) == ()
        outside = in_namespace(before, "net", lambda: find_namespace(inode))
        assert outside is not None, child.pid
        outside.close()
    os.close(before)
    assert find_namespace(inode) is None, "nothing is in it any more"

"""The ports of gpucr's own connections, beside those that a restored job needs."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpucr.nodes import rendezvous
from gpucr.nodes.rendezvous import Rendezvous, connect


@pytest.fixture
def node_0() -> Iterator[Rendezvous]:
    """How to reach a listener, as node 1 of 2."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield Rendezvous("127.0.0.1", listener.getsockname()[1], 1, 2, bytes(32))


def test_a_connection_takes_no_port_that_systems_give_to_connections(node_0: Rendezvous) -> None:
    """The job may have any of these, and needs it again."""
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    for _ in range(20):
        with connect(node_0, 60) as connection:
            assert not first <= connection.getsockname()[1] <= last


def test_where_all_of_its_ports_are_taken_it_takes_another(node_0: Rendezvous, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("", 0)) as taken:
        monkeypatch.setattr(rendezvous, "_FROM_PORTS", [taken.getsockname()[1]])
        with connect(node_0, 60) as connection:
            assert connection.getsockname()[1] != taken.getsockname()[1]

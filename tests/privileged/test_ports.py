"""Ports of a job that is to be restored."""

from __future__ import annotations

import socket
from collections.abc import Collection

import pytest

from gpucr.linux import sock_diag
from gpucr.model import Endpoint
from gpucr.privileged import ports
from tests.network.test_connections import time_waits

pytestmark = pytest.mark.root


def closed_connection() -> int:
    """The port of a listening socket that is gone, with a remnant there."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        server, _ = listener.accept()
        server.close()
        assert client.recv(1) == b""
        client.close()
    assert time_waits(port) == 1
    return port


def test_remnants_are_ended_at_these_ports_only(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, other = closed_connection(), closed_connection()
    ports.free([Endpoint("127.0.0.1", wanted)], lambda: pytest.fail("it waits"))
    assert (time_waits(wanted), time_waits(other)) == (0, 1)


def test_a_remnant_beside_a_listener_stays() -> None:
    port = closed_connection()
    with socket.create_server(("127.0.0.1", port)):
        ports.free([Endpoint("127.0.0.1", port)], lambda: pytest.fail("it waits"))
        assert time_waits(port) == 1


def test_a_kernel_that_cannot_end_them_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    port, looks = closed_connection(), 0
    destroy = sock_diag.destroy

    def refuse(left_over: Collection[sock_diag.TcpSocket]) -> None:
        raise OSError(95, "not supported")

    def check() -> None:
        nonlocal looks
        looks += 1
        if looks == 3:  # the minute is over
            destroy(sock_diag.left_over_at([Endpoint("127.0.0.1", port)]))

    monkeypatch.setattr(sock_diag, "destroy", refuse)
    ports.free([Endpoint("127.0.0.1", port)], check)
    assert looks == 3


def test_the_wait_ends_when_the_client_has_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    port = closed_connection()

    def stop(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(sock_diag, "destroy", stop)
    with pytest.raises(PermissionError):
        ports.free([Endpoint("127.0.0.1", port)], stop)
    assert time_waits(port) == 1

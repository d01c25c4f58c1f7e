"""A server's limits on connections of strangers."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from gpucr.linux import visitors
from gpucr.linux.visitors import Visitors, place_of

Pair = Callable[[], "tuple[socket.socket, socket.socket]"]


@pytest.fixture
def pair() -> Iterator[Pair]:
    made: list[socket.socket] = []

    def begin() -> tuple[socket.socket, socket.socket]:
        ours, theirs = socket.socketpair()
        theirs.settimeout(30)
        made.extend((ours, theirs))
        return ours, theirs

    yield begin
    for each in made:
        each.close()


def test_a_connection_is_ended_however_often_it_sends(pair: Pair) -> None:
    ours, theirs = pair()
    limited = Visitors(1, 1, 0.05)
    assert limited.admit(ours, "192.0.2.1")

    def drip() -> None:
        with contextlib.suppress(OSError):
            while True:
                theirs.send(b"x")

    dripping = threading.Thread(target=drip, daemon=True)

    def serve() -> None:
        with limited.served(ours):
            dripping.start()
            while ours.recv(1):
                pass

    with pytest.raises(TimeoutError):
        serve()
    dripping.join(30)
    assert not dripping.is_alive()


def test_a_connection_served_in_time_stays_open(pair: Pair) -> None:
    ours, theirs = pair()
    limited = Visitors(1, 1, 3600)
    assert limited.admit(ours, "192.0.2.1")
    with limited.served(ours):
        pass
    ours.send(b"x")
    assert theirs.recv(1) == b"x"


def test_a_newcomer_takes_the_place_of_the_oldest(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    limited = Visitors(3, 3, 3600)
    first, second, third, fourth = (pair() for _ in range(4))
    for ours, _ in (first, second, third):
        assert limited.admit(ours, "192.0.2.1")
    assert not limited.admit(fourth[0], "192.0.2.1"), "the others have just come"
    monkeypatch.setattr(visitors, "_AT_LEAST_S", 0.0)
    assert limited.admit(fourth[0], "192.0.2.1")
    assert first[1].recv(1) == b""
    with pytest.raises(TimeoutError), limited.served(first[0]):
        pass
    for ours, _ in (second, third, fourth):
        with limited.served(ours):
            pass


def test_a_place_with_many_gives_way_to_others(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visitors, "_AT_LEAST_S", 0.0)
    limited = Visitors(4, 3, 3600)
    other, *many, newcomer = (pair() for _ in range(6))
    assert limited.admit(other[0], "192.0.2.9")
    for number, (ours, _) in enumerate(many):
        assert limited.admit(ours, f"2001:db8::{number}"), "one site"
    assert many[0][1].recv(1) == b"", "it may not have four"
    assert limited.admit(newcomer[0], "192.0.2.8")
    assert many[1][1].recv(1) == b"", "not the oldest, which is alone"
    for ours, _ in (other, *many[2:], newcomer):
        with limited.served(ours):
            pass


@pytest.mark.parametrize(
    ("address", "place"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("2001:db8:1:2:3::4", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
    ],
)
def test_places(address: str, place: str) -> None:
    assert place_of(address) == place

"""Nodes agree on whose connections are whose, and on who gets which address."""

from __future__ import annotations

import pytest

from gpucr.errors import InvalidRequest, JobChanged
from gpucr.model import Connection, Endpoint
from gpucr.nodes.peers import Ends, Owners, match
from gpucr.nodes.places import AUTO, Moves, Place, _merged, parse_map
from gpucr.records import decode, encode


def connection(local: str, remote: str) -> Connection:
    ends = [Endpoint(address, int(port)) for address, _, port in (each.rpartition(":") for each in (local, remote))]
    return Connection(*ends)


def owners(*parts: Ends) -> list[tuple[int, ...]]:
    return [decode(each, Owners).nodes for each in match([encode(part).decode() for part in parts])]


A, B = connection("10.0.0.1:80", "10.0.0.2:40000"), connection("10.0.0.2:40000", "10.0.0.1:80")


def test_a_connection_belongs_to_who_has_its_other_end() -> None:
    world = connection("10.0.0.1:41000", "192.0.2.1:443")
    other_program = connection("10.0.0.1:41001", "10.0.0.2:9100")
    one = Ends((A, world, other_program), (), (), ("10.0.0.1",))
    assert owners(one, Ends((B,), (), (), ("10.0.0.2",))) == [(1, -1, -1), (0,)]
    assert owners(one) == [(-1, -1, -1)]


def test_an_end_that_was_closed_belongs_to_its_address() -> None:
    assert owners(Ends((A,), (A,), (), ("10.0.0.1",)), Ends((), (), (), ("10.0.0.2",))) == [(1,), ()]
    assert owners(Ends((A,), (A,), (), ("10.0.0.1",)), Ends((), (), (), ("10.0.0.3",))) == [(-1,), ()]


def test_data_that_no_process_has_is_refused() -> None:
    with pytest.raises(JobChanged, match=r"has closed the connection from 10\.0\.0\.2:40000"):
        owners(Ends((A,), (), (), ("10.0.0.1",)), Ends((), (), (B,), ("10.0.0.2",)))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["10.0.0.1"], "does not name two addresses"),
        (["auto", "10.0.0.1=10.0.0.2"], "does not name two addresses"),
        (["10.0.0.1=fd00::1"], "from one version of IP to another"),
        (["10.0.0.1=10.0.0.2", "10.0.0.1=10.0.0.3"], "names two addresses for 10.0.0.1"),
    ],
)
def test_maps_that_are_refused(words: list[str], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        parse_map(words)


def test_maps() -> None:
    assert parse_map([]) == {}
    assert parse_map(["auto"]) == AUTO
    assert parse_map(["10.0.0.1=10.0.0.2", "FD00::1=fd00:0::2"]) == {"10.0.0.1": "10.0.0.2", "fd00::1": "fd00::2"}


def merged(*parts: Place) -> dict[str, str]:
    first, *others = (decode(each, Moves) for each in _merged([encode(part).decode() for part in parts]))
    assert all(each == first for each in others)
    return first.addresses


def test_places_that_fit_together() -> None:
    assert merged(Place({"a": "b"}, {"x": "y"}), Place({"b": "a"}, {"x": "y"})) == {"a": "b", "b": "a", "x": "y"}
    assert merged(Place({"a": "a"}, {}), Place({"a": "a"}, {})) == {"a": "a"}


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ((Place({"a": "c"}, {}), Place({"b": "c"}, {})), "both a and b would become c"),
        ((Place({"a": "b"}, {}), Place({"b": "b"}, {})), "both a and b would become b"),
        ((Place({"a": "c"}, {}), Place({"a": "d"}, {})), "was the address of several parts"),
        ((Place({"a": "c"}, {}), Place({"b": "b"}, {"a": "d"})), "--map names c and d for a"),
    ],
)
def test_places_that_do_not(parts: tuple[Place, ...], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        merged(*parts)

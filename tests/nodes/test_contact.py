"""Nodes that stay in contact, and the secret in their store by which they know each other."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import gpucr
from tests.counter import wait_until

SECRET = b"not to be guessed by anybody"


def rendezvous(node: int, port: int, *, count: int = 3, secret: bytes = SECRET, meet_s: float = 20) -> gpucr.Rendezvous:
    """A node's view of a meeting on this machine."""
    return gpucr.Rendezvous("127.0.0.1", port, node, count, secret, meet_s)


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as made:
        return int(made.getsockname()[1])


@pytest.fixture
def contacts(port: int) -> Iterator[list[gpucr.Contact]]:
    """Three nodes in contact."""
    made = [gpucr.Contact(rendezvous(node, port), "a job") for node in range(3)]
    threads = [threading.Thread(target=each.__enter__) for each in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    yield made
    for each in made:
        each.conclude()
    for each in reversed(made):
        each.__exit__(None, None, None)


def wait_to_hear(contact: gpucr.Contact, count: int) -> list[tuple[int, str]]:
    """So many words."""
    found: list[tuple[int, str]] = []

    def has_heard() -> bool:
        found.extend(contact.heard())
        return len(found) >= count

    wait_until(has_heard, lambda: str(found))
    return found


def test_nodes_speak_to_node_0_and_that_to_all(contacts: list[gpucr.Contact]) -> None:
    contacts[1].tell("one")
    contacts[1].tell("two")
    assert wait_to_hear(contacts[0], 2) == [(1, "one"), (1, "two")]
    contacts[0].tell("dump")
    assert [wait_to_hear(each, 1) for each in contacts[1:]] == [[(0, "dump")]] * 2
    assert [each.lost for each in contacts] == [None] * 3
    assert contacts[2].heard() == []


def test_only_node_0_learns_of_a_loss_and_may_still_speak(contacts: list[gpucr.Contact]) -> None:
    contacts[2].tell("the last word")
    contacts[2].__exit__(None, None, None)
    wait_until(lambda: contacts[0].lost is not None, "the loss to be seen")
    assert "the connection to node 2 was lost" in (contacts[0].lost or "")
    assert wait_to_hear(contacts[0], 1) == [(2, "the last word")]
    contacts[0].tell("over")
    assert wait_to_hear(contacts[1], 1) == [(0, "over")]
    assert contacts[1].lost is None


def test_once_it_is_concluded_nobody_is_missed(contacts: list[gpucr.Contact]) -> None:
    for each in contacts:
        each.conclude()
    contacts[0].tell("over")
    assert wait_to_hear(contacts[1], 1) == [(0, "over")]
    for each in reversed(contacts):
        each.__exit__(None, None, None)
    assert [each.lost for each in contacts] == [None] * 3


def test_a_node_that_does_not_come_is_named(port: int) -> None:
    with pytest.raises(gpucr.NodeFailed, match=r"nodes 1, 2 did not come to the rendezvous within 0\.1 s"):
        gpucr.Contact(rendezvous(0, port, meet_s=0.1), "a job").__enter__()


def test_nodes_of_different_jobs_do_not_get_into_contact(port: int) -> None:
    errors: list[str] = []

    def enter(node: int, about: str) -> None:
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(gpucr.Contact(rendezvous(node, port, count=2), about))
            except gpucr.NodeFailed as e:
                errors.append(e.message)

    threads = [threading.Thread(target=enter, args=(node, f"job {node}")) for node in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 2
    assert all("to stay in contact for job 1, and node 0 to stay in contact for job 0" in each for each in errors)


def test_the_secret_of_a_store_is_made_once(tmp_path: Path) -> None:
    store = tmp_path / "store"
    gpucr.init_store(store)
    assert gpucr.secret_of_store(store) is None
    made = gpucr.secret_of_store(store, make=True)
    assert made is not None
    assert len(made) == 32
    assert gpucr.secret_of_store(store, make=True) == made == gpucr.secret_of_store(store)
    (kept,) = store.rglob("secret")
    assert kept.stat().st_mode & 0o077 == 0, "for the store's owner alone"
    assert gpucr.list_snapshots(store).snapshots == ()
    assert gpucr.verify_snapshots(store).problems == {}
    assert gpucr.prune_store(store).removed == ()
    assert gpucr.secret_of_store(store) == made
    kept.write_bytes(kept.read_bytes()[:-1])
    with pytest.raises(gpucr.StoreDamaged):
        gpucr.secret_of_store(store)

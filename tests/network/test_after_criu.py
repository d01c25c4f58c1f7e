"""What a container's runtime, or its CRIU, has left of a dump: released while the container runs, else recorded.

A process of this test stands for the container, and the test for CRIU.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator

import pytest

from gpucr.linux import iptables, nftables, processes, sock_diag, tcp_repair
from gpucr.model import Job
from gpucr.network import kept
from gpucr.network.of_criu import AfterCriu
from tests.children import Child, python
from tests.own_network import filters, own_network

pytestmark = pytest.mark.root

TALKS = """
import signal, socket
listener = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(listener.getsockname())
print(listener.getsockname()[1], flush=True)
server, _ = listener.accept()
signal.pause()
"""


@pytest.fixture
def container() -> Iterator[Child]:
    with own_network(), python(TALKS) as child:
        yield child


def block(name: str = "CRIU-4711") -> None:
    with nftables.opened() as connection:
        nftables.make(connection, name, comment="CRIU", owned=False)


def is_in_repair(child: Child) -> bool:
    return tcp_repair.end([child.id], ()) > 0


def test_a_container_that_runs_is_not_cut_off(container: Child) -> None:
    block("CRIU-before")
    with AfterCriu(Job(processes.tree(container.pid), ()), "/srv/s"):
        block()
        sockets = {each.inode for each in sock_diag.sockets_of([container.pid]) if each.is_connection}
        tcp_repair.begin([container.id], sockets)
    assert filters() == ("CRIU-before",), "somebody else's"
    assert not is_in_repair(container)


def test_it_is_released_before_it_runs(container: Child) -> None:
    """As soon as CRIU has ended, which is before the rest of the operation."""
    with AfterCriu(Job(processes.tree(container.pid), ()), "/srv/s") as after:
        block()
        after.release()
        assert filters() == ()


def test_the_chain_of_iptables(container: Child, monkeypatch: pytest.MonkeyPatch) -> None:
    removed: list[str] = []
    chains = iter([(), ("CRIU", "DOCKER")])
    monkeypatch.setattr(iptables, "is_here", lambda: True)
    monkeypatch.setattr(iptables, "chains", lambda: next(chains))
    monkeypatch.setattr(iptables, "remove", removed.append)
    AfterCriu(Job(processes.tree(container.pid), ()), "/srv/s").__enter__().release()
    assert removed == ["CRIU"]


def test_a_filter_for_the_restore_has_an_owner(container: Child) -> None:
    """Of a container in the machine's network: until its CRIU has removed the filter."""
    with AfterCriu(Job(processes.tree(container.pid), ()), "/srv/s"):
        block()
        os.kill(container.pid, signal.SIGKILL)
        container.reap()
    (record,) = [each for each in kept.all_kept() if each.name == "CRIU-4711"]
    assert (record.snapshot, record.method) == ("/srv/s", "nftables")
    assert filters() == ("CRIU-4711",)
    with nftables.opened() as connection:
        nftables.remove(connection, "CRIU-4711")
    kept.give_up_lost()
    assert not [each for each in kept.all_kept() if each.name == "CRIU-4711"]


def test_a_container_without_connections() -> None:
    with own_network(), python("import signal; print('ready', flush=True); signal.pause()") as child:
        with AfterCriu(Job(processes.tree(child.pid), ()), "/srv/s"), socket.socket():
            block()
        assert filters() == ()

"""Connections between the parts of a job carry on after a dump and restore, wherever the parts come back."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from subprocess import CalledProcessError

import pytest

from tests import command
from tests.conftest import skip_or_fail
from tests.counter import wait_until
from tests.nodes.conftest import require_networks
from tests.nodes.full_load import PORT, LoadedNodes
from tests.nodes.two_nodes import ended
from tests.storm import IS_STORM, later, long

pytestmark = pytest.mark.criu


@pytest.fixture
def started(sim_only: None, tmp_path: Path) -> Iterator[ExitStack]:
    """What a test makes is closed at its end."""
    require_networks()
    with ExitStack() as opened:
        yield opened


def loaded(opened: ExitStack, folder: Path, count: int, each: int, *, spare: int = 0) -> LoadedNodes:
    """A job on nodes, with so many connections for each pair of them."""
    made = LoadedNodes(folder, count, spare=spare)
    opened.callback(made.close)
    made.start_job(each)
    return made


def snapshot_of(nodes: LoadedNodes, part: int) -> str:
    """The id of the snapshot of a part."""
    found = command.run_json("ls", nodes.store)["snapshots"]
    return next(str(each["id"]) for each in found if each["part"]["node"] == part)


ROUNDS = 50 if IS_STORM else 1


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("at", [[0, 1], later([1, 0]), [2, 3]], ids=["in place", "swapped", "new addresses"])
def test_200_connections_under_full_load(started: ExitStack, tmp_path: Path, at: list[int]) -> None:
    """There and back again, many times in a storm."""
    nodes = loaded(started, tmp_path, 2, 200, spare=2)
    for number in range(ROUNDS):
        to = at if number % 2 == 0 else [0, 1]
        name = f"set-{number}"
        nodes.dump(name=name)
        nodes.nothing_is_blocked()
        nodes.restore(*nodes.map_words(to), at=to, name=name)
        nodes.goes_on()
        command.run("rm", f"{nodes.store}#{name}")
        if number % 10 == 9:
            command.run("prune", nodes.store, "--keep-last", "1", "--grace", "0")
    nodes.finish()


@pytest.mark.parametrize("at", [[1, 2, 3, 0], later([4, 5, 6, 7])], ids=["moved on", "new addresses"])
def test_four_nodes(started: ExitStack, tmp_path: Path, at: list[int]) -> None:
    """Each has connections to all others; `auto` finds the new address of each part that had one."""
    nodes = LoadedNodes(tmp_path, 4, spare=4)
    started.callback(nodes.close)
    nodes.start_job(8, families="4")
    nodes.dump()
    nodes.restore("--map", "auto", at=at)
    nodes.goes_on()
    nodes.finish()


def test_packets_are_lost_meanwhile(started: ExitStack, tmp_path: Path) -> None:
    """A slow network with a short queue drops what does not fit, also while the job is dumped."""
    nodes = LoadedNodes(tmp_path, 2)
    started.callback(nodes.close)
    nodes.disturb("tbf", "rate", "200mbit", "burst", "16kb", "latency", "2ms")
    nodes.start_job(40)
    for name in ("first", "second") if IS_STORM else ("first",):
        nodes.dump(name=name)
        nodes.restore(name=name)
        nodes.goes_on()
    nodes.finish()


@long
def test_packets_are_lost_delayed_and_reordered_meanwhile(started: ExitStack, tmp_path: Path) -> None:
    nodes = LoadedNodes(tmp_path, 2)
    started.callback(nodes.close)
    try:
        nodes.disturb("netem", "delay", "3ms", "2ms", "loss", "1%", "reorder", "10%")
    except CalledProcessError:
        skip_or_fail("netem", "the kernel has no netem")
    nodes.start_job(40)
    nodes.dump()
    nodes.restore()
    nodes.goes_on()
    nodes.finish()


def test_left_running_again_and_again(started: ExitStack, tmp_path: Path) -> None:
    nodes = loaded(started, tmp_path, 2, 20)
    for number in range(3):
        nodes.dump("--leave-running", name=f"set-{number}")
        nodes.goes_on()
        nodes.nothing_is_blocked()
    for node in nodes.parts():
        node.kill_job()
    nodes.restore(name="set-1")
    nodes.goes_on()
    nodes.finish()


def test_a_part_alone_closes_its_connections_to_others(started: ExitStack, tmp_path: Path) -> None:
    nodes = loaded(started, tmp_path, 2, 2)
    nodes.dump()
    part = f"{nodes.store}#{snapshot_of(nodes, 0)}"
    shown = command.run_json("inspect", part)["manifest"]
    assert [each["node"] for each in shown["peers"]] == [1, 1]
    assert shown["connections"] == []
    nodes.parts()[0].reap()
    restored = nodes.machines[0].start("restore", part)
    code, _, said = ended(restored)
    assert code == 0, said
    assert "2 connections" in said
    # Its first call at a closed socket was to send, or to receive.
    errors = ("BrokenPipeError", f"OSError: [Errno {errno.ENOTCONN}]")
    wait_until(lambda: nodes.parts()[0].lines()[-1].startswith(errors), lambda: str(nodes.parts()[0].lines()[-2:]))
    nodes.nothing_is_blocked()


# --- refused before anything starts ------------------------------------------------------------------------------


def refused(nodes: LoadedNodes, *more: object, at: list[int]) -> list[tuple[int, str]]:
    """All nodes refuse a restore, and nothing of the job is there, or blocked."""
    nodes.at = at
    done = [ended(each) for each in [nodes.start_restore(part, *more) for part in range(nodes.count)]]
    assert all(code != 0 for code, _, _ in done)
    assert all(node.is_gone() for node in nodes.parts())
    nodes.nothing_is_blocked()
    return [(code, said) for code, _, said in done]


def test_restores_that_cannot_be(started: ExitStack, tmp_path: Path) -> None:
    nodes = loaded(started, tmp_path, 2, 2, spare=2)
    one, two, three, _ = (each.addresses for each in nodes.machines)
    nodes.dump()
    for node in nodes.parts():
        node.reap()

    def is_refused(says: str, *more: object, at: list[int]) -> None:
        found = refused(nodes, *more, at=at)
        assert any(code == 2 and says in said and "GPUCR-NODES-ADDRESS" in said for code, said in found), found

    only_one = ["--map", f"{one['4']}={three['4']}", "--map", f"{one['6']}={three['6']}"]
    is_refused(f"the part has the address {two['4']}, and that is no address of this machine", *only_one, at=[2, 3])
    is_refused("is to take its place, is no address of this machine", "--map", f"{one['4']}={two['4']}", at=[2, 3])
    is_refused("would become", "--map", f"{one['4']}={two['4']}", "--map", f"{one['6']}={two['6']}", at=[1, 1])
    nodes.machines[2].ip("addr", "add", f"{two['6']}/128", "dev", "lo")
    is_refused(f"another node is to have {two['6']}, an address of this machine", *only_one, at=[2, 1])
    nodes.machines[2].ip("addr", "del", f"{two['6']}/128", "dev", "lo")
    is_refused("has the addresses", "--map", "auto", at=[2, 3])
    is_refused("does not name two addresses", "--map", f"{one['4']}", at=[0, 1])
    is_refused("from one version of IP to another", "--map", f"{one['4']}={one['6']}", at=[0, 1])
    is_refused("names two addresses for", *only_one, "--map", f"{one['4']}={one['4']}", at=[0, 1])
    nodes.restore(at=[0, 1])
    nodes.goes_on()
    nodes.finish()


def test_nodes_with_different_maps(started: ExitStack, tmp_path: Path) -> None:
    nodes = loaded(started, tmp_path, 2, 2, spare=2)
    nodes.dump()
    for node in nodes.parts():
        node.reap()
    words, other = nodes.map_words([2, 3]), ["--map", "10.99.0.1=10.99.0.2"]
    nodes.at = [2, 3]
    done = [
        ended(each)
        for each in [
            nodes.start_restore(0, *words, *other),
            nodes.start_restore(1, *words, "--map", "10.99.0.1=10.99.0.3"),
        ]
    ]
    assert "--map names 10.99.0.2 and 10.99.0.3 for 10.99.0.1" in done[0][2]
    assert [code for code, _, _ in done] == [2, 1]
    nodes.restore(*words)
    nodes.goes_on()
    nodes.finish()


def test_a_job_that_still_runs_at_its_old_addresses(started: ExitStack, tmp_path: Path) -> None:
    """Its pids would be taken on one machine; here the part listens on its old node, as if it ran there."""
    nodes = loaded(started, tmp_path, 2, 2, spare=2)
    nodes.dump()
    for node in nodes.parts():
        node.reap()
    words = nodes.map_words([2, 3])
    listens = nodes.machines[0].python(
        f"import socket, time\n"
        f"s = socket.create_server(('{nodes.machines[0].addresses['4']}', {PORT + 4}))\n"
        f"print('listens', flush=True); time.sleep(60)"
    )
    assert listens.stdout is not None
    listens.stdout.readline()
    found = refused(nodes, *words, at=[2, 3])
    assert any(code == 3 and "the job may run there" in said for code, said in found), found
    listens.kill()
    listens.communicate()
    nodes.restore(*words)
    nodes.goes_on()
    nodes.finish()


def test_a_part_is_missing_in_the_store(started: ExitStack, tmp_path: Path) -> None:
    nodes = loaded(started, tmp_path, 2, 2)
    nodes.dump()
    for node in nodes.parts():
        node.reap()
    assert command.run("rm", f"{nodes.store}#{snapshot_of(nodes, 1)}").returncode == 0
    (code, said), (other, other_said) = refused(nodes, at=[0, 1])
    assert (code, other) == (5, 5), "each looks before it waits for others"
    assert "lacks the snapshot of node 1" in said
    assert "lacks the snapshot of node 1" in other_said


def test_nodes_restore_different_sets(started: ExitStack, tmp_path: Path) -> None:
    nodes = loaded(started, tmp_path, 2, 2)
    nodes.dump("--leave-running", name="one")
    nodes.dump(name="other")
    for node in nodes.parts():
        node.reap()
    done = [ended(each) for each in [nodes.start_restore(0, name="one"), nodes.start_restore(1, name="other")]]
    assert [code for code, _, _ in done] == [1, 1]
    assert all("node 1 failed: it wants to restore" in said for _, _, said in done), done
    assert all(node.is_gone() for node in nodes.parts())
    nodes.restore(name="other")
    nodes.goes_on()
    nodes.finish()

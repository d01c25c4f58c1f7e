"""gpucr, or a whole node, dies at a random moment of a dump or restore: no half set, and nothing stays blocked."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import command
from tests.counter import kill_at_once, processes_in, wait_until
from tests.nodes.conftest import require_networks
from tests.nodes.full_load import LoadedNodes
from tests.nodes.two_nodes import ended
from tests.storm import IS_STORM

pytestmark = pytest.mark.criu

WAYS = ["dump", "dump --leave-running", "restore"]
VICTIMS = ["gpucr", "node"]
CASES = 200 if IS_STORM else 1
_LONGEST_S = 0.9
"""Both commands are over after about this time, on two processors."""


@pytest.fixture
def nodes(sim_only: None, tmp_path: Path) -> Iterator[LoadedNodes]:
    """A job under full load on two nodes."""
    require_networks()
    made = LoadedNodes(tmp_path, 2, spare=1)
    try:
        made.start_job(10)
        yield made
    finally:
        made.close()


@pytest.mark.parametrize("seed", range(CASES))
def test_a_kill_at_a_random_moment(nodes: LoadedNodes, seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311 - not for secrets
    way, dies, victim = WAYS[seed % 3], chance.choice(VICTIMS), chance.randrange(2)
    nodes.dump(*(["--leave-running"] if way != "restore" else []), name="first")
    if way == "restore":
        for node in nodes.parts():
            node.reap()
        commands = [nodes.start_restore(part, name="first") for part in range(2)]
    else:
        commands = [nodes.start_dump(part, *way.split()[1:], name="second") for part in range(2)]
    time.sleep(chance.uniform(0, _LONGEST_S))
    kill(nodes, commands, victim, dies)
    codes = [ended(each)[0] for each in commands]
    nodes.nothing_is_blocked()
    is_complete = {each["complete"] for each in listed(nodes, "second")}
    assert len(is_complete) < 2, "half a set"
    if dies == "gpucr" and way != "restore" and is_complete != {True}:
        nodes.goes_on()  # whoever was killed: the job is as it was found
        nodes.finish()
        return
    if dies == "gpucr" and way == "dump --leave-running":
        nodes.goes_on()
    for node in nodes.parts():
        node.kill_job()
    if dies == "node":  # it does not come back: another machine takes its place
        nodes.restore(*nodes.map_words(moved(nodes, victim)), at=moved(nodes, victim), name="first")
    else:
        nodes.restore(name="second" if is_complete == {True} else "first")
    nodes.goes_on()
    nodes.finish()
    assert set(codes) <= {0, 1, 10, 130, -signal.SIGKILL}, codes


def listed(nodes: LoadedNodes, name: str) -> list[dict[str, object]]:
    """The parts of a set in the store."""
    return [each for each in command.run_json("ls", nodes.store)["snapshots"] if each["name"] == name]


def moved(nodes: LoadedNodes, victim: int) -> list[int]:
    """Where the parts go when a node is gone."""
    return [2 if part == victim else machine for part, machine in enumerate(nodes.at)]


def kill(nodes: LoadedNodes, commands: list[subprocess.Popen[str]], victim: int, dies: str) -> None:
    """Kill a node's gpucr, or all that is on the node at once: job, gpucr, guard, and what it restores."""
    if dies == "node":
        nodes.machines[victim].ip("link", "set", "eth", "down")
        kill_at_once([*of_session(commands[victim].pid), *processes_in(nodes.parts()[victim].folder)])
        wait_until(lambda: not processes_in(nodes.parts()[victim].folder), "the node to be gone")
    else:
        with contextlib.suppress(ProcessLookupError):
            os.kill(commands[victim].pid, signal.SIGKILL)


def of_session(leader: int) -> list[int]:
    """The processes of a command: itself, its guard and its CRIU, which have sessions of their own but its parent."""
    found = [leader]
    for pid in sorted(int(each.name) for each in Path("/proc").iterdir() if each.name.isdigit()):
        with contextlib.suppress(OSError, IndexError, ValueError):
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            if parent in found:
                found.append(pid)
    return found

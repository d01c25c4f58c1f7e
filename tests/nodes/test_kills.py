"""gpucr, its guard, or a node dies at a random moment of a dump or restore: no half set, and nothing stays blocked."""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpucr.linux.processes import read_stat
from tests import command
from tests.counter import kill_at_once, processes_in, wait_until
from tests.nodes.conftest import require_networks
from tests.nodes.full_load import LoadedNodes
from tests.nodes.two_nodes import ended
from tests.storm import IS_STORM

pytestmark = pytest.mark.criu

WAYS = ["dump", "dump --leave-running", "restore"]
VICTIMS = ["gpucr", "guard", "gpucr and guard", "node"]
CASES = 200 if IS_STORM else 1
_WORKS_IN = {"dump": (0.3, 1.1), "restore": (0.2, 0.8)}
"""From when on it changes anything, and when it is surely over, compared with the time that a dump took just before."""
_GUARD_FAILS, _KILLED = 4, -signal.SIGKILL


@pytest.fixture
def nodes(sim_only: None, tmp_path: Path) -> Iterator[LoadedNodes]:
    """A job under full load, with device memory, on two nodes."""
    require_networks()
    made = LoadedNodes(tmp_path, 2, spare=1)
    try:
        made.start_job(10, on_gpu=True)
        yield made
    finally:
        made.close()


@pytest.mark.parametrize("seed", range(CASES))
def test_a_kill_at_a_random_moment(nodes: LoadedNodes, seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311 - not for secrets
    way, dies, victim = WAYS[seed % 3], VICTIMS[seed // 3 % 4], chance.randrange(2)
    begin = time.monotonic()
    nodes.dump(*(["--leave-running"] if way != "restore" else []), name="first")
    took_s = time.monotonic() - begin
    if way == "restore":
        for node in nodes.parts():
            node.reap()
        commands = [nodes.start_restore(part, name="first") for part in range(2)]
    else:
        commands = [nodes.start_dump(part, *way.split()[1:], name="second") for part in range(2)]
    time.sleep(took_s * chance.uniform(*_WORKS_IN[way.split()[0]]))
    kill(nodes, commands, victim, dies)
    codes = [ended(each)[0] for each in commands]
    other = codes.pop(1 - victim)
    nodes.nothing_is_blocked()
    assert other in {0, 1}, codes
    assert codes[0] in {0, 1, _GUARD_FAILS if dies == "guard" else _KILLED}, codes
    is_complete = (
        runs_or_is_gone(nodes, victim, other) if way == "restore" else is_set_or_runs(nodes, victim, dies, way)
    )
    sys.stdout.write(f"{way}, {dies} of {victim}: {codes}, {other}, complete: {is_complete}\n")
    for node in nodes.parts():
        node.kill_job()
    if dies == "node":  # it does not come back: another machine takes its place
        at = [2 if part == victim else machine for part, machine in enumerate(nodes.at)]
        nodes.restore(*nodes.map_words(at), at=at, name="second" if is_complete else "first")
    else:
        nodes.restore(name="second" if is_complete else "first")
    nodes.goes_on()
    nodes.finish()


def runs_or_is_gone(nodes: LoadedNodes, victim: int, other: int) -> bool:
    """After a restore: all parts run, or none. Only a victim that dies when all are there already goes alone."""
    if other != 0:
        wait_until(lambda: all(node.is_gone() for node in nodes.parts()), "all parts to be gone")
    elif not nodes.parts()[victim].is_gone():
        nodes.goes_on()
    return False


def is_set_or_runs(nodes: LoadedNodes, victim: int, dies: str, way: str) -> bool:
    """After a dump: the set is complete, or there is none and the job runs. A dead node's part is gone, of course.

    Device memory that neither gpucr nor its guard holds any more is gone too.
    """
    is_complete = {each["complete"] for each in listed(nodes, "second")}
    assert len(is_complete) < 2, "half a set"
    if is_complete != {True}:
        assert not any(is_stopped(pid) for pid in processes_in(nodes.parts()[1 - victim].folder))
    if dies in ("gpucr", "guard") and (is_complete != {True} or way == "dump --leave-running"):
        nodes.goes_on()
    return is_complete == {True}


def is_stopped(pid: int) -> bool:
    stat = read_stat(pid)
    return stat is not None and stat.status in "Tt"


def listed(nodes: LoadedNodes, name: str) -> list[dict[str, object]]:
    """The parts of a set in the store."""
    return [each for each in command.run_json("ls", nodes.store)["snapshots"] if each["name"] == name]


def kill(nodes: LoadedNodes, commands: list[subprocess.Popen[str]], victim: int, dies: str) -> None:
    """Kill a node's gpucr or guard, or all that is on the node at once: job, gpucr, guard, and what it restores."""
    of_command = of_session(commands[victim].pid)
    if dies == "node":
        nodes.machines[victim].ip("link", "set", "eth", "down")
        kill_at_once([*of_command, *processes_in(nodes.parts()[victim].folder)])
        wait_until(lambda: not processes_in(nodes.parts()[victim].folder), "the node to be gone")
    else:
        guards = [pid for pid in of_command if is_guard(pid)]
        kill_at_once([*(of_command[:1] if "gpucr" in dies else []), *(guards if "guard" in dies else [])])


def is_guard(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"gpucr.undo.guard_process" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def of_session(leader: int) -> list[int]:
    """The processes of a command: itself, its guard and its CRIU, which have sessions of their own but its parent."""
    found = [leader]
    for pid in sorted(int(each.name) for each in Path("/proc").iterdir() if each.name.isdigit()):
        with contextlib.suppress(OSError, IndexError, ValueError):
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            if parent in found:
                found.append(pid)
    return found

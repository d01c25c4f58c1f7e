"""Device memory of several processes under the interposer: exported and imported, and legacy IPC."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest

from gpucr.interposer import owners
from gpucr.interposer.client import Agent, Held
from gpucr.interposer.presence import is_interposed
from gpucr.interposer.protocol import Block, Flag
from tests.interposer.conftest import Start
from tests.sharing_programs import EXPORTER, IMPORTER, OPENER, OWNER, PRELUDE
from tests.sim.libcuda import Libcuda

Pair = Callable[[str, str], "tuple[Side, Side]"]
MIB = 1 << 20


class Side:
    """One of two processes; it stops where it says so."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process, self.pid = process, process.pid

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def say(self, word: str = "") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()


@pytest.fixture
def pair(start: Start, sim_only: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Pair]:
    """Two programs with a socket between them, at their first stop."""
    monkeypatch.setenv("GPUCR_SIM_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("GPUCR_SIM_FIXED_COST_MS", "1")
    ends = socket.socketpair()

    def begin(first: str, second: str, **environment: str) -> tuple[Side, Side]:
        sides = []
        for end, source in zip(ends, (first, second), strict=True):
            os.set_inheritable(end.fileno(), True)
            sides.append(
                Side(start(sys.executable, "-c", PRELUDE + source, str(end.fileno()), inherit=True, **environment))
            )
        assert [side.line() for side in sides] == ["ready"] * 2
        return sides[0], sides[1]

    yield begin
    for end in ends:
        end.close()


def frozen(agents: Mapping[int, Agent]) -> tuple[owners.Sharing, dict[int, list[Held]]]:
    """All gates closed, nobody inside, everything out of the processes."""
    for agent in agents.values():
        assert agent.close_gate(5).is_empty
    shared = owners.find({pid: agent.blocks() for pid, agent in agents.items()})
    assert not shared.unowned
    held = {pid: [each for batch in agent.export() for each in batch] for pid, agent in agents.items()}
    for agent in agents.values():
        agent.drop(imported_too=True)
    return shared, held


def thawed(agents: Mapping[int, Agent], shared: owners.Sharing, held: Mapping[int, list[Held]]) -> None:
    """The creators' memory first, then what others import of it."""
    for pid, agent in agents.items():
        agent.give_back(held[pid], renew=True)
    fresh = {
        (pid, each.block.index): each
        for pid, agent in agents.items()
        for batch in agent.export(shared_only=True)
        for each in batch
    }
    for place, owner in shared.owned.items():
        descriptor = os.dup(fresh[owner.pid, owner.block.index].descriptor)
        agents[place.pid].give_back([Held(place.block, descriptor)], renew=False)
    for each in fresh.values():
        each.close()
    for agent in agents.values():
        agent.open_gate()


def cycle(*sides: Side) -> None:
    """Frozen, through the driver's checkpoint, and thawed."""
    driver = Libcuda()
    with ExitStack() as stack:
        agents = {side.pid: stack.enter_context(Agent(side.pid)) for side in sides}
        shared, held = frozen(agents)
        for side in sides:
            driver.suspend(side.pid)
        for side in sides:
            driver.resume(side.pid)
        thawed(agents, shared, held)
        assert all(agent.status().away == 0 for agent in agents.values())


def said(side: Side, word: str) -> str:
    side.say(word)
    line = side.line()
    assert side.line() == "ready"
    return line


def test_imported_memory_refers_to_the_owners_after_each_freeze(pair: Pair) -> None:
    exporter, importer = pair(EXPORTER, IMPORTER)
    for number in range(3):
        cycle(exporter, importer)
        assert said(exporter, "write") == ("7 100" if number == 0 else "200 100")
        assert said(importer, "write") == "200 100"


def test_the_owner_of_an_imported_block_is_known(pair: Pair) -> None:
    exporter, importer = pair(EXPORTER, IMPORTER)
    with Agent(exporter.pid) as first, Agent(importer.pid) as second:
        own, imported = first.blocks(), second.blocks()
        assert [each.flags for each in own] == [Flag.SHARED] * 2
        assert [each.flags for each in imported] == [Flag.IMPORTED] * 2
        assert (first.status().blocks, second.status().imported) == (2, 2)
        found = owners.find({exporter.pid: own, importer.pid: imported})
        pairs = [(place.block.index, owner.block.index) for place, owner in found.owned.items()]
        assert (sorted(pairs), found.unowned) == ([(0, 0), (1, 1)], ())
        alone = owners.find({importer.pid: imported})
        assert (len(alone.owned), len(alone.unowned)) == (0, 2)
        for each in own:
            assert os.readlink(f"/proc/{exporter.pid}/fd/{each.descriptor}").endswith(".memory")


def test_memory_that_is_shared_between_two_questions_has_an_owner(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    exporter, importer = pair(EXPORTER, IMPORTER)
    asked = []

    class BeforeItExports(Agent):
        def blocks(self) -> list[Block]:
            asked.append(self.pid)
            return [] if asked == [exporter.pid] else super().blocks()

    monkeypatch.setattr(owners, "Agent", BeforeItExports)
    found = owners.ask([exporter.pid, importer.pid])
    assert found is not None
    assert (len(found.owned), found.unowned, len(asked)) == (2, (), 4)
    alone = owners.ask([importer.pid])
    assert alone is not None
    assert (len(alone.owned), len(alone.unowned)) == (0, 2)


RELEASES = """
stop()
for address, size, handle in zip(addresses, (2 * MIB, 4 * MIB), handles):
    assert (cuda.cuMemUnmap(address, size_t(size)), cuda.cuMemRelease(handle)) == (0, 0)
stop()
"""


def test_kept_descriptors_of_a_shared_block_are_released_with_it(pair: Pair) -> None:
    exporter, importer = pair(EXPORTER.replace("while (", RELEASES + "while ("), IMPORTER)

    def kept(pid: int) -> int:
        descriptors = Path(f"/proc/{pid}/fd")
        return sum(os.readlink(path).endswith(".memory") for path in descriptors.iterdir())

    assert kept(exporter.pid) == 2 * 2  # and the driver's own
    exporter.say()
    assert exporter.line() == "ready"
    assert kept(exporter.pid) == 0
    with Agent(exporter.pid) as first, Agent(importer.pid) as second:
        found = owners.find({exporter.pid: first.blocks(), importer.pid: second.blocks()})
        assert len(found.unowned) == 2  # nobody could give it back


def test_legacy_ipc_survives_freezes(pair: Pair) -> None:
    owner, opener = pair(OWNER, OPENER)
    assert said(opener, "read") == "41"
    for _ in range(2):
        cycle(owner, opener)
        assert (said(opener, "write"), said(owner, "read")) == ("42", "42")
    assert said(opener, "close") == "0 0 1"
    with Agent(opener.pid) as agent:
        assert (agent.status().imported, agent.status().ipc_memory) == (0, 0)


def test_a_handle_of_freed_memory_opens_nothing(pair: Pair) -> None:
    owner, opener = pair(OWNER, OPENER)
    assert (said(opener, "close"), said(owner, "free"), said(opener, "open")) == ("0 0 1", "freed", "refused")


def test_legacy_ipc_memory_is_passed_on_while_a_client_is_connected(pair: Pair) -> None:
    owner, opener = pair(OWNER, "stop()\n" + OPENER)
    with Agent(owner.pid) as agent:
        assert agent.close_gate(5).is_empty
        opener.say()
        assert opener.line() == "ready"
        agent.open_gate()
    assert said(opener, "read") == "41"


def test_forked_children_inherit_none_of_the_kept_descriptors(pair: Pair) -> None:
    owner, _ = pair(OWNER, OPENER)
    assert said(owner, "fork") == "inherited 0"


def test_a_process_does_not_open_its_own_handle(pair: Pair) -> None:
    pair(
        "raw = ipc_handle(allocate(2 * MIB))\nipc_open(raw, 201)\nassert ipc_handle(u64(5)) == 1\nstop()",
        "assert isinstance(ipc_handle(allocate(4096)), bytes)\nstop()",  # the driver's own
    )


PLAIN_OWNER = "pointer = allocate(5 * MIB)\nwrite(pointer, 41)\nlink.send(ipc_handle(pointer))\nstop()"
PLAIN_OPENER = "print(read(ipc_open(link.recv(64))), flush=True)\nstop()"


def test_without_a_place_for_an_agent_legacy_ipc_is_the_drivers(start: Start, sim_only: None) -> None:
    ends = socket.socketpair()
    processes = []
    for end, source in zip(ends, (PLAIN_OWNER, PLAIN_OPENER), strict=True):
        os.set_inheritable(end.fileno(), True)
        code = (sys.executable, "-c", PRELUDE + source, str(end.fileno()))
        processes.append(Side(start(*code, inherit=True, GPUCR_INTERPOSER_DIR="/proc/nowhere")))
        end.close()
    assert [processes[0].line(), processes[1].line(), processes[1].line()] == ["ready", "41", "ready"]
    assert [is_interposed(each.pid) for each in processes] == [False, False]


def test_an_owner_whose_name_was_removed_can_share(pair: Pair, agents: Path) -> None:
    owner, opener = pair("stop()\n" + OWNER, "stop()\n" + OPENER)
    shutil.rmtree(agents)
    for side in (owner, opener):
        side.say()
    assert [side.line() for side in (owner, opener)] == ["ready"] * 2
    assert said(opener, "read") == "41"


def test_opened_memory_of_the_drivers_own_is_counted(pair: Pair) -> None:
    _, opener = pair(
        "link.send(ipc_handle(allocate(4096)))\nstop()",
        "pointer = ipc_open(link.recv(64))\nstop()\nassert cuda.cuIpcCloseMemHandle(pointer) == 0\nstop()",
    )
    with Agent(opener.pid) as agent:
        assert (agent.status().imported, agent.status().ipc_memory) == (0, 1)
        opener.say()
        assert opener.line() == "ready"
        assert agent.status().ipc_memory == 0

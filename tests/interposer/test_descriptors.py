"""Programs that close every descriptor and use the numbers again: no file of theirs is touched, and the agent lives."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gpucr.interposer.client import Agent
from gpucr.interposer.place import socket_path
from gpucr.interposer.protocol import MOST_BYTES, BadAnswer, Operation, Refused, request
from tests import command
from tests.counter import wait_until
from tests.interposer.conftest import PROGRAM, Job, Start, is_waiting, taken

MIB = 1 << 20
LIMIT = 160

# "close": all descriptors but the driver's, as daemons do; every number gets a file of the program's, and what the
# interposer did not have is free again. "files": whether they are what they were.
CLOSES = PROGRAM.replace(
    "    right = []\n",
    """
    if line.strip() == "close":
        before = {int(fd): os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
                  if os.path.lexists(f"/proc/self/fd/{fd}")}
        drivers = ("gpucr-sim", "userfaultfd", ".memory")
        ours = [fd for fd, path in before.items() if fd > 2 and not any(name in path for name in drivers)]
        ours += [fd for fd, path in before.items() if path.endswith(".memory") and fd >= HIGH]  # the blocks'
        for fd in ours:
            os.close(fd)
        files = []
        try:
            while True:
                files.append(os.open(f"{FOLDER}/{len(files)}", os.O_RDWR | os.O_CREAT))
        except OSError:
            pass
        for fd in [fd for fd in files if fd not in ours]:
            files.remove(fd)
            os.close(fd)
        for fd in set(ours) - set(files):  # the agent noticed at once, and has taken it again
            opened = os.open(f"{FOLDER}/again-{fd}", os.O_RDWR | os.O_CREAT)
            if opened != fd:
                os.dup2(opened, fd)
                os.close(opened)
            files.append(fd)
        known = {fd: os.fstat(fd).st_ino for fd in files}
        print(len(files), flush=True)
        continue
    if line.strip() == "files":
        for fd, inode in known.items():
            assert os.fstat(fd).st_ino == inode
            assert os.write(fd, b"data") == 4
        print("all", flush=True)
        continue
    right = []
""",
)


@pytest.fixture
def closing(start: Start, sim_only: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Job:
    monkeypatch.setenv("GPUCR_SIM_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("GPUCR_SIM_FIXED_COST_MS", "1")
    (tmp_path / "files").mkdir()
    code = CLOSES.replace("{FOLDER}", str(tmp_path / "files")).replace("HIGH", str(LIMIT // 2))
    process = start("prlimit", f"--nofile={LIMIT}:{LIMIT}", sys.executable, "-c", code, str(5 * MIB))
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "ready"
    return Job(process)


def test_an_agent_whose_descriptors_were_closed_still_serves(closing: Job) -> None:
    assert int(closing.say("close")) > 16
    wait_until(lambda: is_waiting(closing.pid), "the agent's poll")
    assert closing.say("files") == "all"
    with Agent(closing.pid) as agent:
        agent.give_back(taken(agent), renew=True)
        agent.open_gate()
    assert closing.is_right()
    assert closing.say("files") == "all"
    wait_until(lambda: is_waiting(closing.pid), "the agent's poll")
    assert socket_path(closing.pid).exists()


@pytest.mark.parametrize("moment", ["connected", "gate closed", "memory out"])
def test_descriptors_closed_under_a_client(closing: Job, moment: str) -> None:
    held = []
    with Agent(closing.pid) as agent:
        if moment == "gate closed":
            assert agent.close_gate(5).is_empty
        elif moment == "memory out":
            held = taken(agent)
        assert int(closing.say("close")) > 0
        with contextlib.suppress(OSError, BadAnswer):
            agent.status()
    with Agent(closing.pid) as agent:
        assert agent.status().gate_closed == (moment == "memory out")
        if held:
            agent.give_back(held, renew=True)
            agent.open_gate()
    assert closing.is_right()
    assert closing.say("files") == "all"


def test_memory_whose_descriptor_was_closed_is_known_to_stay(closing: Job) -> None:
    """It came back by that descriptor, and could leave by no other: so the driver must not get the process."""
    with Agent(closing.pid) as agent:
        agent.give_back(taken(agent), renew=False)
        agent.open_gate()
    closing.say("close")
    with Agent(closing.pid) as agent:
        status = agent.status()
        assert (status.foreign, status.captive, status.stuck) == (1, 1, 1)
    refused = command.run("suspend", closing.pid)
    assert (refused.returncode, "GPUCR-IMPORTED-MEMORY" in refused.stderr) == (3, True), refused.stderr
    assert closing.is_right()
    assert closing.say("files") == "all"


def test_a_kept_descriptor_that_was_closed_is_reported(closing: Job) -> None:
    with Agent(closing.pid) as agent:
        assert agent.close_gate(5).is_empty
        fd = os.memfd_create("kept")
        agent.keep(fd)
        os.close(fd)
    closing.say("close")
    with Agent(closing.pid) as agent:
        assert agent.status().gate_closed, "it must not run without its memory"
        with pytest.raises(Refused, match="closed by program"):
            agent.fetch()
        agent.keep(None)
    assert closing.is_right()
    assert closing.say("files") == "all"


def test_a_forked_child_closes_none_of_the_programs_files(closing: Job) -> None:
    closing.say("close")
    closing.process.stdin.write("fork\n")  # type: ignore[union-attr] # its child looks at what it has
    closing.process.stdin.flush()  # type: ignore[union-attr]
    assert closing.process.stdout is not None
    closing.process.stdout.readline()
    assert closing.say("files") == "all"


def count(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


@pytest.mark.parametrize("packet", [b"", b"x", request(Operation.HELLO)], ids=["no bytes", "garbage", "hello"])
@pytest.mark.parametrize("is_second", [False, True])
def test_no_packet_leaves_descriptors(job: Callable[..., Job], packet: bytes, is_second: bool) -> None:
    process = job(5 * MIB)
    before = count(process.pid)
    with contextlib.ExitStack() as opened, Path(os.devnull).open() as nothing:
        if is_second:
            client = opened.enter_context(Agent(process.pid))
            assert client.close_gate(5).is_empty
        for _ in range(5):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
                link.settimeout(10)
                link.connect(str(socket_path(process.pid)))
                socket.send_fds(link, [packet], [nothing.fileno()] * 100)
                assert bool(link.recv(MOST_BYTES)) == bool(packet)
    wait_until(lambda: count(process.pid) == before, lambda: f"{count(process.pid)} instead of {before} descriptors")
    assert process.is_right()

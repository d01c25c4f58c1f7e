"""Where the agent can be found: names that somebody else took or removed, and folders that it cannot have."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpucr.interposer.client import Agent, ask_status
from gpucr.interposer.place import socket_path
from tests.compiled import compiled_interposer
from tests.counter import wait_until
from tests.interposer.conftest import Job, Start
from tests.ordinary_user import CannotHaveUsers, OrdinaryUser, ordinary_user
from tests.sharing_programs import OPENER, OWNER, PRELUDE

MIB = 1 << 20


def test_an_agent_whose_folder_was_removed_listens_again(job: Callable[..., Job], agents: Path) -> None:
    process = job(5 * MIB)
    for _ in range(2):
        shutil.rmtree(agents)
        with Agent(process.pid) as agent:
            assert agent.status().blocks == 1
        assert socket_path(process.pid).exists()


@pytest.mark.parametrize("taken", ["found", "bound", "both"])
def test_an_agent_whose_name_was_taken_takes_it_back(job: Callable[..., Job], agents: Path, taken: str) -> None:
    process = job(5 * MIB)
    found, bound = sorted(agents.iterdir())
    for each in {"found": [found], "bound": [bound], "both": [found, bound]}[taken]:
        each.unlink()
        each.touch()
    with Agent(process.pid) as agent:
        assert agent.status().blocks == 1
    with Agent(process.pid):
        assert socket_path(process.pid).is_socket()


def test_names_are_not_needed_by_a_program_that_overwrote_its_environment(start: Start, sim_only: None) -> None:
    code = """
import ctypes, sys
cuda, libc = ctypes.CDLL("libcuda.so.1"), ctypes.CDLL(None)
assert cuda.cuInit(0) == 0
fields = open("/proc/self/stat").read().rpartition(") ")[2].split()
begin, end = int(fields[47]), int(fields[48])
ctypes.memset(begin, 0, end - begin)
print("ready", flush=True)
sys.stdin.readline()
"""
    process = start(sys.executable, "-c", code)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    assert not socket_path(process.pid).exists(), "its environment does not tell the folder"
    status = ask_status(process.pid)
    assert status is not None


# --- another user has the folder ------------------------------------------------------------------------------------


PAIR = """
import os, socket, subprocess, sys
prelude, owner, opener = sys.argv[1:4]
sockets = socket.socketpair()
sides = []
for end, code in zip(sockets, (owner, opener)):
    os.set_inheritable(end.fileno(), True)
    command = [sys.executable, "-c", prelude + code, str(end.fileno())]
    pipe = subprocess.PIPE
    sides.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, close_fds=False))
for side in sides:
    assert side.stdout.readline() == "ready\\n"
sides[1].stdin.write("read\\n")
sides[1].stdin.flush()
print(sides[1].stdout.readline().strip(), *[side.pid for side in sides], flush=True)
os.read(os.open("go-on", os.O_RDONLY), 1)
for side in sides:
    side.communicate("end\\n")
print(*[side.returncode for side in sides])
"""


@pytest.fixture
def victim() -> Iterator[OrdinaryUser]:
    """A user whose folder in /tmp belongs to another one."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to be another user")
    try:
        with ordinary_user() as user:
            folder = Path(tempfile.gettempdir(), f"gpucr-interposer-{user.uid}")
            folder.mkdir(mode=0o777)
            try:
                yield user
            finally:
                shutil.rmtree(folder)
    except CannotHaveUsers as e:
        pytest.skip(str(e))


def test_the_folder_of_another_user_breaks_nothing(victim: OrdinaryUser, sim_only: None) -> None:
    library = victim.home / "libgpucr-interposer.so"
    shutil.copyfile(compiled_interposer(), library)
    library.chmod(0o755)
    os.mkfifo(victim.home / "go-on")
    os.chown(victim.home / "go-on", victim.uid, victim.uid)
    victim.environment["LD_PRELOAD"] = str(library)
    pid = victim.start(sys.executable, "-c", PAIR, PRELUDE, OWNER, OPENER)
    out = victim.home / "out"
    wait_until(lambda: "\n" in out.read_text() or not Path(f"/proc/{pid}").exists(), "the two programs")
    read, *pids = out.read_text().split()
    assert (read, len(pids)) == ("41", 2), out.read_text()
    with Agent(int(pids[0])) as agent:
        assert agent.status().blocks > 0, "their memory can leave"
    (victim.home / "go-on").write_text("x")
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), "their end")
    assert out.read_text().splitlines()[1:] == ["0 0"]
    left = [each.name for each in Path(tempfile.gettempdir()).glob(f"gpucr-interposer-{victim.uid}*")]
    assert left == [f"gpucr-interposer-{victim.uid}"]

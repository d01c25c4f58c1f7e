"""Fork, exec, dlclose, an exit and a lack of descriptors, in programs under the interposer."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from gpucr.interposer.client import Agent, Held
from tests.interposer.conftest import Start
from tests.interposer.test_allocations import Run

MIB = 1 << 20
CALLS = """
import os, subprocess, threading
def write(pointer, data):
    assert cuda.cuMemcpyHtoD_v2(pointer, data, size_t(len(data))) == 0
def read(pointer, size):
    part = ctypes.create_string_buffer(size)
    assert cuda.cuMemcpyDtoH_v2(part, pointer, size_t(size)) == 0
    return part.raw
"""


@pytest.fixture(autouse=True)
def own_machine(sim_only: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GPUCR_SIM_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("GPUCR_SIM_FIXED_COST_MS", "1")


def begin(start: Start, source: str) -> Run:
    run = Run(start, CALLS + source)
    assert run.line() == "ready"
    return run


def taken(agent: Agent) -> list[Held]:
    assert agent.close_gate(5).is_empty
    held = [each for batch in agent.export() for each in batch]
    agent.drop()
    return held


def test_a_frozen_program_forks_and_starts_others(start: Start) -> None:
    run = begin(
        start,
        """
pointer = allocate(2 * MIB)
write(pointer, b"abc")
stop()
child = os.fork()
if child == 0:
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), subprocess.run(["true"]).returncode, flush=True)
print(read(pointer, 3).decode())
""",
    )
    with Agent(run.pid) as agent:
        held = taken(agent)
        run.go_on()
        assert run.line() == "7 0"
        agent.give_back(held, renew=True)
        agent.open_gate()
    assert run.line() == "abc"


def test_after_exec_only_the_new_programs_memory_counts(start: Start) -> None:
    run = begin(
        start,
        """
if len(sys.argv) == 1:
    allocate(2 * MIB)
    stop()
    os.execv(sys.executable, [sys.executable, "-c", sys.orig_argv[2], "again"])
allocate(6 * MIB)
stop()
""",
    )
    with Agent(run.pid) as agent:
        assert agent.status().block_bytes == 2 * MIB
    run.go_on()
    assert run.line() == "ready"
    with Agent(run.pid) as agent:
        assert agent.status().block_bytes == 6 * MIB


def test_closing_the_drivers_library_keeps_the_memory(start: Start) -> None:
    run = begin(
        start,
        """
pointer = allocate(2 * MIB)
write(pointer, b"abc")
ctypes.CDLL(None).dlclose(ctypes.c_void_p(cuda._handle))
stop()
print(read(pointer, 3).decode())
""",
    )
    with Agent(run.pid) as agent:
        agent.give_back(taken(agent), renew=True)
        agent.open_gate()
    run.go_on()
    assert run.line() == "abc"


def test_a_program_without_free_descriptors_is_frozen_and_thawed(start: Start) -> None:
    run = begin(
        start,
        """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
pointers = [allocate(2 * MIB) for _ in range(5)]
write(pointers[4], b"abc")
opened = []
try:
    while True:
        opened.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    print("ready", flush=True)
sys.stdin.readline()
print(read(pointers[4], 3).decode(), flush=True)
print("ready", flush=True)
sys.stdin.readline()
write(pointers[4], b"def")
""",
    )
    with Agent(run.pid) as agent:
        agent.give_back(taken(agent), renew=True)
        agent.open_gate()
        run.go_on()
        assert (run.line(), run.line()) == ("abc", "ready")
        held = taken(agent)
        made = [each for batch in agent.create([each.block for each in held]) for each in batch]
        assert [each.block for each in made] == [each.block for each in held]
        for each in (*held, *made):
            each.close()
        assert agent.status().away == 0


def test_a_free_waits_while_the_program_is_frozen(start: Start) -> None:
    run = begin(
        start,
        """
pointers = [allocate(2 * MIB) for _ in range(2)]
stop()
def free():
    print("frees", flush=True)
    print(cuda.cuMemFree_v2(pointers[0]), flush=True)
thread = threading.Thread(target=free)
thread.start()
thread.join()
stop()
""",
    )
    with Agent(run.pid) as agent:
        held = taken(agent)
        run.go_on()
        assert run.line() == "frees"
        assert agent.status().away == 2
        agent.give_back(held, renew=True)
        agent.open_gate()
        assert (run.line(), run.line()) == ("0", "ready")
        assert agent.status().blocks == 1


def test_a_program_that_exits_while_frozen_ends_after_the_thaw(start: Start) -> None:
    run = begin(
        start,
        """
import atexit
pointer = allocate(2 * MIB)
write(pointer, bytes(range(256)) * 16)
def at_exit():
    print("ends", flush=True)
    import hashlib
    print(hashlib.sha256(read(pointer, 4096)).hexdigest(), flush=True)
atexit.register(at_exit)
stop()
""",
    )
    with Agent(run.pid) as agent:
        held = taken(agent)
        run.go_on()
        assert run.line() == "ends"
        agent.give_back(held, renew=True)
        agent.open_gate()
    assert (run.line(), run.process.wait(10)) == (hashlib.sha256(bytes(range(256)) * 16).hexdigest(), 0)

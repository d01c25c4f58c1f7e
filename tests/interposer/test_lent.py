"""Device memory that gpucr holds while a program runs: a call that finds none waits until it is let go."""

from __future__ import annotations

import socket
import sys
import threading

import pytest

from gpucr.gpu_state.interposed.lending import Lending
from gpucr.interposer.client import Agent
from gpucr.interposer.protocol import Code, Refused
from tests.interposer.conftest import Start

pytestmark = pytest.mark.usefixtures("sim_only")

PROGRAM = """
import ctypes, sys
cuda, pointer, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_uint64(), ctypes.c_void_p()
assert cuda.cuInit(0) == cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == cuda.cuCtxSetCurrent(context) == 0
print("ready", flush=True)
for line in sys.stdin:
    print(cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(4 << 20)), flush=True)
"""
FULL_ONCE = {"GPUCR_SIM_FAULTS": "create#1=2"}


class Program:
    """It allocates on each line, and says the driver's result; the first one is out of memory."""

    def __init__(self, start: Start, **environment: str) -> None:
        self._process = start(sys.executable, "-c", PROGRAM, **environment)
        self.pid = self._process.pid
        assert self.read() == "ready"

    def ask(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


def test_without_anything_lent_it_fails_at_once(start: Start) -> None:
    program = Program(start, **FULL_ONCE)
    program.ask()
    assert program.read() == "2"
    program.ask()
    assert program.read() == "0"


def test_it_waits_until_memory_was_let_go(start: Start) -> None:
    program, let_go, may_end = Program(start, **FULL_ONCE), threading.Event(), threading.Event()

    def free() -> None:
        let_go.set()
        may_end.wait(30)

    lending = Lending(free)
    with Agent(program.pid) as agent:
        lending.lend(agent)
        program.ask()
        assert let_go.wait(30)
        assert agent.close_gate(0).inside == 1, "the call is not over"
        agent.open_gate()
        may_end.set()
        assert program.read() == "0"
        assert lending.was_called
    lending.end()


def test_the_other_end_is_closed(start: Start) -> None:
    program = Program(start, **FULL_ONCE)
    ours, theirs = socket.socketpair()
    with Agent(program.pid) as agent:
        agent.lend(theirs.fileno())
        theirs.close()
        ours.close()
        program.ask()
        assert program.read() == "0"


@pytest.mark.parametrize("how", ["hang up", "nothing any more"])
def test_the_program_keeps_no_socket(start: Start, how: str) -> None:
    program = Program(start)
    ours, theirs = socket.socketpair()
    ours.settimeout(30)
    with Agent(program.pid) as agent:
        agent.lend(theirs.fileno())
        theirs.close()
        if how == "hang up":
            agent.hang_up()
        else:
            agent.lend(None)
        assert ours.recv(1) == b""
    ours.close()


def test_memory_is_shown_while_the_program_uses_it(start: Start) -> None:
    program = Program(start)
    for _ in range(3):
        program.ask()
        assert program.read() == "0"
    with Agent(program.pid) as agent:
        shown = [each for batch in agent.show() for each in batch]
        assert [each.block.size_bytes for each in shown] == [4 << 20] * 3
        program.ask()
        assert program.read() == "0", "the gate is open"
        with pytest.raises(Refused) as refused:
            agent.drop()
        assert refused.value.code == Code.GATE_NOT_CLOSED
        assert agent.close_gate(5).is_empty
        agent.drop()
        assert agent.status().away == 0, "what was only shown does not leave"
        for each in shown:
            each.close()

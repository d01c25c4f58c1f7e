"""A program's view of its memory under the interposer, on the simulated driver."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gpucr.interposer.client import Agent
from gpucr.sim.build import build
from tests.interposer.conftest import NATIVE, Start

PRELUDE = """
import ctypes, sys
cuda = ctypes.CDLL("libcuda.so.1")
u64, size_t, byref = ctypes.c_uint64, ctypes.c_size_t, ctypes.byref
def context(device=0):
    handle = ctypes.c_void_p()
    assert cuda.cuDevicePrimaryCtxRetain(byref(handle), device) == 0 and cuda.cuCtxSetCurrent(handle) == 0
    return handle
def allocate(size):
    pointer = u64()
    assert cuda.cuMemAlloc_v2(byref(pointer), size_t(size)) == 0
    return pointer
def stop():
    print("ready", flush=True)
    sys.stdin.readline()
cuda.cuInit(0)
context()
MIB = 1 << 20
"""


@pytest.fixture(autouse=True)
def own_machine(sim_only: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GPUCR_SIM_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("GPUCR_SIM_PEERS", "1")


class Run:
    """A program that stops where it says so."""

    def __init__(self, start: Start, source: str) -> None:
        self.process = start(sys.executable, "-c", PRELUDE + source)
        self.pid = self.process.pid

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()


def test_memory_freed_during_a_capture_is_released_after_it(start: Start) -> None:
    run = Run(
        start,
        """
pointer, stream, graph = allocate(4 * MIB), ctypes.c_void_p(), ctypes.c_void_p()
assert cuda.cuStreamCreate(byref(stream), 1) == 0
assert cuda.cuStreamBeginCapture_v2(stream, 0) == 0
assert cuda.cuMemFree_v2(pointer) == 0
print(cuda.cuMemFree_v2(pointer))
stop()
print(cuda.cuStreamEndCapture(stream, byref(graph)))
allocate(4096)
stop()
""",
    )
    assert (run.line(), run.line()) == ("1", "ready")
    with Agent(run.pid) as agent:
        assert (agent.status().captures, agent.status().blocks) == (1, 1)
        run.go_on()
        assert (run.line(), run.line()) == ("0", "ready")  # not spoilt
        assert (agent.status().captures, agent.status().blocks) == (0, 0)


def test_a_destroyed_contexts_memory_is_released(start: Start) -> None:
    run = Run(
        start,
        """
first, other = context(), ctypes.c_void_p()
allocate(4 * MIB)
assert cuda.cuCtxCreate_v2(byref(other), 0, 0) == 0
pointer = allocate(6 * MIB)
assert cuda.cuCtxDestroy_v2(other) == 0
assert cuda.cuCtxSetCurrent(first) == 0
print(cuda.cuMemFree_v2(pointer))
stop()
""",
    )
    assert (run.line(), run.line()) == ("1", "ready")
    with Agent(run.pid) as agent:
        assert (agent.status().blocks, agent.status().block_bytes) == (1, 4 << 20)


def test_the_programs_handles_survive_a_freeze(start: Start) -> None:
    run = Run(
        start,
        """
properties = (ctypes.c_int * 8)(1, 0, 1, 0)
handle, again, address, told = u64(), u64(), u64(), (ctypes.c_int * 8)()
access = (ctypes.c_int * 3)(1, 0, 3)
assert cuda.cuMemCreate(byref(handle), size_t(2 * MIB), properties, u64(0)) == 0
assert cuda.cuMemAddressReserve(byref(address), size_t(2 * MIB), size_t(0), u64(0), u64(0)) == 0
assert cuda.cuMemMap(address, size_t(2 * MIB), size_t(0), handle, u64(0)) == 0
assert cuda.cuMemSetAccess(address, size_t(2 * MIB), access, size_t(1)) == 0
assert cuda.cuMemcpyHtoD_v2(address, b"abc", size_t(3)) == 0
stop()
part = ctypes.create_string_buffer(3)
assert cuda.cuMemcpyDtoH_v2(part, address, size_t(3)) == 0
print(part.raw.decode(), cuda.cuMemRetainAllocationHandle(byref(again), ctypes.c_void_p(address.value)))
print(again.value == handle.value, cuda.cuMemGetAllocationPropertiesFromHandle(told, handle), list(told)[:4])
print(cuda.cuMemRelease(again), cuda.cuMemRelease(handle), cuda.cuMemRelease(handle))
print(cuda.cuMemUnmap(address, size_t(2 * MIB)), cuda.cuMemRetainAllocationHandle(byref(again), None))
print(cuda.cuMemAddressFree(address, size_t(2 * MIB)))
stop()
""",
    )
    assert run.line() == "ready"
    with Agent(run.pid) as agent:
        assert agent.close_gate(5).is_empty
        held = [each for batch in agent.export() for each in batch]
        agent.drop()
        agent.give_back(held, renew=True)
        agent.open_gate()
        run.go_on()
        assert [run.line() for _ in range(5)] == ["abc 0", "True 0 [1, 0, 1, 0]", "0 0 1", "0 1", "0"]
        assert run.line() == "ready"
        assert agent.status().blocks == 0


def test_memory_left_to_the_driver_is_counted(start: Start) -> None:
    run = Run(
        start,
        """
pointer = u64()
small = [allocate(1000) for _ in range(3)]
assert cuda.cuMemFree_v2(small.pop()) == 0
assert cuda.cuMemAllocManaged(byref(pointer), size_t(5000), 1) == 0
first, second = context(0), context(1)
assert cuda.cuCtxEnablePeerAccess(first, 0) == 0
stop()
""",
    )
    assert run.line() == "ready"
    with Agent(run.pid) as agent:
        status = agent.status()
    assert (status.small, status.small_bytes, status.managed, status.managed_bytes) == (2, 2000, 1, 5000)
    assert (status.peer_access, status.blocks) == (1, 0)


def test_peer_access_covers_earlier_and_later_memory_and_is_restored(start: Start) -> None:
    run = Run(
        start,
        """
first = context(0)
before = allocate(2 * MIB)
context(1)
own = allocate(2 * MIB)
assert cuda.cuCtxEnablePeerAccess(first, 0) == 0
assert cuda.cuCtxSetCurrent(first) == 0
after = allocate(2 * MIB)
print(cuda.cuCtxSetCurrent(first))
stop()
""",
    )
    assert (run.line(), run.line()) == ("0", "ready")
    with Agent(run.pid) as agent:
        assert agent.close_gate(5).is_empty
        held = [each for batch in agent.export() for each in batch]
        assert [each.block.location for each in held] == [0, 1, 0]
        agent.drop()
        made = [each for batch in agent.create([each.block for each in held]) for each in batch]
        for each in (*held, *made):
            each.close()
        assert (agent.status().away, agent.status().blocks) == (0, 3)


def test_a_program_linked_with_libcuda(start: Start, tmp_path: Path) -> None:
    program, simulator = tmp_path / "linked", build()
    subprocess.run(
        ["cc", "-o", str(program), str(NATIVE / "linked.c"), str(simulator / "libcuda.so.1")], check=True, timeout=60
    )
    process = start(str(program))
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "ready"
    with Agent(process.pid) as agent:
        assert agent.close_gate(5).is_empty
        assert agent.status().blocks == 1
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.wait(10) == 0

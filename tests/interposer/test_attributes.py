"""Attributes that libraries inspect, and memory that stays with the driver, under the interposer."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpucr.interposer.client import Agent, Held
from gpucr.interposer.protocol import BadAnswer, Flag
from tests.interposer.conftest import Start
from tests.interposer.test_allocations import Run
from tests.sim.libcuda import Libcuda

MIB = 1 << 20
CALLS = """
def tell(attribute, pointer):
    value = u64()
    result = cuda.cuPointerGetAttribute(byref(value), attribute, u64(pointer))
    return value.value if result == 0 else -result
def create(kind=1, handles=1):
    handle = u64()
    assert cuda.cuMemCreate(byref(handle), size_t(2 * MIB), (ctypes.c_int * 8)(1, handles, kind, 0), u64(0)) == 0
    return handle
def show(handle):
    address = u64()
    assert cuda.cuMemAddressReserve(byref(address), size_t(2 * MIB), size_t(0), u64(0), u64(0)) == 0
    assert cuda.cuMemMap(address, size_t(2 * MIB), size_t(0), handle, u64(0)) == 0
    assert cuda.cuMemSetAccess(address, size_t(2 * MIB), (ctypes.c_int * 3)(1, 0, 3), size_t(1)) == 0
    return address
"""


@pytest.fixture(autouse=True)
def own_machine(sim_only: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GPUCR_SIM_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("GPUCR_SIM_FIXED_COST_MS", "1")


def begin(start: Start, source: str) -> Run:
    return Run(start, CALLS + source)


def cycle(run: Run) -> None:
    """Take memory out of the process, through the driver's checkpoint, and back."""
    driver = Libcuda()
    with Agent(run.pid) as agent:
        assert agent.close_gate(5).is_empty
        held = [each for batch in agent.export() for each in batch]
        agent.drop(imported_too=True)
        driver.suspend(run.pid)
        driver.resume(run.pid)
        agent.give_back(held, renew=True)
        agent.open_gate()


def test_pointers_look_like_the_drivers_own(start: Start) -> None:
    run = begin(
        start,
        """
first, second = allocate(3 * MIB), allocate(3 * MIB)
def look(pointer):
    inner = pointer.value + 2 * MIB
    print(tell(10, inner), tell(11, inner) == pointer.value, tell(12, inner), tell(14, inner), tell(15, inner),
          tell(18, inner), tell(1, inner) == context().value, tell(2, inner), tell(9, inner))
identity = tell(7, first.value + MIB)
print(identity == tell(7, first.value), identity == tell(7, second.value), tell(14, show(create(handles=0)).value))
look(first)
stop()
look(first)
print(identity == tell(7, first.value))
""",
    )
    look = f"1 True {3 * MIB} 0 1 {3 * MIB} True 2 0"
    assert [run.line() for _ in range(3)] == ["True False 0", look, "ready"]
    cycle(run)
    run.go_on()
    assert [run.line() for _ in range(2)] == [look, "True"]


def test_synchronous_copies_wait_where_requested(start: Start) -> None:
    run = begin(
        start,
        """
pointer, small, on, off = allocate(2 * MIB), allocate(1000), ctypes.c_uint(1), ctypes.c_uint(0)
values = []
for value in (on, off, on):
    values += [cuda.cuPointerSetAttribute(byref(value), 6, pointer), tell(6, pointer.value)]
print(*values, cuda.cuPointerSetAttribute(byref(on), 6, small), cuda.cuPointerSetAttribute(byref(on), 2, pointer))
stream, module, function, duration = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p(), u64(200_000_000)
assert cuda.cuStreamCreate(byref(stream), 1) == 0
ptx = b".version 7.0 .target sm_75 .visible .entry gpucr_spin(.param .u64 ns)"
assert cuda.cuModuleLoadData(byref(module), ptx) == 0
assert cuda.cuModuleGetFunction(byref(function), module, b"gpucr_spin") == 0
parameters = (ctypes.c_void_p * 1)(ctypes.addressof(duration))
assert cuda.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, parameters, None) == 0
print(cuda.cuMemcpyHtoD_v2(pointer, b"abc", size_t(3)), cuda.cuStreamQuery(stream))
""",
    )
    assert [run.line(), run.line()] == ["0 1 0 0 0 1 0 1", "0 0"]


def test_memory_with_a_dma_buf_stays_while_the_dma_buf_exists(start: Start) -> None:
    run = begin(
        start,
        """
pointer, other, small, fd = allocate(2 * MIB), allocate(2 * MIB), allocate(1000), ctypes.c_int()
for registered, size in ((pointer, 2 * MIB), (small, 1000)):
    assert cuda.cuMemGetHandleForAddressRange(byref(fd), registered, size_t(size), 1, u64(0)) == 0
stop()
assert cuda.cuMemFree_v2(pointer) == 0 and cuda.cuMemFree_v2(small) == 0
stop()
""",
    )
    assert run.line() == "ready"
    with Agent(run.pid) as agent:
        status = agent.status()
        assert (status.dma_buf, status.stuck, status.blocks) == (2, 1, 1)
        assert [each.flags for each in agent.blocks()] == [Flag.CANNOT_LEAVE, Flag(0)]
        run.go_on()
        assert run.line() == "ready"
        assert (agent.status().dma_buf, agent.status().stuck) == (0, 0)


def test_host_memory_leaves_and_is_restored(start: Start) -> None:
    run = begin(
        start,
        """
handle = create(kind=3)
address = show(handle)
ctypes.memmove(address.value, b"abc", 3)
stop()
print(ctypes.string_at(address.value, 3).decode())
""",
    )
    assert run.line() == "ready"
    with Agent(run.pid) as agent:
        assert [(each.location_type, each.flags) for each in agent.blocks()] == [(3, Flag(0))]
    cycle(run)
    run.go_on()
    assert run.line() == "abc"


def test_multicast_is_recognised_and_memory_bound_to_it_stays(start: Start) -> None:
    run = begin(
        start,
        """
group, memory, other, free = u64(), create(), create(), create()
address = show(other)
assert cuda.cuMulticastCreate(byref(group), (ctypes.c_uint64 * 4)(1, 2 * MIB, 1, 0)) == 0
assert cuda.cuMulticastAddDevice(group, 0) == 0
assert cuda.cuMulticastBindMem(group, size_t(0), memory, size_t(0), size_t(2 * MIB), u64(0)) == 0
assert cuda.cuMulticastBindAddr(group, size_t(0), address, size_t(2 * MIB), u64(0)) == 0
stop()
assert cuda.cuMulticastUnbind(group, 0, size_t(0), size_t(2 * MIB)) == 0
assert cuda.cuMemRelease(group) == 0
print(cuda.cuMemRelease(group))
stop()
""",
    )
    assert run.line() == "ready"
    with Agent(run.pid) as agent:
        status = agent.status()
        assert (status.multicast, status.stuck, status.blocks, status.imported) == (1, 2, 1, 0)
        assert [each.flags for each in agent.blocks()] == [
            Flag.CANNOT_LEAVE, Flag.CANNOT_LEAVE, Flag(0), Flag.CANNOT_LEAVE | Flag.MULTICAST
        ]  # fmt: skip
        run.go_on()
        assert (run.line(), run.line()) == ("1", "ready")
        assert agent.status().multicast == 0


def test_memory_is_freed_in_stream_order(start: Start) -> None:
    run = begin(
        start,
        """
own, pooled = allocate(2 * MIB), u64()
assert cuda.cuMemAllocAsync(byref(pooled), size_t(5 * MIB), None) == 0
stop()
print(cuda.cuMemFreeAsync(own, None), cuda.cuMemFreeAsync(own, None), cuda.cuMemFreeAsync(pooled, None))
stop()
""",
    )
    assert run.line() == "ready"
    with Agent(run.pid) as agent:
        assert (agent.status().blocks, agent.status().pool_allocations) == (1, 1)
        run.go_on()
        assert (run.line(), run.line()) == ("0 1 0", "ready")
        assert (agent.status().blocks, agent.status().pool_allocations) == (0, 0)


def test_memory_not_created_exportable_is_not_exported(start: Start) -> None:
    run = begin(
        start,
        """
fd = ctypes.c_int()
print(*[cuda.cuMemExportToShareableHandle(byref(fd), create(handles=kind), 1, u64(0)) for kind in (0, 1)])
""",
    )
    assert run.line() == "1 0"


def test_a_device_reset_frees_its_memory(start: Start) -> None:
    run = begin(
        start,
        """
first, other = context(), ctypes.c_void_p()
allocate(4 * MIB)
assert cuda.cuCtxCreate_v2(byref(other), 0, 0) == 0
kept = allocate(6 * MIB)
assert cuda.cuDevicePrimaryCtxReset_v2(0) == 0
assert cuda.cuCtxSetCurrent(other) == 0
stop()
print(cuda.cuMemcpyHtoD_v2(kept, b"x", size_t(1)))
context()
allocate(2 * MIB)
stop()
""",
    )
    assert run.line() == "ready"
    with Agent(run.pid) as agent:
        assert (agent.status().blocks, agent.status().block_bytes) == (1, 6 * MIB)
    cycle(run)
    run.go_on()
    assert (run.line(), run.line()) == ("0", "ready")
    with Agent(run.pid) as agent:
        assert agent.status().blocks == 2


def test_large_allocations_are_restored_chunk_by_chunk(start: Start) -> None:
    run = begin(
        start,
        """
pointer = allocate(2500 * MIB)
for at in (0, 1500, 2499):
    assert cuda.cuMemcpyHtoD_v2(u64(pointer.value + at * MIB), at.to_bytes(4, "little"), size_t(4)) == 0
stop()
part = ctypes.create_string_buffer(4)
for at in (0, 1500, 2499):
    assert cuda.cuMemcpyDtoH_v2(part, u64(pointer.value + at * MIB), size_t(4)) == 0
    print(int.from_bytes(part.raw, "little"))
""",
    )
    assert run.line() == "ready"
    with Agent(run.pid) as agent:
        assert agent.close_gate(5).is_empty
        held = [each for batch in agent.export() for each in batch]
        assert [each.block.size_bytes // MIB for each in held] == [1024, 1024, 452]
        agent.drop()
        for number, each in enumerate(held):
            agent.give_back([each], renew=number == 2)
            assert (agent.status().away, agent.status().foreign) == (2 - number, min(number + 1, 2))
        agent.open_gate()
    run.go_on()
    assert [run.line() for _ in range(3)] == ["0", "1500", "2499"]


def test_a_freeze_covers_contexts_on_two_devices_and_two_on_one(start: Start) -> None:
    run = begin(
        start,
        """
other = ctypes.c_void_p()
pointers = [allocate(2 * MIB)]
assert cuda.cuCtxCreate_v2(byref(other), 0, 0) == 0
pointers.append(allocate(2 * MIB))
contexts = [context(0), other, context(1)]
pointers.append(allocate(2 * MIB))
for number, pointer in enumerate(pointers):
    assert cuda.cuMemcpyHtoD_v2(pointer, bytes([number + 1]), size_t(1)) == 0
stop()
part = ctypes.create_string_buffer(1)
for each, pointer in zip(contexts, pointers):
    assert cuda.cuCtxSetCurrent(each) == 0
    print(cuda.cuMemcpyDtoH_v2(part, pointer, size_t(1)), part.raw[0], tell(9, pointer.value))
""",
    )
    assert run.line() == "ready"
    cycle(run)
    run.go_on()
    assert [run.line() for _ in range(3)] == ["0 1 0", "0 2 0", "0 3 1"]


def test_a_program_killed_while_frozen_leaves_only_memory_held_outside(start: Start) -> None:
    run = begin(start, "pointer = allocate(2 * MIB)\nstop()")
    assert run.line() == "ready"
    with Agent(run.pid) as agent:
        assert agent.close_gate(5).is_empty
        held: list[Held] = [each for batch in agent.export() for each in batch]
        agent.drop()
        run.process.kill()
        assert run.process.wait(10) == -9
        with pytest.raises((OSError, BadAnswer), match=r"hung up|Broken pipe|reset"):
            agent.status()
    assert [Path(f"/proc/self/fd/{each.descriptor}").exists() for each in held] == [True]
    for each in held:
        each.close()

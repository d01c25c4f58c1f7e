"""Custom storage of CUDA 13.4, which no machine at hand has: what its documentation says, and what we assume beyond it.

A test's name says which: ``documented`` or ``assumed``. tests/sim/README.md has the same two lists.
"""

from __future__ import annotations

import os

import pytest

from tests.counter import Counter, CounterFactory, wait_until
from tests.sim.libcuda import CHECKPOINTED, LOCKED, RUNNING, Libcuda, RunProgram, used_bytes

CHECKPOINTING, RESTORING = 4, 5
PRELUDE = """
target = int(os.environ["TARGET"])
class Device(ctypes.Structure):
    _fields_ = [("pointer", u64), ("size", ctypes.c_size_t), ("stream", ctypes.c_void_p)]
class Info(ctypes.Structure):
    _fields_ = [("handle", ctypes.c_void_p), ("devices", ctypes.POINTER(Device)), ("count", ctypes.c_uint)]
def find(name, version=13040):
    function, status = ctypes.c_void_p(), ctypes.c_int()
    result = cuda.cuGetProcAddress_v2(name.encode(), byref(function), version, u64(0), byref(status))
    return result, function.value
def call(name, *arguments):
    result, address = find(name)
    assert result == 0 and address, name
    return ctypes.CFUNCTYPE(ctypes.c_int, *[type(each) for each in arguments])(address)(*arguments)
def state(pid=target):
    value = ctypes.c_int(-1)
    return cuda.cuCheckpointProcessGetState(pid, byref(value)), value.value
info = ctypes.POINTER(Info)()
def checkpoint(pid=target, reserved=bytes(56)):
    arguments = ctypes.create_string_buffer(ctypes.addressof(info).to_bytes(8, "little") + reserved, 64)
    return call("cuCheckpointProcessCheckpoint", ctypes.c_int(pid), ctypes.c_void_p(ctypes.addressof(arguments)))
def restore(pid=target, pairs=b""):
    buffer = ctypes.create_string_buffer(pairs, max(1, len(pairs)))
    head = ctypes.addressof(buffer).to_bytes(8, "little") if pairs else bytes(8)
    head += (len(pairs) // 32).to_bytes(8, "little") + ctypes.addressof(info).to_bytes(8, "little")
    arguments = ctypes.create_string_buffer(head, 64)
    return call("cuCheckpointProcessRestore", ctypes.c_int(pid), ctypes.c_void_p(ctypes.addressof(arguments)))
def complete(handle=None):
    return call("cuCheckpointOperationComplete", ctypes.c_void_p(handle or info.contents.handle))
def entries():
    return [info.contents.devices[number] for number in range(info.contents.count)]
def take():
    kept = []
    for each in entries():
        buffer = ctypes.create_string_buffer(each.size)
        assert cuda.cuMemcpyDtoH_v2(buffer, u64(each.pointer), ctypes.c_size_t(each.size)) == 0
        kept.append(buffer)
    return kept
def put(kept):
    for each, buffer in zip(entries(), kept, strict=True):
        assert cuda.cuMemcpyHtoD_v2(u64(each.pointer), buffer, ctypes.c_size_t(each.size)) == 0
def ready(*devices):
    assert cuda.cuInit(0) == 0
    for device in devices:
        context(device)
"""

RunCaller = RunProgram


@pytest.fixture
def target(counter: CounterFactory) -> Counter:
    """A program with memory on two GPUs."""
    return counter("--mib", "3", "--devices", "0,1")


@pytest.fixture
def caller(run_program: RunProgram) -> RunCaller:
    """Run a program against a target on the simulated driver 615: ``caller(target, source)``."""

    def run(on: Counter, source: str, **variables: str) -> list[str]:
        return run_program(PRELUDE + source, TARGET=str(on.pid), **{"GPUCR_SIM_DRIVER": "615", **variables})

    return run


def test_documented_a_round_trip_over_two_gpus(libcuda: Libcuda, caller: RunCaller, target: Counter) -> None:
    assert target.ask() == 101
    libcuda.lock(target.pid)
    held = used_bytes(target.pid)
    source = """
ready(0, 1)
print(checkpoint(), state()[1], info.contents.count)
device = ctypes.c_int(-1)
for each in entries():
    assert cuda.cuStreamGetDevice(ctypes.c_void_p(each.stream), byref(device)) == 0
    print(device.value, each.size)
kept = take()
print(complete(), state()[1])
print(restore(), state()[1], [each.size for each in entries()] == [len(each) for each in kept])
put(kept)
print(complete(), state()[1])
"""
    lines = caller(target, source)
    assert lines[0] == f"0 {CHECKPOINTING} 2"
    assert lines[1:3] == [f"{number} {size}" for number, size in enumerate(held)]
    assert lines[3:] == [f"0 {CHECKPOINTED}", f"0 {RESTORING} True", f"0 {LOCKED}"]
    assert libcuda.act("unlock", target.pid) == 0
    assert (target.ask(), target.send("verify")) == (102, "ok")


def test_documented_memory_leaves_its_gpus_with_complete(libcuda: Libcuda, caller: RunCaller, target: Counter) -> None:
    libcuda.lock(target.pid)
    source = """
ready(0, 1)
assert checkpoint() == 0
def hardware():
    names = [os.readlink(f"/proc/{target}/fd/{number}") for number in os.listdir(f"/proc/{target}/fd")]
    return sum("userfaultfd" in name for name in names)
print(hardware())
complete()
print(hardware())
"""
    assert caller(target, source) == ["1", "0"]
    assert used_bytes(target.pid) == [0, 0]


def test_documented_one_entry_for_each_gpu_with_data(
    libcuda: Libcuda, caller: RunCaller, counter: CounterFactory
) -> None:
    one = counter("--mib", "3", "--devices", "1")
    libcuda.lock(one.pid)
    source = """
ready(1)
device = ctypes.c_int(-1)
print(checkpoint(), info.contents.count, cuda.cuStreamGetDevice(ctypes.c_void_p(entries()[0].stream), byref(device)))
print(device.value, complete())
"""
    assert caller(one, source) == ["0 1 0", "1 0"]


def test_documented_the_caller_needs_cuinit_and_every_primary_context(
    libcuda: Libcuda, caller: RunCaller, target: Counter
) -> None:
    libcuda.lock(target.pid)
    source = """
print(checkpoint())
ready(0)
print(checkpoint(), state()[1])
context(1)
print(checkpoint(), complete())
assert cuda.cuDevicePrimaryCtxRelease_v2(0) == 0
print(restore(), state()[1])
context(0)
print(restore(), complete())
"""
    assert caller(target, source) == ["3", f"201 {LOCKED}", "0 0", f"201 {CHECKPOINTED}", "0 0"]


def test_documented_only_cugetprocaddress_returns_the_interface(caller: RunCaller, target: Counter) -> None:
    source = """
print([find(name)[0] for name in ("cuCheckpointProcessCheckpoint", "cuCheckpointOperationComplete")])
print(find("cuCheckpointProcessCheckpoint")[1] == find("cuCheckpointProcessCheckpoint", 12080)[1])
arguments = ctypes.create_string_buffer(ctypes.addressof(info).to_bytes(8, "little"), 64)
print(cuda.cuCheckpointProcessCheckpoint(target, arguments), state()[1])
"""
    assert caller(target, source) == ["[0, 0]", "False", f"1 {RUNNING}"]
    assert caller(target, "print(find('cuCheckpointOperationComplete')[0])", GPUCR_SIM_DRIVER="610") == ["1"]


def test_documented_without_storage_it_goes_to_host_memory(
    libcuda: Libcuda, caller: RunCaller, target: Counter
) -> None:
    libcuda.lock(target.pid)
    source = """
null = ctypes.create_string_buffer(64)
print(call("cuCheckpointProcessCheckpoint", ctypes.c_int(target), ctypes.c_void_p(ctypes.addressof(null))), state()[1])
print(call("cuCheckpointProcessRestore", ctypes.c_int(target), ctypes.c_void_p(ctypes.addressof(null))), state()[1])
"""
    assert caller(target, source) == [f"0 {CHECKPOINTED}", f"0 {LOCKED}"]


def test_documented_a_process_cannot_checkpoint_itself(caller: RunCaller, target: Counter) -> None:
    assert caller(target, "ready(0, 1)\nprint(checkpoint(os.getpid()))") == ["801"]


@pytest.mark.root
def test_documented_the_caller_must_be_able_to_trace(libcuda: Libcuda, caller: RunCaller, target: Counter) -> None:
    libcuda.lock(target.pid)
    source = """
ready(0, 1)
class Header(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]
data = (ctypes.c_uint32 * 6)()
header = Header(0x20080522, 0)
libc = ctypes.CDLL(None, use_errno=True)
assert libc.capget(byref(header), data) == 0
data[0] &= ~(1 << 19)
assert libc.capset(byref(header), data) == 0
print(checkpoint(), state()[0])
"""
    assert caller(target, source)[0].split()[0] == "304"


def test_documented_other_actions_wait_for_complete(libcuda: Libcuda, caller: RunCaller, target: Counter) -> None:
    libcuda.lock(target.pid)
    source = """
ready(0, 1)
def others():
    null = ctypes.create_string_buffer(64)
    names = ("Lock", "Checkpoint", "Restore", "Unlock")
    return [getattr(cuda, f"cuCheckpointProcess{name}")(target, null) for name in names]
checkpoint()
print(others(), checkpoint(), restore(), state()[1])
complete()
restore()
print(others(), state()[1], complete())
"""
    illegal = [401] * 4
    assert caller(target, source) == [f"{illegal} 401 401 {CHECKPOINTING}", f"{illegal} {RESTORING} 0"]


def test_documented_complete_waits_for_streams_and_refuses_captures(
    libcuda: Libcuda, caller: RunCaller, target: Counter
) -> None:
    libcuda.lock(target.pid)
    source = """
ready(0, 1)
checkpoint()
stream = ctypes.c_void_p(entries()[0].stream)
assert cuda.cuStreamBeginCapture_v2(stream, 0) == 0
print(complete(), state()[1])
graph = ctypes.c_void_p()
assert cuda.cuStreamEndCapture(stream, byref(graph)) == 0
ptx = b".version 8.0\\n.target sm_90\\n.entry gpucr_spin() {}\\n"
module, function = ctypes.c_void_p(), ctypes.c_void_p()
assert cuda.cuModuleLoadData(byref(module), ptx) == 0
assert cuda.cuModuleGetFunction(byref(function), module, b"gpucr_spin") == 0
busy = u64(200_000_000)
parameters = (ctypes.c_void_p * 1)(ctypes.addressof(busy))
assert cuda.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, parameters, None) == 0
import time
begin = time.monotonic()
print(complete(), time.monotonic() - begin >= 0.1, state()[1])
"""
    assert caller(target, source) == [f"900 {CHECKPOINTING}", f"0 True {CHECKPOINTED}"]


def test_documented_gpu_pairs_go_with_a_restore(libcuda: Libcuda, caller: RunCaller, counter: CounterFactory) -> None:
    one = counter("--mib", "3", "--devices", "0")
    libcuda.lock(one.pid)
    source = """
ready(0, 1)
checkpoint()
kept = take()
complete()
uuids = [ctypes.create_string_buffer(16) for _ in range(2)]
for number, each in enumerate(uuids):
    assert cuda.cuDeviceGetUuid(each, number) == 0
first, second = (each.raw for each in uuids)
print(restore(pairs=first + second), state()[1])
print(restore(pairs=first + second + second + first))
device = ctypes.c_int(-1)
assert cuda.cuStreamGetDevice(ctypes.c_void_p(entries()[0].stream), byref(device)) == 0
put(kept)
print(device.value, complete())
"""
    assert caller(one, source) == [f"1 {CHECKPOINTED}", "0", "1 0"]
    assert libcuda.act("unlock", one.pid) == 0
    assert one.send("verify") == "ok"
    assert [held > 0 for held in used_bytes(one.pid)] == [False, True]


def test_assumed_complete_works_once_per_handle(libcuda: Libcuda, caller: RunCaller, target: Counter) -> None:
    libcuda.lock(target.pid)
    source = """
ready(0, 1)
checkpoint()
handle = info.contents.handle
pointer = entries()[0].pointer
print(complete(12345), complete(handle), complete(handle), state()[1])
byte = ctypes.create_string_buffer(1)
print(cuda.cuMemcpyDtoH_v2(byte, u64(pointer), ctypes.c_size_t(1)))
"""
    assert caller(target, source) == [f"1 0 1 {CHECKPOINTED}", "1"]


def test_assumed_reserved_bytes_must_be_zero(libcuda: Libcuda, caller: RunCaller, target: Counter) -> None:
    libcuda.lock(target.pid)
    assert caller(target, "ready(0, 1)\nprint(checkpoint(reserved=bytes(55) + b'x'), state()[1])") == [f"1 {LOCKED}"]


def test_assumed_a_process_is_restored_the_way_it_was_checkpointed(
    libcuda: Libcuda, caller: RunCaller, target: Counter
) -> None:
    libcuda.lock(target.pid)
    assert caller(target, "ready(0, 1)\ncheckpoint()\nkept = take()\nprint(complete())") == ["0"]
    assert libcuda.act("restore", target.pid) == 401
    assert libcuda.state(target.pid) == (0, CHECKPOINTED)


def test_assumed_a_dying_caller_leaves_its_target_in_its_state(
    libcuda: Libcuda, caller: RunCaller, target: Counter
) -> None:
    libcuda.lock(target.pid)
    assert caller(target, "ready(0, 1)\nprint(checkpoint())") == ["0"]
    assert libcuda.state(target.pid) == (0, CHECKPOINTING)
    assert [libcuda.act(action, target.pid) for action in ("lock", "checkpoint", "restore", "unlock")] == [401] * 4


def test_assumed_a_dying_target_ends_the_operation(libcuda: Libcuda, caller: RunCaller, target: Counter) -> None:
    libcuda.lock(target.pid)
    source = """
ready(0, 1)
checkpoint()
handle = info.contents.handle
os.kill(target, 9)
print(complete(handle), complete(handle))
"""
    assert caller(target, source) == ["304 1"]


def test_assumed_a_failed_complete_can_be_retried(libcuda: Libcuda, caller: RunCaller, counter: CounterFactory) -> None:
    one = counter(env={"GPUCR_SIM_FAULTS": "complete#1=999"})
    libcuda.lock(one.pid)
    source = "ready(0)\ncheckpoint()\nprint(complete(), state()[1], complete(), state()[1])"
    assert caller(one, source) == [f"999 {CHECKPOINTING} 0 {CHECKPOINTED}"]


def test_a_target_killed_during_complete(libcuda: Libcuda, caller: RunCaller, counter: CounterFactory) -> None:
    one = counter(env={"GPUCR_SIM_FAULTS": "complete=die"})
    libcuda.lock(one.pid)
    assert caller(one, "ready(0)\ncheckpoint()\nprint(complete())") == ["304"]
    wait_until(lambda: not os.path.exists(f"/proc/{one.pid}/fd/0"), "its end")

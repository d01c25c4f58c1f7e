"""The simulated driver's calls for shared, pinned and captured work: results that the canaries do not provoke."""

from __future__ import annotations

from pathlib import Path

from tests.sim.libcuda import Machine, RunProgram

_VMM = """
assert cuda.cuInit(0) == 0
context()
class P(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("handles", ctypes.c_int), ("location", ctypes.c_int), ("id", ctypes.c_int),
                ("win32", ctypes.c_void_p), ("flags", ctypes.c_ubyte * 8)]
size, handle, fd, address = ctypes.c_size_t(2 << 20), u64(), ctypes.c_int(-1), u64()
zero, none = ctypes.c_size_t(0), ctypes.c_ulonglong(0)
def create(handles, size=size):
    return cuda.cuMemCreate(byref(handle), size, byref(P(1, handles, 1, 0)), none)
def export():
    return cuda.cuMemExportToShareableHandle(byref(fd), handle, 1, none)
"""


def test_memory_not_created_exportable_is_not_exported(run_program: RunProgram) -> None:
    assert run_program(_VMM + "print(create(0), export())") == ["0 1"]


def test_sizes_and_mappings_of_the_vmm_calls(run_program: RunProgram) -> None:
    source = """
print(create(1, ctypes.c_size_t(4096)), create(1))
print(cuda.cuMemAddressReserve(byref(address), size, zero, u64(0), none))
data = ctypes.create_string_buffer(b"x" * 100)
print(cuda.cuMemcpyHtoD_v2(address, data, ctypes.c_size_t(100)))
print(cuda.cuMemMap(address, size, zero, handle, none), cuda.cuMemMap(address, size, zero, u64(7), none))
print(cuda.cuMemcpyHtoD_v2(address, data, ctypes.c_size_t(100)))
print(cuda.cuMemUnmap(address, size), cuda.cuMemUnmap(address, size), cuda.cuMemRelease(handle))
print(cuda.cuMemcpyHtoD_v2(address, data, ctypes.c_size_t(100)), cuda.cuMemAddressFree(address, size))
"""
    assert run_program(_VMM + source) == ["1 0", "0", "1", "0 1", "0", "0 1 0", "1 0"]


def test_a_descriptor_that_is_not_memory(run_program: RunProgram) -> None:
    source = """
fd = os.memfd_create("x")
print(cuda.cuMemImportFromShareableHandle(byref(handle), ctypes.c_void_p(fd), 1))
"""
    assert run_program(_VMM + source) == ["1"]


def test_a_process_cannot_open_its_own_ipc_handle(run_program: RunProgram) -> None:
    source = """
assert cuda.cuInit(0) == 0
context()
class Handle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_char * 64)]
handle, other = Handle(), u64()
result, pointer = allocate(1 << 20)
print(cuda.cuIpcGetMemHandle(byref(handle), u64(5)), cuda.cuIpcGetMemHandle(byref(handle), pointer))
print(cuda.cuIpcOpenMemHandle_v2(byref(other), handle, 1), cuda.cuIpcCloseMemHandle(u64(5)))
"""
    assert run_program(source) == ["1 0", "1 1"]


def test_peer_access(run_program: RunProgram, machine: Machine) -> None:
    machine("2x64MiB")
    source = """
assert cuda.cuInit(0) == 0
contexts = []
for ordinal in (0, 1):
    handle = ctypes.c_void_p()
    assert cuda.cuDevicePrimaryCtxRetain(byref(handle), ordinal) == 0
    contexts.append(handle)
cuda.cuCtxSetCurrent(contexts[0])
can = ctypes.c_int(-1)
print(cuda.cuDeviceCanAccessPeer(byref(can), 0, 1), can.value, cuda.cuDeviceCanAccessPeer(byref(can), 0, 2))
print(cuda.cuCtxDisablePeerAccess(contexts[1]), cuda.cuCtxEnablePeerAccess(contexts[1], 0),
      cuda.cuCtxEnablePeerAccess(contexts[1], 0), cuda.cuCtxDisablePeerAccess(contexts[1]))
"""
    assert run_program(source, GPUCR_SIM_PEERS="1") == ["0 1 101", "705 0 704 0"]
    assert run_program(source, GPUCR_SIM_PEERS="0") == ["0 0 101", "705 217 217 705"]


def test_host_memory_is_registered_once(run_program: RunProgram) -> None:
    source = """
assert cuda.cuInit(0) == 0
context()
block = ctypes.create_string_buffer(8192)
size = ctypes.c_size_t(8192)
print(cuda.cuMemHostRegister_v2(block, size, 0), cuda.cuMemHostRegister_v2(block, size, 0),
      cuda.cuMemHostUnregister(block), cuda.cuMemHostUnregister(block), cuda.cuMemFreeHost(block))
"""
    assert run_program(source) == ["0 712 0 713 1"]


def test_capture_of_a_stream(run_program: RunProgram) -> None:
    source = """
assert cuda.cuInit(0) == 0
context()
stream, graph = ctypes.c_void_p(), ctypes.c_void_p()
assert cuda.cuStreamCreate(byref(stream), 1) == 0
print(cuda.cuStreamBeginCapture_v2(None, 2), cuda.cuStreamEndCapture(stream, byref(graph)))
print(cuda.cuStreamBeginCapture_v2(stream, 2), cuda.cuStreamEndCapture(stream, byref(graph)))
print(cuda.cuGraphLaunch(None, stream), cuda.cuGraphDestroy(graph))
"""
    assert run_program(source) == ["900 1", "0 0", "1 0"]


def test_an_unknown_generation_is_reported(run_program: RunProgram) -> None:
    source = "version = ctypes.c_int(); cuda.cuDriverGetVersion(byref(version)); print(version.value)"
    assert run_program(source) == ["13000"]
    assert run_program(source, GPUCR_SIM_DRIVER="future") == ["14000"]
    assert run_program(source, GPUCR_SIM_DRIVER="900") == ["13000"]


def test_released_memory_stays_until_unmapped(run_program: RunProgram) -> None:
    source = """
print(create(1), cuda.cuMemAddressReserve(byref(address), size, zero, u64(0), none))
data = ctypes.create_string_buffer(b"x" * 100)
print(cuda.cuMemMap(address, size, zero, handle, none), cuda.cuMemcpyHtoD_v2(address, data, ctypes.c_size_t(100)))
back, free, total = ctypes.create_string_buffer(100), ctypes.c_size_t(), ctypes.c_size_t()
def free_bytes():
    cuda.cuMemGetInfo_v2(byref(free), byref(total))
    return free.value
held = free_bytes()
print(cuda.cuMemRelease(handle), cuda.cuMemRelease(handle), export())
print(cuda.cuMemcpyDtoH_v2(back, address, ctypes.c_size_t(100)), back.raw == data.raw[:100], free_bytes() == held)
print(cuda.cuMemUnmap(address, size), free_bytes() - held == size.value)
"""
    assert run_program(_VMM + source) == ["0 0", "0 0", "0 1 1", "0 True True", "0 True"]


_EVENT = """
assert cuda.cuInit(0) == 0
context()
class Handle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_char * 64)]
event, other, handle, stream = ctypes.c_void_p(), ctypes.c_void_p(), Handle(), ctypes.c_void_p()
TIMED, UNTIMED, BETWEEN = 0, 2, 6
def create(flags):
    return cuda.cuEventCreate(byref(event), flags)
def shared_files():
    return [name for name in os.listdir("/dev/shm") if f".{os.getpid():x}." in name and name.startswith("cuda.shm.")]
"""


def test_an_event_is_done_when_the_work_before_it_is(run_program: RunProgram) -> None:
    source = """
module, spin = ctypes.c_void_p(), ctypes.c_void_p()
ptx = b".version 7.0\\n.target sm_75\\n.visible .entry gpucr_spin(.param .u64 ns) { ret; }"
cuda.cuModuleLoadData(byref(module), ptx)
cuda.cuModuleGetFunction(byref(spin), module, b"gpucr_spin")
def work(milliseconds):
    parameter = u64(milliseconds * 1_000_000)
    parameters = (ctypes.c_void_p * 1)(ctypes.addressof(parameter))
    assert cuda.cuLaunchKernel(spin, 1, 1, 1, 1, 1, 1, 0, stream, parameters, None) == 0
cuda.cuStreamCreate(byref(stream), 1)
print(create(TIMED), cuda.cuEventQuery(event), cuda.cuEventSynchronize(event))
work(600_000)
print(cuda.cuEventQuery(event), cuda.cuEventRecord(event, stream), cuda.cuEventQuery(event))
print(create(BETWEEN), cuda.cuEventRecord(event, None), cuda.cuEventSynchronize(event), shared_files() != [])
print(cuda.cuEventDestroy_v2(event), cuda.cuEventDestroy_v2(event), cuda.cuEventRecord(event, None))
"""
    assert run_program(_EVENT + source) == ["0 0 0", "0 0 600", "0 0 0 True", "0 400 400"]


def test_handles_of_events(run_program: RunProgram) -> None:
    source = """
print(create(UNTIMED), shared_files(), cuda.cuIpcGetEventHandle(byref(handle), event))
print(create(4), create(BETWEEN), len(shared_files()), cuda.cuIpcGetEventHandle(byref(handle), event))
print(cuda.cuIpcOpenEventHandle(byref(other), handle), cuda.cuIpcOpenEventHandle(byref(other), Handle()))
print(cuda.cuIpcGetEventHandle(byref(handle), ctypes.c_void_p(5)))
"""
    assert run_program(_EVENT + source) == ["0 [] 1", "1 0 1 0", "1 1", "400"]


def test_the_event_file_is_removed_with_its_process(run_program: RunProgram) -> None:
    (made,) = run_program(_EVENT + "create(BETWEEN); print(shared_files()[0])")
    assert not Path("/dev/shm", made).exists()

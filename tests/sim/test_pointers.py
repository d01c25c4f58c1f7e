"""The simulated driver: pointer attributes, dma-bufs, memory of the host and multicast among the VMM calls, resets."""

from __future__ import annotations

from tests.sim.libcuda import RunProgram

PRELUDE = """
assert cuda.cuInit(0) == 0
context()
MIB, size_t = 1 << 20, ctypes.c_size_t
def create(kind=1, handles=1, place=0):
    handle = u64()
    return cuda.cuMemCreate(byref(handle), size_t(2 * MIB), (ctypes.c_int * 8)(1, handles, kind, place), u64(0)), handle
def show(handle):
    address = u64()
    assert cuda.cuMemAddressReserve(byref(address), size_t(2 * MIB), size_t(0), u64(0), u64(0)) == 0
    assert cuda.cuMemMap(address, size_t(2 * MIB), size_t(0), handle, u64(0)) == 0
    return address
def tell(attribute, pointer):
    value = u64()
    result = cuda.cuPointerGetAttribute(byref(value), attribute, u64(pointer))
    return value.value if result == 0 else -result
"""


def test_pointer_attributes(run_program: RunProgram) -> None:
    source = """
_, plain = allocate(3 * MIB)
_, handle = create()
mapped = show(handle)
for start, size in ((plain.value, 3 * MIB), (mapped.value, 2 * MIB)):
    inner = start + MIB
    print(tell(2, inner), tell(3, inner) == inner, tell(9, inner), tell(11, inner) == start, tell(12, inner) == size)
    print(tell(10, inner), tell(14, inner), tell(15, inner), tell(6, inner), tell(99, inner), tell(1, inner) != 0)
print(tell(2, 5), tell(7, plain.value) != tell(7, mapped.value))
values = [u64(), u64()]
pointers = (ctypes.c_void_p * 2)(*[ctypes.addressof(value) for value in values])
print(cuda.cuPointerGetAttributes(2, (ctypes.c_int * 2)(12, 99), pointers, plain), *[value.value for value in values])
on = ctypes.c_uint(1)
print(*[cuda.cuPointerSetAttribute(byref(on), 6, pointer) for pointer in (plain, mapped, u64(5))])
"""
    assert run_program(PRELUDE + source) == [
        "2 True 0 True True",
        "1 0 1 0 -801 True",
        "2 True 0 True True",
        "0 1 0 0 -801 False",
        "-1 True",
        f"0 {3 << 20} 0",
        "0 801 1",
    ]


def test_host_memory_is_visible_to_the_cpu(run_program: RunProgram) -> None:
    source = """
result, handle = create(kind=3)
address, fd, again = show(handle), ctypes.c_int(), u64()
print(result, cuda.cuMemcpyHtoD_v2(address, b"abc", size_t(3)), ctypes.string_at(address.value, 3).decode())
print(cuda.cuMemExportToShareableHandle(byref(fd), handle, 1, u64(0)))
print(cuda.cuMemImportFromShareableHandle(byref(again), ctypes.c_void_p(fd.value), 1))
print(ctypes.string_at(show(again).value, 3).decode(), cuda.cuMemUnmap(address, size_t(2 * MIB)), create(3, 1, -1)[0])
"""
    assert run_program(PRELUDE + source) == ["0 0 abc", "0", "0", "abc 0 1"]


def test_multicast_objects_are_created_and_bound(run_program: RunProgram) -> None:
    source = """
group, memory = u64(), create()[1]
properties = (ctypes.c_uint64 * 4)(1, 2 * MIB, 1, 0)
empty = (ctypes.c_uint64 * 4)(0, 2 * MIB)
print(*[cuda.cuMulticastCreate(byref(group), each) for each in (empty, properties)])
print(cuda.cuMulticastAddDevice(group, 0), cuda.cuMulticastAddDevice(group, 9), cuda.cuMulticastAddDevice(memory, 0))
bound = [(group, memory), (memory, group), (group, group)]
print(*[cuda.cuMulticastBindMem(a, size_t(0), b, size_t(0), size_t(2 * MIB), u64(0)) for a, b in bound])
address = show(memory)
print(*[cuda.cuMulticastBindAddr(group, size_t(0), at, size_t(2 * MIB), u64(0)) for at in (address, u64(5))])
print(*[cuda.cuMulticastUnbind(each, 0, size_t(0), size_t(2 * MIB)) for each in (group, memory)])
"""
    assert run_program(PRELUDE + source) == ["1 0", "0 101 1", "0 1 1", "0 1", "0 1"]


def test_dma_bufs_memory_in_stream_order_and_resets(run_program: RunProgram) -> None:
    source = """
_, plain = allocate(MIB)
fd, mapped, pointer, other = ctypes.c_int(), show(create()[1]), u64(), ctypes.c_void_p()
for address, size in ((plain, MIB), (mapped, 2 * MIB), (plain, 2 * MIB)):
    result = cuda.cuMemGetHandleForAddressRange(byref(fd), address, size_t(size), 1, u64(0))
    print(result, os.fstat(fd.value).st_size > 0)
print(cuda.cuMemAllocAsync(byref(pointer), size_t(100), None), cuda.cuMemFreeAsync(pointer, None))
print(cuda.cuMemFreeAsync(pointer, None))
print(cuda.cuDevicePrimaryCtxReset_v2(0), cuda.cuDevicePrimaryCtxReset_v2(9), allocate(MIB)[0])
context()
print(allocate(MIB)[0])
"""
    assert run_program(PRELUDE + source) == ["0 True", "0 True", "1 True", "0 0", "1", "0 101 201", "0"]

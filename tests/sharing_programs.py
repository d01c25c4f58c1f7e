"""Programs whose processes share device memory, with driver calls only: each is `PRELUDE` plus its own code."""

from __future__ import annotations

PRELUDE = """
import array, ctypes, os, socket, sys
cuda = ctypes.CDLL("libcuda.so.1")
u64, size_t, byref = ctypes.c_uint64, ctypes.c_size_t, ctypes.byref
MIB = 1 << 20
link = socket.socket(fileno=int(sys.argv[1]))
assert cuda.cuInit(0) == 0
def context(device=0):
    handle = ctypes.c_void_p()
    assert cuda.cuDevicePrimaryCtxRetain(byref(handle), device) == 0 and cuda.cuCtxSetCurrent(handle) == 0
    return handle
context()
class Handle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_ubyte * 64)]
def allocate(size):
    pointer = u64()
    assert cuda.cuMemAlloc_v2(byref(pointer), size_t(size)) == 0
    return pointer
def create(size, location=1):
    handle = u64()
    assert cuda.cuMemCreate(byref(handle), size_t(size), (ctypes.c_int * 8)(1, 1, location, 0), u64(0)) == 0
    return handle
def show(handle, size):
    address = u64()
    assert cuda.cuMemAddressReserve(byref(address), size_t(size), size_t(0), u64(0), u64(0)) == 0
    assert cuda.cuMemMap(address, size_t(size), size_t(0), handle, u64(0)) == 0
    assert cuda.cuMemSetAccess(address, size_t(size), (ctypes.c_int * 3)(1, 0, 3), size_t(1)) == 0
    return address
def send_export(handle):
    fd = ctypes.c_int()
    assert cuda.cuMemExportToShareableHandle(byref(fd), handle, 1, u64(0)) == 0
    socket.send_fds(link, [b"x"], [fd.value])
    os.close(fd.value)
def receive_import():
    (fd,) = socket.recv_fds(link, 1, 1)[1]
    handle = u64()
    assert cuda.cuMemImportFromShareableHandle(byref(handle), ctypes.c_void_p(fd), 1) == 0
    os.close(fd)
    return handle
def write(pointer, number, offset=0):
    assert cuda.cuMemcpyHtoD_v2(u64(pointer.value + offset), number.to_bytes(8, "little"), size_t(8)) == 0
def read(pointer, offset=0):
    data = ctypes.create_string_buffer(8)
    assert cuda.cuMemcpyDtoH_v2(data, u64(pointer.value + offset), size_t(8)) == 0
    return int.from_bytes(data.raw, "little")
def ipc_handle(pointer):
    handle = Handle()
    result = cuda.cuIpcGetMemHandle(byref(handle), pointer)
    return bytes(handle.bytes) if result == 0 else result
def ipc_open(raw, result=0):
    pointer = u64()
    got = cuda.cuIpcOpenMemHandle_v2(byref(pointer), Handle((ctypes.c_ubyte * 64)(*raw)), 1)
    assert got == result, got
    return pointer
def stop():
    print("ready", flush=True)
    return sys.stdin.readline().strip()
"""
"""Argument 1 is a socket to the other one. ``stop`` says that it is ready, and waits for a word."""

EXPORTER = """
handles = [create(2 * MIB), create(4 * MIB)]
addresses = [show(handle, size) for handle, size in zip(handles, (2 * MIB, 4 * MIB))]
for number, (handle, address) in enumerate(zip(handles, addresses)):
    write(address, 7 + number)
    send_export(handle)
while (word := stop()) != "end":
    if word == "write":
        write(addresses[1], 100)
    print(*[read(address) for address in addresses], flush=True)
"""

IMPORTER = """
handles = [receive_import(), receive_import()]
addresses = [show(handle, size) for handle, size in zip(handles, (2 * MIB, 4 * MIB))]
for handle in handles:
    assert cuda.cuMemRelease(handle) == 0
while (word := stop()) != "end":
    if word == "write":
        write(addresses[0], 200)
    print(*[read(address) for address in addresses], flush=True)
"""

OWNER = """
pointer = allocate(5 * MIB)
write(pointer, 41, 3 * MIB)
link.send(ipc_handle(u64(pointer.value + 3 * MIB)))
while (word := stop()) != "end":
    if word == "free":
        assert cuda.cuMemFree_v2(pointer) == 0
        print("freed", flush=True)
    elif word == "fork":
        child = os.fork()
        if child == 0:
            found = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
            left = [path for path in found if os.path.lexists(path) and os.readlink(path).endswith(".memory")]
            print("inherited", sum(int(path.rsplit("/", 1)[1]) >= 512 for path in left), flush=True)
            os._exit(0)
        os.waitpid(child, 0)
    else:
        print(read(pointer, 3 * MIB), flush=True)
"""

OPENER = """
raw = link.recv(64)
first = ipc_open(raw)
again = ipc_open(raw)
base, size = u64(), size_t()
assert cuda.cuMemGetAddressRange_v2(byref(base), byref(size), u64(first.value + 4 * MIB)) == 0
assert (first.value, base.value, size.value) == (again.value, first.value, 5 * MIB)
assert (cuda.cuMemFree_v2(first), cuda.cuMemRetainAllocationHandle(byref(base), ctypes.c_void_p(first.value))) == (1, 1)
while (word := stop()) != "end":
    if word == "write":
        write(first, 42, 3 * MIB)
    if word == "close":
        print(*[cuda.cuIpcCloseMemHandle(first) for _ in range(3)], flush=True)
    elif word == "open":
        ipc_open(raw, 1)
        print("refused", flush=True)
    else:
        print(read(first, 3 * MIB), flush=True)
"""

FORWARDER = """
further = socket.socket(fileno=int(sys.argv[2]))
handles = []
for _ in range(2):
    (fd,) = socket.recv_fds(link, 1, 1)[1]
    handle = u64()
    assert cuda.cuMemImportFromShareableHandle(byref(handle), ctypes.c_void_p(fd), 1) == 0
    socket.send_fds(further, [b"x"], [fd])
    os.close(fd)
    handles.append(handle)
addresses = [show(handle, size) for handle, size in zip(handles, (2 * MIB, 4 * MIB))]
while (word := stop()) != "end":
    print(*[read(address) for address in addresses], flush=True)
"""

"""VMM memory, as the interposer relies on it: exports, pointer attributes, and what a checkpoint allows."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from gpucr.driver.cuda import CudaDriver

PRELUDE = """
import ctypes, os, sys
from gpucr.diagnosis.canaries.programs.cuda import Cuda, CudaFailed, MemoryAccess, MemoryProperties
cuda, u64, byref, none = Cuda(), ctypes.c_uint64, ctypes.byref, ctypes.c_ulonglong(0)
cuda.context(0)
size, zero = ctypes.c_size_t(2 << 20), ctypes.c_size_t(0)
def create(handles=1, rdma=0):
    handle, properties = u64(), MemoryProperties(1, handles, 1, 0)
    properties.allocFlags[1] = rdma
    cuda("cuMemCreate", byref(handle), size, byref(properties), none)
    return handle
def reserve():
    address = u64()
    cuda("cuMemAddressReserve", byref(address), size, zero, u64(0), none)
    return address
def show(handle, address):
    cuda("cuMemMap", address, size, zero, handle, none)
    cuda("cuMemSetAccess", address, size, byref(MemoryAccess(1, 0, 3)), ctypes.c_size_t(1))
def export(handle):
    fd = ctypes.c_int(-1)
    cuda("cuMemExportToShareableHandle", byref(fd), handle, 1, none)
    return fd.value
def take(fd):
    handle = u64()
    cuda("cuMemImportFromShareableHandle", byref(handle), ctypes.c_void_p(fd), 1)
    return handle
def result(call, *arguments):
    try:
        call(*arguments)
    except CudaFailed as e:
        return e.result
    return 0
def tell(attribute, pointer):
    value = u64()
    cuda("cuPointerGetAttribute", byref(value), attribute, pointer)
    return value.value
"""
Begin = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def begin() -> Iterator[Begin]:
    """Starts a program on the driver; killed at the end."""
    started: list[subprocess.Popen[str]] = []

    def start(source: str, *descriptors: int) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", PRELUDE + source, *map(str, descriptors)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=descriptors,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_imported_memory_is_not_exported_again(driver: CudaDriver, begin: Begin) -> None:
    process = begin("print(result(export, take(export(create()))), result(export, create(handles=0)), flush=True)")
    assert line(process) == "1 1"


def test_a_pointers_attributes_give_its_range(driver: CudaDriver, begin: Begin) -> None:
    process = begin("""
plain, mapped = u64(cuda.allocate(4 << 20)), reserve()
show(create(), mapped)
for start, bytes_ in ((plain, 4 << 20), (mapped, 2 << 20)):
    inner = u64(start.value + (1 << 20))
    print(tell(2, inner), tell(9, inner), tell(11, inner) == start.value, tell(12, inner) == bytes_, tell(10, inner),
          flush=True)
""")
    assert [line(process), line(process)] == ["2 0 True True 1", "2 0 True True 0"]


def test_memory_exported_and_released_is_mapped_again_at_its_address(driver: CudaDriver, begin: Begin) -> None:
    here, there = socket.socketpair()
    process = begin("""
import socket
link = socket.socket(fileno=int(sys.argv[1]))
handle, address = create(), reserve()
show(handle, address)
cuda.write(address.value, b"abc")
fd = export(handle)
socket.send_fds(link, [b"x"], [fd])
os.close(fd)
cuda("cuMemUnmap", address, size)
cuda("cuMemRelease", handle)
print("ready", flush=True)
(fd,) = socket.recv_fds(link, 1, 1)[1]
again = take(fd)
os.close(fd)
show(again, address)
print(cuda.read(address.value, 3).decode(), flush=True)
""", there.fileno())  # fmt: skip
    with here, there:
        assert line(process) == "ready"
        (kept,) = socket.recv_fds(here, 1, 1)[1]
        driver.lock(process.pid)
        driver.checkpoint(process.pid)
        driver.restore(process.pid)
        driver.unlock(process.pid)
        socket.send_fds(here, [b"x"], [kept])
        os.close(kept)
        assert line(process) == "abc"

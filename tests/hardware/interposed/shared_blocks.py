"""Two processes that share VMM memory by descriptors, by driver calls alone: python3 shared_blocks.py STEPS PAUSE_S.

The first makes blocks and sends their descriptors, the second maps them. In each step both write what the other one
has to find; the first prints what both found.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import socket
import sys
import time

import pace  # type: ignore[import-not-found]  # beside this program

cuda = ctypes.CDLL("libcuda.so.1")
SIZES = (2 << 20, 6 << 20, 64 << 20)
PART = 1 << 16


class Properties(ctypes.Structure):
    """CUmemAllocationProp: pinned, by a descriptor, on the first device."""

    _fields_ = (
        ("type", ctypes.c_int), ("handles", ctypes.c_int), ("location", ctypes.c_int), ("device", ctypes.c_int),
        ("win32", ctypes.c_void_p), ("flags", ctypes.c_ubyte * 8),
    )  # fmt: skip


def must(result: int) -> None:
    """End if a call fails."""
    if result != 0:
        sys.exit(f"result {result}")


def start() -> None:
    """The first device's context."""
    context = ctypes.c_void_p()
    must(cuda.cuInit(0))
    must(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
    must(cuda.cuCtxSetCurrent(context))


def show(handle: ctypes.c_uint64, size: int) -> int:
    """Its address. The handle is let go."""
    address, bytes_ = ctypes.c_uint64(), ctypes.c_size_t(size)
    access = (ctypes.c_int * 3)(1, 0, 3)
    zero = ctypes.c_size_t(0)
    must(cuda.cuMemAddressReserve(ctypes.byref(address), bytes_, zero, ctypes.c_uint64(0), ctypes.c_ulonglong(0)))
    must(cuda.cuMemMap(address, bytes_, zero, handle, ctypes.c_ulonglong(0)))
    must(cuda.cuMemSetAccess(address, bytes_, access, ctypes.c_size_t(1)))
    must(cuda.cuMemRelease(handle))
    return address.value


def make(link: socket.socket) -> list[int]:
    """The blocks, sent to the other one."""
    addresses = []
    for size in SIZES:
        handle, descriptor = ctypes.c_uint64(), ctypes.c_int(-1)
        properties = Properties(1, 1, 1, 0)
        must(
            cuda.cuMemCreate(
                ctypes.byref(handle), ctypes.c_size_t(size), ctypes.byref(properties), ctypes.c_ulonglong(0)
            )
        )
        must(cuda.cuMemExportToShareableHandle(ctypes.byref(descriptor), handle, 1, ctypes.c_ulonglong(0)))
        socket.send_fds(link, [b"x"], [descriptor.value])
        os.close(descriptor.value)
        addresses.append(show(handle, size))
        link.recv(1)
    return addresses


def take(link: socket.socket) -> list[int]:
    """The other one's blocks."""
    addresses = []
    for size in SIZES:
        handle = ctypes.c_uint64()
        descriptor = socket.recv_fds(link, 1, 1)[1][0]
        must(cuda.cuMemImportFromShareableHandle(ctypes.byref(handle), ctypes.c_void_p(descriptor), 1))
        os.close(descriptor)
        addresses.append(show(handle, size))
        link.send(b"x")
    return addresses


def write(addresses: list[int], step: int, who: int) -> None:
    """What step and writer alone tell."""
    for number, (address, size) in enumerate(zip(addresses, SIZES, strict=True)):
        data = hashlib.sha256(f"{step} {who} {number}".encode()).digest() * (PART // 32)
        offset = (step * 3 + who) * PART % size
        must(cuda.cuMemcpyHtoD_v2(ctypes.c_uint64(address + offset), data, ctypes.c_size_t(PART)))


def read(addresses: list[int], step: int, who: int) -> str:
    """A hash of what the writer of that step wrote."""
    digest, part = hashlib.sha256(), ctypes.create_string_buffer(PART)
    for address, size in zip(addresses, SIZES, strict=True):
        offset = (step * 3 + who) * PART % size
        must(cuda.cuMemcpyDtoH_v2(part, ctypes.c_uint64(address + offset), ctypes.c_size_t(PART)))
        digest.update(part.raw)
    return digest.hexdigest()[:16]


def second(link: socket.socket, steps: int) -> None:
    """Read what the first wrote, write for it."""
    start()
    addresses = take(link)
    for step in range(steps):
        link.recv(1)
        found = read(addresses, step, 0)
        write(addresses, step, 1)
        link.send(found.encode())


def first(link: socket.socket, steps: int, pause_s: float) -> None:
    """Write, let the other one read and write, read."""
    start()
    addresses = make(link)
    for step in range(steps):
        pace.wait_for(step)
        write(addresses, step, 0)
        link.send(b"x")
        there = link.recv(16).decode()
        print(step, there, read(addresses, step, 1), flush=True)
        time.sleep(pause_s)


def main() -> None:
    """Fork before CUDA starts: each has its own."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    steps, pause_s = int(sys.argv[1]), float(sys.argv[2])
    child = os.fork()
    if child == 0:
        here.close()
        second(there, steps)
        os._exit(0)
    there.close()
    first(here, steps, pause_s)
    if os.waitpid(child, 0)[1] != 0:
        sys.exit("the other process failed")


if __name__ == "__main__":
    main()

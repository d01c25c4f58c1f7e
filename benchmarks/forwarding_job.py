"""The job of `benchmarks.forwarding`: ``forwarding_job.py PORT``. ``GET /N`` is answered with N bytes of zeros.

It holds 64 MiB of device memory, so that it can be put to sleep, and many connections at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import resource
import socket
import sys

BUFFER = memoryview(bytes(1 << 20))
MOST_ASKED_BYTES = 4096


def hold_device_memory() -> None:
    """64 MiB of the first GPU, until the end."""
    cuda = ctypes.CDLL("libcuda.so.1")
    context, pointer = ctypes.c_void_p(), ctypes.c_uint64()
    for result in (
        cuda.cuInit(0),
        cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0),
        cuda.cuCtxSetCurrent(context),
        cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(64 << 20)),
    ):
        if result:
            sys.exit(f"the driver gave {result}")


async def answer(client: socket.socket) -> None:
    """Its requests, one after the other."""
    loop = asyncio.get_running_loop()
    client.setblocking(False)
    with client, contextlib.suppress(OSError):
        while asked := await loop.sock_recv(client, MOST_ASKED_BYTES):
            left_bytes = int(asked.split()[1][1:])
            await loop.sock_sendall(client, b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % left_bytes)
            while left_bytes > 0:
                piece = BUFFER[:left_bytes]
                await loop.sock_sendall(client, piece)
                left_bytes -= len(piece)


async def serve(listener: socket.socket) -> None:
    """Until killed."""
    loop, tasks = asyncio.get_running_loop(), set[asyncio.Task[None]]()
    while True:
        client, _ = await loop.sock_accept(listener)
        task = loop.create_task(answer(client))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


def main() -> None:
    """Listen, and serve."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    hold_device_memory()
    with socket.create_server(("127.0.0.1", int(sys.argv[1])), backlog=1024) as listener:
        listener.setblocking(False)
        asyncio.run(serve(listener))


if __name__ == "__main__":
    main()

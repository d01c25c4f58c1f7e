"""A server with memory on a simulated GPU: each answer is read from there, so a job that sleeps cannot answer.

``python3 server.py PORT MIB DEVICES [NAME]``, HTTP/1.1 with keep-alive. ``GET /``: a counter in device memory, raised
by one. ``/slow?SECONDS``: begins its answer, and ends it so much later. ``/big?BYTES``: so many. ``/events?N``: chunks.
``/upgrade``: another protocol, which answers each byte with the counter in a line.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

MIB = 1 << 20


class Device:
    """A counter in device memory of each device. Every use takes the driver's lock, which a suspend holds."""

    def __init__(self, mib: int, devices: list[int]) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        self._turn = threading.Lock()
        self._pointers: list[tuple[ctypes.c_void_p, ctypes.c_uint64]] = []
        self._call("cuInit", 0)
        for device in devices:
            context, pointer = ctypes.c_void_p(), ctypes.c_uint64()
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
            self._call("cuCtxSetCurrent", context)
            self._call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(mib * MIB))
            self._pointers.append((context, pointer))
            self._write(pointer, 100)

    def next(self) -> int:
        """The counter, raised by one."""
        with self._turn:
            for context, pointer in self._pointers:
                self._call("cuCtxSetCurrent", context)
                data = ctypes.create_string_buffer(8)
                self._call("cuMemcpyDtoH_v2", data, pointer, ctypes.c_size_t(8))
                number = int.from_bytes(data.raw, "little") + 1
                self._write(pointer, number)
            return number

    def _write(self, pointer: ctypes.c_uint64, number: int) -> None:
        self._call("cuMemcpyHtoD_v2", pointer, number.to_bytes(8, "little"), ctypes.c_size_t(8))

    def _call(self, function: str, *arguments: object) -> None:
        result = getattr(self._cuda, function)(*arguments)
        if result:
            sys.exit(f"{function} gave {result}")


class Handler(BaseHTTPRequestHandler):
    """Answers."""

    protocol_version = "HTTP/1.1"
    device: Device
    name: str

    def do_GET(self) -> None:
        """See the module."""
        url = urlsplit(self.path)
        text = f"{self.name} {self.device.next()}\n".encode()
        if url.path == "/slow":
            self._begin(len(text))
            self.wfile.write(text[:1])
            self.wfile.flush()
            time.sleep(float(url.query))
            self.device.next()
            self.wfile.write(text[1:])
        elif url.path == "/events":
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for number in range(int(url.query)):
                piece = f"event {number} {self.device.next()}\n".encode()
                self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                self.wfile.flush()
                time.sleep(0.05)
            self.wfile.write(b"0\r\n\r\n")
        elif url.path == "/upgrade":
            self.send_response(101)
            self.end_headers()
            while self.rfile.read(1):
                self.wfile.write(b"%d\n" % self.device.next())
        else:
            body = bytes(int(url.query)) if url.path == "/big" else text
            self._begin(len(body))
            self.wfile.write(body)

    def do_POST(self) -> None:
        """The length of what came."""
        length = int(self.headers["Content-Length"])
        left = length
        while left:
            left -= len(self.rfile.read(min(left, MIB)))
        text = f"{length} {self.device.next()}\n".encode()
        self._begin(len(text))
        self.wfile.write(text)

    def _begin(self, length: int) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(length))
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        """Nothing."""


class Server(ThreadingHTTPServer):
    """Many connections at once."""

    daemon_threads = True
    request_queue_size = 256


def main() -> None:
    """Serve until killed."""
    port, mib, devices = int(sys.argv[1]), int(sys.argv[2]), [int(each) for each in sys.argv[3].split(",")]
    Handler.name = sys.argv[4] if len(sys.argv) > 4 else "server"
    Handler.device = Device(mib, devices)
    served = Server(("127.0.0.1", port), Handler)
    sys.stdout.write(f"ready pid={os.getpid()} port={served.server_port} \n")
    sys.stdout.flush()
    served.serve_forever()


if __name__ == "__main__":
    main()

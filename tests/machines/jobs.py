"""Programs that run in machines."""

from __future__ import annotations

from tests.machines.machine import Machine

COUNTS = """\
import itertools, time
for number in itertools.count(1):
    print(number, flush=True)
    time.sleep(0.05)
"""
"""Prints 1, 2, 3 and so on."""

CALCULATES = """\
import hashlib, itertools, time
import numpy
numbers = numpy.arange(1 << 14, dtype=numpy.float32).reshape(128, 128)
expected = (numbers @ numbers).tobytes()
digest = hashlib.sha256(expected).digest()
for number in itertools.count(1):
    assert (numbers @ numbers).tobytes() == expected
    assert hashlib.sha256(expected).digest() == digest
    print(number, flush=True)
    time.sleep(0.05)
"""
"""Counts too. OpenBLAS and OpenSSL have chosen their instructions when it started."""

HOLDS = """\
import itertools, mmap, os, socket, tempfile, time
shared = os.open("/dev/shm/shared", os.O_RDWR | os.O_CREAT)
os.ftruncate(shared, 4096)
memory = mmap.mmap(shared, 4096)
deleted = tempfile.TemporaryFile()
deleted.write(b"deleted")
listener = socket.create_server(("127.0.0.1", 7000))
client = socket.create_connection(("127.0.0.1", 7000))
server, _ = listener.accept()
began = time.monotonic()
last = began
for number in itertools.count(1):
    memory[:8] = number.to_bytes(8, "little")
    client.sendall(memory[:8])
    assert int.from_bytes(server.recv(8), "little") == number
    deleted.seek(0)
    assert deleted.read() == b"deleted"
    now = time.monotonic()
    assert last <= now < last + 60, (last, now)
    last = now
    print(number, flush=True)
    time.sleep(0.05)
"""
"""Counts too, with what a reboot takes away: shared memory, a deleted file, a connection."""


def last_count(machine: Machine, job: str) -> int:
    """What a job that counts has printed last."""
    return int(machine.gpucr("logs", job).stdout.split()[-1])

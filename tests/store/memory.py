"""A store in memory, as strict as the guarantees in backend.py, and backends that fail as real ones do."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from gpucr.store.backend import Backend, Buffer, Exists, Missing, ObjectInfo, Sink, as_parts, check_name


class Killed(BaseException):
    """The process died at this operation. Not an Exception: nothing in the code under test may handle it."""


class MemoryBackend:
    """Objects in a dict. ``clock_s`` is the clock of the place; every new object moves it on by ``tick_s``."""

    def __init__(self, *, tick_s: float = 1.0) -> None:
        self.objects: dict[str, tuple[bytes, float]] = {}
        self.clock_s = 1_000_000.0
        self.tick_s = tick_s
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return "memory:"

    @property
    def identity(self) -> str:
        return self.url

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        check_name(name)
        with self._lock:
            if name not in self.objects:
                raise Missing(name)
            data = self.objects[name][0]
        return data[offset:] if length is None else data[offset : offset + length]

    def read_into(self, name: str, offset: int, buffer: memoryview) -> int:
        data = self.read(name, offset, len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def size(self, name: str) -> int:
        return len(self.read(name))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        with self._lock:
            found = sorted(self.objects.items())
        return iter([ObjectInfo(name, len(data), at) for name, (data, at) in found if name.startswith(prefix)])

    def create(self, name: str, parts: Buffer | Sequence[Buffer]) -> None:
        check_name(name)
        data = b"".join(as_parts(parts))
        with self._lock:
            if name in self.objects:
                raise Exists(name)
            self.clock_s += self.tick_s
            self.objects[name] = (data, self.clock_s)

    def open_new(self, name: str) -> Sink:
        check_name(name)
        return MemorySink(self, name)

    def delete(self, name: str) -> None:
        check_name(name)
        with self._lock:
            self.objects.pop(name, None)

    def sweep(self, unchanged_s: float) -> int:
        return 0

    def names(self, prefix: str = "") -> Sequence[str]:
        return [info.name for info in self.list(prefix)]


class MemorySink:
    """Collects, and creates at the end."""

    def __init__(self, backend: Backend, name: str) -> None:
        self._backend = backend
        self._name = name
        self._data = bytearray()
        self._is_open = True

    @property
    def size_bytes(self) -> int:
        return len(self._data)

    def write(self, data: Buffer) -> None:
        assert self._is_open
        self._data += data

    def publish(self) -> None:
        assert self._is_open
        self._is_open = False
        self._backend.create(self._name, bytes(self._data))

    def discard(self) -> None:
        self._is_open = False


Fault = Callable[[str, str], str | None]
"""Told the operation (read, size, list, create, delete) and the name; what goes wrong, or None. See FaultyBackend."""


@dataclass
class FaultyBackend:
    """Another backend whose operations fail as ``fault`` says.

    ``"before"``: the operation fails and did nothing. ``"after"``: it was done, and its answer is lost. ``"kill"`` and
    ``"kill-after"``: the process dies before or after it. ``"short"``: a read ends too early. ``"full"``: no space.
    ``"late"``: it fails now, and is done when `deliver` is called: a request that a network kept back.
    ``"twice"``: it is done, and once more when `deliver` is called. Every operation is noted in ``calls``.
    """

    inner: MemoryBackend
    fault: Fault = field(default=lambda operation, name: None)
    calls: list[tuple[str, str]] = field(default_factory=list)
    pending: list[Callable[[], object]] = field(default_factory=list)

    @property
    def url(self) -> str:
        return self.inner.url

    @property
    def identity(self) -> str:
        return self.inner.identity

    def _do(self, operation: str, name: str, work: Callable[[], object]) -> object:
        self.calls.append((operation, name))
        kind = self.fault(operation, name)
        if kind == "kill":
            raise Killed
        if kind == "full":
            raise OSError(errno.ENOSPC, "No space left on device", name)
        if kind == "before":
            raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer", name)
        if kind == "late":
            self.pending.append(work)
            raise TimeoutError(errno.ETIMEDOUT, "Connection timed out", name)
        result = work()
        if kind == "twice":
            self.pending.append(work)
        if kind == "kill-after":
            raise Killed
        if kind == "after":
            raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer", name)
        if kind == "short" and isinstance(result, bytes):
            return result[: len(result) // 2]
        return result

    def deliver(self) -> None:
        """Do what was kept back, last first: requests do not arrive in the order in which they were sent."""
        while self.pending:
            work = self.pending.pop()
            try:
                work()
            except OSError:
                continue  # nobody waits for the answer any more

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        data = self._do("read", name, lambda: self.inner.read(name, offset, length))
        assert isinstance(data, bytes)
        return data

    def read_into(self, name: str, offset: int, buffer: memoryview) -> int:
        data = self.read(name, offset, len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def size(self, name: str) -> int:
        size_bytes = self._do("size", name, lambda: self.inner.size(name))
        assert isinstance(size_bytes, int)
        return size_bytes

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        found = self._do("list", prefix, lambda: list(self.inner.list(prefix)))
        assert isinstance(found, list)
        return iter(found)

    def create(self, name: str, parts: Buffer | Sequence[Buffer]) -> None:
        data = b"".join(as_parts(parts))
        self._do("create", name, lambda: self.inner.create(name, data))

    def open_new(self, name: str) -> Sink:
        return MemorySink(self, name)

    def delete(self, name: str) -> None:
        self._do("delete", name, lambda: self.inner.delete(name))

    def sweep(self, unchanged_s: float) -> int:
        return self.inner.sweep(unchanged_s)

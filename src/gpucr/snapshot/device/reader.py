"""Fills staging files from a snapshot, in ascending order, and checks every piece before it is put there."""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from gpucr.errors import SnapshotDamaged
from gpucr.snapshot.device.crew import THREADS, Crew, PieceBuffer
from gpucr.snapshot.device.loader import Prefix, fill
from gpucr.snapshot.device.stripes import HINT_CHANGED, HINT_DAMAGED, Layout, Stripes
from gpucr.snapshot.manifest import DeviceData


@dataclass(frozen=True)
class Destination:
    """The staging file into which a process's device memory is read; None: it is only checked.

    The file has its full size and is fresh: pieces of zeros are left as the holes that they are. ``fd`` is the
    caller's, who keeps it open until the reader has ended.
    """

    pid: int
    fd: int | None
    data: DeviceData


class _Job(NamedTuple):
    loading: _Loading
    piece: int
    digest: str | None


class _Loading:
    """How far one process is. Everything here is guarded by the crew's lock."""

    def __init__(self, destination: Destination, stripes: Stripes) -> None:
        self.destination = destination
        self.stripes = stripes
        self.layout = stripes.layout
        self._next = 0
        self.prefix = Prefix(self.layout.pieces)
        for piece, digest in enumerate(destination.data.sha256):
            if digest is None and not self.reads_holes:
                self.prefix.finish(piece)

    @property
    def reads_holes(self) -> bool:
        """Whether holes are read, to see that they are zeros still. A restore has no need to."""
        return self.destination.fd is None

    @property
    def loaded_bytes(self) -> int:
        return min(self.layout.start(self.prefix.length), self.layout.size_bytes)

    def take(self) -> _Job | None:
        digests = self.destination.data.sha256
        while self._next < len(digests):
            piece, digest = self._next, digests[self._next]
            self._next += 1
            if digest is not None or self.reads_holes:
                return _Job(self, piece, digest)
        return None


class DeviceReader:
    """Reads the device memory of several processes from a snapshot's device folder, with many threads.

    Raises SnapshotDamaged at once where a file is missing, not a plain file, or of another size. A thread that finds a
    digest that differs ends all of them, and every later wait raises SnapshotDamaged, with process, file and range.
    ``prefix`` is what the names of all files there begin with.
    ``on_bytes`` is told the size of every stored piece that is in place (`DeviceData.stored_bytes` in all);
    several threads call it at once. When all is read, the threads end and the files are closed.
    """

    def __init__(
        self,
        folder: Path,
        destinations: Sequence[Destination],
        *,
        prefix: str = "",
        threads: int = THREADS,
        on_bytes: Callable[[int], None] | None = None,
    ) -> None:
        self._on_bytes = on_bytes
        self._loadings: dict[int, _Loading] = {}
        self._crew: Crew[_Job] = Crew("device-reader", threads, take=self._take, work=self._load, close=self._close)
        try:
            for destination in destinations:
                self._add(folder, prefix, destination)
        except BaseException:
            self.cancel()
            raise
        self._turns = deque(self._loadings.values())

    def _add(self, folder: Path, prefix: str, destination: Destination) -> None:
        if destination.fd is not None and os.fstat(destination.fd).st_size < destination.data.size_bytes:
            raise ValueError(f"the staging file of process {destination.pid} is shorter than its device memory")
        stripes = Stripes.open(folder, destination.pid, Layout.of(destination.data), prefix)
        self._loadings[destination.pid] = _Loading(destination, stripes)

    def start(self) -> None:
        """Start the threads."""
        if self._is_done():
            self.cancel()
        else:
            self._crew.start(max(loading.layout.piece_bytes for loading in self._loadings.values()))

    def loaded(self, pid: int) -> int:
        """How many bytes from the beginning of this process's staging file are in place and checked."""
        with self._crew.lock:
            return self._loadings[pid].loaded_bytes

    @property
    def loaded_bytes(self) -> int:
        """`loaded`, over all processes."""
        with self._crew.lock:
            return sum(loading.loaded_bytes for loading in self._loadings.values())

    def wait_for(self, pid: int, up_to_bytes: int, timeout_s: float | None = None) -> bool:
        """Wait until `loaded` is at least this. False: out of time, or cancelled. Raises the first error."""
        loading = self._loadings[pid]
        wanted = min(up_to_bytes, loading.layout.size_bytes)
        return self._crew.wait_until(lambda: loading.loaded_bytes >= wanted, timeout_s)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until everything is in place. False: out of time, or cancelled. Raises the first error."""
        return self._crew.wait_until(self._is_done, timeout_s)

    def cancel(self) -> None:
        """End the threads after the piece that they have, and close the files. Idempotent."""
        self._crew.stop()

    def _is_done(self) -> bool:
        return all(loading.prefix.is_complete for loading in self._loadings.values())

    def _take(self, thread: int) -> _Job | None:
        for _ in range(len(self._turns)):
            loading = self._turns[0]
            self._turns.rotate(-1)
            job = loading.take()
            if job is not None:
                return job
        return None

    def _load(self, job: _Job, buffer: PieceBuffer) -> None:
        loading, length = job.loading, job.loading.layout.length(job.piece)
        data = buffer.part(0, length)
        _read_checked(job, data, buffer)
        if loading.destination.fd is not None:
            pid, needed_bytes = loading.destination.pid, loading.layout.size_bytes
            fill(loading.destination.fd, loading.layout.start(job.piece), data, pid=pid, needed_bytes=needed_bytes)
        if self._on_bytes is not None and job.digest is not None:
            self._on_bytes(length)
        with self._crew.lock:
            if loading.prefix.finish(job.piece):
                self._crew.announce()
                if self._is_done():
                    self._crew.end()

    def _close(self) -> None:
        for loading in self._loadings.values():
            loading.stripes.close()


def verify(folder: Path, data: Mapping[int, DeviceData], prefix: str = "") -> None:
    """Read and check the device memory of these processes. Raises SnapshotDamaged, naming the first that differs."""
    reader = DeviceReader(folder, [Destination(pid, None, each) for pid, each in data.items()], prefix=prefix)
    try:
        reader.start()
        reader.wait()
    finally:
        reader.cancel()


def _read_checked(job: _Job, data: memoryview, buffer: PieceBuffer) -> None:
    pid, stripes = job.loading.destination.pid, job.loading.stripes
    stripe, offset = stripes.layout.place(job.piece)
    path = stripes.path(stripe)
    name = f"{path.parent.name}/{path.name}"
    try:
        count = stripes.read(job.piece, data)
    except OSError as e:
        message = f"{name}, which holds device memory of process {pid}, cannot be read: {e.strerror}"
        raise SnapshotDamaged(message, path=str(path), hint="its disk may be failing (dmesg): use another copy") from e
    if count < len(data):
        message = f"{name}, which holds device memory of process {pid}, ends before byte {offset + len(data)}"
        raise SnapshotDamaged(message, path=str(path), hint=HINT_CHANGED)
    is_right = buffer.is_zero(len(data)) if job.digest is None else hashlib.sha256(data).hexdigest() == job.digest
    if not is_right:
        raise SnapshotDamaged(
            f"{name}, which holds device memory of process {pid}, differs from what was written, "
            f"between bytes {offset} and {offset + len(data)}",
            path=str(path),
            hint=HINT_DAMAGED,
        )

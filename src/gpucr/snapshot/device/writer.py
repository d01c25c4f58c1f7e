"""Saves staging files into a snapshot while the driver is still filling them.

Below the frontier that the driver has reached, a piece is most likely finished, but only `DeviceWriter.complete` makes
it certain. So a piece is saved as soon as it lies below the frontier, and what was saved that early is read and hashed
once more after the end; where the digest differs, the piece is written again. Every piece is copied into a private
buffer first: what is hashed is what is written, whatever happens to the source meanwhile. (O_DIRECT straight from a
mapping of the staging file was no faster: 2.0 against 2.7 GiB/s, and the same 1.9 with hashing.)
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, NoReturn

from gpucr.errors import SnapshotError
from gpucr.model import StagedExtent
from gpucr.snapshot.device.crew import THREADS, Crew, PieceBuffer
from gpucr.snapshot.device.stripes import PIECE_BYTES, STRIPES, Layout, Stripes
from gpucr.snapshot.json_reader import PAGE_BYTES
from gpucr.snapshot.manifest import DeviceData


@dataclass(frozen=True)
class Source:
    """The staging file of one process. ``size_bytes`` is a multiple of 4 KiB.

    ``fd`` is the caller's, who keeps it open until the writer has ended.
    """

    pid: int
    fd: int
    size_bytes: int


class _Job(NamedTuple):
    saving: _Saving
    piece: int
    is_final: bool
    is_recheck: bool


class _Saving:
    """How far one process is. Everything here is guarded by the crew's lock."""

    def __init__(self, source: Source, stripes: Stripes) -> None:
        self.source = source
        self.stripes = stripes
        self.digests: list[str | None] = [None] * stripes.layout.pieces
        self.available = 0
        self.is_final = False
        self._next = 0
        self._busy = 0
        self._provisional: list[int] = []
        self._rechecks: deque[int] = deque()

    @property
    def layout(self) -> Layout:
        return self.stripes.layout

    @property
    def is_done(self) -> bool:
        return self.is_final and self._next == self.layout.pieces and not self._busy and not self._rechecks

    def grow(self, source: Source) -> None:
        # No digest changes: the last piece of a size that may still grow is not taken before it is full.
        self.stripes.grow(replace(self.layout, size_bytes=source.size_bytes))
        self.source = source
        self.digests += [None] * (self.layout.pieces - len(self.digests))

    def complete(self) -> None:
        self.is_final = True
        self.available = self.layout.pieces
        self._rechecks.extend(sorted(self._provisional))
        self._provisional.clear()

    def take_new(self) -> _Job | None:
        if self._next >= self.available:
            return None
        self._next += 1
        self._busy += 1
        return _Job(self, self._next - 1, self.is_final, is_recheck=False)

    def take_recheck(self) -> _Job | None:
        if not self._rechecks:
            return None
        self._busy += 1
        return _Job(self, self._rechecks.popleft(), is_final=True, is_recheck=True)

    def finish(self, job: _Job, digest: str | None) -> None:
        self._busy -= 1
        self.digests[job.piece] = digest
        if not job.is_final:
            # Read before the end was known: also where the end has come since.
            (self._rechecks if self.is_final else self._provisional).append(job.piece)


class DeviceWriter:
    """Writes the staging files of several processes into a snapshot's device folder, with many threads.

    `start`, then for each process `advance` as often as wanted and `complete` once; `wait`, `sync`, and `device_data`
    for the manifest. `cancel` ends it at any time; what was written stays for the caller to remove.

    The folder (0700) and the files (0600) are made here and must not exist. ``on_bytes`` is told the size of every
    piece of a source that has been dealt with for the first time; several threads call it at once. An error in a
    thread ends all of them, and every later call raises it: SnapshotError where the folder takes no more.
    """

    def __init__(
        self,
        folder: Path,
        sources: Sequence[Source] = (),
        *,
        threads: int = THREADS,
        piece_bytes: int = PIECE_BYTES,
        on_bytes: Callable[[int], None] | None = None,
    ) -> None:
        self.bytes_seen = 0
        self.bytes_written = 0
        self.rewritten_pieces = 0
        self._folder = folder
        self._piece_bytes = piece_bytes
        self._on_bytes = on_bytes
        self._made_folder = False
        self._working: int | None = None
        self._savings: dict[int, _Saving] = {}
        self._turns: deque[_Saving] = deque()
        self._crew: Crew[_Job] = Crew("device-writer", threads, take=self._take, work=self._save, close=self._close)
        try:
            for source in sources:
                self.add(source)
        except BaseException:
            self.cancel()
            raise

    def add(self, source: Source) -> None:
        """Take in one more process, also after `start`. Raises SnapshotError where its files cannot be made.

        Raises ValueError for a size that is not whole pages, a file that is shorter, or a pid that is there already.
        """
        _check_size(source)
        if source.pid in self._savings:
            raise ValueError(f"process {source.pid} is being saved already")
        layout = Layout(source.size_bytes, self._piece_bytes, STRIPES)
        try:
            if not self._made_folder:
                self._folder.mkdir(mode=0o700)
                self._made_folder = True
            stripes = Stripes.create(self._folder, source.pid, layout)
        except OSError as e:
            raise self._not_written(e) from e
        with self._crew.lock:
            if not self._crew.has_ended:
                self._savings[source.pid] = _Saving(source, stripes)
                self._turns.append(self._savings[source.pid])
                return
        stripes.close()
        self._refuse_ended()

    def grow(self, pid: int, size_bytes: int) -> None:
        """The staging file of a process has become larger. Only before `complete`. Raises as `add` does."""
        with self._crew.lock:
            saving = self._savings[pid]
            grown = replace(saving.source, size_bytes=size_bytes)
            _check_size(grown)
            if saving.is_final or size_bytes < saving.source.size_bytes:
                raise ValueError(f"the staging file of process {pid} has its final size, or cannot become smaller")
            if not self._crew.has_ended:
                try:
                    saving.grow(grown)
                except OSError as e:
                    raise self._not_written(e) from e
                return
        self._refuse_ended()

    def start(self) -> None:
        """Start the threads. They wait for `advance` and `complete`."""
        self._crew.start(self._piece_bytes)

    def advance(self, pid: int, up_to_bytes: int) -> None:
        """The driver has filled the staging file up to here, as far as is known: full pieces below are saved."""
        with self._crew.lock:
            saving = self._savings[pid]
            reached = saving.layout.whole_below(up_to_bytes)
            if reached > saving.available:
                saving.available = reached
                self._crew.offer()

    def complete(self, pid: int) -> None:
        """The driver has finished: all of the staging file is final. What was saved before is checked again."""
        with self._crew.lock:
            self._savings[pid].complete()
            self._crew.offer()
            self._crew.announce()

    def limit_threads(self, count: int | None) -> None:
        """Let only so many threads work from now on (None: all), because something else needs the processors more."""
        with self._crew.lock:
            self._working = count
            self._crew.offer()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until everything is final and written. False: out of time, or cancelled. Raises the first error."""
        return self._crew.wait_until(self._is_done, timeout_s)

    def sync(self) -> None:
        """Make everything durable, then end the threads and close the files. Once, and after `wait` has been true.

        Raises SnapshotError where the disk fails. That is final: the kernel tells of lost bytes only once.
        """
        self._require_done()
        if self._crew.has_ended:
            self._refuse_ended()
        from concurrent.futures import ThreadPoolExecutor  # nothing before this moment needs its import

        paths = [self._folder, self._folder.parent] if self._made_folder else []
        fds = [fd for saving in self._savings.values() for fd in saving.stripes.fds]
        try:
            with ThreadPoolExecutor(2 * STRIPES, "device-sync") as pool:
                list(pool.map(os.fsync, fds))
            for path in paths:
                _sync_folder(path)
        except OSError as e:
            raise self._not_written(e) from e
        finally:
            self.cancel()

    def device_data(self, pid: int, extents: Sequence[StagedExtent]) -> DeviceData:
        """The record of one process for the manifest. Only after `wait` has been true."""
        self._require_done()
        saving = self._savings[pid]
        layout = saving.layout
        return DeviceData(tuple(extents), layout.size_bytes, layout.piece_bytes, layout.stripes, tuple(saving.digests))

    def cancel(self) -> None:
        """End the threads after the piece that they have, and close the files. Idempotent."""
        self._crew.stop()

    def _refuse_ended(self) -> NoReturn:
        self._crew.check()
        raise RuntimeError("the writer has ended")

    def _is_done(self) -> bool:
        return all(saving.is_done for saving in self._savings.values())

    def _require_done(self) -> None:
        if not self.wait(0):
            raise RuntimeError("not everything is final and written")

    def _take(self, thread: int) -> _Job | None:
        if self._working is not None and thread >= self._working:
            return None
        # Half of the threads prefer to check again, which needs no disk, so that neither waits for the other.
        takes = (_Saving.take_recheck, _Saving.take_new) if thread % 2 else (_Saving.take_new, _Saving.take_recheck)
        for take in takes:
            for _ in range(len(self._turns)):
                saving = self._turns[0]
                self._turns.rotate(-1)
                job = take(saving)
                if job is not None:
                    return job
        return None

    def _save(self, job: _Job, buffer: PieceBuffer) -> None:
        saving, length = job.saving, job.saving.layout.length(job.piece)
        data = buffer.part(0, length)
        self._read(saving, job.piece, data)
        digest = None if buffer.is_zero(length) else hashlib.sha256(data).hexdigest()
        # A piece that has become zero since is written too: nothing of what it was may stay.
        is_changed = digest != saving.digests[job.piece]
        if is_changed:
            try:
                saving.stripes.write(job.piece, data)
            except OSError as e:
                raise self._not_written(e) from e
        if self._on_bytes is not None and not job.is_recheck:
            self._on_bytes(length)
        with self._crew.lock:
            saving.finish(job, digest)
            self.bytes_seen += 0 if job.is_recheck else length
            self.bytes_written += length if is_changed else 0
            self.rewritten_pieces += job.is_recheck and is_changed
            if not job.is_final and saving.is_final:
                self._crew.offer()
            if saving.is_done:
                self._crew.announce()

    def _read(self, saving: _Saving, piece: int, data: memoryview) -> None:
        position, done = saving.layout.start(piece), 0
        while done < len(data):
            count = os.preadv(saving.source.fd, [data[done:]], position + done)
            if count == 0:
                raise SnapshotError(
                    f"the staging file of process {saving.source.pid} ends at byte {position + done}, "
                    f"not at {saving.source.size_bytes}",
                    path=str(self._folder),
                    hint="something else changed it: dump again",
                )
            done += count

    def _not_written(self, error: OSError) -> SnapshotError:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        return SnapshotError(
            f"device memory cannot be written to {self._folder}: {error.strerror}",
            path=str(error.filename or self._folder),
            hint="free space on that disk, or name a folder on another one with --to"
            if is_full
            else "check that disk (dmesg), or name a folder on another one with --to",
        )

    def _close(self) -> None:
        for saving in self._savings.values():
            saving.stripes.close()


def _check_size(source: Source) -> None:
    if source.size_bytes % PAGE_BYTES or not 0 <= source.size_bytes <= os.fstat(source.fd).st_size:
        raise ValueError(f"the staging file of process {source.pid} has not the {source.size_bytes} bytes it should")


def _sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)

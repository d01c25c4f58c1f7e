"""Saves device memory while it is still being produced.

A piece below the driver's frontier is most likely finished, but only `DeviceWriter.complete` makes it certain. So a
piece is saved once it is below the frontier; pieces saved early are read and hashed again at the end, and saved again
if they differ. Every piece is copied into a private buffer first: what is hashed is what is stored, even if the source
changes. (O_DIRECT straight from a mapping of the staging file was no faster: 2.0 against 2.7 GiB/s, and the same 1.9
with hashing.)

A first pass saves pieces while the process still runs (`DeviceWriter.begin_early`). What it saved counts only where the
digest of the frozen memory is the one of what was saved: `look` tells the digests, and the rest is saved again.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn

from gpucr.errors import SnapshotError
from gpucr.gpu_state.source import Gone, Source
from gpucr.model import DevicePart, StagedExtent
from gpucr.snapshot.device.crew import THREADS, Crew, PieceBuffer
from gpucr.snapshot.device.sink import ZERO, DeviceSink
from gpucr.snapshot.manifest import PAGE_BYTES, DeviceData

_FEW = 64
"""A first pass that has read so many pieces gives up if most of them had changed since the look."""


class _Job(NamedTuple):
    saving: _Saving
    piece: int
    is_final: bool
    is_recheck: bool
    is_early: bool = False
    reads: bool = True


class _Saved(NamedTuple):
    """The name of a piece in its place, the digest of its content if it is known, and whether it was read."""

    name: bytes
    content: bytes | None
    was_read: bool


class _Saving:
    """One process's progress. Guarded by the crew's lock."""

    def __init__(self, source: Source, piece_bytes: int) -> None:
        self.source = source
        self.piece_bytes = piece_bytes
        self.names: list[bytes | None] = [None] * self.pieces
        self.contents: list[bytes | None] = [None] * self.pieces  # digests of what is saved, where they are known
        self.seen: list[bytes | None] = [None] * self.pieces  # digests of the last look
        self.available = 0
        self.is_final = False
        self._next = 0
        self._busy = 0
        self._provisional: list[int] = []
        self._rechecks: deque[int] = deque()
        self._early: deque[_Job] = deque()
        self._early_busy = self._early_read = self._early_moved = 0
        self.was_early = False
        self.is_taken_up = True

    @property
    def pieces(self) -> int:
        return -(-self.source.size_bytes // self.piece_bytes)

    @property
    def is_done(self) -> bool:
        # A process may end, or free all that it had, between a first pass and its freeze: then nothing follows.
        if not self.is_final and self.was_early and not (self.is_taken_up and self.pieces):
            return True
        return self.is_final and self._next == self.pieces and not self._busy and not self._rechecks

    def start(self, piece: int) -> int:
        return piece * self.piece_bytes

    def length(self, piece: int) -> int:
        return min(self.piece_bytes, self.source.size_bytes - self.start(piece))

    def grow(self, source: Source) -> None:
        # Names stay valid: while the size may still grow, the last piece waits until it is full.
        self.source = source
        self._resize(self.names, self.contents, self.seen)

    def _resize(self, *lists: list[bytes | None]) -> None:
        for each in lists:
            each[self.pieces :] = [None] * max(0, self.pieces - len(each))

    def replace(self, source: Source) -> None:
        """Another source, after a first pass. What was saved of the first one stays where it is."""
        self.source, self.is_taken_up = source, True
        self._resize(self.names, self.contents)
        self.seen = [None] * self.pieces

    def differing(self) -> list[int]:
        pairs = enumerate(zip(self.seen, self.contents, strict=True))
        return [piece for piece, (seen, content) in pairs if seen is None or seen != content]

    def begin_early(self, pieces: Sequence[int], *, reads: bool) -> None:
        self.was_early, self.is_taken_up = True, False
        self._early_read = self._early_moved = 0
        self._early.extend(
            _Job(self, piece, is_final=False, is_recheck=False, is_early=True, reads=reads) for piece in pieces
        )

    def end_early(self) -> None:
        self._early.clear()

    @property
    def is_early_done(self) -> bool:
        return not self._early and not self._early_busy

    def take_early(self) -> _Job | None:
        if not self._early:
            return None
        self._early_busy += 1
        return self._early.popleft()

    def finish_early(self, job: _Job, saved: _Saved | None) -> None:
        self._early_busy -= 1
        if saved is None:
            return
        self.names[job.piece], self.contents[job.piece] = saved.name, saved.content
        self._early_read += saved.was_read
        self._early_moved += saved.was_read and saved.content != self.seen[job.piece]
        if self._early_read >= _FEW and 2 * self._early_moved > self._early_read:
            self.end_early()

    def complete(self) -> None:
        self.is_final = self.is_taken_up = True
        self.available = self.pieces
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

    def finish(self, job: _Job, saved: _Saved) -> None:
        self._busy -= 1
        self.names[job.piece], self.contents[job.piece] = saved.name, saved.content
        if not job.is_final:
            # Read before the end was known, even if it is known by now.
            (self._rechecks if self.is_final else self._provisional).append(job.piece)


class DeviceWriter:
    """Saves the device memory of several processes, with many threads.

    `start`, then for each part any number of `advance` and one `complete`; `wait`, `sync`, and `device_data` for the
    manifest. What was begun early, and is added no second time, or as nothing, needs no `complete`. `cancel` ends it at
    any time; the caller removes what was saved.

    ``seen_bytes`` counts every piece once, ``written_bytes`` those that the sink did not have in their place, again
    where they changed, and ``again_bytes`` only what was saved again. ``early_known_bytes``, ``early_read_bytes``: of a
    first pass, in which each thread works only this ``share`` of the time. ``on_bytes`` is told the size of every piece
    that has been dealt with for the first time; several threads call it at once. An error in a thread ends all of them,
    and every later call raises it: SnapshotError if the sink takes no more.
    """

    def __init__(
        self,
        sink: DeviceSink,
        sources: Sequence[Source] = (),
        *,
        threads: int = THREADS,
        share: float = 1.0,
        on_bytes: Callable[[int], None] | None = None,
    ) -> None:
        self.seen_bytes = 0
        self.written_bytes = 0
        self.rewritten_pieces = 0
        self.again_bytes = 0
        self.early_known_bytes = 0
        self.early_read_bytes = 0
        self._share = share
        self._no_rest = threading.Event()
        self._sink = sink
        self._on_bytes = on_bytes
        self._working: int | None = None
        self._savings: dict[DevicePart, _Saving] = {}
        self._turns: deque[_Saving] = deque()
        self._crew: Crew[_Job] = Crew("device-writer", threads, take=self._take, work=self._save, close=self._close)
        try:
            for source in sources:
                self.add(source)
        except BaseException:
            self.cancel()
            raise

    def add(self, source: Source) -> None:
        """Add a part, also after `start`; or another source for one that was begun early. Its own again: nothing.

        Raises SnapshotError if the sink refuses it, ValueError for a size that is not whole pages, or a part that was
        added already.
        """
        _check_size(source)
        before = self._savings.get(source.part)
        if before is not None and before.source is source and not before.is_final:
            return
        if before is not None and (before.is_final or not before.was_early):
            raise ValueError(f"device memory of process {source.part.pid} is being saved already")
        if before is not None:
            self.end_early()
            self.wait_early()
        with self._crew.lock:
            if not self._crew.has_ended:  # otherwise the last thread closes the sink, perhaps right now
                self._add(source, before)
                return
        self._refuse_ended()

    def _add(self, source: Source, before: _Saving | None) -> None:
        if before is None:
            self._sink.add(source.part, source.size_bytes)
            self._savings[source.part] = _Saving(source, self._sink.piece_bytes)
            self._turns.append(self._savings[source.part])
        else:
            if source.size_bytes != before.source.size_bytes:
                self._sink.grow(source.part, source.size_bytes)
            before.replace(source)

    @property
    def piece_bytes(self) -> int:
        return self._sink.piece_bytes

    @property
    def digest_key(self) -> bytes | None:
        return self._sink.digest_key

    def look(self, part: DevicePart, digests: Sequence[bytes | None]) -> None:
        """See `Saver`. Raises ValueError if there are not as many as pieces."""
        with self._crew.lock:
            saving = self._savings[part]
            if len(digests) != saving.pieces:
                raise ValueError(f"{len(digests)} digests of {saving.pieces} pieces")
            saving.seen = list(digests)

    def differing(self, part: DevicePart) -> list[int]:
        with self._crew.lock:
            return self._savings[part].differing()

    def begin_early(self, part: DevicePart, pieces: Sequence[int], *, reads: bool) -> None:
        """See `Saver`. Most of them having changed since the last look ends it."""
        with self._crew.lock:
            self._no_rest.clear()
            self._savings[part].begin_early(pieces, reads=reads)
            self._crew.offer()

    def end_early(self) -> None:
        self._no_rest.set()
        with self._crew.lock:
            for each in self._savings.values():
                each.end_early()

    def wait_early(self, timeout_s: float | None = None) -> bool:
        return self._crew.wait_until(lambda: all(each.is_early_done for each in self._savings.values()), timeout_s)

    def grow(self, source: Source) -> None:
        """An added part has grown. Only before `complete`. Raises as `add`."""
        _check_size(source)
        with self._crew.lock:
            saving = self._savings[source.part]
            if saving.is_final or source.size_bytes < saving.source.size_bytes:
                raise ValueError(
                    f"device memory of process {source.part.pid} has its final size, or cannot become less"
                )
            if not self._crew.has_ended:
                self._sink.grow(source.part, source.size_bytes)
                saving.grow(source)
                return
        self._refuse_ended()

    def start(self) -> None:
        """Start the threads. They wait for `advance` and `complete`."""
        self._crew.start(self._sink.piece_bytes)

    def advance(self, part: DevicePart, up_to_bytes: int) -> None:
        """The source is presumably ready up to here: full pieces below are saved."""
        with self._crew.lock:
            saving = self._savings[part]
            reached = max(0, min(up_to_bytes, saving.source.size_bytes)) // saving.piece_bytes
            if reached > saving.available:
                saving.available = reached
                self._crew.offer()

    def complete(self, part: DevicePart) -> None:
        """The source is complete and final. Pieces saved earlier are checked again."""
        with self._crew.lock:
            self._savings[part].complete()
            self._crew.offer()
            self._crew.announce()

    def limit_threads(self, count: int | None) -> None:
        """Limit the number of working threads from now on (None: all), because something else needs the processors."""
        with self._crew.lock:
            self._working = count
            self._crew.offer()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until everything is final and written. False: out of time, or cancelled. Raises the first error."""
        return self._crew.wait_until(self._is_done, timeout_s)

    def wait_for(self, part: DevicePart, timeout_s: float | None = None) -> bool:
        """Wait until this part is final and written. As `wait`."""
        return self._crew.wait_until(lambda: self._savings[part].is_done, timeout_s)

    @property
    def keeps_files(self) -> bool:
        """Whether a saved part can be read from `files`."""
        return self._sink.keeps_files

    def files(self, part: DevicePart) -> tuple[Sequence[int], int]:
        """The sink's descriptors, and the size of the pieces distributed over them. See `DeviceSink`."""
        return self._sink.files(part), self._sink.piece_bytes

    def sync(self) -> None:
        """Make everything durable, then end the threads and close the sink. Once, after `wait` returned True."""
        self._require_done()
        if self._crew.has_ended:
            self._refuse_ended()
        try:
            for part, saving in self._savings.items():
                if not saving.is_taken_up:
                    self._sink.grow(part, 0)
            self._sink.sync()
        finally:
            self.cancel()

    def device_data(self, part: DevicePart, extents: Sequence[StagedExtent]) -> DeviceData:
        """The record of one part for the manifest. Only after `wait` returned True."""
        self._require_done()
        saving = self._savings[part]
        names = [name for name in saving.names if name is not None]
        return self._sink.record(part, saving.source.size_bytes, names, extents, saving.contents)

    def cancel(self) -> None:
        """End the threads after their current piece, and close the sink. Idempotent."""
        self._no_rest.set()
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
        for take in (*takes, _Saving.take_early):
            for _ in range(len(self._turns)):
                saving = self._turns[0]
                self._turns.rotate(-1)
                job = take(saving)
                if job is not None:
                    return job
        return None

    def _save(self, job: _Job, buffer: PieceBuffer) -> None:
        if job.is_early:
            self._save_early(job, buffer)
            return
        saving, length = job.saving, job.saving.length(job.piece)
        before = saving.names[job.piece]
        saved = self._known(job, length) or self._read(job, buffer, length)
        is_changed = saved.name != (before or ZERO)
        if self._on_bytes is not None and not job.is_recheck:
            self._on_bytes(length)
        with self._crew.lock:
            saving.finish(job, saved)
            self.seen_bytes += 0 if job.is_recheck else length
            self.written_bytes += length if is_changed else 0
            self.again_bytes += length if before is not None and saved.name != before else 0
            self.rewritten_pieces += is_changed and (job.is_recheck or before is not None)
            if not job.is_final and saving.is_final:
                self._crew.offer()
            if saving.is_done:
                self._crew.announce()

    def _save_early(self, job: _Job, buffer: PieceBuffer) -> None:
        saving, length, begin = job.saving, job.saving.length(job.piece), time.monotonic()
        before, saved = saving.names[job.piece], None
        try:
            saved = self._known(job, length)
            if saved is None and job.reads:
                saved = self._read(job, buffer, length)
        except Gone:
            self.end_early()
        with self._crew.lock:
            saving.finish_early(job, saved)
            if saved is not None:
                self.early_read_bytes += length if saved.was_read else 0
                self.early_known_bytes += 0 if saved.was_read else length
                self.written_bytes += length if saved.was_read and saved.name != (before or ZERO) else 0
                self.again_bytes += length if before is not None and saved.name != before else 0
            if saving.is_early_done:
                self._crew.announce()
        if saved is not None and saved.was_read:
            self._no_rest.wait((time.monotonic() - begin) * (1 / self._share - 1))

    def _known(self, job: _Job, length: int) -> _Saved | None:
        """The piece, if its content is known to be saved. None: it must be read."""
        saving, piece = job.saving, job.piece
        before, seen = saving.names[piece], saving.seen[piece]
        if seen is not None and before is not None and seen == saving.contents[piece]:
            return _Saved(before, seen, was_read=False)
        if seen is not None and (known := self._sink.has(seen, length, before)) is not None:
            return _Saved(known, seen, was_read=False)
        return None

    def _read(self, job: _Job, buffer: PieceBuffer, length: int) -> _Saved:
        """Read the piece and have it saved. Raises Gone."""
        saving, piece = job.saving, job.piece
        source, before, seen = saving.source, saving.names[piece], saving.seen[piece]
        read = source.read_into(saving.start(piece), buffer.part(0, length))
        content = read if job.is_early else seen
        name = self._sink.put(source.part, piece, buffer, length, before)
        if content is not None and self._sink.names_are_digests and name != content:
            raise SnapshotError(
                f"device memory of process {source.part.pid} has other bytes here than on its GPU, in piece {piece}",
                path=f"/proc/{source.part.pid}",
                hint="the GPU, its bus, or host memory may be failing (`dmesg`, `nvidia-smi -q`): dump again",
            )
        return _Saved(name, content, was_read=True)

    def _close(self) -> None:
        self._sink.close()


def _check_size(source: Source) -> None:
    if source.size_bytes % PAGE_BYTES or source.size_bytes < 0:
        raise ValueError(f"device memory of process {source.part.pid} is {source.size_bytes} bytes, not whole pages")

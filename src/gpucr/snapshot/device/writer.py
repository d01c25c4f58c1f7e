"""Saves device memory while it is still being produced.

A piece below the driver's frontier is most likely finished, but only `DeviceWriter.complete` makes it certain. So a
piece is saved once it is below the frontier; pieces saved early are read and hashed again at the end, and saved again
if they differ. Every piece is copied into a private buffer first: what is hashed is what is stored, even if the source
changes. (O_DIRECT straight from a mapping of the staging file was no faster: 2.0 against 2.7 GiB/s, and the same 1.9
with hashing.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn

from gpucr.gpu_state.source import Source
from gpucr.model import DevicePart, StagedExtent
from gpucr.snapshot.device.crew import THREADS, Crew, PieceBuffer
from gpucr.snapshot.device.sink import ZERO, DeviceSink
from gpucr.snapshot.manifest import PAGE_BYTES, DeviceData


class _Job(NamedTuple):
    saving: _Saving
    piece: int
    is_final: bool
    is_recheck: bool


class _Saving:
    """One process's progress. Guarded by the crew's lock."""

    def __init__(self, source: Source, piece_bytes: int) -> None:
        self.source = source
        self.piece_bytes = piece_bytes
        self.names: list[bytes | None] = [None] * self.pieces
        self.available = 0
        self.is_final = False
        self._next = 0
        self._busy = 0
        self._provisional: list[int] = []
        self._rechecks: deque[int] = deque()

    @property
    def pieces(self) -> int:
        return -(-self.source.size_bytes // self.piece_bytes)

    @property
    def is_done(self) -> bool:
        return self.is_final and self._next == self.pieces and not self._busy and not self._rechecks

    def start(self, piece: int) -> int:
        return piece * self.piece_bytes

    def length(self, piece: int) -> int:
        return min(self.piece_bytes, self.source.size_bytes - self.start(piece))

    def grow(self, source: Source) -> None:
        # Names stay valid: while the size may still grow, the last piece waits until it is full.
        self.source = source
        self.names += [None] * (self.pieces - len(self.names))

    def complete(self) -> None:
        self.is_final = True
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

    def finish(self, job: _Job, name: bytes) -> None:
        self._busy -= 1
        self.names[job.piece] = name
        if not job.is_final:
            # Read before the end was known, even if it is known by now.
            (self._rechecks if self.is_final else self._provisional).append(job.piece)


class DeviceWriter:
    """Saves the device memory of several processes, with many threads.

    `start`, then for each part any number of `advance` and one `complete`; `wait`, `sync`, and `device_data` for the
    manifest. `cancel` ends it at any time; the caller removes what was saved.

    ``seen_bytes`` counts every piece once, ``written_bytes`` those that the sink did not have in their place, again
    where they changed. ``on_bytes`` is told the size of every piece that has been dealt with for the first time;
    several threads call it at once. An error in a thread ends all of them, and every later call raises it:
    SnapshotError if the sink takes no more.
    """

    def __init__(
        self,
        sink: DeviceSink,
        sources: Sequence[Source] = (),
        *,
        threads: int = THREADS,
        on_bytes: Callable[[int], None] | None = None,
    ) -> None:
        self.seen_bytes = 0
        self.written_bytes = 0
        self.rewritten_pieces = 0
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
        """Add a part, also after `start`. Raises SnapshotError if the sink refuses it.

        Raises ValueError for a size that is not whole pages, or a part that was added already.
        """
        _check_size(source)
        if source.part in self._savings:
            raise ValueError(f"device memory of process {source.part.pid} is being saved already")
        with self._crew.lock:
            if not self._crew.has_ended:  # otherwise the last thread closes the sink, perhaps right now
                self._sink.add(source.part, source.size_bytes)
                self._savings[source.part] = _Saving(source, self._sink.piece_bytes)
                self._turns.append(self._savings[source.part])
                return
        self._refuse_ended()

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
            self._sink.sync()
        finally:
            self.cancel()

    def device_data(self, part: DevicePart, extents: Sequence[StagedExtent]) -> DeviceData:
        """The record of one part for the manifest. Only after `wait` returned True."""
        self._require_done()
        saving = self._savings[part]
        names = [name for name in saving.names if name is not None]
        return self._sink.record(part, saving.source.size_bytes, names, extents)

    def cancel(self) -> None:
        """End the threads after their current piece, and close the sink. Idempotent."""
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
        saving, length = job.saving, job.saving.length(job.piece)
        saving.source.read_into(saving.start(job.piece), buffer.part(0, length))
        before = saving.names[job.piece]
        name = self._sink.put(saving.source.part, job.piece, buffer, length, before)
        is_changed = name != (before or ZERO)
        if self._on_bytes is not None and not job.is_recheck:
            self._on_bytes(length)
        with self._crew.lock:
            saving.finish(job, name)
            self.seen_bytes += 0 if job.is_recheck else length
            self.written_bytes += length if is_changed else 0
            self.rewritten_pieces += job.is_recheck and is_changed
            if not job.is_final and saving.is_final:
                self._crew.offer()
            if saving.is_done:
                self._crew.announce()

    def _close(self) -> None:
        self._sink.close()


def _check_size(source: Source) -> None:
    if source.size_bytes % PAGE_BYTES or source.size_bytes < 0:
        raise ValueError(f"device memory of process {source.part.pid} is {source.size_bytes} bytes, not whole pages")

"""A restore from a store: files first, into a working folder, then device memory straight into staging files."""

from __future__ import annotations

import errno
import io
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from gpucr.errors import StoreDamaged
from gpucr.snapshot.device.loader import DeviceLoader, Prefix, fill
from gpucr.snapshot.device.reader import Destination
from gpucr.snapshot.folder import IMAGES_NAME, not_written
from gpucr.snapshot.in_store import SnapshotInStore, device_area
from gpucr.snapshot.job_snapshot import JobSnapshot
from gpucr.snapshot.origin import device_bytes_of, private_bytes_of
from gpucr.snapshot.recovery import RemoveWorkingFolder
from gpucr.snapshot.shared_files import FOLDER_NAME
from gpucr.snapshot.working_folder import WorkingFolder
from gpucr.store import snapshots
from gpucr.store.backend import Buffer
from gpucr.store.pieces import PieceRef
from gpucr.store.reader import MAX_READ_BYTES, StoreReader
from gpucr.undo.interrupts import Interrupts
from gpucr.undo.steps import Meter

if TYPE_CHECKING:  # what only looks at a snapshot needs no driver
    from gpucr.undo.protection import Protection

_SMALL_BYTES = 64 << 10
_MAX_IMAGE_BYTES = 256 << 20


class StoreSource:
    """A snapshot in a store (see `RestoreSource`).

    Made before anything starts: it looks that every piece that is needed is in the index. Raises StoreDamaged,
    StoreError.
    """

    def __init__(self, snapshot: SnapshotInStore) -> None:
        self._snapshot = snapshot
        self._reader = snapshots.open_reader(snapshot.store, snapshot.stored)
        manifest = snapshot.manifest
        self._working = WorkingFolder(
            sum(file.size_bytes for file in manifest.files),
            besides_bytes=device_bytes_of(manifest) + private_bytes_of(manifest) + self.buffers_bytes,
        )
        self.folder = self._working.snapshot
        self._small_images: dict[str, bytes] | None = None

    @property
    def snapshot(self) -> JobSnapshot:
        """The snapshot."""
        return self._snapshot

    @property
    def images(self) -> Path:
        """In the working folder."""
        return self.folder / IMAGES_NAME

    @property
    def buffers_bytes(self) -> int:
        """The reader looks ahead, and each of its threads has a range of a pack."""
        return MAX_READ_BYTES

    @property
    def provides_first(self) -> bool:
        """Yes: CRIU waits for the images, and works while device memory comes."""
        return True

    @property
    def provision(self) -> tuple[str, str]:
        """Fetching."""
        return "fetch", f"fetch CRIU's images of {self._snapshot.where} to {self._working.path.parent}"

    def provide(self, protection: Protection | None, interrupts: Interrupts, meter: Meter) -> int:
        """Fetch every file."""
        if protection is not None:
            protection.protect(RemoveWorkingFolder(str(self._working.path)))
        self._working.create()
        meter.expect(sum(file.size_bytes for file in self._snapshot.manifest.files))
        with self._explained():
            for folder in (self.folder, self.images, self.folder / FOLDER_NAME):
                folder.mkdir(mode=0o700)
            refs: list[PieceRef] = []
            places: list[tuple[Path, int]] = []
            for file in self._snapshot.manifest.files:
                path = self.folder / file.path
                with _opened(path, os.O_CREAT | os.O_EXCL) as fd:
                    os.ftruncate(fd, file.size_bytes)
                pieces = self._pieces(file.path)
                places += [(path, start) for start in _starts(pieces)[:-1]]
                refs += pieces

            def deliver(number: int, data: Buffer | None) -> None:
                interrupts.check()
                path, start = places[number]
                if data is not None:
                    # Each time anew: there may be more files than a process may have open.
                    with _opened(path) as fd:
                        _write(fd, memoryview(data), start)
                meter.add(refs[number].length)

            self._reader.stream(refs, deliver)
        return sum(file.size_bytes for file in self._snapshot.manifest.files)

    def loader(self, destinations: Sequence[Destination]) -> DeviceLoader:
        """Something that streams device memory."""
        pieces = {each.pid: self._pieces(device_area(each.pid)) for each in destinations}
        return StoreLoader(self._reader, pieces, destinations)

    def open_image(self, name: str) -> BinaryIO:
        """The whole of it in memory. Small images are read with one request for many, when the first is opened."""
        if self._small_images is None:
            self._small_images = self._read_small_images()
        path = f"{IMAGES_NAME}/{name}"
        if path not in {area.name for area in self._snapshot.stored.areas}:
            raise FileNotFoundError(errno.ENOENT, "it is not in the snapshot", path)
        data = self._small_images.get(path)
        if data is None:
            if self._snapshot.stored.area(path).size_bytes > _MAX_IMAGE_BYTES:
                raise OSError(errno.EFBIG, f"it is larger than {_MAX_IMAGE_BYTES} bytes", path)
            try:
                data = self._reader.read_all(self._pieces(path))
            except StoreDamaged as e:
                raise OSError(errno.EIO, e.message, path) from e
        return io.BytesIO(data)

    def packed_bytes(self, pid: int | None = None) -> int | None:
        """What the pieces take in their packs, each counted once."""
        areas = self._snapshot.stored.areas if pid is None else [self._snapshot.stored.area(device_area(pid))]
        return self._reader.stored_bytes(ref for area in areas for ref in area.pieces(self._reader))

    def _read_small_images(self) -> dict[str, bytes]:
        areas = [
            area
            for area in self._snapshot.stored.areas
            if area.name.startswith(f"{IMAGES_NAME}/") and len(area.listed) == 1 and area.size_bytes <= _SMALL_BYTES
        ]
        found: dict[str, bytes] = {}

        def deliver(number: int, data: Buffer | None) -> None:
            area = areas[number]
            found[area.name] = bytes(area.size_bytes) if data is None else bytes(data)

        # Where one of them is damaged, it is looked at again when it is opened.
        with suppress(StoreDamaged):
            self._reader.stream((area.listed[0] for area in areas), deliver)
        return found

    def close(self) -> None:
        """Remove the working folder."""
        self._working.remove()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as e:
            hint = "free space there, or name another folder for temporary files with TMPDIR"
            message = f"CRIU's images cannot be put into {self._working.path.parent}: {e.strerror}"
            raise not_written(message, e, path=str(e.filename or self.folder), hint=hint) from e

    def _pieces(self, area: str) -> Sequence[PieceRef]:
        return self._snapshot.stored.area(area).pieces(self._reader)


class StoreLoader:
    """Streams device memory out of a store into staging files (see `DeviceLoader`).

    ``pieces`` are those of each process, by pid. The processes take turns, so that the first pieces of all come first.
    The files are fresh: pieces of zeros are left as the holes that they are.
    """

    def __init__(
        self, reader: StoreReader, pieces: Mapping[int, Sequence[PieceRef]], destinations: Sequence[Destination]
    ) -> None:
        self._reader = reader
        self._loadings = {each.pid: _Loading(each, pieces[each.pid]) for each in destinations}
        turns = zip_longest(*([(each, piece) for piece in range(each.count)] for each in self._loadings.values()))
        self._order: list[tuple[_Loading, int]] = [each for turn in turns for each in turn if each is not None]
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._has_ended = False
        self._is_cancelled = False
        self._thread = threading.Thread(target=self._run, name="store-loader", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def loaded(self, pid: int) -> int:
        """How many bytes from the beginning of this process's staging file are in place and checked."""
        with self._changed:
            return self._loadings[pid].loaded_bytes

    @property
    def loaded_bytes(self) -> int:
        """`loaded`, over all processes."""
        with self._changed:
            return sum(loading.loaded_bytes for loading in self._loadings.values())

    def wait_for(self, pid: int, up_to_bytes: int, timeout_s: float | None = None) -> bool:
        """Wait until `loaded` is at least this. False: out of time, or cancelled. Raises the first error."""
        loading = self._loadings[pid]
        wanted = min(up_to_bytes, loading.size_bytes)
        with self._changed:
            self._changed.wait_for(lambda: self._has_ended or loading.loaded_bytes >= wanted, timeout_s)
            if self._error is not None:
                raise self._error
            return loading.loaded_bytes >= wanted

    def cancel(self) -> None:
        """End the threads after what they have in hand. Idempotent."""
        self._is_cancelled = True
        if self._thread.ident is not None and threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        try:
            self._reader.stream((loading.refs[piece] for loading, piece in self._order), self._deliver)
        except _Cancelled:
            pass
        except BaseException as e:  # noqa: BLE001 - whatever it is, the one who waits must know
            self._error = e
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    def _deliver(self, number: int, data: Buffer | None) -> None:
        if self._is_cancelled:
            raise _Cancelled
        loading, piece = self._order[number]
        destination = loading.destination
        if data is not None and destination.fd is not None:
            start, needed_bytes = loading.starts[piece], loading.size_bytes
            fill(destination.fd, start, memoryview(data), pid=destination.pid, needed_bytes=needed_bytes)
        with self._changed:
            if loading.prefix.finish(piece):
                self._changed.notify_all()


class _Cancelled(Exception):
    """Nobody wants the rest."""


class _Loading:
    """How far one process is."""

    def __init__(self, destination: Destination, refs: Sequence[PieceRef]) -> None:
        self.destination = destination
        self.refs = refs
        self.starts = _starts(refs)
        self.prefix = Prefix(len(refs))

    @property
    def count(self) -> int:
        return len(self.refs)

    @property
    def size_bytes(self) -> int:
        return self.starts[-1]

    @property
    def loaded_bytes(self) -> int:
        return self.starts[self.prefix.length]


def _starts(refs: Sequence[PieceRef]) -> list[int]:
    """Where each piece begins, and where the last one ends."""
    return [0, *accumulate(ref.length for ref in refs)]


@contextmanager
def _opened(path: Path, flags: int = 0) -> Iterator[int]:
    fd = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC | flags, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)


def _write(fd: int, data: memoryview, position: int) -> None:
    while data:
        count = os.pwrite(fd, data, position)
        data, position = data[count:], position + count

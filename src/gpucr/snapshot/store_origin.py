"""A restore from a store: files first, into a working folder, then device memory straight into staging files."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from gpucr.errors import StoreDamaged
from gpucr.model import DevicePart
from gpucr.snapshot.device.reader import Deliver, PartDigests, Piece, StoredPieces
from gpucr.snapshot.folder import IMAGES_NAME, not_written
from gpucr.snapshot.in_store import SnapshotInStore, device_area
from gpucr.snapshot.origin import RestoreSource, device_bytes_of, private_bytes_of
from gpucr.snapshot.recovery import RemoveWorkingFolder
from gpucr.snapshot.shared_files import FOLDER_NAME
from gpucr.snapshot.working_folder import WorkingFolder
from gpucr.store import snapshots
from gpucr.store.backend import Buffer
from gpucr.store.pieces import PieceRef
from gpucr.store.reader import MAX_READ_BYTES, StoreReader
from gpucr.undo.interrupts import Interrupts
from gpucr.undo.steps import Meter

if TYPE_CHECKING:  # not needed for just reading a snapshot
    from gpucr.undo.protection import Protection

_SMALL_BYTES = 64 << 10
_MAX_IMAGE_BYTES = 256 << 20


class StoreSource(RestoreSource):
    """A snapshot in a store: files are fetched first, since CRIU waits for them, and works while device memory arrives.

    Made before anything starts: checks that every needed piece is in the index. Raises StoreDamaged, StoreError.
    """

    provides_first = True
    buffers_bytes = MAX_READ_BYTES
    """The reader reads ahead, and each of its threads holds a range of a pack."""

    def __init__(self, snapshot: SnapshotInStore) -> None:
        self._stored = snapshot.stored
        self._reader = snapshots.open_reader(snapshot.store, snapshot.stored)
        manifest = snapshot.manifest
        self._working = WorkingFolder(
            sum(file.size_bytes for file in manifest.files),
            besides_bytes=device_bytes_of(manifest) + private_bytes_of(manifest) + self.buffers_bytes,
        )
        fetching = f"fetch CRIU's images of {snapshot.where} to {self._working.path.parent}"
        super().__init__(snapshot, self._working.snapshot, ("fetch", fetching))
        self._small_images: dict[str, bytes] | None = None

    def begin(self) -> None:
        """Nothing: the files are fetched before device memory is read."""

    def provide(self, protection: Protection, interrupts: Interrupts, meter: Meter) -> int:
        protection.protect(RemoveWorkingFolder(str(self._working.path)))
        self._working.create()
        meter.expect(self.files_bytes)
        with self._explained():
            for folder in (self.folder, *self.image_folders, self.folder / FOLDER_NAME):
                folder.mkdir(mode=0o700)
            refs: list[PieceRef] = []
            places: list[tuple[Path, int]] = []
            for file in self.snapshot.manifest.files:
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
                    # Each time again: there may be more files than a process may have open.
                    with _opened(path) as fd:
                        _write(fd, memoryview(data), start)
                meter.add(refs[number].length)

            self._reader.stream(refs, deliver)
        return self.files_bytes

    def pieces(self) -> StoredPieces:
        """The areas of device memory."""
        parts = self.snapshot.manifest.device_parts
        return StorePieces(self._reader, {part: self._pieces(device_area(part)) for part in parts})

    def open_image(self, folder: str, name: str) -> BinaryIO:
        """The whole of it in memory. Small images are read with one request for many, when the first is opened."""
        if self._small_images is None:
            self._small_images = self._read_small_images()
        path = f"{folder}/{name}"
        if path not in {area.name for area in self._stored.areas}:
            raise FileNotFoundError(errno.ENOENT, "it is not in the snapshot", path)
        data = self._small_images.get(path)
        if data is None:
            if self._stored.area(path).size_bytes > _MAX_IMAGE_BYTES:
                raise OSError(errno.EFBIG, f"it is larger than {_MAX_IMAGE_BYTES} bytes", path)
            try:
                data = self._reader.read_all(self._pieces(path))
            except StoreDamaged as e:
                raise OSError(errno.EIO, e.message, path) from e
        return io.BytesIO(data)

    def packed_bytes(self, part: DevicePart | None = None) -> int | None:
        """What the pieces take in their packs, each counted once."""
        areas = self._stored.areas if part is None else [self._stored.area(device_area(part))]
        return self._reader.stored_bytes(ref for area in areas for ref in area.pieces(self._reader))

    def _read_small_images(self) -> dict[str, bytes]:
        areas = [
            area
            for area in self._stored.areas
            if area.name.startswith(IMAGES_NAME) and len(area.listed) == 1 and area.size_bytes <= _SMALL_BYTES
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
        return self._stored.area(area).pieces(self._reader)


class StorePieces:
    """The device memory of a snapshot in a store (see `StoredPieces`), by its list of pieces for each part."""

    def __init__(self, reader: StoreReader, refs: Mapping[DevicePart, Sequence[PieceRef]]) -> None:
        self._reader = reader
        self._refs = refs

    def starts(self, part: DevicePart) -> Sequence[int]:
        """From the lengths of the pieces."""
        return _starts(self._refs[part])

    def is_zero(self, piece: Piece) -> bool:
        """Whether it has the name of zeros."""
        return self._refs[piece.part][piece.number].is_zero

    def digests(self, part: DevicePart) -> PartDigests | None:
        """The names, if they are digests of BLAKE3."""
        refs, store = self._refs[part], self._reader.store
        piece_bytes = store.config.piece_bytes
        if store.config.hash != "blake3" or any(ref.length != piece_bytes for ref in refs[:-1]):
            return None
        return PartDigests(piece_bytes, store.digest_key, [ref.id for ref in refs])

    def stream(self, wanted: Sequence[Piece], deliver: Deliver, unchecked: Collection[DevicePart] = ()) -> None:
        """Read and check with the store's threads."""
        numbers = {place for place, piece in enumerate(wanted) if piece.part in unchecked}
        refs = (self._refs[part][number] for part, number in wanted)
        self._reader.stream(refs, deliver, unchecked=numbers)

    def close(self) -> None:
        """Nothing: the reader has nothing open."""


def _starts(refs: Sequence[PieceRef]) -> list[int]:
    """The start of each piece, and the end of the last."""
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

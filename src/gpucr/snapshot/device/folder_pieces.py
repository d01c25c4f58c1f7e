"""The device folder of a plain snapshot as a source of pieces: stripes, checked with SHA-256."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from gpucr.errors import SnapshotDamaged
from gpucr.model import DevicePart
from gpucr.snapshot.device.crew import THREADS, Crew, PieceBuffer
from gpucr.snapshot.device.reader import Deliver, DeviceReader, PartDigests, Piece
from gpucr.snapshot.device.sink import ZERO
from gpucr.snapshot.device.stripes import HINT_CHANGED, HINT_DAMAGED, Layout, Stripes
from gpucr.snapshot.manifest import DeviceData


class FolderPieces:
    """See `StoredPieces`. ``prefix``: of all file names there.

    Raises SnapshotDamaged at once if a file is missing, not a plain file, or has another size; later, with process,
    file and range, if a piece differs from its digest. A requested hole is read to check that it is still zeros.
    """

    def __init__(
        self, folder: Path, data: Mapping[DevicePart, DeviceData], *, prefix: str = "", threads: int = THREADS
    ) -> None:
        self._data = data
        self._threads = threads
        self._stripes: dict[DevicePart, Stripes] = {}
        try:
            for part, each in data.items():
                self._stripes[part] = Stripes.open(folder, part, Layout.of(each), prefix)
        except BaseException:
            self.close()
            raise

    def starts(self, part: DevicePart) -> Sequence[int]:
        """All pieces but the last have the same size."""
        data = self._data[part]
        return [*range(0, data.size_bytes, data.piece_bytes), data.size_bytes]

    def is_zero(self, piece: Piece) -> bool:
        """Whether it has no digest."""
        return self._data[piece.part].sha256[piece.number] is None

    def digests(self, part: DevicePart) -> PartDigests | None:
        """If a GPU had computed them for the dump."""
        data = self._data[part]
        if not data.blake3:
            return None
        return PartDigests(data.piece_bytes, None, [bytes.fromhex(each) if each else ZERO for each in data.blake3])

    def stream(self, wanted: Sequence[Piece], deliver: Deliver, unchecked: Collection[DevicePart] = ()) -> None:
        """Read and check with a crew."""
        numbered = enumerate(wanted)
        left = len(wanted)

        def read(job: tuple[int, Piece], buffer: PieceBuffer) -> None:
            nonlocal left
            place, piece = job
            deliver(place, self._read(piece, buffer, is_checked=piece.part not in unchecked))
            with crew.lock:
                left -= 1
                if not left:
                    crew.end()

        crew: Crew[tuple[int, Piece]] = Crew(
            "device-reader", self._threads, take=lambda _: next(numbered, None), work=read, close=lambda: None
        )
        try:
            if wanted:
                crew.start(max(self._data[part].piece_bytes for part in {piece.part for piece in wanted}))
                crew.wait_until(lambda: not left, None)
        finally:
            crew.stop()

    def close(self) -> None:
        for stripes in self._stripes.values():
            stripes.close()

    def _read(self, piece: Piece, buffer: PieceBuffer, *, is_checked: bool) -> memoryview:
        pid, stripes, digest = piece.part.pid, self._stripes[piece.part], self._data[piece.part].sha256[piece.number]
        data = buffer.part(0, stripes.layout.length(piece.number))
        stripe, offset = stripes.layout.place(piece.number)
        path = stripes.path(stripe)
        name = f"{path.parent.name}/{path.name}, which holds device memory of process {pid},"
        try:
            count = stripes.read(piece.number, data)
        except OSError as e:
            hint = "its disk may be failing (dmesg): use another copy"
            raise SnapshotDamaged(f"{name} cannot be read: {e.strerror}", path=str(path), hint=hint) from e
        if count < len(data):
            message = f"{name} ends before byte {offset + len(data)}"
            raise SnapshotDamaged(message, path=str(path), hint=HINT_CHANGED)
        if not is_checked:
            return data
        is_right = buffer.is_zero(len(data)) if digest is None else hashlib.sha256(data).hexdigest() == digest
        if not is_right:
            message = f"{name} differs from what was written, between bytes {offset} and {offset + len(data)}"
            raise SnapshotDamaged(message, path=str(path), hint=HINT_DAMAGED)
        return data


class OnlyChecked(Struct, frozen=True):
    """A destination that discards everything: stored data is read and checked, including zeros."""

    part: DevicePart
    size_bytes: int
    is_zeroed = False

    def write_from(self, position: int, data: memoryview) -> None:
        pass


def verify(folder: Path, data: Mapping[DevicePart, DeviceData], prefix: str = "") -> None:
    """Read and check all of this device memory. Raises SnapshotDamaged, naming the first that differs."""
    checked = [OnlyChecked(part, each.size_bytes) for part, each in data.items()]
    reader = DeviceReader(FolderPieces(folder, data, prefix=prefix), checked)
    try:
        reader.start()
        reader.wait()
    finally:
        reader.cancel()

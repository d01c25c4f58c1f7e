"""Files in memory that suspended processes will keep, as a sink for pieces: each goes to its place."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gpucr.gpu_state.source import FileDestination
from gpucr.linux.tmpfs import StagingFile
from gpucr.model import DevicePart, StagedExtent
from gpucr.snapshot.device.crew import PieceBuffer
from gpucr.snapshot.device.sink import ZERO
from gpucr.snapshot.device.stripes import PIECE_BYTES
from gpucr.snapshot.manifest import DeviceData

_THERE = b"\xff" * 32
"""The name of every piece that is not zeros: only its digest tells what it is."""


class RoomSink:
    """See `DeviceSink`. Nothing of it becomes a snapshot: the processes are given the files.

    `use_rooms` comes before the first `add`.
    """

    keeps_files = False
    digest_key: bytes | None = None
    names_are_digests = False
    piece_bytes = PIECE_BYTES

    def __init__(self) -> None:
        self._room_of: Callable[[DevicePart, int], StagingFile] | None = None
        self._rooms: dict[DevicePart, FileDestination] = {}

    def use_rooms(self, room_of: Callable[[DevicePart, int], StagingFile]) -> None:
        """``room_of`` returns the file for a part of this size."""
        self._room_of = room_of

    def files(self, part: DevicePart) -> Sequence[int]:
        raise ValueError("pieces in memory are in one file")

    def add(self, part: DevicePart, size_bytes: int) -> None:
        """Ask for the file, which is empty."""
        if self._room_of is None:
            raise ValueError("nobody says where pieces go")
        self._rooms[part] = FileDestination(part, self._room_of(part, size_bytes).fd, size_bytes)

    def grow(self, part: DevicePart, size_bytes: int) -> None:
        """The file's owner changes its size."""
        self.add(part, size_bytes)

    def has(self, digest: bytes, length: int, before: bytes | None) -> bytes | None:
        """Zeros, where nothing was written yet."""
        return ZERO if digest == ZERO and before in (None, ZERO) else None

    def put(self, part: DevicePart, piece: int, buffer: PieceBuffer, length: int, before: bytes | None) -> bytes:
        """Write it to its place. Raises SnapshotError if host memory runs out."""
        self._rooms[part].write_from(piece * self.piece_bytes, buffer.part(0, length))
        return _THERE

    def sync(self) -> None:
        pass

    def record(
        self,
        part: DevicePart,
        size_bytes: int,
        names: Sequence[bytes],
        extents: Sequence[StagedExtent],
        contents: Sequence[bytes | None],
    ) -> DeviceData:
        raise ValueError("pieces in memory are not a snapshot")

    def close(self) -> None:
        """The files are their owners'."""

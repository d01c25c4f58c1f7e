"""What a `DeviceWriter` needs of the place where the pieces of device memory go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from gpucr.model import DevicePart, StagedExtent
from gpucr.snapshot.device.crew import PieceBuffer
from gpucr.snapshot.manifest import DeviceData

ZERO = bytes(32)
"""The name of a piece that is all zero."""


class DeviceSink(Protocol):
    """Takes pieces, and gives each a name of 32 bytes that tells its content; that of zeros is `ZERO`.

    A folder of a plain snapshot is one (`FolderSink`), a store another. Every method raises SnapshotError where the
    place does not take what it is given. `put` is called by many threads at once, the others by one at a time.
    """

    @property
    def piece_bytes(self) -> int:
        """The size of all pieces but the last one of a part."""

    @property
    def keeps_files(self) -> bool:
        """Whether it has the pieces of a part, as they are, in `files`; else that is not to be called."""

    def files(self, part: DevicePart) -> Sequence[int]:
        """The open files of a part: piece N lies in the N-th of them, modulo their number, each as dense as can be."""

    def add(self, part: DevicePart, size_bytes: int) -> None:
        """There will be pieces of this part, so many bytes of them."""

    def grow(self, part: DevicePart, size_bytes: int) -> None:
        """It has become more. No piece of less than full size was put before."""

    def put(self, part: DevicePart, piece: int, buffer: PieceBuffer, length: int, before: bytes | None) -> bytes:
        """Take the first ``length`` bytes of the buffer as this piece, and return its name.

        ``before``: the name of what was put there before, None: nothing was. Nothing need be done where that is equal.
        """

    def sync(self) -> None:
        """Make all that was put durable. Once, after the last `put`."""

    def record(
        self, part: DevicePart, size_bytes: int, names: Sequence[bytes], extents: Sequence[StagedExtent]
    ) -> DeviceData:
        """What the manifest says of this part, whose pieces have these names."""

    def close(self) -> None:
        """No piece comes any more. Idempotent; may be called by any thread."""

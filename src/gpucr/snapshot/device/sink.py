"""The interface of a place for a `DeviceWriter`'s pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from gpucr.model import DevicePart, StagedExtent
from gpucr.snapshot.device.crew import PieceBuffer
from gpucr.snapshot.manifest import DeviceData

ZERO = bytes(32)
"""The name of an all-zero piece."""


class DeviceSink(Protocol):
    """Stores pieces, and gives each a 32-byte name that identifies its content; that of zeros is `ZERO`.

    A folder of a plain snapshot is one (`FolderSink`), a store another. Every method raises SnapshotError if storing
    fails. Many threads call `put` at once; the others are called by one at a time.
    """

    @property
    def piece_bytes(self) -> int:
        """The size of all pieces of a part but the last."""

    @property
    def digest_key(self) -> bytes | None:
        """The key of the digests that `has` gets; None: without one."""

    @property
    def names_are_digests(self) -> bool:
        """Whether the name of a piece is that digest."""

    def has(self, digest: bytes, length: int, before: bytes | None) -> bytes | None:
        """The name of a piece with this BLAKE3 digest (`ZERO`: zeros) that need not be put; None: put it.

        ``before``: as in `put`. May read what is stored.
        """

    @property
    def keeps_files(self) -> bool:
        """Whether a part's raw pieces are in `files`; otherwise do not call that."""

    def files(self, part: DevicePart) -> Sequence[int]:
        """The open files of a part: piece N is in file N modulo their number, without gaps."""

    def add(self, part: DevicePart, size_bytes: int) -> None:
        """Announce a part and its size."""

    def grow(self, part: DevicePart, size_bytes: int) -> None:
        """The part has another size. A piece whose length changes is put again."""

    def put(self, part: DevicePart, piece: int, buffer: PieceBuffer, length: int, before: bytes | None) -> bytes:
        """Store the first ``length`` bytes of the buffer as this piece, and return its name.

        ``before``: the name of the piece's earlier content; None: none. If it is equal, nothing need be done.
        """

    def sync(self) -> None:
        """Make all pieces durable. Once, after the last `put`."""

    def record(
        self,
        part: DevicePart,
        size_bytes: int,
        names: Sequence[bytes],
        extents: Sequence[StagedExtent],
        contents: Sequence[bytes | None],
    ) -> DeviceData:
        """The manifest's record of this part, whose pieces have these names, and digests (as in `has`) if known."""

    def close(self) -> None:
        """No more pieces. Idempotent; callable from any thread."""

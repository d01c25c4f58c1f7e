"""The device folder of a plain snapshot as a sink for pieces: stripes, with SHA-256 as names."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from msgspec.structs import replace

from gpucr.errors import SnapshotError
from gpucr.linux import durable
from gpucr.linux.memory import spread
from gpucr.model import DevicePart, StagedExtent
from gpucr.snapshot.device.crew import PieceBuffer
from gpucr.snapshot.device.sink import ZERO
from gpucr.snapshot.device.stripes import PIECE_BYTES, STRIPES, Layout, Stripes
from gpucr.snapshot.manifest import DeviceData


class FolderSink:
    """See `DeviceSink`. The folder (0700) and the files (0600) are made here and must not exist.

    ``folder`` may be set later, before the first `add`.
    """

    def __init__(self, folder: Path = Path(), *, piece_bytes: int = PIECE_BYTES) -> None:
        self.folder = folder
        self._piece_bytes = piece_bytes
        self._made_folder = False
        self._stripes: dict[DevicePart, Stripes] = {}

    @property
    def piece_bytes(self) -> int:
        """The size of all pieces of a part but the last."""
        return self._piece_bytes

    keeps_files = True
    digest_key: bytes | None = None
    names_are_digests = False

    def has(self, digest: bytes, length: int, before: bytes | None) -> bytes | None:
        """Only zeros, where nothing was written yet."""
        return ZERO if digest == ZERO and before in (None, ZERO) else None

    def files(self, part: DevicePart) -> Sequence[int]:
        return self._stripes[part].fds

    def add(self, part: DevicePart, size_bytes: int) -> None:
        """Make the files of a part."""
        with self._explained():
            if not self._made_folder:
                self.folder.mkdir(mode=0o700)
                self._made_folder = True
            self._stripes[part] = Stripes.create(self.folder, part, Layout(size_bytes, self._piece_bytes, STRIPES))

    def grow(self, part: DevicePart, size_bytes: int) -> None:
        """Change the size of a part's files."""
        with self._explained():
            stripes = self._stripes[part]
            stripes.grow(replace(stripes.layout, size_bytes=size_bytes))

    def put(self, part: DevicePart, piece: int, buffer: PieceBuffer, length: int, before: bytes | None) -> bytes:
        """Write a piece unless it is there already: a hole reads as zeros."""
        data = buffer.part(0, length)
        name = ZERO if buffer.is_zero(length) else hashlib.sha256(data).digest()
        # A piece that has become zero is written too: its old content must not remain.
        if name != (before or ZERO):
            with self._explained():
                self._stripes[part].write(piece, data)
        return name

    def sync(self) -> None:
        """Make all files durable. An error is final: the kernel reports lost bytes only once."""
        paths = [self.folder, self.folder.parent] if self._made_folder else []
        fds = [fd for stripes in self._stripes.values() for fd in stripes.fds]
        with self._explained():
            if fds:
                spread(os.fsync, fds, 2 * STRIPES)
            for path in paths:
                durable.sync(path)

    def record(
        self,
        part: DevicePart,
        size_bytes: int,
        names: Sequence[bytes],
        extents: Sequence[StagedExtent],
        contents: Sequence[bytes | None],
    ) -> DeviceData:
        """The manifest's record: the digest of every piece."""
        digests, by_gpu = _in_hex(names), _in_hex([each for each in contents if each is not None])
        known = by_gpu if len(by_gpu) == len(names) else ()
        return DeviceData(tuple(extents), size_bytes, self._piece_bytes, STRIPES, digests, blake3=known)

    def close(self) -> None:
        for stripes in self._stripes.values():
            stripes.close()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as e:
            is_full = e.errno in (errno.ENOSPC, errno.EDQUOT)
            raise SnapshotError(
                f"device memory cannot be written to {self.folder}: {e.strerror}",
                path=str(e.filename or self.folder),
                hint="free space on that disk, or name a folder on another one with --to"
                if is_full
                else "check that disk (dmesg), or name a folder on another one with --to",
                code="GPUCR-NO-SPACE" if is_full else None,
            ) from e


def _in_hex(digests: Sequence[bytes]) -> tuple[str | None, ...]:
    return tuple(None if each == ZERO else each.hex() for each in digests)

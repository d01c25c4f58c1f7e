"""Device memory while it is away from its GPU: reading and filling it.

Neither needs to be a file. A `Source` reads a piece into a buffer, a `Destination` takes a piece from one; both are
thread-safe.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from mmap import PAGESIZE
from typing import Protocol, runtime_checkable

from msgspec import Struct

from gpucr.errors import SnapshotError
from gpucr.model import DevicePart
from gpucr.quantities import format_bytes


class Source(Protocol):
    """A part of a process's device memory while it is away from the GPU."""

    @property
    def part(self) -> DevicePart:
        """Which process's device memory it is, and at which level."""

    @property
    def size_bytes(self) -> int:
        """Its size: a multiple of 4 KiB."""

    def read_into(self, position: int, data: memoryview) -> bytes | None:
        """Read from ``position`` into ``data``. Thread-safe. Raises SnapshotError.

        Returns the digest of what was read, if the source has one: as in `Saver.look`. Raises Gone if its process runs,
        and it is not to be read any more.
        """


@runtime_checkable
class NamesItself(Protocol):
    """A source that can tell the digests of its pieces faster than they can be read."""

    def digests(self, piece_bytes: int, key: bytes | None) -> Sequence[bytes | None]:
        """One for each piece, in order, for `Saver.look`. None: not known. Raises GpucrError."""


class Gone(Exception):
    """Device memory of a running process is not to be read any more: what was wanted is saved later."""


class Destination(Protocol):
    """The place to which a part of a process's device memory returns."""

    @property
    def part(self) -> DevicePart:
        """Which process's device memory it is, and at which level."""

    @property
    def size_bytes(self) -> int:
        """How many bytes it takes: those of the part in the snapshot."""

    @property
    def is_zeroed(self) -> bool:
        """Whether it starts as zeros: then pieces of zeros are neither read nor written."""

    def write_from(self, position: int, data: memoryview) -> None:
        """Write checked ``data`` to ``position``. Thread-safe. Raises SnapshotError."""


class Saver(Protocol):
    """Saves device memory while it is being produced (`gpucr.snapshot.device.DeviceWriter`)."""

    @property
    def piece_bytes(self) -> int:
        """The size of its pieces."""

    @property
    def digest_key(self) -> bytes | None:
        """The key of the digests that it can compare; None: without one."""

    def look(self, part: DevicePart, digests: Sequence[bytes | None]) -> None:
        """The digests of the source's pieces now: BLAKE3, 32 bytes; zeros for a piece of zeros; None: not known.

        A piece that is saved with this content, or that the place has, is not read.
        """

    def differing(self, part: DevicePart) -> list[int]:
        """The pieces whose saved content is not known to be that of the last look. Reads nothing."""

    def begin_early(self, part: DevicePart, pieces: Sequence[int], *, reads: bool) -> None:
        """Save these pieces now, though the source may change. Without ``reads`` only those that need not be read."""

    def end_early(self) -> None:
        """Forget what was not begun yet."""

    def wait_early(self, timeout_s: float | None = None) -> bool:
        """Wait until what was begun early is done. False: out of time. Raises the saver's error."""

    @property
    def keeps_files(self) -> bool:
        """Whether saved data can be read from its `files`, even before there is a snapshot."""

    def files(self, part: DevicePart) -> tuple[Sequence[int], int]:
        """Where an added part goes: the files, over which pieces are distributed round-robin, and the piece size."""

    def add(self, source: Source) -> None:
        """Announce a part; one that was begun early has another source from now on."""

    def grow(self, source: Source) -> None:
        """An added part has grown; its existing data has not moved."""

    def advance(self, part: DevicePart, up_to_bytes: int) -> None:
        """At least this much of it is ready."""

    def complete(self, part: DevicePart) -> None:
        """All of it is ready, and will not change any more."""

    def limit_threads(self, count: int | None) -> None:
        """Use this many threads from now on (None: all)."""

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until everything is saved. False: out of time. Raises the saver's error."""

    def wait_for(self, part: DevicePart, timeout_s: float | None = None) -> bool:
        """Wait until this part is saved. False: out of time. Raises the saver's error."""


class SavedLater:
    """A `Saver` that saves nothing: all device memory is saved later from the frozen job."""

    keeps_files = False
    piece_bytes = 0
    digest_key: bytes | None = None

    def look(self, part: DevicePart, digests: Sequence[bytes | None]) -> None:
        pass

    def differing(self, part: DevicePart) -> list[int]:
        return []

    def begin_early(self, part: DevicePart, pieces: Sequence[int], *, reads: bool) -> None:
        pass

    def end_early(self) -> None:
        pass

    def wait_early(self, timeout_s: float | None = None) -> bool:
        return True

    def files(self, part: DevicePart) -> tuple[Sequence[int], int]:
        raise ValueError("nothing is saved yet")

    def add(self, source: Source) -> None:
        pass

    def grow(self, source: Source) -> None:
        pass

    def advance(self, part: DevicePart, up_to_bytes: int) -> None:
        pass

    def complete(self, part: DevicePart) -> None:
        pass

    def limit_threads(self, count: int | None) -> None:
        pass

    def wait(self, timeout_s: float | None = None) -> bool:
        return False

    def wait_for(self, part: DevicePart, timeout_s: float | None = None) -> bool:
        return False


class FileSource(Struct, frozen=True):
    """A staging file (see `Source`). The caller keeps ``fd`` open until all is saved.

    Raises ValueError for a size that is not whole pages, or is larger than the file.
    """

    part: DevicePart
    fd: int
    size_bytes: int

    def __post_init__(self) -> None:
        """Raise ValueError as the class says."""
        if self.size_bytes % PAGESIZE or not 0 <= self.size_bytes <= os.fstat(self.fd).st_size:
            raise ValueError(
                f"the staging file of process {self.part.pid} has not the {self.size_bytes} bytes it should"
            )

    def read_into(self, position: int, data: memoryview) -> None:
        done = 0
        while done < len(data):
            count = os.preadv(self.fd, [data[done:]], position + done)
            if count == 0:
                raise SnapshotError(
                    f"the staging file of process {self.part.pid} ends at byte {position + done}, "
                    f"not at {self.size_bytes}",
                    path=f"/proc/{os.getpid()}/fd/{self.fd}",
                    hint="something else changed it: dump again",
                )
            done += count


class FileDestination(Struct, frozen=True):
    """A fresh staging file (see `Destination`): zeros stay holes.

    The caller keeps ``fd`` open until all is written. Raises ValueError if the file is shorter.
    """

    part: DevicePart
    fd: int
    size_bytes: int
    is_zeroed = True

    def __post_init__(self) -> None:
        """Raise ValueError as the class says."""
        if os.fstat(self.fd).st_size < self.size_bytes:
            raise ValueError(f"the staging file of process {self.part.pid} is shorter than its device memory")

    def write_from(self, position: int, data: memoryview) -> None:
        """Write to the file. Raises SnapshotError if host memory runs out."""
        done = 0
        try:
            while done < len(data):
                done += os.pwritev(self.fd, [data[done:]], position + done)
        except OSError as e:
            raise SnapshotError(
                f"device memory of process {self.part.pid} cannot be put into host memory: {e.strerror}",
                path=f"/proc/{os.getpid()}/fd/{self.fd}",
                hint=f"free host memory: {format_bytes(self.size_bytes)} are needed for this process",
                code="GPUCR-HOST-MEMORY",
            ) from e

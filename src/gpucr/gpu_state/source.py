"""Device memory while it is away from its GPU: who reads it there, and who fills it.

Neither end needs to be a file. A `Source` reads a piece into a buffer, a `Destination` takes a piece from one; both are
asked by many threads at once.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from mmap import PAGESIZE
from typing import Protocol

from msgspec import Struct

from gpucr.errors import SnapshotError
from gpucr.model import DevicePart
from gpucr.quantities import format_bytes


class Source(Protocol):
    """A part of a process's device memory, wherever it is while it is away from the GPU."""

    @property
    def part(self) -> DevicePart:
        """Whose, and which."""

    @property
    def size_bytes(self) -> int:
        """How much: a multiple of 4 KiB."""

    def read_into(self, position: int, data: memoryview) -> None:
        """Fill ``data`` with what is at ``position``; many threads do so at once. Raises SnapshotError."""


class Destination(Protocol):
    """Where a part of a process's device memory is put on its way back."""

    @property
    def part(self) -> DevicePart:
        """Whose, and which."""

    @property
    def size_bytes(self) -> int:
        """How much it takes."""

    @property
    def is_zeroed(self) -> bool:
        """Whether it reads as zeros where nothing was written: then pieces of zeros are neither read nor written."""

    def write_from(self, position: int, data: memoryview) -> None:
        """Take ``data``, which was checked, to ``position``; many threads do so at once. Raises SnapshotError."""


class Saver(Protocol):
    """What saves device memory while it is being produced (`gpucr.snapshot.device.DeviceWriter`)."""

    @property
    def keeps_files(self) -> bool:
        """Whether what is saved can be read again by whoever has its `files`, also before there is a snapshot."""

    def files(self, part: DevicePart) -> tuple[Sequence[int], int]:
        """Where a part that was added goes: files, to which pieces are dealt out in turn, and the size of a piece."""

    def add(self, source: Source) -> None:
        """There will be this."""

    def grow(self, source: Source) -> None:
        """One that was added has become larger; nothing of what it has so far moved."""

    def advance(self, part: DevicePart, up_to_bytes: int) -> None:
        """So much of it is there, as far as is known."""

    def complete(self, part: DevicePart) -> None:
        """All of it is there, and will not change any more."""

    def limit_threads(self, count: int | None) -> None:
        """Take so many threads from now on (None: all)."""

    def wait(self, timeout_s: float | None = None) -> bool:
        """Until all of it is saved. False: out of time. Raises what ended the saving."""

    def wait_for(self, part: DevicePart, timeout_s: float | None = None) -> bool:
        """Until all of this part is saved. False: out of time. Raises what ended the saving."""


class SavedLater:
    """Takes the place of what saves device memory (see `Saver`): all of it is saved from the frozen job."""

    keeps_files = False

    def files(self, part: DevicePart) -> tuple[Sequence[int], int]:
        """Nothing has any."""
        raise ValueError("nothing is saved yet")

    def add(self, source: Source) -> None:
        """Nothing."""

    def grow(self, source: Source) -> None:
        """Nothing."""

    def advance(self, part: DevicePart, up_to_bytes: int) -> None:
        """Nothing."""

    def complete(self, part: DevicePart) -> None:
        """Nothing."""

    def limit_threads(self, count: int | None) -> None:
        """Nothing."""

    def wait(self, timeout_s: float | None = None) -> bool:
        """Nothing is."""
        return False

    def wait_for(self, part: DevicePart, timeout_s: float | None = None) -> bool:
        """Nothing is."""
        return False


class FileSource(Struct, frozen=True):
    """A staging file (see `Source`). ``fd`` is the caller's, who keeps it open until all is saved.

    Raises ValueError for a size that is not whole pages, or that the file has not.
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
        """Read the file."""
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
    """A fresh staging file (see `Destination`): zeros are left as the holes that they are.

    ``fd`` is the caller's, who keeps it open until all is there. Raises ValueError where the file is shorter.
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
        """Write to the file. Raises SnapshotError where host memory runs out."""
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

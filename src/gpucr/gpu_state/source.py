"""Device memory of a process that can be read while it is being produced, and who reads it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from mmap import PAGESIZE
from typing import Protocol

from gpucr.errors import SnapshotError


class Source(Protocol):
    """The device memory of one process, wherever it is while it is away from the GPU."""

    @property
    def pid(self) -> int:
        """Whose."""

    @property
    def size_bytes(self) -> int:
        """How much: a multiple of 4 KiB."""

    def read_into(self, position: int, data: memoryview) -> None:
        """Fill ``data`` with what is at ``position``; many threads do so at once. Raises SnapshotError."""


class Saver(Protocol):
    """What saves device memory while it is being produced (`gpucr.snapshot.device.DeviceWriter`)."""

    def add(self, source: Source) -> None:
        """There will be this."""

    def grow(self, source: Source) -> None:
        """One that was added has become larger; nothing of what it has so far moved."""

    def advance(self, pid: int, up_to_bytes: int) -> None:
        """So much of it is there, as far as is known."""

    def complete(self, pid: int) -> None:
        """All of it is there, and will not change any more."""

    def limit_threads(self, count: int | None) -> None:
        """Take so many threads from now on (None: all)."""


@dataclass(frozen=True)
class FileSource:
    """A staging file (see `Source`). ``fd`` is the caller's, who keeps it open until all is saved.

    Raises ValueError for a size that is not whole pages, or that the file has not.
    """

    pid: int
    fd: int
    size_bytes: int

    def __post_init__(self) -> None:
        """Raise ValueError as the class says."""
        if self.size_bytes % PAGESIZE or not 0 <= self.size_bytes <= os.fstat(self.fd).st_size:
            raise ValueError(f"the staging file of process {self.pid} has not the {self.size_bytes} bytes it should")

    def read_into(self, position: int, data: memoryview) -> None:
        """Read the file."""
        done = 0
        while done < len(data):
            count = os.preadv(self.fd, [data[done:]], position + done)
            if count == 0:
                raise SnapshotError(
                    f"the staging file of process {self.pid} ends at byte {position + done}, not at {self.size_bytes}",
                    path=f"/proc/{os.getpid()}/fd/{self.fd}",
                    hint="something else changed it: dump again",
                )
            done += count

"""What a restore needs of whatever fills staging files, and what those who do it have in common."""

from __future__ import annotations

import os
from typing import Protocol

from gpucr.errors import SnapshotError
from gpucr.quantities import format_bytes


class DeviceLoader(Protocol):
    """Fills the staging files of several processes, each from its beginning, with threads of its own.

    `wait_for` raises the first error of a thread; every piece was checked before it is in place.
    """

    def start(self) -> None:
        """Begin."""

    def loaded(self, pid: int) -> int:
        """How many bytes from the beginning of this process's staging file are in place and checked."""

    @property
    def loaded_bytes(self) -> int:
        """`loaded`, over all processes."""

    def wait_for(self, pid: int, up_to_bytes: int, timeout_s: float | None = None) -> bool:
        """Wait until `loaded` is at least this. False: out of time, or cancelled."""

    def cancel(self) -> None:
        """End the threads after what they have in hand. Idempotent."""


class Prefix:
    """Which of some pieces are finished, and how many from the first one on. Not for several threads at once."""

    def __init__(self, pieces: int) -> None:
        self._finished = bytearray(pieces)
        self.length = 0

    @property
    def is_complete(self) -> bool:
        """Whether all are finished."""
        return self.length == len(self._finished)

    def finish(self, piece: int) -> bool:
        """This piece is finished. Whether the prefix has grown."""
        self._finished[piece] = True
        if piece != self.length:
            return False
        gap = self._finished.find(0, self.length)
        self.length = len(self._finished) if gap < 0 else gap
        return True


def fill(fd: int, position: int, data: memoryview, *, pid: int, needed_bytes: int) -> None:
    """Put checked bytes into the staging file of a process. Raises SnapshotError where host memory runs out."""
    done = 0
    try:
        while done < len(data):
            done += os.pwritev(fd, [data[done:]], position + done)
    except OSError as e:
        raise SnapshotError(
            f"device memory of process {pid} cannot be put into host memory: {e.strerror}",
            path=f"/proc/{os.getpid()}/fd/{fd}",
            hint=f"free host memory: {format_bytes(needed_bytes)} are needed for this process",
            code="GPUCR-HOST-MEMORY",
        ) from e

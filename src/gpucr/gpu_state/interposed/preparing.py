"""What is made ready for a process's memory while it still runs."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from gpucr.errors import GpucrError
from gpucr.gpu_state.interposed.host_copy import FILE_NAME
from gpucr.gpu_state.interposed.keeping import SAVED_FIRST, Keeping, Way
from gpucr.interposer.vault import Vaults
from gpucr.linux.tmpfs import StagingFile
from gpucr.linux.work import Work


class Room:
    """A file in host memory for the memory of one process, made when it is needed."""

    def __init__(self) -> None:
        self._file: StagingFile | None = None

    def of(self, size_bytes: int) -> StagingFile:
        """The file, with at least this size. Raises OSError."""
        if self._file is None:
            self._file = StagingFile.create(size_bytes, FILE_NAME)
        if self._file.size_bytes < size_bytes:
            self._file.resize(size_bytes)
        return self._file

    def fill(self, size_bytes: int) -> None:
        """Allocate this much now, or what there is: the rest is allocated on demand."""
        with contextlib.suppress(OSError):
            if self._file is None:
                self._file = StagingFile.create(size_bytes, FILE_NAME)
            self._file.populate(0, size_bytes)

    def close(self) -> None:
        """Close the file, which a process may have too."""
        if self._file is not None:
            self._file.close()


class Unprepared:
    """Nothing is ready. ``needed``: the memory that will leave, in bytes per GPU UUID.

    ``choice``: how it is kept for saving while the process runs again.
    """

    def __init__(self, needed: Mapping[str, int]) -> None:
        self.needed = needed
        self.choice = SAVED_FIRST

    def error(self) -> GpucrError | OSError | None:
        """Why gpucr cannot use CUDA itself; None: it can, or has not tried."""
        return None

    def wait(self) -> None:
        """Wait until everything is ready, and choose how the memory is kept."""


class Preparation(Unprepared):
    """Starts vaults and makes room in a thread of its own. ``to_host``: the memory goes to that room."""

    def __init__(
        self, needed: Mapping[str, int], vaults: Vaults, keeping: Keeping, room: Room, *, to_host: bool
    ) -> None:
        super().__init__(needed)
        self._vaults = vaults
        self._keeping = keeping
        self._room = room
        self._to_host = to_host
        self._work = Work(self._prepare, "vault")

    def _prepare(self) -> GpucrError | OSError | None:
        try:
            self._vaults.prepare()
            for uuid in self.needed:
                self._vaults.start_if_roomy(uuid)
        except (GpucrError, OSError) as error:
            return error
        if self._to_host:
            self._room.fill(sum(self.needed.values()))
        return None

    def error(self) -> GpucrError | OSError | None:
        return self._work.wait()

    def wait(self) -> None:
        """All processes must have said what they need (`Keeping.need`)."""
        if self.error() is None and self.choice is SAVED_FIRST and self.needed:
            self.choice = self._keeping.choice()
            if self.choice.way is Way.IN_HOST_MEMORY:
                self._room.fill(sum(self.needed.values()))

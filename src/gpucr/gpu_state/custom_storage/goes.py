"""Where the bytes go that the driver hands over: to the snapshot, to a disk, or to host memory."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Protocol

from msgspec import Struct

from gpucr.gpu_state.custom_storage import kept
from gpucr.gpu_state.custom_storage.client import Carrier
from gpucr.gpu_state.custom_storage.holding import PAGE_BYTES
from gpucr.gpu_state.custom_storage.messages import Ask
from gpucr.gpu_state.custom_storage.spool import Spool, SpoolFile
from gpucr.gpu_state.source import FileSource, Saver, Source
from gpucr.linux.tmpfs import KEPT_NAME, StagingFile
from gpucr.model import DevicePart, ProcessId, StagedExtent

_WAIT_S = 0.1

File = StagingFile | SpoolFile


class HandedOver(Struct, frozen=True):
    """One process's memory, which the carrier has. ``restore_thread`` is the process's."""

    part: DevicePart
    process: ProcessId
    extents: tuple[StagedExtent, ...]
    restore_thread: int
    carrier: Carrier

    @property
    def size_bytes(self) -> int:
        """All of it, in whole pages for each GPU."""
        return sum(extent.size_bytes for extent in self.extents)


class Taken:
    """Memory on its way; of this class itself: none, the process has all of it.

    ``extents`` and ``source``: as in `Stored`.
    """

    def __init__(self, extents: tuple[StagedExtent, ...] = (), source: Source | None = None) -> None:
        self.extents = extents
        self.source = source

    def start(self) -> None:
        """Let the carrier bring it there."""

    def wait_saved(self) -> None:
        """Wait until all bytes are in their final place. Raises what prevented that."""

    def complete(self) -> None:
        """The process is CHECKPOINTED. After this the source is final."""

    def let_go(self) -> None:
        """The process has its memory again."""


class Goes(Protocol):
    """Where the memory of one process goes. ``words``: for messages."""

    words: str

    def prepare(self, size_bytes: int) -> None:
        """The process runs: begin to make room for about this much."""

    def wait_prepared(self) -> None:
        """Wait until the room of `prepare` is there."""

    def take(self, handed: HandedOver) -> Taken:
        """It holds this from now on. Raises OSError, CustomStorageError where there is no room."""

    def close(self) -> None:
        """Free what holds the data here. Idempotent."""


class CarriedSource:
    """See `Source`: device memory that the carrier sees on its GPUs."""

    def __init__(self, part: DevicePart, size_bytes: int, carrier: Carrier) -> None:
        self.part = part
        self.size_bytes = size_bytes
        self._carrier = carrier

    def read_into(self, position: int, data: memoryview) -> None:
        self._carrier.read_into(self.part.pid, position, data)


class ToSaver:
    """The saver takes the bytes while they are on the GPU, and has them in files afterwards."""

    words = "the snapshot"

    def __init__(self, saver: Saver) -> None:
        self._saver = saver

    def take(self, handed: HandedOver) -> Taken:
        return _BeingSaved(handed, self._saver) if handed.size_bytes else Taken(handed.extents)

    def prepare(self, size_bytes: int) -> None:
        """The saver makes the room."""

    def wait_prepared(self) -> None:
        """It has."""

    def close(self) -> None:
        """The saver has the data."""


class _BeingSaved(Taken):
    def __init__(self, handed: HandedOver, saver: Saver) -> None:
        super().__init__(handed.extents, CarriedSource(handed.part, handed.size_bytes, handed.carrier))
        self._handed = handed
        self._saver = saver

    def start(self) -> None:
        self._handed.carrier.place(self._handed.process, *self._saver.files(self._handed.part))

    def wait_saved(self) -> None:
        while not self._saver.wait_for(self._handed.part, _WAIT_S):
            pass
        self._handed.carrier.of("saved", self._handed.process)


class _ToFile:
    """A copy in a file of gpucr's. With ``keeps_itself`` the process keeps it for a resume when gpucr has ended."""

    def __init__(self, new: Callable[[int], File], *, keeps_itself: bool = False) -> None:
        self._new = new
        self._made: list[File] = []
        self._keeps_itself = keeps_itself

    def prepare(self, size_bytes: int) -> None:
        self._made.append(self._new(size_bytes))

    def wait_prepared(self) -> None:
        """The room was made at once."""

    def take(self, handed: HandedOver) -> Taken:
        self.wait_prepared()
        if not self._made:
            self._made.append(self._new(handed.size_bytes))
        return _Copied(handed, self._made[0], keeps_itself=self._keeps_itself)

    def close(self) -> None:
        """Close the copy. What the process holds of it stays."""
        self.wait_prepared()
        for each in self._made:
            each.close()


class ToDisk(_ToFile):
    """Host memory has no room for it."""

    def __init__(self, spool: Spool) -> None:
        super().__init__(spool.file)
        self.words = f"a disk ({spool.folder})"


class ToHostMemory(_ToFile):
    """Its pages are made while the process runs."""

    words = "host memory"

    def __init__(self, *, keeps_itself: bool) -> None:
        super().__init__(lambda size_bytes: StagingFile.create(size_bytes, KEPT_NAME), keeps_itself=keeps_itself)
        self._populating: list[threading.Thread] = []

    def prepare(self, size_bytes: int) -> None:
        with contextlib.suppress(OSError):  # the rest is allocated on demand
            super().prepare(size_bytes)
            thread = threading.Thread(target=_populate, args=(self._made[-1],), daemon=True)
            thread.start()
            self._populating.append(thread)

    def wait_prepared(self) -> None:
        for each in self._populating:
            each.join()


class _Copied(Taken):
    """It can be read when the process is CHECKPOINTED."""

    def __init__(self, handed: HandedOver, file: File, *, keeps_itself: bool) -> None:
        super().__init__(handed.extents)
        self._handed = handed
        self._file = file
        self._keeps_itself = keeps_itself

    def start(self) -> None:
        file, carrier, process = self._file, self._handed.carrier, self._handed.process
        file.resize(max(file.size_bytes, self._handed.size_bytes))
        carrier.place(process, [file.fd], max(file.size_bytes, PAGE_BYTES))
        carrier.of("copy", process)

    def complete(self) -> None:
        file, handed = self._file, self._handed
        file.resize(handed.size_bytes)
        self.source = FileSource(handed.part, file.fd, handed.size_bytes)
        if self._keeps_itself:
            kept.keep(handed.restore_thread, file.fd, file.size_bytes)
        handed.carrier.ask(Ask("saved", handed.part.pid, keeps_itself=self._keeps_itself))

    def let_go(self) -> None:
        if self._keeps_itself:
            kept.let_go(self._handed.part.pid, self._handed.restore_thread)


def _populate(file: StagingFile) -> None:
    with contextlib.suppress(OSError):
        file.populate(0, file.size_bytes)

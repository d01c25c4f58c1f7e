"""Where the bytes go that the driver hands over: to the snapshot, to a disk, or to host memory."""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
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


class Taken(Protocol):
    """Memory on its way."""

    @property
    def extents(self) -> tuple[StagedExtent, ...]:
        """As in `Stored`."""

    @property
    def source(self) -> Source | None:
        """The readable data; None: not yet, or nothing."""

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

    @property
    def words(self) -> str:
        """The place, as messages name it."""

    def prepare(self, size_bytes: int) -> None:
        """The process runs: begin to make room for about this much."""

    def wait_prepared(self) -> None:
        """Wait until `prepare`'s work is done."""

    def take(self, handed: HandedOver) -> Taken:
        """It holds this from now on. Raises OSError, CustomStorageError where there is no room."""

    def close(self) -> None:
        """Free what holds the data here. Idempotent."""


class NothingTaken:
    """See `Taken`: the process has all of its memory, or none on a GPU."""

    source: Source | None = None

    def __init__(self, extents: tuple[StagedExtent, ...] = ()) -> None:
        self.extents = extents

    def start(self) -> None:
        pass

    def wait_saved(self) -> None:
        pass

    def complete(self) -> None:
        pass

    def let_go(self) -> None:
        pass


class CarriedSource:
    """See `Source`: device memory that the carrier sees on its GPUs."""

    def __init__(self, part: DevicePart, size_bytes: int, carrier: Carrier) -> None:
        self.part = part
        self.size_bytes = size_bytes
        self._carrier = carrier

    def read_into(self, position: int, data: memoryview) -> None:
        self._carrier.read_into(self.part.pid, position, data)


class ToSaver:
    """See `Goes`: the saver takes the bytes while they are on the GPU, and has them in files afterwards."""

    words = "the snapshot"

    def __init__(self, saver: Saver) -> None:
        self._saver = saver

    def prepare(self, size_bytes: int) -> None:
        pass

    def wait_prepared(self) -> None:
        pass

    def take(self, handed: HandedOver) -> Taken:
        return BeingSaved(handed, self._saver) if handed.size_bytes else NothingTaken(handed.extents)

    def close(self) -> None:
        pass


class BeingSaved:
    """See `Taken`."""

    def __init__(self, handed: HandedOver, saver: Saver) -> None:
        self.extents = handed.extents
        self.source: Source | None = CarriedSource(handed.part, handed.size_bytes, handed.carrier)
        self._handed = handed
        self._saver = saver

    def start(self) -> None:
        self._handed.carrier.place(self._handed.process, *self._saver.files(self._handed.part))

    def wait_saved(self) -> None:
        while not self._saver.wait_for(self._handed.part, _WAIT_S):
            pass
        self._handed.carrier.of("saved", self._handed.process)

    def complete(self) -> None:
        pass

    def let_go(self) -> None:
        pass


class _ToFile(ABC):
    """A copy in a file of gpucr's."""

    keeps_itself = False
    """Whether the process keeps the file for a later resume, when gpucr has ended."""

    def __init__(self) -> None:
        self._made: list[File] = []

    @abstractmethod
    def _file(self, size_bytes: int) -> File:
        """A new one. Raises OSError, CustomStorageError."""

    def prepare(self, size_bytes: int) -> None:
        self._made.append(self._file(size_bytes))

    @abstractmethod
    def wait_prepared(self) -> None:
        """See `Goes`."""

    def take(self, handed: HandedOver) -> Taken:
        self.wait_prepared()
        if not self._made:
            self._made.append(self._file(handed.size_bytes))
        return Copied(handed, self._made[0], keeps_itself=self.keeps_itself)

    def close(self) -> None:
        """Close the copy. What the process holds of it stays."""
        self.wait_prepared()
        for each in self._made:
            each.close()


class ToDisk(_ToFile):
    """See `Goes`: host memory has no room for it."""

    def __init__(self, spool: Spool) -> None:
        super().__init__()
        self._spool = spool
        self.words = f"a disk ({spool.folder})"

    def _file(self, size_bytes: int) -> SpoolFile:
        return self._spool.file(size_bytes)

    def wait_prepared(self) -> None:
        pass


class ToHostMemory(_ToFile):
    """See `Goes`."""

    words = "host memory"

    def __init__(self, *, keeps_itself: bool) -> None:
        super().__init__()
        self.keeps_itself = keeps_itself
        self._populating: list[threading.Thread] = []

    def _file(self, size_bytes: int) -> StagingFile:
        return StagingFile.create(size_bytes, KEPT_NAME)

    def prepare(self, size_bytes: int) -> None:
        with contextlib.suppress(OSError):  # the rest is allocated on demand
            super().prepare(size_bytes)
            thread = threading.Thread(target=_populate, args=(self._made[-1],), daemon=True)
            thread.start()
            self._populating.append(thread)

    def wait_prepared(self) -> None:
        for each in self._populating:
            each.join()


class Copied:
    """See `Taken`. It can be read when the process is CHECKPOINTED."""

    def __init__(self, handed: HandedOver, file: File, *, keeps_itself: bool) -> None:
        self.extents = handed.extents
        self.source: Source | None = None
        self._handed = handed
        self._file = file
        self._keeps_itself = keeps_itself

    def start(self) -> None:
        file, carrier, process = self._file, self._handed.carrier, self._handed.process
        file.resize(max(file.size_bytes, self._handed.size_bytes))
        carrier.place(process, [file.fd], max(file.size_bytes, PAGE_BYTES))
        carrier.of("copy", process)

    def wait_saved(self) -> None:
        pass

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

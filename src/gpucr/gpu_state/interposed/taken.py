"""Memory that has left its process: where it is read from until it is back."""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from gpucr.errors import GpucrError
from gpucr.gpu_state.interposed.blocks import BlocksSource, HostRoom
from gpucr.gpu_state.interposed.changes import Changes, Stretch, stretches
from gpucr.gpu_state.interposed.keeping import Keeping, Way
from gpucr.gpu_state.interposed.preparing import Room
from gpucr.gpu_state.source import FileSource, Saver, Source
from gpucr.interposer.vault import VaultFailed, Vaults
from gpucr.linux.tmpfs import StagingFile
from gpucr.linux.work import Work
from gpucr.quantities import format_bytes
from gpucr.undo.steps import Meter


class Taken:
    """All memory that was taken from a process, ``blocks``; here, nothing yet. ``uuids``: whose vaults read it.

    If a GPU has no room for a vault beside the memory, the vault starts when the driver has freed the process's own
    context there, at `complete`.
    """

    def __init__(self, blocks: BlocksSource, vaults: Vaults, uuids: Collection[str]) -> None:
        self.source: Source = blocks
        """What to save is read from here; final after `complete`."""
        self.ready_bytes = 0
        """How much of it can be read, from its beginning."""
        self._blocks = blocks
        self._vaults = vaults
        self._uuids = uuids
        self._may_start = threading.Event()

    def _start_vaults(self) -> None:
        """Start the vaults now if their GPUs have room, otherwise at `complete`."""
        if not self._vaults.try_all(self._uuids):
            self._may_start.wait()
            self._vaults.start_all(self._uuids)

    def complete(self, meter: Meter) -> None:
        """The driver has freed the process's contexts."""
        self._may_start.set()
        self._finish(meter)

    def _finish(self, meter: Meter) -> None:
        """Wait until all of it can be read."""

    def abort(self) -> None:
        """It is not needed: end what is under way."""
        self._may_start.set()
        with contextlib.suppress(GpucrError, OSError):
            self._end()

    def _end(self) -> None:
        """Wait for what is under way. Raises its error."""

    def close(self) -> None:
        """Free what holds copies. Idempotent."""


class OnGpu(Taken):
    """It is read from the GPU."""

    def __init__(self, blocks: BlocksSource, vaults: Vaults, uuids: Collection[str]) -> None:
        super().__init__(blocks, vaults, uuids)
        if vaults.try_all(uuids):
            self.ready_bytes = blocks.size_bytes

    def _finish(self, meter: Meter) -> None:
        if not self.ready_bytes:
            self._vaults.start_all(self._uuids)
            self.ready_bytes = self._blocks.size_bytes


def _differing(blocks: BlocksSource, saver: Saver, saved_from: Source) -> list[Stretch]:
    """What the saver does not have as it is now. It reads from ``saved_from`` from now on."""
    piece_bytes = saver.piece_bytes
    saver.add(saved_from)
    with contextlib.suppress(VaultFailed):  # no room for digests: then all of it differs
        saver.look(blocks.part, blocks.digests(piece_bytes, saver.digest_key))
    return stretches(saver.differing(blocks.part), piece_bytes, blocks.size_bytes)


class Terms(NamedTuple):
    """How what differs is kept, and on which GPU if there. ``early``: saved what did not (`SavedLater`: nothing)."""

    way: Way
    keeping: Keeping
    gpu: str
    early: Saver


class Compared(Taken):
    """As it stands still, its digests decide what is saved, and what of it is kept while the process runs again."""

    def __init__(
        self, blocks: BlocksSource, vaults: Vaults, uuids: Collection[str], saver: Saver, terms: Terms
    ) -> None:
        super().__init__(blocks, vaults, uuids)
        self.source = self._changes = Changes(blocks)
        self._saver = saver
        self._terms = terms
        self._deciding = Work(self._decide, "vault")

    def _decide(self) -> str:
        """In words, what was decided."""
        self._start_vaults()
        kept = _differing(self._blocks, self._saver, self._changes)
        kept_bytes = sum(each.size_bytes for each in kept)
        note = f"{format_bytes(kept_bytes)} differ from the first pass" if self._terms.early.piece_bytes else ""
        way = self._keep(kept, kept_bytes) if self._terms.way is Way.CHANGES else Way.JOB_WAITS
        if way is not Way.JOB_WAITS:
            return f"{note}, and are kept {way.value}"
        self.ready_bytes = self._blocks.size_bytes
        return note

    def _keep(self, kept: Sequence[Stretch], kept_bytes: int) -> Way:
        keeping, gpu = self._terms.keeping, self._terms.gpu
        way = keeping.place(gpu, kept_bytes)
        if way is Way.ON_GPU and not self._changes.keep_on_gpu(kept, self._vaults.of(gpu)):
            way = keeping.place_on_host(kept_bytes)
        if way is Way.IN_HOST_MEMORY:
            self._changes.keep_on_host(kept)
        return way

    def _finish(self, meter: Meter) -> None:
        if note := self._deciding.wait():
            meter.note(f"process {self._blocks.part.pid}: {note}")

    def _end(self) -> None:
        self._deciding.wait()

    def close(self) -> None:
        self._changes.close()


class InHostMemory(Taken):
    """It is copied to host memory, and read there."""

    def __init__(self, blocks: BlocksSource, vaults: Vaults, uuids: Collection[str], room: Room) -> None:
        super().__init__(blocks, vaults, uuids)
        self._room = room
        self._copying = Work(self._copy, "vault")

    def _copy(self) -> StagingFile:
        """The file with the copy, which then has its size."""
        self._start_vaults()
        size_bytes = self._blocks.size_bytes
        file = self._room.of(size_bytes)
        if size_bytes:
            self._copy_to(file)
        file.resize(size_bytes)
        return file

    def _copy_to(self, file: StagingFile) -> None:
        with _mapped(file, self._blocks) as room:
            self._blocks.copy_to(room.address)

    def _finish(self, meter: Meter) -> None:
        file = self._copying.wait()
        self.source = FileSource(self._blocks.part, file.fd, file.size_bytes)

    def _end(self) -> None:
        self._copying.wait()


class KeptByProcess(InHostMemory):
    """It is copied to a file that the process keeps, by ``keep``; then its GPU memory is freed.

    ``early``: saved to this very file what did not change since (`SavedLater`: nothing).
    """

    def __init__(
        self,
        blocks: BlocksSource,
        vaults: Vaults,
        uuids: Collection[str],
        room: Room,
        early: Saver,
        keep: Callable[[StagingFile], None],
    ) -> None:
        self._early = early
        self._keep = keep
        super().__init__(blocks, vaults, uuids, room)

    def _copy_to(self, file: StagingFile) -> None:
        if not self._early.piece_bytes:
            super()._copy_to(file)
            return
        changed = _differing(self._blocks, self._early, self._blocks)
        with _mapped(file, self._blocks) as room:
            self._blocks.copy_these(changed, room.address)

    def _finish(self, meter: Meter) -> None:
        self._keep(self._copying.wait())


def _mapped(file: StagingFile, blocks: BlocksSource) -> contextlib.closing[HostRoom]:
    return contextlib.closing(HostRoom(file, max(blocks.size_bytes, mmap.PAGESIZE)))

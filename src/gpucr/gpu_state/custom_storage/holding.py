"""In the carrier: one process that it has begun with the driver, and where the bytes are."""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import enum
import functools
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from gpucr.driver.custom_storage import Begun, CustomStorage
from gpucr.errors import CustomStorageError, GpucrError
from gpucr.interposer.vault import SLOT_BYTES, Vault, in_parallel
from gpucr.linux import memory, processes
from gpucr.linux.buffers import at_address
from gpucr.linux.tmpfs import KEPT_NAME, StagingFile
from gpucr.model import GpuMap, ProcessId
from gpucr.quantities import format_bytes

PAGE_BYTES = 4096


def whole_pages(size_bytes: int) -> int:
    """Stored size: sources have whole pages."""
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


class Place:
    """Files that have, or get, all bytes of one process, in pieces distributed round-robin."""

    def __init__(self, descriptors: Sequence[int], piece_bytes: int) -> None:
        """Reopens the files, without O_DIRECT: reads and writes here need not be aligned. Raises OSError."""
        self._piece_bytes = piece_bytes
        self._files: list[int] = []
        try:
            for each in descriptors:
                self._files.append(os.open(f"/proc/self/fd/{each}", os.O_RDWR | os.O_CLOEXEC))
        except BaseException:
            self.close()
            raise

    def write(self, position: int, data: memoryview) -> None:
        for file, offset, part in self._parts(position, data):
            done = 0
            while done < len(part):
                done += os.pwrite(file, part[done:], offset + done)

    def read(self, position: int, data: memoryview) -> None:
        for file, offset, part in self._parts(position, data):
            done = 0
            while done < len(part):
                count = os.preadv(file, [part[done:]], offset + done)
                if not count:
                    raise OSError(f"the copy of device memory ends at byte {offset + done}")
                done += count

    def _parts(self, position: int, data: memoryview) -> Iterator[tuple[int, int, memoryview]]:
        while data:
            piece, within = divmod(position, self._piece_bytes)
            size = min(len(data), self._piece_bytes - within)
            row, number = divmod(piece, len(self._files))
            yield self._files[number], row * self._piece_bytes + within, data[:size]
            position, data = position + size, data[size:]

    def close(self) -> None:
        while self._files:
            os.close(self._files.pop())


class Phase(enum.Enum):
    """The state to which the carrier has brought a process."""

    CHECKPOINTING = "its memory is on its GPUs, and seen from here"
    AWAY = "its memory is in its place alone"
    RESTORING = "it has new memory, which is filled from here"
    BACK = "it has its memory again"


class Part(NamedTuple):
    """One GPU's part: ``offset`` is its position among all bytes of the process."""

    vault: Vault
    uuid: str
    address: int
    offset: int
    size_bytes: int


class Holding:
    """One process. Raises GpucrError or OSError; reading and writing are thread-safe."""

    def __init__(self, process: ProcessId, vaults: Callable[[int], tuple[str, Vault]]) -> None:
        self.process = process
        self.phase = Phase.AWAY
        self.place: Place | None = None
        self.is_whole = False
        """Whether all bytes are in `place`."""
        self.keeps_itself = False
        """Whether the process was found suspended, with its bytes mapped: then it stays so in any case."""
        self.parts: tuple[Part, ...] = ()
        self._vaults = vaults
        self._begun: Begun | None = None

    @property
    def size_bytes(self) -> int:
        """Total size, in whole pages per GPU."""
        return sum(whole_pages(part.size_bytes) for part in self.parts)

    @property
    def is_alive(self) -> bool:
        """Whether the process still lives."""
        return processes.keeps_running(self.process)

    def checkpoint(self, storage: CustomStorage) -> None:
        begun = self._begun = storage.checkpoint(self.process.pid)
        self.phase = Phase.CHECKPOINTING
        self._find_parts(storage, begun)

    def restore(self, storage: CustomStorage, gpu_map: GpuMap | None) -> None:
        """CHECKPOINTED → RESTORING. Does nothing if it is RESTORING."""
        if self.phase is Phase.RESTORING:
            return
        wanted = [part.size_bytes for part in self.parts]
        begun = self._begun = storage.restore(self.process.pid, gpu_map)
        self.phase = Phase.RESTORING
        self._find_parts(storage, begun)
        if wanted and wanted != [part.size_bytes for part in self.parts]:
            raise CustomStorageError(
                f"the driver wants other memory back of process {self.process.pid} than it gave",
                hint="report it, with the output of `gpucr doctor`",
            )

    def _find_parts(self, storage: CustomStorage, begun: Begun) -> None:
        found: list[Part] = []
        offset = 0
        for shown in begun.shown:
            uuid, vault = self._vaults(storage.ordinal(self.process.pid, shown))
            found.append(Part(vault, uuid, shown.address, offset, shown.size_bytes))
            offset += whole_pages(shown.size_bytes)
        self.parts = tuple(found)

    def complete(self, storage: CustomStorage) -> None:
        """CHECKPOINTING → CHECKPOINTED, RESTORING → LOCKED. Does nothing otherwise."""
        if self._begun is None:
            return
        storage.complete(self.process.pid, self._begun.handle)
        self._begun = None
        self.phase = Phase.AWAY if self.phase is Phase.CHECKPOINTING else Phase.BACK

    def read(self, position: int, size_bytes: int, address: int) -> None:
        """Copy device memory to an address here; page padding is zero."""
        for part, within, at, size in self._pieces(position, size_bytes):
            start, there = address + at, max(0, min(size, part.size_bytes - within))
            if there:
                part.vault.read(
                    part.address + within,
                    there,
                    lambda host, offset, count, start=start: ctypes.memmove(start + offset, host, count),  # type: ignore[misc]
                )
            ctypes.memset(start + there, 0, size - there)

    def write(self, position: int, size_bytes: int, address: int) -> None:
        """Copy bytes from an address here to device memory."""
        for part, within, at, size in self._pieces(position, size_bytes):
            start, there = address + at, min(size, part.size_bytes - within)
            if there > 0:
                part.vault.write(
                    part.address + within,
                    there,
                    lambda host, offset, count, start=start: ctypes.memmove(host, start + offset, count),  # type: ignore[misc]
                )

    def _pieces(self, position: int, size_bytes: int) -> Iterator[tuple[Part, int, int, int]]:
        """The parts that overlap a range: part, offset in it, offset in the range, size."""
        if self._begun is None or position + size_bytes > self.size_bytes:
            raise CustomStorageError(f"no such memory of process {self.process.pid} is seen now")
        done = 0
        number = bisect.bisect_right([part.offset for part in self.parts], position) - 1
        while done < size_bytes:
            part = self.parts[number]
            within = position + done - part.offset
            size = min(size_bytes - done, whole_pages(part.size_bytes) - within)
            yield part, within, done, size
            done, number = done + size, number + 1

    def copy(self) -> None:
        """Copy all device memory to its place."""
        if self.place is None:
            raise CustomStorageError(f"the device memory of process {self.process.pid} has no place")
        self._copy_to(self.place)
        self.is_whole = True

    def _copy_to(self, place: Place) -> None:
        def one(part: Part, at: int, size: int) -> None:
            part.vault.read(
                part.address + at,
                size,
                lambda host, offset, count: place.write(part.offset + at + offset, at_address(host, count)),
            )

        in_parallel([functools.partial(one, *piece) for piece in self._chunks()])

    def fill(self) -> None:
        """Copy all of its place to device memory."""
        place = self.place
        if place is None or not self.is_whole:
            raise CustomStorageError(f"nobody has all bytes of the device memory of process {self.process.pid}")

        def one(part: Part, at: int, size: int) -> None:
            part.vault.write(
                part.address + at,
                size,
                lambda host, offset, count: place.read(part.offset + at + offset, at_address(host, count)),
            )

        in_parallel([functools.partial(one, *piece) for piece in self._chunks()])

    def _chunks(self) -> Iterator[tuple[Part, int, int]]:
        for part in self.parts:
            for at in range(0, part.size_bytes, SLOT_BYTES):
                yield part, at, min(SLOT_BYTES, part.size_bytes - at)

    def save(self) -> None:
        """Store all bytes: in its place, or, if that is full, in host memory."""
        if self.is_whole:
            return
        if self.place is not None:
            with contextlib.suppress(OSError):  # usually a full disk
                self.copy()
                return
        missing = self.size_bytes - memory.available_bytes()
        if missing > 0:
            raise CustomStorageError(
                f"{format_bytes(missing)} of host memory are missing for a copy of the device memory of process "
                f"{self.process.pid}"
            )
        self.replace_place(in_memory(self.size_bytes))
        self.copy()

    def replace_place(self, place: Place) -> None:
        """Make this the place of its bytes."""
        if self.place is not None:
            self.place.close()
        self.place, self.is_whole = place, False

    def give_up(self, storage: CustomStorage) -> None:
        """No way back: complete the driver's call, and kill the process, which can no longer run."""
        if self.keeps_itself and self.phase is Phase.AWAY:
            return
        with contextlib.suppress(GpucrError):
            self.complete(storage)
        processes.send_signal(self.process, signal.SIGKILL)

    def close(self) -> None:
        if self.place is not None:
            self.place.close()


def in_memory(size_bytes: int) -> Place:
    """A place in host memory. Raises OSError."""
    file = StagingFile.create(size_bytes, KEPT_NAME)
    try:
        return Place([file.fd], max(file.size_bytes, PAGE_BYTES))
    finally:
        file.close()

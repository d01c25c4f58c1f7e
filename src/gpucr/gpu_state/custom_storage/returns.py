"""A snapshot's memory on its way into processes made by CRIU that were checkpointed to custom storage."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence

from gpucr.errors import CustomStorageError, GpucrError
from gpucr.gpu_state.backend import WaitForBytes
from gpucr.gpu_state.custom_storage.backend import extents_of
from gpucr.gpu_state.custom_storage.client import Carrier
from gpucr.linux import processes
from gpucr.model import DevicePart, GpuMap, ProcessId, StagedExtent


class StorageDestination:
    """See `Destination`. Data that arrives before the driver has mapped the new memory waits: nothing is buffered."""

    is_zeroed = False

    def __init__(self, part: DevicePart, size_bytes: int) -> None:
        self.part = part
        self.size_bytes = size_bytes
        self._changed = threading.Condition()
        self._carrier: Carrier | None = None
        self._pid = 0
        self._is_given_up = False

    def open(self, carrier: Carrier, pid: int) -> None:
        """The driver restores this process, and asks for its bytes from now on."""
        with self._changed:
            self._carrier, self._pid = carrier, pid
            self._changed.notify_all()

    def give_up(self) -> None:
        """Wake everybody who waits for bytes that will not come."""
        with self._changed:
            self._is_given_up = True
            self._changed.notify_all()

    def write_from(self, position: int, data: memoryview) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._carrier is not None or self._is_given_up)
            carrier = self._carrier
        if carrier is None or self._is_given_up:
            raise CustomStorageError(f"device memory of process {self.part.pid} is not wanted any more")
        carrier.write_from(self._pid, position, data)


class StorageReturn:
    """See `Return`: `begin` starts the driver's restore, `finish` completes it when all of them are filled."""

    note = None

    def __init__(self, returns: StorageReturns, part: DevicePart, extents: Sequence[StagedExtent], size: int) -> None:
        self.destination = StorageDestination(part, size)
        self.process: ProcessId | None = None
        self._returns = returns
        self._extents = tuple(extents)
        self._wait: WaitForBytes | None = None

    def begin(self, pid: int, restore_thread: int, wait: WaitForBytes, *, stays: bool) -> None:
        """CHECKPOINTED → RESTORING, on the GPUs that the map names."""
        stat = processes.read_stat(pid)
        self.process = ProcessId(pid, stat.start_time_ticks if stat is not None else 0)
        carrier, gpu_map = self._returns.carrier(), self._returns.map_for(pid)
        parts = carrier.of("take_back", self.process, gpu_map).parts
        shown = [(each.gpu, each.size_bytes, each.offset) for each in extents_of(parts)]
        wanted = [(self._returns.new_uuid(each.gpu or ""), each.size_bytes, each.offset) for each in self._extents]
        if shown != wanted:
            raise CustomStorageError(
                f"the driver wants other memory back of process {pid} than the snapshot has",
                hint="the snapshot cannot be restored: report it, with the output of `gpucr inspect --json`",
            )
        self._wait = wait
        self.destination.open(carrier, pid)

    def wait_filled(self) -> None:
        """Wait until all bytes are on the GPU."""
        if self._wait is not None:
            self._wait(self.destination.size_bytes)

    @property
    def has_begun(self) -> bool:
        """Whether the new memory is mapped."""
        return self._wait is not None

    def finish(self) -> None:
        self._returns.finish()

    def close(self) -> None:
        self.destination.give_up()


class StorageReturns:
    """The returns of a restore. ``new_uuid``: where a GPU's memory goes; ``map_for``: a process's GPU map."""

    def __init__(self, new_uuid: Callable[[str], str], map_for: Callable[[int], GpuMap | None]) -> None:
        self.new_uuid = new_uuid
        self.map_for = map_for
        self._returns: list[StorageReturn] = []
        self._uuids: set[str] = set()
        self._carrier: Carrier | None = None
        self._is_finished = False

    def return_for(self, part: DevicePart, extents: Sequence[StagedExtent], size_bytes: int) -> StorageReturn:
        """For what one process held."""
        self._uuids.update(self.new_uuid(extent.gpu) for extent in extents if extent.gpu is not None)
        made = StorageReturn(self, part, extents, size_bytes)
        self._returns.append(made)
        return made

    def carrier(self) -> Carrier:
        """The process that brings memory back; started at the first use."""
        if self._carrier is None:
            self._carrier = Carrier(sorted(self._uuids))
        return self._carrier

    def finish(self) -> None:
        """All are filled before the first is completed. Does nothing if one has not begun: then they are killed."""
        if self._is_finished or not all(each.has_begun for each in self._returns):
            return
        self._is_finished = True
        for each in self._returns:
            each.wait_filled()
        for each in self._returns:
            if each.process is not None:
                self.carrier().of("complete", each.process)
        for each in self._returns:
            if each.process is not None:
                self.carrier().of("forget", each.process)

    def give_up(self) -> None:
        """Wake readers: the memory will not come."""
        for each in self._returns:
            each.destination.give_up()

    def close(self) -> None:
        """Close the carrier, which kills processes that are not completed."""
        self.give_up()
        if self._carrier is not None:
            with contextlib.suppress(GpucrError):
                self._carrier.close()

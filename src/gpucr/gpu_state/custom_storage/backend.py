"""The backend: one process's memory, which the driver hands to the carrier, and the backends of an operation."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from gpucr.driver.api import Driver
from gpucr.errors import CustomStorageError, DriverError, GpucrError, JobChanged
from gpucr.gang import Gang
from gpucr.gpu_state.backend import CUSTOM_STORAGE, Backend
from gpucr.gpu_state.custom_storage.client import Carrier
from gpucr.gpu_state.custom_storage.goes import Goes, HandedOver, Taken, ToDisk, ToHostMemory, ToSaver
from gpucr.gpu_state.custom_storage.holding import whole_pages
from gpucr.gpu_state.custom_storage.spool import Spool
from gpucr.gpu_state.holders import Holders
from gpucr.gpu_state.source import Saver, Source
from gpucr.gpu_state.ways import CUSTOM, GpuState, refused
from gpucr.interposer.vault import VAULT_BYTES
from gpucr.linux import capabilities, memory, processes
from gpucr.model import CudaState, DevicePart, GangMember, Gpu, GpuMap, ProcessId, StagedExtent
from gpucr.quantities import format_bytes
from gpucr.undo.steps import Meter

NO_ADDRESS = 1 << 62
"""Handed-over memory has no address in the process: snapshots number it from here."""


class Stage(enum.Enum):
    """Where the memory of one process is."""

    HERE = "the process has it"
    CARRIED = "the carrier has it"
    SAVED = "the carrier has it, and all bytes are in their final place"


class CustomStorage:
    """See `Backend`, at level 0. The driver's checkpoint is `begin`, and ends with `complete`.

    ``on_begun`` is called when the source is ready and final, ``before`` when the carrier is about to have the memory.
    """

    kind = CUSTOM_STORAGE

    def __init__(
        self,
        part: DevicePart,
        process: ProcessId,
        carrier: Carrier,
        goes: Goes,
        *,
        on_begun: Callable[[Backend], None],
        before: Callable[[], None],
        wait_all_saved: Callable[[], None],
    ) -> None:
        self.part = part
        self.process = process
        self._carrier = carrier
        self._goes = goes
        self._on_begun = on_begun
        self._before = before
        self._wait_all_saved = wait_all_saved
        self._stage = Stage.HERE
        self._taken: Taken = Taken()

    @property
    def extents(self) -> tuple[StagedExtent, ...]:
        return self._taken.extents

    @property
    def source(self) -> Source | None:
        return self._taken.source

    @property
    def is_carried(self) -> bool:
        """Whether the carrier has it."""
        return self._stage is not Stage.HERE

    def available_bytes(self) -> int:
        """Everything, once it is mapped; nothing while a copy is being made."""
        return self.source.size_bytes if self.source is not None else 0

    def prepare(self, size_bytes: int) -> int:
        """Make room on the disk, or begin to in host memory, if needed."""
        self._goes.prepare(size_bytes)
        return size_bytes

    def wait_prepared(self) -> None:
        self._goes.wait_prepared()

    def begin(self, restore_thread: int, meter: Meter, deadline: float | None) -> None:
        """LOCKED → CHECKPOINTING. From here on the carrier must complete it, and all bytes must go elsewhere."""
        self._before()
        with self._named():
            parts = self._carrier.of("checkpoint", self.process).parts
        self._stage = Stage.CARRIED
        handed = HandedOver(self.part, self.process, extents_of(parts), restore_thread, self._carrier)
        size = format_bytes(handed.size_bytes)
        meter.note(f"process {self.part.pid}: {size} of device memory go to {self._goes.words}")
        self._taken = self._goes.take(handed)
        if self.source is not None:
            self._on_begun(self)
        self._taken.start()

    def wait_started(self) -> None:
        """The driver's call has done it."""

    def wait_saved(self) -> None:
        """Wait until all bytes are in their final place. Raises what prevented that."""
        if self._stage is Stage.CARRIED:
            self._taken.wait_saved()
            self._stage = Stage.SAVED

    def complete(self, meter: Meter) -> None:
        """CHECKPOINTING → CHECKPOINTED: the process's GPUs are free."""
        self._wait_all_saved()
        with self._named():
            self._carrier.of("complete", self.process)
        self._taken.complete()

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """The error: that the process has ended, if so, rather than what the driver said."""
        try:
            yield
        except (CustomStorageError, DriverError) as e:
            if processes.keeps_running(self.process):
                raise
            pid = self.part.pid
            raise JobChanged(
                f"process {pid} ended during the checkpoint", pids=[pid], hint="the rest of the job is as it was found"
            ) from e

    def abort(self) -> None:
        """There is no abort: all bytes are saved and it is completed; if that fails, the process is killed."""
        if self.is_carried:
            with contextlib.suppress(CustomStorageError, DriverError):
                self._carrier.of("finish", self.process)

    def make_way(self) -> None:
        pass

    def give_back(self) -> None:
        pass

    def let_go(self) -> None:
        """The process has its memory again."""
        self._stage = Stage.HERE
        self._taken.let_go()

    def forget(self) -> None:
        """The process keeps what it has, or has ended: the carrier need not bring anything back."""
        if self.is_carried:
            with contextlib.suppress(GpucrError):
                self._carrier.of("forget", self.process)
            self._stage = Stage.HERE

    def close(self) -> None:
        """The copy on the disk, or in host memory, except what the process holds of it."""
        self._goes.close()


def extents_of(parts: Sequence[tuple[str, int]]) -> tuple[StagedExtent, ...]:
    """One for each GPU, consecutive, in whole pages."""
    extents: list[StagedExtent] = []
    offset = 0
    for uuid, size_bytes in parts:
        extents.append(StagedExtent(NO_ADDRESS + offset, whole_pages(size_bytes), offset, uuid))
        offset += whole_pages(size_bytes)
    return tuple(extents)


def files_of(saver: Saver | None, held: Mapping[int, Mapping[str, int]], *, may_wait: bool) -> Saver | None:
    """A saver that has device memory in files before the job runs again or ends; None: it goes to host memory instead.

    A job that runs again soon does not wait for a disk, unless host memory has no room and it ``may_wait``.
    """
    if saver is None or not saver.keeps_files:
        return None
    needed = sum(sum(by_gpu.values()) for by_gpu in held.values())
    return saver if may_wait or needed + needed // 16 > memory.available_bytes() else None


class CustomStorages(Holders):
    """The backends of an operation. ``gpus`` are this machine's; each ``held`` one needs room for a carrier.

    ``saver``: see `files_of`. ``to_process``: the job is suspended, and gpucr exits. ``tell_guard`` gets the carrier,
    and the processes whose memory it may have. ``on_begun``: as in `CustomStorage`.
    """

    def __init__(
        self,
        driver: Driver,
        gpu_state: GpuState,
        gpus: Sequence[Gpu],
        held: Mapping[int, Mapping[str, int]],
        *,
        saver: Saver | None,
        to_process: bool,
        is_interposed: Callable[[int], bool],
        tell_guard: Callable[[ProcessId, Iterable[int]], None],
        on_begun: Callable[[Backend], None],
    ) -> None:
        self._driver = driver
        self._gpu_state = gpu_state
        in_use = {uuid for by_gpu in held.values() for uuid in by_gpu}
        self._gpus = tuple(gpu for gpu in gpus if gpu.uuid in in_use)
        self._held = held
        self._saver = saver
        self.spool: Spool | None = None
        """Where copies go if host memory has no room; see `spool_if_short`."""
        self._to_process = to_process
        self._is_interposed = is_interposed
        self._tell_guard = tell_guard
        self._carrier: Carrier | None = None
        self._backends: dict[int, CustomStorage] = {}
        self._failed: str | None = None
        self._staged: dict[int, str] = {}  # why the driver stages memory that it could have handed over
        self._on_begun = on_begun

    def require(self, members: Iterable[GangMember]) -> None:
        """Raise Unsupported if one of these would go another way, and this one is insisted on."""
        for member in members if self._gpu_state == CUSTOM else ():
            if member.found is not CudaState.CHECKPOINTED and (why := self._why_not(member.pid)) is not None:
                raise refused(f"device memory of process {member.pid} cannot leave by custom storage: {why}", _REMEDY)

    def takes(self, pid: int) -> bool:
        """Whether it will probably take this process's memory."""
        return self._why_not(pid) is None

    def final_place(self, pid: int) -> str | None:
        return self._goes().words if self.takes(pid) else None

    def note(self, pid: int) -> str | None:
        why = self._staged.get(pid)
        return f"process {pid}: the driver stages its device memory, and does not hand it over: {why}" if why else None

    def pids(self, members: Iterable[GangMember]) -> list[int]:
        """The processes whose memory it will take."""
        return [each.pid for each in members if each.found is not CudaState.CHECKPOINTED and self.takes(each.pid)]

    def spool_if_short(self, needed_bytes: int) -> Spool | None:
        """Send copies to a disk if the operation would need more host memory than there is.

        Call it before anything begins. None: not needed, or no copies. A spool with a `why_not` is not used.
        """
        size_bytes = self._taken_bytes
        is_copied = self._saver is None and not self._to_process  # a suspended process's memory counts already
        if not is_copied or not size_bytes or needed_bytes <= memory.available_bytes():
            return None
        spool = Spool.find(size_bytes)
        self.spool = spool if spool.why_not is None else None
        return spool

    @property
    def _taken_bytes(self) -> int:
        return sum(sum(by_gpu.values()) for pid, by_gpu in self._held.items() if self.takes(pid))

    def takes_no_host_memory(self) -> dict[str, int]:
        """How much device memory goes from the GPUs to a disk or to the saver, per GPU UUID."""
        total: dict[str, int] = {}
        for pid, by_gpu in self._held.items() if self._saver is not None or self.spool is not None else ():
            for uuid, size_bytes in by_gpu.items() if self.takes(pid) else ():
                total[uuid] = total.get(uuid, 0) + size_bytes
        return total

    def _why_not(self, pid: int) -> str | None:
        if self._gpu_state not in ("auto", CUSTOM):
            return "another way was asked for"
        if self._failed is not None:
            return self._failed
        if not self._driver.capabilities().custom_storage:
            return "this driver has none (it came with driver 615)"
        if not capabilities.can_checkpoint_processes():
            return "gpucr would have to run as root"
        if self._gpu_state == "auto" and self._is_interposed(pid):
            return "it has an interposer"
        if not sum(self._held.get(pid, {}).values()):
            return "it is not known which GPUs it uses"
        for gpu in self._gpus:
            if gpu.memory_free_bytes < VAULT_BYTES and self._carrier is None:
                free = format_bytes(gpu.memory_free_bytes)
                return f"GPU {gpu.uuid} has {free} free, and gpucr needs {format_bytes(VAULT_BYTES)} there itself"
        return None

    def backend_for(self, part: DevicePart) -> CustomStorage | None:
        """None: the driver stages it."""
        if (why_not := self._why_not(part.pid)) is not None:
            if self._gpu_state == "auto" and self._driver.capabilities().custom_storage:
                self._staged[part.pid] = why_not
            return None
        stat = processes.read_stat(part.pid)
        carrier = self._started()
        if carrier is None or stat is None:
            self._staged[part.pid] = self._failed or "it has ended"
            return None
        made = CustomStorage(
            part,
            ProcessId(part.pid, stat.start_time_ticks),
            carrier,
            self._goes(),
            on_begun=self._on_begun,
            before=lambda: self._before(carrier),
            wait_all_saved=self._wait_saved,
        )
        self._backends[part.pid] = made
        return made

    def _goes(self) -> Goes:
        if self._saver is not None:
            return ToSaver(self._saver)
        return ToDisk(self.spool) if self.spool is not None else ToHostMemory(keeps_itself=self._to_process)

    def _started(self) -> Carrier | None:
        """The carrier. If it cannot be started, the memory goes another way, unless the user insists on this one.

        Or unless host memory has no room for it, which was not planned.
        """
        if self._carrier is None and self._failed is None:
            try:
                self._carrier = Carrier([gpu.uuid for gpu in self._gpus])
            except CustomStorageError as e:
                if self._gpu_state == CUSTOM or self._taken_bytes > memory.available_bytes():
                    raise
                self._failed = e.message
        return self._carrier

    def _before(self, carrier: Carrier) -> None:
        self._tell_guard(carrier.id, self._backends)

    def _wait_saved(self) -> None:
        """Wait until all bytes of all of them are in their final place: none is completed before."""
        for each in self._backends.values():
            each.wait_saved()

    def bring_back(self, gang: Gang, maps: Mapping[int, GpuMap | None]) -> dict[int, Exception | None]:
        """CHECKPOINTED → LOCKED for those of these processes that the carrier has."""
        mine = [each for pid, each in self._backends.items() if pid in maps and each.is_carried]
        if self._carrier is None or not mine:
            return {}
        results = bring_back(self._carrier, {each.process: maps[each.part.pid] for each in mine})
        for each in mine:
            if results[each.part.pid] is None:
                each.let_go()
        return results

    def release(self) -> None:
        """The job keeps what it has, or has ended: the carrier need not bring anything back."""
        for each in self._backends.values():
            each.forget()

    def close(self) -> None:
        """The carrier brings back what it still has, and ends."""
        if self._carrier is not None:
            self._carrier.close()


_REMEDY = "see `gpucr doctor` for what this machine has"


def bring_back(carrier: Carrier, maps: Mapping[ProcessId, GpuMap | None]) -> dict[int, Exception | None]:
    """CHECKPOINTED → LOCKED, from where their bytes are: all are begun, then filled, then completed."""
    results: dict[int, Exception | None] = {}
    for process, gpu_map in maps.items():
        try:
            carrier.of("restore", process, gpu_map)
        except GpucrError as e:
            results[process.pid] = e
    for process in maps:
        if process.pid not in results:
            try:
                try:
                    carrier.of("complete", process)
                except DriverError:  # a failure is believed to change nothing
                    carrier.of("complete", process)
                carrier.of("forget", process)
            except GpucrError as e:
                results[process.pid] = e
            else:
                results[process.pid] = None
    return results

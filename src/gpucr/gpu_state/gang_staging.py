"""A gang's device memory while it is away: a stack of backends for each process."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, Protocol

from gpucr.errors import GpucrError
from gpucr.gpu_state import staging
from gpucr.gpu_state.backend import CAPTURED, INTERPOSED, Backend, Stored
from gpucr.gpu_state.captured import CapturedStaging, KeptFile
from gpucr.gpu_state.interposed.host_copy import HostCopy
from gpucr.gpu_state.plain import PlainStaging
from gpucr.gpu_state.source import Saver, Source
from gpucr.gpu_state.ways import GpuState, refused
from gpucr.linux.tmpfs import StagingFile
from gpucr.model import CudaState, DevicePart, Extent, StagedExtent
from gpucr.quantities import format_bytes
from gpucr.undo.interrupts import Interrupts
from gpucr.undo.steps import Meter

if TYPE_CHECKING:
    from gpucr.gpu_state.custom_storage.backend import CustomStorage
    from gpucr.gpu_state.custom_storage.spool import Spool

GENTLE_THREADS = 4
"""How many threads save while a job that will continue is stopped: enough for a disk, without slowing the driver.

Measured (H200 machine, 16 processors, 24 GiB): with all threads CRIU took 0.8 to 1.2 s instead of 0.1, and the job was
stopped for 9.6 s instead of 8.4.
"""

FOLLOW_INTERVAL_S = 0.02
"""How often to check the driver's progress: at 6 GiB/s it fills 120 MiB in that time."""


class HandedOver(Protocol):
    """Takes device memory that the driver hands over (`custom_storage.backend.CustomStorages`)."""

    @property
    def why_not(self) -> Mapping[int, str]:
        """By pid, why the driver stages memory that it could have handed over; filled by `lowest`."""

    @property
    def goes_to(self) -> str:
        """In words, where it goes."""

    def takes(self, pid: int) -> bool:
        """Whether it takes this process's memory."""

    def lowest(self, part: DevicePart, on_begun: Callable[[Backend], None]) -> CustomStorage | None:
        """The process's backend at level 0, which calls ``on_begun`` when its source is final; None: not taken."""


StateOf = Callable[[int], "CudaState | None"]
"""A process's current state (None: it has ended)."""


class AboveDriver(NamedTuple):
    """What holds device memory above the driver.

    ``over`` returns a process's backends there, lowest first, and ``why_not`` why it has none although it could;
    ``after`` is called when all have given back. ``copy_of`` returns what a suspended process keeps of its memory
    itself. ``give_up_failed``: the processes that have lost their backends.
    """

    over: Callable[[int], Sequence[Backend]] = lambda pid: ()
    why_not: Mapping[int, str] = MappingProxyType({})
    after: Callable[[StateOf], None] = lambda state: None
    copy_of: Callable[[int], HostCopy | None] = lambda pid: None
    give_up_failed: Callable[[], Iterable[int]] = tuple


class GangStaging:
    """Leads the backends of all processes. See `gpu_state.backend` for the order.

    With ``use_files`` the driver's staging is captured (`CapturedStaging`), which needs root; otherwise it is
    `PlainStaging`. ``gpu_state`` is the way that a user insists on. ``custom`` is tried first, for processes whose
    memory the driver hands over, and ``above`` before all of these. ``writer`` saves what they hold as it arrives;
    with ``save_gently`` it then uses few processors until somebody waits for it.
    """

    def __init__(
        self,
        *,
        use_files: bool,
        gpu_state: GpuState = "auto",
        writer: Saver | None = None,
        save_gently: bool = False,
        custom: HandedOver | None = None,
        above: AboveDriver | None = None,
    ) -> None:
        above = above or AboveDriver()
        self.use_files = use_files
        self._gpu_state = gpu_state
        self._writer = writer
        self._save_gently = save_gently
        self._custom = custom
        self._over = above.over
        self._after = above.after
        self._copy_of = above.copy_of
        self._give_up_failed = above.give_up_failed
        self._sizes: dict[int, int] = {}
        self.copies: dict[int, HostCopy] = {}
        self._why_not = above.why_not
        self._driver: dict[int, PlainStaging] = {}  # level 0, by pid
        self._stacks: dict[int, tuple[Backend, ...]] = {}  # with level 0
        self._saved_bytes: dict[DevicePart, int] = {}  # known to the writer
        self._error: BaseException | None = None

    @property
    def extents(self) -> dict[int, tuple[StagedExtent, ...]]:
        """By pid, the parts of its staging file, except for processes with private staging."""
        return {pid: each.extents for pid, each in self._driver.items() if each.extents}

    @property
    def private(self) -> dict[int, tuple[Extent, ...]]:
        """By pid, the staging in private memory."""
        return {pid: each.private for pid, each in self._driver.items() if each.private}

    @property
    def files(self) -> dict[int, StagingFile]:
        """The staging files, by pid."""
        return {
            pid: each.file
            for pid, each in self._driver.items()
            if isinstance(each, CapturedStaging) and each.file is not None
        }

    @property
    def total_bytes(self) -> int:
        """Device memory known to be away, in bytes."""
        return self.saved_bytes + sum(staging.total_bytes(extents) for extents in self.private.values())

    @property
    def saved_bytes(self) -> int:
        """The part of it that is not in CRIU's images, in bytes."""
        return sum(staging.total_bytes(each.extents) for each in self.saved())

    def saved(self) -> list[Stored]:
        """All sources, when all are complete; a process's levels ascend."""
        return [each for each in self._stored() if each.extents]

    def hands_over(self, pid: int) -> bool:
        """Whether the driver hands over this process's device memory, which cannot be cancelled once begun."""
        return self._custom is not None and self._custom.takes(pid)

    @property
    def handed_over_to(self) -> str:
        """In words, where it goes."""
        return self._custom.goes_to if self._custom is not None else "host memory"

    def prepare(self, sizes: Mapping[int, int]) -> None:
        """Make room for the device memory of these processes (pid → bytes), while they still run."""
        self._sizes.update(sizes)
        for pid, size_bytes in sizes.items():
            left_bytes = size_bytes
            for each in reversed(self._stack(pid)):
                left_bytes -= each.prepare(left_bytes)

    def settle(self) -> None:
        """After `prepare`, while they still run: leave to the driver what an interposer cannot take after all."""
        for pid in self._give_up_failed():
            self._stacks[pid] = tuple(each for each in self._stack(pid) if each.kind != INTERPOSED)
            self._driver[pid].prepare(self._sizes.get(pid, 0))

    def wait_prepared(self) -> None:
        """Wait until `prepare`'s work is done."""
        for each in self._backends():
            each.wait_prepared()

    def adopt(self, pid: int) -> bool:
        """Add the file that holds the device memory of a process checkpointed earlier. False: it has none."""
        candidates: tuple[CapturedStaging, ...] = (
            CapturedStaging(DevicePart(pid), is_saved=True),
            KeptFile(DevicePart(pid)),
        )
        found = next((each for each in candidates if each.adopt()), None)
        if found is None:
            return False
        self._driver[pid], self._stacks[pid] = found, (found,)
        self._save_all_of(found)
        return True

    def adopt_copy(self, pid: int) -> None:
        """Save what a process suspended earlier keeps of its memory itself. Raises InterposerError, JobChanged."""
        if self._writer is not None and pid not in self.copies and (found := self._copy_of(pid)) is not None:
            self.copies[pid] = found
            self._save_all_of(found)

    @contextlib.contextmanager
    def taken(self, restore_threads: Mapping[int, int], meter: Meter, deadline: float | None = None) -> Iterator[None]:
        """The driver checkpoints these LOCKED processes (pid → restore thread) in the block.

        Before it, the backends above the driver's take their memory, level by level. After it everything can be read.
        """
        backends = [each for pid in restore_threads for each in self._stack(pid)]
        for pid in restore_threads.keys() & self._why_not.keys():
            meter.note(f"process {pid}: device memory leaves by the driver, not by an interposer: {self._why_not[pid]}")
        staged = self._custom.why_not if self._custom is not None else {}
        for pid in restore_threads.keys() & staged.keys():
            meter.note(f"process {pid}: the driver stages its device memory, and does not hand it over: {staged[pid]}")
        over = threading.Event()
        follower = threading.Thread(target=self._follow, args=(backends, meter, over), name="follow", daemon=True)
        try:
            for level in sorted({each.part.level for each in backends}, reverse=True):
                beginning = [each for each in backends if each.part.level == level]
                for each in beginning:
                    each.begin(restore_threads[each.part.pid], meter, deadline)
                for each in beginning:
                    each.wait_started()
            follower.start()
            yield
            self._stop(follower, over)
            for each in backends:
                each.complete(meter)
            self._require_captured(backends)
            for each in backends:
                self._save_all_of(each)
        except BaseException:
            self._stop(follower, over, raises=False)
            for each in backends:
                each.abort()
            raise

    def make_way(self) -> None:
        """The driver is about to restore processes of the gang."""
        for each in self._backends():
            each.make_way()

    def give_back(self, state: StateOf) -> None:
        """The backends above the driver's put their memory back into the processes that the driver has restored.

        ``state`` returns a process's state (None: it has ended). Tries every backend. Raises the first error.
        """
        errors: list[GpucrError | OSError] = []
        over = [each for each in self._backends() if each.part.level]
        for each in sorted(over, key=lambda backend: backend.part.level):
            try:
                if state(each.part.pid) not in (CudaState.CHECKPOINTED, None):
                    each.give_back()
            except (GpucrError, OSError) as error:  # the others have memory to give back too
                errors.append(error)
        if errors:
            raise errors[0]
        self._after(state)

    def close(self) -> None:
        for each in self._stored():
            each.close()

    def _stored(self) -> list[Stored]:
        return [*self._backends(), *self.copies.values()]

    def _backends(self) -> list[Backend]:
        return [each for stack in self._stacks.values() for each in stack]

    def _stack(self, pid: int) -> tuple[Backend, ...]:
        if pid not in self._stacks:
            custom = self._custom.lowest(DevicePart(pid), self._save_all_of) if self._custom is not None else None
            if custom is None:
                self._driver[pid] = self._lowest(DevicePart(pid))
            self._stacks[pid] = (custom or self._driver[pid], *self._over(pid))
        return self._stacks[pid]

    def _lowest(self, part: DevicePart) -> PlainStaging:
        if self.use_files:
            return CapturedStaging(part, is_saved=self._writer is not None or self._gpu_state == CAPTURED)
        return PlainStaging(part, is_watched=self._gpu_state != "driver")

    def _require_captured(self, backends: Sequence[Backend]) -> None:
        """Raise Unsupported if the user insisted on capture, but private memory has it."""
        for each in backends if self._gpu_state == CAPTURED else ():
            if isinstance(each, PlainStaging) and each.private:
                raise refused(
                    f"staging of process {each.part.pid} could not be captured", "see with `-v` why (`gpucr doctor`)"
                )

    def _stop(self, follower: threading.Thread, over: threading.Event, *, raises: bool = True) -> None:
        over.set()
        if follower.ident is not None:
            follower.join()
        if raises and self._error is not None:
            raise self._error

    def _follow(self, backends: Sequence[Backend], meter: Meter, over: threading.Event) -> None:
        """Report the backends' progress to meter and writer until the driver is done."""
        try:
            while not over.wait(FOLLOW_INTERVAL_S):
                meter.set(sum(self._look_at(each) for each in backends))
        except BaseException as error:  # noqa: BLE001 - raised when the driver is done: its call cannot be cancelled
            self._error = error

    def _look_at(self, backend: Backend) -> int:
        available_bytes = backend.available_bytes()
        if available_bytes and self._writer is not None and (source := backend.source) is not None:
            self._save_up_to(self._writer, source)
            self._writer.advance(backend.part, available_bytes)
        return available_bytes

    def _save_all_of(self, backend: Stored) -> None:
        if self._writer is not None and backend.extents and (source := backend.source) is not None:
            self._save_up_to(self._writer, source)
            if self._save_gently:
                self._writer.limit_threads(GENTLE_THREADS)
            self._writer.complete(backend.part)

    def _save_up_to(self, writer: Saver, source: Source) -> None:
        """Tell the writer about a part, and about its growth (staging that the driver asked for later)."""
        if source.part not in self._saved_bytes:
            writer.add(source)
        elif source.size_bytes > self._saved_bytes[source.part]:
            writer.grow(source)
        self._saved_bytes[source.part] = source.size_bytes


class AllocateStaging:
    """Allocate the memory, ``host_bytes``, and the disk space (``spool``) that will hold device memory.

    The job still runs. If it will continue afterwards, it waits for the allocation here, rather than while it is
    stopped; if it will be ended, the allocation only starts here and stays ahead of the driver.
    """

    name = "allocate"

    def __init__(
        self,
        staging: GangStaging,
        sizes: Mapping[int, int],
        host_bytes: int,
        *,
        leave_running: bool,
        spool: Spool | None = None,
    ) -> None:
        self._staging = staging
        self._sizes = sizes
        self._host_bytes = host_bytes
        self._leave_running = leave_running
        self._spool = spool

    def describe(self) -> str:
        on_disk = f", {format_bytes(self._spool.size_bytes)} in {self._spool.folder}" if self._spool is not None else ""
        return f"allocate {format_bytes(self._host_bytes)} of host memory{on_disk} for device memory"

    def run(self, interrupts: Interrupts, meter: Meter) -> int:
        """Allocate, or begin to allocate, for what the processes use now. Returns the bytes in host memory."""
        self._staging.prepare(self._sizes)
        self._staging.settle()
        if self._leave_running:
            self._staging.wait_prepared()
        return self._host_bytes

    def undo(self) -> None:
        """Nothing: closing the staging files frees it."""

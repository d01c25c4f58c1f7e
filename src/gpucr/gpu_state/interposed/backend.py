"""The backend: takes memory out of one process, and puts it back."""

from __future__ import annotations

import contextlib
import enum
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from gpucr.driver.api import Driver
from gpucr.errors import GpucrError
from gpucr.gpu_state.backend import INTERPOSED
from gpucr.gpu_state.interposed.blocks import BlocksSource, can_leave, gpu_of
from gpucr.gpu_state.interposed.coming_back import bring_back, let_continue
from gpucr.gpu_state.interposed.guarded import Guarded
from gpucr.gpu_state.interposed.keeping import Keeping, Way
from gpucr.gpu_state.interposed.line import GatedLock, Line, spoken, unlocked
from gpucr.gpu_state.interposed.preparing import Preparation, Room, Unprepared
from gpucr.gpu_state.interposed.shared import by_part
from gpucr.gpu_state.interposed.taken import Compared, InHostMemory, KeptByProcess, OnGpu, Taken, Terms
from gpucr.gpu_state.source import SavedLater, Saver, Source
from gpucr.interposer.client import Held
from gpucr.interposer.protocol import Code, Flag, Refused
from gpucr.interposer.sharing import Part
from gpucr.interposer.vault import Vaults
from gpucr.linux.tmpfs import StagingFile
from gpucr.model import DevicePart, GpuMap, StagedExtent
from gpucr.quantities import format_bytes
from gpucr.undo.steps import Meter

_CAPTURE_S, _CAPTURE_POLL_S = 2.0, 0.02
"""How long a first pass waits for the end of a stream's capture."""


class Goes(NamedTuple):
    """Where the memory of an operation's processes goes.

    ``to_host``: to host memory that the process itself keeps for a later resume. Otherwise ``saver`` saves it
    (`SavedLater`: nobody does), with digests if it has pieces. ``keeping``: what holds it for that while the process
    runs again. ``moves``: it comes back on other GPUs.
    """

    to_host: bool
    moves: bool
    saver: Saver
    keeping: Keeping


class Stage(enum.Enum):
    """Where the memory of one process is."""

    HERE = "it runs with it"
    GATED = "it has all of it, and its gate may have to be opened"
    AWAY = "some is away, and its gate is closed"
    BACK = "it has it again, and its gate is still closed"
    CONTINUES = "it has it again, and its gate is open"


class Interposed:
    """See `Backend`. ``uuids``: the GPUs that the process sees, in its order. ``carries``: what it would take, by UUID.

    ``before_first``: called before any memory leaves; from then on `Interposers.share_again` follows `give_back`.

    gpucr's own contexts need 523 MiB on each GPU. They start while the process runs if that leaves it enough, otherwise
    when its memory is out, or when the driver has freed its context; and they end before the driver restores that.
    """

    kind = INTERPOSED

    def __init__(
        self,
        part: DevicePart,
        driver: Driver,
        uuids: Sequence[str],
        carries: Mapping[str, int],
        vaults: Vaults,
        guarded: Guarded,
        goes: Goes,
        before_first: Callable[[], None],
    ) -> None:
        self.part = part
        self.carries = carries
        self.line = Line(part.pid)
        self.lock = GatedLock(driver, self.line)
        self._driver = driver
        self._uuids = tuple(uuids)
        self._vaults = vaults
        self._guarded = guarded
        self._goes = goes
        self._before_first = before_first
        self._stage = Stage.HERE
        self._room = Room()
        self._early: Saver = SavedLater()
        self._preparation = Unprepared({})
        self._held: list[Held] = []
        self.blocks = BlocksSource(part, (), self._uuids, vaults)
        """What was taken, on its GPUs: nothing before `begin`."""
        self._taken = Taken(self.blocks, vaults, ())

    @property
    def extents(self) -> tuple[StagedExtent, ...]:
        return self.blocks.extents

    @property
    def source(self) -> Source:
        """The memory on the GPU, or its copy: of what has changed, if the rest is saved."""
        return self._taken.source

    def show(self, saver: Saver) -> BlocksSource:
        """Its memory while it runs, from which ``saver`` saves early; the caller closes it.

        Raises InterposerError, JobChanged, VaultFailed.
        """
        held: list[Held] = []
        end = time.monotonic() + _CAPTURE_S
        try:
            with spoken(self.part.pid, "show its memory"):
                while True:
                    try:
                        held += (each for batch in self.line.agent.show() for each in batch)
                        break
                    except Refused as e:
                        if e.code != Code.SOMEBODY_INSIDE or time.monotonic() > end:
                            raise
                        time.sleep(_CAPTURE_POLL_S)
            shown = BlocksSource(self.part, held, self._uuids, self._vaults, changes=True)
            try:
                shown.see_all()
            except BaseException:
                shown.close()
                raise
        finally:
            for each in held:
                each.close()
        self._early = saver
        return shown

    def available_bytes(self) -> int:
        """Everything, once it is out of the process and can be read; nothing while a copy is being made."""
        return self._taken.ready_bytes

    def prepare(self, size_bytes: int) -> int:
        """Begin to start the vaults and to make room."""
        needed, goes = carried_by(self.line, self._uuids), self._goes
        goes.keeping.need(needed)
        self._preparation = Preparation(needed, self._vaults, goes.keeping, self._room, to_host=goes.to_host)
        return min(size_bytes, sum(needed.values()))

    def room_of(self, size_bytes: int) -> StagingFile:
        """The file for its memory, while it runs. Raises OSError."""
        self._preparation.error()
        return self._room.of(size_bytes)

    def needs_nothing(self) -> None:
        """Exclude this process from the choice for the others."""
        self._goes.keeping.need({uuid: -size_bytes for uuid, size_bytes in self._preparation.needed.items()})

    def wait_prepared(self) -> None:
        """Wait for vaults and room. If memory has to be kept, choose now how."""
        self._preparation.wait()

    def failure(self) -> GpucrError | OSError | None:
        """Why gpucr cannot use CUDA itself, once known; None: it can."""
        return self._preparation.error()

    def begin(self, restore_thread: int, meter: Meter, deadline: float | None) -> None:
        """Take the memory out. From here on only our descriptors and the guard's hold it."""
        pid = self.part.pid
        self.wait_prepared()
        self._before_first()
        with spoken(pid, "let its memory go"), unlocked(self._driver, pid):
            agent = self.line.agent
            for batch in agent.export():
                self._held += batch
            self._guarded.blocks(pid, self._uuids, self._held)
            self.blocks = BlocksSource(self.part, self._held, self._uuids, self._vaults)
            self._stage = Stage.AWAY
            agent.drop(imported_too=True)  # if it fails midway, `give_back` returns what is away
        meter.note(f"process {pid}: {format_bytes(self.blocks.size_bytes)} taken out by its interposer")
        if reason := self._preparation.choice.reason:
            meter.note(reason)
        self._taken = self._take()

    def _take(self) -> Taken:
        goes, way, vaults = self._goes, self._preparation.choice.way, self._vaults
        blocks, uuids = self.blocks, self._preparation.needed
        if goes.to_host:
            return KeptByProcess(blocks, vaults, uuids, self._room, self._early, self._keep)
        if way is Way.IN_HOST_MEMORY:
            return InHostMemory(blocks, vaults, uuids, self._room)
        if goes.saver.piece_bytes:
            return Compared(blocks, vaults, uuids, goes.saver, Terms(way, goes.keeping, self._uuids[0], self._early))
        return OnGpu(blocks, vaults, uuids)

    def wait_started(self) -> None:
        pass

    def complete(self, meter: Meter) -> None:
        """The driver has the rest. What goes to host memory is kept by the process, and its GPU memory is freed."""
        self._taken.complete(meter)
        self.line.hang_up()  # CRIU cannot dump a connection to us

    def _keep(self, file: StagingFile) -> None:
        with spoken(self.part.pid, "keep its memory"):
            self.line.agent.keep(file.fd)
        self.blocks.close()
        self._guarded.blocks(self.part.pid, self._uuids, ())
        self._close_held()

    def abort(self) -> None:
        """The bytes are not needed; they stay where they are until `give_back`."""
        self._taken.abort()

    @property
    def _stays_on_gpu(self) -> bool:
        """Whether the process gets other memory, and what it had is read while it runs."""
        return self._preparation.choice.way is Way.ON_GPU

    def make_way(self) -> None:
        """The driver is about to restore the process:

        nothing of ours stays on its GPUs, but what is still to be read.
        """
        if self._stage in (Stage.GATED, Stage.AWAY) and not self._stays_on_gpu:
            self.blocks.close()
            if not self._goes.keeping.is_on_gpu:
                self._vaults.close()

    def give_back(self) -> None:
        """Its own memory returns to its addresses, from the descriptors or from host memory. The gate stays closed.

        The process continues in the very memory that was taken from it. If that has to stay on the GPU to be saved, we
        keep it, and the process gets other memory with the same bytes.
        """
        if self._stage not in (Stage.GATED, Stage.AWAY):
            return
        if self._stays_on_gpu:
            self.blocks.see_all()
        renew = self._stays_on_gpu or self._goes.moves
        bring_back(self._driver, self.line, self._uuids, self._vaults, self._held, renew=renew)
        if self._stays_on_gpu and self._shares_with_us():
            with contextlib.suppress(GpucrError, OSError):  # the commit reports a failed save
                self._goes.keeping.wait_saved()
        self._stage = Stage.BACK
        self._guarded.blocks(self.part.pid, self._uuids, ())

    def _shares_with_us(self) -> bool:
        """Whether others have filled the GPU: then the process must not change what it has before it is saved."""
        with spoken(self.part.pid, "tell what it has"):
            return any(each.flags & Flag.RETURNED for each in self.line.agent.blocks())

    @property
    def held(self) -> dict[Part, Held]:
        """The memory that we hold now."""
        return by_part(self.part.pid, self._held)

    @property
    def is_given_back(self) -> bool:
        """Whether `give_back` has returned what `begin` had taken."""
        return self._stage in (Stage.BACK, Stage.CONTINUES)

    @property
    def is_out(self) -> bool:
        """Whether its gate is closed: its memory is away, or back, and it does not continue yet."""
        return self._stage not in (Stage.HERE, Stage.CONTINUES)

    def tell_guard(self) -> None:
        """Tell the guard that it may need its gate opened, though it still has all of its memory."""
        self._stage = Stage.GATED
        self._guarded.blocks(self.part.pid, self._uuids, ())

    def go_on(self) -> None:
        """It has everything: open its gate; the driver's lock holds it."""
        let_continue(self.line)
        self._stage = Stage.CONTINUES

    def moved(self, gpu_map: GpuMap) -> None:
        """The driver has restored the process on other GPUs: memory that is away goes there."""
        self._uuids = tuple(gpu_map.new_for(uuid) for uuid in self._uuids)

    def _close_held(self) -> None:
        while self._held:
            self._held.pop().close()

    def close(self) -> None:
        """Close the descriptors and the connection: a closed gate opens, unless memory is away."""
        self._preparation.error()
        self._taken.close()
        self.blocks.close()
        self._close_held()
        self.line.hang_up()
        self._room.close()


def carried_by(line: Line, uuids: Sequence[str]) -> dict[str, int]:
    """How much of a process's memory its interposer would take, in bytes per GPU UUID.

    Raises InterposerError, JobChanged.
    """
    with spoken(line.pid, "tell what it has"):
        found: dict[str, int] = {}
        for each in filter(can_leave, line.agent.blocks()):
            uuid = gpu_of(each, uuids) or uuids[0]
            found[uuid] = found.get(uuid, 0) + each.size_bytes
        return found

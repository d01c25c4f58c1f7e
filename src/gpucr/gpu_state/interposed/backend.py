"""The backend: takes memory out of one process, and puts it back."""

from __future__ import annotations

import contextlib
import mmap
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from gpucr.driver.api import Driver
from gpucr.errors import GpucrError
from gpucr.gpu_state.backend import INTERPOSED
from gpucr.gpu_state.interposed.blocks import BlocksSource, HostRoom, can_leave, gpu_of
from gpucr.gpu_state.interposed.changes import Changes, Stretch, stretches
from gpucr.gpu_state.interposed.coming_back import bring_back, let_continue
from gpucr.gpu_state.interposed.guarded import Guarded
from gpucr.gpu_state.interposed.host_copy import FILE_NAME
from gpucr.gpu_state.interposed.keeping import Keeping, Way
from gpucr.gpu_state.interposed.line import GatedLock, Line, spoken, unlocked
from gpucr.gpu_state.interposed.shared import (
    by_part,
)
from gpucr.gpu_state.interposed.work import Work
from gpucr.gpu_state.source import FileSource, Saver, Source
from gpucr.interposer.client import Held
from gpucr.interposer.protocol import Code, Flag, Refused, Status
from gpucr.interposer.sharing import Part
from gpucr.interposer.vault import VaultFailed, Vaults
from gpucr.linux.tmpfs import StagingFile
from gpucr.model import DevicePart, GpuMap, StagedExtent
from gpucr.quantities import format_bytes
from gpucr.undo.steps import Meter

_CAPTURE_S, _CAPTURE_POLL_S = 2.0, 0.02
"""How long a first pass waits for the end of a stream's capture."""


class Goes(NamedTuple):
    """Where memory goes: ``to_host``, to memory that the process keeps; ``keeping``: where it waits to be saved.

    ``moves``: in the end to other GPUs.
    """

    to_host: bool
    keeping: Keeping | None
    moves: bool


class Interposed:
    """See `Backend`. ``uuids``: the GPUs that the process sees, in its order.

    ``to_host``: at `complete` the bytes are in host memory, which the process itself holds for a later resume.
    ``keeping``: the process runs again before its memory is saved. ``saver``: after a first pass (`show`) it knows what
    has changed since; ``looks``: it saves all of it when it stands still, by digests. ``moves``: it comes back on other
    GPUs.
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
        vaults: Vaults,
        guarded: Guarded,
        *,
        goes: Goes,
        saver: Saver | None = None,
        looks: bool = False,
        before_first: Callable[[], None] = lambda: None,
    ) -> None:
        self.part = part
        self.line = Line(part.pid)
        self.lock = GatedLock(driver, self.line)
        self.extents: tuple[StagedExtent, ...] = ()
        self._driver = driver
        self._uuids = tuple(uuids)
        self._vaults = vaults
        self._guarded = guarded
        self._to_host = goes.to_host
        self.carries: dict[str, int] = {}
        self._keeping = goes.keeping
        self._saver = saver
        self._looks = looks
        self._deciding: Work[None] | None = None
        self._changes: Changes | None = None
        self.was_shown = False
        self._note = ""
        self._moves = goes.moves
        self._before_first = before_first
        self._may_start = threading.Event()
        self._is_readable = False
        self._way: Way | None = None
        self._copy: FileSource | None = None
        self._needed: dict[str, int] = {}
        self._held: list[Held] = []
        self._source: BlocksSource | None = None
        self._room: StagingFile | None = None
        self._preparing: threading.Thread | None = None
        self._failure: GpucrError | OSError | None = None
        self._copying: Work[StagingFile] | None = None
        self._is_out = False
        self._is_back = False

    def status(self) -> Status:
        """Its counters. Raises as `Agent`."""
        return self.line.agent.status()

    @property
    def source(self) -> Source | None:
        """The memory on the GPU, or its copy: of what has changed, if the rest is saved."""
        return self._copy or self._changes or self._source

    def carried(self) -> dict[str, int]:
        """How much of its memory it would take, in bytes per GPU UUID. Raises InterposerError, JobChanged."""
        with spoken(self.part.pid, "tell what it has"):
            found: dict[str, int] = {}
            for each in filter(can_leave, self.line.agent.blocks()):
                uuid = gpu_of(each, self._uuids) or self._uuids[0]
                found[uuid] = found.get(uuid, 0) + each.size_bytes
            return found

    def show(self) -> BlocksSource:
        """Its memory while it runs, to read from; the caller closes it.

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
        self.was_shown = True
        return shown

    def available_bytes(self) -> int:
        """Everything, once it is out of the process and can be read; nothing while a copy is being made."""
        return self._source.size_bytes if self._source is not None and self._is_readable else 0

    def prepare(self, size_bytes: int) -> int:
        """Begin to start the vaults and to make room."""
        self._needed = self.carried()
        own_bytes = sum(self._needed.values())
        if self._keeping is not None:
            self._keeping.need(self._needed)
        self._preparing = threading.Thread(target=self._prepare, args=(own_bytes,), name="vault", daemon=True)
        self._preparing.start()
        return min(size_bytes, own_bytes)

    def _prepare(self, own_bytes: int) -> None:
        try:
            self._vaults.prepare()
            for uuid in self._needed:
                self._vaults.start_if_roomy(uuid)
        except (GpucrError, OSError) as error:
            self._failure = error
        if self._to_host and self._failure is None:
            self._make_room(own_bytes)

    def _make_room(self, own_bytes: int) -> None:
        with contextlib.suppress(OSError):  # the rest is allocated on demand
            if self._room is None:
                self._room = StagingFile.create(own_bytes, FILE_NAME)
            self._room.populate(0, own_bytes)

    def room_of(self, size_bytes: int) -> StagingFile:
        """The file for its memory, while it runs or stands still. Raises OSError."""
        if self._preparing is not None and self._preparing is not threading.current_thread():
            self._preparing.join()
        if self._room is None:
            self._room = StagingFile.create(size_bytes, FILE_NAME)
        if self._room.size_bytes < size_bytes:
            self._room.resize(size_bytes)
        return self._room

    def needs_nothing(self) -> None:
        """Exclude this process from the choice for the others."""
        if self._keeping is not None:
            self._keeping.need({uuid: -size_bytes for uuid, size_bytes in self._needed.items()})

    def wait_prepared(self) -> None:
        """Wait for vaults and room. If memory has to be kept, choose now how."""
        if self.failure() is None and self._keeping is not None and self._way is None and self._needed:
            self._way = self._keeping.choice().way
            if self._way is Way.IN_HOST_MEMORY:
                self._make_room(sum(self._needed.values()))

    def failure(self) -> GpucrError | OSError | None:
        """Why gpucr cannot use CUDA itself, once known; None: it can."""
        if self._preparing is not None:
            self._preparing.join()
        return self._failure

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
            source = self._source = BlocksSource(self.part, self._held, self._uuids, self._vaults)
            self.extents = source.extents
            self._is_out = True
            agent.drop(imported_too=True)  # if it fails midway, `give_back` returns what is away
        meter.note(f"process {pid}: {format_bytes(source.size_bytes)} taken out by its interposer")
        if self._keeping is not None and self._way is not None:
            meter.note(self._keeping.choice().reason)
        if self._to_host or self._way is Way.IN_HOST_MEMORY:
            self._copying = Work(lambda: self._copy_to_host(source))
        elif self._looks and (saver := self._saver) is not None:
            changes = self._changes = Changes(source)
            self._deciding = Work(lambda: self._decide(source, saver, changes))
        else:
            self._is_readable = self._vaults.try_all(self._needed)

    def wait_started(self) -> None:
        pass

    def _start_vaults(self) -> None:
        """Now, or when the driver has freed the process's context."""
        if not self._vaults.try_all(self._needed):
            self._may_start.wait()
            self._vaults.start_all(self._needed)

    def _differing(self, source: BlocksSource, saver: Saver, saved_from: Source) -> list[Stretch]:
        """What is not saved as it is now. ``saved_from``: the source for what the saver reads from now on."""
        piece_bytes = saver.piece_bytes
        saver.add(saved_from)
        with contextlib.suppress(VaultFailed):  # no room for digests: then all of it differs
            saver.look(self.part, source.digests(piece_bytes, saver.digest_key))
        return stretches(saver.differing(self.part), piece_bytes, source.size_bytes)

    def _decide(self, source: BlocksSource, saver: Saver, changes: Changes) -> None:
        """What differs from what the first pass saved, by digests of the memory as it stands still; and keep that."""
        self._start_vaults()
        kept = self._differing(source, saver, changes)
        if self.was_shown:
            self._note = f"{format_bytes(sum(each.size_bytes for each in kept))} differ from the first pass"
        if self._way is not Way.CHANGES or self._keeping is None:
            self._is_readable = True
            return
        size_bytes = sum(each.size_bytes for each in kept)
        way = self._keeping.place(self._uuids[0], size_bytes)
        if way is Way.ON_GPU and not changes.keep_on_gpu(kept, self._vaults.of(self._uuids[0])):
            way = self._keeping.place_on_host(size_bytes)
        if way is Way.IN_HOST_MEMORY:
            changes.keep_on_host(kept)
        self._is_readable = way is Way.JOB_WAITS
        self._note += f", and are kept {way.value}" if not self._is_readable else ""

    def _copy_to_host(self, source: BlocksSource) -> StagingFile:
        """The file with the copy, which then has its size."""
        self._start_vaults()
        size_bytes = source.size_bytes
        file = self.room_of(size_bytes)
        if not size_bytes:
            file.resize(0)
            return file
        # Only what a first pass has put into this very file counts.
        saver = self._saver if self.was_shown and self._to_host else None
        differing = self._differing(source, saver, source) if saver is not None else None
        room = HostRoom(file, max(size_bytes, mmap.PAGESIZE))
        try:
            if differing is None:
                source.copy_to(room.address)
            else:
                source.copy_these(differing, room.address)
        finally:
            room.close()
        file.resize(size_bytes)
        return file

    def complete(self, meter: Meter) -> None:
        """The driver has the rest. With ``to_host`` the process keeps the bytes, and its GPU memory is freed."""
        pid = self.part.pid
        self._may_start.set()
        if self._deciding is not None:
            self._deciding.wait()
            if self._note:
                meter.note(f"process {pid}: {self._note}")
        elif self._copying is None and not self._is_readable:
            self._vaults.start_all(self._needed)
            self._is_readable = True
        if self._copying is not None:
            file = self._copying.wait()
            if self._to_host:
                with spoken(pid, "keep its memory"):
                    self.line.agent.keep(file.fd)
                self._let_go()
            else:
                self._copy = FileSource(self.part, file.fd, file.size_bytes)
        self.line.hang_up()  # CRIU cannot dump a connection to us

    def abort(self) -> None:
        """The bytes are not needed; they stay where they are until `give_back`."""
        self._may_start.set()
        for work in (self._copying, self._deciding):
            if work is not None:
                with contextlib.suppress(GpucrError, OSError):
                    work.wait()

    def make_way(self) -> None:
        """The driver is about to restore the process:

        nothing of ours stays on its GPUs, but what is still to be read.
        """
        if self._is_out and not self._is_back and self._way is not Way.ON_GPU:
            self._is_readable = False
            if self._source is not None:
                self._source.close()
            if self._keeping is None or not self._keeping.is_on_gpu:
                self._vaults.close()

    def give_back(self) -> None:
        """Its own memory returns to its addresses, from the descriptors or from host memory. The gate stays closed.

        The process continues in the very memory that was taken from it. If that has to stay on the GPU to be saved, we
        keep it, and the process gets other memory with the same bytes.
        """
        if not self._is_out or self._is_back:
            return
        if self._source is not None and self._way is Way.ON_GPU:
            self._source.see_all()
        renew = self._way is Way.ON_GPU or self._moves
        bring_back(self._driver, self.line, self._uuids, self._vaults, self._held, renew=renew)
        if self._way is Way.ON_GPU and self._keeping is not None and self._shares_with_us():
            with contextlib.suppress(GpucrError, OSError):  # the commit reports a failed save
                self._keeping.wait_saved()
        self._is_back = True
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
        return self._is_back

    @property
    def is_out(self) -> bool:
        """Whether some of its memory is away and its gate is closed."""
        return self._is_out

    def tell_guard(self) -> None:
        """Tell the guard that it may need its gate opened, though it still has all of its memory."""
        self._is_out = True
        self._guarded.blocks(self.part.pid, self._uuids, ())

    def go_on(self) -> None:
        """It has everything: open its gate; the driver's lock holds it."""
        let_continue(self.line)
        self._is_out = False

    def moved(self, gpu_map: GpuMap) -> None:
        """The driver has restored the process on other GPUs: memory that is away goes there."""
        self._uuids = tuple(gpu_map.new_for(uuid) for uuid in self._uuids)

    def _let_go(self) -> None:
        """The bytes are elsewhere: close the descriptors, which frees the GPU memory."""
        if self._source is not None:
            self._source.close()
        self._guarded.blocks(self.part.pid, self._uuids, ())
        while self._held:
            self._held.pop().close()

    def close(self) -> None:
        """Close the descriptors and the connection: a closed gate opens, unless memory is away."""
        if self._preparing is not None:
            self._preparing.join()
        if self._changes is not None:
            self._changes.close()
        if self._source is not None:
            self._source.close()
        while self._held:
            self._held.pop().close()
        self.line.hang_up()
        if self._room is not None:
            self._room.close()

"""Kind `interposed`: device memory leaves the process by its interposer, and its bytes by a vault of gpucr's own.

Gate closed and driver locked are one: so a process stands still. To take its memory out, or to give it back, the driver
is unlocked for a moment while the gate keeps everybody but the agent out. What the driver checkpoints afterwards is the
context alone. The descriptors of the memory keep it alive, here and in the guard, whatever becomes of either.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import functools
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from gpucr.driver.api import Driver
from gpucr.errors import DeadlineExceeded, GpucrError, InterposerError, JobChanged
from gpucr.gang.holdable import DriverLock
from gpucr.gpu_state.backend import INTERPOSED
from gpucr.gpu_state.source import Source
from gpucr.gpu_state.ways import GpuState, refused
from gpucr.interposer.client import Agent, Held, ask_status
from gpucr.interposer.presence import is_interposed
from gpucr.interposer.protocol import BadAnswer, Block, Code, Flag, Refused
from gpucr.interposer.vault import SLOT_BYTES, Shown, Vault, Vaults, in_parallel, pointing
from gpucr.linux import processes
from gpucr.linux.tmpfs import StagingFile
from gpucr.model import CudaState, DevicePart, GangMember, GpuMap, ProcessId, StagedExtent
from gpucr.quantities import format_bytes
from gpucr.undo.steps import Meter

RELOCK_S = 30.0
"""How long the driver may take to lock a process in which nobody can have begun anything."""

_PIECE_BYTES = 4 * SLOT_BYTES

KEPT_NAME = "memfd:gpucr-device"
"""How the file is called that a suspended process keeps: not as the driver's staging, which is closed everywhere."""

_UNMAPPED = 1 << 62
"""From here on a snapshot numbers memory that no address of the process shows."""


class Guarded(Protocol):
    """What the guard is told (`gpu_state.recovery.GangProtection`)."""

    def blocks(self, pid: int, uuids: Sequence[str], held: Sequence[Held]) -> None:
        """This memory of the process is about to be in these descriptors alone.

        None: it is back, or the process keeps it. ``uuids``: the GPUs that the process sees.
        """


@contextlib.contextmanager
def spoken(pid: int, doing: str) -> Iterator[None]:
    """What goes wrong between gpucr and an agent in the block, as an error of gpucr's."""
    try:
        yield
    except (Refused, BadAnswer, OSError) as e:
        stat = processes.read_stat(pid)
        if stat is None or stat.status in "ZX":
            raise JobChanged(f"process {pid} ended", pids=[pid], hint="its own log may say why") from e
        raise InterposerError(
            f"the interposer of process {pid} did not {doing}: {e}",
            hint="try again; `--gpu-state driver` does without it",
        ) from e


class Line:
    """The connection to the agent of one process, made when it is needed."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._agent: Agent | None = None

    @property
    def agent(self) -> Agent:
        """Connected. Raises as `Agent`."""
        if self._agent is None:
            self._agent = Agent(self.pid)
        return self._agent

    def hang_up(self) -> None:
        """Nothing of the connection is left in the process. A gate that was closed opens, unless memory is away."""
        agent, self._agent = self._agent, None
        if agent is not None:
            with contextlib.suppress(OSError):
                agent.hang_up()


class GatedLock:
    """See `gang.holdable.Holdable`: RUNNING, gate open is released; LOCKED, gate closed is held."""

    def __init__(self, driver: Driver, line: Line) -> None:
        self.pid = line.pid
        self._lock = DriverLock(driver, line.pid)
        self._line = line

    def hold(self, timeout_s: float) -> bool:
        """Nobody begins a call any more, those under way end, the driver locks: else all goes on."""
        end = time.monotonic() + timeout_s
        with spoken(self.pid, "close its gate"):
            closed = self._line.agent.close_gate(max(0.0, timeout_s))
        try:
            is_held = closed.is_empty and self._lock.hold(max(0.001, end - time.monotonic()))
        except BaseException:
            self._open()
            raise
        if not is_held:
            self._open()
        return is_held

    def release(self) -> None:
        """The driver's lock first: what waits at the gate finds it open."""
        self._lock.release()
        self._open()

    @property
    def is_held(self) -> bool:
        """Whether the driver has it locked."""
        return self._lock.is_held

    def _open(self) -> None:
        with spoken(self.pid, "open its gate"):
            self._line.agent.open_gate()


@contextlib.contextmanager
def unlocked(driver: Driver, pid: int) -> Iterator[None]:
    """LOCKED, gate closed → RUNNING while the block lasts, in which the agent alone calls the driver → LOCKED.

    One that is RUNNING, because whoever had it so was killed, ends LOCKED as well.
    """
    if driver.state(pid) is CudaState.LOCKED:
        driver.unlock(pid)
    try:
        yield
    finally:
        if not DriverLock(driver, pid).hold(RELOCK_S):
            raise DeadlineExceeded(f"the driver did not lock process {pid} again, in which nothing runs")


def can_leave(block: Block) -> bool:
    """Whether an interposer carries it; the others are not ours to move."""
    return not block.flags & (Flag.IMPORTED | Flag.CANNOT_LEAVE)


def extents_of(blocks: Sequence[Block]) -> tuple[StagedExtent, ...]:
    """One for each block, one behind the other; who is shown at no address is numbered."""
    extents: list[StagedExtent] = []
    offset = 0
    for block in blocks:
        extents.append(StagedExtent(block.address or _UNMAPPED + offset, block.size_bytes, offset))
        offset += block.size_bytes
    return tuple(extents)


class BlocksSource:
    """See `Source`: memory that descriptors keep alive, read from its GPUs."""

    def __init__(self, part: DevicePart, held: Sequence[Held], uuids: Sequence[str], vaults: Vaults) -> None:
        self.part = part
        self.extents = extents_of([each.block for each in held])
        self.size_bytes = sum(extent.size_bytes for extent in self.extents)
        self._held = tuple(held)
        self._uuids = uuids
        self._vaults = vaults
        self._seen: dict[int, tuple[Vault, Shown]] = {}
        self._lock = threading.Lock()

    def read_into(self, position: int, data: memoryview) -> None:
        """Through the vault of its GPU."""
        with pointing(data) as address:
            self._read(position, len(data), lambda start: address + start - position)

    def copy_to(self, address: int) -> None:
        """All of it, to host memory from there on."""
        pieces = [
            (extent.offset + at, min(_PIECE_BYTES, extent.size_bytes - at))
            for extent in self.extents
            for at in range(0, extent.size_bytes, _PIECE_BYTES)
        ]
        in_parallel([functools.partial(self._read, start, size, lambda at: address + at) for start, size in pieces])

    def _read(self, position: int, size_bytes: int, place: Callable[[int], int]) -> None:
        number = bisect.bisect_right(self._offsets, position) - 1
        while size_bytes > 0:
            extent = self.extents[number]
            within = position - extent.offset
            size = min(size_bytes, extent.size_bytes - within)
            vault, shown = self._see(number)
            start = position
            vault.read(
                shown.address + within,
                size,
                lambda slot, offset, count, start=start: ctypes.memmove(place(start + offset), slot, count),  # type: ignore[misc]
            )
            position, size_bytes, number = position + size, size_bytes - size, number + 1

    @functools.cached_property
    def _offsets(self) -> list[int]:
        return [extent.offset for extent in self.extents]

    def _see(self, number: int) -> tuple[Vault, Shown]:
        with self._lock:
            if number not in self._seen:
                held = self._held[number]
                vault = self._vaults.of(self._uuids[held.block.location])
                self._seen[number] = vault, vault.see(held.descriptor, held.block.size_bytes)
            return self._seen[number]

    def close(self) -> None:
        """See nothing of it any more."""
        with self._lock:
            while self._seen:
                vault, shown = self._seen.popitem()[1]
                vault.forget(shown)


def held_of(blocks: Iterable[Sequence[int]], descriptors: Iterator[int]) -> list[Held]:
    """The inverse of a block's fields, each with its descriptor."""
    return [
        Held(Block(index, generation, size, kind, location, Flag(flags), *rest), next(descriptors))
        for index, generation, size, kind, location, flags, *rest in blocks
    ]


def give_back(agent: Agent, held: Sequence[Held]) -> None:
    """Map memory again, renewed, so that it can leave another time; what is back already is passed over."""
    left = [each for each in held if each.descriptor >= 0]
    while left:
        try:
            agent.give_back(left, renew=True)
        except Refused as e:
            left = [each for each in left if each.descriptor >= 0]
            if e.code != Code.NOT_AWAY or not left:
                raise
            left.pop(0).close()
        else:
            return


def bring_back(driver: Driver, line: Line, uuids: Sequence[str], vaults: Vaults, held: Sequence[Held] = ()) -> None:
    """What is away of a process comes back: from these descriptors, or from what the process keeps. LOCKED → LOCKED.

    The gate stays closed, and what is kept is kept, until `let_go_on`. Nothing where nothing is away. Raises
    InterposerError, VaultFailed, JobChanged, DriverError; what is not back yet is where it was.
    """
    with spoken(line.pid, "take its memory back"), contextlib.ExitStack() as opened:
        agent = line.agent
        kept = agent.fetch()
        file = StagingFile.adopt(kept) if kept is not None else None
        if file is not None:
            opened.callback(file.close)
        elif not agent.status().away:  # whoever was about to take it was killed: the gate may be open already
            return
        opened.enter_context(unlocked(driver, line.pid))
        give_back(agent, held)
        blocks = [each for each in agent.blocks() if can_leave(each)]
        if file is not None:
            _fill(agent, blocks, file, uuids, vaults)
        elif any(each.flags & Flag.AWAY for each in blocks):
            raise InterposerError(
                f"device memory of process {line.pid} is away, and nobody has it",
                hint="the gpucr that took it was killed together with its guard: end the job",
            )


def let_go_on(line: Line) -> None:
    """All of it is back: what the process keeps is given up, and its gate opens. The driver's lock holds it now."""
    with spoken(line.pid, "open its gate"):
        line.agent.keep(None)
    line.hang_up()


def take_out_again(driver: Driver, pid: int) -> None:
    """What has come back of what the process keeps is away again, so that the driver can checkpoint it.

    LOCKED → LOCKED. Nothing where nothing is kept.
    """
    line = Line(pid)
    try:
        with spoken(pid, "let its memory go again"):
            kept = line.agent.fetch()
            if kept is None:
                return
            os.close(kept)
            with unlocked(driver, pid):
                for batch in line.agent.export():
                    for each in batch:
                        each.close()
                line.agent.drop()
    finally:
        line.hang_up()


def _fill(agent: Agent, blocks: Sequence[Block], file: StagingFile, uuids: Sequence[str], vaults: Vaults) -> None:
    """New memory for what is away, and the bytes of all from the file: what is there may have been filled in part."""
    places = {(block.index, block.generation): extent for block, extent in zip(blocks, extents_of(blocks), strict=True)}
    size_bytes = sum(block.size_bytes for block in blocks)
    if file.size_bytes != size_bytes:
        raise BadAnswer(f"it keeps {file.size_bytes} bytes of {size_bytes}")
    room = HostRoom(file, size_bytes)
    try:
        for made in agent.create([block for block in blocks if block.flags & Flag.AWAY]):
            for each in made:
                each.close()
        for there in agent.export():
            _fill_these(there, places, room.address, uuids, vaults)
    finally:
        room.close()


def _fill_these(
    there: Sequence[Held],
    places: Mapping[tuple[int, int], StagedExtent],
    address: int,
    uuids: Sequence[str],
    vaults: Vaults,
) -> None:
    seen: list[tuple[Vault, Shown]] = []
    try:
        work: list[Callable[[], None]] = []
        for each in there:
            vault = vaults.of(uuids[each.block.location])
            shown = vault.see(each.descriptor, each.block.size_bytes)
            seen.append((vault, shown))
            work += writes(vault, shown, address + places[each.block.index, each.block.generation].offset)
        in_parallel(work)
    finally:
        for vault, shown in seen:
            vault.forget(shown)
        for each in there:
            each.close()


def writes(vault: Vault, shown: Shown, start: int) -> list[Callable[[], None]]:
    """What fills device memory from the host address, in pieces."""

    def one(at: int) -> None:
        size = min(_PIECE_BYTES, shown.size_bytes - at)
        vault.write(shown.address + at, size, lambda slot, offset, n: ctypes.memmove(slot, start + at + offset, n))

    return [functools.partial(one, at) for at in range(0, shown.size_bytes, _PIECE_BYTES)]


class HostRoom:
    """A file in memory, as addresses of this process. The file stays the caller's."""

    def __init__(self, file: StagingFile, size_bytes: int) -> None:
        self._map = mmap.mmap(file.fd, size_bytes)
        self._start = ctypes.c_char.from_buffer(self._map)
        self.address = ctypes.addressof(self._start)

    def close(self) -> None:
        """The addresses are nobody's any more."""
        del self._start
        self._map.close()


class Interposed:
    """See `Backend`. ``uuids``: the GPUs that the process sees, in its order.

    ``to_host``: at `complete` the bytes are in host memory, which the process itself holds for whoever resumes it.
    """

    kind = INTERPOSED

    def __init__(
        self, part: DevicePart, driver: Driver, uuids: Sequence[str], vaults: Vaults, guarded: Guarded, *, to_host: bool
    ) -> None:
        self.part = part
        self.line = Line(part.pid)
        self.lock = GatedLock(driver, self.line)
        self.extents: tuple[StagedExtent, ...] = ()
        self._driver = driver
        self._uuids = tuple(uuids)
        self._vaults = vaults
        self._guarded = guarded
        self._to_host = to_host
        self._held: list[Held] = []
        self._source: BlocksSource | None = None
        self._room: StagingFile | None = None
        self._preparing: threading.Thread | None = None
        self._copying: _Work | None = None

    def why_not(self) -> str | None:
        """Why its memory cannot leave so, or would in pieces; None: it can. Raises as `Agent`."""
        status = self.line.agent.status()
        if not status.blocks:
            return "it has no memory that could leave"
        reasons = (
            (status.stuck, "{} of its blocks cannot leave a second time"),
            (status.imported, "{} of its blocks are other processes'"),
            (status.away, "{} of its blocks are away already"),
            (status.around, "{} of its libraries may come to the driver around the gate"),
        )
        return next((text.format(count) for count, text in reasons if count), None)

    @property
    def source(self) -> Source | None:
        """The memory on the GPU."""
        return self._source

    def available_bytes(self) -> int:
        """All of it, as soon as it is out of the process."""
        return self._source.size_bytes if self._source is not None else 0

    def prepare(self, size_bytes: int) -> int:
        """Begin to start the vaults, and to make room."""
        with spoken(self.part.pid, "tell what it has"):
            blocks = [each for each in self.line.agent.blocks() if can_leave(each)]
        own_bytes = sum(each.size_bytes for each in blocks)
        uuids = {self._uuids[each.location] for each in blocks}
        self._preparing = threading.Thread(target=self._prepare, args=(own_bytes, uuids), name="vault", daemon=True)
        self._preparing.start()
        return min(size_bytes, own_bytes)

    def _prepare(self, own_bytes: int, uuids: set[str]) -> None:
        with contextlib.suppress(GpucrError, OSError):  # said when it is needed
            for uuid in uuids:
                self._vaults.of(uuid)
        if self._to_host:
            with contextlib.suppress(OSError):
                self._room = StagingFile.create(own_bytes, KEPT_NAME)
                self._room.populate(0, own_bytes)

    def wait_prepared(self) -> None:
        """Until vaults and room are there."""
        if self._preparing is not None:
            self._preparing.join()

    def begin(self, restore_thread: int, meter: Meter, deadline: float | None) -> None:
        """Take the memory out. From here on it is in our descriptors, and the guard's, alone."""
        pid = self.part.pid
        self.wait_prepared()
        with spoken(pid, "let its memory go"), unlocked(self._driver, pid):
            agent = self.line.agent
            for batch in agent.export():
                self._held += batch
            self._guarded.blocks(pid, self._uuids, self._held)
            agent.drop()
        self._source = BlocksSource(self.part, self._held, self._uuids, self._vaults)
        self.extents = self._source.extents
        meter.note(f"process {pid}: {format_bytes(self._source.size_bytes)} taken out by its interposer")
        if self._to_host:
            self._copying = _Work(self._copy_to_host)

    def wait_begun(self) -> None:
        """It is out."""

    def _copy_to_host(self) -> None:
        assert self._source is not None  # noqa: S101 - begin has made it
        size_bytes = self._source.size_bytes
        if self._room is None:
            self._room = StagingFile.create(size_bytes, KEPT_NAME)
        self._room.resize(max(self._room.size_bytes, size_bytes))
        room = HostRoom(self._room, max(size_bytes, mmap.PAGESIZE))
        try:
            self._source.copy_to(room.address)
        finally:
            room.close()

    def complete(self, meter: Meter) -> None:
        """The driver has the rest. To the host: the process keeps the bytes, and its GPU memory is free."""
        pid = self.part.pid
        if self._copying is not None:
            self._copying.wait()
            assert self._room is not None  # noqa: S101 - it was copied to
            assert self._source is not None  # noqa: S101
            self._room.resize(self._source.size_bytes)
            with spoken(pid, "keep its memory"):
                self.line.agent.keep(self._room.fd)
            self._let_go()
        self.line.hang_up()  # CRIU cannot dump a connection to us

    def abort(self) -> None:
        """Nobody wants the bytes; they stay where they are until `give_back`."""
        if self._copying is not None:
            with contextlib.suppress(GpucrError, OSError):
                self._copying.wait()

    def give_back(self) -> None:
        """Whatever is away comes back to its addresses, from the descriptors or from host memory."""
        if self._source is None:
            return
        self._source.close()
        bring_back(self._driver, self.line, self._uuids, self._vaults, self._held)
        let_go_on(self.line)
        self._source = None
        self._guarded.blocks(self.part.pid, self._uuids, ())

    @property
    def is_given_back(self) -> bool:
        """Whether `give_back` has returned what `begin` had taken."""
        return self._source is None and bool(self.extents)

    def moved(self, gpu_map: GpuMap) -> None:
        """The driver has restored the process on other GPUs: what is away goes there."""
        self._uuids = tuple(gpu_map.new_for(uuid) for uuid in self._uuids)

    def _let_go(self) -> None:
        """The bytes are elsewhere, and the GPU memory is free when nobody holds its descriptors."""
        assert self._source is not None  # noqa: S101 - its bytes were read
        self._source.close()
        self._guarded.blocks(self.part.pid, self._uuids, ())
        while self._held:
            self._held.pop().close()

    def close(self) -> None:
        """The descriptors and the connection: a gate that is closed opens, unless memory is away."""
        self.wait_prepared()
        if self._source is not None:
            self._source.close()
        while self._held:
            self._held.pop().close()
        self.line.hang_up()
        if self._room is not None:
            self._room.close()


class _Work:
    """Something that is done in a thread of its own."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(work,), name="vault", daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as e:  # noqa: BLE001 - raised where it is waited for
            self._error = e

    def wait(self) -> None:
        """Until it is done. Raises what it raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error


WITHOUT = "it was started without one"


class Interposers:
    """The interposed processes of an operation. ``uuids_of``: the GPUs that a process sees, in its order.

    ``gpu_state``: the way that a user insists on. ``why_not``: by pid, why a process goes another way than this one.
    """

    def __init__(
        self,
        driver: Driver,
        uuids_of: Callable[[ProcessId], Sequence[str]],
        guarded: Guarded,
        *,
        to_host: bool,
        gpu_state: GpuState = "auto",
    ) -> None:
        self._driver = driver
        self._uuids_of = uuids_of
        self._guarded = guarded
        self._to_host = to_host
        self._vaults = Vaults()
        self._backends: dict[int, Interposed | None] = {}
        self._gpu_state = gpu_state
        self.why_not: dict[int, str] = {}

    def require(self, members: Iterable[GangMember]) -> None:
        """Raise Unsupported where one of these that run would go another way, and this one is insisted on."""
        for member in members if self._gpu_state == INTERPOSED else ():
            if member.found is CudaState.RUNNING and not self.over(member.pid):
                why = self.why_not.get(member.pid, WITHOUT)
                raise refused(
                    f"device memory of process {member.pid} cannot leave by an interposer: {why}",
                    "start the job with `gpucr run --interpose`",
                )

    def over(self, pid: int) -> tuple[Interposed, ...]:
        """What takes memory of this process, which runs; nothing where it has no interposer, or one that is no use."""
        if pid not in self._backends:
            self._backends[pid] = self._find(pid)
        found = self._backends[pid]
        return (found,) if found is not None else ()

    def rank(self, pid: int) -> GatedLock | None:
        """What holds this process."""
        found = self._backends.get(pid) or next(iter(self.over(pid)), None)
        return found.lock if found is not None else None

    def _find(self, pid: int) -> Interposed | None:
        if self._gpu_state not in ("auto", INTERPOSED) or self._driver.state(pid) is not CudaState.RUNNING:
            return None
        if not is_interposed(pid):
            return None
        stat = processes.read_stat(pid)
        if stat is None:
            return None
        uuids = self._uuids_of(ProcessId(pid, stat.start_time_ticks))
        made = Interposed(DevicePart(pid, 1), self._driver, uuids, self._vaults, self._guarded, to_host=self._to_host)
        try:
            why_not = made.why_not()
        except (Refused, BadAnswer, OSError) as e:  # another version, somebody else's, busy: as without it
            why_not = str(e)
        if why_not is None:
            return made
        made.close()
        self.why_not[pid] = why_not
        return None

    def moved(self, maps: Mapping[int, GpuMap]) -> None:
        """The driver has restored these processes, by pid, on other GPUs."""
        for pid, gpu_map in maps.items():
            backend = self._backends.get(pid)
            if backend is not None:
                backend.moved(gpu_map)

    def is_given_back(self) -> bool:
        """Whether one of them has its memory again."""
        return any(backend is not None and backend.is_given_back for backend in self._backends.values())

    def close(self) -> None:
        """The vaults; the backends are closed by who has them."""
        self._vaults.close()

    def wait_prepared(self) -> None:
        """Until the backends that were asked to prepare have done so."""
        for backend in self._backends.values():
            if backend is not None:
                backend.wait_prepared()


class SuspendedBlocks:
    """What interposed processes keep since they were suspended. ``maps``: of those that go to other GPUs, by pid."""

    def __init__(self, driver: Driver, uuids_of: Callable[[int], Sequence[str]], maps: Mapping[int, GpuMap]) -> None:
        self._driver = driver
        self._uuids_of = uuids_of
        self._maps = maps
        self._vaults = Vaults()
        self._starting: threading.Thread | None = None

    def is_away(self, pid: int) -> bool:
        """Whether memory of this process is away, wherever the driver has it: whoever brought it back was killed."""
        status = ask_status(pid) if is_interposed(pid) else None
        return status is not None and status.away > 0

    def start(self, pids: Iterable[int]) -> None:
        """Begin to start the vaults that these processes need: the driver restores meanwhile."""
        self._starting = threading.Thread(target=self._start, args=(tuple(pids),), name="vault", daemon=True)
        self._starting.start()

    def _start(self, pids: Sequence[int]) -> None:
        with contextlib.suppress(GpucrError, OSError, IndexError, Refused, BadAnswer):  # said when it is needed
            for pid in filter(is_interposed, pids):
                line, places = Line(pid), self._places(pid)
                try:
                    locations = {each.location for each in line.agent.blocks() if each.flags & Flag.AWAY}
                finally:
                    line.hang_up()
                for location in locations:
                    self._vaults.of(places[location])

    def give_back(self, members: Iterable[GangMember]) -> None:
        """It goes back into all of them, and they are LOCKED. Raises the first error when all were tried.

        None gives up what it keeps before all have what was away: until then the job can be suspended again as it was.
        """
        self._wait_started()  # one client at a time
        errors: list[GpucrError] = []
        lines: list[Line] = []
        for member in members:
            try:
                state = self._driver.state(member.pid) if is_interposed(member.pid) else None
                if state is CudaState.LOCKED or (state is CudaState.RUNNING and self.is_away(member.pid)):
                    lines.append(Line(member.pid))
                    bring_back(self._driver, lines[-1], self._places(member.pid), self._vaults)
            except GpucrError as error:
                errors.append(error)
        try:
            if errors:
                raise errors[0]
            for line in lines:
                let_go_on(line)
        finally:
            for line in lines:
                line.hang_up()

    def take_out_again(self, pid: int) -> None:
        """The driver is about to checkpoint it again (`Gang.before_climb`)."""
        if is_interposed(pid):
            take_out_again(self._driver, pid)

    def _places(self, pid: int) -> Sequence[str]:
        gpu_map, uuids = self._maps.get(pid), self._uuids_of(pid)
        return [gpu_map.new_for(uuid) for uuid in uuids] if gpu_map is not None else uuids

    def close(self) -> None:
        """The vaults."""
        self._wait_started()
        self._vaults.close()

    def _wait_started(self) -> None:
        if self._starting is not None:
            self._starting.join()

"""What interposed processes keep since they were suspended."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from gpucr.driver.api import Driver
from gpucr.errors import GpucrError
from gpucr.gang import Gang
from gpucr.gang.around import Around
from gpucr.gpu_state.interposed.blocks import HostRoom, can_leave, extents_of, gpu_of, vault_of
from gpucr.gpu_state.interposed.coming_back import bring_back, let_continue, take_out_again
from gpucr.gpu_state.interposed.line import Line
from gpucr.gpu_state.interposed.restored import BlocksDestination
from gpucr.gpu_state.interposed.shared import has_continued, share_again
from gpucr.gpu_state.interposed.silent import left_to_driver
from gpucr.gpu_state.recovery import GangProtection
from gpucr.gpu_state.room import ROOM_LIMIT_S, lacking, wait_for_room
from gpucr.interposer.client import ask_status
from gpucr.interposer.presence import is_interposed
from gpucr.interposer.protocol import BadAnswer, Block, Flag, Refused
from gpucr.interposer.vault import VAULT_BYTES, WORKERS, Vaults, in_parallel
from gpucr.linux.tmpfs import StagingFile
from gpucr.model import CudaState, DevicePart, GangMember, GpuMap


class _Kept(Struct, frozen=True):
    """The memory that a process keeps at this address here: its blocks, and the GPUs that it will see."""

    pid: int
    blocks: tuple[Block, ...]
    places: tuple[str, ...]
    address: int

    @property
    def by_gpu(self) -> dict[str, int]:
        """How much of what the process keeps belongs on each GPU, in bytes by UUID."""
        found: dict[str, int] = {}
        for each in self.blocks:
            uuid = gpu_of(each, self.places)
            if uuid is not None:
                found[uuid] = found.get(uuid, 0) + each.size_bytes
        return found

    def make(self, vaults: Vaults) -> BlocksDestination:
        """New memory for all of it. Raises VaultFailed."""
        on_host = [gpu_of(each, self.places) is None for each in self.blocks]
        found = [vault_of(vaults, each, self.places) for each in self.blocks]
        extents = extents_of(self.blocks, self.places)
        return BlocksDestination(DevicePart(self.pid, 1), extents, list(zip(found, on_host, strict=True)))


class SuspendedBlocks(Around):
    """Memory kept by suspended interposed processes. ``maps``: for those that go to other GPUs, by pid.

    ``held``: what they held before, in bytes by pid and GPU UUID, where it is known. On a GPU that is full, or may be,
    all that they keep is copied there before the driver restores them, since our context and theirs do not fit beside
    it. Otherwise meanwhile. The gang gives it back before it unlocks. Once each process has everything, and before any
    frees what it keeps, there is no way back: then ``down_to`` is their target state.
    """

    def __init__(
        self,
        driver: Driver,
        uuids_of: Callable[[int], Sequence[str]],
        maps: Mapping[int, GpuMap],
        held: Mapping[int, Mapping[str, int]],
        guarded: GangProtection,
        down_to: Callable[[GangMember], CudaState],
    ) -> None:
        self._driver = driver
        self._guarded = guarded
        self._down_to = down_to
        self._uuids_of = uuids_of
        self._maps = maps
        self._held = held
        self._kept_bytes: dict[tuple[int, str], int] = {}
        self._is_made = threading.Event()
        self._vaults = Vaults()
        self._filled: dict[int, BlocksDestination] = {}
        self._starting: threading.Thread | None = None
        self._was_tried = False

    def is_away(self, pid: int) -> bool:
        """Whether it waits for memory, or at its gate, in any driver state: its restoring gpucr was killed."""
        status = ask_status(pid) if is_interposed(pid) else None
        return status is not None and bool(status.away or status.gate_closed)

    def start(self, pids: Iterable[int]) -> None:
        """Begin to fill memory for these CHECKPOINTED processes while the driver restores them."""
        self._starting = threading.Thread(target=self._start, args=(tuple(pids),), name="vault", daemon=True)
        self._starting.start()

    def _start(self, pids: Sequence[int]) -> None:
        try:
            # What fails is retried, and reported, when it is needed.
            with contextlib.suppress(GpucrError, OSError, IndexError, Refused, BadAnswer):
                self._fill(pids)
        finally:
            self._is_made.set()

    def _fill(self, pids: Sequence[int]) -> None:
        with contextlib.ExitStack() as opened:
            kept = [found for pid in filter(is_interposed, pids) if (found := self._kept(pid, opened)) is not None]
            needed: dict[str, int] = {}
            for each in kept:
                for uuid, size_bytes in each.by_gpu.items():
                    needed[uuid] = needed.get(uuid, 0) + size_bytes
            if not kept or lacking({uuid: size_bytes + VAULT_BYTES for uuid, size_bytes in needed.items()}):
                return
            filling: dict[int, BlocksDestination] = {}
            try:
                work: list[Callable[[], None]] = []
                for each in kept:
                    filling[each.pid] = each.make(self._vaults)
                    work += filling[each.pid].fills(each.address)
                self._is_made.set()
                in_parallel(work, WORKERS * max(1, len(self._vaults)))
            except BaseException:
                for made in filling.values():
                    made.close()
                raise
            self._filled = filling

    def _kept(self, pid: int, opened: contextlib.ExitStack) -> _Kept | None:
        """What the process keeps in host memory. None: not all of it is away, or nothing."""
        line, places = Line(pid), self._places(pid)
        try:
            blocks = [each for each in line.agent.blocks() if can_leave(each)]
            fd = line.agent.fetch()
        finally:
            line.hang_up()
        if fd is None:
            return None
        file = StagingFile.adopt(fd)
        opened.callback(file.close)
        size_bytes = sum(each.size_bytes for each in blocks)
        if not blocks or file.size_bytes != size_bytes or not all(each.flags & Flag.AWAY for each in blocks):
            return None
        room = HostRoom(file, size_bytes)
        opened.callback(room.close)
        found = _Kept(pid, tuple(blocks), tuple(places), room.address)
        self._kept_bytes |= {(pid, uuid): size_bytes for uuid, size_bytes in found.by_gpu.items()}
        return found

    def before_restore(self, gang: Gang, pids: Sequence[int]) -> None:
        if self._starting is not None:
            self._is_made.wait()
        needed: dict[str, int] = {}
        for pid in pids:
            for uuid, held in self._held.get(pid, {}).items():
                new = self._maps[pid].new_for(uuid) if pid in self._maps else uuid
                needed[new] = needed.get(new, 0) + max(0, held - self._kept_bytes.get((pid, new), 0))
        # Nothing is on record if the disk was full, or NVML had no figure: then there may be no room.
        if not lacking(needed) and all(self._held.get(pid) for pid in pids):
            return
        self._wait_started()
        for each in self._filled.values():
            each.seal()
        self._vaults.close()
        wait_for_room(needed, ROOM_LIMIT_S)

    def before_unlock(self, gang: Gang) -> None:
        """Put it back into all of them; they are LOCKED. Tries all, then raises the first error.

        None frees what it keeps before all have their memory: until then the job can be suspended again as it was. A
        second call, from the undo of the first, does nothing.
        """
        if self._was_tried:
            return
        self._was_tried = True
        self._wait_started()  # one client at a time
        errors: list[GpucrError] = []
        lines: list[Line] = []
        try:
            self._give_back(gang, lines, errors)
            if errors:
                raise errors[0]
            if not lines:
                return
            members = [replace(each, found=self._down_to(each)) for each in gang.members]
            self._guarded.going_on([line.pid for line in lines], members)
            for line in lines:
                try:
                    let_continue(line)
                except GpucrError as error:  # the others have everything, nothing is away any more
                    errors.append(error)
            if errors:
                gang.settle(self._down_to)
                raise errors[0]
        finally:
            for line in lines:
                line.hang_up()

    def _give_back(self, gang: Gang, lines: list[Line], errors: list[GpucrError]) -> None:
        back: list[Line] = []
        for member in gang.members:
            try:
                state = self._driver.state(member.pid) if is_interposed(member.pid) else None
                if state is CudaState.LOCKED and left_to_driver(member.pid):
                    continue
                if state is CudaState.LOCKED or (state is CudaState.RUNNING and self.is_away(member.pid)):
                    lines.append(Line(member.pid))
            except GpucrError as error:
                errors.append(error)
        for line in lines:
            try:
                if not has_continued(line, lines):
                    back.append(line)
                    filled = self._filled.get(line.pid)
                    bring_back(self._driver, line, self._places(line.pid), self._vaults, filled=filled)
            except GpucrError as error:
                errors.append(error)
        if not errors:
            share_again(self._driver, back, {})

    def before_climb(self, gang: Gang, pid: int) -> None:
        if is_interposed(pid):
            take_out_again(self._driver, pid)

    def _places(self, pid: int) -> Sequence[str]:
        gpu_map, uuids = self._maps.get(pid), self._uuids_of(pid)
        return [gpu_map.new_for(uuid) for uuid in uuids] if gpu_map is not None else uuids

    def close(self) -> None:
        """Close the vaults, and free what was filled but not given."""
        self._wait_started()
        for each in self._filled.values():
            each.close()
        self._vaults.close()

    def _wait_started(self) -> None:
        if self._starting is not None:
            self._starting.join()

"""What interposed processes keep since they were suspended."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence

from msgspec.structs import replace

from gpucr.errors import GpucrError
from gpucr.gang import Gang
from gpucr.gpu_state.interposed.blocks import HostRoom, can_leave, extents_of, gpu_of, vault_of
from gpucr.gpu_state.interposed.coming_back import bring_back, let_continue, take_out_again
from gpucr.gpu_state.interposed.line import Line
from gpucr.gpu_state.interposed.restored import TWICE_BYTES, BlocksDestination
from gpucr.gpu_state.interposed.shared import has_continued, share_again
from gpucr.gpu_state.interposed.silent import left_to_driver
from gpucr.gpu_state.recovery import GangProtection
from gpucr.interposer.client import ask_status
from gpucr.interposer.presence import is_interposed
from gpucr.interposer.protocol import BadAnswer, Flag, Refused
from gpucr.interposer.vault import WORKERS, Vaults, in_parallel
from gpucr.linux.tmpfs import StagingFile
from gpucr.model import CudaState, DevicePart, GangMember, GpuMap

_CONTEXT_BYTES = 1 << 30
"""What else the driver may allocate on the GPU for a returning process."""


def _needed(size_bytes: int) -> int:
    return size_bytes + TWICE_BYTES + _CONTEXT_BYTES


class SuspendedBlocks:
    """Memory kept by suspended interposed processes. ``maps``: for those that go to other GPUs, by pid.

    The gang gives it back before it unlocks. Once each process has everything, and before any frees what it keeps,
    there is no way back: then ``down_to`` is their target state.
    """

    def __init__(
        self,
        gang: Gang,
        uuids_of: Callable[[int], Sequence[str]],
        maps: Mapping[int, GpuMap],
        guarded: GangProtection,
        down_to: Callable[[GangMember], CudaState],
    ) -> None:
        self._gang = gang
        self._driver = gang.driver
        self._guarded = guarded
        self._down_to = down_to
        self._uuids_of = uuids_of
        self._maps = maps
        self._vaults = Vaults()
        self._filled: dict[int, BlocksDestination] = {}
        self._starting: threading.Thread | None = None
        self._was_tried = False
        gang.before_unlock = self.give_back
        gang.before_climb = self.take_out_again

    def is_away(self, pid: int) -> bool:
        """Whether it waits for memory, or at its gate, in any driver state: its restoring gpucr was killed."""
        status = ask_status(pid) if is_interposed(pid) else None
        return status is not None and bool(status.away or status.gate_closed)

    def start(self, pids: Iterable[int]) -> None:
        """Begin to fill memory for these CHECKPOINTED processes while the driver restores them."""
        self._starting = threading.Thread(target=self._start, args=(tuple(pids),), name="vault", daemon=True)
        self._starting.start()

    def _start(self, pids: Sequence[int]) -> None:
        # What fails is retried, and reported, when it is needed.
        with contextlib.suppress(GpucrError, OSError, IndexError, Refused, BadAnswer), contextlib.ExitStack() as opened:
            work: list[Callable[[], None]] = []
            filling: dict[int, BlocksDestination] = {}
            for pid in filter(is_interposed, pids):
                found = self._kept(pid, opened)
                if found is not None:
                    destination, address = found
                    filling[pid] = destination
                    work += destination.fills(address)
            try:
                in_parallel(work, WORKERS * max(1, len(self._vaults)))
            except BaseException:
                for each in filling.values():
                    each.close()
                raise
            self._filled = filling

    def _kept(self, pid: int, opened: contextlib.ExitStack) -> tuple[BlocksDestination, int] | None:
        """New memory for what the process keeps, and the address of the copy in host memory.

        None: not all of it is away.
        """
        line, places = Line(pid), self._places(pid)
        try:
            blocks = [each for each in line.agent.blocks() if can_leave(each)]
            vaults = [vault_of(self._vaults, each, places) for each in blocks]
            kept = line.agent.fetch()
        finally:
            line.hang_up()
        if kept is None:
            return None
        file = StagingFile.adopt(kept)
        opened.callback(file.close)
        if not blocks:
            return None
        size_bytes = sum(each.size_bytes for each in blocks)
        if file.size_bytes != size_bytes or not all(each.flags & Flag.AWAY for each in blocks):
            return None
        if any(vault.free_bytes() < _needed(size_bytes) for vault in vaults):
            return None
        room = HostRoom(file, size_bytes)
        opened.callback(room.close)
        on_host = [gpu_of(each, places) is None for each in blocks]
        extents = extents_of(blocks, places)
        destination = BlocksDestination(DevicePart(pid, 1), extents, list(zip(vaults, on_host, strict=True)))
        return destination, room.address

    def give_back(self) -> None:
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
            self._bring_back(lines, errors)
            if errors:
                raise errors[0]
            if not lines:
                return
            members = [replace(each, found=self._down_to(each)) for each in self._gang.members]
            self._guarded.going_on([line.pid for line in lines], members)
            for line in lines:
                try:
                    let_continue(line)
                except GpucrError as error:  # the others have everything, nothing is away any more
                    errors.append(error)
            if errors:
                self._gang.settle(self._down_to)
                raise errors[0]
        finally:
            for line in lines:
                line.hang_up()

    def _bring_back(self, lines: list[Line], errors: list[GpucrError]) -> None:
        back: list[Line] = []
        for member in self._gang.members:
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

    def take_out_again(self, pid: int) -> None:
        """The driver is about to checkpoint it again (`Gang.before_climb`)."""
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

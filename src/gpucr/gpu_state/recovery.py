"""How a gang returns to its found state after gpucr has died, and what an operation records for that."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from gpucr.driver.api import Driver
from gpucr.driver.cuda import load_driver
from gpucr.errors import GpucrError, JobChanged, reason_of
from gpucr.gang import Gang
from gpucr.gang.around import Around
from gpucr.gang.threads import GangThreads
from gpucr.gpu_state import staging
from gpucr.gpu_state.at_work import forget_dead
from gpucr.gpu_state.custom_storage import kept
from gpucr.gpu_state.room import total_of, wait_for_room
from gpucr.interposer.presence import agent_threads, is_interposed
from gpucr.linux import memory, processes
from gpucr.linux.tmpfs import KEPT_NAME
from gpucr.model import CudaState, GangMember, GpuMap, ProcessId, StagedExtent
from gpucr.undo.logs import append_to_log
from gpucr.undo.protection import Protection
from gpucr.undo.recovery import Action

if TYPE_CHECKING:
    from gpucr.interposer.client import Held

_DRIVER_LIMIT_S = 600.0
"""How long driver calls may take in total: those already begun, and those that bring the job back."""

_LOOK_EVERY_S = 0.05


class DetachedStaging(msgspec.Struct, frozen=True):
    """A process's staging that may be an empty reservation now."""

    pid: int
    extents: tuple[StagedExtent, ...]


class HeldBlocks(msgspec.Struct, frozen=True):
    """Device memory of an interposed process that is only in this many descriptors, or that the process keeps itself.

    ``blocks`` has the fields of each `interposer.protocol.Block`, ``uuids`` the GPUs that the process sees.
    """

    pid: int
    uuids: tuple[str, ...]
    blocks: tuple[tuple[int, ...], ...]


class CallAfterRestore(Action):
    """Call the "after" hooks of programs whose "before" hooks were called."""

    processes: tuple[ProcessId, ...]

    def recover(self, descriptors: Sequence[int]) -> bool:
        """Call the functions of those that run."""
        from gpucr.gpu_state.interposed.hooks import call_after_restore  # late: only needed here, and names this action

        call_after_restore(filter(processes.keeps_running, self.processes))
        return False


class ForgetWork(Action):
    """Remove the records that say where these processes belong while an operation has them (at_work.py)."""

    outlives_job = True
    is_on_record = True
    processes: tuple[ProcessId, ...]

    def recover(self, descriptors: Sequence[int]) -> bool:
        """Remove those whose writer has died."""
        for each in self.processes:
            forget_dead(each)
        return False


class EndStop(Action):
    """Let processes run again that SIGSTOP may have stopped, and that miss nothing else."""

    is_on_record = True
    processes: tuple[ProcessId, ...]

    def recover(self, descriptors: Sequence[int]) -> bool:
        processes.continue_stopped(self.processes)
        return False


class BringBack(Action):
    """Bring a gang back to its found state and let it run.

    - ``members``: return to the state in which they were found.
    - ``restore_threads``: by member pid, the one thread that may run while device memory is away.
    - ``detached``: staging to map back before the driver restores. The descriptors are its files, in order.
    - ``copies``: processes, by pid, that get back a kept file with their device memory. Its descriptors follow.
    - ``held``: memory taken by interposers; its descriptors follow, block by block.
    - ``going_on``: processes, by pid, that have all of that again and only have to be released.
    - ``carrier``: the only process that can bring back the device memory of ``carried``, by pid, and does so on
      request.
    - ``stopped``: processes that SIGSTOP may have stopped, to be continued.
    - ``moving``: the GPUs to which members may be moving, by pid. If one has arrived, the others follow: it may occupy
      their old place.
    - ``needs``: what the driver itself brings back, in bytes by pid and GPU UUID. Without room it is not restored.
    """

    members: tuple[GangMember, ...] = ()
    restore_threads: dict[int, int] = msgspec.field(default_factory=dict)
    detached: tuple[DetachedStaging, ...] = ()
    copies: tuple[int, ...] = ()
    held: tuple[HeldBlocks, ...] = ()
    going_on: tuple[int, ...] = ()
    carrier: ProcessId | None = None
    carried: tuple[int, ...] = ()
    stopped: tuple[ProcessId, ...] = ()
    moving: dict[int, GpuMap] = msgspec.field(default_factory=dict)
    needs: dict[int, dict[str, int]] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise ValueError if staging could not be mapped back."""
        if any(part.pid not in self.restore_threads for part in self.detached):
            raise ValueError("detached staging of a process without a restore thread")

    def recover(self, descriptors: Sequence[int]) -> bool:
        """Hold the threads, end the stop, map device memory, let the driver restore and unlock, release the threads."""
        members = [member for member in self.members if processes.keeps_running(member.id)]
        threads = GangThreads(agent_threads)
        given = iter(descriptors)
        files, copies = [next(given) for _ in self.detached], {pid: next(given) for pid in self.copies}
        blocks = list(given)
        try:
            if members:
                self._hold(threads, members)
                # The driver answers only while its thread runs; all other threads are held, and do not notice.
                processes.continue_stopped(set(self.stopped) & {member.id for member in members})
                self._attach_all(members, files)
                self._put_back(members, copies)
                self._wait_for_carrier(members)
                _return_to_found(
                    members,
                    self.moving,
                    self._wait_for_room,
                    lambda driver, moved: self._give_back(driver, moved, members, blocks),
                )
                self._close_left_behind(members)
        finally:
            threads.release()
            processes.continue_stopped(self.stopped)
        return False

    def _wait_for_room(self, pids: Sequence[int]) -> None:
        """Without any limit: the driver would lose them, and nobody but this guard has their memory."""
        staying = [pid for pid in pids if pid not in self.moving]
        wait_for_room(total_of(self.needs, staying), None, lambda text: append_to_log("guard", text))

    def _hold(self, threads: GangThreads, members: Sequence[GangMember]) -> None:
        """Hold what must not run before device memory is back (gang/threads.py)."""
        for member in members:
            if member.pid in self.restore_threads:
                try:
                    threads.hold({member.pid: self.restore_threads[member.pid]})
                except GpucrError as error:  # it has ended, or a debugger traces it: everything else must still be done
                    append_to_log("guard", f"not holding threads: {error}")

    def _attach_all(self, members: Sequence[GangMember], descriptors: Sequence[int]) -> None:
        """Map all detached staging back. Retries until done or the process has ended: the data is nowhere else.

        Only maps over reservations: an attach may have followed the action, and mapping over anything else would
        destroy it.
        """
        ids = {member.pid: member.id for member in members}
        files = dict(zip((part.pid for part in self.detached), descriptors, strict=True))
        waiting = {part.pid: part for part in self.detached if part.pid in ids}
        told: set[int] = set()
        while waiting:
            for pid, part in list(waiting.items()):
                try:
                    missing = [extent for extent in part.extents if _is_reservation(pid, extent)]
                    if missing:
                        staging.attach(self.restore_threads[pid], files[pid], missing)
                    del waiting[pid]
                except Exception as error:  # noqa: BLE001 - the data is safe while this retries
                    if not processes.keeps_running(ids[pid]):
                        del waiting[pid]
                    elif pid not in told:
                        told.add(pid)
                        append_to_log("guard", f"the device memory of process {pid} cannot be put back yet: {error}")
            if waiting:
                time.sleep(_LOOK_EVERY_S)

    def _put_back(self, members: Sequence[GangMember], copies: Mapping[int, int]) -> None:
        """Give kept files back: retries until done or the process has ended."""
        ids = {member.pid: member.id for member in members}
        waiting = [pid for pid in copies if pid in ids]
        if not waiting:
            return
        from gpucr.gpu_state.interposed.host_copy import put_back  # late: what a driver's own suspend does not need

        while waiting := [pid for pid in waiting if processes.keeps_running(ids[pid])]:
            try:
                put_back(waiting[0], copies[waiting[0]])
                waiting = waiting[1:]
            except GpucrError as error:
                append_to_log("guard", f"process {waiting[0]} does not have its device memory yet: {error}")
                time.sleep(_LOOK_EVERY_S)

    def _wait_for_carrier(self, members: Sequence[GangMember]) -> None:
        """Let it bring back what it has. Kills processes whose memory is lost."""
        if self.carrier is None:
            return
        processes.send_signal(self.carrier, signal.SIGTERM)
        end = time.monotonic() + _DRIVER_LIMIT_S
        while processes.keeps_running(self.carrier) and time.monotonic() < end:
            time.sleep(_LOOK_EVERY_S)
        driver = load_driver()
        for member in members:
            if member.pid not in self.carried or not processes.keeps_running(member.id):
                continue
            state = driver.state(member.pid)
            if state in (CudaState.RUNNING, CudaState.LOCKED):
                kept.let_go(member.pid, driver.restore_thread_id(member.pid))
            elif member.found is not CudaState.CHECKPOINTED:
                append_to_log("guard", f"process {member.pid} is killed: nobody has its device memory any more")
                processes.send_signal(member.id, signal.SIGKILL)

    def _give_back(
        self, driver: Driver, moved: Mapping[int, GpuMap], members: Sequence[GangMember], descriptors: Sequence[int]
    ) -> None:
        """Return memory taken by interposers. The driver has restored; a process that has ended needs nothing."""
        if not self.held and not self.going_on:
            return
        from gpucr.gpu_state.interposed import (  # late: what a driver's own suspend does not need
            blocks,
            coming_back,
            line,
        )

        alive, given = {member.pid for member in members if processes.keeps_running(member.id)}, iter(descriptors)
        back: list[coming_back.GoesOn] = []
        ended: list[tuple[int, Sequence[Held]]] = []
        for each in self.held:
            held = blocks.held_of(each.blocks, given)
            if each.pid in self.going_on:
                continue
            if each.pid in alive:
                gpu_map = moved.get(each.pid, GpuMap(()))
                uuids = [gpu_map.new_for(uuid) for uuid in each.uuids]
                back.append(coming_back.GoesOn(line.Line(each.pid), uuids, held))
            else:
                ended.append((each.pid, held))
        coming_back.bring_all_back(driver, back, ended)
        for pid in alive.intersection(self.going_on):
            coming_back.let_continue(line.Line(pid))

    def _close_left_behind(self, members: Sequence[GangMember]) -> None:
        """Close staging files that a process has open since the driver filled them: the capture no longer can."""
        for member in members:
            if member.pid in self.restore_threads:
                try:
                    staging.close_left_behind(self.restore_threads[member.pid])
                except OSError as error:  # it has ended, or cannot be traced: the next capture closes it
                    append_to_log("guard", f"a staging file stays open in process {member.pid}: {reason_of(error)}")


def _is_reservation(pid: int, extent: StagedExtent) -> bool:
    return any(
        mapping.start <= extent.address and extent.end <= mapping.end and mapping.permissions.startswith("---p")
        for mapping in memory.read_maps(pid)
    )


class _AroundReturn(Around):
    """``moved``: the maps of processes that are on other GPUs now, by pid; None: not known yet."""

    def __init__(
        self,
        wait_for_room: Callable[[Sequence[int]], None],
        give_back: Callable[[Driver, Mapping[int, GpuMap]], None],
    ) -> None:
        self.moved: dict[int, GpuMap] | None = None
        self._wait_for_room = wait_for_room
        self._give_back = give_back

    def before_restore(self, gang: Gang, pids: Sequence[int]) -> None:
        self._wait_for_room(pids)

    def before_climb(self, gang: Gang, pid: int) -> None:
        _take_out_again(gang.driver, pid)

    def before_unlock(self, gang: Gang) -> None:
        self._give_back(gang.driver, self.moved or {})


def _return_to_found(
    members: Sequence[GangMember],
    moving: Mapping[int, GpuMap],
    wait_for_room: Callable[[Sequence[int]], None],
    give_back: Callable[[Driver, Mapping[int, GpuMap]], None],
) -> None:
    """Bring every member back to its found state, even if the driver still works on the dead gpucr's call."""
    end = time.monotonic() + _DRIVER_LIMIT_S
    around = _AroundReturn(wait_for_room, give_back)
    gang = Gang(load_driver(), members, deadline=end, around=around)
    while True:
        try:
            if around.moved is None:  # only once: later a process may be back because of this recovery
                moving = {each.pid: moving[each.pid] for each in members if each.pid in moving}
                around.moved = _finish_move(gang, moving)
            gang.return_to_found()
            gang.wait_for_calls()
        except JobChanged:
            if time.monotonic() > end:
                raise
            time.sleep(_LOOK_EVERY_S)
        else:
            return


def _finish_move(gang: Gang, moving: Mapping[int, GpuMap]) -> dict[int, GpuMap]:
    """If one is on its new GPUs, the others follow. Returns the maps of all that are there then."""
    for pid in moving:
        with contextlib.suppress(GpucrError):  # refused, but only after the calls that the dead gpucr had begun
            gang.driver.lock(pid, 1)
    there = [pid for pid in moving if gang.state(pid) not in (CudaState.CHECKPOINTED, None)]
    if not there:
        return {}
    try:
        gang.restore(moving, down_to=lambda member: member.found)
    except GpucrError as error:  # then back to the old GPUs: the driver has changed nothing
        append_to_log("guard", f"not moved to other GPUs: {error}")
    return {pid: moving[pid] for pid in moving if gang.state(pid) not in (CudaState.CHECKPOINTED, None)}


def _take_out_again(driver: Driver, pid: int) -> None:
    if memory.has_mapped(pid, f"/{KEPT_NAME}"):
        kept.let_go(pid, driver.restore_thread_id(pid))  # the driver takes the memory now
    if is_interposed(pid):
        from gpucr.gpu_state.interposed.coming_back import take_out_again  # late, as above

        take_out_again(driver, pid)


class GangProtection:
    """What an operation's guard knows about its gang, updated as the steps proceed.

    Each method announces a state, and is called before the change. They raise like `Protection.protect`. Those that
    leave the guard less to do (`attached`, `going_on`, and `blocks` without any) do not.
    """

    def __init__(self, protection: Protection) -> None:
        self.protection = protection
        self._action = BringBack()
        self._files: tuple[int, ...] = ()
        self._copies: tuple[int, ...] = ()
        self._blocks: dict[int, tuple[HeldBlocks, tuple[int, ...]]] = {}

    def members(self, members: Sequence[GangMember]) -> None:
        """These may leave the state in which they were found."""
        self._action.members = tuple(members)
        self._tell()

    def at_work(self, processes: Sequence[ProcessId]) -> None:
        """These may get records of `at_work`."""
        self.protection.protect(ForgetWork(processes=tuple(processes)))

    def restore_threads(self, threads: Mapping[int, int]) -> None:
        """These are the restore threads, by pid; all others may be held from now on."""
        self._action.restore_threads = dict(threads)
        self._tell()

    def detached(self, extents: Mapping[int, Sequence[StagedExtent]], files: Mapping[int, int]) -> None:
        """The staging of these processes, by pid, may only be in these files (descriptors)."""
        self._action.detached = tuple(DetachedStaging(pid, tuple(parts)) for pid, parts in extents.items())
        self._action.__post_init__()
        self._files = tuple(files[pid] for pid in extents)
        self._tell()

    def taken_out(self, copies: Mapping[int, int]) -> None:
        """The files that these processes keep, by pid, may only be in these descriptors."""
        if copies:
            self._action.copies, self._copies = tuple(copies), tuple(copies.values())
            self._tell()

    def attached(self) -> None:
        """All staging is back where the driver left it, and kept files are back too."""
        self._action.detached, self._files = (), ()
        self._action.copies, self._copies = (), ()
        self._amend()

    def blocks(self, pid: int, uuids: Sequence[str], held: Sequence[Held]) -> None:
        """This process's device memory may only be in these descriptors; none: the process has it, or keeps it."""
        blocks = tuple(msgspec.structs.astuple(each.block) for each in held)
        is_known = pid in self._blocks
        self._blocks[pid] = HeldBlocks(pid, tuple(uuids), blocks), tuple(each.descriptor for each in held)
        self._action.held = tuple(blocks for blocks, _ in self._blocks.values())
        if is_known and not held:
            self._amend()
        else:
            self._tell()

    def going_on(self, pids: Sequence[int], members: Sequence[GangMember] = ()) -> None:
        """These have all of their device memory again. ``members``: their new target states; none: as before."""
        self._action.going_on = tuple(pids)
        if members:
            self._action.members = tuple(members)
        self._amend()

    def carried(self, carrier: ProcessId, pids: Iterable[int]) -> None:
        """Only this process may hold the device memory of these."""
        self._action.carrier, self._action.carried = carrier, tuple(pids)
        self._tell()

    def moving(self, maps: Mapping[int, GpuMap]) -> None:
        """These members, by pid, are moving to other GPUs."""
        self._action.moving = dict(maps)
        self._tell()

    def needs(self, needs: Mapping[int, Mapping[str, int]]) -> None:
        """The driver will need so much room to bring them back, in bytes by pid and GPU UUID.

        Told with the next state.
        """
        self._action.needs = {pid: dict(by_gpu) for pid, by_gpu in needs.items()}

    def stopped(self, stopped: Sequence[ProcessId]) -> None:
        """These may be stopped by SIGSTOP. Without members, nothing else need be done for them."""
        self._action.stopped = tuple(stopped)
        if self._action.members:
            self._tell()
        else:
            self.protection.protect(EndStop(self._action.stopped))

    def _tell(self) -> None:
        self.protection.protect(self._action, self._descriptors())

    def _amend(self) -> None:
        self.protection.amend(self._action, self._descriptors())

    def _descriptors(self) -> tuple[int, ...]:
        return (*self._files, *self._copies, *(fd for _, fds in self._blocks.values() for fd in fds))

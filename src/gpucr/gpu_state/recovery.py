"""How a gang comes back to where it was found after gpucr has died, and what an operation says of that meanwhile."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from gpucr.driver.api import Driver
from gpucr.driver.cuda import load_driver
from gpucr.errors import GpucrError, JobChanged
from gpucr.gang import Gang
from gpucr.gang.threads import GangThreads
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
"""How long calls of the driver may take in all: those that had begun, and those that bring the job back."""

_LOOK_EVERY_S = 0.05


class DetachedStaging(msgspec.Struct, frozen=True):
    """Staging of a process that may be an empty reservation now."""

    pid: int
    extents: tuple[StagedExtent, ...]


class HeldBlocks(msgspec.Struct, frozen=True):
    """Device memory of an interposed process that is in so many descriptors alone, or that the process keeps itself.

    ``blocks`` has the fields of each `interposer.protocol.Block`, ``uuids`` the GPUs that the process sees.
    """

    pid: int
    uuids: tuple[str, ...]
    blocks: tuple[tuple[int, ...], ...]


class CallAfterRestore(Action):
    """Programs that were told of a freeze are told that they go on."""

    processes: tuple[ProcessId, ...]

    def recover(self, descriptors: Sequence[int]) -> bool:
        """Call their functions, in those that run."""
        from gpucr.gpu_state.interposed.hooks import call  # the agents' client is needed nowhere else here
        from gpucr.interposer.protocol import Hooks

        call(Hooks.AFTER_RESTORE, filter(processes.goes_on, self.processes))
        return False


class BringBack(Action):
    """A gang goes back to where it was found, whatever keeps it from running.

    - ``members`` go back to the state in which they were found.
    - ``restore_threads``: per pid of a member, the one thread that may run while device memory is away.
    - ``detached``: staging that is mapped back before the driver restores. The descriptors are its files, in order.
    - ``copies``: who kept a file with its device memory, by pid, and keeps it again. Its descriptors follow.
    - ``held``: what interposers have let go; its descriptors follow, block by block.
    - ``going_on``: who has all of that again, by pid, and only has to be let go on.
    - ``carrier``: who alone can bring back the device memory of ``carried``, by pid, and does so when it is asked.
    - ``stopped``: processes that SIGSTOP may have stopped, and that go on.
    - ``moving``: to which GPUs members may be on their way, by pid. When one has got there, the others follow: it may
      stand where they had been.
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

    def __post_init__(self) -> None:
        """Raise ValueError where staging could not be mapped back."""
        if any(part.pid not in self.restore_threads for part in self.detached):
            raise ValueError("detached staging of a process without a restore thread")

    def recover(self, descriptors: Sequence[int]) -> bool:
        """Hold the threads, end the stop, map device memory, let the driver restore and unlock, let the threads go."""
        members = [member for member in self.members if processes.goes_on(member.id)]
        threads = GangThreads(agent_threads)
        given = iter(descriptors)
        files, copies = [next(given) for _ in self.detached], {pid: next(given) for pid in self.copies}
        blocks = list(given)
        try:
            if members:
                self._hold(threads, members)
                # The driver answers only while its thread runs; all others are held, and do not notice.
                processes.continue_stopped(set(self.stopped) & {member.id for member in members})
                self._attach_all(members, files)
                self._put_back(members, copies)
                self._wait_for_carrier(members)
                _return_to_found(
                    members, self.moving, lambda driver, moved: self._give_back(driver, moved, members, blocks)
                )
                self._close_left_behind(members)
        finally:
            threads.release()
            processes.continue_stopped(self.stopped)
        return False

    def _hold(self, threads: GangThreads, members: Sequence[GangMember]) -> None:
        """Hold what must not run before device memory is back (gang/threads.py)."""
        for member in members:
            if member.pid in self.restore_threads:
                try:
                    threads.hold({member.pid: self.restore_threads[member.pid]})
                except GpucrError as error:  # it has ended, or a debugger has come: all else can and must be done
                    append_to_log("guard", f"not holding threads: {error}")

    def _attach_all(self, members: Sequence[GangMember], descriptors: Sequence[int]) -> None:
        """Map all detached staging back. Tries until it is done or the process has ended: the data is nowhere else.

        Only what is a reservation is mapped: the action may be older than an attach, and mapping over anything else
        would destroy it.
        """
        from gpucr.gpu_state import staging  # late: ptrace and what else it takes, which a suspend does not need

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
                except Exception as error:  # noqa: BLE001 - the data is safe as long as it is tried again
                    if not processes.goes_on(ids[pid]):
                        del waiting[pid]
                    elif pid not in told:
                        told.add(pid)
                        append_to_log("guard", f"the device memory of process {pid} cannot be put back yet: {error}")
            if waiting:
                time.sleep(_LOOK_EVERY_S)

    def _put_back(self, members: Sequence[GangMember], copies: Mapping[int, int]) -> None:
        """Who kept a file keeps it again: it is tried until then, or until the process has ended."""
        ids = {member.pid: member.id for member in members}
        waiting = [pid for pid in copies if pid in ids]
        if not waiting:
            return
        from gpucr.gpu_state.interposed.host_copy import put_back  # late: what a driver's own suspend does not need

        while waiting := [pid for pid in waiting if processes.goes_on(ids[pid])]:
            try:
                put_back(waiting[0], copies[waiting[0]])
                waiting = waiting[1:]
            except GpucrError as error:
                append_to_log("guard", f"process {waiting[0]} does not have its device memory yet: {error}")
                time.sleep(_LOOK_EVERY_S)

    def _wait_for_carrier(self, members: Sequence[GangMember]) -> None:
        """It brings back what it has. A process of which nobody has the memory any more is killed."""
        if self.carrier is None:
            return
        processes.send_signal(self.carrier, signal.SIGTERM)
        end = time.monotonic() + _DRIVER_LIMIT_S
        while processes.goes_on(self.carrier) and time.monotonic() < end:
            time.sleep(_LOOK_EVERY_S)
        from gpucr.gpu_state.custom_storage import kept  # late: ptrace, as above

        driver = load_driver()
        for member in members:
            if member.pid not in self.carried or not processes.goes_on(member.id):
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
        """What interposers have let go. The driver has restored; a process that is not there needs nothing."""
        if not self.held and not self.going_on:
            return
        from gpucr.gpu_state.interposed.blocks import held_of  # late: what a driver's own suspend does not need
        from gpucr.gpu_state.interposed.coming_back import GoesOn, bring_all_back, let_go_on
        from gpucr.gpu_state.interposed.line import Line

        alive, given = {member.pid for member in members if processes.goes_on(member.id)}, iter(descriptors)
        back: list[GoesOn] = []
        ended: list[tuple[int, Sequence[Held]]] = []
        for each in self.held:
            held = held_of(each.blocks, given)
            if each.pid in self.going_on:
                continue
            if each.pid in alive:
                gpu_map = moved.get(each.pid, GpuMap(()))
                back.append(GoesOn(Line(each.pid), [gpu_map.new_for(uuid) for uuid in each.uuids], held))
            else:
                ended.append((each.pid, held))
        bring_all_back(driver, back, ended)
        for pid in alive.intersection(self.going_on):
            let_go_on(Line(pid))

    def _close_left_behind(self, members: Sequence[GangMember]) -> None:
        """While the driver fills a staging file, the process has it open: its capture can close it no more."""
        from gpucr.gpu_state import staging  # late, as above

        for member in members:
            if member.pid in self.restore_threads:
                try:
                    staging.close_left_behind(self.restore_threads[member.pid])
                except OSError as error:  # it has ended, or cannot be traced: the next capture closes it
                    append_to_log("guard", f"a staging file stays open in process {member.pid}: {error}")


def _is_reservation(pid: int, extent: StagedExtent) -> bool:
    return any(
        mapping.start <= extent.address and extent.end <= mapping.end and mapping.permissions.startswith("---p")
        for mapping in memory.read_maps(pid)
    )


def _return_to_found(
    members: Sequence[GangMember],
    moving: Mapping[int, GpuMap],
    give_back: Callable[[Driver, Mapping[int, GpuMap]], None],
) -> None:
    """Every member back to its found state, also where the driver is still at work on the dead gpucr's call."""
    end = time.monotonic() + _DRIVER_LIMIT_S
    driver = load_driver()
    gang = Gang(driver, members, deadline=end)
    moved: dict[int, GpuMap] | None = None
    gang.before_unlock = lambda: give_back(driver, moved or {})
    gang.before_climb = lambda pid: _take_out_again(driver, pid)
    while True:
        try:
            if moved is None:  # once: later a process may be back because it was brought back here
                moved = _finish_move(gang, {each.pid: moving[each.pid] for each in members if each.pid in moving})
            gang.return_to_found()
            gang.wait_for_calls()
        except JobChanged:
            if time.monotonic() > end:
                raise
            time.sleep(_LOOK_EVERY_S)
        else:
            return


def _finish_move(gang: Gang, moving: Mapping[int, GpuMap]) -> dict[int, GpuMap]:
    """Where one is on its new GPUs, the others follow. The maps of all that are there then."""
    for pid in moving:
        with contextlib.suppress(GpucrError):  # refused, but only after the calls that the dead gpucr had begun
            gang.driver.lock(pid, 1)
    there = [pid for pid in moving if gang.state(pid) not in (CudaState.CHECKPOINTED, None)]
    if not there:
        return {}
    try:
        gang.restore(moving, down_to=lambda member: member.found)
    except GpucrError as error:  # then back to where they were: the driver has changed nothing
        append_to_log("guard", f"not moved to other GPUs: {error}")
    return {pid: moving[pid] for pid in moving if gang.state(pid) not in (CudaState.CHECKPOINTED, None)}


def _take_out_again(driver: Driver, pid: int) -> None:
    if memory.has_mapped(pid, f"/{KEPT_NAME}"):
        from gpucr.gpu_state.custom_storage import kept  # late, as above

        kept.let_go(pid, driver.restore_thread_id(pid))  # the driver takes the memory now
    if is_interposed(pid):
        from gpucr.gpu_state.interposed.coming_back import take_out_again  # late, as above

        take_out_again(driver, pid)


class GangProtection:
    """What the guard of an operation knows of its gang, kept up as the steps go on.

    Each method says what holds from now on, and is called before the change that it is about. They raise as
    `Protection.protect` does; `attached`, after a change, does not.
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

    def restore_threads(self, threads: Mapping[int, int]) -> None:
        """These threads, by pid, do the driver's work; all others may be held from now on."""
        self._action.restore_threads = dict(threads)
        self._tell()

    def detached(self, extents: Mapping[int, Sequence[StagedExtent]], files: Mapping[int, int]) -> None:
        """The staging of these processes, by pid, may be in these files (descriptors) alone."""
        self._action.detached = tuple(DetachedStaging(pid, tuple(parts)) for pid, parts in extents.items())
        self._action.__post_init__()
        self._files = tuple(files[pid] for pid in extents)
        self._tell()

    def taken_out(self, copies: Mapping[int, int]) -> None:
        """The files that these processes keep, by pid, may be in these descriptors alone."""
        if copies:
            self._action.copies, self._copies = tuple(copies), tuple(copies.values())
            self._tell()

    def attached(self) -> None:
        """All staging is where the driver left it again, and who kept a file has it."""
        self._action.detached, self._files = (), ()
        self._action.copies, self._copies = (), ()
        self.protection.amend(self._action, self._descriptors())

    def blocks(self, pid: int, uuids: Sequence[str], held: Sequence[Held]) -> None:
        """Device memory of this process may be in these descriptors alone; none: the process has it, or keeps it."""
        blocks = tuple(msgspec.structs.astuple(each.block) for each in held)
        self._blocks[pid] = HeldBlocks(pid, tuple(uuids), blocks), tuple(each.descriptor for each in held)
        self._action.held = tuple(blocks for blocks, _ in self._blocks.values())
        self._tell()

    def going_on(self, pids: Sequence[int], members: Sequence[GangMember] = ()) -> None:
        """These have all of their device memory again. ``members``: to what state they go now; none: as before."""
        self._action.going_on = tuple(pids)
        if members:
            self._action.members = tuple(members)
        self._tell()

    def carried(self, carrier: ProcessId, pids: Iterable[int]) -> None:
        """Device memory of these may be in the hands of this process alone."""
        self._action.carrier, self._action.carried = carrier, tuple(pids)
        self._tell()

    def moving(self, maps: Mapping[int, GpuMap]) -> None:
        """These members, by pid, go to other GPUs."""
        self._action.moving = dict(maps)
        self._tell()

    def stopped(self, stopped: Sequence[ProcessId]) -> None:
        """These may be stopped by SIGSTOP."""
        self._action.stopped = tuple(stopped)
        self._tell()

    def _tell(self) -> None:
        self.protection.protect(self._action, self._descriptors())

    def _descriptors(self) -> tuple[int, ...]:
        return (*self._files, *self._copies, *(fd for _, fds in self._blocks.values() for fd in fds))

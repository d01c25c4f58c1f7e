"""The steps that take a gang off the GPU and back on it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from gpucr import gang as gangs
from gpucr.driver.libcuda import INVALID_VALUE
from gpucr.errors import CudaStarted, DriverError, GpucrError, JobChanged, reason_of
from gpucr.gang import Gang
from gpucr.gang.threads import GangThreads, explained
from gpucr.gpu_state import staging
from gpucr.gpu_state.at_work import AtWork
from gpucr.gpu_state.custom_storage.spool import Spool
from gpucr.gpu_state.driver_staging import DriverStaging
from gpucr.gpu_state.interposed.host_copy import HostCopy
from gpucr.gpu_state.order import Order
from gpucr.gpu_state.placement import Placement
from gpucr.gpu_state.recovery import GangProtection
from gpucr.linux import processes
from gpucr.linux.inherited import InheritedDevices, find_inherited
from gpucr.linux.let_go import let_go
from gpucr.model import CudaState, GangMember, ProcessId, ProcessInfo, StagedExtent
from gpucr.quantities import format_bytes
from gpucr.undo.interrupts import Interrupts
from gpucr.undo.protection import Protection
from gpucr.undo.steps import Meter

MAX_ROUNDS = 5
"""How often to add processes that begin to use CUDA meanwhile before giving up."""


class AllocateStaging:
    """Allocate the memory, ``host_bytes``, and the disk space (``spool``) that will hold device memory.

    The job still runs. If it will continue afterwards, it waits for the allocation here, rather than while it is
    stopped; if it will be ended, the allocation only starts here and stays ahead of the driver.
    """

    name = "allocate"

    def __init__(
        self,
        order: Order,
        sizes: Mapping[int, int],
        host_bytes: int,
        *,
        leave_running: bool,
        spool: Spool | None = None,
    ) -> None:
        self._order = order
        self._sizes = sizes
        self._host_bytes = host_bytes
        self._leave_running = leave_running
        self._spool = spool

    def describe(self) -> str:
        on_disk = f", {format_bytes(self._spool.size_bytes)} in {self._spool.folder}" if self._spool is not None else ""
        return f"allocate {format_bytes(self._host_bytes)} of host memory{on_disk} for device memory"

    def run(self, interrupts: Interrupts, meter: Meter) -> int:
        """Allocate, or begin to allocate, for what the processes use now. Returns the bytes in host memory."""
        self._order.prepare(self._sizes)
        self._order.settle()
        if self._leave_running:
            self._order.wait_prepared()
        return self._host_bytes

    def undo(self) -> None:
        """Nothing: closing the staging files frees it."""


class LockGang:
    """RUNNING → LOCKED for all. The undo unlocks those found RUNNING."""

    name = "lock"

    def __init__(self, gang: Gang, protection: GangProtection, at_work: AtWork) -> None:
        self._gang = gang
        self._protection = protection
        self._at_work = at_work

    def describe(self) -> str:
        running = [each for each in self._gang.members if each.found is CudaState.RUNNING]
        return f"lock the CUDA work of {_names(running)}" if running else "no CUDA work has to be locked"

    def run(self, interrupts: Interrupts, meter: Meter) -> int:
        """Lock all members that run."""
        self._protection.members(self._gang.members)
        self._protection.at_work(self._at_work.processes)
        self._at_work.begin()
        lock = self._gang.lock(interrupts.check)
        if lock.attempts > 1:
            meter.note(f"the {lock.processes} processes were locked in {lock.attempts} attempts, {lock.seconds:.3f} s")
        return 0

    def undo(self) -> None:
        """Bring every member back to its found state: this is the first step, so nothing may be left."""
        self._gang.return_to_found()


class CheckpointGang:
    """LOCKED → CHECKPOINTED for all, and for those that begin to use CUDA meanwhile.

    ``restore_threads`` is filled with the restore threads, by pid. With ``threads`` all others are held, also
    afterwards. Forked children lose the open devices that they inherited from these processes
    (`gpucr.linux.inherited`), which are dead after the checkpoint.
    """

    name = "checkpoint"

    def __init__(
        self,
        gang: Gang,
        root_pids: Sequence[int],
        order: Order,
        staged: DriverStaging,
        protection: GangProtection,
        at_work: AtWork,
        *,
        expected_bytes: int = 0,
        whole_tree: bool = True,
        threads: GangThreads | None = None,
    ) -> None:
        self._gang = gang
        self._root_pids = tuple(root_pids)
        self._order = order
        self._staged = staged
        self._protection = protection
        self._at_work = at_work
        self._expected_bytes = expected_bytes
        self._whole_tree = whole_tree
        self._threads = threads
        self.restore_threads: dict[int, int] = {}

    def describe(self) -> str:
        running = [each for each in self._gang.members if each.found is not CudaState.CHECKPOINTED]
        if not running:
            return "no process has to be checkpointed"
        final_places = self._order.final_places([each.pid for each in running])
        where, final = "host memory", ""
        if final_places:
            there = ", or ".join(dict.fromkeys(final_places.values()))
            where = there if len(final_places) == len(running) else f"host memory, or {there}"
            pids = ", ".join(map(str, final_places))
            final = f"; the driver hands over that of {pids}, which cannot be called off once begun"
        return f"checkpoint {_names(running)}: device memory to {where}, GPUs released{final}"

    def run(self, interrupts: Interrupts, meter: Meter) -> int:
        """Checkpoint until the tree has no running CUDA process (at most MAX_ROUNDS rounds)."""
        meter.expect(self._expected_bytes if self._staged.use_files else 0)
        for _ in range(MAX_ROUNDS):
            self.restore_threads = self._gang.restore_threads()
            self._protection.restore_threads(self.restore_threads)
            if self._threads is not None:
                self._threads.hold(self.restore_threads, self._gang.deadline)
            locked = self._locked()
            inherited = find_inherited(self._tree(), locked)
            with self._order.taken(locked, meter, self._gang.deadline):
                self._gang.checkpoint()
            self._let_go(inherited, meter)
            self._close_left_behind(meter)
            for member in self._gang.members:
                if member.found is CudaState.CHECKPOINTED:
                    self._order.adopt(member.pid, meter)
            late = self._late_members()
            if not late:
                return self._order.saved_bytes + self._staged.private_bytes
            interrupts.check()
            self._at_work.end()
            self._gang.add(late)
            self._protection.members(self._gang.members)
            self._gang.lock(interrupts.check)
        raise CudaStarted(
            f"new processes kept starting to use CUDA for {MAX_ROUNDS} rounds",
            pids=[member.pid for member in self._late_members()],
            hint="wait until the job has started all of its processes, then try again",
        )

    def undo(self) -> None:
        """CHECKPOINTED → LOCKED for those not found CHECKPOINTED; LockGang's undo unlocks."""
        try:
            self._gang.restore(down_to=lambda member: member.found)
        finally:
            if self._threads is not None:
                self._threads.release()

    def _let_go(self, inherited: Sequence[InheritedDevices], meter: Meter) -> None:
        """Nothing to undo: the children cannot use CUDA, and the driver has freed what was behind the descriptors."""
        errors = let_go(inherited)
        for each in inherited:
            name = f"process {each.process.pid} ({each.process.name})"
            if each.process.pid in errors:
                meter.note(f"{name} still has the GPUs open that it was forked with: {errors[each.process.pid]}")
            else:
                meter.note(f"{name} let go of the GPUs that it was forked with: {len(each.all_fds)} descriptors")

    def _close_left_behind(self, meter: Meter) -> None:
        """Close open staging files: captures are over, so these were left by a killed gpucr.

        Or by a fork during the checkpoint, whose child inherited them.
        """
        if not self._staged.use_files:
            return
        for process in self._tree():
            try:
                staging.close_left_behind(self.restore_threads.get(process.pid, process.pid))
            except OSError as error:
                if processes.keeps_running(process.id):
                    meter.note(
                        f"a staging file stays open in process {process.pid} ({process.name}): {reason_of(error)}"
                    )

    def _tree(self) -> tuple[ProcessInfo, ...]:
        trees = processes.trees(self._root_pids) if self._whole_tree else ()
        return tuple(process for tree in trees for process in tree if process.pid != os.getpid())

    def _locked(self) -> dict[int, int]:
        states = {member.pid: self._gang.state(member.pid) for member in self._gang.members}
        return {pid: tid for pid, tid in self.restore_threads.items() if states[pid] is CudaState.LOCKED}

    def _late_members(self) -> list[GangMember]:
        known = {member.id for member in self._gang.members}
        # Members are not queried: their threads are held by now, which looks like a process that cannot answer.
        return list(gangs.discover(self._gang.driver, [process for process in self._tree() if process.id not in known]))


class StopThreads:
    """Held → stopped by SIGSTOP, since CRIU has to trace the processes itself (see threads.py)."""

    name = "stop"

    def __init__(self, threads: GangThreads, gang: Gang, protection: GangProtection) -> None:
        self._threads = threads
        self._gang = gang
        self._protection = protection

    def describe(self) -> str:
        return "stop all threads for CRIU"

    def run(self, interrupts: Interrupts, meter: Meter) -> int:
        self._protection.stopped([member.id for member in self._gang.members])
        self._threads.stop()
        return 0

    def undo(self) -> None:
        """Let only the restore threads run again."""
        if self._threads.are_stopped:
            self._threads.hold_again()


class DetachStaging:
    """CHECKPOINTED, staging files mapped → CHECKPOINTED, empty reservations in their place.

    From here on the device memory is only in gpucr's files. ``copies``: what processes suspended earlier keep, by pid.
    """

    name = "detach"

    def __init__(
        self,
        checkpoint: CheckpointGang,
        staged: DriverStaging,
        copies: Mapping[int, HostCopy],
        protection: GangProtection,
    ) -> None:
        self._checkpoint = checkpoint
        self._staged = staged
        self._kept = copies
        self._protection = protection
        self._detached: dict[int, tuple[StagedExtent, ...]] = {}
        self._copies: dict[int, HostCopy] = {}

    def describe(self) -> str:
        return "take device memory out of the processes, so that CRIU does not write it"

    def run(self, interrupts: Interrupts, meter: Meter) -> int:
        """Detach every process that has a staging file, or keeps one."""
        fds = {pid: file.fd for pid, file in self._staged.files.items()}
        self._protection.detached(self._staged.extents, fds)
        self._protection.taken_out({pid: copy.file.fd for pid, copy in self._kept.items()})
        for pid, copy in self._kept.items():
            self._copies[pid] = copy
            copy.take_out()
        for pid, extents in self._staged.extents.items():
            self._detached[pid] = extents
            with explained(pid):
                staging.detach(self._checkpoint.restore_threads[pid], extents)
        return 0

    def undo(self) -> None:
        """Map the files again, unless `attach` has done so."""
        with contextlib.suppress(JobChanged):  # the roll reports ended processes
            self.attach()

    def attach(self) -> None:
        """Detached → mapped again, for all. Tries all, then raises one of the errors.

        One that cannot be traced, or has ended, must not prevent the others from getting their device memory back: the
        driver would restore them from nothing.
        """
        errors: list[GpucrError] = []
        waiting: tuple[tuple[dict[int, Any], Callable[[int], None]], ...] = (
            (self._detached, self._attach),
            (self._copies, lambda pid: self._copies[pid].put_back()),
        )
        for pids, put_back in waiting:
            for pid in list(pids):
                try:
                    put_back(pid)
                    del pids[pid]
                except GpucrError as error:
                    errors.append(error)
                    if isinstance(error, JobChanged):  # it has ended
                        del pids[pid]
        if errors:
            raise min(errors, key=lambda error: isinstance(error, JobChanged))  # errors of living processes matter more
        self._protection.attached()

    def _attach(self, pid: int) -> None:
        with explained(pid):
            fd = self._staged.files[pid].fd
            staging.attach(self._checkpoint.restore_threads[pid], fd, self._detached[pid])


class AttachStaging:
    """The staging files are mapped into the processes again, without a copy."""

    name = "attach"

    def __init__(self, detached: DetachStaging) -> None:
        self._detached = detached

    def describe(self) -> str:
        return "put device memory back into the processes"

    def run(self, interrupts: Interrupts, meter: Meter) -> int:
        self._detached.attach()
        return 0

    def undo(self) -> None:
        """Nothing: every undo needs them mapped."""


class HoldThreads:
    """Stopped, as CRIU leaves the tree → only the driver's restore threads run (see threads.py)."""

    name = "hold"

    def __init__(self, threads: GangThreads, free_threads: Callable[[], Mapping[int, int]] | None = None) -> None:
        self._threads = threads
        self._free_threads = free_threads

    def describe(self) -> str:
        return "hold all threads but the driver's until device memory is back"

    def run(self, interrupts: Interrupts, meter: Meter) -> int:
        """Hold the threads, then end the stop, which lets only the restore threads continue."""
        if self._free_threads is None:
            self._threads.hold_again()
        else:
            self._threads.hold(self._free_threads())
            self._threads.continue_stopped()
        return 0

    def undo(self) -> None:
        self._threads.release()


class ReleaseThreads:
    """Let the whole tree run: release held threads and continue stopped processes.

    ``is_result``: this completes the operation. From then on the job may finish and end, and no later failure may undo
    it.
    """

    name = "release"

    def __init__(
        self,
        threads: GangThreads,
        protection: Protection,
        stopped: Callable[[], Iterable[ProcessId]] = tuple,
        *,
        is_result: bool = False,
    ) -> None:
        self._threads = threads
        self._protection = protection
        self._stopped = stopped
        self._is_result = is_result

    def describe(self) -> str:
        return "release all threads"

    def run(self, interrupts: Interrupts, meter: Meter) -> int:
        """Release the held threads and end the stop of the processes without CUDA."""
        self._threads.release()
        processes.continue_stopped(self._stopped())
        if self._is_result:
            interrupts.commit()
        self._protection.job_runs()
        return 0

    def undo(self) -> None:
        """Nothing: every undo leads to running processes."""


class RestoreGang:
    """CHECKPOINTED → LOCKED for the members whose ``down_to`` state is below CHECKPOINTED."""

    name = "restore"

    def __init__(
        self,
        gang: Gang,
        placement: Placement | None,
        *,
        down_to: Callable[[GangMember], CudaState],
    ) -> None:
        self._gang = gang
        self._placement = placement
        self._down_to = down_to

    def describe(self) -> str:
        """What will be restored, and where to."""
        gpu_map = self._placement.choice.gpu_map if self._placement is not None else None
        where = f" with the GPU map {gpu_map}" if gpu_map is not None else ""
        return f"restore {_names(self._gang.members)}: host memory to device memory{where}"

    def run(self, interrupts: Interrupts, meter: Meter) -> int:
        """Restore all members that are checkpointed."""
        if self._placement is None:
            self._gang.restore(down_to=self._down_to)
            return 0
        try:
            self._restore_to(self._placement)
        finally:
            self._placement.note(self._gang)
        return 0

    def _restore_to(self, placement: Placement) -> None:
        try:
            self._gang.restore(placement.maps(self._gang.members), down_to=self._down_to)
        except DriverError as error:
            if error.result != INVALID_VALUE or not placement.narrow(self._gang):
                raise
            # A map that the driver refuses changes nothing (measured): the process is as it was.
            try:
                self._gang.restore(placement.maps(self._gang.members), down_to=self._down_to)
            except DriverError:
                raise error from None  # the GPUs were not the cause; the first error says what was

    def undo(self) -> None:
        """Bring every member back to its found state (checkpoint it again if necessary)."""
        self._gang.return_to_found()


class UnlockGang:
    """LOCKED → RUNNING for the members whose ``down_to`` state is RUNNING: all at once, at the very end."""

    name = "unlock"

    def __init__(self, gang: Gang, *, down_to: Callable[[GangMember], CudaState]) -> None:
        self._gang = gang
        self._down_to = down_to

    def describe(self) -> str:
        return f"unlock {_names(self._gang.members)}"

    def run(self, interrupts: Interrupts, meter: Meter) -> int:
        """Unlock all members that are locked."""
        self._gang.unlock(down_to=self._down_to)
        return 0

    def undo(self) -> None:
        """Bring every member back to its found state."""
        self._gang.return_to_found()


def _names(members: Sequence[GangMember]) -> str:
    pids = [str(member.pid) for member in members]
    if not pids:
        return "the processes with CUDA"  # a restore has not made them yet
    return ("process " if len(pids) == 1 else "processes ") + ", ".join(pids)

"""An operation's work on a job's CUDA processes: off the GPU and back."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct

from gpucr.driver.gpus import list_gpus
from gpucr.gang import Gang
from gpucr.gang.holdable import Others
from gpucr.gang.threads import GangThreads
from gpucr.gpu_state import kinds
from gpucr.gpu_state.at_work import AtWork
from gpucr.gpu_state.custom_storage.backend import CustomStorages, files_of
from gpucr.gpu_state.driver_staging import DriverStaging
from gpucr.gpu_state.held import CudaJob
from gpucr.gpu_state.interposed.hooks import ProgramHooks, has_hooks
from gpucr.gpu_state.interposed.interposers import Interposers
from gpucr.gpu_state.opencl import LetGoOfOpenCl
from gpucr.gpu_state.order import Order, Saves
from gpucr.gpu_state.placement import ProcessGpus, all_gpus, gpus_of
from gpucr.gpu_state.recovery import GangProtection
from gpucr.gpu_state.source import Saver
from gpucr.gpu_state.steps import (
    AllocateStaging,
    AttachStaging,
    CheckpointGang,
    DetachStaging,
    HoldThreads,
    LockGang,
    ReleaseThreads,
    RestoreGang,
    StopThreads,
    UnlockGang,
)
from gpucr.gpu_state.stop_others import StopOthers
from gpucr.gpu_state.ways import GpuState, uses_files
from gpucr.interposer.presence import agent_threads
from gpucr.linux.opencl import has_opencl
from gpucr.model import CudaState, GangMember, Gpu, ProcessId
from gpucr.undo.protection import Protection
from gpucr.undo.steps import Step


class CudaWork(Struct, frozen=True, kw_only=True):
    """An operation's work on a job's CUDA processes.

    ``device_bytes``: by pid and GPU UUID, read before anything was locked. ``seen``: the GPUs of a process, likewise.
    """

    gang: Gang
    seen: Callable[[ProcessId], ProcessGpus]
    device_bytes: Mapping[int, Mapping[str, int]]
    order: Order
    staging: DriverStaging
    threads: GangThreads
    interposers: Interposers
    custom: CustomStorages
    guarded: GangProtection
    at_work: AtWork
    checkpoint: CheckpointGang
    hooks: ProgramHooks

    @property
    def protection(self) -> Protection:
        """The recovery actions that the guard has for this operation."""
        return self.guarded.protection

    @property
    def on_gpu(self) -> dict[str, int]:
        """Device memory that does not go to host memory while the job is stopped, in bytes per GPU UUID."""
        pids = [member.pid for member in self.gang.members]
        taken = self.interposers.carried(pids), self.custom.takes_no_host_memory()
        return {uuid: sum(each.get(uuid, 0) for each in taken) for uuid in {*taken[0], *taken[1]}}

    @property
    def may_wait(self) -> bool:
        """Whether one of its processes may have to wait until its memory is saved."""
        pids = [member.pid for member in self.gang.members]
        return self.interposers.keeping.chooses and bool(self.interposers.those_of(pids))

    @property
    def away_bytes(self) -> int:
        """Device memory known to be away, in bytes."""
        return self.order.saved_bytes + self.staging.private_bytes

    def close(self) -> None:
        """Free what holds device memory, which is back or saved."""
        self.at_work.end()
        self.order.close()

    def gpus_of(self, member: GangMember) -> ProcessGpus:
        """The GPUs of one process, as it said before it was stopped."""
        return self.seen(member.id)

    @property
    def known_gpus(self) -> tuple[Gpu, ...]:
        """Each GPU that the driver knows for any of its processes, by index."""
        return tuple(all_gpus(map(self.gpus_of, self.gang.members)))

    @property
    def sizes(self) -> dict[int, int]:
        """Device memory by pid, in bytes, as it was before anything was locked."""
        return {pid: sum(by_gpu.values()) for pid, by_gpu in self.device_bytes.items()}

    def allocate(self, *, leave_running: bool) -> AllocateStaging:
        """The step before the first one that stops anything."""
        host_bytes = max(0, sum(self.sizes.values()) - sum(self.on_gpu.values()))
        return AllocateStaging(self.order, self.sizes, host_bytes, leave_running=leave_running, spool=self.custom.spool)

    def make_room(self) -> None:
        """What `allocate` begins, for an operation that does not wait for it."""
        self.order.prepare(self.sizes)
        self.order.settle()

    def steps_off_gpu(self) -> list[Step]:
        """The steps after which device memory is in host memory, and the GPUs are free."""
        return [*self.hooks.steps_before(), LockGang(self.gang, self.guarded, self.at_work), self.checkpoint]

    def steps_to_freeze(self, others: StopOthers | None = None) -> tuple[list[Step], list[Step]]:
        """The steps after which CRIU may begin, and those after which the job runs as it was found.

        With ``others`` the rest of the job is stopped too, by the last step of the first group.
        """
        detach = DetachStaging(self.checkpoint, self.staging, self.interposers.copies, self.guarded)
        with_opencl = [member.pid for member in self.gang.members if has_opencl(member.pid)]
        opencl = [LetGoOfOpenCl(self.gang, with_opencl)] if with_opencl else []
        stop = StopThreads(self.threads, self.gang, self.guarded)
        freeze = [*self.steps_off_gpu(), *opencl, detach, stop, *([others] if others is not None else [])]
        thaw: list[Step] = [
            HoldThreads(self.threads),
            AttachStaging(detach),
            RestoreGang(self.gang, None, down_to=lambda member: member.found),
            UnlockGang(self.gang, down_to=lambda member: member.found),
            ReleaseThreads(self.threads, self.protection, others.stopped if others is not None else tuple),
            *self.hooks.steps_after(),
        ]
        return freeze, thaw


class Purpose(Struct, frozen=True):
    """What device memory leaves its GPUs for.

    Interposers take what they can: with ``to_host``, to host memory that the processes keep; otherwise our descriptors
    hold it during the operation. ``gpu_state``, ``save_gently``, ``whole_tree``, ``others``: as in DriverStaging,
    Saves, CheckpointGang and Gang. ``moves``: it goes to other GPUs. ``deadline``: the operation's.
    """

    deadline: float | None = None
    save_gently: bool = False
    gpu_state: GpuState = "auto"
    to_host: bool = False
    whole_tree: bool = True
    moves: bool = False
    others: Others | None = None


def _seen_gpus(of: CudaJob, gpus: Sequence[Gpu]) -> Callable[[ProcessId], ProcessGpus]:
    """Ask the members now, while they can be asked. One that starts CUDA later is asked when it is found."""

    @functools.cache
    def seen(process: ProcessId) -> ProcessGpus:
        return gpus_of(process, gpus, used=of.held.get(process.pid, {}))

    for member in of.job.gang:
        seen(member.id)
    return seen


def cuda_work(of: CudaJob, protection: Protection, saver: Saver | None, purpose: Purpose) -> CudaWork:
    """For this job. Changes nothing. Without a ``saver`` the CPU threads keep running.

    Raises Unsupported if its device memory cannot leave as the purpose insists.
    """
    job, threads, guarded = of.job, GangThreads(agent_threads), GangProtection(protection)
    at_work = AtWork(job, of.held, moves=purpose.moves)
    gpus = list_gpus()
    seen = _seen_gpus(of, gpus)
    saves = Saves(saver, gently=purpose.save_gently)
    interposers = _interposers(of, guarded, saver, purpose, seen)
    custom = CustomStorages(
        of.driver, "driver" if purpose.moves else purpose.gpu_state, gpus, of.held,
        saver=files_of(saver, of.held, may_wait=not purpose.save_gently),
        to_process=purpose.to_host, is_interposed=lambda pid: interposers.of(pid) is not None,
        tell_guard=guarded.carried, on_begun=saves.all_of,
    )  # fmt: skip
    custom.require(job.gang)
    gpu_state = purpose.gpu_state
    staging = DriverStaging(use_files=uses_files(gpu_state), is_saved=saver is not None, gpu_state=gpu_state)
    needs = {} if purpose.moves else interposers.left_to_driver(of.held)
    guarded.needs(needs)
    above = (interposers, *(kinds.registered(protection) if saver is not None else ()))
    order = Order((custom, staging), above, needs=needs, saves=saves)
    gang = Gang(of.driver, job.gang, deadline=purpose.deadline, around=order, others=purpose.others)
    return CudaWork(
        gang=gang,
        seen=seen,
        device_bytes=of.held,
        order=order,
        staging=staging,
        threads=threads,
        interposers=interposers,
        custom=custom,
        guarded=guarded,
        at_work=at_work,
        checkpoint=CheckpointGang(
            gang,
            job.root_pids,
            order,
            staging,
            guarded,
            at_work,
            expected_bytes=of.held_bytes,
            whole_tree=purpose.whole_tree,
            threads=threads if saver is not None else None,
        ),
        hooks=ProgramHooks(
            [each.id for each in job.gang if each.found is CudaState.RUNNING and has_hooks(each.pid)],
            protection,
            interposers.agent_of,
        ),
    )


def _interposers(
    of: CudaJob,
    guarded: GangProtection,
    saver: Saver | None,
    purpose: Purpose,
    seen: Callable[[ProcessId], ProcessGpus],
) -> Interposers:
    made = Interposers(
        of.driver, lambda process: [gpu.uuid for gpu in seen(process).visible], guarded,
        to_host=purpose.to_host, moves=purpose.moves, gpu_state=purpose.gpu_state, saver=saver,
        wait_saved=saver.wait if saver is not None and purpose.save_gently else None,
    )  # fmt: skip
    made.require(of.job.gang, of.held)
    return made

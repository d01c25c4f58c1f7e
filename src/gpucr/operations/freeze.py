"""Freeze and thaw: the CUDA processes of a job stand still, their device memory in gpucr's hands, and go on again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gpucr.driver.gpus import list_gpus
from gpucr.gang import Gang
from gpucr.gang.threads import GangThreads
from gpucr.gpu_state import kinds
from gpucr.gpu_state.gang_staging import GangStaging
from gpucr.gpu_state.placement import ProcessGpus, gpus_of
from gpucr.gpu_state.recovery import GangProtection
from gpucr.gpu_state.source import Saver
from gpucr.gpu_state.steps import (
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
from gpucr.jobs.selection import FoundJob
from gpucr.model import GangMember, Gpu
from gpucr.quantities import format_bytes
from gpucr.undo.interrupts import Interrupts
from gpucr.undo.protection import Protection
from gpucr.undo.steps import Meter, Step


@dataclass(frozen=True, kw_only=True)
class CudaWork:
    """What a dump has to do with the processes of a job that use CUDA.

    ``device_bytes``: per pid and GPU UUID, read before anything was locked.
    """

    gang: Gang
    gpus: tuple[Gpu, ...]
    device_bytes: Mapping[int, Mapping[str, int]]
    staging: GangStaging
    threads: GangThreads
    guarded: GangProtection
    checkpoint: CheckpointGang

    @property
    def protection(self) -> Protection:
        """What the guard knows."""
        return self.guarded.protection

    def gpus_of(self, member: GangMember) -> ProcessGpus:
        """The GPUs of one process."""
        return gpus_of(member.id, self.gpus, used=self.device_bytes.get(member.pid, {}))

    def steps_to_freeze(self) -> tuple[list[Step], list[Step]]:
        """The steps after which CRIU may begin, and those after which the job runs as it was found."""
        detach = DetachStaging(self.checkpoint, self.staging, self.guarded)
        freeze: list[Step] = [
            LockGang(self.gang, self.guarded),
            self.checkpoint,
            detach,
            StopThreads(self.threads, self.gang, self.guarded),
        ]
        thaw: list[Step] = [
            HoldThreads(self.threads),
            AttachStaging(detach),
            RestoreGang(self.gang, None, down_to=lambda member: member.found),
            UnlockGang(self.gang, down_to=lambda member: member.found),
            ReleaseThreads(self.threads, self.protection),
        ]
        return freeze, thaw


def cuda_work(
    found: FoundJob,
    protection: Protection,
    held: Mapping[int, Mapping[str, int]],
    saver: Saver,
    *,
    deadline: float | None = None,
    save_gently: bool = False,
) -> CudaWork:
    """For a job that uses CUDA. ``held``: its device memory, per pid and GPU UUID. Changes nothing."""
    if found.driver is None or not found.job.gang:
        raise ValueError("the job does not use CUDA")
    gang = Gang(found.driver, found.job.gang, deadline=deadline)
    staging = GangStaging(
        use_files=True,
        writer=saver,
        save_gently=save_gently,
        over=lambda pid: kinds.stack_over(pid, protection),
    )
    gang.before_unlock = lambda: staging.give_back(gang.state)
    threads, guarded = GangThreads(), GangProtection(protection)
    expected_bytes = sum(sum(by_gpu.values()) for by_gpu in held.values())
    return CudaWork(
        gang=gang,
        gpus=list_gpus(),
        device_bytes=held,
        staging=staging,
        threads=threads,
        guarded=guarded,
        checkpoint=CheckpointGang(
            gang, found.job.root_pids, staging, guarded, expected_bytes=expected_bytes, threads=threads
        ),
    )


class AllocateStaging:
    """Allocate the memory that will hold device memory, while the job still runs.

    A job that will go on waits for it here and not when it stands still; for one that will be ended the allocation is
    only begun, and goes on ahead of the driver.
    """

    name = "allocate"

    def __init__(self, cuda: CudaWork, *, leave_running: bool) -> None:
        self._cuda = cuda
        self._leave_running = leave_running

    def describe(self) -> str:
        """How much."""
        return f"allocate {format_bytes(self._expected_bytes())} of host memory for device memory"

    def run(self, interrupts: Interrupts, meter: Meter) -> int:
        """Allocate, or begin to, what the processes use now."""
        sizes = {pid: sum(by_gpu.values()) for pid, by_gpu in self._cuda.device_bytes.items()}
        self._cuda.staging.prepare(sizes)
        if self._leave_running:
            self._cuda.staging.wait_prepared()
        return self._expected_bytes()

    def undo(self) -> None:
        """Nothing: closing the staging files gives it back."""

    def _expected_bytes(self) -> int:
        return sum(sum(by_gpu.values()) for by_gpu in self._cuda.device_bytes.values())

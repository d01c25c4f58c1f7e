"""Suspend and resume: a whole job's GPU state to host memory and back. The processes stay where they are."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpucr import preflight, staging
from gpucr.driver.gpus import gpu_processes, list_gpus
from gpucr.errors import NotACudaProcess
from gpucr.gang import Gang
from gpucr.linux import memory, processes
from gpucr.model import CudaState, GangMember, Gpu, GpuMap
from gpucr.operations import jobs, suspended
from gpucr.operations.freeze import CheckpointGang, LockGang, RestoreGang, UnlockGang
from gpucr.operations.protection import Protection
from gpucr.operations.staged import GangStaging
from gpucr.operations.steps import OnProgress, Phase, Step, run_steps


@dataclass(frozen=True)
class StateChange:
    """One process: the CUDA state in which it was found, and the one in which it is now (None: it has ended)."""

    pid: int
    found: CudaState
    now: CudaState | None


@dataclass(frozen=True)
class ChangeReport:
    """What a suspend or resume did. ``size_bytes`` is the host memory that holds device memory now (suspend)."""

    pid: int
    processes: tuple[StateChange, ...]
    phases: tuple[Phase, ...]
    size_bytes: int

    @property
    def seconds(self) -> float:
        """Wall time of all phases."""
        return sum(phase.seconds for phase in self.phases)


def suspend(
    pid: int,
    *,
    only: bool = False,
    timeout_s: float | None = None,
    force: bool = False,
    on_progress: OnProgress | None = None,
) -> ChangeReport:
    """Move the device memory of a job into host memory and release its GPUs: RUNNING or LOCKED → CHECKPOINTED.

    ``pid`` stands for its whole tree (``only``: for the one process). Processes found CHECKPOINTED stay so. CPU
    threads go on until they call CUDA. Needs access to the processes (same user, or CAP_SYS_PTRACE).

    Raises NotACudaProcess, Unsupported (nothing was changed), LockTimeout, DeadlineExceeded, Interrupted, DriverError
    or JobChanged (all undone), JobDamaged (not undone).
    """  # fmt: skip
    deadline = jobs.deadline_after(timeout_s)
    with contextlib.ExitStack() as opened:
        found = opened.enter_context(jobs.claimed_job(pid, only=only))
        gang = _gang_of(found, deadline)
        protection = opened.enter_context(Protection(found.claims))
        held = preflight.device_bytes_in_use(found.job, gpu_processes())
        device_bytes = sum(sum(by_gpu.values()) for by_gpu in held.values())
        use_files = processes.can_checkpoint_processes()
        findings = jobs.findings_before_freeze(found.job, preflight.needs_of_suspend(held, in_files=use_files))
        preflight.require_no_blocking(findings, force=force)
        staged = GangStaging(use_files=use_files)
        steps: list[Step] = [
            LockGang(gang, protection),
            CheckpointGang(
                gang, found.job.root.pid, staged, protection, expected_bytes=device_bytes, whole_tree=not only
            ),
        ]
        staged.prepare({pid: sum(by_gpu.values()) for pid, by_gpu in held.items()})
        try:
            phases = run_steps(steps, deadline=deadline, on_progress=on_progress)
        finally:
            staged.close()
        for member in gang.members:
            suspended.remember(member, held.get(member.pid, {}))
        return _report(pid, gang, phases)


def resume(
    pid: int,
    *,
    only: bool = False,
    gpu_map: GpuMap | str | None = None,
    timeout_s: float | None = None,
    force: bool = False,
    on_progress: OnProgress | None = None,
) -> ChangeReport:
    """Bring a suspended job back onto its GPUs (or those of ``gpu_map``): CHECKPOINTED or LOCKED → RUNNING.

    Processes that run are left alone, and what `suspend` had found LOCKED or CHECKPOINTED is that again. Refuses
    before it starts where a GPU has too little free memory: a restore that runs out of it loses the job. On failure
    every process is CHECKPOINTED or LOCKED again, as it was found, so that another attempt (with other GPUs, or when
    memory is free) is possible. Needs access to the processes.

    Raises NotACudaProcess, Unsupported, DriverError (a wrong GPU map is CUDA_ERROR_INVALID_VALUE), Interrupted,
    DeadlineExceeded, JobDamaged.
    """  # fmt: skip
    deadline = jobs.deadline_after(timeout_s)
    if isinstance(gpu_map, str):
        gpu_map = GpuMap.parse(gpu_map)
    with contextlib.ExitStack() as opened:
        found = opened.enter_context(jobs.claimed_job(pid, only=only))
        gang = _gang_of(found, deadline)
        protection = opened.enter_context(Protection(found.claims))
        phases = _resume(found, gang, protection, gpu_map, deadline=deadline, force=force, on_progress=on_progress)
        return _report(pid, gang, phases)


def _resume(
    found: jobs.FoundJob,
    gang: Gang,
    protection: Protection,
    gpu_map: GpuMap | None,
    *,
    deadline: float | None,
    force: bool,
    on_progress: OnProgress | None,
) -> tuple[Phase, ...]:
    records = {member.pid: suspended.recall(member.id) for member in gang.members}
    gpus = list_gpus()
    findings = preflight.check_states(found.job)
    findings += preflight.check_room(_needed_bytes(gang, records, gpus), gpus, gpu_map)
    if gpu_map is not None:
        findings += preflight.check_map_targets(gpu_map, gpus)
    preflight.require_no_blocking(findings, force=force)

    def before_suspend(member: GangMember) -> CudaState:
        record = records[member.pid]
        return record.found if record is not None else CudaState.RUNNING

    steps: list[Step] = [RestoreGang(gang, gpu_map, down_to=before_suspend), UnlockGang(gang, down_to=before_suspend)]
    with contextlib.ExitStack() as kept:
        for member in gang.members:
            _keep_staging_file(member, kept)
        protection.change(members=gang.members)
        phases = run_steps(steps, deadline=deadline, on_progress=on_progress)
        threading.Thread(target=kept.pop_all().close, name="free-staging").start()
    for member in gang.members:
        suspended.forget(member.id)
    return phases


def _keep_staging_file(member: GangMember, kept: contextlib.ExitStack) -> None:
    """Hold the member's staging file until the job runs: it need not wait until tens of GiB are freed."""
    with contextlib.suppress(OSError):  # not root: then there is no such file
        extents = staging.file_extents(member.pid)
        if extents:
            kept.callback(os.close, staging.open_file(member.pid, extents[0]))


def _needed_bytes(
    gang: Gang, records: Mapping[int, suspended.SuspendedRecord | None], gpus: Sequence[Gpu]
) -> dict[str, int]:
    """Device memory per GPU UUID that the checkpointed members will take."""
    needed: dict[str, int] = {}
    for member in gang.members:
        record = records[member.pid]
        if member.found is not CudaState.CHECKPOINTED:
            continue
        held = record.device_bytes if record is not None else {}
        if not held and len(gpus) == 1:
            # Suspended by another tool: staging is the largest mapping of nearly every process.
            held = {gpus[0].uuid: memory.largest_anonymous_bytes(member.pid)}
        for uuid, size_bytes in held.items():
            needed[uuid] = needed.get(uuid, 0) + size_bytes
    return needed


def _gang_of(found: jobs.FoundJob, deadline: float | None) -> Gang:
    if found.driver is None or not found.job.gang:
        root = found.job.root
        count = len(found.job.processes)
        raise NotACudaProcess(
            f"process {root.pid} ({root.name}) does not use CUDA"
            if count == 1
            else f"none of the {count} processes in the tree of {root.pid} ({root.name}) uses CUDA",
            pid=root.pid,
            hint="`gpucr ps` lists the processes that do; `gpucr dump` also takes jobs without a GPU",
        )
    return Gang(found.driver, found.job.gang, deadline=deadline)


def _report(pid: int, gang: Gang, phases: tuple[Phase, ...]) -> ChangeReport:
    changes = tuple(StateChange(member.pid, member.found, gang.state(member.pid)) for member in gang.members)
    return ChangeReport(pid, changes, phases, sum(phase.size_bytes for phase in phases))

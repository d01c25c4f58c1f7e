"""Move: a running job to other GPUs of this machine."""

from __future__ import annotations

import contextlib
from dataclasses import replace

from gpucr.diagnosis import preflight
from gpucr.diagnosis.traps import findings_of_traps
from gpucr.driver.gpus import gpu_processes
from gpucr.errors import InvalidRequest
from gpucr.gpu_state.cuda_work import cuda_work
from gpucr.gpu_state.gpu_choice import GpuRequest
from gpucr.gpu_state.held import device_bytes_in_use
from gpucr.gpu_state.move import MoveGang, goes_from_gpu_to_gpu
from gpucr.gpu_state.placement import place_moved
from gpucr.gpu_state.steps import UnlockGang
from gpucr.jobs import selection
from gpucr.jobs.selector import JobSelector
from gpucr.jobs.taken import taken_job
from gpucr.linux import processes
from gpucr.model import CudaState, GpuMap
from gpucr.operations.suspend import ChangeReport, change_report
from gpucr.undo.cancellation import Cancellation
from gpucr.undo.events import OnProgress
from gpucr.undo.operation import TO_MOVE, operation
from gpucr.undo.steps import Step, WithoutUndo


def move(
    pid: int | str | JobSelector,
    *,
    gpu_map: GpuMap | str | None = None,
    gpu: str | None = None,
    only: bool = False,
    timeout_s: float | None = None,
    force: bool = False,
    on_progress: OnProgress | None = None,
    cancel: Cancellation | None = None,
) -> ChangeReport:
    """Move a running job to other GPUs of this machine: RUNNING or LOCKED → the same state there.

    ``gpu`` (``auto``, or the new places of the GPUs that it uses) or ``gpu_map`` (``OLD=NEW,...``) says where to, as in
    `resume`; this can swap the GPUs of one job, but not two jobs. Refuses up front if a GPU has too little free memory.
    On any failure the job keeps running on the GPUs that it had. Does nothing to a job that is already there. Needs
    access to the processes (same user, or CAP_SYS_PTRACE).

    Raises InvalidRequest, NotACudaProcess, Unsupported (nothing was changed), LockTimeout, DeadlineExceeded,
    Interrupted, DriverError or JobChanged (all undone), JobDamaged (not undone).
    """  # fmt: skip
    with operation("move", pid, on_progress=on_progress, cancel=cancel) as running, contextlib.ExitStack() as opened:
        deadline = selection.deadline_after(timeout_s)
        request = GpuRequest.of(gpu_map, gpu)
        if not request:
            raise InvalidRequest(
                "nothing says where the job goes", hint="give --gpu or --gpu-map", code="GPUCR-BAD-GPU"
            )
        taken = opened.enter_context(taken_job(running, pid, TO_MOVE, only=only, force=force))
        found, protection = taken.cuda()
        away = [str(member.pid) for member in found.job.gang if member.found is CudaState.CHECKPOINTED]
        if away:
            raise InvalidRequest(
                f"process {', '.join(away)} is suspended", hint=f"`gpucr resume {pid} --gpu` brings it back elsewhere"
            )
        uses = gpu_processes()
        held = device_bytes_in_use(found.job, uses)
        placement = place_moved(found.job.gang, held, request)
        choice = placement.choice
        use_files = processes.can_checkpoint_processes()
        findings = selection.findings_before_freeze(found.job, preflight.needs_of_suspend(held, in_files=use_files))
        findings += findings_of_traps(found.job, found.driver, uses)
        findings += preflight.check_room(choice.needed_bytes, placement.here, choice.gpu_map)
        work = cuda_work(
            found.driver,
            found.job, protection, held, None, deadline=deadline, to_host=not goes_from_gpu_to_gpu(choice),
            whole_tree=not only, moves=True,
        )  # fmt: skip
        opened.callback(work.close)
        steps: list[Step] = []
        if choice.gpu_map is not None:
            findings += preflight.check_driver(work.gang.driver.capabilities(), choice.gpu_map)
            unlock = UnlockGang(work.gang, down_to=lambda member: member.found)
            steps = [
                *work.steps_off_gpu(),
                MoveGang(work.gang, placement, work.guarded, work.interposers),
                WithoutUndo(unlock),
                *work.hooks.steps_after(),
            ]
        preflight.require_no_blocking(findings, force=force)
        if steps:
            work.staging.prepare(work.sizes)
            work.staging.settle()  # while the job runs
        phases = running.run(steps, roll=taken.roll, deadline=deadline, protection=protection)
        taken.roll.require_gang("the rest of the job runs on its new GPUs")
        return replace(
            change_report(found.job.root.pid, work.gang, phases, lambda member: member.found),
            warnings=(*(finding.warning() for finding in findings), *work.hooks.warnings),
            lock=work.gang.first_lock,
            gpu_map=choice.gpu_map,
            gpu_reasons=choice.reasons,
        )

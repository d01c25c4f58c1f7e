"""Move: a running job to other GPUs of this machine."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace

from gpucr.diagnosis import preflight
from gpucr.diagnosis.traps import findings_of_traps
from gpucr.errors import InvalidRequest
from gpucr.gpu_state.cuda_work import CudaWork, Purpose, cuda_work
from gpucr.gpu_state.gpu_choice import GpuRequest
from gpucr.gpu_state.held import CudaJob
from gpucr.gpu_state.move import MoveGang, goes_from_gpu_to_gpu
from gpucr.gpu_state.placement import Placement, place_moved
from gpucr.gpu_state.steps import UnlockGang
from gpucr.jobs import selection
from gpucr.jobs.selector import JobSelector
from gpucr.jobs.taken import taken_job
from gpucr.linux import capabilities
from gpucr.model import CudaState, GpuMap
from gpucr.operations.first_pass import ToHostMemory
from gpucr.operations.plan import Plan
from gpucr.operations.requests import MoveRequest
from gpucr.operations.suspend import ChangeReport, change_report
from gpucr.undo.cancellation import Cancellation
from gpucr.undo.events import OnProgress
from gpucr.undo.operation import AS_USUAL, TO_MOVE, Terms, operation
from gpucr.undo.protection import Protection
from gpucr.undo.steps import Step, WithoutUndo


def move(
    pid: int | str | JobSelector,
    *,
    gpu_map: GpuMap | str | None = None,
    gpu: str | None = None,
    only: bool = False,
    timeout_s: float | None = None,
    force: bool = False,
    pace: float | None = None,
    on_progress: OnProgress | None = None,
    cancel: Cancellation | None = None,
) -> ChangeReport:
    """Move a running job to other GPUs of this machine: RUNNING or LOCKED → the same state there.

    ``gpu`` (``auto``, or the new places of the GPUs that it uses) or ``gpu_map`` (``OLD=NEW,...``) says where to, as in
    `resume`; this can swap the GPUs of one job, but not two jobs. Refuses up front if a GPU has too little free memory.
    Memory that goes by way of the host is copied there while the job runs, as in `suspend` (``pace``). On any failure
    the job keeps running on the GPUs that it had. Does nothing to a job that is already there. Needs access to the
    processes (same user, or CAP_SYS_PTRACE).

    Raises InvalidRequest, NotACudaProcess, Unsupported (nothing was changed), LockTimeout, DeadlineExceeded,
    Interrupted, DriverError or JobChanged (all undone), JobDamaged (not undone).
    """  # fmt: skip
    request = MoveRequest(pid, GpuRequest.of(gpu_map, gpu), only, pace)
    return run_move(request, Terms(timeout_s, force, on_progress, cancel))


def run_move(request: MoveRequest, terms: Terms = AS_USUAL) -> ChangeReport:
    """As `move`, for this request and within these terms."""
    with operation("move", request.job, terms) as running, contextlib.ExitStack() as opened:
        taken = opened.enter_context(taken_job(running, request.job, TO_MOVE, only=request.only))
        prepared = prepare(*taken.cuda(), request, running.deadline)
        work, choice = prepared.work, prepared.placement.choice
        opened.callback(work.close)
        opened.callback(prepared.host.close)
        preflight.require_no_blocking(prepared.findings, force=running.force)
        if prepared.steps:
            work.make_room()  # while the job runs
            prepared.host.begin()
        phases = running.run(prepared.steps)
        taken.roll.require_gang("the rest of the job runs on its new GPUs")
        return replace(
            change_report(taken.found.job.root.pid, work.gang, phases, lambda member: member.found),
            warnings=(*(finding.warning() for finding in prepared.findings), *work.hooks.warnings),
            lock=work.gang.first_lock,
            gpu_map=choice.gpu_map,
            gpu_reasons=choice.reasons,
        )


def plan_move(
    pid: int | str | JobSelector,
    *,
    gpu_map: GpuMap | str | None = None,
    gpu: str | None = None,
    only: bool = False,
    force: bool = False,
) -> Plan:
    """What `move` would do with the same arguments. Changes nothing; raises like `move` before its first step."""
    return plan_of_move(MoveRequest(pid, GpuRequest.of(gpu_map, gpu), only), force=force)


def plan_of_move(request: MoveRequest, *, force: bool = False) -> Plan:
    """As `plan_move`, for this request: changes nothing."""
    with selection.claimed_job(request.job, only=request.only, force=force) as found:
        found.require_cuda()
        prepared = prepare(found, Protection(), request, None)
        with contextlib.closing(prepared.work):
            return Plan.of(found.job.root.pid, prepared.steps, prepared.findings)


@dataclass(frozen=True)
class PreparedMove:
    """A move that is ready to run, and what was found before any change. Without steps the job is there already."""

    work: CudaWork
    host: ToHostMemory
    placement: Placement
    steps: tuple[Step, ...]
    findings: tuple[preflight.Finding, ...]


def prepare(
    found: selection.FoundJob, protection: Protection, request: MoveRequest, deadline: float | None
) -> PreparedMove:
    """Inspect a job that uses CUDA. Changes nothing; `CudaWork.close` ends it. The one way, also for a dry run."""
    job = found.job
    away = [str(member.pid) for member in job.gang if member.found is CudaState.CHECKPOINTED]
    if away:
        raise InvalidRequest(
            f"process {', '.join(away)} is suspended",
            hint=f"`gpucr resume {job.root.pid} --gpu` brings it back elsewhere",
        )
    seen = CudaJob.seen(job, found.require_cuda())
    placement = place_moved(job.gang, seen.held, request.gpus)
    choice = placement.choice
    needs = preflight.needs_of_suspend(seen.held, in_files=capabilities.can_checkpoint_processes())
    findings = [
        *selection.findings_before_freeze(job, needs),
        *findings_of_traps(job, seen.driver, seen.uses),
        *preflight.check_room(choice.needed_bytes, placement.here, choice.gpu_map),
    ]
    to_host = not goes_from_gpu_to_gpu(choice)
    host = ToHostMemory(request.share)
    purpose = Purpose(deadline, to_host=to_host, whole_tree=not request.only, moves=True)
    work = cuda_work(seen, protection, None, purpose)
    if choice.gpu_map is None:
        return PreparedMove(work, host, placement, (), tuple(findings))
    findings += preflight.check_driver(work.gang.driver.capabilities(), choice.gpu_map)
    unlock = UnlockGang(work.gang, down_to=lambda member: member.found)
    steps = (
        *(host.steps(work, deadline) if to_host else ()),
        *work.steps_off_gpu(),
        MoveGang(work.gang, placement, work.guarded, work.interposers),
        WithoutUndo(unlock),
        *work.hooks.steps_after(),
    )
    return PreparedMove(work, host, placement, steps, tuple(findings))

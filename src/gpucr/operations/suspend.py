"""Suspend and resume: a whole job's GPU state to host memory and back. The processes stay where they are."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from msgspec import Struct

from gpucr.diagnosis import preflight
from gpucr.diagnosis.traps import findings_of_traps
from gpucr.driver.api import Driver
from gpucr.driver.gpus import list_gpus
from gpucr.errors import GpucrError
from gpucr.gang import Gang
from gpucr.gang.around import AllAround
from gpucr.gpu_state import staging, suspended
from gpucr.gpu_state.cuda_work import CudaWork, Purpose, cuda_work
from gpucr.gpu_state.custom_storage.suspended import SuspendedStorage, needed_with_carrier, require_way_back
from gpucr.gpu_state.gpu_choice import GpuRequest
from gpucr.gpu_state.held import CudaJob
from gpucr.gpu_state.interposed.hooks import call
from gpucr.gpu_state.interposed.line import require_free
from gpucr.gpu_state.interposed.suspended import SuspendedBlocks
from gpucr.gpu_state.placement import Placement, gpus_of, place_suspended, remember_gpus
from gpucr.gpu_state.recovery import GangProtection
from gpucr.gpu_state.room import without_what_stays
from gpucr.gpu_state.steps import RestoreGang, UnlockGang
from gpucr.gpu_state.ways import GpuState, may_be_interposed, require_possible, uses_files
from gpucr.interposer.protocol import Hooks
from gpucr.jobs import selection
from gpucr.jobs.selector import JobSelector
from gpucr.jobs.taken import TakenJob, taken_job
from gpucr.model import CudaState, GangLock, GangMember, GpuMap
from gpucr.operations.first_pass import ToHostMemory
from gpucr.operations.requests import ResumeRequest, SuspendRequest
from gpucr.undo.cancellation import Cancellation
from gpucr.undo.events import OnProgress
from gpucr.undo.operation import AS_USUAL, TO_CHANGE, Operation, Terms, operation
from gpucr.undo.protection import Protection
from gpucr.undo.steps import Phase, Step


class StateChange(Struct, frozen=True):
    """One process: the CUDA state in which it was found, and its state now (None: it has ended)."""

    pid: int
    found: CudaState
    now: CudaState | None


@dataclass(frozen=True)
class ChangeReport:
    """What a suspend or resume did. ``size_bytes`` is the host memory that holds device memory now (suspend).

    ``lock`` says how a suspend locked the job. ``warnings`` are preflight's non-blocking findings. ``gpu_map`` is the
    map of a resume to other GPUs, and ``gpu_reasons`` explain gpucr's own choices in it.
    """

    pid: int
    processes: tuple[StateChange, ...]
    phases: tuple[Phase, ...] = field(repr=False)
    size_bytes: int
    warnings: tuple[str, ...] = ()
    gpu_map: GpuMap | None = None
    gpu_reasons: tuple[str, ...] = field(default=(), repr=False)
    lock: GangLock | None = field(default=None, repr=False)

    @property
    def seconds(self) -> float:
        """Wall time of all phases."""
        return sum(phase.seconds for phase in self.phases)


def suspend(
    pid: int | str | JobSelector,
    *,
    gpu_state: GpuState = "auto",
    only: bool = False,
    timeout_s: float | None = None,
    pace: float | None = None,
    force: bool = False,
    on_progress: OnProgress | None = None,
    cancel: Cancellation | None = None,
) -> ChangeReport:
    """Move the device memory of a job into host memory and release its GPUs: RUNNING or LOCKED → CHECKPOINTED.

    ``pid``, or the name of a registered job, stands for its whole tree (``only``: for the one process); a `JobSelector`
    for several trees, or a cgroup, whose CUDA processes are one gang. ``force`` also accepts processes that are not one
    job, and overrules preflight. ``gpu_state`` insists on a way for the device memory. What an interposer takes is
    copied while the job runs, in at most the share ``pace`` of the time (0: not); what differs when it stands still is
    copied again. Processes found CHECKPOINTED
    stay so. CPU threads keep running until they call CUDA. Needs access to the processes (same user, or
    CAP_SYS_PTRACE).

    Raises NotACudaProcess, Unsupported (nothing was changed), LockTimeout, DeadlineExceeded, Interrupted, DriverError
    or JobChanged (all undone), JobDamaged (not undone).
    """  # fmt: skip
    return run_suspend(SuspendRequest(pid, gpu_state, only, pace), Terms(timeout_s, force, on_progress, cancel))


def run_suspend(request: SuspendRequest, terms: Terms = AS_USUAL) -> ChangeReport:
    """As `suspend`, for this request and within these terms."""
    with operation("suspend", request.job, terms) as running, contextlib.ExitStack() as opened:
        require_possible(request.gpu_state)
        taken = opened.enter_context(taken_job(running, request.job, TO_CHANGE, only=request.only))
        found, protection = taken.cuda()
        prepared = prepare_suspend(found, request, protection, running.deadline)
        work = prepared.work
        opened.callback(work.close)
        opened.callback(prepared.host.close)
        findings = prepared.findings()
        preflight.require_no_blocking(findings, force=running.force)
        work.make_room()  # while the job runs: it is stopped only for the copy
        prepared.host.begin()
        phases = running.run([*prepared.host.steps(work, running.deadline), *work.steps_off_gpu()])
        gang = work.gang
        work.custom.release()
        taken_bytes = without_what_stays(work.device_bytes)
        for member in gang.members:
            has_hooks = member.id in work.hooks.processes
            suspended.remember(member, taken_bytes.get(member.pid, {}), has_hooks=has_hooks)
            remember_gpus(member.id, work.gpus_of(member))
        taken.roll.require_gang("the rest of the job is suspended")
        warnings = tuple(finding.warning() for finding in findings)
        return replace(
            change_report(found.job.root.pid, gang, phases, lambda _: CudaState.CHECKPOINTED),
            warnings=(*warnings, *work.hooks.warnings),
            lock=gang.first_lock,
        )


MemoryNeeds: TypeAlias = Sequence[preflight.MemoryNeed]
"""Host memory that is needed."""


@dataclass(frozen=True)
class PreparedSuspend:
    """A suspend that may begin, and what was found before any change. ``needs``: of host memory."""

    work: CudaWork
    host: ToHostMemory
    needs: tuple[preflight.MemoryNeed, ...]
    about_job: tuple[preflight.Finding, ...]

    def findings(self, beside: Sequence[preflight.MemoryNeed] = ()) -> list[preflight.Finding]:
        """All findings. ``beside``: host memory that other jobs will take before."""
        return [*self.about_job, *preflight.check_host_memory([*beside, *self.needs])]

    def require_possible(self) -> None:
        """Raise Unsupported with what is against it about the job itself, apart from host memory."""
        preflight.require_no_blocking(self.about_job)

    def shortage(self, beside: Sequence[preflight.MemoryNeed]) -> str | None:
        """Why host memory is short for it beside these needs; None: it is not."""
        found = preflight.check_host_memory([*beside, *self.needs])
        return next((each.sentence() for each in found if each.severity == "blocking"), None)


def look_at_suspend(request: SuspendRequest, *, force: bool = False) -> tuple[selection.FoundJob, PreparedSuspend]:
    """The job and what its suspend would find, while no other gpucr works on it. Changes nothing; raises as `suspend`.

    The work is closed.
    """
    require_possible(request.gpu_state)
    with selection.claimed_job(request.job, only=request.only, force=force) as found:
        found.require_cuda()
        prepared = prepare_suspend(found, request, Protection())
        prepared.work.close()
        return found, prepared


def prepare_suspend(
    found: selection.FoundJob, request: SuspendRequest, protection: Protection, deadline: float | None = None
) -> PreparedSuspend:
    """Inspect a job that uses CUDA. Changes nothing; `CudaWork.close` ends it. The one way, also for a dry run.

    Raises Unsupported if its device memory cannot leave as the request insists.
    """
    gpu_state = request.gpu_state
    if may_be_interposed(gpu_state):
        require_free(member.pid for member in found.job.gang)
    seen = CudaJob.seen(found.job, found.require_cuda())
    about_job = [
        *preflight.check_states(found.job),
        *preflight.check_left_locked(found.job),
        *findings_of_traps(found.job, seen.driver, seen.uses, may_share=may_be_interposed(gpu_state)),
    ]
    host = ToHostMemory(request.share)
    purpose = Purpose(deadline, gpu_state=gpu_state, to_host=True, whole_tree=not request.only)
    work = cuda_work(seen, protection, None, purpose)
    return PreparedSuspend(
        work=work,
        host=host,
        needs=tuple(preflight.needs_of_suspend(seen.held, in_files=uses_files(gpu_state))),
        about_job=(*about_job, *preflight.check_handed_over(work.custom.pids(found.job.gang))),
    )


def resume(
    pid: int | str | JobSelector,
    *,
    only: bool = False,
    gpu_map: GpuMap | str | None = None,
    gpu: str | None = None,
    timeout_s: float | None = None,
    force: bool = False,
    on_progress: OnProgress | None = None,
    cancel: Cancellation | None = None,
) -> ChangeReport:
    """Bring a suspended job back onto its GPUs, or onto others: CHECKPOINTED or LOCKED → RUNNING.

    ``gpu_map`` (``OLD=NEW,...``) and ``gpu`` (``auto``, or the new places of the GPUs that it uses) name GPUs of this
    machine by index or UUID; what they leave open is filled in. Running processes are left alone, and those that
    `suspend` found CHECKPOINTED return to that state. Refuses up front if a GPU has too little free memory: a
    restore that runs out of it loses the job. On failure every process is CHECKPOINTED or LOCKED again, as it was
    found, so another attempt (with other GPUs, or when memory is free) is possible. Needs access to the processes.

    Raises InvalidRequest, NotACudaProcess, Unsupported (nothing was changed); DriverError, Interrupted,
    DeadlineExceeded (all undone); JobDamaged.
    """  # fmt: skip
    request = ResumeRequest(pid, GpuRequest.of(gpu_map, gpu), only)
    return run_resume(request, Terms(timeout_s, force, on_progress, cancel))


def run_resume(request: ResumeRequest, terms: Terms = AS_USUAL) -> ChangeReport:
    """As `resume`, for this request and within these terms."""
    with operation("resume", request.job, terms) as running, contextlib.ExitStack() as opened:
        taken = opened.enter_context(taken_job(running, request.job, TO_CHANGE, only=request.only))
        return _resume(taken, request, running)


def resume_left_behind(pid: int | str) -> bool:
    """Resume a job that stands still although no suspend of gpucr's is on record. Does nothing to any other job.

    Its processes are locked or checkpointed because the gpucr that worked on them was killed together with its guard,
    or could not undo. Returns whether that was so. Raises as `resume`.
    """
    gang = selection.find_job(pid, looks_only=True).job.gang
    if not any(map(_is_left_behind, gang)):
        return False
    run_resume(ResumeRequest(pid))
    return True


def _is_left_behind(member: GangMember) -> bool:
    is_checkpointed = member.found is CudaState.CHECKPOINTED
    return member.found is CudaState.LOCKED or (is_checkpointed and suspended.recall(member.id) is None)


def _resume(taken: TakenJob, request: ResumeRequest, running: Operation) -> ChangeReport:
    (found, protection), roll = taken.cuda(), taken.roll
    prepared = prepare_resume(found, request.gpus)
    preflight.require_no_blocking(prepared.findings, force=running.force)
    records, away, placement = prepared.records, prepared.away, prepared.placement
    before_suspend, choice = prepared.before_suspend, placement.choice
    steps: list[Step] = []  # none for a running job: do not announce what is not done
    ids = {member.pid: member.id for member in found.job.gang}

    def uuids_of(pid: int) -> list[str]:
        return [gpu.uuid for gpu in placement.visible(pid) or gpus_of(ids[pid], placement.here, used={}).visible]

    guarded = GangProtection(protection)
    before = {pid: record.device_bytes for pid, record in records.items() if record is not None}
    maps = placement.maps(found.job.gang)
    suspended_blocks = SuspendedBlocks(prepared.driver, uuids_of, maps, before, guarded, before_suspend)
    suspended_storage = SuspendedStorage(uuids_of, guarded)
    around = AllAround(suspended_storage, suspended_blocks)
    gang = Gang(prepared.driver, found.job.gang, deadline=running.deadline, around=around)
    if away:
        steps.append(RestoreGang(gang, placement if choice.gpu_map is not None else None, down_to=before_suspend))
    left_half_way = any(suspended_blocks.is_away(m.pid) for m in gang.members if m.found is CudaState.RUNNING)
    if left_half_way or any(
        m.found is not CudaState.RUNNING and before_suspend(m) is CudaState.RUNNING for m in gang.members
    ):
        steps.append(UnlockGang(gang, down_to=before_suspend))
    with contextlib.ExitStack() as kept:
        kept.callback(suspended_blocks.close)
        kept.callback(suspended_storage.close)
        for member in gang.members:
            staging.keep_file(member.pid, kept)
        guarded.members(gang.members)
        suspended_blocks.start(member.pid for member in away)
        phases = running.run(steps)
        threading.Thread(target=kept.pop_all().close, name="free-staging").start()
    for member in gang.members:
        suspended.forget(member.id)
    roll.require_gang("the rest of the job runs")
    told = [member.id for member in away if (record := records[member.pid]) is not None and record.has_hooks]
    warnings = call(Hooks.AFTER_RESTORE, told)
    report = change_report(found.job.root.pid, gang, phases, lambda member: min(member.found, before_suspend(member)))
    return replace(report, warnings=tuple(warnings), gpu_map=choice.gpu_map, gpu_reasons=choice.reasons)


@dataclass(frozen=True)
class PreparedResume:
    """A resume that may begin, and what was found before any change. ``away``: the processes that come back.

    ``records``: what their suspend noted, by pid.
    """

    driver: Driver
    away: tuple[GangMember, ...]
    records: Mapping[int, suspended.SuspendedRecord | None]
    placement: Placement
    findings: tuple[preflight.Finding, ...]

    def before_suspend(self, member: GangMember) -> CudaState:
        """The state to which a resume brings it."""
        return _before_suspend(self.records[member.pid])


def prepare_resume(found: selection.FoundJob, request: GpuRequest) -> PreparedResume:
    """Inspect a job that uses CUDA. Changes nothing. The one way, also for a dry run.

    Raises InvalidRequest for a request that does not fit, Unsupported if its memory cannot come back here.
    """
    driver = found.require_cuda()
    members = found.job.gang
    records = {member.pid: suspended.recall(member.id) for member in members}
    away = tuple(
        member
        for member in members
        if member.found is CudaState.CHECKPOINTED and _before_suspend(records[member.pid]) is not member.found
    )
    pids = [member.pid for member in away]
    require_way_back(pids)
    placement = place_suspended(away, records, request, list_gpus(), [member.pid for member in members])
    choice = placement.choice
    findings = [
        *preflight.check_states(found.job),
        *preflight.check_room(needed_with_carrier(choice.needed_bytes, pids), placement.here, choice.gpu_map),
    ]
    if choice.gpu_map is not None:
        findings += preflight.check_driver(driver.capabilities(), choice.gpu_map)
    require_free(member.pid for member in members)
    return PreparedResume(driver, away, records, placement, tuple(findings))


def _before_suspend(record: suspended.SuspendedRecord | None) -> CudaState:
    return record.found if record is not None else CudaState.RUNNING


def change_report(
    pid: int, gang: Gang, phases: tuple[Phase, ...], led_to: Callable[[GangMember], CudaState]
) -> ChangeReport:
    """The report, which no failure here may hide: if a process cannot be queried, use what the steps reported."""

    def now(member: GangMember) -> CudaState | None:
        try:
            return gang.state(member.pid)
        except (GpucrError, OSError):
            return led_to(member)

    changes = tuple(StateChange(member.pid, member.found, now(member)) for member in gang.members)
    return ChangeReport(pid, changes, phases, sum(phase.size_bytes for phase in phases))

"""Suspend or resume several jobs, one after the other: each is a separate operation with its own undo."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

from msgspec import Struct

from gpucr.diagnosis import preflight
from gpucr.errors import GpucrError, Interrupted, JobDamaged, NotACudaProcess, ProcessNotFound
from gpucr.gpu_state.gpu_choice import GpuRequest
from gpucr.gpu_state.ways import GpuState, require_possible
from gpucr.jobs import selection
from gpucr.jobs.selector import JobSelector
from gpucr.model import GpuMap
from gpucr.operations.chosen import BUSY_S, Chosen, Target, label_of, running_on, suspended_on, when_free
from gpucr.operations.requests import ResumeRequest, SuspendRequest
from gpucr.operations.suspend import ChangeReport, look_at_suspend, prepare_resume, run_resume, run_suspend
from gpucr.undo.cancellation import Cancellation
from gpucr.undo.events import OnProgress
from gpucr.undo.operation import Terms

_GONE = (ProcessNotFound, NotACudaProcess)
"""Errors of a job that was found but has ended since; ignored unless the user named the job."""


class JobOutcome(Struct, frozen=True):
    """The outcome for one of several jobs: a ``report``, or the ``error`` that left it as it was found."""

    job: str
    report: ChangeReport | None = None
    error: GpucrError | None = None


class JobOutlook(Struct, frozen=True):
    """What would be done with one of several jobs. ``device_bytes``: what leaves or comes back, per GPU UUID.

    ``findings`` are preflight's; ``error``: why gpucr cannot inspect it.
    """

    job: str
    pids: tuple[int, ...] = ()
    device_bytes: Mapping[str, int] = {}
    findings: tuple[preflight.Finding, ...] = ()
    error: GpucrError | None = None

    @property
    def is_refused(self) -> bool:
        """Whether it would be left as it is."""
        return self.error is not None or any(finding.severity == "blocking" for finding in self.findings)


def suspend_jobs(
    jobs: Sequence[int | str | JobSelector] | None = None,
    *,
    gpus: str | None = None,
    gpu_state: GpuState = "auto",
    timeout_s: float | None = None,
    pace: float | None = None,
    force: bool = False,
    on_progress: OnProgress | None = None,
    cancel: Cancellation | None = None,
) -> tuple[JobOutcome, ...]:
    """Like `suspend` for several jobs, one after the other; a failure does not affect the others.

    ``jobs``: pids, names and selectors; None: all jobs of the caller that use one of the ``gpus`` (indices and UUIDs
    separated by commas; None: any). ``timeout_s`` applies to each. Waits for unnamed jobs that another gpucr works on,
    if they may be on these GPUs.
    After an interruption no other is begun.

    Raises InvalidRequest for missing GPUs, DriverUnavailable. What happens to a job is in its outcome.
    """
    terms = Terms(timeout_s, force, on_progress, cancel)
    return run_suspends(Chosen(jobs, gpus), gpu_state, terms, pace)


def run_suspends(
    chosen: Chosen, gpu_state: GpuState, terms: Terms, pace: float | None = None
) -> tuple[JobOutcome, ...]:
    """As `suspend_jobs`, for this request and within these terms."""
    require_possible(gpu_state)
    return _each(chosen, running_on, lambda job: run_suspend(SuspendRequest(job, gpu_state, pace=pace), terms), terms)


def resume_jobs(
    jobs: Sequence[int | str | JobSelector] | None = None,
    *,
    gpus: str | None = None,
    gpu_map: GpuMap | str | None = None,
    gpu: str | None = None,
    timeout_s: float | None = None,
    force: bool = False,
    on_progress: OnProgress | None = None,
    cancel: Cancellation | None = None,
) -> tuple[JobOutcome, ...]:
    """Like `resume` for several jobs, one after the other; a failure does not affect the others.

    ``jobs``: pids, names and selectors; None: all suspended jobs of the caller that were on one of the ``gpus`` (None:
    any), except those whose GPUs are lent. ``gpu_map`` and ``gpu`` as for `resume`, for each.

    Raises InvalidRequest for missing GPUs, DriverUnavailable. What happens to a job is in its outcome.
    """
    terms = Terms(timeout_s, force, on_progress, cancel)
    return run_resumes(Chosen(jobs, gpus), GpuRequest.of(gpu_map, gpu), terms)


def run_resumes(chosen: Chosen, onto: GpuRequest, terms: Terms) -> tuple[JobOutcome, ...]:
    """As `resume_jobs`, for this request and within these terms."""
    return _each(chosen, suspended_on, lambda job: run_resume(ResumeRequest(job, onto), terms), terms)


def plan_suspend(
    jobs: Sequence[int | str | JobSelector] | None = None,
    *,
    gpus: str | None = None,
    gpu_state: GpuState = "auto",
    only: bool = False,
    force: bool = False,
) -> tuple[JobOutlook, ...]:
    """What `suspend_jobs` would do with the same arguments. Changes nothing.

    Host memory is counted for all together: the first job without room gets the finding.
    """
    return plan_of_suspends(Chosen(jobs, gpus), gpu_state, only=only, force=force)


def plan_of_suspends(chosen: Chosen, gpu_state: GpuState, *, only: bool, force: bool) -> tuple[JobOutlook, ...]:
    """As `plan_suspend`, for this request: changes nothing."""
    require_possible(gpu_state)
    needs: list[preflight.MemoryNeed] = []

    def look(job: Target) -> JobOutlook:
        found, prepared = look_at_suspend(SuspendRequest(job, gpu_state, only), force=force)
        findings = prepared.findings(beside=needs)
        needs.extend(prepared.needs)
        device_bytes = _added_up(prepared.work.device_bytes.values())
        return JobOutlook(label_of(job), _cuda_pids(found), device_bytes, tuple(findings))

    return tuple(_looked_at(chosen, running_on, look))


def plan_resume(
    jobs: Sequence[int | str | JobSelector] | None = None,
    *,
    gpus: str | None = None,
    gpu_map: GpuMap | str | None = None,
    gpu: str | None = None,
    only: bool = False,
    force: bool = False,
) -> tuple[JobOutlook, ...]:
    """What `resume_jobs` would do with the same arguments. Changes nothing; each job is checked separately."""
    return plan_of_resumes(Chosen(jobs, gpus), GpuRequest.of(gpu_map, gpu), only=only, force=force)


def plan_of_resumes(chosen: Chosen, onto: GpuRequest, *, only: bool, force: bool) -> tuple[JobOutlook, ...]:
    """As `plan_resume`, for this request: changes nothing."""

    def look(job: Target) -> JobOutlook:
        with selection.claimed_job(job, only=only, force=force) as found:
            found.require_cuda()
            prepared = prepare_resume(found, onto)
        needed_bytes = prepared.placement.choice.needed_bytes
        return JobOutlook(label_of(job), _cuda_pids(found), needed_bytes, prepared.findings)

    return tuple(_looked_at(chosen, suspended_on, look))


def exit_code_of(errors: Sequence[GpucrError | None]) -> int:
    """The command's exit code: 0 without failures; that of a damaged job; the one common to all failures; or 1."""
    codes = {error.exit_code for error in errors if error is not None}
    for code in (JobDamaged.exit_code, Interrupted.exit_code):
        if code in codes:
            return code
    return 0 if not codes else codes.pop() if len(codes) == 1 else GpucrError.exit_code


def _each(
    chosen: Chosen,
    find: Callable[[str | None], list[Target]],
    change: Callable[[Target], ChangeReport],
    terms: Terms,
) -> tuple[JobOutcome, ...]:
    were_named = chosen.jobs is not None
    outcomes: list[JobOutcome] = []
    stopped: Interrupted | None = None
    for job in chosen.find(find):
        if stopped is not None:
            why = Interrupted(f"not begun: {stopped.message}", hint="name it again")
            outcomes.append(JobOutcome(label_of(job), error=why))
            continue
        try:
            limit_s = 0.0 if were_named else BUSY_S if terms.timeout_s is None else terms.timeout_s
            report = when_free(partial(change, job), terms.cancel, limit_s)
            outcomes.append(JobOutcome(label_of(job), report=report))
        except GpucrError as e:
            if isinstance(e, _GONE) and not were_named:
                continue
            stopped = e if isinstance(e, Interrupted) else None
            outcomes.append(JobOutcome(label_of(job), error=e))
    return tuple(outcomes)


def _looked_at(
    chosen: Chosen, find: Callable[[str | None], list[Target]], look: Callable[[Target], JobOutlook]
) -> Iterator[JobOutlook]:
    were_named = chosen.jobs is not None
    for job in chosen.find(find):
        try:
            yield when_free(partial(look, job), None, 0.0 if were_named else BUSY_S)
        except GpucrError as e:
            if were_named or not isinstance(e, _GONE):
                yield JobOutlook(label_of(job), error=e)


def _cuda_pids(found: selection.FoundJob) -> tuple[int, ...]:
    return tuple(member.pid for member in found.job.gang)


def _added_up(held: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for by_gpu in held:
        for uuid, size_bytes in by_gpu.items():
            total[uuid] = total.get(uuid, 0) + size_bytes
    return total

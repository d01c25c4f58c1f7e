"""Suspend or resume several jobs, one after the other: each is a separate operation with its own undo."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

from msgspec import Struct

from gpucr.borrow.chosen import Target, chosen_jobs, label_of, running_on, suspended_on
from gpucr.borrow.lend import BUSY_S, when_free
from gpucr.diagnosis import preflight
from gpucr.errors import GpucrError, Interrupted, JobDamaged, NotACudaProcess, ProcessNotFound
from gpucr.gpu_state.gpu_choice import GpuRequest
from gpucr.gpu_state.ways import GpuState, require_possible
from gpucr.jobs import selection
from gpucr.jobs.selector import JobSelector
from gpucr.model import GpuMap
from gpucr.operations.requests import AT_ONCE
from gpucr.operations.suspend import ChangeReport, prepare_resume, prepare_suspend, resume, suspend
from gpucr.undo.cancellation import Cancellation
from gpucr.undo.events import OnProgress
from gpucr.undo.protection import Protection

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
    pace: float = AT_ONCE,
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
    require_possible(gpu_state)
    return _each(
        chosen_jobs(jobs, gpus, running_on),
        lambda job: suspend(
            job,
            gpu_state=gpu_state,
            timeout_s=timeout_s,
            pace=pace,
            force=force,
            on_progress=on_progress,
            cancel=cancel,
        ),
        timeout_s,
        cancel,
        were_named=jobs is not None,
    )


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
    GpuRequest.of(gpu_map, gpu)
    return _each(
        chosen_jobs(jobs, gpus, suspended_on),
        lambda job: resume(
            job, gpu_map=gpu_map, gpu=gpu, timeout_s=timeout_s, force=force, on_progress=on_progress, cancel=cancel
        ),
        timeout_s,
        cancel,
        were_named=jobs is not None,
    )


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
    require_possible(gpu_state)
    needs: list[preflight.MemoryNeed] = []

    def look(job: Target) -> JobOutlook:
        with selection.claimed_job(job, only=only, force=force) as found:
            found.require_cuda()
            prepared = prepare_suspend(found, Protection(), gpu_state=gpu_state, only=only)
            with contextlib.closing(prepared.work):
                findings = prepared.findings(beside=needs)
            needs.extend(prepared.needs)
        device_bytes = _added_up(prepared.work.device_bytes.values())
        return JobOutlook(label_of(job), _cuda_pids(found), device_bytes, tuple(findings))

    return tuple(_looked_at(chosen_jobs(jobs, gpus, running_on), look, were_named=jobs is not None))


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
    request = GpuRequest.of(gpu_map, gpu)

    def look(job: Target) -> JobOutlook:
        with selection.claimed_job(job, only=only, force=force) as found:
            found.require_cuda()
            prepared = prepare_resume(found, request)
        needed_bytes = prepared.placement.choice.needed_bytes
        return JobOutlook(label_of(job), _cuda_pids(found), needed_bytes, prepared.findings)

    return tuple(_looked_at(chosen_jobs(jobs, gpus, suspended_on), look, were_named=jobs is not None))


def exit_code_of(errors: Sequence[GpucrError | None]) -> int:
    """The command's exit code: 0 without failures; that of a damaged job; the one common to all failures; or 1."""
    codes = {error.exit_code for error in errors if error is not None}
    for code in (JobDamaged.exit_code, Interrupted.exit_code):
        if code in codes:
            return code
    return 0 if not codes else codes.pop() if len(codes) == 1 else GpucrError.exit_code


def _each(
    jobs: Sequence[Target],
    change: Callable[[Target], ChangeReport],
    timeout_s: float | None,
    cancel: Cancellation | None,
    *,
    were_named: bool,
) -> tuple[JobOutcome, ...]:
    outcomes: list[JobOutcome] = []
    stopped: Interrupted | None = None
    for job in jobs:
        if stopped is not None:
            why = Interrupted(f"not begun: {stopped.message}", hint="name it again")
            outcomes.append(JobOutcome(label_of(job), error=why))
            continue
        try:
            limit_s = 0.0 if were_named else BUSY_S if timeout_s is None else timeout_s
            report = when_free(partial(change, job), cancel, limit_s)
            outcomes.append(JobOutcome(label_of(job), report=report))
        except GpucrError as e:
            if isinstance(e, _GONE) and not were_named:
                continue
            stopped = e if isinstance(e, Interrupted) else None
            outcomes.append(JobOutcome(label_of(job), error=e))
    return tuple(outcomes)


def _looked_at(
    jobs: Sequence[Target], look: Callable[[Target], JobOutlook], *, were_named: bool
) -> Iterator[JobOutlook]:
    for job in jobs:
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

"""The chosen jobs: the named ones, or all of the caller's, optionally only on some GPUs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, TypeVar

from gpucr.driver.gpus import list_gpus
from gpucr.errors import Busy, InvalidRequest
from gpucr.gpu_state import at_work, suspended
from gpucr.gpu_state.gpu_choice import find_gpu
from gpucr.jobs.registered import registry, registry_in_use
from gpucr.jobs.registry import ListedJob
from gpucr.jobs.selector import JobSelector
from gpucr.linux import claims, processes
from gpucr.model import CudaState, Gpu
from gpucr.operations.gpu_jobs import GpuJob, beside, list_gpu_jobs
from gpucr.operations.listing import ProcessState
from gpucr.undo.cancellation import Cancellation

Target = int | str | JobSelector
"""A job's designation: a pid, a name, or a selector of several trees."""
BUSY_S = 600.0
"""How long to wait for a job that another gpucr works on."""
_PAUSE_S = 0.1
_Result = TypeVar("_Result")


class Chosen(NamedTuple):
    """The jobs that an operation is for: those named, or (None) the caller's own that use one of the ``gpus``.

    ``gpus``: indices and UUIDs separated by commas; None: any.
    """

    jobs: Sequence[Target] | None = None
    gpus: str | None = None

    def find(self, on: Callable[[str | None], list[Target]]) -> list[Target]:
        """The named ones, each once; else those that ``on`` finds on the GPUs. Raises InvalidRequest."""
        if self.jobs is None:
            return on(self.gpus)
        if self.gpus is not None:
            raise InvalidRequest("jobs are chosen by their names or by their GPUs", hint="give one of the two")
        return list(dict.fromkeys(self.jobs))


def label_of(target: Target) -> str:
    """A job's name in messages and JSON."""
    if not isinstance(target, JobSelector):
        return str(target)
    return target.cgroup or "+".join(map(str, target.trees))


def named_gpus(text: str) -> tuple[Gpu, ...]:
    """The GPUs of this machine with these indices and UUIDs, separated by commas, each once.

    Raises InvalidRequest.
    """
    names = [name.strip() for name in text.split(",")]
    if not all(names) or "auto" in names:
        raise InvalidRequest(
            f"{text!r} does not name GPUs", hint="write --gpu 1 or --gpu GPU-6b1e,3", code="GPUCR-BAD-GPU"
        )
    here = list_gpus()
    found = {gpu.uuid: gpu for gpu in (find_gpu(name, here, "on this machine") for name in names)}
    return tuple(found.values())


def running_on(gpus: str | None) -> list[Target]:
    """The caller's jobs that use one of these GPUs (None: any), and are not suspended."""
    uuids = None if gpus is None else {gpu.uuid for gpu in named_gpus(gpus)}

    def fits(each: ProcessState) -> bool:
        return each.state is not CudaState.CHECKPOINTED and _touches(each.device_bytes, uuids)

    return _own_jobs(fits, uuids)


def suspended_on(gpus: str | None) -> list[Target]:
    """The caller's suspended jobs that were on one of these GPUs (None: any), without those whose GPUs are lent."""
    uuids = None if gpus is None else {gpu.uuid for gpu in named_gpus(gpus)}

    def fits(each: ProcessState) -> bool:
        if each.state is not CudaState.CHECKPOINTED:
            return False
        record = suspended.recall(each.process.id)
        return uuids is None or (record is not None and _touches(record.device_bytes, uuids))

    return [job for job in _own_jobs(fits, uuids) if job not in lent_jobs()]


def _touches(device_bytes: Collection[str], uuids: Collection[str] | None) -> bool:
    return uuids is None or any(uuid in uuids for uuid in device_bytes)


def _own_jobs(fits: Callable[[ProcessState], bool], uuids: Collection[str] | None) -> list[Target]:
    """The caller's jobs with a matching process, except those that contain this process.

    Processes started by one process, such as ranks of a launcher without CUDA, are one job. Waits for another gpucr's
    work on a job that may be on these GPUs (None: any), such as a supervisor's checkpoint: afterwards it is as it was
    found.
    """
    own, end_s = _jobs_of_the_caller(), time.monotonic() + BUSY_S
    while True:
        busy = _is_busy(own, uuids)
        own = _jobs_of_the_caller()  # after the last one has finished
        if not (busy or _is_busy(own, uuids)) or time.monotonic() > end_s:
            break
        time.sleep(_PAUSE_S)
    found: list[Target] = []
    for job in own:
        ranks = sorted({job.pid, *(other.pid for other in beside(job, own))})
        if any(fits(each) for member in own if member.pid in ranks for each in member.processes):
            found.append(job.name or (job.pid if len(ranks) == 1 else JobSelector(*ranks)))
    return list(dict.fromkeys(found))


def _is_busy(jobs: Sequence[GpuJob], uuids: Collection[str] | None) -> bool:
    busy = claims.at_work_on(job.pid for job in jobs)
    return any(job.pid in busy and (uuids is None or at_work.may_be_on(job.root.id, uuids)) for job in jobs)


def _jobs_of_the_caller() -> list[GpuJob]:
    ours = {os.getpid(), *processes.ancestors(os.getpid())}
    return [job for job in list_gpu_jobs() if _is_own(job) and job.pid not in ours]


def _is_own(job: GpuJob) -> bool:
    return job.name is not None or job.root.uid == os.getuid()


def lent_jobs() -> Mapping[str, ListedJob]:
    """The jobs whose GPUs are lent, by name. Raises Unsupported."""
    with registry_in_use():
        return {job.name: job for job in registry().jobs() if job.record is not None and job.record.lent is not None}


def when_free(change: Callable[[], _Result], cancel: Cancellation | None, limit_s: float = BUSY_S) -> _Result:
    """Retry while another gpucr works on the job, such as a supervisor taking a checkpoint.

    Raises like ``change``: Busy only after ``limit_s``, or when cancelled.
    """
    end_s = time.monotonic() + limit_s
    while True:
        try:
            return change()
        except Busy:
            if (cancel is not None and cancel.is_cancelled) or time.monotonic() > end_s:
                raise
            time.sleep(_PAUSE_S)

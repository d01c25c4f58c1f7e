"""The rows of `gpucr ps` and `gpucr top`: processes and jobs that use GPUs."""

from __future__ import annotations

import itertools
import pwd
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from msgspec import Struct

from gpucr.cli.columns import Column, fit, wrapped
from gpucr.cli.output import printable
from gpucr.cli.processes import as_json_record
from gpucr.gang import HALTS
from gpucr.model import CudaState, Gpu
from gpucr.operations.gpu_jobs import GpuJob
from gpucr.operations.listing import ProcessState
from gpucr.quantities import counted, format_bytes, format_seconds

_LONGEST_USER = 10
_SHORTEST_NAME = 24
_SHORTEST_COMMAND = 12

_SHARED_COLUMNS = (
    Column("STATE"),
    Column("USER", rank=6),
    Column("AGE", rank=4, is_number=True),
    Column("GPUS", rank=2),
    Column("DEVICE", rank=1, is_number=True),
    Column("HOST", rank=5, is_number=True),
)
_WAY = Column("WAY", rank=8)
_CHECK = Column("CHECKPOINTABLE")
_KEPT = (
    Column("SNAPSHOT", rank=1, is_number=True),
    Column("RESTARTS", rank=1, is_number=True),
    Column("ON DEMAND", rank=1, least=8),
)
_COMMAND = Column("COMMAND", rank=3, least=_SHORTEST_COMMAND, keeps_end=False)


def process_lines(jobs: Sequence[GpuJob], gpus: Sequence[Gpu], width: int | None, *, checked: bool) -> list[str]:
    """A table with a line per process, grouped by job; below it, on request, why jobs cannot be checkpointed."""
    columns = (Column("PID", is_number=True), Column("JOB", least=_SHORTEST_NAME), *_SHARED_COLUMNS, _WAY)
    rows = [
        (
            str(each.process.pid),
            job.name or str(job.pid),
            *_process_cells(each, gpus),
            each.way or "-",
            *((_verdict(job),) if checked else ()),
            printable(" ".join(each.process.command_line) or f"[{each.process.name}]"),
        )
        for job in jobs
        for each in job.processes
    ]
    table = fit((*columns, *((_CHECK,) if checked else ()), _COMMAND), rows, width)
    return [*table, *(line for job in jobs if checked for line in _obstacles(job, width))]


class Kept(Struct, frozen=True):
    """What a supervisor has done for a job: seconds since the last snapshot (None: there is none), and restarts.

    ``on_demand``: what its forwarder does, in words. None: it has no supervisor, no forwarder.
    """

    snapshot_age_s: float | None = None
    restarts: int | None = None
    on_demand: str | None = None

    def cells(self) -> tuple[str, str, str]:
        """The columns' cells."""
        age = "-" if self.snapshot_age_s is None else format_seconds(max(self.snapshot_age_s, 0.0))
        return age, "-" if self.restarts is None else str(self.restarts), self.on_demand or "-"


def job_lines(
    jobs: Sequence[GpuJob], gpus: Sequence[Gpu], width: int | None, kept: Mapping[str, Kept] = MappingProxyType({})
) -> list[str]:
    """A table with a line per job; ``kept``, by name, is shown if one of them is supervised or served on demand."""
    columns = (Column("PID", is_number=True), Column("NAME", least=_SHORTEST_NAME), Column("N", rank=7, is_number=True))
    facts = [kept.get(job.name or "", Kept()) for job in jobs]
    shown = [any(each.restarts is not None for each in facts)] * 2 + [any(each.on_demand for each in facts)]
    rows = [
        (
            str(job.pid),
            job.name or "-",
            str(len(job.processes)),
            *_job_cells(job, gpus),
            *itertools.compress(each.cells(), shown),
            command_of(job),
        )
        for job, each in zip(jobs, facts, strict=True)
    ]
    return fit((*columns, *_SHARED_COLUMNS, *itertools.compress(_KEPT, shown), _COMMAND), rows, width)


def as_json_records(jobs: Sequence[GpuJob]) -> dict[str, Any]:
    """The members ``processes`` and ``jobs`` of the JSON."""
    states = [as_json_record(each) | {"job_pid": job.pid} for job in jobs for each in job.processes]
    return {
        "processes": sorted(states, key=lambda each: each["pid"]),
        "jobs": [
            {
                "pid": job.pid,
                "name": job.name,
                "pids": [each.process.pid for each in job.processes],
                "state": job.state_word,
                "device_bytes": job.device_bytes,
                "resident_bytes": job.resident_bytes,
                "age_s": round(job.age_s, 2),
                "checkpointable": job.is_checkpointable,
                "findings": job.findings,
            }
            for job in jobs
        ],
    }


def chosen(
    jobs: Iterable[GpuJob],
    *,
    job: int | str | None = None,
    gpu: Gpu | None = None,
    state: str | None = None,
    user: str | None = None,
) -> list[GpuJob]:
    """The jobs with only the processes that match all given filters; jobs without one are left out.

    ``job`` is a name, or the pid of any process of it; ``user`` a name or a number.
    """

    def fits(whole: GpuJob, each: ProcessState) -> bool:
        pids = {whole.pid, *(process.process.pid for process in whole.processes)}
        return (
            (job is None or job == whole.name or job in pids)
            and (gpu is None or gpu.uuid in each.device_bytes)
            and (state is None or each.word == state)
            and (user is None or user in (user_name(each.process.uid), str(each.process.uid)))
        )

    found = []
    for whole in jobs:
        left = tuple(each for each in whole.processes if fits(whole, each))
        if left:
            found.append(GpuJob(whole.root, whole.name, left, whole.findings))
    return found


def gpu_numbers(device_bytes: Mapping[str, int], gpus: Sequence[Gpu]) -> str:
    """The indices of the GPUs with memory: ``0,2``; ``-`` for none. ``?`` is one that NVML does not list."""
    indices = {gpu.uuid: gpu.index for gpu in gpus}
    known = sorted(indices[uuid] for uuid in device_bytes if uuid in indices)
    return ",".join([*map(str, known), *("?" for uuid in device_bytes if uuid not in indices)]) or "-"


def user_name(uid: int) -> str:
    """The user's name, or the number if there is none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _verdict(job: GpuJob) -> str:
    findings = job.findings or ()
    if not job.is_checkpointable:
        return "no"
    return "yes" if not findings else f"yes, {counted(len(findings), 'warning')}"


def _obstacles(job: GpuJob, width: int | None) -> Iterator[str]:
    for finding in job.findings or ():
        if finding.severity == "blocking":
            yield from wrapped(printable(finding.sentence()), width, first=f"{job.name or job.pid}: ", indent=2)


def command_of(job: GpuJob) -> str:
    """The command of its first process."""
    return printable(" ".join(job.root.command_line) or f"[{job.root.name}]")


def _process_cells(each: ProcessState, gpus: Sequence[Gpu]) -> tuple[str, ...]:
    return _cells(each.word or "-", each.process.uid, each.age_s, each.device_bytes, each.resident_bytes, gpus)


def _job_cells(job: GpuJob, gpus: Sequence[Gpu]) -> tuple[str, ...]:
    return _cells(job.state_word, job.root.uid, job.age_s, job.device_bytes, job.resident_bytes, gpus)


def _cells(
    state: str, uid: int, age_s: float, device_bytes: Mapping[str, int], resident_bytes: int, gpus: Sequence[Gpu]
) -> tuple[str, ...]:
    return (
        state,
        user_name(uid)[:_LONGEST_USER],
        format_seconds(age_s),
        gpu_numbers(device_bytes, gpus),
        format_bytes(sum(device_bytes.values())),
        format_bytes(resident_bytes),
    )


STATE_WORDS = (*(state.word for state in CudaState), *HALTS)
"""The possible filter values."""

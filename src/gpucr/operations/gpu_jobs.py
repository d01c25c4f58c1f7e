"""The jobs on this machine that use GPUs, as `gpucr ps` and `gpucr top` show them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from gpucr.diagnosis import preflight
from gpucr.diagnosis.traps import findings_of_traps
from gpucr.driver.gpus import gpu_processes
from gpucr.errors import GpucrError, InvalidRequest, NotPermitted
from gpucr.gpu_state.held import device_bytes_here, device_bytes_in_use
from gpucr.jobs import registered, selection
from gpucr.jobs.record import JobRecord
from gpucr.linux import capabilities, processes
from gpucr.model import CudaState, ProcessId, ProcessInfo
from gpucr.operations.listing import ProcessState, list_cuda_processes


def device_bytes_of_jobs(roots: Sequence[int]) -> dict[int, int]:
    """The device memory of these pids' trees; no entry for trees that have none or are gone.

    Raises DriverUnavailable if NVML is there and broken.
    """
    held = {pid: sum(by_gpu.values()) for pid, by_gpu in device_bytes_here(gpu_processes()).items()}
    found: dict[int, int] = {}
    for root in roots if held else ():
        with contextlib.suppress(GpucrError):
            size_bytes = sum(held.get(each.pid, 0) for each in processes.tree(root))
            if size_bytes:
                found[root] = size_bytes
    return found


class GpuJob(Struct, frozen=True):
    """A job with processes that use CUDA.

    ``root`` is the process that commands name it by, ``name`` that of a job started by `gpucr run`. ``processes`` are
    those with CUDA, by pid. ``findings`` are preflight's objections to a dump (None: not checked).

    Without a name, the job is the outermost process with CUDA and everything below it. Ranks started by a launcher
    without CUDA are then one job each; their roots share a ``parent_pid``.
    """

    root: ProcessInfo
    name: str | None
    processes: tuple[ProcessState, ...]
    findings: tuple[preflight.Finding, ...] | None = None

    @property
    def parent(self) -> ProcessId | None:
        """The parent of its root, if it still runs."""
        stat = processes.read_stat(self.root.parent_pid)
        return ProcessId(self.root.parent_pid, stat.start_time_ticks) if stat is not None else None

    @property
    def pid(self) -> int:
        """The pid that names it."""
        return self.root.pid

    @property
    def states(self) -> tuple[CudaState, ...]:
        """The distinct CUDA states of its processes."""
        return tuple(sorted({each.state for each in self.processes if each.state is not None}))

    @property
    def state_word(self) -> str:
        """The state or halt that all are in, in a word; otherwise ``mixed``."""
        words = {each.word for each in self.processes}
        return (words.pop() or "-") if len(words) == 1 else "mixed"

    @property
    def device_bytes(self) -> dict[str, int]:
        """Device memory per GPU UUID."""
        total: dict[str, int] = {}
        for each in self.processes:
            for uuid, size_bytes in each.device_bytes.items():
                total[uuid] = total.get(uuid, 0) + size_bytes
        return total

    @property
    def resident_bytes(self) -> int:
        """Host memory of its processes with CUDA; shared memory counts for each."""
        return sum(each.resident_bytes for each in self.processes)

    @property
    def age_s(self) -> float:
        """Seconds since its first process was started or restored."""
        return processes.age_s(self.root.id)

    @property
    def is_checkpointable(self) -> bool | None:
        """Whether preflight would allow a dump; None if not checked."""
        if self.findings is None:
            return None
        return not any(finding.severity == "blocking" for finding in self.findings)


def list_gpu_jobs(*, check: bool = False) -> tuple[GpuJob, ...]:
    """Every job on the machine that uses CUDA and that the caller may inspect, including suspended ones. By pid.

    ``check`` runs preflight on each, which reads the memory maps and descriptors of all their processes. Raises
    DriverUnavailable.
    """
    states = list_cuda_processes()
    parents = _parents()
    records = _running_records()
    using = {state.process.pid for state in states}
    members: dict[int, list[ProcessState]] = {}
    for state in states:
        members.setdefault(_root_of(state.process.pid, parents, records, using), []).append(state)
    found = []
    for pid, held in sorted(members.items()):
        with contextlib.suppress(GpucrError, PermissionError):  # its root has ended meanwhile
            record = records.get(pid)
            root = next((state.process for state in held if state.process.pid == pid), None)
            job = GpuJob(root or processes.describe(pid), record.name if record is not None else None, tuple(held))
            found.append(replace(job, findings=findings_of(pid)) if check else job)
    return tuple(found)


def findings_of(pid: int) -> tuple[preflight.Finding, ...]:
    """What blocks a suspend or a dump of the job of ``pid``, regardless of the snapshot's destination.

    Lack of access is a blocking finding too. Changes nothing.
    """
    try:
        found = selection.find_job(pid)
        uses = gpu_processes() if found.job.gang else ()
        needs = preflight.needs_of_suspend(
            device_bytes_in_use(found.job, uses), in_files=capabilities.can_checkpoint_processes()
        )
        return (
            *selection.findings_before_freeze(found.job, needs),
            *findings_of_traps(found.job, found.driver, uses, may_measure=False),
            *selection.findings_for_criu(found),
        )
    except (GpucrError, OSError) as e:
        message, hint = (e.message, e.hint or "") if isinstance(e, GpucrError) else (str(e), "")
        evidence = "seen while preflight looked at it"
        code = e.code if isinstance(e, GpucrError) else NotPermitted.code
        return (preflight.Finding("blocking", message, evidence, "gpucr cannot work on it", hint, pid, code=code),)


def beside(job: GpuJob, others: Sequence[GpuJob]) -> tuple[GpuJob, ...]:
    """Jobs started by the same process, which may be ranks of one program.

    None if that process is init, or gpucr is below it: a shell.
    """
    parent_pid = job.root.parent_pid
    if job.name is not None or parent_pid <= 1 or parent_pid in {os.getpid(), *processes.ancestors(os.getpid())}:
        return ()
    return tuple(
        other for other in others if other.name is None and other.pid != job.pid and other.root.parent_pid == parent_pid
    )


def _parents() -> dict[int, int]:
    found = {}
    for pid in processes.all_pids():
        with contextlib.suppress(PermissionError):
            stat = processes.read_stat(pid)
            if stat is not None:
                found[pid] = stat.parent_pid
    return found


def _running_records() -> dict[int, JobRecord]:
    """By the pid of the first process. Without a registry, jobs have no names."""
    with contextlib.suppress(OSError, InvalidRequest):
        listed = [job.record for job in registered.registry().jobs() if job.state.word == "running"]
        return {record.pid: record for record in listed if record is not None and processes.is_alive(record.root)}
    return {}


def _root_of(pid: int, parents: Mapping[int, int], records: Mapping[int, JobRecord], using: set[int]) -> int:
    """The first process of its registered job; otherwise its outermost ancestor with CUDA."""
    line = [pid]
    while parents.get(line[-1], 0) > 0 and parents[line[-1]] not in line:
        line.append(parents[line[-1]])
    named = [each for each in line if each in records]
    return named[-1] if named else [each for each in line if each in using][-1]

"""A job: everything that preflight would report before a suspend or a dump, without doing either."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from msgspec import structs

from gpucr.checkups import engine, network, privileges, storage
from gpucr.checkups.checkup import from_findings, ok
from gpucr.criu.options import GHOST_LIMIT_MAX_BYTES, deleted_file_sizes
from gpucr.diagnosis import preflight
from gpucr.diagnosis.preflight.findings import Finding
from gpucr.diagnosis.preflight.support import processes as facts
from gpucr.diagnosis.traps import findings_of_traps
from gpucr.driver.gpus import gpu_processes
from gpucr.errors import InvalidRequest, Unsupported
from gpucr.gpu_state.gpu_choice import GpuRequest
from gpucr.gpu_state.held import device_bytes_in_use
from gpucr.gpu_state.ways import CUSTOM, first_choice
from gpucr.jobs import registered, selection
from gpucr.jobs.selector import JobSelector
from gpucr.linux import capabilities
from gpucr.model import CudaState, GpuUse, Job
from gpucr.operations.suspend import prepare_resume
from gpucr.quantities import format_bytes
from gpucr.snapshot.device import PIECE_BYTES, buffers_bytes


def examine(target: int | str | JobSelector, folder: Path, *, was_named: bool) -> list[Finding]:
    """Check a job. Changes nothing; needs access to its processes.

    ``folder``: where a snapshot would go; ``was_named``: the user named it. Raises ProcessNotFound, InvalidRequest or
    NotPermitted as `selection.find_job` does, and DriverUnavailable.
    """
    try:
        found = selection.find_job(target)
    except Unsupported as e:
        return [
            Finding("blocking", e.message, "/proc", "gpucr cannot work on it", e.hint or "", None, e.code, about="job"),
        ]
    job = found.job
    uses = gpu_processes() if job.gang else ()
    findings = _summary(job, isolated=found.sandbox is not None)
    suspended = preflight.check_suspended(job) if job.gang else ()
    states = [*preflight.check_states(job), *preflight.check_left_locked(job), *suspended]
    findings += from_findings("CUDA state", states, _states(job))
    findings += from_findings(
        "sharing",
        findings_of_traps(job, found.driver, uses),
        ok("sharing", "nothing shows that would be lost", "environment, mapped and open files, NVML"),
    )
    findings += _processes(found)
    handed_over = _handed_over(found)
    findings += [structs.replace(each, about="device memory") for each in preflight.check_handed_over(handed_over)]
    findings += _room(job, uses, folder, handed_over)
    findings += _way_back(found)
    return [*findings, *_surroundings(folder, was_named=was_named)]


def _summary(job: Job, *, isolated: bool) -> list[Finding]:
    record = registered.record_of(job.root.id)
    name = f"job {record.name}" if record is not None else "a job that gpucr did not start"
    place = "in a sandbox" if isolated else "in no sandbox"
    counts = f"processes: {len(job.processes)}, with CUDA: {len(job.gang)}"
    return [ok("job", f"{name}, {place}", f"{counts}; root {job.root.pid} ({job.root.name})")]


def _states(job: Job) -> Finding:
    words = ", ".join(f"{member.pid} {member.found.word}" for member in job.gang)
    return ok(
        "CUDA state", words or "no process uses CUDA", "cuCheckpointProcessGetState" if words else "/proc/PID/maps"
    )


_FINE = {
    "tracers": ("no debugger or profiler is attached", "TracerPid in /proc/PID/status"),
    "session": ("CRIU can give back the session of every process", "sessions in /proc/PID/stat, NSsid in status"),
    "namespaces": ("no process has one that the first one lacks", "/proc/PID/ns"),
    "left out": ("nothing else is in the job's pid namespace", "/proc/PID/ns/pid of all processes"),
    "open files": ("CRIU can dump them", "/proc/PID/fd"),
    "others": ("the job shares nothing with them", "/proc/PID/fd and maps of all processes, kcmp(2), sock_diag"),
    "connections": ("none leads outside the job", "sock_diag"),
    "terminal": ("it has none, or CRIU can give it back", "tty_nr in /proc/PID/stat, /proc/PID/fd"),
}
"""The text for a part of the job without findings."""


def _processes(found: selection.FoundJob) -> list[Finding]:
    job = found.job
    findings = [
        *selection.findings_for_criu(found),
        *(structs.replace(each, about="open files") for each in check_deleted_files(_largest_deleted(job))),
        *(structs.replace(each, about="terminal") for each in preflight.check_terminal(job)),
    ]
    told = {finding.about for finding in findings}
    fine = [ok(part, what, evidence) for part, (what, evidence) in _FINE.items() if part not in told]
    return sorted([*findings, *fine], key=lambda finding: list(_FINE).index(finding.about))


def _largest_deleted(job: Job) -> Mapping[int, int]:
    """The size of the largest deleted file in use, by pid."""
    return {pid: max(deleted_file_sizes(pid), default=0) for pid in job.pids}


def check_deleted_files(largest_bytes: Mapping[int, int]) -> list[preflight.Finding]:
    """Deleted files that are too large for CRIU's images."""
    return [
        facts.DELETED_TOO_LARGE.seen(
            "/proc/PID/fd and map_files", pid, process=f"process {pid}", size=format_bytes(size_bytes)
        )
        for pid, size_bytes in largest_bytes.items()
        if size_bytes > GHOST_LIMIT_MAX_BYTES
    ]


def _handed_over(found: selection.FoundJob) -> list[int]:
    """Processes whose memory the driver would hand over, if that is known without trying."""
    driver = found.driver
    running = [member.pid for member in found.job.gang if member.found is not CudaState.CHECKPOINTED]
    return [pid for pid in running if driver is not None and first_choice(pid, driver) == CUSTOM]


def _room(job: Job, uses: Sequence[GpuUse], folder: Path, handed_over: Collection[int]) -> list[Finding]:
    """``handed_over``: whose memory goes to the folder straight from its GPUs."""
    held = device_bytes_in_use(job, uses)
    device_bytes = sum(sum(by_gpu.values()) for by_gpu in held.values())
    is_privileged = capabilities.can_checkpoint_processes()
    if is_privileged:
        straight: Counter[str] = Counter()
        for pid in handed_over:
            straight.update(held.get(pid, {}))
        needs = preflight.needs_of_dump(held, folder, job.pids, buffers_bytes(PIECE_BYTES), straight)
    else:
        needs = preflight.needs_of_suspend(held, in_files=False)
    found = from_findings(
        "host memory",
        preflight.check_host_memory(needs),
        ok(
            "host memory",
            f"there is room for {format_bytes(device_bytes)} of device memory",
            "MemAvailable, limits of cgroups",
        ),
    )
    found += from_findings(
        "disk",
        preflight.check_disk(job, folder, device_bytes),
        ok("disk", f"a snapshot fits into {folder}", "statvfs, resident memory and device memory"),
    )
    return found


def _way_back(found: selection.FoundJob) -> list[Finding]:
    """Whether suspended processes would come back onto the GPUs that they had."""
    if all(member.found is not CudaState.CHECKPOINTED for member in found.job.gang):
        return []
    try:
        prepared = prepare_resume(found, GpuRequest())
    except (InvalidRequest, Unsupported) as e:
        there = "what suspend noted"
        consequence = "`gpucr resume` would be refused"
        return [Finding("blocking", e.message, there, consequence, e.hint or "", code=e.code, about="GPU memory")]
    needed = prepared.placement.choice.needed_bytes
    return from_findings(
        "GPU memory",
        prepared.findings,
        ok(
            "GPU memory",
            f"a resume needs {format_bytes(sum(needed.values()))}, which is free",
            "what suspend noted, NVML",
        )
        if needed
        else ok("GPU memory", "what a resume needs is not known", "another tool did the suspend, or another boot"),
    )


def _surroundings(folder: Path, *, was_named: bool) -> list[Finding]:
    """What the folder, the caller and its CRIU lack for a dump."""
    criu = engine.look()
    looked = [
        *storage.check(storage.look(folder, (), was_named=was_named)),
        *privileges.check(privileges.look()),
        *engine.check(criu),
        *network.check(network.look(), criu.install),
    ]
    return [each for each in looked if each.severity != "ok"]


def nearest_folder(folder: str | os.PathLike[str] | None) -> Path:
    """The folder that would be written to: the named one, or its nearest existing parent.

    Raises InvalidRequest for a URL.
    """
    if folder is not None and "://" in os.fspath(folder):
        raise InvalidRequest(
            f"{os.fspath(folder)} is no folder, and there is no disk to look at",
            hint="leave --to out: what is written to a bucket needs no room here",
        )
    path = Path(folder if folder is not None else ".").resolve()
    # Path.is_dir raises if the caller may not look.
    return next(each for each in [path, *path.parents] if os.path.isdir(each))

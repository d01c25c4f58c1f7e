"""Dump: a whole job to a snapshot on disk."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gpucr import preflight
from gpucr.criu.engine import Criu
from gpucr.criu.install import find_criu
from gpucr.criu.options import choose_dump_options
from gpucr.driver.gpus import gpu_processes, list_gpus
from gpucr.errors import CudaStarted, InvalidRequest
from gpucr.gang import Gang
from gpucr.operations import jobs
from gpucr.operations.dump_steps import CommitSnapshot, CreateFolder, CriuDump, DumpContext
from gpucr.operations.freeze import (
    CheckpointGang,
    HoldThreads,
    LockGang,
    ReleaseThreads,
    RestoreGang,
    UnlockGang,
)
from gpucr.operations.steps import OnProgress, Phase, Step, run_steps
from gpucr.operations.threads import GangThreads
from gpucr.snapshot.folder import Snapshot, UnfinishedSnapshot, check_target

ATTEMPTS = 3
"""How often a dump is begun anew because a process started to use CUDA between the checkpoint and CRIU's freeze."""


@dataclass(frozen=True)
class DumpReport:
    """What a dump did.

    ``downtime_s`` is the time from the first lock (without CUDA: from the start of CRIU's dump) until the job ran
    again or, where it was not left running, until it was gone. ``size_bytes`` is the size of the snapshot's files.
    """

    snapshot: Snapshot
    pid: int
    left_running: bool
    phases: tuple[Phase, ...]
    size_bytes: int
    downtime_s: float
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class DumpPlan:
    """What a dump would do, in order, and what preflight found (``--dry-run``)."""

    pid: int
    steps: tuple[str, ...]
    findings: tuple[preflight.Finding, ...]


def dump(
    pid: int,
    to: str | os.PathLike[str],
    *,
    leave_running: bool = False,
    only: bool = False,
    timeout_s: float | None = None,
    force: bool = False,
    on_progress: OnProgress | None = None,
) -> DumpReport:
    """Write a whole job to the folder ``to`` and end it, or with ``leave_running`` let it go on.

    The tree of ``pid`` is locked, checkpointed, dumped by CRIU, and the snapshot committed; only then are the
    processes killed. Whatever fails before that, every process is as it was found and ``to`` is as it was. The folder
    must not exist, or be empty. Needs root (CAP_SYS_ADMIN and CAP_SYS_PTRACE).

    Raises ProcessNotFound, InvalidRequest, NotPermitted, SnapshotExists, Unsupported (before anything was changed);
    LockTimeout, DeadlineExceeded, Interrupted, DriverError, CriuError, JobChanged, SnapshotError (all undone);
    JobDamaged (not undone).
    """  # fmt: skip
    deadline = jobs.deadline_after(timeout_s)
    for attempt in range(1, ATTEMPTS + 1):
        with jobs.claimed_job(pid) as found:
            prepared = _prepare(found, Path(to), leave_running=leave_running, only=only, deadline=deadline)
            preflight.require_no_blocking(prepared.findings, force=force)
            try:
                return _run(prepared, on_progress)
            except CudaStarted:
                if attempt == ATTEMPTS:
                    raise
    raise AssertionError("the last attempt either returned or raised")


def plan_dump(pid: int, to: str | os.PathLike[str], *, leave_running: bool = False, only: bool = False) -> DumpPlan:
    """What `dump` would do with the same arguments. Changes nothing; raises as `dump` does before its first step."""
    found = jobs.find_job(pid)
    prepared = _prepare(found, Path(to), leave_running=leave_running, only=only, deadline=None)
    steps = tuple(step.describe() for step in prepared.steps)
    return DumpPlan(prepared.context.job.root.pid, steps, prepared.findings)


@dataclass(frozen=True)
class _Prepared:
    """A dump that is ready to run: its steps, and what was found while nothing had been changed."""

    context: DumpContext
    steps: tuple[Step, ...]
    findings: tuple[preflight.Finding, ...]
    leave_running: bool
    commit: CommitSnapshot | CriuDump = field(repr=False)


def _prepare(found: jobs.FoundJob, to: Path, *, leave_running: bool, only: bool, deadline: float | None) -> _Prepared:
    job = found.job
    if only and len(job.processes) > 1:
        raise InvalidRequest(
            f"process {job.root.pid} has {len(job.processes) - 1} descendants, and a dump cannot leave them out",
            hint="leave out --only to dump the whole tree, or name the descendant itself",
        )
    preflight.require_privileges(job.root.pid)
    check_target(to)
    criu = Criu(find_criu())
    held = preflight.device_bytes_in_use(job, gpu_processes()) if job.gang else {}
    gang = Gang(found.driver, job.gang, deadline=deadline) if found.driver is not None else None
    context = DumpContext(
        job=job,
        gang=gang,
        folder=UnfinishedSnapshot(to),
        criu=criu,
        options=choose_dump_options(job.pids, leave_running=leave_running, install=criu.install),
        gpus=list_gpus() if job.gang else (),
        device_bytes=held,
        deadline=deadline,
    )
    findings = (
        *jobs.findings_before_freeze(job, _total(held)),
        *preflight.check_tracers(job),
        *preflight.check_open_files(job),
        *(preflight.check_terminal(job) if leave_running and job.gang else ()),
        *preflight.check_disk(job, to if to.is_dir() else to.resolve().parent, _total(held)),
    )
    steps, commit = _steps(context, leave_running=leave_running)
    return _Prepared(context, tuple(steps), findings, leave_running, commit)


def _steps(context: DumpContext, *, leave_running: bool) -> tuple[list[Step], CommitSnapshot | CriuDump]:
    gang = context.gang
    if gang is None or not gang.members:
        criu = CriuDump(context, None, commit_while_frozen=not leave_running)
        if not leave_running:
            return [CreateFolder(context), criu], criu
        commit = CommitSnapshot(context, criu)
        return [CreateFolder(context), criu, commit], commit
    threads = GangThreads()
    checkpoint = CheckpointGang(gang, context.job.root.pid, threads=threads)
    criu = CriuDump(context, checkpoint, commit_while_frozen=not leave_running)
    begin: list[Step] = [CreateFolder(context), LockGang(gang), checkpoint, criu]
    if not leave_running:
        return begin, criu
    commit = CommitSnapshot(context, criu)
    thaw: list[Step] = [
        HoldThreads(threads),
        RestoreGang(gang, None, down_to=lambda member: member.found),
        UnlockGang(gang, down_to=lambda member: member.found),
        ReleaseThreads(threads),
    ]
    return [*begin, *thaw, commit], commit


def _run(prepared: _Prepared, on_progress: OnProgress | None) -> DumpReport:
    phases = run_steps(prepared.steps, deadline=prepared.context.deadline, on_progress=on_progress)
    snapshot = prepared.commit.snapshot
    if snapshot is None:
        raise AssertionError("a dump without error has committed its snapshot")
    still = {"lock", "checkpoint", "dump", "hold", "restore", "unlock", "release"}
    return DumpReport(
        snapshot=snapshot,
        pid=prepared.context.job.root.pid,
        left_running=prepared.leave_running,
        phases=phases,
        size_bytes=snapshot.manifest.size_bytes,
        downtime_s=sum(phase.seconds for phase in phases if phase.name in still),
        warnings=tuple(finding.sentence() for finding in prepared.findings),
    )


def _total(held: Mapping[int, Mapping[str, int]]) -> int:
    return sum(sum(by_gpu.values()) for by_gpu in held.values())

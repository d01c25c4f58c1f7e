"""Restore: a job from a snapshot, on this machine."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass

from gpucr import preflight
from gpucr.criu.engine import Criu
from gpucr.criu.install import find_criu
from gpucr.criu.options import DumpOptions, RestoreOptions
from gpucr.driver.api import Driver
from gpucr.driver.cuda import load_driver
from gpucr.driver.gpus import list_gpus
from gpucr.errors import SnapshotDamaged
from gpucr.gang import Gang
from gpucr.linux import processes
from gpucr.model import GpuMap
from gpucr.operations import jobs
from gpucr.operations.freeze import HoldThreads, ReleaseThreads, RestoreGang, UnlockGang
from gpucr.operations.protection import Protection
from gpucr.operations.restore_steps import (
    CriuRestore,
    LoadDevice,
    MakeFolders,
    RestoreContext,
    RestoreDevice,
    VerifySnapshot,
)
from gpucr.operations.steps import OnProgress, Phase, Step, WithoutUndo, run_steps
from gpucr.operations.threads import GangThreads
from gpucr.snapshot.folder import Snapshot

REAPING_TIMEOUT_S = 10.0
"""How long a restore waits for the parents of the dumped processes to collect their zombies."""


@dataclass(frozen=True)
class RestoreReport:
    """What a restore did. ``pid`` is the root's; ``downtime_s`` the time until the job ran, verification included."""

    snapshot: Snapshot
    pid: int
    processes: int
    phases: tuple[Phase, ...]
    size_bytes: int
    downtime_s: float
    warnings: tuple[str, ...]


def restore(
    snapshot: Snapshot | str | os.PathLike[str],
    *,
    gpu_map: GpuMap | str | None = None,
    timeout_s: float | None = None,
    force: bool = False,
    on_progress: OnProgress | None = None,
) -> RestoreReport:
    """Bring the job of a snapshot back, on the GPUs that it had or those of ``gpu_map``. The snapshot stays.

    The snapshot is verified and compared with this machine before anything starts: GPUs of the same kind with enough
    free memory, free pids, a driver, CRIU. Every CUDA process ends in the state in which the dump had found it. What
    fails later ends the half-restored processes. Needs root (CAP_SYS_ADMIN and CAP_SYS_PTRACE).

    Raises SnapshotUnfinished, SnapshotDamaged, SnapshotError, NotPermitted, Unsupported, DriverUnavailable,
    CriuUnavailable (nothing was started); CriuError, DriverError, DeadlineExceeded, Interrupted (all ended again);
    JobDamaged (something of it still runs).
    """  # fmt: skip
    deadline = jobs.deadline_after(timeout_s)
    if not isinstance(snapshot, Snapshot):
        snapshot = Snapshot.open(snapshot)
    if isinstance(gpu_map, str):
        gpu_map = GpuMap.parse(gpu_map)
    preflight.require_privileges(snapshot.manifest.root_pid)
    options = _options(snapshot)
    findings = _findings(snapshot, gpu_map)
    preflight.require_no_blocking(findings, force=force)
    driver = _driver_for(snapshot)
    with contextlib.ExitStack() as opened:
        protection = opened.enter_context(Protection()) if driver is not None else None
        context = RestoreContext(snapshot, Criu(find_criu()), options, deadline, protection)
        return _run(context, driver, gpu_map, findings, on_progress)


def _run(
    context: RestoreContext,
    driver: Driver | None,
    gpu_map: GpuMap | None,
    findings: Sequence[preflight.Finding],
    on_progress: OnProgress | None,
) -> RestoreReport:
    snapshot, deadline, protection = context.snapshot, context.deadline, context.protection
    steps: list[Step] = [LoadDevice(context)] if snapshot.manifest.device_data else []
    steps.append(VerifySnapshot(context))
    if snapshot.manifest.folders:
        steps.append(MakeFolders(context))
    steps.append(CriuRestore(context))
    if driver is not None and protection is not None:
        gang = context.gang = Gang(driver, (), deadline=deadline)
        threads = GangThreads()
        # Restoring and unlocking are undone by CriuRestore, which ends the processes.
        steps += [
            HoldThreads(threads, context.restore_threads),
            RestoreDevice(context, RestoreGang(gang, gpu_map, down_to=lambda member: member.found)),
            WithoutUndo(UnlockGang(gang, down_to=lambda member: member.found)),
            ReleaseThreads(threads, protection, context.to_continue),
        ]
    try:
        phases = run_steps(steps, deadline=deadline, on_progress=on_progress)
    finally:
        context.close()
    return RestoreReport(
        snapshot=snapshot,
        pid=context.root_pid,
        processes=len(context.restored),
        phases=phases,
        size_bytes=snapshot.manifest.size_bytes,
        downtime_s=sum(phase.seconds for phase in phases),
        warnings=tuple(finding.sentence() for finding in findings),
    )


def _options(snapshot: Snapshot) -> RestoreOptions:
    try:
        return RestoreOptions.from_dump(DumpOptions.from_dict(snapshot.manifest.criu_options))
    except ValueError as e:
        raise SnapshotDamaged(
            f"the manifest's CRIU options cannot be used: {e}",
            path=str(snapshot.path),
            hint="it was made by another version of gpucr: restore it with that one",
        ) from e


def _findings(snapshot: Snapshot, gpu_map: GpuMap | None) -> list[preflight.Finding]:
    manifest = snapshot.manifest
    pids = [
        tid for process in manifest.processes if len(process.ns_pids) == 1 for tid in (process.pid, *process.threads)
    ]
    pids = list(dict.fromkeys(pids))
    processes.wait_for_reaping(pids, REAPING_TIMEOUT_S)
    findings = preflight.check_free_pids(pids)
    if manifest.has_gpu_state:
        staged_bytes = sum(data.size_bytes for data in manifest.device_data.values())
        findings += preflight.check_host_memory(preflight.needs_of_restore(staged_bytes))
        findings += preflight.check_gpus(manifest.gpus, manifest.device_bytes, list_gpus(), gpu_map)
    if manifest.architecture != platform.machine():
        findings.append(
            preflight.Finding(
                "blocking",
                f"the snapshot is of a {manifest.architecture} machine",
                f"this one is {platform.machine()}",
                "its programs cannot run here",
                "restore it on a machine of that kind",
            )
        )
    return findings


def _driver_for(snapshot: Snapshot) -> Driver | None:
    """The driver, where the snapshot needs one: a tree without CUDA is restored without looking for any."""
    return load_driver() if snapshot.manifest.has_gpu_state else None

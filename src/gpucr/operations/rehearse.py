"""Rehearse: restore a snapshot's job beside what runs, up to the point where it would be let go, and end it."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from gpucr.criu.images import RestoreImages
from gpucr.criu.install import CriuInstall
from gpucr.criu.options import RestoreOptions
from gpucr.diagnosis import preflight
from gpucr.diagnosis.preflight.support import gpu_use
from gpucr.driver.cuda import load_driver
from gpucr.driver.gpus import list_gpus, nvml_kept_open
from gpucr.errors import (
    CriuError,
    CustomStorageError,
    DriverError,
    GpucrError,
    InterposerError,
    InvalidRequest,
    JobChanged,
    RehearsalFailed,
    Unsupported,
)
from gpucr.gpu_state import kinds
from gpucr.gpu_state.gpu_choice import GpuRequest
from gpucr.gpu_state.placement import Placement
from gpucr.operations.engines import NO_REHEARSAL, install_for_restore, require_possible_rehearsal
from gpucr.operations.rehearse_steps import CheckDevice, CheckRestored, EndRehearsal, view_for
from gpucr.operations.restore_device import GpuRestore, coming_gang
from gpucr.operations.restore_steps import CriuRestore
from gpucr.operations.sandbox_steps import SandboxPlan, StartSandbox
from gpucr.snapshot.databases import state_now
from gpucr.snapshot.folder import Snapshot
from gpucr.snapshot.gpus import place_snapshot
from gpucr.snapshot.job_snapshot import JobSnapshot
from gpucr.snapshot.location import Place, open_snapshot, source_of
from gpucr.snapshot.machine import files_to_open, findings_of_machine
from gpucr.snapshot.origin import ProvideFiles, RestoreSource
from gpucr.surroundings.site import RestoreSite
from gpucr.surroundings.steps import AdaptFiles, PutBackSharedFiles
from gpucr.undo.cancellation import Cancellation
from gpucr.undo.events import OnProgress
from gpucr.undo.operation import TO_MOVE, Operation, Terms, operation
from gpucr.undo.protection import Protection
from gpucr.undo.steps import Phase, Result, Step

if TYPE_CHECKING:
    from gpucr.store.keys import Secret

_IT_DID_NOT_COME_BACK = (
    CriuError, CustomStorageError, DriverError, InterposerError, JobChanged, Unsupported
)  # fmt: skip
_OF_THE_REHEARSAL = frozenset({NO_REHEARSAL, "GPUCR-NO-SANDBOX", "GPUCR-OPEN-FILES", "GPUCR-HOST-MEMORY"})
"""Codes of what keeps a rehearsal from being held, and says nothing about the snapshot."""


@dataclass(frozen=True)
class RehearsalReport:
    """A rehearsal that went well. ``processes``: how many came back, stopped; all of them have been ended.

    ``device_bytes``: the device memory whose digests were checked; ``left_out`` says what was not rehearsed, and why.
    """

    snapshot: JobSnapshot
    processes: int
    device_bytes: int
    left_out: tuple[str, ...]
    phases: tuple[Phase, ...] = field(repr=False)
    seconds: float
    warnings: tuple[str, ...]


def rehearse(
    snapshot: JobSnapshot | Place,
    *,
    key: Secret | None = None,
    timeout_s: float | None = None,
    on_progress: OnProgress | None = None,
    cancel: Cancellation | None = None,
) -> RehearsalReport:
    """Restore a snapshot's job in a sandbox of its own, up to the point where it would be let go, and end it.

    The job itself, or copies of it, may run meanwhile. No instruction of the program is executed, and nothing outside
    is changed: the sandbox has its own pids, network, shared memory and terminals, and sees the machine's files, but
    what is written, made, removed or locked there is a copy in memory. The memory of the job is needed a second time.

    What a restore checks beforehand is checked. Then every process must be there, with its threads, stopped; device
    memory must match its digests, and where the GPUs have room for it beside what runs, contexts and device memory are
    restored. What cannot be rehearsed: docs/how-to/rehearse.md.

    Needs root (CAP_SYS_ADMIN and CAP_SYS_PTRACE). Raises RehearsalFailed if the job would not come back;
    SnapshotDamaged, StoreDamaged; Unsupported if no rehearsal can be held here; InvalidRequest, SnapshotError,
    WrongKey, NotPermitted, DriverUnavailable, CriuUnavailable; DeadlineExceeded, Interrupted, GpuFull (all ended);
    JobDamaged (part of the copy is still there).
    """
    return run_rehearsal(snapshot, Terms(timeout_s, on_progress=on_progress, cancel=cancel), key)


def run_rehearsal(snapshot: JobSnapshot | Place, terms: Terms, key: Secret | None = None) -> RehearsalReport:
    """As `rehearse`, for this request and within these terms."""
    subject = snapshot if isinstance(snapshot, str | os.PathLike) else snapshot.where
    with operation("rehearse", subject, terms) as running, contextlib.ExitStack() as opened:
        if isinstance(snapshot, str | os.PathLike):
            snapshot = open_snapshot(snapshot, key)
            if isinstance(snapshot, Snapshot):
                opened.callback(snapshot.close)
        options = _options(snapshot)
        require_possible_rehearsal(shell_job=options.shell_job)
        preflight.require_privileges(snapshot.manifest.root_pid)
        try:
            return _held(snapshot, options, running)
        except _IT_DID_NOT_COME_BACK as error:
            if error.code in _OF_THE_REHEARSAL:
                raise
            raise RehearsalFailed(
                f"{snapshot.where} does not come back: {error.message}",
                path=snapshot.where,
                hint=error.hint,
                cause_code=error.code,
            ) from error


def _options(snapshot: JobSnapshot) -> RestoreOptions:
    """Raises InvalidRequest where a container's runtime restores it."""
    manifest = snapshot.manifest
    if not manifest.has_images or manifest.criu_options is None:
        raise InvalidRequest(
            f"{snapshot.where} is the GPU part of a container's checkpoint, which its runtime restores",
            hint="rehearse snapshots of jobs; check this one without --rehearse",
        )
    return RestoreOptions.from_dump(manifest.criu_options)


@dataclass(frozen=True)
class _Prepared:
    """A rehearsal that is ready to run. ``full``: the GPUs without room for its device memory, which is left out."""

    steps: tuple[Step, ...]
    around: Sequence[PutBackSharedFiles | AdaptFiles]
    criu: CriuRestore
    gpu: GpuRestore | None
    protection: Protection
    findings: tuple[preflight.Finding, ...]
    full: tuple[preflight.Finding, ...]


def _held(snapshot: JobSnapshot, options: RestoreOptions, running: Operation) -> RehearsalReport:
    manifest = snapshot.manifest
    if manifest.kinds:
        kinds.require_kinds(manifest.kinds, snapshot.where)
    with contextlib.ExitStack() as opened:
        prepared = _prepare(snapshot, options, running, opened)
        try:
            running.works_on(None, prepared.protection)
            phases = running.run(prepared.steps)
        finally:
            for each in (*prepared.around, prepared.gpu.load if prepared.gpu is not None else None):
                if each is not None:
                    with contextlib.suppress(GpucrError, OSError):  # hides neither a success nor a failure
                        each.close()
    return RehearsalReport(
        snapshot=snapshot,
        processes=len(manifest.processes),
        device_bytes=sum(each.size_bytes for each in manifest.device_parts.values()),
        left_out=tuple(f"contexts and device memory on the GPU: {each.sentence()}" for each in prepared.full),
        phases=phases,
        seconds=sum(phase.seconds for phase in phases),
        warnings=(*(finding.warning() for finding in prepared.findings), *prepared.criu.warnings),
    )


def _prepare(
    snapshot: JobSnapshot, options: RestoreOptions, running: Operation, opened: contextlib.ExitStack
) -> _Prepared:
    """Inspect the snapshot and this machine, and prepare the steps. ``opened`` holds what they need.

    Raises Unsupported for what this machine cannot restore.
    """
    manifest, deadline = snapshot.manifest, running.deadline
    here = list_gpus() if manifest.has_gpu_state else ()
    placement = place_snapshot(manifest, GpuRequest.of(None, None), here, ())
    source = source_of(snapshot)
    opened.callback(_close, source)
    install = install_for_restore(source)
    findings = _findings(source, placement, install)
    full = [each for each in findings if each.code == gpu_use.GPU_FULL.code and each.severity == "blocking"]
    findings = [each for each in findings if each not in full]
    preflight.require_no_blocking(findings, force=None)
    driver = load_driver() if manifest.has_gpu_state else None
    if driver is not None:
        opened.enter_context(nvml_kept_open())
    known = manifest.processes
    running.require_descriptors(len(known), sum(each.found_state is not None for each in known), TO_MOVE)
    protection = opened.enter_context(Protection())
    plan = SandboxPlan("own", uuid.uuid4().hex, None, None, None, alone=False)
    view = partial(view_for, source, install)
    start = StartSandbox(install, source, plan, protection, ends_with_caller=True, view=view)
    mark = os.urandom(8).hex()
    images = [RestoreImages(folder, mark) for folder in source.image_folders]
    gang = coming_gang(driver, deadline) if driver is not None else None
    criu = CriuRestore(
        manifest,
        images,
        start.site,
        options,
        gang=gang,
        protection=protection,
        deadline=deadline,
        stays_stopped=True,
    )
    gpu: GpuRestore | None = None
    if gang is not None:
        opened.callback(placement.forget, gang)
    if gang is not None and not full:
        gpu = GpuRestore(source, gang, placement, criu.tree, protection, deadline)
    around = _around(source, start.site, images, protection)
    steps = _steps(source, start, around, criu, gpu, protection)
    return _Prepared(tuple(steps), around, criu, gpu, protection, tuple(findings), tuple(full))


def _findings(source: RestoreSource, placement: Placement, install: CriuInstall) -> list[preflight.Finding]:
    """What a restore would find, apart from what only concerns the places that the job itself has."""
    manifest = source.snapshot.manifest
    here = list_gpus() if manifest.has_gpu_state else ()
    saved = [state_now(database) for database in manifest.databases]
    members = {member for database in saved for member in database.members}
    return [
        *findings_of_machine(source, placement.choice, here, install, in_sandbox=True),
        *preflight.check_files(manifest.open_files, manifest.open_folders, "keep", members),
        *preflight.check_reopened(*files_to_open(source, apart_from=())),
    ]


def _around(
    source: RestoreSource, site: Result[RestoreSite], images: Sequence[RestoreImages], protection: Protection
) -> list[PutBackSharedFiles | AdaptFiles]:
    manifest = source.snapshot.manifest
    shared = [PutBackSharedFiles(source, site, protection)] if manifest.shared_files else []
    return [*shared, AdaptFiles(manifest, site, images, "keep", "close", protection, in_view=True)]


def _steps(
    source: RestoreSource,
    start: StartSandbox,
    around: Sequence[PutBackSharedFiles | AdaptFiles],
    criu: CriuRestore,
    gpu: GpuRestore | None,
    protection: Protection,
) -> list[Step]:
    provide = ProvideFiles(source, protection)
    load = gpu.load if gpu is not None else None
    steps: list[Step] = [provide] if load is None else [provide, load] if source.provides_first else [load, provide]
    steps += [start, *around, criu]
    if gpu is not None:
        steps += gpu.steps_to_rehearse()
    elif source.snapshot.manifest.device_parts:
        steps.append(CheckDevice(source))
    steps.append(CheckRestored(source, criu.tree))
    return [*steps, EndRehearsal(steps[steps.index(start) :])]


def _close(source: RestoreSource) -> None:
    with contextlib.suppress(GpucrError, OSError):
        source.close()

"""Restore: a job from a snapshot, on this machine."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING

from gpucr.criu.images import RestoreImages
from gpucr.criu.options import RestoreOptions
from gpucr.diagnosis import preflight
from gpucr.driver.api import Driver
from gpucr.driver.cuda import load_driver
from gpucr.driver.gpus import gpu_processes, list_gpus, nvml_kept_open
from gpucr.errors import (
    CriuError,
    DriverError,
    DriverUnavailable,
    GpucrError,
    InvalidRequest,
    JobChanged,
    JobDamaged,
    SnapshotDamaged,
)
from gpucr.gpu_state.gpu_choice import GpuRequest
from gpucr.gpu_state.placement import Placement
from gpucr.jobs import registered
from gpucr.linux.claims import claimed_pids
from gpucr.model import GpuMap
from gpucr.network import kept
from gpucr.network.held_back import HoldBack, LetGo
from gpucr.network.steps import LetKeptGo
from gpucr.operations.engines import install_for_restore
from gpucr.operations.plan import Plan
from gpucr.operations.requests import RestoreRequest
from gpucr.operations.restore_steps import CriuRestore, WaitForOthers
from gpucr.operations.sandbox_steps import KeepJob, SandboxPlan, StartKeeper, StartSandbox, check_clone, plan_sandbox
from gpucr.snapshot.databases import state_now
from gpucr.snapshot.folder import Snapshot
from gpucr.snapshot.gpus import place_snapshot
from gpucr.snapshot.job_snapshot import JobSnapshot
from gpucr.snapshot.location import Place, open_snapshot, source_of
from gpucr.snapshot.machine import files_to_open, findings_of_machine
from gpucr.snapshot.manifest import Manifest
from gpucr.snapshot.origin import ProvideFiles, RestoreSource
from gpucr.snapshot.shared_files import ROOT, names_in_use
from gpucr.surroundings.databases import PutBackDatabases
from gpucr.surroundings.folders import MakeFolders
from gpucr.surroundings.steps import AdaptFiles, SocketsBack, StepBeforeCriu, steps_before_criu
from gpucr.undo.cancellation import Cancellation
from gpucr.undo.events import OnProgress
from gpucr.undo.operation import AS_USUAL, TO_MOVE, Operation, Terms, operation
from gpucr.undo.protection import Protection
from gpucr.undo.steps import Phase, Step

if TYPE_CHECKING:
    from gpucr.gang import Gang
    from gpucr.jobs.registered import RestoredName
    from gpucr.operations.restore_device import GpuRestore
    from gpucr.store.keys import Secret


@dataclass(frozen=True)
class RestoreReport:
    """What a restore did. ``root_pids``: of all trees; ``pid``: the first.

    ``seconds`` is the time until the job ran, including verification. ``name`` is the job's in the registry; None if it
    was not started by `gpucr run`. ``gpu_map`` is None if every GPU stayed; ``gpu_reasons`` explain gpucr's own choices
    in it.
    """

    snapshot: JobSnapshot
    pid: int
    root_pids: tuple[int, ...]
    processes: int
    phases: tuple[Phase, ...] = field(repr=False)
    size_bytes: int
    seconds: float
    warnings: tuple[str, ...]
    name: str | None = None
    gpu_map: GpuMap | None = field(default=None, repr=False)
    gpu_reasons: tuple[str, ...] = field(default=(), repr=False)


def restore(
    snapshot: JobSnapshot | Place,
    *,
    gpu_map: GpuMap | str | None = None,
    gpu: str | None = None,
    files: preflight.FilesMode = "keep",
    tcp: preflight.TcpMode | None = None,
    isolate: bool = False,
    clone: bool = False,
    name: str | None = None,
    key: Secret | None = None,
    timeout_s: float | None = None,
    force: bool = False,
    before_it_runs: Callable[[], None] | None = None,
    ends_with_caller: bool = False,
    on_progress: OnProgress | None = None,
    cancel: Cancellation | None = None,
) -> RestoreReport:
    """Restore a snapshot's job, on the GPUs that it had or on others. The snapshot stays.

    ``gpu_map`` (``OLD=NEW,...``: GPUs of the snapshot, GPUs of this machine) and ``gpu`` (``auto``, or the new places
    of the GPUs that the job uses) name GPUs by index or UUID; what they leave open is filled in.

    The snapshot is verified and compared with this machine before anything starts: GPUs of the same kind with enough
    free memory, free pids, a driver, CRIU. Every CUDA process ends up in the state in which the dump found it. A later
    failure ends the half-restored processes. Needs root (CAP_SYS_ADMIN and CAP_SYS_PTRACE), or for the caller's own
    jobs root's helper (`gpucr helper install`).

    ``files``: what to do with files that the job was writing and whose size has changed. ``"keep"`` leaves them, and
    the job continues writing at their end; ``"rewind"`` cuts grown files back to their size at the dump, and keeps what
    is cut off beside them. ``tcp``: connections to programs outside the job are closed (the other ends get a reset), or
    with ``"keep"`` taken up again; by default whichever the dump has prepared. Those inside the job are always kept.

    A sandboxed job gets a new sandbox, where its pids, its ports and its names in /dev/shm are free; ``isolate`` puts
    any other job into one. ``clone`` allows a copy while the job or another copy runs: with its own name and log, but
    otherwise the same files. ``name`` is its name in the registry.

    ``before_it_runs`` is called when all of the job is there and none of it runs yet; what it raises ends the job
    again. Only for a job that was frozen for the dump (`FrozenJob.save`). With ``ends_with_caller`` the job is killed
    when the calling process ends; otherwise it keeps running.

    Out of a store (``STORE#NAME``, ``STORE#latest``, or STORE with one snapshot; ``key`` opens an encrypted one) device
    memory is fetched while CRIU restores, without a copy on disk.

    Raises InvalidRequest, SnapshotUnfinished, SnapshotDamaged, SnapshotError, WrongKey, StoreDamaged, StoreError,
    NotPermitted, Unsupported, DriverUnavailable, CriuUnavailable (nothing was started); CriuError, DriverError,
    DeadlineExceeded, Interrupted (all ended again); JobDamaged (part of it still runs). """  # fmt: skip
    gpus = GpuRequest.of(gpu_map, gpu)
    request = RestoreRequest(snapshot, gpus, files, tcp, isolate, clone, name, key, before_it_runs, ends_with_caller)
    return run_restore(request, Terms(timeout_s, force, on_progress, cancel))


def run_restore(request: RestoreRequest, terms: Terms = AS_USUAL) -> RestoreReport:
    """As `restore`, for this request and within these terms."""
    snapshot = request.snapshot
    subject = snapshot if isinstance(snapshot, str | os.PathLike) else snapshot.where
    with operation("restore", subject, terms) as running, contextlib.ExitStack() as on_failure:
        opened_snapshot = _open(snapshot, request.key, on_failure)
        with contextlib.ExitStack() as opened:
            prepared = prepare(opened_snapshot, request, opened, running.deadline)
            preflight.require_no_blocking(prepared.findings, force=running.force)
            report = run_prepared(prepared, running, opened)
            on_failure.pop_all()
            return report


def plan_restore(
    snapshot: JobSnapshot | Place,
    *,
    gpu_map: GpuMap | str | None = None,
    gpu: str | None = None,
    files: preflight.FilesMode = "keep",
    tcp: preflight.TcpMode | None = None,
    isolate: bool = False,
    clone: bool = False,
    name: str | None = None,
    key: Secret | None = None,
) -> Plan:
    """What `restore` would do with the same arguments. Starts nothing; raises like `restore` before its first step.

    What is only seen when the data is read is not: whether it is intact (`JobSnapshot.verify` reads all of it).
    """
    return plan_of_restore(RestoreRequest(snapshot, GpuRequest.of(gpu_map, gpu), files, tcp, isolate, clone, name, key))


def plan_of_restore(request: RestoreRequest) -> Plan:
    """As `plan_restore`, for this request: changes nothing."""
    with contextlib.ExitStack() as opened:
        prepared = prepare(_open(request.snapshot, request.key, opened), request, opened, None)
        prepared.close()
        return Plan.of(prepared.source.snapshot.manifest.root_pid, prepared.steps, prepared.findings)


@dataclass(frozen=True)
class PreparedRestore:
    """A restore that is ready to run: its steps, and what was found before anything was started."""

    source: RestoreSource
    placement: Placement
    registration: RestoredName | None
    start: StartSandbox | StartKeeper
    around: Sequence[StepBeforeCriu]
    criu: CriuRestore
    keep: KeepJob
    gpu: GpuRestore | None
    steps: tuple[Step, ...]
    findings: tuple[preflight.Finding, ...]
    warnings: tuple[str, ...]
    protection: Protection

    def close(self) -> None:
        """Let go of what steps may have opened; hides neither a success nor a failure."""
        load = self.gpu.load if self.gpu is not None else None
        for each in (*self.around, load, self.source):
            if each is not None:
                with contextlib.suppress(GpucrError, OSError):
                    each.close()


def _open(snapshot: JobSnapshot | Place, key: Secret | None, on_failure: contextlib.ExitStack) -> JobSnapshot:
    if not isinstance(snapshot, str | os.PathLike):
        return snapshot
    found = open_snapshot(snapshot, key)
    if isinstance(found, Snapshot):
        on_failure.callback(found.close)  # otherwise the error would keep it open
    return found


def prepare(
    snapshot: JobSnapshot, request: RestoreRequest, opened: contextlib.ExitStack, deadline: float | None
) -> PreparedRestore:
    """Inspect the snapshot and this machine, and prepare the steps. Starts nothing. The one way, also for a dry run.

    ``opened`` holds the job's name and pids for us.
    """
    manifest = snapshot.manifest
    _require_possible(snapshot, request)
    options = _options(snapshot)
    here = list_gpus() if manifest.has_gpu_state else ()
    uses = gpu_processes() if request.gpus.auto and here else ()
    placement = place_snapshot(manifest, request.gpus, here, uses)
    source = source_of(snapshot)
    registration, warnings = registered.restored_name_or_warning(
        snapshot, opened, name=request.name, clone=request.clone, other_parts=request.other_parts
    )
    plan = plan_sandbox(
        snapshot, registration, isolate=request.isolate, clone=request.clone, shell_job=options.shell_job
    )
    if plan is None:
        opened.enter_context(claimed_pids(process.pid for process in manifest.processes))
    install = install_for_restore(source)
    sockets = _sockets_back(snapshot, request, plan)
    findings = (
        *findings_of_machine(source, placement.choice, here, install, in_sandbox=plan is not None),
        *_findings_outside(source, request.files, sockets, plan),
        *(check_clone(manifest) if request.clone else ()),
    )
    driver, protection = _driver_for(snapshot, findings), Protection()
    start: StartSandbox | StartKeeper
    ends = request.ends_with_caller
    if plan is not None:
        start = StartSandbox(install, source, plan, protection, ends_with_caller=ends)
    else:
        start = StartKeeper(install, registration, own_session=not options.shell_job, ends_with_caller=ends)
    mark = os.urandom(8).hex()
    images = [RestoreImages(folder, mark) for folder in source.image_folders]
    for each in images:
        opened.callback(each.close)
    around = steps_before_criu(source, start.site, images, request.files, sockets, protection, deadline)
    gang: Gang | None = _with_cuda().coming_gang(driver, deadline) if driver is not None else None
    criu = CriuRestore(manifest, images, start.site, options, gang=gang, protection=protection, deadline=deadline)
    gpu: GpuRestore | None = None
    if gang is not None or manifest.was_frozen:
        gpu = _with_cuda().GpuRestore(source, gang, placement, criu.tree, protection, deadline)
    load = gpu.load if gpu is not None else None
    provide = ProvideFiles(source, protection)
    keep = KeepJob(start.site, criu.tree, manifest, registration, protection)
    first: list[Step] = [provide] if load is None else [provide, load] if source.provides_first else [load, provide]
    folders = [MakeFolders(manifest.folders, protection)] if manifest.folders else []
    ready = _steps_before_it_runs(request, around, sockets)
    after = gpu.steps_after_criu(ready) if gpu is not None else []
    return PreparedRestore(
        source=source,
        placement=placement,
        registration=registration,
        start=start,
        around=around,
        criu=criu,
        keep=keep,
        gpu=gpu,
        steps=(*first, *folders, start, *around, criu, *after, keep),
        findings=findings,
        warnings=warnings,
        protection=protection,
    )


def _require_possible(snapshot: JobSnapshot, request: RestoreRequest) -> None:
    """Raise if nothing on this machine could restore it as requested."""
    manifest = snapshot.manifest
    if not manifest.has_images:
        raise InvalidRequest(
            f"{snapshot.where} is the GPU part of a container's checkpoint",
            hint="restore the container with its runtime (`gpucr hook status` shows whether it calls gpucr), or "
            "give the folder that `gpucr dump --container` has made",
        )
    if request.before_it_runs is not None and not manifest.was_frozen:
        raise InvalidRequest(
            f"{snapshot.where} is of a job that was not frozen: it runs as soon as CRIU has restored it",
            hint="save it with `gpucr.freeze`, or restore it without before_it_runs",
        )
    if manifest.kinds:
        _with_cuda().kinds.require_kinds(manifest.kinds, snapshot.where)
    preflight.require_privileges(manifest.root_pid)


def _sockets_back(snapshot: JobSnapshot, request: RestoreRequest, plan: SandboxPlan | None) -> SocketsBack:
    """Raises InvalidRequest if they lead to other nodes, and its network leads nowhere."""
    between = request.between
    in_our_network = plan is None or plan.network == "host"
    if not in_our_network and between is not None and between.connections:
        raise InvalidRequest(
            f"{snapshot.where} has connections to other nodes, and a network of its own leads nowhere",
            hint="restore it without --isolate; start such jobs with `gpucr run --network host`",
        )
    record = kept.find(snapshot.manifest.kept) if in_our_network and not request.clone else None
    tcp = request.tcp or ("keep" if record is not None else "close")
    return SocketsBack(in_our_network, tcp, record, between)


def _steps_before_it_runs(request: RestoreRequest, around: Sequence[Step], sockets: SocketsBack) -> list[Step]:
    """What the restored job waits for, stopped."""
    ready: list[Step] = [WaitForOthers(request.before_it_runs)] if request.before_it_runs is not None else []
    ready += [LetGo(each) for each in around if isinstance(each, HoldBack)]
    if sockets.record is not None:
        ready.append(LetKeptGo(sockets.record, is_taken_up=sockets.tcp == "keep"))
    return ready


def run_prepared(prepared: PreparedRestore, running: Operation, opened: contextlib.ExitStack) -> RestoreReport:
    """Restore. ``opened`` is left when this is over."""
    source, criu, choice = prepared.source, prepared.criu, prepared.placement.choice
    snapshot, known = source.snapshot, source.snapshot.manifest.processes
    if snapshot.manifest.has_gpu_state:
        load_driver()  # where findings were overruled that told of a machine without one
        opened.enter_context(nvml_kept_open())
    running.require_descriptors(len(known), sum(p.found_state is not None for p in known), TO_MOVE)
    opened.enter_context(prepared.protection)
    if isinstance(prepared.start, StartKeeper):
        opened.enter_context(prepared.start)
    try:
        running.works_on(None, prepared.protection)
        phases = running.run(prepared.steps)
    except (DriverError, CriuError, JobChanged, JobDamaged) as error:
        _recall_overruled(error, snapshot.manifest, prepared.findings)
        raise
    finally:
        prepared.close()
    warnings = [finding.warning() for finding in prepared.findings]
    for step in prepared.around:
        if isinstance(step, AdaptFiles | PutBackDatabases):
            warnings += step.warnings
    warnings += prepared.gpu.tell() if prepared.gpu is not None else []
    restored = criu.tree.value
    return RestoreReport(
        snapshot=snapshot,
        pid=restored.root_pid,
        root_pids=(restored.root_pid, *restored.other_roots),
        processes=len(restored.processes),
        phases=phases,
        size_bytes=snapshot.manifest.size_bytes,
        seconds=sum(phase.seconds for phase in phases),
        warnings=(*warnings, *criu.warnings, *prepared.keep.warnings, *prepared.warnings),
        name=prepared.registration.name if prepared.registration is not None else None,
        gpu_map=choice.gpu_map,
        gpu_reasons=choice.reasons,
    )


def _recall_overruled(error: GpucrError, manifest: Manifest, findings: Sequence[preflight.Finding]) -> None:
    """Add to the hint what --force overruled, in the dump or now: it may be the reason."""
    overruled = [
        *(f"{each.finding}: {each.consequence}" for each in manifest.overruled),
        *(f"{each.sentence()}: {each.consequence}" for each in findings if each.severity == "blocking"),
    ]
    if overruled:
        said = "--force had overruled: " + "; ".join(overruled)
        error.hint = said if error.hint is None else f"{error.hint}; {said}"


def _findings_outside(
    source: RestoreSource, files: preflight.FilesMode, sockets: SocketsBack, plan: SandboxPlan | None
) -> list[preflight.Finding]:
    manifest = source.snapshot.manifest
    replaced = {str(path) for path in plan.outputs} if plan is not None else set()
    opened = [file for file in manifest.open_files if file.path not in replaced]
    saved = [state_now(database) for database in manifest.databases]
    members = {member for database in saved for member in database.members}
    closed = [] if sockets.between is not None else [each.connection for each in manifest.peers]
    opening, making = files_to_open(source, apart_from=replaced)
    return [
        *preflight.check_files(opened, manifest.open_folders, files, members),
        *preflight.check_reopened(opening, making),
        *preflight.check_locks([lock for lock in manifest.locks if lock.path not in replaced]),
        *preflight.check_changed_databases(opened, manifest.created, rewind=files == "rewind", saved=saved),
        *(preflight.check_own_terminals(manifest.terminals) if plan is None else ()),
        *(preflight.check_shared_files(names_in_use(ROOT, manifest.shared_files)) if plan is None else ()),
        *preflight.check_ports(sockets.to_bind(manifest)),
        *preflight.check_kept_connections(closed, "close", None),
        *preflight.check_kept_connections(
            manifest.connections, sockets.tcp, manifest.kept, in_our_network=sockets.in_our_network
        ),
    ]


def _options(snapshot: JobSnapshot) -> RestoreOptions:
    dumped = snapshot.manifest.criu_options
    if dumped is None:
        hint = "restore from another snapshot or copy"
        raise SnapshotDamaged("the manifest has no CRIU options", path=snapshot.where, hint=hint)
    return RestoreOptions.from_dump(dumped)


def _with_cuda() -> ModuleType:
    from gpucr.operations import restore_device  # one tree without CUDA starts without it

    return restore_device


def _driver_for(snapshot: JobSnapshot, findings: Sequence[preflight.Finding]) -> Driver | None:
    """The driver, if the snapshot needs one: a tree without CUDA is restored without looking for one.

    None too where there is none, and findings say that this machine is not the right one: they tell more.
    """
    try:
        return load_driver() if snapshot.manifest.has_gpu_state else None
    except DriverUnavailable:
        if not any(finding.severity == "blocking" for finding in findings):
            raise
        return None

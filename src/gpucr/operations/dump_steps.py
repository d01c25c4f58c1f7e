"""The steps of a dump that concern the snapshot and CRIU."""

from __future__ import annotations

import contextlib
import datetime
import platform
import stat
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpucr import gang as gangs
from gpucr.criu.engine import Criu
from gpucr.criu.options import DumpOptions
from gpucr.driver.gpus import driver_version
from gpucr.errors import CriuError, CudaStarted, DeadlineExceeded, GpucrError, JobChanged, JobDamaged
from gpucr.gang import Gang
from gpucr.linux import oom, processes
from gpucr.linux.sockets import bound_socket_paths
from gpucr.model import Gpu, Job, ProcessId, ProcessInfo
from gpucr.operations import jobs
from gpucr.operations.freeze import CheckpointGang
from gpucr.operations.gpu_places import ProcessGpus, all_gpus, gpus_of
from gpucr.operations.interrupts import Interrupts
from gpucr.operations.job_snapshot import JobSnapshot
from gpucr.operations.logs import log_kept_on_failure
from gpucr.operations.outside import Outside, look_outside, remove_names
from gpucr.operations.protection import Protection
from gpucr.operations.registered import DumpNote
from gpucr.operations.scheduling import scheduling_of
from gpucr.operations.staged import GangStaging
from gpucr.operations.steps import LeftBehind, Meter
from gpucr.operations.targets import DumpTarget
from gpucr.quantities import format_bytes
from gpucr.sandbox import Sandbox
from gpucr.snapshot import shared_files
from gpucr.snapshot.device.writer import DeviceWriter
from gpucr.snapshot.manifest import (
    FolderRecord,
    LaunchRecord,
    Manifest,
    OverruledFinding,
    ProcessRecord,
    SandboxRecord,
)
from gpucr.version import __version__

_NO_REASON = frozenset({CriuError.code, "GPUCR-PROCESS-GONE"})
"""Codes of a failure of CRIU's whose reason is not known, or is that a process ended."""

_WAIT_S = 0.1
_SANDBOX_END_LIMIT_S = _KILLED_LIMIT_S = 10.0


@dataclass(frozen=True, kw_only=True)
class GangDump:
    """What the steps of one dump share that concern the gang and its device memory, whoever writes the CPU's side.

    ``device_bytes``: per pid and GPU UUID, read before anything was locked. ``staging`` and ``writer``: the device
    memory that goes around CRIU, and what saves it. ``protection`` is None for a job without CUDA: nothing of it
    depends on gpucr, since CRIU undoes by itself when gpucr dies.
    """

    job: Job
    gang: Gang | None
    target: DumpTarget
    gpus: tuple[Gpu, ...]
    device_bytes: Mapping[int, Mapping[str, int]]
    deadline: float | None
    staging: GangStaging
    writer: DeviceWriter
    leave_running: bool
    checkpoint: CheckpointGang | None
    protection: Protection | None
    note: DumpNote | None = None
    overruled: tuple[OverruledFinding, ...] = ()


@dataclass(frozen=True, kw_only=True)
class DumpContext(GangDump):
    """What the steps of a dump of gpucr's own share."""

    criu: Criu
    options: DumpOptions
    launch: LaunchRecord | None = None
    sandbox: Sandbox | None = None


class PrepareTarget:
    """Make the place ready that the dump goes to."""

    name = "prepare"

    def __init__(self, context: GangDump) -> None:
        self._context = context

    def describe(self) -> str:
        """Which place."""
        return self._context.target.preparation

    def run(self, interrupts: Interrupts, meter: Meter) -> int:
        """Make it ready."""
        self._context.target.create(self._context.protection)
        return 0

    def undo(self) -> None:
        """Discard it, unless it is a snapshot that is wanted, or the only place where a part of the job is left."""
        context = self._context
        context.writer.cancel()
        is_needed = context.leave_running or not all(processes.is_alive(p.id) for p in context.job.processes)
        if not (context.target.is_committed and is_needed):
            if context.note is not None:
                context.note.withdraw()
            try:
                context.target.discard()
            except (OSError, GpucrError) as e:
                raise LeftBehind(f"what was written to {context.target.where} could not be removed: {e}") from e


class AllocateStaging:
    """Allocate the memory that will hold device memory, while the job still runs.

    A job that will go on waits for it here and not when it stands still; for one that will be ended the allocation is
    only begun, and goes on ahead of the driver.
    """

    name = "allocate"

    def __init__(self, context: GangDump) -> None:
        self._context = context

    def describe(self) -> str:
        """How much."""
        return f"allocate {format_bytes(self._expected_bytes())} of host memory for device memory"

    def run(self, interrupts: Interrupts, meter: Meter) -> int:
        """Allocate, or begin to, what the processes use now."""
        context = self._context
        context.writer.start()
        sizes = {pid: sum(by_gpu.values()) for pid, by_gpu in context.device_bytes.items()}
        context.staging.prepare(sizes)
        if context.leave_running:
            context.staging.wait_prepared()
        return self._expected_bytes()

    def undo(self) -> None:
        """Nothing: closing the staging files gives it back."""

    def _expected_bytes(self) -> int:
        return sum(sum(by_gpu.values()) for by_gpu in self._context.device_bytes.values())


class CriuDump:
    """CRIU writes the process tree; unless it is left running, the snapshot is committed before CRIU kills it."""

    name = "dump"

    def __init__(self, context: DumpContext) -> None:
        self._context = context
        self._interrupts: Interrupts | None = None
        self._meter: Meter | None = None
        self._frozen: frozenset[ProcessId] = frozenset()
        self._passing_names: tuple[str, ...] = ()
        self.draft: Manifest | None = None
        self.snapshot: JobSnapshot | None = None

    def describe(self) -> str:
        """How many processes, where to, and what becomes of them."""
        count = len(self._context.job.processes)
        after = "let them go on" if self._context.leave_running else "commit, then kill them"
        return f"dump {count} process{'es' if count > 1 else ''} with CRIU to {self._context.target.images_at}, {after}"

    def run(self, interrupts: Interrupts, meter: Meter) -> int:
        """Dump. Returns the bytes of the images, and of the device memory that was saved until its end."""
        context, self._interrupts, self._meter = self._context, interrupts, meter
        try:
            with interrupts.allowed(), log_kept_on_failure("dump") as log_path:
                context.criu.dump(
                    context.job.root.pid,
                    context.target.folder.images,
                    context.options,
                    log_path=log_path,
                    on_start=self._on_start,
                    on_notify=self._on_notify,
                    deadline=context.deadline,
                )
        except CriuError as error:
            self._after_failure(error)
        if self.snapshot is not None:
            return self._size_bytes_after_the_end()
        if context.protection is not None:
            context.protection.relax(criu=None)
        return _images_bytes(context)

    def _size_bytes_after_the_end(self) -> int:
        """Tidy up behind a job that is gone now. Nothing may fail any more: there is only the snapshot."""
        context = self._context
        with contextlib.suppress(OSError):
            remove_names(self._passing_names)
            if self.draft is not None and context.sandbox is None:
                shared_files.remove_remaps(shared_files.ROOT, self.draft.shared_files)
            return _images_bytes(context) + context.writer.seen_bytes
        return context.writer.seen_bytes

    def undo(self) -> None:
        """Nothing: CRIU lets the tree go on when its dump fails, and the snapshot is PrepareTarget's to discard."""

    def _on_start(self, criu: ProcessId) -> None:
        if self._context.protection is not None:
            self._context.protection.change(criu=criu)
        if not oom.spare(criu.pid) and self._meter is not None:
            self._meter.note(
                "without CAP_SYS_RESOURCE the kernel cannot be asked to spare CRIU and the guard when memory runs out; "
                "a CRIU that is killed can take processes of the job with it"
            )

    def _on_notify(self, hook: str, pid: int) -> None:
        """After CRIU's last image, with the tree still frozen: what is true now is what was dumped."""
        if hook != "post-dump":
            return
        context = self._context
        tree = processes.tree(context.job.root.pid)
        self._frozen = frozenset(process.id for process in tree)
        outside = look_outside(tree, context.target.folder, is_sandboxed=context.sandbox is not None)
        self._passing_names = outside.passing_names
        self.draft = _draft(context, tree, outside)
        if not context.leave_running and self._interrupts is not None and self._meter is not None:
            self.snapshot = commit(context, self.draft, self._interrupts, self._meter)

    def _after_failure(self, error: CriuError) -> None:
        """Find the better explanation, and never let a job be lost whose snapshot is committed."""
        self._context.writer.wait(0)  # raises what ended the saving of device memory: the same disk, as a rule
        # Also those that were born between the look at the job and the freeze.
        known = sorted({p.id for p in self._context.job.processes} | self._frozen, key=lambda each: each.pid)
        if self.snapshot is not None:
            self._wait_for_the_killed(known)
        alive = [each.pid for each in known if processes.goes_on(each)]
        gone = [each.pid for each in known if each.pid not in alive]
        if self.snapshot is not None and not alive:
            return  # CRIU failed after it had killed the tree (a last log line, its statistics): the dump is complete
        if self.snapshot is not None and gone:
            raise JobDamaged(
                f"CRIU ended in the middle of killing the job: {len(gone)} of its processes are gone",
                failures=[f"process {pid} is gone" for pid in gone],
                hint=f"the snapshot {self.snapshot.where} is complete: kill {alive}, then restore it",
            ) from error
        if gone and error.code in _NO_REASON:  # else they ended later: the job went on, and its small processes with it
            raise JobChanged(
                f"process {gone[0]} ended while it was dumped", pids=gone, hint="the rest of the job is as it was found"
            ) from error
        started = started_cuda(self._context)
        if started:
            raise CudaStarted(
                f"process {started[0]} began to use CUDA after the job had been checkpointed",
                pids=started,
                hint="wait until the job has started all of its processes, then try again",
            ) from error
        raise error

    def _wait_for_the_killed(self, known: Sequence[ProcessId]) -> None:
        """CRIU has ended, and whom it has killed may not have: the snapshot is all that is left of them."""
        processes.wait_for_the_killed(known, _KILLED_LIMIT_S)
        sandbox = self._context.sandbox
        if sandbox is not None and not processes.is_alive(self._context.job.root.id):
            # When a job's first process is killed its sandbox ends: the kernel kills what is left in it, CRIU too.
            sandbox.wait_ended(_SANDBOX_END_LIMIT_S)


def _images_bytes(context: DumpContext) -> int:
    return sum(file.stat().st_size for file in context.target.folder.images.iterdir())


class CommitSnapshot:
    """Save what is not saved yet, make everything durable, and write the manifest."""

    name = "save"

    def __init__(self, context: DumpContext, dumped: CriuDump) -> None:
        self._context = context
        self._dumped = dumped
        self.snapshot: JobSnapshot | None = None

    def describe(self) -> str:
        """Which snapshot."""
        return f"save device memory, sync, and write the manifest of {self._context.target.where}"

    def run(self, interrupts: Interrupts, meter: Meter) -> int:
        """Commit what CRIU dumped. Returns the bytes of the snapshot."""
        if self._dumped.draft is None:
            raise AssertionError("CRIU's dump ended without the post-dump notification")
        with interrupts.allowed():
            self.snapshot = commit(self._context, self._dumped.draft, interrupts, meter)
        return self.snapshot.manifest.size_bytes

    def undo(self) -> None:
        """Nothing: an unfinished snapshot is PrepareTarget's to discard."""


def commit(context: GangDump, draft: Manifest, interrupts: Interrupts, meter: Meter) -> JobSnapshot:
    """Wait until all device memory is saved, make everything durable, write the manifest. Cannot be cut off at its end.

    The images are hashed and synced while device memory is still being written.
    """
    target, writer = context.target, context.writer
    writer.limit_threads(None)
    target.seal_images()
    meter.expect(context.staging.file_bytes)
    while not writer.wait(_WAIT_S):
        meter.set(writer.seen_bytes)
        interrupts.check()
        if context.deadline is not None and time.monotonic() > context.deadline:
            raise DeadlineExceeded(
                "the time was over while device memory was saved", hint="give a longer --timeout, or a faster disk"
            )
    meter.set(writer.seen_bytes)
    meter.note(f"device memory: {format_bytes(writer.seen_bytes)} seen, {format_bytes(writer.written_bytes)} written")
    if writer.rewritten_pieces:
        meter.note(f"{writer.rewritten_pieces} pieces were written again: they changed after they had been saved early")
    interrupts.postpone()
    writer.sync()
    extents = context.staging.extents
    stored = {pid: writer.device_data(pid, each) for pid, each in extents.items()}
    records = tuple(replace(record, device_data=stored.get(record.pid)) for record in draft.processes)
    snapshot = target.commit(replace(draft, processes=records))
    interrupts.commit()
    if context.note is not None:
        context.note.write(snapshot, left_running=context.leave_running)
    return snapshot


def started_cuda(context: GangDump) -> list[int]:
    """Processes of the tree that use CUDA now and are not in the gang."""
    tree = processes.tree(context.job.root.pid)
    driver = context.gang.driver if context.gang is not None else jobs.load_driver_for(tree)
    if driver is None:
        return []
    known = {member.id for member in context.gang.members} if context.gang is not None else set()
    return [member.pid for member in gangs.discover(driver, [p for p in tree if p.id not in known])]


def _draft(context: DumpContext, tree: Sequence[ProcessInfo], outside: Outside) -> Manifest:
    """The manifest of the tree, which is frozen now, without its files."""
    sandbox = context.sandbox
    draft = draft_of_gang(context, tree, context.criu.install.version_text, context.options.as_dict())
    return replace(
        draft,
        processes=tuple(replace(r, scheduling=scheduling_of(r.pid, r.threads)) for r in draft.processes),
        folders=_socket_folders(tree, is_sandboxed=sandbox is not None),
        launch=context.launch,
        sandbox=SandboxRecord(sandbox.network, sandbox.lineage, sandbox.log_path) if sandbox is not None else None,
        open_files=outside.open_files,
        open_folders=outside.open_folders,
        shared_files=outside.shared_files,
        endpoints=outside.endpoints,
        connections=outside.connections,
    )


def draft_of_gang(
    context: GangDump, tree: Sequence[ProcessInfo], criu_version: str, criu_options: Mapping[str, Any]
) -> Manifest:
    """The part of the manifest that tells of the processes and their GPU state."""
    members = context.gang.members if context.gang is not None else ()
    gpus = {m.pid: gpus_of(m.id, context.gpus, used=context.device_bytes.get(m.pid, {})) for m in members}
    capabilities = context.gang.driver.capabilities() if context.gang and context.gang.members else None
    return Manifest(
        created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        root_pid=context.job.root.pid,
        processes=tuple(_record(context, p, gpus.get(p.pid)) for p in tree),
        gpus=tuple(all_gpus(gpus.values())),
        cuda_version=capabilities.cuda_version if capabilities else None,
        driver_version=driver_version() if capabilities else None,
        criu_version=criu_version,
        criu_options=dict(criu_options),
        kernel=platform.release(),
        architecture=platform.machine(),
        gpucr_version=__version__,
        left_running=context.leave_running,
        overruled=context.overruled,
    )


def _socket_folders(tree: Sequence[ProcessInfo], *, is_sandboxed: bool) -> tuple[FolderRecord, ...]:
    """The folders in which the tree's local sockets are bound, and those above them, outermost first."""
    paths = bound_socket_paths((p.pid for p in tree), is_sandboxed=is_sandboxed)
    folders = {parent for path in paths for parent in path.parents}
    records: list[FolderRecord] = []
    for folder in sorted(folders - {Path("/")}):
        with contextlib.suppress(OSError, UnicodeEncodeError):  # it is gone by now, as the socket's name in it is
            str(folder).encode()
            found = folder.stat()
            records.append(FolderRecord(str(folder), stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid))
    return tuple(records)


def _record(context: GangDump, process: ProcessInfo, gpus: ProcessGpus | None) -> ProcessRecord:
    found = {m.pid: m.found for m in context.gang.members} if context.gang is not None else {}
    stopped = {p.id for p in context.job.processes if p.status == "T"}
    thread = context.checkpoint.restore_threads.get(process.pid) if context.checkpoint else None
    return ProcessRecord(
        pid=process.pid,
        ns_pids=process.ns_pids,
        parent_pid=process.parent_pid,
        threads=processes.threads(process.pid),
        name=process.name,
        command_line=process.command_line,
        found_state=found.get(process.pid),
        stopped=process.id in stopped,
        restore_thread=processes.innermost_thread_id(process.pid, thread) if thread is not None else None,
        device_bytes=dict(context.device_bytes.get(process.pid, {})),
        staging=context.staging.private.get(process.pid, ()),
        visible_gpus=None if gpus is None else tuple(gpu.uuid for gpu in gpus.visible),
        known_gpus=None if gpus is None else tuple(gpu.uuid for gpu in gpus.known),
    )

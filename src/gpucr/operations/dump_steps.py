"""The steps of a dump that concern the snapshot and CRIU."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from gpucr import gang as gangs
from gpucr.criu.engine import Criu
from gpucr.criu.options import DumpOptions
from gpucr.criu.recovery import EndDump
from gpucr.diagnosis import preflight
from gpucr.driver.gpus import driver_version
from gpucr.errors import CriuError, CudaStarted, DeadlineExceeded, GpucrError, JobChanged, JobDamaged
from gpucr.gpu_state import suspended
from gpucr.gpu_state.source import NamesItself
from gpucr.jobs import selection
from gpucr.jobs.registered import DumpNote
from gpucr.jobs.sandbox import Sandbox
from gpucr.linux import oom, processes, processor, tcp_tables
from gpucr.linux.one_look import OneLook
from gpucr.model import CudaState, Endpoint, GangMember, Job, ProcessId, ProcessInfo
from gpucr.network.lock import IN_FLIGHT, JobNetwork
from gpucr.operations.recorded import process_record, sandbox_record
from gpucr.quantities import counted, format_bytes
from gpucr.snapshot import shared_files
from gpucr.snapshot.destination import DumpTarget
from gpucr.snapshot.device.writer import DeviceWriter
from gpucr.snapshot.folder import MANIFEST_NAME
from gpucr.snapshot.job_snapshot import JobSnapshot
from gpucr.snapshot.manifest import (
    LaunchRecord,
    Manifest,
    OverruledFinding,
    Peer,
    ProcessRecord,
    UserRecord,
)
from gpucr.surroundings.folders import socket_folders
from gpucr.surroundings.observe import Outside, TreeFiles, look_at_files, look_outside, remove_names
from gpucr.surroundings.recovery import RemoveLinkRemaps, link_remaps
from gpucr.surroundings.scheduling import with_scheduling
from gpucr.surroundings.socket_options import with_socket_options
from gpucr.undo.interrupts import Interrupts
from gpucr.undo.logs import log_kept_on_failure
from gpucr.undo.operation import Terms
from gpucr.undo.protection import Protection
from gpucr.undo.steps import LeftBehind, Meter
from gpucr.version import __version__

if TYPE_CHECKING:
    from gpucr.gpu_state.cuda_work import CudaWork
    from gpucr.operations.rehearse import RehearsalReport

_NO_REASON = frozenset({CriuError.code, "GPUCR-PROCESS-GONE"})
"""Codes of CRIU failures whose reason is unknown, or that a process ended."""

_WAIT_S = 0.1
_SANDBOX_END_LIMIT_S = _KILLED_LIMIT_S = 10.0
_LOOK_EVERY_S = 0.5  # at CRIU's images while it writes them: those of hundreds of processes are thousands of files


class Rehearsal:
    """The rehearsal of a snapshot that a dump has just written; ``hold`` raises what is wrong."""

    def __init__(self, terms: Terms, deadline: float | None) -> None:
        self._terms = terms
        self._deadline = deadline
        self.report: RehearsalReport | None = None
        self.has_failed = False

    def hold(self, snapshot: JobSnapshot) -> None:
        """Hold it. After any error the snapshot is not one to keep."""
        from gpucr.operations.rehearse import run_rehearsal  # other dumps start without it

        try:
            self.report = run_rehearsal(snapshot, self._terms.within(self._deadline))
        except BaseException:
            self.has_failed = True
            raise


class JobDump(Struct, frozen=True, kw_only=True):
    """What is dumped, and where to, no matter who writes the CPU side. ``cuda`` is None for a job without CUDA.

    ``is_frozen``: all of it is stopped before CRIU begins, with its device memory away, and CRIU leaves it so;
    otherwise it is one tree. ``protection``: what the guard knows. ``rehearsal``: of the snapshot, before the job is
    given up for it. ``look``: what was seen before the first change.
    """

    job: Job
    target: DumpTarget
    writer: DeviceWriter
    cuda: CudaWork | None
    leave_running: bool
    protection: Protection
    look: OneLook
    is_frozen: bool = False
    deadline: float | None = None
    note: DumpNote | None = None
    overruled: tuple[OverruledFinding, ...] = ()
    rehearsal: Rehearsal | None = None


class OwnDump(JobDump, frozen=True, kw_only=True):
    """A dump for which gpucr starts CRIU itself."""

    criu: Criu
    options: DumpOptions
    network: JobNetwork
    launch: LaunchRecord | None = None
    sandbox: Sandbox | None = None


class PrepareTarget:
    """Prepare the dump's target."""

    name = "prepare"

    def __init__(self, context: JobDump) -> None:
        self._context = context
        self._remaps: RemoveLinkRemaps | None = None

    def describe(self) -> str:
        return self._context.target.preparation

    def run(self, interrupts: Interrupts, meter: Meter) -> int:
        context = self._context
        context.target.create(context.protection)
        self._remaps = link_remaps(context.job, context.look)
        context.protection.protect(self._remaps)
        if context.cuda is not None:
            context.writer.start()
        return 0

    def undo(self) -> None:
        """Discard it, unless the snapshot is complete or holds the only copy of a part of the job."""
        context = self._context
        context.writer.cancel()
        if self._remaps is not None:  # a CRIU that was killed has not removed them
            self._remaps.recover(())
        has_failed = context.rehearsal is not None and context.rehearsal.has_failed
        is_needed = (context.leave_running and not has_failed) or not all(
            processes.is_alive(p.id) for p in context.job.processes
        )
        if not (context.target.is_committed and is_needed):
            if context.note is not None:
                context.note.withdraw()
            try:
                context.target.discard()
            except (OSError, GpucrError) as e:
                raise LeftBehind(f"what was written to {context.target.where} could not be removed: {e}") from e


class SaveDevice:
    """Begin to save a frozen job's device memory, which is complete."""

    name = "read"

    def __init__(self, context: JobDump) -> None:
        self._context = context

    def describe(self) -> str:
        return f"begin to save {format_bytes(self._saved_bytes())} of device memory"

    def run(self, interrupts: Interrupts, meter: Meter) -> int:
        """Give it all to the writer; `commit` waits for it."""
        if self._context.cuda is not None:
            for each in self._context.cuda.order.saved():
                if (source := each.source) is not None:
                    writer = self._context.writer
                    writer.add(source)
                    if isinstance(source, NamesItself):
                        with contextlib.suppress(GpucrError):  # then all of it is read
                            writer.look(each.part, source.digests(writer.piece_bytes, writer.digest_key))
                    writer.complete(each.part)
        return 0

    def undo(self) -> None:
        """Nothing: what was written is PrepareTarget's to discard."""

    def _saved_bytes(self) -> int:
        return self._context.cuda.order.saved_bytes if self._context.cuda is not None else 0


class CriuDump:
    """CRIU writes each tree of the job.

    Unless it is frozen or left running, CRIU kills it, after the snapshot is committed.
    """

    name = "dump"

    def __init__(self, context: OwnDump) -> None:
        self._context = context
        self._interrupts: Interrupts | None = None
        self._meter: Meter | None = None
        self._seen: list[ProcessInfo] = []
        self._look = OneLook()  # first used when all of it stands still
        self._next_look_s = 0.0
        self._files: list[TreeFiles] = []
        self._outside: Outside | None = None
        self.draft: Manifest | None = None
        self.snapshot: JobSnapshot | None = None

    def describe(self) -> str:
        """How many processes, where to, and what happens to them."""
        job = self._context.job
        count = counted(len(job.processes), "process") + (f" in {len(job.trees)} trees" if job.other_root_pids else "")
        rehearsed = "rehearse, " if self._context.rehearsal is not None else ""
        left = "keep them running" if self._context.leave_running else f"commit, {rehearsed}then kill them"
        after = "leave them frozen" if self._context.is_frozen else left
        by = "CRIU, by the privileged helper," if self._context.criu.install.is_helpers else "CRIU"
        return f"dump {count} with {by} to {self._context.target.images_at}, {after}"

    def run(self, interrupts: Interrupts, meter: Meter) -> int:
        """Dump. Returns the bytes of the images, and of the device memory saved meanwhile."""
        context, self._interrupts, self._meter = self._context, interrupts, meter
        try:
            for number, root_pid in enumerate(context.job.root_pids):
                self._dump_tree(root_pid, context.target.folder.make_images(number), interrupts)
        except CriuError as error:
            self._after_failure(error)
        if self.snapshot is not None:
            return self._size_bytes_after_the_end()
        context.protection.withdraw(EndDump)
        return _images_bytes(context)

    def _dump_tree(self, root_pid: int, images: Path, interrupts: Interrupts) -> None:
        context = self._context
        with interrupts.allowed(), log_kept_on_failure("dump") as log_path:
            context.criu.dump(
                root_pid,
                images,
                context.options,
                log_path=log_path,
                on_start=self._on_start,
                on_notify=lambda hook, _: self._on_notify(hook, root_pid, images),
                check=lambda: self._watch(interrupts),
                deadline=context.deadline,
            )

    def _watch(self, interrupts: Interrupts) -> None:
        """Called several times a second while CRIU works: its images grow."""
        interrupts.check()
        if self._meter is not None and self.snapshot is None and time.monotonic() >= self._next_look_s:
            self._next_look_s = time.monotonic() + _LOOK_EVERY_S
            with contextlib.suppress(OSError):
                self._meter.set(_images_bytes(self._context, only="pages-"))  # of thousands of files almost all bytes

    def _size_bytes_after_the_end(self) -> int:
        """Nothing may fail any more: only the snapshot is left."""
        context = self._context
        with contextlib.suppress(OSError):
            return _images_bytes(context) + context.writer.seen_bytes
        return context.writer.seen_bytes

    def undo(self) -> None:
        """Nothing: CRIU releases the tree when its dump fails, and PrepareTarget discards the snapshot."""

    def _on_start(self, criu: ProcessId) -> None:
        expect_criu(self._context, criu)
        self._context.network.attend(criu)
        if not oom.spare(criu.pid) and self._meter is not None:
            self._meter.note(
                "without CAP_SYS_RESOURCE the kernel cannot be asked to spare CRIU and the guard when memory runs out; "
                "a CRIU that is killed can take processes of the job with it"
            )

    def _on_notify(self, hook: str, root_pid: int, images: Path) -> None:
        """After CRIU's last image, with the tree still frozen: the current state is what was dumped.

        Several trees are all stopped from before the first dump to the end.
        """
        if hook != "post-dump":
            return
        context, is_sandboxed = self._context, self._context.sandbox is not None
        tree = processes.tree(root_pid)
        self._seen += tree
        self._files.append(look_at_files(tree, images, context.target.folder, self._look, is_sandboxed=is_sandboxed))
        if len(self._files) < len(context.job.root_pids):
            return
        if not context.is_frozen and tcp_tables.has_connections([process.pid for process in self._seen], self._look):
            raise JobChanged(
                "a connection was made while the job was being dumped",
                pids=[root_pid],
                hint="dump again",
                code=IN_FLIGHT,
            )
        self._outside = look_outside(self._files, context.target.folder, self._look, is_sandboxed=is_sandboxed)
        self.draft = _draft(context, self._seen, self._outside, self._look)
        if (
            not context.leave_running
            and not context.is_frozen
            and self._interrupts is not None
            and self._meter is not None
        ):
            self.snapshot = commit(context, self.draft, self._interrupts, self._meter)
            self._remove_passing_names(self._outside)

    def _remove_passing_names(self, outside: Outside) -> None:
        """Remove CRIU's names for files of a job that it kills next; a restore has their content in the snapshot.

        Not later: a gpucr killed meanwhile would leave them behind.
        """
        with contextlib.suppress(OSError):
            remove_names(outside.passing_names)
            if self._context.sandbox is None:
                shared_files.remove_remaps(shared_files.ROOT, outside.shared_files)

    def _after_failure(self, error: CriuError) -> None:
        """Find the better explanation, and never let a job be lost whose snapshot is committed."""
        self._context.writer.wait(0)  # raises the error that ended the saving of device memory: usually the same disk
        # Also those started between inspection and freeze.
        ids = {process.id for process in (*self._context.job.processes, *self._seen)}
        known = sorted(ids, key=lambda each: each.pid)
        if self.snapshot is not None:
            self._wait_for_killed(known)
        alive = [each.pid for each in known if processes.keeps_running(each)]
        gone = [each.pid for each in known if each.pid not in alive]
        if self.snapshot is not None and not alive:
            return  # CRIU failed after it killed the tree (a last log line, its statistics): the dump is complete
        if self.snapshot is not None and gone:
            raise JobDamaged(
                f"CRIU ended in the middle of killing the job: {len(gone)} of its processes are gone",
                failures=[f"process {pid} is gone" for pid in gone],
                hint=f"the snapshot {self.snapshot.where} is complete: kill {alive}, then restore it",
            ) from error
        if gone and error.code in _NO_REASON:  # otherwise short-lived ones ended later
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

    def _wait_for_killed(self, known: Sequence[ProcessId]) -> None:
        """CRIU has ended, but the processes that it killed may not have: only the snapshot is left of them."""
        processes.wait_for_killed(known, _KILLED_LIMIT_S)
        sandbox = self._context.sandbox
        if sandbox is not None and not processes.is_alive(self._context.job.root.id):
            # When a job's first process is killed, its sandbox ends: the kernel kills the rest of it, including CRIU.
            sandbox.wait_ended(_SANDBOX_END_LIMIT_S)


def expect_criu(context: JobDump, criu: ProcessId) -> None:
    """Have the guard make this CRIU undo if gpucr dies before the snapshot is committed."""
    context.protection.protect(EndDump(criu, MANIFEST_NAME), [context.target.folder.held.fd])


def _images_bytes(context: OwnDump, only: str = "") -> int:
    return sum(
        file.stat(follow_symlinks=False).st_size
        for folder in context.target.folder.image_folders
        for file in os.scandir(folder)
        if file.name.startswith(only)
    )


class CommitSnapshot:
    """Save the rest, make everything durable, and write the manifest."""

    name = "save"

    def __init__(self, context: OwnDump, dumped: CriuDump) -> None:
        self._context = context
        self._dumped = dumped
        self.snapshot: JobSnapshot | None = None

    def describe(self) -> str:
        where = self._context.target.where
        if self._context.rehearsal is not None:
            return f"save device memory, sync, write the manifest of {where}, and rehearse a restore"
        return f"save device memory, sync, and write the manifest of {where}"

    def run(self, interrupts: Interrupts, meter: Meter) -> int:
        """Commit what CRIU dumped. Returns the bytes of the snapshot."""
        if self._dumped.draft is None:
            raise AssertionError("CRIU's dump ended without the post-dump notification")
        with interrupts.allowed():
            self.snapshot = commit(self._context, self._dumped.draft, interrupts, meter)
        return self.snapshot.manifest.size_bytes

    def undo(self) -> None:
        """Nothing: PrepareTarget discards an unfinished snapshot."""


def commit(context: JobDump, draft: Manifest, interrupts: Interrupts, meter: Meter) -> JobSnapshot:
    """Wait until all device memory is saved, make everything durable, write the manifest. The end is uninterruptible.

    The images are hashed and synced while device memory is still being written.
    """
    target, writer = context.target, context.writer
    writer.limit_threads(None)
    target.seal_images()
    _wait_saved(context, interrupts, meter)
    meter.note(f"device memory: {format_bytes(writer.seen_bytes)} seen, {format_bytes(writer.written_bytes)} written")
    if writer.rewritten_pieces:
        meter.note(f"{writer.rewritten_pieces} pieces were written again: they changed after they had been saved early")
    interrupts.postpone()
    writer.sync()
    held = context.cuda.order.saved() if context.cuda is not None else []
    stored = {each.part: replace(writer.device_data(each.part, each.extents), kind=each.kind) for each in held}
    snapshot = target.commit(draft.with_device_parts(stored))
    if context.rehearsal is not None:
        context.rehearsal.hold(snapshot)
    interrupts.commit()
    if context.note is not None:
        context.note.write(snapshot, left_running=context.leave_running)
    return snapshot


def _wait_saved(context: JobDump, interrupts: Interrupts, meter: Meter) -> None:
    writer = context.writer
    meter.expect(context.cuda.order.saved_bytes if context.cuda is not None else 0)
    while not writer.wait(_WAIT_S):
        meter.set(writer.seen_bytes)
        interrupts.check()
        if context.deadline is not None and time.monotonic() > context.deadline:
            raise DeadlineExceeded(
                "timed out while device memory was saved", hint="give a longer --timeout, or a faster disk"
            )
    meter.set(writer.seen_bytes)


class SaveFirst:
    """If device memory has no other place, save it before the job runs again."""

    name = "save first"

    def __init__(self, context: OwnDump) -> None:
        self._context = context

    def describe(self) -> str:
        return "save device memory before the job runs again, where there is no room for a copy"

    def run(self, interrupts: Interrupts, meter: Meter) -> int:
        """Wait for it if necessary."""
        if self._context.cuda is None or not self._context.cuda.interposers.keeping.job_waits:
            return 0
        self._context.writer.limit_threads(None)
        with interrupts.allowed():
            _wait_saved(self._context, interrupts, meter)
        return self._context.writer.seen_bytes

    def undo(self) -> None:
        """Nothing: what was written is PrepareTarget's to discard."""


def started_cuda(context: JobDump) -> list[int]:
    """Processes of the tree that use CUDA now and are not in the gang."""
    tree = [process for each in processes.trees(context.job.root_pids) for process in each]
    cuda = context.cuda
    driver = cuda.gang.driver if cuda is not None else selection.load_driver_for(tree, OneLook())
    if driver is None or context.is_frozen:  # which cannot be queried, and cannot start anything
        return []
    known = {member.id for member in cuda.gang.members} if cuda is not None else set()
    return [member.pid for member in gangs.discover(driver, [p for p in tree if p.id not in known])]


def _draft(context: OwnDump, tree: Sequence[ProcessInfo], outside: Outside, look: OneLook) -> Manifest:
    """The manifest of the tree, which is frozen now, without its files."""
    sandbox, peers = context.sandbox, context.network.peers or {}
    draft = draft_of_gang(context, tree, context.criu.install.version_text, context.options)
    return replace(
        draft,
        processes=with_socket_options(with_scheduling(draft.processes), look),
        folders=socket_folders(tree, look, is_sandboxed=sandbox is not None),
        launch=context.launch,
        sandbox=sandbox_record(sandbox),
        open_files=outside.open_files,
        open_folders=outside.open_folders,
        shared_files=outside.shared_files,
        endpoints=outside.endpoints,
        connections=tuple(each for each in outside.connections if each not in peers),
        peers=tuple(Peer(peers[each], each) for each in outside.connections if each in peers),
        addresses=_own_addresses([*outside.endpoints, *outside.datagrams, *(each.local for each in peers)]),
        databases=outside.databases,
        locks=outside.locks,
        terminals=outside.terminals,
        kept=context.network.kept_name if outside.connections else None,
    )


def _own_addresses(ends: Sequence[Endpoint]) -> tuple[str, ...]:
    """Neither wildcards nor addresses that every machine has, or that belong to a link."""
    found = {each.address: ipaddress.ip_address(each.address) for each in ends}
    return tuple(sorted(text for text, each in found.items() if not _is_everywhere(each)))


def _is_everywhere(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    return address.is_loopback or address.is_unspecified or address.is_link_local or address.is_multicast


def draft_of_gang(
    context: JobDump, tree: Sequence[ProcessInfo], criu_version: str, criu_options: DumpOptions | None
) -> Manifest:
    """The manifest's part about the processes and their GPU state."""
    cuda = context.cuda
    members = {member.pid: member for member in cuda.gang.members} if cuda is not None else {}
    capabilities = cuda.gang.driver.capabilities() if cuda is not None and members else None
    stopped = {each.id for each in context.job.processes if each.status == "T"}
    records = [process_record(each, stopped=each.id in stopped) for each in tree]
    if cuda is not None:
        records = [_with_cuda(each, cuda, members[each.pid]) if each.pid in members else each for each in records]
    return Manifest(
        created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        root_pid=context.job.root.pid,
        other_root_pids=context.job.other_root_pids,
        was_frozen=context.is_frozen,
        processes=tuple(records),
        gpus=cuda.known_gpus if cuda is not None else (),
        cuda_version=capabilities.cuda_version if capabilities else None,
        driver_version=driver_version() if capabilities else None,
        criu_version=criu_version,
        criu_options=criu_options,
        kernel=platform.release(),
        architecture=platform.machine(),
        processor=processor.here(),
        gpucr_version=__version__,
        left_running=context.leave_running,
        shares=cuda.interposers.shares if cuda is not None else (),
        overruled=context.overruled,
        users=tuple(UserRecord(*each) for each in preflight.users_named(each.uid for each in tree).items()),
    )


def _with_cuda(record: ProcessRecord, cuda: CudaWork, member: GangMember) -> ProcessRecord:
    gpus = cuda.gpus_of(member)
    thread = cuda.checkpoint.restore_threads.get(record.pid)
    noted = suspended.recall(member.id) if member.found is CudaState.CHECKPOINTED else None
    held, has_hooks = cuda.device_bytes.get(record.pid, {}), member.id in cuda.hooks.processes
    if noted is not None:
        held, has_hooks = noted.device_bytes, noted.has_hooks
    return replace(
        record,
        found_state=member.lasting_state,
        resumes_to=noted.found if noted is not None else None,
        restore_thread=processes.innermost_thread_id(record.pid, thread) if thread is not None else None,
        device_bytes=dict(held),
        staging=cuda.staging.private.get(record.pid, ()),
        visible_gpus=tuple(gpu.uuid for gpu in gpus.visible),
        known_gpus=tuple(gpu.uuid for gpu in gpus.known),
        has_hooks=has_hooks,
    )

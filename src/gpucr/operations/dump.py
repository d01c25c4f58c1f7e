"""Dump: a whole job to a snapshot on disk."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from msgspec.structs import replace

from gpucr.criu.options import choose_dump_options
from gpucr.diagnosis import preflight
from gpucr.errors import CudaStarted, GpucrError, InvalidRequest
from gpucr.gpu_state.ways import GpuState, require_possible
from gpucr.jobs import registered, selection
from gpucr.jobs.selector import JobSelector
from gpucr.jobs.taken import taken_job
from gpucr.linux.one_look import OneLook
from gpucr.model import CHECK_KNOWN_S, GangLock
from gpucr.network.lock import IN_FLIGHT, JobNetwork
from gpucr.network.steps import IN_FLIGHT_LIMIT_S, Block, CloseConnections, Quiet, Unblock
from gpucr.operations.dump_steps import (
    CommitSnapshot,
    CriuDump,
    OwnDump,
    PrepareTarget,
    Rehearsal,
    SaveDevice,
    SaveFirst,
)
from gpucr.operations.engines import criu_for_dump, require_possible_rehearsal
from gpucr.operations.other_parts import MeetFrozen, MeetImaged, OtherParts
from gpucr.operations.plan import Plan
from gpucr.operations.requests import DumpRequest, Persist
from gpucr.snapshot.destination import DumpCounts, repairs_of
from gpucr.snapshot.device.writer import DeviceWriter
from gpucr.snapshot.job_snapshot import JobSnapshot
from gpucr.snapshot.location import Compress, Place, TargetPlace, find_target
from gpucr.snapshot.manifest import Manifest, OverruledFinding
from gpucr.undo.cancellation import Cancellation
from gpucr.undo.events import OnProgress
from gpucr.undo.operation import AS_USUAL, TO_MOVE, Operation, Terms, deadline_after, operation
from gpucr.undo.protection import Protection
from gpucr.undo.roll import Roll
from gpucr.undo.steps import Phase, Step

if TYPE_CHECKING:
    from gpucr.gpu_state.cuda_work import CudaWork
    from gpucr.operations.dump_device import DeviceOfDump
    from gpucr.operations.rehearse import RehearsalReport
    from gpucr.store.keys import Secret

KEEPER_LIMIT_S = 10.0
"""How long to wait for a sandbox to end after the dump has ended its job."""

ATTEMPTS = 3
"""How often a dump starts over because a process began to use CUDA between the checkpoint and CRIU's freeze."""


_LEAST_S = 2.0
"""How much time must be left for another attempt: otherwise what kept this one from succeeding is the better error."""


class _Attempts:
    """Whether a failed dump is tried again. The job runs as it was found between two attempts."""

    def __init__(self, deadline: float | None) -> None:
        self._count = 0
        self._end = deadline or time.monotonic() + IN_FLIGHT_LIMIT_S

    def require_another(self, error: GpucrError) -> None:
        """Raise the error if there is no use in another attempt, or no time for one."""
        self._count += 1
        if isinstance(error, CudaStarted):
            if self._count >= ATTEMPTS:
                raise error
        elif error.code != IN_FLIGHT or time.monotonic() + _LEAST_S > self._end:
            raise error


@dataclass(frozen=True)
class DumpReport:
    """What a dump did. ``root_pids``: of all trees; ``pid``: the first of them.

    ``downtime_s`` is the time from the first lock (without CUDA: from the start of CRIU's dump) until the job ran again
    or, if it was not left running, until it was gone. ``size_bytes`` is the size of the snapshot's content, without
    zeros in device memory; ``counts`` says how much of it was written. ``lock`` says how its CUDA processes, if any,
    were locked. ``rehearsal`` is None if there was none.
    """

    snapshot: JobSnapshot
    pid: int
    root_pids: tuple[int, ...]
    left_running: bool
    phases: tuple[Phase, ...] = field(repr=False)
    size_bytes: int
    downtime_s: float
    warnings: tuple[str, ...]
    counts: DumpCounts = field(repr=False)
    lock: GangLock | None = field(default=None, repr=False)
    rehearsal: RehearsalReport | None = field(default=None, repr=False)


def dump(
    pid: int | str | JobSelector,
    to: Place,
    *,
    leave_running: bool = False,
    persist: Persist = "background",
    tcp: preflight.TcpMode = "close",
    only: bool = False,
    gpu_state: GpuState = "auto",
    compress: Compress = "auto",
    encrypt: bool = False,
    trust_store: bool = False,
    rehearse: bool = False,
    pace: float | None = None,
    check_known_s: float = CHECK_KNOWN_S,
    key: Secret | None = None,
    timeout_s: float | None = None,
    force: bool = False,
    on_progress: OnProgress | None = None,
    cancel: Cancellation | None = None,
) -> DumpReport:
    """Write a whole job to ``to`` and end it, or with ``leave_running`` keep it running.

    With ``leave_running`` the job runs again as soon as its state is in host memory, while device memory is still being
    written (``persist="background"``), or only once the snapshot is on disk (``"sync"``: it does nothing that a restore
    could lose before the snapshot exists). Either way this returns, and the snapshot exists, only when everything is
    durable.

    The tree of ``pid``, of the registered job of this name, or all trees of a `JobSelector`, are locked, checkpointed,
    dumped by CRIU, and the snapshot committed; only then are the processes killed. Several trees are all stopped before
    the first is dumped. After any failure before the end, every process is as it was found and ``to`` is as it was.
    Needs root (CAP_SYS_ADMIN and CAP_SYS_PTRACE), or for the caller's own jobs root's helper (`gpucr helper
    install`). ``force`` also accepts processes that are not one job, and overrules preflight. ``gpu_state``
    insists on a way for device memory.

    ``tcp``: connections to programs outside the job are closed when it has ended, as if it had been killed; with
    ``"keep"`` their packets are dropped instead until a restore on this machine takes them up, or until the snapshot is
    removed. A connection that is just being made delays the dump: until ``timeout_s``, else up to 30 s.

    With ``rehearse`` the snapshot is restored once beside the job, before the job is ended for it (`gpucr.rehearse`).
    The job stands still meanwhile, unless it is left running. If that fails, the snapshot is discarded and the job
    keeps running.

    What an interposer takes of device memory is saved while the job still runs if it does not change, and what a store
    has is not moved at all: the job stands still for digests of all of it, and for what differs. This first pass uses
    at most the share ``pace`` of a GPU and of its threads' time (None: half of it, and all for a job that is ended; 0:
    there is none).

    ``to`` is a folder that does not exist or is empty, or a store (``STORE#NAME``; the name is optional). Data that a
    store already has is not stored again. What was last read longer ago than ``check_known_s`` is read and compared,
    and rewritten if damaged; with ``trust_store`` all of it is assumed intact. The rest is compressed as ``compress``
    says. ``key`` opens an encrypted store; with ``encrypt`` any other is refused.

    Raises ProcessNotFound, InvalidRequest, NotPermitted, SnapshotExists, Unsupported, WrongKey (before anything was
    changed);
    LockTimeout, DeadlineExceeded, Interrupted, DriverError, CriuError, JobChanged, SnapshotError, RehearsalFailed (all
    undone);
    JobDamaged (not undone).
    """  # fmt: skip
    request = DumpRequest(
        pid, to, leave_running, persist, tcp, only, gpu_state, compress, encrypt, trust_store, rehearse, key,
        pace, check_known_s,
    )  # fmt: skip
    return run_dump(request, Terms(timeout_s, force, on_progress, cancel))


def run_dump(request: DumpRequest, terms: Terms = AS_USUAL) -> DumpReport:
    """As `dump`, for this request and within these terms."""
    with operation("dump", request.job, terms) as running:
        require_possible(request.gpu_state)
        place = target_of(request)
        attempts = _Attempts(running.deadline)
        while True:
            running.interrupts.raise_at_once()
            with taken_job(running, request.job, TO_MOVE) as taken:
                prepared = prepare(taken.found, place, taken.protection, request, terms.within(running.deadline))
                preflight.require_no_blocking(prepared.findings, force=running.force)
                try:
                    return run_prepared(prepared, running, taken.roll)
                except GpucrError as error:
                    attempts.require_another(error)


def run_dump_of_part(
    request: DumpRequest, place: TargetPlace, parts: OtherParts, terms: Terms
) -> tuple[DumpReport, registered.DumpNote | None]:
    """Dump a part of a job on several nodes, and keep it running, all parts at once.

    Also returns the note in the registry, for the case that the others fail afterwards. Raises as `dump`, and what
    ``parts`` does (all undone).
    """
    with operation("dump", request.job, terms) as running:
        require_possible(request.gpu_state)
        with taken_job(running, request.job, TO_MOVE) as taken:
            within = terms.within(running.deadline)
            prepared = prepare(taken.found, place, taken.protection, request, within, parts=parts)
            preflight.require_no_blocking(prepared.findings, force=running.force)
            report = run_prepared(prepared, running, taken.roll)
            return report, prepared.context.note


def plan_dump(
    pid: int | str | JobSelector,
    to: Place,
    *,
    leave_running: bool = False,
    persist: Persist = "background",
    tcp: preflight.TcpMode = "close",
    only: bool = False,
    gpu_state: GpuState = "auto",
    compress: Compress = "auto",
    encrypt: bool = False,
    trust_store: bool = False,
    rehearse: bool = False,
    pace: float | None = None,
    check_known_s: float = CHECK_KNOWN_S,
    key: Secret | None = None,
    force: bool = False,
) -> Plan:
    """What `dump` would do with the same arguments. Changes nothing; raises like `dump` before its first step."""
    request = DumpRequest(
        pid, to, leave_running, persist, tcp, only, gpu_state, compress, encrypt, trust_store, rehearse, key,
        pace, check_known_s,
    )  # fmt: skip
    return plan_of_dump(request, force=force)


def plan_of_dump(request: DumpRequest, *, force: bool = False) -> Plan:
    """As `plan_dump`, for this request: changes nothing."""
    require_possible(request.gpu_state)
    place = target_of(request)
    with selection.claimed_job(request.job, force=force) as found:
        prepared = prepare(found, place, Protection(), request, AS_USUAL)
        plan = Plan.of(prepared.context.job.root.pid, prepared.steps, prepared.findings)
        if prepared.context.cuda is not None:
            prepared.context.cuda.close()
    return plan


def target_of(request: DumpRequest) -> TargetPlace:
    """Where the snapshot goes. Raises as `find_target`."""
    return find_target(
        request.to,
        compress=request.compress,
        encrypt=request.encrypt,
        trust_store=request.trust_store,
        key=request.key,
        check_known_s=request.check_known_s,
    )


@dataclass(frozen=True)
class FrozenParts:
    """What `gpucr.freeze` holds of a job. ``cuda``: its device memory; None if it does not use CUDA."""

    cuda: CudaWork | None
    network: JobNetwork

    @property
    def device_bytes(self) -> int:
        """How much device memory it had when it was frozen."""
        return sum(self.cuda.sizes.values()) if self.cuda is not None else 0


@dataclass(frozen=True)
class Prepared:
    """A dump that is ready to run: its steps, and what was found before any change."""

    context: OwnDump
    steps: tuple[Step, ...]
    findings: tuple[preflight.Finding, ...]
    commit: CommitSnapshot | CriuDump = field(repr=False)


def prepare(
    found: selection.FoundJob,
    place: TargetPlace,
    protection: Protection,
    request: DumpRequest,
    terms: Terms,
    frozen: FrozenParts | None = None,
    parts: OtherParts | None = None,
) -> Prepared:
    """Inspect the job, and prepare what a dump needs. Changes nothing. ``frozen``: the job is, and stays so.

    ``parts``: it is one part of a job, and is left running.
    """
    _require_possible(found, request)
    job, deadline, leave_running = found.job, deadline_after(terms.timeout_s), request.leave_running
    look = found.look if frozen is None else OneLook()  # what was seen while it ran says nothing about a frozen one
    stands_still = frozen is not None or parts is not None or found.is_frozen_for(leave_running)
    device = _device_of(found, request) if job.gang and frozen is None else None
    device_bytes = device.size_bytes if device is not None else frozen.device_bytes if frozen is not None else 0
    target = place.target(job, device_bytes)
    criu = criu_for_dump(found)
    writer = DeviceWriter(target.sink, share=request.share or 1)
    cuda, before = frozen.cuda if frozen is not None else None, list[Step]()
    if device is not None:
        cuda = device.work(protection, writer, deadline, parts.others if parts is not None else None)
        about_memory = device.findings(cuda, target)
        before = device.steps_before(cuda, writer, deadline)
    else:  # no CUDA, or its device memory is away
        needs = preflight.needs_of_dump({}, target.disk, job.pids, target.buffers_bytes, look=look)
        about_memory = selection.findings_before_freeze(job, needs)
    options = choose_dump_options(
        job.pids, leave_running=leave_running or stands_still, other_root_pids=job.other_root_pids, look=look
    )
    if request.rehearse:
        require_possible_rehearsal(shell_job=options.shell_job)
    note = registered.DumpNote(job)
    context = OwnDump(
        job=job,
        target=target,
        writer=writer,
        cuda=cuda,
        leave_running=leave_running,
        protection=protection,
        look=look,
        is_frozen=stands_still,
        deadline=deadline,
        criu=criu,
        options=options,
        network=frozen.network if frozen is not None else JobNetwork(job, protection, keeps=request.tcp == "keep"),
        launch=registered.launch_record(note.of_root) if note.of_root is not None else None,
        sandbox=found.sandbox,
        note=note,
        rehearsal=Rehearsal(terms, deadline) if request.rehearse else None,
    )
    around = _findings_around(found, context, request.tcp, was_frozen=frozen is not None)
    findings = (*about_memory, *around, *target.findings(job, device_bytes))
    overruled = (OverruledFinding(f.sentence(), f.consequence) for f in findings if f.severity == "blocking")
    context = replace(context, overruled=tuple(overruled))
    steps, commit = (
        _steps(context, before, parts, persist=request.persist) if frozen is None else _steps_of_save(context)
    )
    return Prepared(context, tuple(steps), findings, commit)


def _require_possible(found: selection.FoundJob, request: DumpRequest) -> None:
    """Raise if no dump of it is possible from here."""
    job = found.job
    found.require_without_us()
    found.require_one_namespace()
    if request.only and len(job.processes) > 1:
        raise InvalidRequest(
            f"process {job.root.pid} has {len(job.processes) - 1} descendants, and a dump cannot leave them out",
            hint="omit --only to dump the whole tree, or name the descendant itself",
        )
    preflight.require_privileges(job.root.pid)


def _device_of(found: selection.FoundJob, request: DumpRequest) -> DeviceOfDump:
    from gpucr.operations import dump_device  # jobs without CUDA start without it

    return dump_device.DeviceOfDump(found, request)


def _findings_around(
    found: selection.FoundJob, context: OwnDump, tcp: preflight.TcpMode, *, was_frozen: bool
) -> list[preflight.Finding]:
    """What speaks against it besides device memory and the place of the snapshot."""
    job, leave_running, look = found.job, context.leave_running, context.look
    shown = job.trees if leave_running and (context.is_frozen or job.gang) else ()
    return [
        *preflight.check_dump_by_user(job, context.criu.install, in_sandbox=found.sandbox is not None),
        *selection.findings_for_criu(found, tcp, leave_running=leave_running, is_frozen=was_frozen, look=look),
        *preflight.check_databases(job, leave_running=leave_running, look=look),
        *(each for tree in shown for each in preflight.check_terminal(tree)),
    ]


def _steps_of_save(context: OwnDump) -> tuple[list[Step], CommitSnapshot]:
    """Of a job that is frozen and stays so."""
    network, criu = context.network, CriuDump(context)
    save = CommitSnapshot(context, criu)
    unblock = [Unblock(network, refuses_new=True)] if network.peers is None else []
    return [PrepareTarget(context), SaveDevice(context), Block(network), criu, *unblock, save], save


def _steps(
    context: OwnDump, before: Sequence[Step], parts: OtherParts | None, *, persist: Persist
) -> tuple[list[Step], CommitSnapshot | CriuDump]:
    """Of a job that runs. ``before``: for its device memory, while all of it still runs."""
    cuda, criu, network = context.cuda, CriuDump(context), context.network
    save = CommitSnapshot(context, criu)
    begin: list[Step] = [PrepareTarget(context), *before]
    thaw: list[Step] = []
    end: list[Step] = []
    if context.is_frozen:
        from gpucr.operations import end_frozen, freeze_steps  # one tree without CUDA is dumped without these

        freeze, thaw = freeze_steps.steps_to_freeze(context.job, cuda, context.protection)
        begin += [Quiet(network, context.deadline), *freeze]
        if parts is not None:
            begin.append(MeetFrozen(parts, network, has_gpu_work=cuda is not None))
        begin.append(Block(network))
        close = CloseConnections(network, lambda: save.snapshot.where if save.snapshot is not None else "")
        end = [close, end_frozen.EndFrozenJob(context.job, context.protection)]
    elif cuda is not None:
        freeze, thaw = cuda.steps_to_freeze()
        begin += freeze
    begin.append(criu)
    if not context.leave_running:
        return ([*begin, save, *end], save) if context.is_frozen else (begin, criu)
    if parts is not None:
        begin.append(MeetImaged(parts))
    if context.is_frozen:
        begin.append(Unblock(network))
    if persist == "sync":
        return [*begin, save, *thaw], save
    return [*begin, *([SaveFirst(context)] if cuda is not None and cuda.may_wait else []), *thaw, save], save


def run_prepared(prepared: Prepared, running: Operation, roll: Roll | None) -> DumpReport:
    """Dump. ``roll`` is None for a frozen job, which the guard must not bring back if this fails."""
    context = prepared.context
    try:
        phases = running.run(prepared.steps)
    finally:
        _close(context, has_staging=roll is not None)
    sandbox = context.sandbox
    if sandbox is not None and not context.leave_running and sandbox.root == context.job.root.id:
        with contextlib.suppress(OSError):
            sandbox.wait_ended(KEEPER_LIMIT_S)  # a restore right after this would still see the job
    snapshot = prepared.commit.snapshot
    if snapshot is None:
        raise AssertionError("a dump without error has committed its snapshot")
    if context.leave_running and roll is not None:
        roll.require_gang(
            f"the snapshot {snapshot.where} is complete", hint="end what is left of the job and restore it"
        )
    return DumpReport(
        snapshot=snapshot,
        pid=context.job.root.pid,
        root_pids=context.job.root_pids,
        left_running=context.leave_running,
        phases=phases,
        size_bytes=snapshot.manifest.size_bytes,
        downtime_s=_downtime_s(prepared.steps, phases),
        warnings=_warnings(prepared, snapshot.manifest),
        counts=context.target.counts(context.writer),
        lock=context.cuda.gang.first_lock if context.cuda is not None else None,
        rehearsal=context.rehearsal.report if context.rehearsal is not None else None,
    )


def _close(context: OwnDump, *, has_staging: bool) -> None:
    """A failure here hides neither a success nor a job that could not be brought back."""
    context.writer.cancel()
    if has_staging:
        context.network.close()
    if context.cuda is not None and has_staging:
        context.cuda.close()
    with contextlib.suppress(GpucrError, OSError):
        context.target.close()


def _warnings(prepared: Prepared, manifest: Manifest) -> tuple[str, ...]:
    context, findings = prepared.context, list(prepared.findings)
    if context.network.peers is not None:  # only now is known which connections lead to other parts of the job
        findings = [each for each in findings if each.about != "connections"]
        findings += preflight.found_outside(manifest.connections, "close", left_running=context.leave_running)
    noted = (context.note.warning,) if context.note is not None and context.note.warning is not None else ()
    repaired = repairs_of(context.target, context.writer)
    hooks = context.cuda.hooks.warnings if context.cuda is not None else ()
    return (*(finding.warning() for finding in findings), *noted, *repaired, *hooks)


def _downtime_s(steps: Sequence[Step], phases: Sequence[Phase]) -> float:
    """From the first lock (without CUDA: CRIU's dump) to the last step other than a background save, and hooks."""
    names = [step.name for step in steps]
    first = next(names.index(name) for name in ("lock", "halt", "dump") if name in names)
    last = len(names) - 1 if names[-1] == "save" else len(names)
    last = names.index("after-restore") if "after-restore" in names else last
    return sum(phase.seconds for phase in phases[first:last])

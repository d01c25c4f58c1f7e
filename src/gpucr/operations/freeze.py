"""Freeze: stop a whole job for as long as the caller wants, and save, thaw or end it from there.

If jobs on several machines are one program, each machine freezes its part; they synchronize; each saves; they
synchronize again, and thaw or end. No message between them is lost, because nobody has sent one since the first
synchronization.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import TYPE_CHECKING, Literal

from gpucr.criu.recovery import EndDump
from gpucr.diagnosis import preflight
from gpucr.diagnosis.traps import findings_of_traps
from gpucr.errors import GpucrError, InvalidRequest, JobDamaged, ProcessNotFound
from gpucr.gang.threads import STOP_TIMEOUT_S
from gpucr.gpu_state.cuda_work import CudaWork, Purpose, cuda_work
from gpucr.gpu_state.held import CudaJob
from gpucr.gpu_state.source import SavedLater
from gpucr.gpu_state.ways import GpuState, may_be_interposed, require_possible
from gpucr.jobs import registered, selection
from gpucr.jobs.selector import JobSelector
from gpucr.jobs.taken import TakenJob, taken_job
from gpucr.linux import processes
from gpucr.linux.sock_diag import TcpSocket
from gpucr.model import Connection, GangLock
from gpucr.network.lock import JobNetwork
from gpucr.network.steps import Quiet, Unblock
from gpucr.operations.dump import KEEPER_LIMIT_S, DumpReport, FrozenParts, prepare, run_prepared, target_of
from gpucr.operations.end_frozen import EndFrozenJob
from gpucr.operations.freeze_steps import findings_of_spool, steps_to_freeze
from gpucr.operations.plan import Plan
from gpucr.operations.requests import DumpRequest, FreezeRequest
from gpucr.snapshot.job_snapshot import JobSnapshot
from gpucr.snapshot.location import Compress, Place, TargetPlace
from gpucr.snapshot.recovery import DiscardFolder, RemoveWorkingFolder
from gpucr.surroundings.recovery import RemoveLinkRemaps
from gpucr.undo.cancellation import Cancellation
from gpucr.undo.events import OnProgress
from gpucr.undo.operation import AS_USUAL, TO_MOVE, Terms, operation
from gpucr.undo.protection import Protection
from gpucr.undo.steps import Phase, Step

if TYPE_CHECKING:
    from gpucr.store.keys import Secret


def freeze(
    pid: int | str | JobSelector,
    *,
    gpu_state: GpuState = "auto",
    timeout_s: float | None = None,
    force: bool = False,
    on_progress: OnProgress | None = None,
    cancel: Cancellation | None = None,
) -> FrozenJob:
    """Stop a whole job, with its device memory held by gpucr, until `FrozenJob.thaw`.

    Device memory of processes with an interposer stays where it is on the GPU; that of others goes to host memory, or
    through custom storage to a disk if there is no room, and their GPUs are free. ``gpu_state`` insists on a way.

    ``pid``, or the name of a registered job, stands for its whole tree, a `JobSelector` for all of its trees; they need
    not use CUDA. ``force`` also accepts processes that are not one job, and overrules preflight. Running processes are
    stopped as by SIGSTOP, which their parent can see. When the calling process ends in any way, the job is thawed. The
    caller's own jobs need no privilege; those of others need root (CAP_SYS_ADMIN and CAP_SYS_PTRACE).

    Raises ProcessNotFound, NotPermitted, Unsupported (nothing was changed), LockTimeout, DeadlineExceeded, Interrupted,
    DriverError or JobChanged (all undone), JobDamaged (not undone).
    """
    return run_freeze(FreezeRequest(pid, gpu_state), Terms(timeout_s, force, on_progress, cancel))


def run_freeze(request: FreezeRequest, terms: Terms = AS_USUAL) -> FrozenJob:
    """As `freeze`, for this request and within these terms."""
    with operation("freeze", request.job, terms) as running, contextlib.ExitStack() as opened:
        require_possible(request.gpu_state)
        taken = opened.enter_context(taken_job(running, request.job, TO_MOVE))
        found, protection = taken.found, taken.protection
        prepared = _prepare(found, protection, request, running.deadline)
        cuda, findings = prepared.cuda, prepared.findings
        if cuda is not None:
            opened.callback(cuda.close)
        preflight.require_no_blocking(findings, force=running.force)
        kept = preflight.check_suspended(found.job)  # now: a frozen job does not answer
        network, steps, thaw = prepared.network, list(prepared.steps), list(prepared.thaw)
        opened.callback(network.close)
        phases = running.run(steps)
        warnings = tuple(finding.warning() for finding in findings)
        if cuda is not None:
            cuda.gang.lift_deadline()  # from here on a signal leads back to a running job
            warnings += tuple(cuda.hooks.warnings)
        parts = FrozenParts(cuda, network)
        return FrozenJob(_Hold(taken, parts, protection, steps, thaw, kept, opened.pop_all()), phases, warnings)


def plan_freeze(pid: int | str | JobSelector, *, gpu_state: GpuState = "auto", force: bool = False) -> Plan:
    """What `freeze` would do with the same arguments. Changes nothing; raises like `freeze` before its first step."""
    return plan_of_freeze(FreezeRequest(pid, gpu_state), force=force)


def plan_of_freeze(request: FreezeRequest, *, force: bool = False) -> Plan:
    """As `plan_freeze`, for this request: changes nothing."""
    require_possible(request.gpu_state)
    with selection.claimed_job(request.job, force=force) as found:
        prepared = _prepare(found, Protection(), request, None)
        plan = Plan.of(found.job.root.pid, prepared.steps, prepared.findings)
        prepared.network.close()
        if prepared.cuda is not None:
            prepared.cuda.close()
        return plan


@dataclass(frozen=True)
class _Prepared:
    """A freeze that is ready to run, and what was found before any change."""

    cuda: CudaWork | None
    network: JobNetwork
    steps: tuple[Step, ...]
    thaw: tuple[Step, ...]
    findings: tuple[preflight.Finding, ...]


def _prepare(
    found: selection.FoundJob, protection: Protection, request: FreezeRequest, deadline: float | None
) -> _Prepared:
    found.require_without_us()
    job = found.job
    seen = CudaJob.seen(job, found.require_cuda()) if job.gang else None
    cuda: CudaWork | None = None
    if seen is not None:
        purpose = Purpose(deadline=deadline, gpu_state=request.gpu_state, others=request.others)
        cuda = cuda_work(seen, protection, SavedLater(), purpose)

    def needs() -> list[preflight.MemoryNeed]:
        held = seen.held if seen is not None else {}
        return preflight.needs_of_suspend(held, in_files=True, on_gpu=cuda.on_gpu if cuda is not None else {})

    uses, may_share = seen.uses if seen is not None else (), may_be_interposed(request.gpu_state)

    findings = (
        *(findings_of_spool(cuda, needs()) if cuda is not None else ()),
        *selection.findings_before_freeze(job, needs()),
        *findings_of_traps(job, found.driver, uses, may_share=may_share),
        *preflight.check_tracers(job),
        *preflight.check_ptrace(member.pid for member in job.gang),
        *(preflight.check_handed_over(cuda.custom.pids(job.gang)) if cuda is not None else ()),
    )
    network = JobNetwork(job, protection)
    steps, thaw = steps_to_freeze(job, cuda, protection)
    first = [cuda.allocate(leave_running=True)] if cuda is not None else []
    return _Prepared(cuda, network, (*first, Quiet(network, deadline), *steps), (Unblock(network), *thaw), findings)


@dataclass(frozen=True)
class _Hold:
    """What holds a frozen job. ``opened`` is closed at the end. ``kept``: what CRIU cannot dump."""

    taken: TakenJob
    parts: FrozenParts
    protection: Protection
    frozen_by: list[Step]
    thaw: list[Step]
    kept: list[preflight.Finding]
    opened: contextlib.ExitStack = field(repr=False)


_HELD: dict[FrozenJob, int] = {}
"""Owners of frozen jobs. A job that its program forgets stays frozen, and guarded, until the program ends."""


@atexit.register
def _thaw_remaining() -> None:
    for job in [job for job, pid in _HELD.items() if pid == os.getpid()]:  # not a fork, which ends before its parent
        job.thaw()


class FrozenJob:
    """A frozen job. Made by `freeze`; a context manager that thaws a job still frozen at its end.

    Also if it ends by an exception. If this process dies, its guard thaws the job. Each method raises InvalidRequest
    after the job was thawed or ended. Not thread-safe.

    ``pid`` is the first tree's root, ``size_bytes`` the device memory outside the job now; ``phases``, ``warnings`` and
    ``lock`` are the freeze's.
    """

    def __init__(self, hold: _Hold, phases: tuple[Phase, ...], warnings: tuple[str, ...]) -> None:
        self._hold = hold
        self._state: Literal["frozen", "thawed", "ended", "lost"] = "frozen"
        self._since = time.monotonic()
        self._saved: JobSnapshot | None = None
        self._note: registered.DumpNote | None = None
        _HELD[self] = os.getpid()
        self.phases = phases
        self.warnings = warnings
        self.pid: int = hold.taken.found.job.root.pid
        self.size_bytes: int = hold.parts.cuda.away_bytes if hold.parts.cuda is not None else 0
        self.lock: GangLock | None = hold.parts.cuda.gang.first_lock if hold.parts.cuda is not None else None

    @property
    def is_frozen(self) -> bool:
        """Whether it has been neither thawed nor ended."""
        return self._state == "frozen"

    @property
    def seconds(self) -> float:
        """How long it has been frozen."""
        return time.monotonic() - self._since

    def save(
        self,
        to: Place,
        *,
        compress: Compress = "auto",
        encrypt: bool = False,
        trust_store: bool = False,
        key: Secret | None = None,
        timeout_s: float | None = None,
        force: bool = False,
        on_progress: OnProgress | None = None,
        cancel: Cancellation | None = None,
    ) -> DumpReport:
        """Write a snapshot to ``to``, as `gpucr.dump` with ``leave_running`` does; the job stays frozen.

        It may be saved again, to other places: all these snapshots are of the same moment. The report's ``downtime_s``
        is the time that CRIU took. On failure the job is frozen as before, and ``to`` is as it was. Raises as
        `gpucr.dump`.
        """
        self._require_frozen("saved")
        request = DumpRequest(
            self.pid, to, True, "sync", compress=compress, encrypt=encrypt, trust_store=trust_store, key=key
        )
        return self._save(request, target_of(request), Terms(timeout_s, force, on_progress, cancel))

    def _save(self, request: DumpRequest, place: TargetPlace, terms: Terms) -> DumpReport:
        hold = self._require_frozen("saved")
        found = hold.taken.found
        with operation("save", self.pid, terms) as running:
            running.require_descriptors(len(found.job.processes), len(found.job.gang), TO_MOVE)
            try:
                prepared = prepare(
                    found,
                    place,
                    hold.protection,
                    request,
                    terms.within(running.deadline),
                    hold.parts,
                )
                preflight.require_no_blocking([*hold.kept, *prepared.findings], force=running.force)
                report = run_prepared(prepared, running, None)
            finally:
                # A thread that CRIU released may still be returning to the stop.
                with contextlib.suppress(ProcessNotFound):
                    trees = processes.trees(found.job.root_pids)
                    processes.wait_for_stop((each.pid for tree in trees for each in tree), STOP_TIMEOUT_S)
                hold.protection.withdraw(EndDump, DiscardFolder, RemoveWorkingFolder, RemoveLinkRemaps)
        self._saved, self._note = report.snapshot, prepared.context.note
        return report

    def thaw(self, *, on_progress: OnProgress | None = None) -> tuple[Phase, ...]:
        """Let the job run again, as it was found. FROZEN → RUNNING. Uninterruptible. Returns its phases.

        Raises DriverError and the like if a step failed but the job runs; JobDamaged if it does not.
        """
        hold = self._require_frozen("thawed")
        with operation("thaw", self.pid, Terms(on_progress=on_progress), is_undo=True) as running:
            # Not earlier: a signal until then leaves the job frozen, with its guard.
            self._lose()
            hold.protection.needs_no_guard()
            with hold.opened:
                try:
                    running.works_on(hold.taken.roll, hold.protection)
                    phases = running.run(hold.thaw, begun_before=hold.frozen_by)
                except JobDamaged:
                    raise
                except BaseException:
                    self._state = "thawed"
                    raise
                self._state = "thawed"
                hold.taken.roll.require_gang("the rest of the job runs")
        return phases

    def end(self) -> None:
        """Kill all processes of the job. FROZEN → gone; only a snapshot brings it back. Uninterruptible.

        Raises JobDamaged if one does not end: it hangs in the kernel.
        """
        hold = self._require_frozen("ended")
        found = hold.taken.found
        with operation("end", self.pid, is_undo=True) as running, hold.opened:
            self._lose()
            if self._saved is not None:
                registered.DumpNote(found.job).write(self._saved, left_running=False)
            hold.protection.needs_no_guard()
            with contextlib.suppress(GpucrError):  # then the other ends notice later
                hold.parts.network.settle("")
            running.works_on(None, hold.protection)
            running.run([EndFrozenJob(found.job, hold.protection)])
            self._state = "ended"
            if found.sandbox is not None and found.sandbox.root == found.job.root.id:
                with contextlib.suppress(OSError):
                    found.sandbox.wait_ended(KEEPER_LIMIT_S)  # a restore right after this would still see the job

    def __enter__(self) -> FrozenJob:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.is_frozen:
            self.thaw()

    def _lose(self) -> None:
        """The job is in transition during the block."""
        self._state = "lost"
        del _HELD[self]

    def _require_frozen(self, what: str) -> _Hold:
        if self._state == "frozen":
            return self._hold
        became = "could not be thawed or ended" if self._state == "lost" else f"was {self._state}"
        raise InvalidRequest(
            f"the job {self.pid} cannot be {what}: it {became} before",
            hint="freeze it again" if self._state == "thawed" else "see `gpucr ps`",
        )


def save_frozen(job: FrozenJob, request: DumpRequest, place: TargetPlace, terms: Terms) -> DumpReport:
    """`FrozenJob.save` to the opened destination of a request."""
    return job._save(replace(request, leave_running=True), place, terms)  # noqa: SLF001


def block_connections(job: FrozenJob) -> tuple[tuple[TcpSocket, ...], tuple[Connection, ...]]:
    """From now on no packet of a frozen job's connections arrives or leaves.

    Returns those that lead out of it, and those of its machine that were closed with data under way.

    Raises JobChanged if a connection waits to be accepted, or urgent data to be read; Unsupported, BrokenInstall.
    """
    network = job._hold.parts.network  # noqa: SLF001
    network.block()
    return network.leading_out(), network.being_emptied()


def keep_blocked(job: FrozenJob, peers: Mapping[Connection, int]) -> None:
    """These connections lead to parts of the job on other nodes, given by number: blocked until it is thawed or ended.

    They are saved as such, and end without a word to the other parts. Raises Unsupported if nothing can block them.
    """
    job._hold.parts.network.keep_blocked(peers)  # noqa: SLF001


def forget_saved(job: FrozenJob) -> None:
    """Forget the last snapshot in the registry; its owner removes it."""
    if job._note is not None:  # noqa: SLF001
        job._note.withdraw()  # noqa: SLF001

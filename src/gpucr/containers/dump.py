"""The GPU part of a dump by a container runtime: the runtime's CRIU calls gpucr at its hooks.

The steps are those of `gpucr dump`; only the middle one waits for a CRIU started by others. CRIU tells its action
scripts neither whether the container will be left running nor whether the dump has finally succeeded. So device memory
is on disk before CRIU may continue, and the container's fate is checked when CRIU has ended.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from msgspec.structs import replace

from gpucr.criu import abandoned
from gpucr.criu.progress import Progress
from gpucr.criu.recovery import EndDump
from gpucr.diagnosis import preflight
from gpucr.diagnosis.preflight.support import machine as facts
from gpucr.diagnosis.traps import findings_of_traps
from gpucr.errors import CriuError, CudaStarted, GpucrError, JobChanged, SnapshotExists
from gpucr.gang import uses_libcuda
from gpucr.gpu_state.cuda_work import CudaWork, Purpose, cuda_work
from gpucr.gpu_state.held import CudaJob
from gpucr.jobs import selection
from gpucr.jobs.taken import taken_job
from gpucr.linux import cgroups, processes
from gpucr.linux.one_look import OneLook
from gpucr.linux.terminal import makes_terminals
from gpucr.model import ProcessId
from gpucr.network.of_criu import AfterCriu
from gpucr.operations.dump_steps import (
    JobDump,
    PrepareTarget,
    commit,
    draft_of_gang,
    expect_criu,
    started_cuda,
)
from gpucr.snapshot.destination import FolderTarget
from gpucr.snapshot.device.writer import DeviceWriter
from gpucr.snapshot.folder import GPU_PART_NAME, UnfinishedSnapshot
from gpucr.snapshot.gpu_part import GpuPart
from gpucr.snapshot.manifest import Manifest
from gpucr.undo.interrupts import Interrupts
from gpucr.undo.operation import TO_MOVE, operation
from gpucr.undo.protection import Protection
from gpucr.undo.steps import AroundStep, Meter, Step

UNKNOWN = "unknown"
"""The version of a CRIU started by the runtime."""

_LOOK_EVERY_S = 0.1
_KILLED_LIMIT_S = 10.0


class RuntimeHooks(Protocol):
    """The hooks of one dump, as CRIU calls them."""

    @property
    def criu(self) -> ProcessId:
        """The CRIU that calls them."""
        ...

    def answer(self, error: BaseException | None) -> bool:
        """Let the waiting hook succeed, or fail for this reason. False: none waits."""
        ...

    def say(self, line: str) -> None:
        """A line for CRIU's log, written by the waiting hook when it is answered."""
        ...

    def wait_for_call(self, timeout_s: float) -> bool:
        """Wait for the next hook, post-dump. False: it has not come yet."""
        ...


@contextlib.contextmanager
def thawed(root_pid: int) -> Iterator[None]:
    """Make the tree of ``root_pid`` queryable and stoppable during the block. FROZEN → FROZEN.

    containerd pauses a container before a dump, and resumes it afterwards. Does nothing if no process has libcuda
    loaded. Raises Unsupported if a freezer holds it anyway.
    """
    cgroup = cgroups.frozen_by(root_pid)
    if cgroup is None or not any(uses_libcuda(process.pid) for process in processes.tree(root_pid)):
        yield
        return
    preflight.require_no_blocking(_check_freezer(root_pid), force=None)
    cgroups.thaw(cgroup)
    try:
        yield
    finally:
        with contextlib.suppress(FileNotFoundError):  # the container has ended
            cgroups.freeze(cgroup)


def uses_cuda(root_pid: int) -> bool:
    """Whether any process in the tree of ``root_pid`` uses CUDA. Changes nothing.

    Raises as `selection.find_job`, and Unsupported if one uses CUDA in the container that is not in the tree.
    """
    found = selection.find_job(root_pid)
    preflight.require_no_blocking(selection.findings_left_out(found, in_container=True), force=None)
    return bool(found.job.gang)


def findings_of_processes(found: selection.FoundJob) -> list[preflight.Finding]:
    """What speaks against a dump of a container by its runtime, in its processes.

    What they share with others is a warning: their runtime connects some of it again.
    """
    job = found.job
    shared = preflight.check_ties(job, found.instead_of_without, found.one_tree_instead)
    return [
        *preflight.check_tracers(job),
        *preflight.check_session(job),
        *preflight.check_namespaces(job),
        *selection.findings_left_out(found, in_container=True),
        *(replace(each, severity="warning") for each in shared),
        *_check_freezer(job.root.pid),
    ]


def plan_for_runtime(
    found: selection.FoundJob, disk: Path, *, leave_running: bool
) -> tuple[list[str], list[str], list[preflight.Finding]]:
    """The steps of `dump_for_runtime` before and after CRIU's, for a job that uses CUDA, and what it would find.

    Changes nothing. ``disk``: a folder where the images will be.
    """
    _, cuda, findings = _prepare(found, disk, Protection())
    try:
        freeze, thaw = cuda.steps_to_freeze()
        before: list[Step] = [cuda.allocate(leave_running=True), *freeze]
        after = thaw if leave_running else []
        return [step.describe() for step in before], [step.describe() for step in after], findings
    finally:
        cuda.close()


def clear_target(images: Path, *, may_replace: bool) -> None:
    """Remove the partial GPU part of an interrupted dump from this folder of images.

    ``may_replace``: the runtime always writes there, and its new checkpoint replaces the old one. Otherwise raises
    SnapshotExists if there is a complete one: beside new images it would be mistaken for theirs.
    """
    part = GpuPart(images)
    part.recover()
    if part.is_complete and may_replace and not part.is_scattered:
        return
    if part.is_complete or part.is_scattered:
        raise SnapshotExists(
            f"{images} has the GPU part of another checkpoint",
            path=str(images),
            hint="checkpoint into a folder of its own, or remove what is there",
        )
    UnfinishedSnapshot.left_behind(part.path, None).discard()


def dump_for_runtime(root_pid: int, images: Path, hooks: RuntimeHooks, *, claim: int | None = None) -> bool:
    """Take the GPU state of the tree of ``root_pid`` through a runtime's dump into the folder ``images``.

    Called in CRIU's pre-dump hook: RUNNING → CHECKPOINTED, stopped, device memory taken out; then the hook is answered
    and CRIU dumps. At the post-dump hook the GPU part is committed. When CRIU has ended, the processes are gone, or
    return to the state in which they were found; returns whether they do. ``claim`` is a descriptor of
    `gpu_part.claimed`, which is closed when the part is complete. Needs root.

    Any failure leads back to the state in which the processes were found; a waiting hook is answered after that (in
    post-dump: before, since CRIU holds the processes until then). Raises as `gpucr.dump`.
    """
    part = GpuPart(images, claim)
    with operation("dump", root_pid) as running, contextlib.ExitStack() as opened:
        opened.enter_context(part.older_aside())
        taken = opened.enter_context(taken_job(running, root_pid, TO_MOVE))
        if not taken.found.job.gang:
            raise JobChanged(f"no process below {root_pid} uses CUDA any more", pids=[root_pid])
        context, cuda, findings = _prepare(taken.found, images, taken.protection)
        preflight.require_no_blocking(findings, force=None)
        for finding in findings:
            hooks.say(f"warning: {finding.warning()}")
        network = opened.enter_context(AfterCriu(taken.found.job, str(images.absolute())))
        run = RuntimeDump(context, hooks, part, network)
        try:
            running.run(_steps(context, cuda, run))
        finally:
            context.writer.cancel()
            cuda.close()
            context.target.close()
        if run.left_running:
            taken.roll.require_gang(f"{context.target.where} is complete")
        return run.left_running


def _prepare(
    found: selection.FoundJob, images: Path, protection: Protection
) -> tuple[JobDump, CudaWork, list[preflight.Finding]]:
    job = found.job
    preflight.require_privileges(job.root.pid)
    seen = CudaJob.seen(job, found.require_cuda())
    target = FolderTarget(images / GPU_PART_NAME, with_images=False)
    writer = DeviceWriter(target.sink)
    cuda = cuda_work(seen, protection, writer, Purpose())
    findings = [
        *selection.findings_before_freeze(
            job, preflight.needs_of_dump(seen.held, images, job.pids, target.buffers_bytes, cuda.on_gpu)
        ),
        *findings_of_traps(job, seen.driver, seen.uses),
        *preflight.check_suspended(job),
        *preflight.check_handed_over(cuda.custom.pids(job.gang)),
        *findings_of_processes(found),
        *target.findings(job, seen.held_bytes),
    ]
    # Assume that it is left running: then nothing that the container may still need is discarded early.
    return (
        JobDump(
            job=job, target=target, writer=writer, cuda=cuda, leave_running=True, protection=protection, look=OneLook()
        ),
        cuda,
        findings,
    )


def _check_freezer(root_pid: int) -> list[preflight.Finding]:
    """The runtime's CRIU freezes the container by its cgroup, with the processes stopped already.

    Seen with Linux 6.18, runc 1.1 and CRIU 4.2.1: with version 1's freezer, CRIU's ptrace(PTRACE_SEIZE) of a process
    that was stopped before it was frozen does not return, and nothing but a thaw ends it. Version 2 does not do that.
    """
    path = cgroups.legacy_freezer(root_pid)
    if path is None:
        return []
    return [facts.CGROUP_V1.seen(f"its process {root_pid} is in {path}", root_pid)]


def _steps(context: JobDump, cuda: CudaWork, run: RuntimeDump) -> list[Step]:
    freeze, thaw = cuda.steps_to_freeze()
    return [
        PrepareTarget(context),
        cuda.allocate(leave_running=True),
        *freeze,
        run,
        *(_IfLeftRunning(step, run) for step in thaw),
    ]


class RuntimeDump:
    """The runtime's CRIU writes the process tree; the GPU part is committed before CRIU releases it."""

    name = "dump"

    def __init__(self, context: JobDump, hooks: RuntimeHooks, part: GpuPart, network: AfterCriu) -> None:
        self._context = context
        self._network = network
        self._hooks = hooks
        self._part = part
        self.left_running = False

    def describe(self) -> str:
        return f"wait for the runtime's CRIU (process {self._hooks.criu.pid}), commit {self._context.target.where}"

    def run(self, interrupts: Interrupts, meter: Meter) -> int:
        """Answer pre-dump, commit at post-dump, and wait until CRIU has ended. Returns the bytes that were saved."""
        self._save_before_terminals(interrupts)
        self._part.begin()
        expect_criu(self._context, self._hooks.criu)
        self._hooks.answer(None)
        try:
            self._wait_for_post_dump(interrupts)
            size_bytes = self._commit(interrupts, meter)
        except BaseException as error:
            # A failing hook makes CRIU undo and end. If none waits, tell it by other means.
            if not (self._hooks.answer(error) and abandoned.wait(self._hooks.criu)):
                abandoned.end_dump(self._hooks.criu)
            self._network.release()
            self._wait_until_thawed()
            raise
        self._hooks.answer(None)
        while not abandoned.wait(self._hooks.criu, _LOOK_EVERY_S):  # it ends or releases the tree
            if self._hooks.wait_for_call(0):
                self._hooks.answer(None)  # the script is configured twice
        self.left_running = self._is_left()
        self._network.release()
        self._context.protection.withdraw(EndDump)
        self._wait_until_thawed()
        return size_bytes

    def undo(self) -> None:
        """Nothing: CRIU has ended, and released the tree if its dump failed; PrepareTarget removes the folder."""

    def _save_before_terminals(self, interrupts: Interrupts) -> None:
        """Where CRIU is to end a job that has made terminals, leave no long work for its last hook.

        If that fails or is called off, CRIU has emptied the terminals and made them non-blocking for good
        (`FoundJob.is_frozen_for`). Whether CRIU is to end the job is up to the runtime.
        """
        if not any(map(makes_terminals, self._context.job.pids)) or _asks_to_leave_running(self._hooks.criu):
            return
        self._context.writer.limit_threads(None)
        while not self._context.writer.wait(_LOOK_EVERY_S):
            interrupts.check()
            if abandoned.is_told_to_end(self._hooks.criu):
                raise self._failure()

    def _wait_for_post_dump(self, interrupts: Interrupts) -> None:
        progress = Progress(self._hooks.criu, runs_scripts=True)
        while not self._hooks.wait_for_call(_LOOK_EVERY_S):
            interrupts.check()
            if progress.has_stalled():
                raise progress.error("dump")
            if not processes.is_alive(self._hooks.criu):
                self._wait_until_thawed()
                raise self._failure()

    def _commit(self, interrupts: Interrupts, meter: Meter) -> int:
        context = self._context
        tree = processes.tree(context.job.root.pid)
        draft: Manifest = draft_of_gang(context, tree, UNKNOWN, None)
        left = _asks_to_leave_running(self._hooks.criu)
        self._part.sync_images()
        snapshot = commit(context, replace(draft, left_running=left), interrupts, meter)
        self._part.finish()
        return snapshot.manifest.size_bytes

    def _wait_until_thawed(self) -> None:
        """CRIU leaves a paused container paused. Whoever paused it will resume it, however late."""
        root = self._context.job.root.id
        while processes.is_alive(root) and cgroups.frozen_by(root.pid) is not None:
            time.sleep(_LOOK_EVERY_S)

    def _failure(self) -> GpucrError:
        gone = [p.pid for p in self._context.job.processes if not processes.is_alive(p.id)]
        if gone:
            return JobChanged(f"process {gone[0]} ended while the container was dumped", pids=gone)
        started = started_cuda(self._context)
        if started:
            return CudaStarted(f"process {started[0]} began to use CUDA while the container was dumped", pids=started)
        return CriuError(
            "the runtime's CRIU ended before it had dumped the container",
            phase="dump",
            hint="CRIU's log, dump.log in the runtime's work folder, has the reason",
        )

    def _is_left(self) -> bool:
        """Whether CRIU has released the tree rather than killed it."""
        known = [process.id for process in self._context.job.processes]
        if processes.keeps_running(self._context.job.root.id):
            return True
        processes.wait_for_killed(known, _KILLED_LIMIT_S)
        return False


class _IfLeftRunning(AroundStep):
    """A step for processes that CRIU has not ended."""

    def __init__(self, step: Step, dumped: RuntimeDump) -> None:
        super().__init__(step)
        self._dumped = dumped

    def run(self, interrupts: Interrupts, meter: Meter) -> int:
        """The step's own, if there are processes."""
        return super().run(interrupts, meter) if self._dumped.left_running else 0

    def undo(self) -> None:
        """The step's own, if there are processes."""
        if self._dumped.left_running:
            super().undo()


def _asks_to_leave_running(criu: ProcessId) -> bool:
    """Read from the command lines of CRIU and of its runtime: CRIU itself does not say."""
    stat = processes.read_stat(criu.pid)
    pids = [criu.pid] if stat is None else [criu.pid, stat.parent_pid]
    for pid in pids:
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if b"--leave-running" in words or b"-R" in words:
                return True
    return False

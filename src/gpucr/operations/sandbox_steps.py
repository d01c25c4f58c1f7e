"""The steps of a restore into a sandbox, and their plan."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from msgspec import Struct

from gpucr.criu.engine import Criu
from gpucr.criu.install import CriuInstall
from gpucr.diagnosis import preflight
from gpucr.diagnosis.preflight.support import outside as facts
from gpucr.errors import Busy, InvalidRequest, JobDamaged, ProcessNotFound, SnapshotDamaged, Unsupported
from gpucr.jobs import sandbox
from gpucr.jobs.recovery import EndSandbox
from gpucr.jobs.registered import RestoredName
from gpucr.jobs.sandbox import BareKeeper, EmptySandbox, HelpedKeepers, Network, known_keepers
from gpucr.linux import processes
from gpucr.linux.namespaces import last_pid_clear_of
from gpucr.linux.trusted_paths import open_file
from gpucr.model import ProcessId
from gpucr.operations.engines import helper_criu
from gpucr.operations.restored_tree import RestoredTree
from gpucr.snapshot.job_snapshot import JobSnapshot
from gpucr.snapshot.manifest import Manifest
from gpucr.snapshot.origin import RestoreSource, images_read_from
from gpucr.surroundings.site import RestoreSite
from gpucr.undo.interrupts import Interrupts
from gpucr.undo.protection import Protection
from gpucr.undo.steps import Meter, Result

if TYPE_CHECKING:
    from gpucr.linux.private_view import View

LEFTOVER_LIMIT_S = 5.0
"""How long a restore waits for a killed restore's remains to end."""

_CORE_IMAGE = re.compile(r"core-(\d+)\.img")


class SandboxPlan(Struct, frozen=True):
    """The sandbox for a restored job.

    ``old_log``: its former output file (None: unknown); ``log_path``: the new one. ``alone``: there must be no other
    sandbox with this job.
    """

    network: Network
    lineage: str
    old_log: str | None
    log_path: str | None
    status_path: str | None
    alone: bool

    @property
    def outputs(self) -> dict[Path, Path]:
        """Files that replace others in the restored job."""
        if self.old_log is None or self.log_path is None or self.old_log == self.log_path:
            return {}
        return {Path(self.old_log): Path(self.log_path)}


def plan_sandbox(
    snapshot: JobSnapshot, name: RestoredName | None, *, isolate: bool, clone: bool, shell_job: bool
) -> SandboxPlan | None:
    """The sandbox for this restore; None if the job had none and gets none.

    Raises InvalidRequest if impossible: for example, the job runs already and this is not a clone.
    """
    manifest = snapshot.manifest
    if manifest.sandbox is None and not isolate:
        if clone:
            raise InvalidRequest(
                "the job of this snapshot was in no sandbox, so a clone would need its pids and ports",
                hint="add --isolate, which puts the clone into one; as root, `gpucr run` starts jobs in one",
            )
        return None
    if shell_job:
        raise InvalidRequest(
            "the job of this snapshot has a terminal, which no sandbox can give it",
            hint="restore it without --isolate; `gpucr run` starts jobs without a terminal",
        )
    if clone and name is None:
        raise InvalidRequest(
            "the job of this snapshot was not started with `gpucr run`: a clone of it has no log of its own",
            hint="restore it without --clone when the job and all copies of it have ended",
        )
    lineage = manifest.sandbox.lineage if manifest.sandbox is not None else _lineage_of(snapshot)
    if not clone:
        _require_alone(manifest, lineage)
    old_log = _old_log(manifest)
    return SandboxPlan(
        network="host" if manifest.sandbox is not None and manifest.sandbox.network == "host" else "own",
        lineage=lineage,
        old_log=old_log,
        log_path=str(name.log_path) if name is not None else old_log,
        status_path=str(name.status_path) if name is not None else None,
        alone=not clone,
    )


def _old_log(manifest: Manifest) -> str | None:
    if manifest.sandbox is not None:
        return manifest.sandbox.log_path
    return manifest.launch.log_path if manifest.launch is not None else None


def _lineage_of(snapshot: JobSnapshot) -> str:
    """The lineage for a job that had no sandbox: the same for every restore of this snapshot into one."""
    name = f"{snapshot.where} {snapshot.manifest.created}"
    return hashlib.sha256(os.fsencode(name)).hexdigest()[:32]


def _require_alone(manifest: Manifest, lineage: str) -> None:
    running = [copy.root.pid for copy in sandbox.copies(lineage) if copy.root is not None]
    if manifest.sandbox is None and _is_original(manifest):
        running.append(manifest.root_pid)
    if running:
        raise InvalidRequest(
            f"the job of this snapshot, or a copy of it, runs: process {', '.join(map(str, running))}",
            hint="--clone restores one more copy beside it; or end it first",
            code="GPUCR-JOB-RUNS",
        )


def _require_first(lineage: str, own: ProcessId) -> None:
    """Raise Unsupported if another restore of the job is in progress: its sandbox exists.

    Call it when our own exists too: so of two concurrent restores at least one sees the other.
    """
    for other in sandbox.copies(lineage, also_awaited=True):
        if other.keeper != own and (other.root is not None or not other.wait_ended(LEFTOVER_LIMIT_S)):
            raise Busy(
                "another gpucr restores the job of this snapshot, or has just restored it",
                hint="wait until it has finished; --clone restores one more copy beside it",
            )


def _is_original(manifest: Manifest) -> bool:
    """Whether the process with the pid of an unsandboxed job looks like that job."""
    record = next(process for process in manifest.processes if process.pid == manifest.root_pid)
    try:
        now = processes.describe(record.pid)
    except ProcessNotFound:
        return False
    return (now.name, now.command_line, now.ns_pids) == (record.name, record.command_line, record.ns_pids)


def check_clone(manifest: Manifest) -> list[preflight.Finding]:
    """What a copy undesirably shares with its original."""
    named = [folder.path for folder in manifest.folders if folder.has_names]
    return [facts.CLONE_SOCKETS.seen(f"in {', '.join(named)}")] if named else []


class StartSandbox:
    """Make the sandbox that CRIU will fill."""

    name = "sandbox"

    def __init__(
        self,
        install: CriuInstall,
        source: RestoreSource,
        plan: SandboxPlan,
        protection: Protection,
        *,
        ends_with_caller: bool,
        view: Callable[[], View] | None = None,
    ) -> None:
        """``view``: called when the snapshot's images are there (`sandbox.empty`)."""
        self._install = install
        self._ends_with_caller = ends_with_caller
        self._source = source
        self._plan = plan
        self._protection = protection
        self._view = view
        self._made: EmptySandbox | None = None
        self.site: Result[RestoreSite] = Result()

    def describe(self) -> str:
        network = "" if self._plan.network == "host" else " and network"
        asked = "ask the privileged helper to " if self._install.is_helpers else ""
        return f"{asked}make pid, mount, IPC{network} namespaces for the job"

    def run(self, interrupts: Interrupts, meter: Meter) -> int:
        plan = self._plan
        for path in plan.outputs.values():
            _make_log(path)
        made = self._made = sandbox.empty(
            log_path=plan.log_path,
            status_path=plan.status_path,
            lineage=plan.lineage,
            last_pid=_last_pid(self._source),
            network=plan.network,
            terminals=bool(self._source.snapshot.manifest.terminals),
            view=self._view() if self._view is not None else None,
            helper=self._install if self._install.is_helpers else None,
            ends_with_caller=self._ends_with_caller,
        )
        found = made.sandbox
        if plan.alone:
            _require_first(plan.lineage, found.keeper)
        self._protection.protect(EndSandbox(found.keeper))
        shared, helper = found.shared_memory, None
        if self._install.is_helpers:
            helper = helper_criu()(self._install, found.pids)
        criu = helper or Criu(self._install, found.pids)
        ends = self._ends_with_caller
        self.site.set(RestoreSite(made, criu, True, plan.network, shared, plan.outputs, helper, ends))
        return 0

    def undo(self) -> None:
        if self._made is None:
            return
        keeper = self._made.sandbox.keeper
        if not self._made.end():
            raise JobDamaged(
                f"the sandbox of process {keeper.pid} does not end", failures=[f"process {keeper.pid} does not end"]
            )
        known_keepers.forget(keeper)


class StartKeeper:
    """Start the keeper of a job that is in no sandbox: CRIU makes the job below it.

    A context manager: the keeper's Python starts when the block begins, while the snapshot is verified, and the step
    waits for it. What no step came to wait for ends with the block.
    """

    name = "keeper"

    def __init__(
        self, install: CriuInstall, name: RestoredName | None, *, own_session: bool, ends_with_caller: bool
    ) -> None:
        self._install = install
        self._ends_with_caller = ends_with_caller
        self._name = name
        self._own_session = own_session
        self._begun: BareKeeper | None = None
        self._made: BareKeeper | HelpedKeepers | None = None
        self.site: Result[RestoreSite] = Result()

    def describe(self) -> str:
        if self._install.is_helpers:
            return "ask the privileged helper to restore the job, and to become its parent"
        return "start the process that will be the job's parent"

    def __enter__(self) -> StartKeeper:
        """Raises BrokenInstall."""
        log_path, status_path = self._paths()
        if not self._install.is_helpers:
            self._begun = sandbox.bare_keeper(
                log_path=log_path,
                status_path=status_path,
                own_session=self._own_session,
                ends_with_caller=self._ends_with_caller,
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._begun is not None and not self._begun.is_ready:
            self._begun.end()

    def _paths(self) -> tuple[str | None, str | None]:
        """The paths of the job's log and status."""
        name = self._name
        return (str(name.log_path), str(name.status_path)) if name is not None else (None, None)

    def run(self, interrupts: Interrupts, meter: Meter) -> int:
        """Wait until it is ready, and have CRIU started below it."""
        if self._install.is_helpers:
            log_path, status_path = self._paths()
            helped = self._made = sandbox.helped_keepers(
                log_path=log_path, status_path=status_path, ends_with_caller=self._ends_with_caller
            )
            criu = helper_criu()(self._install, keepers=helped)
            self.site.set(
                RestoreSite(helped, criu, False, "host", helper=criu, ends_with_caller=self._ends_with_caller)
            )
            return 0
        if (made := self._begun) is None:
            raise AssertionError("the keeper was not begun")
        made.wait_ready()
        self._made = made
        below = Criu(self._install, parent=made)
        self.site.set(RestoreSite(made, below, False, "host", ends_with_caller=self._ends_with_caller))
        return 0

    def undo(self) -> None:
        """End it and everything below it."""
        if self._made is not None and not self._made.end():
            pid = self._made.id.pid
            raise JobDamaged(
                f"what is below process {pid} does not end",
                failures=[f"process {pid} or a process below it does not end"],
            )


class KeepJob:
    """Give the job its name, and hand it over to its keeper: it no longer depends on gpucr.

    In this order, so that no job runs without a record.
    """

    name = "keep"

    def __init__(
        self,
        site: Result[RestoreSite],
        tree: Result[RestoredTree],
        manifest: Manifest,
        name: RestoredName | None,
        protection: Protection,
    ) -> None:
        self._site = site
        self._tree = tree
        self._manifest = manifest
        self._name = name
        self._protection = protection
        self.warnings: tuple[str, ...] = ()

    def describe(self) -> str:
        return "hand the job over to its keeper"

    def run(self, interrupts: Interrupts, meter: Meter) -> int:
        site, tree, manifest = self._site.value, self._tree.value, self._manifest
        if self._name is not None:
            self.warnings = tuple(
                self._name.register_or_warn(
                    tree.processes[0],
                    site.keeper.id,
                    isolated=site.isolated,
                    network=site.network,
                    ends_with_caller=site.ends_with_caller,
                )
            )
        self._protection.job_runs()
        inner = {process.pid: process.ns_pids[-1] for process in manifest.processes}
        roots = (tree.root_pid, *tree.other_roots)  # each may have ended: then it cannot be queried
        site.keeper.adopt(roots, inner_pids=[inner[pid] for pid in manifest.root_pids])
        return 0

    def undo(self) -> None:
        """Nothing: CriuRestore's undo ends the processes, and so the sandbox."""


def _last_pid(source: RestoreSource) -> int:
    """A pid above which CRIU's own processes do not collide with the job's."""
    with images_read_from(source.image_folders[0]):
        images = [path for folder in source.image_folders for path in folder.iterdir()]
    ids = [int(match[1]) for path in images if (match := _CORE_IMAGE.fullmatch(path.name))]
    try:
        return last_pid_clear_of(ids)
    except ValueError as e:
        raise SnapshotDamaged(f"the pids of the job leave no room: {e}", path=source.snapshot.where) from e


def _make_log(path: Path) -> None:
    try:
        os.close(open_file(path, os.O_WRONLY | os.O_CREAT))
    except OSError as e:
        raise Unsupported(
            f"the job's new log {path} cannot be made: {e.strerror}", hint="check who may write to its folder"
        ) from e

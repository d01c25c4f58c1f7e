"""Jobs that `gpucr run` started: names instead of pids, and what dumps and restores record in the registry."""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from gpucr.errors import Busy, GpucrError, InvalidRequest, Unsupported, reason_of
from gpucr.jobs import others
from gpucr.jobs.record import JobRecord, Network
from gpucr.jobs.registry import ListedJob, Registry, Reservation, is_gone, is_replaceable
from gpucr.linux import processes, trusted_paths
from gpucr.linux.private_folders import state_folder
from gpucr.model import Job, ProcessId
from gpucr.quantities import whole_number
from gpucr.snapshot.job_snapshot import JobSnapshot
from gpucr.snapshot.manifest import LaunchRecord


def registry() -> Registry:
    """This user's registry, in the state folder. Raises InvalidRequest if the user has no home folder."""
    try:
        return Registry(state_folder() / "jobs")
    except OSError as e:
        raise InvalidRequest(
            f"there is no registry of jobs: {reason_of(e)}",
            hint="is HOME another user's, after su or sudo? Unset it, or set XDG_STATE_HOME to a private folder",
            code="GPUCR-REGISTRY",
        ) from e


@contextlib.contextmanager
def registry_in_use() -> Iterator[None]:
    """Turn the block's OSErrors into Unsupported: the registry cannot be read or written."""
    try:
        yield
    except OSError as e:
        raise Unsupported(
            f"the registry of jobs cannot be used: {reason_of(e)}",
            hint=_writable_hint(),
            code="GPUCR-REGISTRY",
        ) from e


def _writable_hint() -> str:
    with contextlib.suppress(OSError):
        return f"gpucr keeps it in {state_folder()}: free space there and let it be written, or set XDG_STATE_HOME"
    return "set XDG_STATE_HOME to a folder that can be written"


def resolve_pid(target: int | str) -> int:
    """The pid that ``target`` means: itself, or that of the registered job of this name, for root also ``USER/JOB``.

    Raises InvalidRequest if no such job runs.
    """
    if isinstance(target, int):
        return target
    if (pid := whole_number(target)) is not None:
        return pid
    if others.SEPARATOR in target:
        return others.find_running(target).readable().pid
    return find_running(target).pid


def find_running(name: str) -> JobRecord:
    """The record of the running registered job of this name. Otherwise raises InvalidRequest with its state."""
    with registry_in_use():
        try:
            job = registry().find(name)
        except InvalidRequest as e:
            if theirs := others.names_elsewhere(name):
                e.hint = f"another user has one: {' or '.join(theirs)}"
            raise
    record = job.readable()
    if job.state.word == "dumped":
        gone = record.snapshot is None or is_gone(record.snapshot)
        raise InvalidRequest(
            f"the job {name} was dumped to {record.snapshot}" + (", which no longer exists" if gone else ""),
            hint=f"`gpucr jobs --forget {name}` removes its record"
            if gone
            else f"`gpucr restore {record.snapshot}` brings it back",
            code="GPUCR-JOB-NOT-RUNNING",
        )
    if job.state.word == "elsewhere":
        raise InvalidRequest(
            f"the job {name} was started on {record.host}, maybe in a container",
            hint=f"look there; if that is gone, `gpucr jobs --forget {name} --force` removes its record and its log",
            code="GPUCR-JOB-NOT-RUNNING",
        )
    if job.state.word != "running":
        snapshot = record.snapshot
        if snapshot is not None and is_gone(snapshot):
            snapshot = None
        back = f"; `gpucr restore {snapshot}` brings back what it was then" if snapshot is not None else ""
        raise InvalidRequest(
            f"the job {name} does not run any more ({job.state.word})",
            hint=f"`gpucr logs {name}` shows its last output{back}",
            code="GPUCR-JOB-NOT-RUNNING",
        )
    return record


def find_by_pid_or_name(target: int | str) -> ListedJob:
    """The registered job, in any state. Raises InvalidRequest if there is none."""
    pid = target if isinstance(target, int) else whole_number(target)
    if pid is None:
        return _find_by_name(str(target))
    stat = processes.read_stat(pid)
    record = record_of(ProcessId(pid, stat.start_time_ticks)) if stat is not None else None
    if record is None:
        raise InvalidRequest(
            f"process {pid} is not a job that gpucr started",
            hint="`gpucr jobs` lists them; the first process of each counts",
            code="GPUCR-NO-JOB",
        )
    return registry().find(record.name)


def _find_by_name(target: str) -> ListedJob:
    user, separator, name = target.partition(others.SEPARATOR)
    if separator:
        raise InvalidRequest(
            f"{target} is in the registry of {user}, which is that user's alone",
            hint=f"ask as that user: sudo -H -u {user} gpucr COMMAND {name}",
            code="GPUCR-NO-JOB",
        )
    with registry_in_use():
        return registry().find(target)


def record_of(root: ProcessId) -> JobRecord | None:
    """The record of the running job with this first process; None if it is not in this user's registry."""
    with contextlib.suppress(OSError, InvalidRequest):
        return registry().find_process(root)
    return None


def launch_record(record: JobRecord) -> LaunchRecord:
    """A snapshot's record of how the job was started."""
    return LaunchRecord(
        name=record.name,
        command=record.command,
        cwd=record.cwd,
        environment=dict(record.environment),
        io_uring_is_refused=record.io_uring_is_refused,
        log_path=record.log_path,
        priority=record.priority,
    )


class DumpNote:
    """Record a dump in the registry. A failure is only a ``warning``: the snapshot is fine.

    Covers every registered tree of the job; ``of_root`` is the first one's record. Written as soon as the snapshot is
    committed, and before the job is ended: whenever gpucr is killed, a job ended for a snapshot is known as dumped.
    While it still runs, it counts as running (record.py).
    """

    def __init__(self, job: Job) -> None:
        self.of_root = record_of(job.root.id)
        others = [record_of(tree.root.id) for tree in job.trees[1:]]
        self._records = [record for record in (self.of_root, *others) if record is not None]
        self._is_written = False
        self.warning: str | None = None

    def write(self, snapshot: JobSnapshot, *, left_running: bool) -> None:
        """The snapshot exists; it ends the job unless that is left running."""
        self._is_written = True
        for record in self._records:
            self._update(record, snapshot=snapshot.where, dumped=not left_running)

    def withdraw(self) -> None:
        """The snapshot, if any, is removed again, and the job keeps running."""
        if self._is_written:
            for record in self._records:
                self._update(record, snapshot=record.snapshot, dumped=record.dumped)

    def _update(self, record: JobRecord, **changes: object) -> None:
        try:
            registry().update(record, **changes)
        except (OSError, GpucrError) as e:
            self.warning = f"the record of the job {record.name} does not list this snapshot: {reason_of(e)}"


def restored_name_or_warning(
    snapshot: JobSnapshot,
    opened: contextlib.ExitStack,
    *,
    name: str | None = None,
    clone: bool = False,
    other_parts: Sequence[JobSnapshot] = (),
) -> tuple[RestoredName | None, tuple[str, ...]]:
    """Enter `restored_name`; an unwritable registry is only a warning and does not prevent a restore.

    With a ``name`` or ``clone``, which need it, raises InvalidRequest or Unsupported. Always raises if another gpucr
    works on this job: it may be about to restore it.
    """
    try:
        if name is not None or clone:
            with registry_in_use():
                made = opened.enter_context(restored_name(snapshot, name=name, clone=clone, other_parts=other_parts))
        else:
            made = opened.enter_context(restored_name(snapshot, other_parts=other_parts))
    except (OSError, GpucrError) as e:
        if name is not None or clone or isinstance(e, Busy):
            raise
        return None, (f"the restored job will not be in the registry of jobs: {reason_of(e)}",)
    return made, made.warnings if made is not None else ()


class RestoredName:
    """The future name of a job being restored, and its files.

    ``log_path``: its old log, or for a clone a new one. ``status_path``: for its new keeper.
    """

    def __init__(
        self, snapshot: JobSnapshot, launch: LaunchRecord, reservation: Reservation, *, warnings: tuple[str, ...]
    ) -> None:
        self.name = reservation.name
        self.log_path = reservation.log_path
        self.status_path = reservation.status_path
        self.warnings = warnings
        self._snapshot = snapshot
        self._launch = launch
        self._reservation = reservation

    def register_or_warn(
        self, root: ProcessId, keeper: ProcessId | None, *, isolated: bool, network: Network, ends_with_caller: bool
    ) -> tuple[str, ...]:
        """The job runs: give it the name. Returns a warning if that cannot be written."""
        record = JobRecord(
            name=self.name,
            command=self._launch.command,
            cwd=self._launch.cwd,
            environment=self._launch.environment,
            isolated=isolated,
            network=network,
            io_uring_is_refused=self._launch.io_uring_is_refused,
            created=now(),
            root=root,
            keeper=keeper,
            log_path=str(self.log_path),
            status_path=str(self.status_path),
            snapshot=self._snapshot.where,
            priority=self._launch.priority,
            ends_with_caller=ends_with_caller,
        )
        try:
            self._reservation.register(record)
        except OSError as e:
            return (f"the restored job is not in the registry of jobs: {reason_of(e)}",)
        return ()


@contextlib.contextmanager
def restored_name(
    snapshot: JobSnapshot, *, name: str | None = None, clone: bool = False, other_parts: Sequence[JobSnapshot] = ()
) -> Iterator[RestoredName | None]:
    """Reserve the name for a snapshot's job; None if it was not started by `gpucr run`.

    It is the job's old name, unless another job has it now or this is a ``clone``: then NAME-2, NAME-3, ... A user's
    ``name`` must be free. Unless this is a clone, its log exists when the block begins: CRIU opens it by name. Unless
    the block registers the job, the registry stays as it is. ``other_parts`` of the job on other nodes may have had the
    name here when they were dumped. Raises InvalidRequest and OSError.
    """
    launch = snapshot.manifest.launch
    if launch is None:
        if name is not None:
            raise InvalidRequest(
                "the job of this snapshot cannot have a name: it was not started with `gpucr run`",
                hint="omit --name",
            )
        yield None
        return
    log_path = None if clone else Path(launch.log_path)
    with contextlib.ExitStack() as held:
        reservation = held.enter_context(_reserved((snapshot, *other_parts), launch.name, name, log_path))
        warnings: tuple[str, ...] = ()
        if log_path is not None and _make_log(log_path):
            held.callback(_unmake_log, log_path, reservation)
            warnings = _warnings_of_lost_log(snapshot, log_path)
        yield RestoredName(snapshot, launch, reservation, warnings=warnings)


def _reserved(
    parts: Sequence[JobSnapshot], old_name: str, name: str | None, log_path: Path | None
) -> contextlib.AbstractContextManager[Reservation]:
    """The name of the job that continues the log ``log_path``; None: a clone's."""
    jobs = registry()

    def is_free(taken_by: ListedJob) -> bool:
        return is_replaceable(taken_by) or (
            log_path is not None and any(_is_same_job(taken_by, each) for each in parts)
        )

    if name is not None:
        return jobs.reserve(name, log_path=log_path, replaces=is_free)
    taken_by = jobs.look(old_name)
    if log_path is not None and (taken_by is None or is_free(taken_by)):
        return jobs.reserve(old_name, log_path=log_path, replaces=is_free)
    return jobs.reserve_numbered(old_name, first=2, log_path=log_path)


def _is_same_job(job: ListedJob, snapshot: JobSnapshot) -> bool:
    """Whether this is the snapshot's dumped job: every start has its own log and keeps it.

    Unless the user has named the log: then another job may share it, and the snapshot distinguishes them.
    """
    launch = snapshot.manifest.launch
    if job.state.word != "dumped" or job.record is None or launch is None or job.record.log != Path(launch.log_path):
        return False
    is_own_log = job.record.log.parent.parent == state_folder() / "jobs"
    return is_own_log or job.record.snapshot == snapshot.where


def now() -> str:
    """The time, in the records' format."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def _make_log(path: Path) -> bool:
    """Make an empty log if the job's own is gone. If that fails, CRIU reports the missing file."""
    with contextlib.suppress(OSError):
        if not path.parent.exists():
            trusted_paths.make_private(path.parent)
        os.close(trusted_paths.open_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        return True
    return False


def _warnings_of_lost_log(snapshot: JobSnapshot, log_path: Path) -> tuple[str, ...]:
    """A warning: the job does not write to the new log, since its own was removed before the dump."""
    if any(Path(file.path).name == log_path.name for file in snapshot.manifest.open_files):
        return ()
    return (
        f"the job's log {log_path} had been removed when it was dumped: what it prints is lost, and `gpucr logs` shows "
        "nothing of it",
    )


def _unmake_log(path: Path, reservation: Reservation) -> None:
    """Remove the new log if there is no job for it after all and it is empty."""
    with contextlib.suppress(OSError):
        if not reservation.is_registered:
            with trusted_paths.opened_folder(path.parent) as folder:
                if os.stat(path.name, dir_fd=folder, follow_symlinks=False).st_size == 0:
                    os.unlink(path.name, dir_fd=folder)

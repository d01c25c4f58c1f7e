"""Start supervisors in their own processes, replace missing ones, and end them."""

from __future__ import annotations

import os
from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from gpucr import Secret
from gpucr.errors import BrokenInstall, GpucrError, InvalidRequest, StoreError
from gpucr.jobs import sidecar_process
from gpucr.jobs.names import check_name as check_job_name
from gpucr.jobs.record import Network
from gpucr.jobs.registered import find_by_pid_or_name
from gpucr.jobs.sidecar import StoredLaunch
from gpucr.jobs.sidecar_process import SidecarStarted
from gpucr.linux import own_python
from gpucr.operations.engines import require_possible_rehearsal, require_privileges
from gpucr.operations.launch import StartedJob, launch
from gpucr.operations.places import check_snapshot_name, is_store, open_store_for_jobs, place_of_store
from gpucr.operations.requests import LaunchRequest
from gpucr.operations.stores import init_store
from gpucr.records import DEFAULT_PRIORITY
from gpucr.supervise.clock import ORDERS, Wish
from gpucr.supervise.folder import UNFINISHED, SupervisedFolder
from gpucr.supervise.settings import Supervision


def require_store(place: str, key: Secret | None) -> str:
    """The absolute name of the store for a job's checkpoints. Makes the store if there is none.

    Only makes it in a folder that does not exist or is empty. Raises InvalidRequest, StoreError, WrongKey.
    """
    location = place_of_store(place)
    if location.snapshot is not None:
        raise InvalidRequest(
            f"{place} names a snapshot: a supervised job has many, under its own name",
            hint="leave out what follows the #",
        )
    path = location.path
    if path is not None and (not path.exists() or (path.is_dir() and not any(path.iterdir()))):
        try:
            return init_store(path.absolute(), key=key).backend.url
        except StoreError:
            if not is_store(path):  # otherwise another job's start was faster
                raise
    return open_store_for_jobs(place if path is None else path.absolute(), key).backend.url


def _check(settings: Supervision) -> None:
    settings.check()
    if settings.rehearse is not None:
        require_possible_rehearsal(shell_job=False)


def prepare(name: str, settings: Supervision) -> SupervisedFolder:
    """Store how the job will be supervised. Raises InvalidRequest if it has a supervisor already, Unsupported."""
    _check(settings)
    check_snapshot_name(name)
    folder = SupervisedFolder(name)
    with folder.held():
        folder.write_settings(settings)
    return folder


def require_running(job: int | str) -> str:
    """The name of the running job. Raises InvalidRequest if gpucr has not started it, or it does not run."""
    listed = find_by_pid_or_name(job)
    if listed.state.word not in ("running", "suspended"):
        raise InvalidRequest(
            f"the job {listed.name} does not run ({listed.state.word})",
            hint="`gpucr restore` brings it back from a snapshot; then supervise it",
            code="GPUCR-JOB-NOT-RUNNING",
        )
    return listed.name


class SupervisedStart(Struct, frozen=True):
    """A started job, and the pid of its supervisor."""

    job: StartedJob
    supervisor_pid: int


def run_supervised(
    command: Sequence[str],
    settings: Supervision,
    *,
    name: str | None = None,
    isolate: bool | None = None,
    network: Network | None = None,
    log: str | os.PathLike[str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    interpose: bool | None = None,
    priority: int = DEFAULT_PRIORITY,
) -> SupervisedStart:
    """Start a job as `run_job` does, and its supervisor. Raises what `run_job` does, and NotPermitted without root.

    If the supervisor cannot be started, the job runs without one, and BrokenInstall is raised.
    """
    return launch_supervised(
        LaunchRequest(command, name, isolate, network, log, cwd, interpose=interpose, priority=priority), settings
    )


def launch_supervised(request: LaunchRequest, settings: Supervision) -> SupervisedStart:
    """See `run_supervised`."""
    _check(settings)
    require_privileges()
    if request.name is not None:
        check_snapshot_name(check_job_name(request.name))
        with SupervisedFolder(request.name).held():
            pass  # refuse now rather than when the job runs
    started = launch(request)
    record = started.record
    again = StoredLaunch(
        command=record.command,
        cwd=record.cwd,
        environment=own_python.without_passphrase(os.environ),
        isolate=record.isolated,
        network=record.network,
        interpose=started.plan.interposer is not None,
        priority=request.priority,
    )
    try:
        prepare(record.name, replace(settings, start_again=again))
        return SupervisedStart(started, start_supervisor(record.name))
    except GpucrError as e:
        raise BrokenInstall(
            f"the job {record.name} runs (pid {record.pid}), but has no supervisor: {e}",
            hint=f"supervise it: gpucr supervise {record.name} --every TIME --to {settings.store}",
        ) from e


def supervise_job(job: int | str, settings: Supervision) -> int:
    """Start a supervisor process for a running job, and return its pid when it is ready.

    Raises InvalidRequest if gpucr has not started it, it does not run, or it has a supervisor; NotPermitted without
    root; and errors of the supervisor's start.
    """
    require_privileges()
    name = require_running(job)
    prepare(name, settings)
    return start_supervisor(name)


def known_name(job: int | str) -> str:
    """The name of a job that is, or was, supervised. Raises InvalidRequest."""
    name = job if isinstance(job, str) else find_by_pid_or_name(job).name
    SupervisedFolder(name).settings()
    return name


def start_supervisor(name: str) -> int:
    """Start the supervisor of a prepared job, and return its pid when it is ready. It outlives the caller.

    Raises InvalidRequest and other errors of its start; BrokenInstall if it exits silently.
    """
    return sidecar_process.start(SupervisedFolder(name))


def start_missing_supervisors() -> tuple[SidecarStarted, ...]:
    """Start a supervisor for every supervised job that should have one and has none: after a boot, or a crash."""
    return sidecar_process.start_missing(SupervisedFolder.all(), lambda folder: folder.state().phase in UNFINISHED)


def end_supervisors(names: Sequence[str] | None, wish: Wish, *, timeout_s: float | None = None) -> tuple[str, ...]:
    """Tell supervisors (None: all) to drain, or to leave their jobs, and wait for them. Returns the jobs' names.

    Raises InvalidRequest if one has no supervisor, DeadlineExceeded if one still runs.
    """
    chosen = SupervisedFolder.all() if names is None else map(SupervisedFolder, names)
    return sidecar_process.end(chosen, ORDERS[wish], all_run=names is not None, timeout_s=timeout_s)

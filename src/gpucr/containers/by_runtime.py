"""Dump a container to a folder and restore it with its own runtime, without touching CRIU's configuration.

The runtime is started so that its CRIU calls gpucr (`runtime_call`). The hooks do their usual work; this module finds
the container, handles its folder, and waits until it runs again.
"""

from __future__ import annotations

import platform
import re
import shutil
import time
from pathlib import Path

from msgspec import Struct

from gpucr.containers import oci, podman, runtime_call
from gpucr.containers.container import FoundContainer
from gpucr.containers.dump import findings_of_processes, plan_for_runtime
from gpucr.containers.record import RUNTIMES, ContainerRecord, Runtime, read_record, write_record
from gpucr.criu.options import choose_dump_options
from gpucr.diagnosis import preflight
from gpucr.errors import CriuError, GpucrError, InvalidRequest, JobDamaged, SnapshotError, Unsupported
from gpucr.jobs import selection
from gpucr.jobs.selector import JobSelector
from gpucr.linux import processes, processor, trusted_paths
from gpucr.model import CudaState, Job, ProcessId
from gpucr.network.lock import IN_FLIGHT
from gpucr.network.of_criu import AfterCriu
from gpucr.network.steps import IN_FLIGHT_LIMIT_S
from gpucr.operations.plan import Plan
from gpucr.snapshot import files
from gpucr.snapshot.folder import GPU_PART_NAME, check_target, completed
from gpucr.snapshot.machine import findings_of_processor
from gpucr.undo.cancellation import Cancellation
from gpucr.undo.operation import all_or_nothing
from gpucr.undo.roll import Roll

_THAW_LIMIT_S = 600.0
_KILLED_LIMIT_S = 10.0
_ERROR_LIMIT_S = 30.0
"""How long to tolerate an error that hides the container's state."""

_LOOK_EVERY_S = 0.05


class ContainerReport(Struct, frozen=True):
    """What a dump or a restore of a container did. ``seconds``: until it runs again, or is gone."""

    folder: Path
    container: str
    runtime: Runtime
    pid: int
    left_running: bool
    has_gpu_part: bool
    seconds: float


def dump_container(
    container: str,
    to: Path,
    *,
    runtime: Runtime | None = None,
    runtime_root: Path | None = None,
    leave_running: bool = False,
    cancel: Cancellation | None = None,
) -> ContainerReport:
    """Have its runtime write a container to the folder ``to`` and end it, or with ``leave_running`` keep it running.

    ``runtime`` is detected if not given; ``runtime_root`` is runc's and crun's ``--root``. With ``leave_running`` this
    returns when its GPU state is back. The folder must be missing or empty. Needs root.

    Raises InvalidRequest, SnapshotExists, SnapshotError (another user could replace ``to``), Unsupported,
    CriuUnavailable (nothing was changed); CriuError, DeadlineExceeded (the container is as it was, ``to`` is gone);
    Interrupted (likewise: Ctrl-C, SIGTERM, ``cancel``); SnapshotError (``to`` cannot be made or written); JobDamaged
    (its GPU state is not back, or it has ended and ``to`` is not complete).
    """
    end = time.monotonic() + IN_FLIGHT_LIMIT_S
    while True:
        try:
            return _dump(container, to, runtime, runtime_root, cancel, leave_running=leave_running)
        except CriuError as error:  # a connection was just being made: the container runs between two attempts
            if error.code != IN_FLIGHT or time.monotonic() > end:
                raise


def _dump(
    container: str,
    to: Path,
    runtime: Runtime | None,
    runtime_root: Path | None,
    cancel: Cancellation | None,
    *,
    leave_running: bool,
) -> ContainerReport:
    begin = time.monotonic()
    check_target(to)
    _require_ours(to)
    found = _find(container, runtime, runtime_root)
    pid = found.running_pid()
    inside = selection.find_job(pid)
    job = inside.job
    preflight.require_no_blocking(findings_of_processes(inside), force=None)
    options = choose_dump_options(job.pids, leave_running=leave_running)
    network_lock = runtime_call.choose_network_lock(job.pids)
    root = None if runtime_root is None else str(runtime_root.absolute())
    here = platform.machine(), processor.here()
    record = ContainerRecord(found.runtime, root, found.container, found.bundle, options, network_lock, *here)
    existed = to.exists()
    checkpoint = podman.checkpoint if found.runtime == "podman" else oci.checkpoint
    with (
        all_or_nothing("dump", container, cancel, state="the container is as it was", at_once=False) as interrupts,
        Roll(job) as roll,
        AfterCriu(job, str(to.absolute())) as network,
    ):
        images = _make_folder(to)
        try:
            checkpoint(record, images.resolve(), interrupts, leave_running=leave_running)
            if leave_running:
                _wait_until_back(job)
            with completed(str(to), hint="free space on that disk"):
                _sync(to)
                write_record(to, record)
            if leave_running:
                roll.require_gang(f"{to} is complete, and the container was to keep running")
        except JobDamaged:
            raise  # the folder is complete, and perhaps all that is left
        except BaseException as error:
            network.release()
            _check_not_ended(job.root.id, container, to, error)
            _wait_until_back(job)
            _check_not_ended(job.root.id, container, to, error)
            _check_no_loss(roll, container, to, error)
            for made in (images, podman.beside(images)) if existed else (to,):
                shutil.rmtree(made, ignore_errors=True)
            raise
    return _report(to, record, pid, begin, left_running=leave_running)


def plan_container_dump(
    container: str,
    to: Path,
    *,
    runtime: Runtime | None = None,
    runtime_root: Path | None = None,
    leave_running: bool = False,
) -> Plan:
    """What `dump_container` would do with the same arguments. Changes nothing; raises like it before it has begun."""
    check_target(to)
    _require_ours(to)
    found = _find(container, runtime, runtime_root)
    inside = selection.find_job(found.running_pid())
    before: list[str] = []
    after: list[str] = []
    if inside.job.gang:
        disk = next(each for each in [to, *to.absolute().parents] if each.is_dir())
        before, after, findings = plan_for_runtime(inside, disk, leave_running=leave_running)
    else:
        findings = findings_of_processes(inside)
    end = "keep it running" if leave_running else "end it"
    by_runtime = f"have {found.runtime} dump the container {container} with CRIU to {to / 'images'}, {end}"
    steps = (f"make the private folder {to}", *before, by_runtime, *after)
    return Plan(inside.job.root.pid, steps, tuple(findings))


def restore_container(folder: Path, *, cancel: Cancellation | None = None) -> ContainerReport:
    """Have its runtime bring the container of a folder back: same name, same bundle. The folder stays. Needs root.

    Raises SnapshotDamaged, InvalidRequest, Unsupported, CriuUnavailable (nothing was started); CriuError, Interrupted
    (a signal, ``cancel``): what had been restored has been ended.
    """
    begin = time.monotonic()
    _require_ours(folder)
    record = read_record(folder)
    preflight.require_no_blocking(findings_of_processor(record.architecture, record.processor), force=None)
    images = (folder / "images").resolve()
    restore = podman.restore if record.runtime == "podman" else oci.restore
    with all_or_nothing("restore", folder, cancel, state="the container does not run", at_once=False) as interrupts:
        restore(record, images, interrupts)
        if record.runtime == "podman":
            found = podman.find(record.container)
        else:
            found = oci.find(record.runtime, record.runtime_root, record.container)
        if found is None or found.pid <= 0:  # told to end when the runtime had just succeeded
            interrupts.check()
        interrupts.commit()
    return _report(folder, record, 0 if found is None else found.pid, begin, left_running=False)


def _require_ours(folder: Path) -> None:
    """The runtime and its CRIU get the path: nobody else may be able to replace the folder."""
    try:
        trusted_paths.require_ours(folder)
    except PermissionError as e:
        raise SnapshotError(
            f"{folder} is not used: {e.strerror}",
            path=str(folder),
            hint="the container's runtime is given this path: name one that only root can change",
            code="GPUCR-UNTRUSTED-PATH",
        ) from e


def _sync(folder: Path) -> None:
    """Make everything in it durable: the runtime and its CRIU do not."""
    made = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    files.sync(folder, [str(path.relative_to(folder)) for path in made])


def _report(folder: Path, record: ContainerRecord, pid: int, begin: float, *, left_running: bool) -> ContainerReport:
    return ContainerReport(
        folder=folder,
        container=record.container,
        runtime=record.runtime,
        pid=pid,
        left_running=left_running,
        has_gpu_part=(folder / "images" / GPU_PART_NAME).exists(),
        seconds=time.monotonic() - begin,
    )


def find_container(container: str, *, runtime: Runtime | None = None, runtime_root: Path | None = None) -> JobSelector:
    """The job that runs in a container: the tree of its first process. Arguments and errors are `dump_container`'s."""
    return JobSelector(_find(container, runtime, runtime_root).running_pid())


def _find(container: str, runtime: Runtime | None, runtime_root: Path | None) -> FoundContainer:
    if not re.fullmatch(r"[\w+.-]+", container) or container.startswith("-"):
        raise InvalidRequest(f"{container!r} cannot be the name of a container", hint="`runc list` shows their names")
    if runtime == "podman" and runtime_root is not None:
        raise InvalidRequest("podman itself knows where its containers are", hint="leave --runtime-root out")
    tried = [runtime] if runtime is not None else [name for name in RUNTIMES if shutil.which(name)]
    root = None if runtime_root is None else str(runtime_root.absolute())
    is_podmans = False
    for name in tried:
        found = podman.find(container) if name == "podman" else oci.find(name, root, container)
        if found is not None and (name == "podman" or not found.is_podmans):
            return found
        is_podmans = is_podmans or found is not None
    if is_podmans:
        raise InvalidRequest(
            f"the container {container} belongs to podman, which would not know what has become of it",
            hint="call it by its name in podman, with --runtime podman",
            code="GPUCR-RUNTIME",
        )
    names = " nor ".join(tried) or "no runtime on PATH"
    raise InvalidRequest(
        f"there is no container {container} that {names} knows",
        hint="name the runtime with --runtime, and the folder of its state with --runtime-root, as docker and "
        "containerd give it to their runtime",
        code="GPUCR-RUNTIME",
    )


def _make_folder(to: Path) -> Path:
    """The folder of a dump, with one for CRIU's images in it, which is returned."""
    images = to / "images"
    try:
        images.mkdir(mode=0o700, parents=True)
        to.chmod(0o700)
    except OSError as e:
        raise SnapshotError(
            f"the snapshot folder {to} cannot be made: {e.strerror}",
            path=str(to),
            hint="check the file system (free space, read-only, permissions)",
        ) from e
    return images


def _check_not_ended(root: ProcessId, container: str, to: Path, error: BaseException) -> None:
    """Raise JobDamaged if the container has ended: then only the folder is left of it."""
    processes.wait_for_killed([root], _KILLED_LIMIT_S)
    if processes.keeps_running(root):
        return
    why = str(error) or "it was interrupted"
    raise JobDamaged(
        f"the container {container} has ended, and its dump is not complete: {why}",
        failures=[why],
        hint=f"what there is of it is in {to}, and has been left there",
    ) from error


def _check_no_loss(roll: Roll, container: str, to: Path, error: BaseException) -> None:
    """Raise JobDamaged if processes of the container have ended although its first one runs."""
    lost = [each.sentence() for each in roll.call_after_undo() if each.is_loss]
    if lost:
        why = str(error) or "it was interrupted"
        raise JobDamaged(
            f"{why}; and the container {container} has lost processes: " + "; ".join(lost),
            failures=lost,
            hint=f"what there is of its dump is in {to}, and has been left there",
        ) from error


def _running(job: Job) -> set[int]:
    """The processes that use a GPU now."""
    return {member.pid for member in job.gang if member.found is CudaState.RUNNING}


def _wait_until_back(job: Job) -> None:
    """Wait until the attendant is done with the container, after the runtime's command has ended.

    Also returns if the container has ended. Other errors may be transient; if they persist, it is unknown whether the
    GPU state is back.
    """
    before = _running(job)
    end, why = time.monotonic() + _THAW_LIMIT_S, ""
    while before and processes.keeps_running(job.root.id):
        try:
            with selection.claimed_job(job.root.pid) as found:
                missing, why = before - _running(found.job), ""
                break
        except Unsupported as error:  # somebody works on it, or it is stopped
            why = error.message
        except (GpucrError, OSError) as error:
            end, why = min(end, time.monotonic() + _ERROR_LIMIT_S), str(error)
        if time.monotonic() > end:
            missing = before
            break
        time.sleep(_LOOK_EVERY_S)
    else:
        return
    missing = {pid for pid in missing if any(pid == m.pid and processes.keeps_running(m.id) for m in job.gang)}
    if missing:
        raise JobDamaged(
            f"the GPU state of the container's process {min(missing)} is not back" + (f": {why}" if why else ""),
            failures=[f"process {each} does not run" for each in sorted(missing)],
            hint="hook.log and guard.log in gpucr's log folder say why; `gpucr state` shows where it is",
        )

"""What is to be done for a job when the gpucr that changed it has died, and doing it.

The operation hands a `Recovery` to its guard before each change that would not end well by itself (guard.py). It says
where to get back to, not what was done: like every undo of gpucr, the recovery looks where each process is now. So it
is right wherever the operation was cut off, and may be older than the job's state by the last change.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpucr.driver.cuda import load_driver
from gpucr.errors import GpucrError, JobChanged
from gpucr.gang import Gang
from gpucr.json_text import parse
from gpucr.linux import ends, memory, processes
from gpucr.model import CudaState, GangMember, ProcessId, StagedExtent
from gpucr.operations.logs import append_to_log, remove_logs_of
from gpucr.operations.threads import GangThreads

if TYPE_CHECKING:
    from gpucr.snapshot.folder import UnfinishedSnapshot

_DRIVER_LIMIT_S = 600.0
"""How long calls of the driver may take in all: those that had begun, and those that bring the job back."""

_LOOK_EVERY_S = 0.05


@dataclass(frozen=True)
class DetachedStaging:
    """Staging of a process that may be an empty reservation now. ``descriptor``: the guard's number for the file."""

    pid: int
    descriptor: int
    extents: tuple[StagedExtent, ...]


@dataclass(frozen=True)
class UnfinishedFolder:
    """A snapshot folder that this operation has made, or has found empty with ``mode_before`` (absolute path).

    ``descriptor``: the guard's number for it. By the time another folder may be at its path.
    """

    path: str
    descriptor: int
    mode_before: int | None = None


@dataclass(frozen=True)
class Recovery:
    """Everything that has to be as before. An empty one: nothing.

    - ``members``: CUDA processes that go back to the state in which they were found.
    - ``restore_threads``: per pid of a member, the one thread that may run while device memory is away.
    - ``stopped``: processes that SIGSTOP may have stopped, and that go on.
    - ``detached``: staging that is mapped back before the driver restores.
    - ``folder``: removed, unless there is a manifest in it. Set when it has been made, not before: until then it may be
      another dump's.
    - ``working_folder``: removed, whatever else there is (absolute path; see working_folder.py).
    - ``kill``: half-restored processes, which are ended with their descendants.
    - ``criu``: the CRIU that is at work, which has to end first.
    - ``restoring``: the pids of the tasks that this CRIU restores: those that it has made end. None for a dump.
    - ``sandbox``: the keeper of one that is being filled: it ends, and with it everything in there, CRIU too.
    - ``tree``: all processes of the job, of which none may be missing afterwards.
    """

    members: tuple[GangMember, ...] = ()
    restore_threads: Mapping[int, int] = field(default_factory=dict)
    stopped: tuple[ProcessId, ...] = ()
    detached: tuple[DetachedStaging, ...] = ()
    folder: UnfinishedFolder | None = None
    working_folder: str | None = None
    kill: tuple[ProcessId, ...] = ()
    criu: ProcessId | None = None
    restoring: tuple[int, ...] | None = None
    sandbox: ProcessId | None = None
    tree: tuple[ProcessId, ...] = ()

    def __post_init__(self) -> None:
        """Raise ValueError where staging could not be mapped back."""
        if any(part.pid not in self.restore_threads for part in self.detached):
            raise ValueError("detached staging of a process without a restore thread")


def encode(record: Recovery) -> bytes:
    """The record as JSON."""
    return json.dumps(asdict(record)).encode()


def decode(data: bytes) -> Recovery:
    """The inverse of `encode`. Raises ValueError for anything else."""
    try:
        return _record(parse(data))
    except (KeyError, TypeError, AttributeError) as e:
        raise ValueError(f"not a recovery record: {e!r}") from e


def _record(raw: Any) -> Recovery:
    folder, criu, restoring, sandbox = raw["folder"], raw["criu"], raw["restoring"], raw["sandbox"]
    working_folder = raw["working_folder"]
    return Recovery(
        members=tuple(GangMember(_process(m["id"]), CudaState(_number(m["found"]))) for m in raw["members"]),
        restore_threads={_number(int(pid), 1): _number(tid, 1) for pid, tid in raw["restore_threads"].items()},
        stopped=tuple(map(_process, raw["stopped"])),
        detached=tuple(map(_detached, raw["detached"])),
        folder=_folder(folder) if folder is not None else None,
        working_folder=_path(working_folder) if working_folder is not None else None,
        kill=tuple(map(_process, raw["kill"])),
        criu=_process(criu) if criu is not None else None,
        restoring=tuple(_number(pid, 1) for pid in restoring) if restoring is not None else None,
        sandbox=_process(sandbox) if sandbox is not None else None,
        tree=tuple(map(_process, raw["tree"])),
    )


def _process(raw: dict[str, Any]) -> ProcessId:
    return ProcessId(_number(raw["pid"], 1), _number(raw["start_time_ticks"]))


def _detached(raw: dict[str, Any]) -> DetachedStaging:
    extents = (
        StagedExtent(*(_number(e[name]) for name in ("address", "size_bytes", "offset"))) for e in raw["extents"]
    )
    return DetachedStaging(_number(raw["pid"], 1), _number(raw["descriptor"]), tuple(extents))


def _folder(raw: dict[str, Any]) -> UnfinishedFolder:
    mode = raw["mode_before"]
    number = _number(raw["descriptor"])
    return UnfinishedFolder(_path(raw["path"]), number, _number(mode) if mode is not None else None)


def _number(value: object, least: int = 0) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{value!r} is not a number of at least {least}")
    return value


def _path(value: object) -> str:
    if not isinstance(value, str) or not os.path.isabs(value):
        raise ValueError(f"{value!r} is not an absolute path")
    return value


# --- doing it --------------------------------------------------------------------------------------------------


def recover(data: bytes, descriptors: Mapping[int, int], operation_pid: int, *, is_dead: bool) -> bool:
    """Do what the encoded record says, and write a line about it to the log folder. Raises nothing.

    ``descriptors``: the guard's own, per number. One part that fails does not keep the others from being tried.
    ``is_dead``: the operation is; else its own undo has failed. Returns whether everything is as it was found.
    """
    what = "has died in the middle of its work" if is_dead else "could not undo its work"
    title = f"the gpucr with pid {operation_pid} {what}"
    try:
        record = decode(data)
    except ValueError as e:
        append_to_log("guard", f"{title}; {e}")
        return False
    parts: tuple[Callable[[], None], ...] = (
        lambda: _end_criu(record, descriptors),
        lambda: _end_processes(record.kill),
        lambda: _bring_back(record, descriptors),
        lambda: _remove_folder(record.folder, descriptors),
        lambda: _remove_working_folder(record.working_folder),
        lambda: remove_logs_of(operation_pid),
    )
    failures: list[str] = []
    for part in parts:
        try:
            part()
        except Exception as error:  # noqa: BLE001 - the other parts must be done whatever happens here
            failures.append(f"{type(error).__name__}: {error}")
    outcome = "its job is as it was found" if not failures else "bringing its job back failed: " + "; ".join(failures)
    append_to_log("guard", f"{title}; {_lost(record, descriptors) or outcome}")
    return not failures


def _lost(record: Recovery, descriptors: Mapping[int, int]) -> str:
    """Which processes of a job that should run have ended, and how. Nobody can bring them back: it is only told."""
    if record.folder is not None and _snapshot(record.folder, descriptors).is_committed:
        return ""  # CRIU ends the tree, as it should
    ends.wait_until_they_ran(filter(processes.goes_on, record.tree))
    missing = [
        f"process {each.pid} {ends.how(ends.wait_status(each, None))}"
        for each in record.tree
        if not processes.goes_on(each)
    ]
    return f"its job has lost processes: {'; '.join(missing)}" if missing else ""


def _end_criu(record: Recovery, descriptors: Mapping[int, int]) -> None:
    if record.sandbox is not None:  # pids in CRIU's images are those of the sandbox, and mean others here
        left = processes.kill_and_wait([record.sandbox])
        if left:
            raise JobChanged("a half-filled sandbox does not end: " + _names(left), pids=[left[0].pid])
        return
    if record.criu is None:
        return
    from gpucr.criu import abandoned  # late, as below: the operation, which imports this module, does not need it

    if record.restoring is not None:
        abandoned.end_restore(record.criu, record.restoring)
    elif record.folder is not None and _snapshot(record.folder, descriptors).is_committed:
        abandoned.wait(record.criu)  # it ends the tree, as it should, or has found the socket closed and undoes
    else:
        abandoned.end_dump(record.criu)


def _end_processes(roots: Sequence[ProcessId]) -> None:
    left: list[ProcessId] = []
    for root in roots:
        if processes.is_alive(root):
            left += processes.kill_tree(root.pid, including_root=True)
    if left:
        raise JobChanged("half-restored processes do not end: " + _names(left), pids=[process.pid for process in left])


def _bring_back(record: Recovery, descriptors: Mapping[int, int]) -> None:
    members = [member for member in record.members if processes.goes_on(member.id)]
    threads = GangThreads()
    try:
        if members:
            _hold(threads, record, members)
            # The driver answers only while its thread runs; all others are held, and do not notice.
            processes.continue_stopped(set(record.stopped) & {member.id for member in members})
            _attach_all(record, members, descriptors)
            _return_to_found(members)
            _close_left_behind(record, members)
    finally:
        threads.release()
        processes.continue_stopped(record.stopped)


def _hold(threads: GangThreads, record: Recovery, members: Sequence[GangMember]) -> None:
    """Hold what must not run before device memory is back (threads.py)."""
    for member in members:
        if member.pid in record.restore_threads:
            try:
                threads.hold({member.pid: record.restore_threads[member.pid]})
            except GpucrError as error:  # it has ended, or a debugger has come: all else can and must be done
                append_to_log("guard", f"not holding threads: {error}")


def _attach_all(record: Recovery, members: Sequence[GangMember], descriptors: Mapping[int, int]) -> None:
    """Map all detached staging back. Tries until it is done or the process has ended: the data is nowhere else.

    Only what is a reservation is mapped: the record may be older than an attach, and mapping over anything else would
    destroy it.
    """
    from gpucr import staging  # late: ptrace and what else it takes, which a suspend does not need

    ids = {member.pid: member.id for member in members}
    waiting = {part.pid: part for part in record.detached if part.pid in ids}
    told: set[int] = set()
    while waiting:
        for pid, part in list(waiting.items()):
            try:
                missing = [extent for extent in part.extents if _is_reservation(pid, extent)]
                if missing:
                    staging.attach(record.restore_threads[pid], descriptors[part.descriptor], missing)
                del waiting[pid]
            except Exception as error:  # noqa: BLE001 - whatever it is, the data is safe as long as it is tried again
                if not processes.goes_on(ids[pid]):
                    del waiting[pid]
                elif pid not in told:
                    told.add(pid)
                    append_to_log("guard", f"the device memory of process {pid} cannot be put back yet: {error}")
        if waiting:
            time.sleep(_LOOK_EVERY_S)


def _close_left_behind(record: Recovery, members: Sequence[GangMember]) -> None:
    """While the driver fills a staging file, the process has it open: its capture can close it no more."""
    from gpucr import staging  # late, as above

    for member in members:
        if member.pid in record.restore_threads:
            try:
                staging.close_left_behind(record.restore_threads[member.pid])
            except OSError as error:  # it has ended, or cannot be traced: the next capture closes it
                append_to_log("guard", f"a staging file stays open in process {member.pid}: {error}")


def _is_reservation(pid: int, extent: StagedExtent) -> bool:
    return any(
        mapping.start <= extent.address and extent.end <= mapping.end and mapping.permissions.startswith("---p")
        for mapping in memory.read_maps(pid)
    )


def _return_to_found(members: Sequence[GangMember]) -> None:
    """Every member back to its found state, also where the driver is still at work on the dead gpucr's call."""
    end = time.monotonic() + _DRIVER_LIMIT_S
    gang = Gang(load_driver(), members, deadline=end)
    while True:
        try:
            gang.return_to_found()
            gang.wait_for_calls()
        except JobChanged:
            if time.monotonic() > end:
                raise
            time.sleep(_LOOK_EVERY_S)
        else:
            return


def _remove_folder(folder: UnfinishedFolder | None, descriptors: Mapping[int, int]) -> None:
    if folder is not None:
        snapshot = _snapshot(folder, descriptors)
        if not snapshot.is_committed:
            snapshot.discard()


def _remove_working_folder(path: str | None) -> None:
    if path is not None:
        from gpucr.operations import working_folder

        working_folder.remove(Path(path))


def _snapshot(folder: UnfinishedFolder, descriptors: Mapping[int, int]) -> UnfinishedSnapshot:
    from gpucr.snapshot.folder import UnfinishedSnapshot

    return UnfinishedSnapshot.left_behind(Path(folder.path), folder.mode_before, descriptors[folder.descriptor])


def _names(found: Sequence[ProcessId]) -> str:
    return ", ".join(str(process.pid) for process in found)

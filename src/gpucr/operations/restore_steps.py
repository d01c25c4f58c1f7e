"""The steps of a restore that concern the snapshot, CRIU, and device memory on its way."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gpucr import staging
from gpucr.criu.engine import Criu
from gpucr.criu.images import FilesImage
from gpucr.criu.options import RestoreOptions
from gpucr.criu.remains import task_pids
from gpucr.errors import (
    DeadlineExceeded,
    GpucrError,
    JobChanged,
    JobDamaged,
    ProcessNotFound,
    SnapshotDamaged,
    Unsupported,
)
from gpucr.gang import Gang
from gpucr.linux import processes, trusted_paths
from gpucr.linux.tmpfs import StagingFile
from gpucr.model import CudaState, GangMember, ProcessId
from gpucr.operations.freeze import RestoreGang
from gpucr.operations.interrupts import Interrupts
from gpucr.operations.job_snapshot import JobSnapshot
from gpucr.operations.logs import log_kept_on_failure
from gpucr.operations.opened import require_as_recorded
from gpucr.operations.protection import Protection
from gpucr.operations.scheduling import restore_scheduling
from gpucr.operations.sources import RestoreSource, images_read_from
from gpucr.operations.steps import Meter
from gpucr.operations.threads import explained
from gpucr.quantities import counted, format_bytes
from gpucr.snapshot import shared_files
from gpucr.snapshot.device.loader import DeviceLoader
from gpucr.snapshot.device.reader import Destination
from gpucr.snapshot.manifest import DeviceData, ProcessRecord
from gpucr.staging import Gate

_WAIT_S = 0.2


@dataclass(kw_only=True)
class DeviceRestore:
    """What the steps of one restore share that concern the gang and its device memory, whoever makes the processes.

    ``gang``, ``root_pid``, ``restored`` and ``pids`` (manifest pid → pid now) are filled as it goes on, and so are
    ``files``, the staging files by manifest pid, and ``reader``, which fills them.
    """

    source: RestoreSource
    deadline: float | None
    protection: Protection | None
    gang: Gang | None = None
    root_pid: int = 0
    restored: tuple[ProcessId, ...] = ()
    pids: dict[int, int] = field(default_factory=dict)
    files: dict[int, StagingFile] = field(default_factory=dict)
    reader: DeviceLoader | None = None
    on_close: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @property
    def snapshot(self) -> JobSnapshot:
        """What is restored."""
        return self.source.snapshot

    def close(self) -> None:
        """Stop reading, and give up the staging files; what a process has mapped stays its own.

        What fails here hides neither a success nor a failure.
        """
        with contextlib.suppress(GpucrError, OSError):
            self.on_close.close()
        if self.reader is not None:
            self.reader.cancel()
        for file in self.files.values():
            file.close()
        with contextlib.suppress(GpucrError, OSError):
            self.source.close()

    def restore_threads(self) -> dict[int, int]:
        """The thread that does the driver's work, per pid of the gang."""
        found: dict[int, int] = {}
        for record in self.snapshot.manifest.processes:
            if record.found_state is None or record.restore_thread is None:
                continue
            pid = self.pids[record.pid]
            tid = processes.thread_with_innermost_id(pid, record.restore_thread)
            if tid is None:
                raise SnapshotDamaged(
                    f"the manifest names thread {record.restore_thread} of process {record.pid}, which it has not",
                    path=self.snapshot.where,
                )
            found[pid] = tid
        return found

    def to_continue(self) -> list[ProcessId]:
        """The processes without CUDA that were not stopped when they were dumped."""
        records = self.snapshot.manifest.processes
        chosen = {self.pids.get(r.pid) for r in records if r.found_state is None and not r.stopped}
        return [process for process in self.restored if process.pid in chosen]


@dataclass(kw_only=True)
class RestoreContext(DeviceRestore):
    """What the steps of a restore of gpucr's own share.

    ``images_dir`` is where CRIU gets its images from, ``shared_root`` the folder of shared memory that the job will
    see, ``outputs`` which files take the place of others in a sandbox. ``warnings`` is what steps have to tell the
    user.
    """

    criu: Criu
    options: RestoreOptions
    shared_root: Path = shared_files.ROOT
    outputs: Mapping[Path, Path] = field(default_factory=dict)
    images_dir: Path = field(init=False)
    warnings: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.images_dir = self.source.images


class LoadDevice:
    """Begin to read device memory into staging files; it goes on until the driver has taken the last of it."""

    name = "load"

    def __init__(self, context: DeviceRestore) -> None:
        self._context = context

    def describe(self) -> str:
        """How much."""
        stored = sum(data.stored_bytes for data in self._context.snapshot.manifest.device_data.values())
        return f"begin to read {format_bytes(stored)} of device memory"

    def run(self, interrupts: Interrupts, meter: Meter) -> int:
        """Make the files and start the threads that read."""
        context = self._context
        destinations: list[Destination] = []
        for pid, data in context.snapshot.manifest.device_data.items():
            file = context.files[pid] = _staging_file(data.size_bytes)
            if file.reason is not None:
                meter.note(f"device memory is read into small pages: {file.reason}")
            destinations.append(Destination(pid, file.fd, data))
        context.reader = context.source.loader(destinations)
        context.reader.start()
        return 0

    def undo(self) -> None:
        """Stop reading."""
        if self._context.reader is not None:
            self._context.reader.cancel()


class ProvideFiles:
    """Every file of the snapshot is at hand and checked. Device memory is checked as it is read."""

    def __init__(self, context: RestoreContext) -> None:
        self._context = context
        self.name = context.source.provision[0]

    def describe(self) -> str:
        """From where."""
        return self._context.source.provision[1]

    def run(self, interrupts: Interrupts, meter: Meter) -> int:
        """Verify or fetch. Returns the bytes of the files."""
        return self._context.source.provide(self._context.protection, interrupts, meter)

    def undo(self) -> None:
        """Nothing: what was fetched goes when the operation ends."""


class MakeFolders:
    """Make the folders again in which the job's local sockets were bound, where they are missing."""

    name = "folders"

    def __init__(self, context: RestoreContext) -> None:
        self._context = context
        self._made: list[str] = []

    def describe(self) -> str:
        """What for."""
        return "make the missing folders of the job's sockets"

    def run(self, interrupts: Interrupts, meter: Meter) -> int:
        """Make them, outermost first, with the owner and mode that they had.

        CRIU binds the sockets by their paths, as root: no folder, also none that is there, may be behind a link of
        another user's.
        """
        for record in self._context.snapshot.manifest.folders:
            try:
                with contextlib.suppress(FileNotFoundError):
                    os.close(trusted_paths.open_file(record.path, os.O_PATH | os.O_DIRECTORY))
                    continue
                trusted_paths.make_folder_for(record.path, mode=record.mode, uid=record.uid, gid=record.gid)
                self._made.append(record.path)
            except OSError as e:
                what = f"the folder {record.path}, in which the job has a socket, cannot be used: {e.strerror}"
                if e.errno == errno.ELOOP:
                    hint = "remove that link, or restore where the folder is not behind one"
                    raise Unsupported(what, hint=hint, code="GPUCR-UNTRUSTED-PATH") from e
                raise Unsupported(what, hint="make it, or restore where it can be made") from e
        return 0

    def undo(self) -> None:
        """Remove those that were made and are empty."""
        while self._made:
            with contextlib.suppress(OSError):
                trusted_paths.remove_empty_folder(self._made.pop())


class CriuRestore:
    """CRIU makes the process tree again; the CUDA processes come back CHECKPOINTED."""

    name = "criu"

    def __init__(self, context: RestoreContext) -> None:
        self._context = context

    def describe(self) -> str:
        """How many processes."""
        manifest = self._context.snapshot.manifest
        return f"restore {counted(len(manifest.processes), 'process')} with CRIU, root pid {manifest.root_pid}"

    def run(self, interrupts: Interrupts, meter: Meter) -> int:
        """Restore, then take stock of the restored processes."""
        context = self._context
        with interrupts.allowed(), log_kept_on_failure("restore") as log_path:
            context.root_pid = context.criu.restore(
                context.images_dir,
                context.options,
                log_path=log_path,
                leave_stopped=context.gang is not None,
                outputs=context.outputs,
                on_start=self._on_start,
                on_notify=lambda hook, pid: self._on_notify(hook, pid, interrupts),
                deadline=context.deadline,
            )
            interrupts.postpone()
        if context.gang is not None:
            take_stock(context)
        return sum(file.size_bytes for file in context.snapshot.manifest.files)

    def _on_start(self, criu: ProcessId) -> None:
        if self._context.protection is not None:
            with images_read_from(self._context.source.images):
                pids = task_pids(self._context.source.images)
            self._context.protection.change(criu=criu, restoring=pids)

    def _on_notify(self, hook: str, pid: int, interrupts: Interrupts) -> None:
        """All threads are there, and stand before their first instruction: what they start inherits from them."""
        if hook == "pre-resume":
            context = self._context
            with images_read_from(context.images_dir):
                names = FilesImage.read(context.images_dir).paths().values()
            pids = [process.pid for process in processes.tree(pid)]
            require_as_recorded(pids, {*names, *map(str, context.outputs.values())})
            self._context.root_pid = pid
            if self._context.gang is None:
                take_stock(self._context)  # CRIU lets it run now, and it may have ended a moment later
            self._context.warnings += restore_scheduling(self._context.snapshot.manifest, pid)
            if self._context.gang is None:
                interrupts.commit()

    def undo(self) -> None:
        """End every process of the restored tree; the snapshot stays as it is."""
        if self._context.root_pid:
            end_restored(self._context)


def take_stock(context: DeviceRestore) -> None:
    """Find the processes of the manifest in the tree of ``context.root_pid``, which has just been restored."""
    try:
        tree = processes.tree(context.root_pid)
    except ProcessNotFound as e:
        raise JobChanged(
            "the job's first process ended while the job was restored",
            pids=[context.root_pid],
            hint="somebody may have killed it; the snapshot is intact",
        ) from e
    context.restored = tuple(process.id for process in tree)
    if context.protection is not None:
        context.protection.change(kill=context.restored, criu=None, restoring=None)
    by_namespace_pid = {process.ns_pids[-1]: process.id for process in tree}
    for record in context.snapshot.manifest.processes:
        restored = by_namespace_pid.get(record.ns_pids[-1])
        if restored is not None:
            context.pids[record.pid] = restored.pid
        if context.gang is not None and record.found_state is not None:
            context.gang.add([_member(record, restored)])


def end_restored(context: DeviceRestore) -> None:
    """End every process of the restored tree. Raises JobDamaged where one does not end."""
    now: set[ProcessId] = set()
    with contextlib.suppress(ProcessNotFound):  # the root may have ended by itself, and its pid be another's by now
        tree = processes.tree(context.root_pid)
        now = {process.id for process in tree if not context.restored or tree[0].id == context.restored[0]}
    left = processes.kill_and_wait(now | set(context.restored))
    if left:
        failures = [f"process {process.pid} does not end" for process in left]
        raise JobDamaged("not every restored process could be ended: " + ", ".join(failures), failures=failures)


class RestoreDevice:
    """Staging files filled → mapped into the processes → device memory. All three go on at the same time."""

    name = "restore"

    def __init__(self, context: DeviceRestore, restore: RestoreGang) -> None:
        self._context = context
        self._restore = restore

    def describe(self) -> str:
        """What the driver restores."""
        return self._restore.describe()

    def run(self, interrupts: Interrupts, meter: Meter) -> int:
        """Let the driver take what is read as it comes. Returns the bytes of device memory."""
        context = self._context
        data = context.snapshot.manifest.device_data
        total_bytes = sum(each.size_bytes for each in data.values())
        meter.expect(total_bytes)
        gates = self._gates(data, interrupts, meter)
        try:
            for gate in gates:
                with explained(gate.pid):
                    gate.begin()
            self._restore.run(interrupts, meter)
        except GpucrError:
            self._finish(gates)  # what kept staging from being filled explains better than a driver that was left alone
            raise
        self._finish(gates)
        return total_bytes

    def undo(self) -> None:
        """Nothing: CriuRestore ends the processes."""

    def _gates(self, data: Mapping[int, DeviceData], interrupts: Interrupts, meter: Meter) -> list[Gate]:
        context = self._context
        restore_threads = context.restore_threads()
        stays = {r.pid for r in context.snapshot.manifest.processes if r.found_state is CudaState.CHECKPOINTED}
        gates: list[Gate] = []
        for pid, each in data.items():
            tid = restore_threads[context.pids[pid]]
            wait = self._wait_for(pid, interrupts, meter)
            if pid in stays:
                wait(each.size_bytes)
                with explained(context.pids[pid]):
                    staging.attach(tid, context.files[pid].fd, each.extents)
            else:
                gates.append(Gate(context.pids[pid], tid, context.files[pid].fd, each.extents, wait))
        return gates

    def _wait_for(self, pid: int, interrupts: Interrupts, meter: Meter) -> Callable[[int], int]:
        reader = self._context.reader
        assert reader is not None  # noqa: S101 - LoadDevice ran before
        deadline = self._context.deadline

        def wait(up_to_bytes: int) -> int:
            while not reader.wait_for(pid, up_to_bytes, _WAIT_S):
                interrupts.check()
                if deadline is not None and time.monotonic() > deadline:
                    raise DeadlineExceeded(
                        "the time was over while device memory was read", hint="give a longer --timeout"
                    )
            meter.set(reader.loaded_bytes)
            return reader.loaded(pid)

        return wait

    @staticmethod
    def _finish(gates: Sequence[Gate]) -> None:
        for gate in gates:
            with explained(gate.pid):
                gate.finish()


def _staging_file(size_bytes: int) -> StagingFile:
    try:
        return StagingFile.create(size_bytes)
    except OSError as e:
        raise Unsupported(
            f"no file in memory can be made for {size_bytes} bytes of device memory: {e.strerror}",
            hint="see the limits on file size and open files of the shell that gpucr runs in (ulimit -f, ulimit -n)",
        ) from e


def _member(record: ProcessRecord, restored: ProcessId | None) -> GangMember:
    if restored is None:
        raise JobChanged(
            f"process {record.pid} ({record.name}) ended while the job was restored",
            pids=[record.pid],
            hint="somebody may have killed it; the other processes have been ended, the snapshot is intact",
        )
    assert record.found_state is not None  # noqa: S101 - the caller passes CUDA processes only
    return GangMember(restored, record.found_state)

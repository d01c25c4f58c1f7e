"""The steps of a restore that concern the snapshot, CRIU, and device memory on its way."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from gpucr.criu.images import FilesImage, RestoreImages
from gpucr.criu.options import RestoreOptions
from gpucr.criu.recovery import EndRestore, EndRestored
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
from gpucr.gpu_state import kinds
from gpucr.gpu_state.backend import Return
from gpucr.gpu_state.placement import Placement
from gpucr.gpu_state.steps import RestoreGang
from gpucr.jobs.sandbox_steps import RestoredTree, RestoreSite
from gpucr.linux import processes, trusted_paths
from gpucr.model import CudaState, DevicePart, GangMember, ProcessId
from gpucr.quantities import counted, format_bytes
from gpucr.snapshot.device.reader import DeviceReader
from gpucr.snapshot.job_snapshot import JobSnapshot
from gpucr.snapshot.manifest import FolderRecord, Manifest, ProcessRecord
from gpucr.snapshot.origin import RestoreSource, images_read_from
from gpucr.surroundings.opened_files import require_as_recorded
from gpucr.surroundings.scheduling import restore_scheduling
from gpucr.undo.interrupts import Interrupts
from gpucr.undo.logs import log_kept_on_failure
from gpucr.undo.protection import Protection
from gpucr.undo.steps import Meter, Result

_WAIT_S = 0.2


@dataclass(frozen=True)
class Loading:
    """Device memory on its way to what brings it back; the pids are the manifest's."""

    returns: Mapping[DevicePart, Return]
    reader: DeviceReader


class LoadDevice:
    """Begin to read device memory; it goes on until all of it is in its place."""

    name = "load"

    def __init__(self, source: RestoreSource) -> None:
        self._source = source
        self._returns: dict[DevicePart, Return] = {}
        self.loading: Result[Loading] = Result()

    def describe(self) -> str:
        """How much."""
        stored = sum(data.stored_bytes for data in self._source.snapshot.manifest.device_parts.values())
        return f"begin to read {format_bytes(stored)} of device memory"

    def run(self, interrupts: Interrupts, meter: Meter) -> int:
        """Make room and start the threads that read."""
        for part, data in self._source.snapshot.manifest.device_parts.items():
            back = self._returns[part] = kinds.return_for(part, data.kind, data.extents, data.size_bytes)
            if back.note is not None:
                meter.note(back.note)
        reader = DeviceReader(self._source.pieces(), [each.destination for each in self._returns.values()])
        self.loading.set(Loading(self._returns, reader))
        reader.start()
        return 0

    def undo(self) -> None:
        """Stop reading."""
        if (loading := self.loading.if_known) is not None:
            loading.reader.cancel()

    def close(self) -> None:
        """Stop reading, and free what was read; what a process has by now stays its own."""
        self.undo()
        for each in self._returns.values():
            each.close()


class ProvideFiles:
    """Every file of the snapshot is at hand and checked. Device memory is checked as it is read."""

    def __init__(self, source: RestoreSource, protection: Protection | None) -> None:
        self._source = source
        self._protection = protection
        self.name = source.provision[0]

    def describe(self) -> str:
        """From where."""
        return self._source.provision[1]

    def run(self, interrupts: Interrupts, meter: Meter) -> int:
        """Verify or fetch. Returns the bytes of the files."""
        return self._source.provide(self._protection, interrupts, meter)

    def undo(self) -> None:
        """Nothing: what was fetched goes when the operation ends."""


class MakeFolders:
    """Make the folders again in which the job's local sockets were bound, where they are missing."""

    name = "folders"

    def __init__(self, folders: Sequence[FolderRecord]) -> None:
        self._folders = folders
        self._made: list[str] = []

    def describe(self) -> str:
        """What for."""
        return "make the missing folders of the job's sockets"

    def run(self, interrupts: Interrupts, meter: Meter) -> int:
        """Make them, outermost first, with the owner and mode that they had.

        CRIU binds the sockets by their paths, as root: no folder, also none that is there, may be behind a link of
        another user's.
        """
        for record in self._folders:
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
    """CRIU makes the process tree again; the CUDA processes (``gang``, None: none) come back CHECKPOINTED."""

    name = "criu"

    def __init__(
        self,
        manifest: Manifest,
        images: RestoreImages,
        site: Result[RestoreSite],
        options: RestoreOptions,
        *,
        gang: Gang | None,
        protection: Protection | None,
        deadline: float | None,
    ) -> None:
        self._manifest = manifest
        self._images = images
        self._site = site
        self._options = options
        self._gang = gang
        self._protection = protection
        self._deadline = deadline
        self._root_pid = 0
        self.tree: Result[RestoredTree] = Result()
        self.warnings: tuple[str, ...] = ()

    def describe(self) -> str:
        """How many processes."""
        manifest = self._manifest
        return f"restore {counted(len(manifest.processes), 'process')} with CRIU, root pid {manifest.root_pid}"

    def run(self, interrupts: Interrupts, meter: Meter) -> int:
        """Restore, then take stock of the restored processes."""
        site = self._site.value
        with interrupts.allowed(), log_kept_on_failure("restore") as log_path:
            self._root_pid = site.criu.restore(
                self._images.folder,
                self._options,
                log_path=log_path,
                leave_stopped=self._gang is not None,
                outputs=site.outputs,
                on_start=self._on_start,
                on_notify=lambda hook, pid: self._on_notify(hook, pid, interrupts),
                check=interrupts.check,
                deadline=self._deadline,
            )
            interrupts.postpone()
        if self._gang is not None:
            self._take_stock()
        return sum(file.size_bytes for file in self._manifest.files)

    def _take_stock(self) -> None:
        self.tree.set(take_stock(self._root_pid, self._manifest, self._gang, self._protection))

    def _on_start(self, criu: ProcessId) -> None:
        # One in a sandbox ends with it, and so do the tasks that it makes, whose pids mean others here.
        if self._protection is not None and not self._site.value.criu.is_in_sandbox:
            with images_read_from(self._images.original):
                pids = task_pids(self._images.original)
            self._protection.protect(EndRestore(criu, pids))

    def _on_notify(self, hook: str, pid: int, interrupts: Interrupts) -> None:
        """All threads are there, and stand before their first instruction: what they start inherits from them."""
        if hook == "pre-resume":
            with images_read_from(self._images.folder):
                names = FilesImage.read(self._images.folder).paths().values()
            pids = [process.pid for process in processes.tree(pid)]
            require_as_recorded(pids, {*names, *map(str, self._site.value.outputs.values())})
            self._root_pid = pid
            if self._gang is None:
                self._take_stock()  # CRIU lets it run now, and it may have ended a moment later
            self.warnings = tuple(restore_scheduling(self._manifest, pid))
            if self._gang is None:
                interrupts.commit()

    def undo(self) -> None:
        """End every process of the restored tree; the snapshot stays as it is."""
        if self._root_pid:
            end_restored(self._root_pid, self.tree.if_known)


def take_stock(root_pid: int, manifest: Manifest, gang: Gang | None, protection: Protection | None) -> RestoredTree:
    """Find the processes of the manifest in the tree of ``root_pid``, which has just been restored.

    Those with CUDA become the members of ``gang``.
    """
    try:
        tree = processes.tree(root_pid)
    except ProcessNotFound as e:
        raise JobChanged(
            "the job's first process ended while the job was restored",
            pids=[root_pid],
            hint="somebody may have killed it; the snapshot is intact",
        ) from e
    restored = tuple(process.id for process in tree)
    if protection is not None:
        protection.protect(EndRestored(restored))
        protection.withdraw(EndRestore)
        protection.claim(process.pid for process in restored)
    by_namespace_pid = {process.ns_pids[-1]: process.id for process in tree}
    pids: dict[int, int] = {}
    for record in manifest.processes:
        found = by_namespace_pid.get(record.ns_pids[-1])
        if found is not None:
            pids[record.pid] = found.pid
        if gang is not None and record.found_state is not None:
            gang.add([_member(record, found)])
    return RestoredTree(restored, pids)


def end_restored(root_pid: int, tree: RestoredTree | None) -> None:
    """End every process of the restored tree (None: it was not looked at yet). Raises JobDamaged where one lives."""
    known = tree.processes if tree is not None else ()
    now: set[ProcessId] = set()
    with contextlib.suppress(ProcessNotFound):  # the root may have ended by itself, and its pid be another's by now
        found = processes.tree(root_pid)
        now = {process.id for process in found if not known or found[0].id == known[0]}
    left = processes.kill_and_wait(now | set(known))
    if left:
        failures = [f"process {process.pid} does not end" for process in left]
        raise JobDamaged("not every restored process could be ended: " + ", ".join(failures), failures=failures)


def restore_threads(snapshot: JobSnapshot, tree: RestoredTree) -> dict[int, int]:
    """The thread that does the driver's work, per pid of the gang. Raises SnapshotDamaged."""
    found: dict[int, int] = {}
    for record in snapshot.manifest.processes:
        if record.found_state is None or record.restore_thread is None:
            continue
        pid = tree.pids[record.pid]
        tid = processes.thread_with_innermost_id(pid, record.restore_thread)
        if tid is None:
            raise SnapshotDamaged(
                f"the manifest names thread {record.restore_thread} of process {record.pid}, which it has not",
                path=snapshot.where,
            )
        found[pid] = tid
    return found


def to_continue(manifest: Manifest, tree: RestoredTree) -> list[ProcessId]:
    """The processes without CUDA that were not stopped when they were dumped."""
    chosen = {tree.pids.get(r.pid) for r in manifest.processes if r.found_state is None and not r.stopped}
    return [process for process in tree.processes if process.pid in chosen]


class RestoreDevice:
    """Staging files filled → mapped into the processes → device memory. All three go on at the same time."""

    name = "restore"

    def __init__(
        self,
        snapshot: JobSnapshot,
        loading: Result[Loading] | None,
        tree: Result[RestoredTree],
        restore: RestoreGang,
        placement: Placement,
        deadline: float | None,
    ) -> None:
        self._snapshot = snapshot
        self._placement = placement
        self._loading = loading
        self._tree = tree
        self._restore = restore
        self._deadline = deadline

    def describe(self) -> str:
        """What the driver restores."""
        return self._restore.describe()

    def run(self, interrupts: Interrupts, meter: Meter) -> int:
        """Let the driver take what is read as it comes. Returns the bytes of device memory."""
        self._placement.restored_as(self._tree.value.pids)
        data = self._snapshot.manifest.device_parts
        total_bytes = sum(each.size_bytes for each in data.values())
        meter.expect(total_bytes)
        returns = self._loading.value.returns if self._loading is not None else {}
        lowest = {part: each for part, each in returns.items() if not part.level}
        try:
            self._begin(lowest, interrupts, meter)
            self._restore.run(interrupts, meter)
        except GpucrError:
            self._finish(lowest)  # what kept memory from coming explains better than a driver that was left alone
            raise
        self._finish(lowest)
        # The driver has restored all of them, and none runs.
        for level in sorted({part.level for part in returns} - {0}):
            over = {part: each for part, each in returns.items() if part.level == level}
            self._begin(over, interrupts, meter)
            self._finish(over)
        return total_bytes

    def undo(self) -> None:
        """Nothing: CriuRestore ends the processes."""

    def _begin(self, returns: Mapping[DevicePart, Return], interrupts: Interrupts, meter: Meter) -> None:
        tree, loading = self._tree.value, self._loading
        threads = restore_threads(self._snapshot, tree)
        states = {record.pid: record.found_state for record in self._snapshot.manifest.processes}
        for part, each in returns.items():
            pid, stays = tree.pids[part.pid], states[part.pid] is CudaState.CHECKPOINTED
            assert loading is not None  # noqa: S101 - there is what it loads into
            each.begin(pid, threads[pid], self._wait_for(part, loading.value.reader, interrupts, meter), stays=stays)

    def _wait_for(
        self, part: DevicePart, reader: DeviceReader, interrupts: Interrupts, meter: Meter
    ) -> Callable[[int], int]:
        deadline = self._deadline

        def wait(up_to_bytes: int) -> int:
            while not reader.wait_for(part, up_to_bytes, _WAIT_S):
                interrupts.check()
                if deadline is not None and time.monotonic() > deadline:
                    raise DeadlineExceeded(
                        "the time was over while device memory was read", hint="give a longer --timeout"
                    )
            meter.set(reader.loaded_bytes)
            return reader.loaded(part)

        return wait

    @staticmethod
    def _finish(returns: Mapping[DevicePart, Return]) -> None:
        for each in returns.values():
            each.finish()


def _member(record: ProcessRecord, restored: ProcessId | None) -> GangMember:
    if restored is None:
        raise JobChanged(
            f"process {record.pid} ({record.name}) ended while the job was restored",
            pids=[record.pid],
            hint="somebody may have killed it; the other processes have been ended, the snapshot is intact",
        )
    assert record.found_state is not None  # noqa: S101 - the caller passes CUDA processes only
    return GangMember(restored, record.found_state)

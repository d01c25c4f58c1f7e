"""The processes restored by CRIU: identify them, and end them if the restore fails."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct

from gpucr.criu.recovery import EndRestore, EndRestored
from gpucr.errors import JobChanged, JobDamaged, ProcessNotFound, SnapshotDamaged
from gpucr.linux import processes
from gpucr.model import CudaState, GangMember, ProcessId, ProcessInfo
from gpucr.snapshot.job_snapshot import JobSnapshot
from gpucr.snapshot.manifest import Manifest, ProcessRecord
from gpucr.undo.protection import Protection

if TYPE_CHECKING:
    from gpucr.gang import Gang


class RestoredTree(Struct, frozen=True):
    """The processes made by CRIU, the root first. ``pids``: the current pid for each of the manifest's.

    ``other_roots`` are the roots of all trees but the first.
    """

    processes: tuple[ProcessId, ...]
    pids: Mapping[int, int]
    other_roots: tuple[int, ...] = ()

    @property
    def root_pid(self) -> int:
        """The pid of the tree's first process, as gpucr sees it."""
        return self.processes[0].pid

    def now(self, records: Iterable[ProcessRecord]) -> list[ProcessId]:
        """The current processes for these of the manifest."""
        pids = {self.pids.get(record.pid) for record in records}
        return [each for each in self.processes if each.pid in pids]


def take_stock(
    root_pids: Sequence[int],
    manifest: Manifest,
    gang: Gang | None,
    protection: Protection,
    tree: Sequence[ProcessInfo] = (),
) -> RestoredTree:
    """Find the manifest's processes in the just restored trees of ``root_pids``. ``tree``: if it was read just now.

    Those with CUDA become the members of ``gang``.
    """
    try:
        tree = tree or [process for each in processes.trees(root_pids) for process in each]
    except ProcessNotFound as e:
        raise JobChanged(
            "the job's first process ended while the job was restored",
            pids=root_pids,
            hint="it may have been killed; the snapshot is intact",
        ) from e
    restored = tuple(process.id for process in tree)
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
            gang.add([_member(record, record.found_state, found)])
    return RestoredTree(restored, pids, tuple(root_pids[1:]))


def end_restored(root_pids: Sequence[int], tree: RestoredTree | None) -> None:
    """End every process of the restored trees (None: not examined yet). Raises JobDamaged if one lives."""
    known = tree.processes if tree is not None else ()
    now: set[ProcessId] = set()
    for root_pid in root_pids:
        with contextlib.suppress(ProcessNotFound):  # a root may have ended by itself, and its pid been reused
            found = processes.tree(root_pid)
            now |= {process.id for process in found if not known or found[0].id in known}
    left = processes.kill_and_wait(now | set(known))
    if left:
        failures = [f"process {process.pid} does not end" for process in left]
        raise JobDamaged("not every restored process could be ended: " + ", ".join(failures), failures=failures)


def _member(record: ProcessRecord, found_state: CudaState, restored: ProcessId | None) -> GangMember:
    if restored is None:
        raise JobChanged(
            f"process {record.pid} ({record.name}) ended while the job was restored",
            pids=[record.pid],
            hint="it may have been killed; the other processes have been ended, the snapshot is intact",
        )
    return GangMember(restored, found_state)


def restore_threads(snapshot: JobSnapshot, tree: RestoredTree) -> dict[int, int]:
    """The restore threads, by pid of the gang. Raises SnapshotDamaged."""
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

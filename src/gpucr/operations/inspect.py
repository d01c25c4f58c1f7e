"""What a snapshot holds: the manifest and CRIU's images put together. Nothing is changed, and no driver is needed."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from msgspec import Struct

from gpucr.criu.contents import ImagedProcess, SharedMemory, read_contents
from gpucr.criu.imaged_files import OpenDescriptor
from gpucr.criu.imaged_memory import KINDS, MemoryUse
from gpucr.errors import StoreDamaged
from gpucr.snapshot.job_snapshot import JobSnapshot
from gpucr.snapshot.location import Place, open_snapshot, source_of
from gpucr.snapshot.manifest import ProcessRecord
from gpucr.snapshot.origin import RestoreSource

if TYPE_CHECKING:
    from gpucr.store.keys import Secret


class ProcessContents(Struct, frozen=True):
    """One process of a snapshot.

    ``record`` is the manifest's: pid, threads, command line, CUDA state. ``memory`` (by kind, with its device memory)
    and ``descriptors`` come from CRIU's images, and are empty if those cannot be read.
    """

    record: ProcessRecord
    memory: tuple[MemoryUse, ...]
    descriptors: tuple[OpenDescriptor, ...]

    @property
    def pid(self) -> int:
        """The pid that it had for gpucr at the dump."""
        return self.record.pid


@dataclass(frozen=True)
class SnapshotContents:
    """What a snapshot holds.

    ``processes`` are in the manifest's order, the root first. ``shared`` is memory that processes share, stored once;
    its ``pids`` are those of the processes here. ``problems``: a line for each image that could not be read, and why.
    ``packed_bytes``: the compressed size of everything; None if nothing is compressed, as in every folder.
    """

    snapshot: JobSnapshot
    processes: tuple[ProcessContents, ...] = field(repr=False)
    shared: tuple[SharedMemory, ...] = field(repr=False)
    problems: tuple[str, ...]
    packed_bytes: int | None = None

    @property
    def memory(self) -> tuple[MemoryUse, ...]:
        """The memory of all processes by kind. Shared memory counts once per mapping, but is stored once."""
        stored = sum(each.stored_bytes for each in self.shared)
        return _sum((use for process in self.processes for use in process.memory), stored)


def inspect(snapshot: JobSnapshot | Place, *, key: Secret | None = None) -> SnapshotContents:
    """What this snapshot holds: processes, their memory by kind, their files and sockets, shared memory.

    The manifest is checked; CRIU's images are read where possible, and a bad one is reported as a problem
    (`Snapshot.verify` compares everything with its digests). ``key`` opens an encrypted store. Raises InvalidRequest,
    SnapshotError and its subclasses, like `open_snapshot`.
    """
    opened = open_snapshot(snapshot, key) if isinstance(snapshot, str | os.PathLike) else snapshot
    records = opened.manifest.processes
    try:
        source = source_of(opened)
    except StoreDamaged as e:  # of the store's content only the manifest is known to exist
        bare = tuple(_process(record, None, None) for record in records)
        return SnapshotContents(opened, bare, (), (f"pstree.img: {e.message}",))
    in_images = {record.ns_pids[-1]: record.staging for record in records if record.device_data is None}
    trees = [read_contents(open_image, in_images) for open_image in source.openers]
    imaged = {process.pid: process for contents in trees for process in contents.processes}
    problems = tuple(problem for contents in trees for problem in contents.problems)
    if all(contents.processes for contents in trees):
        missing = [record.pid for record in records if record.ns_pids[-1] not in imaged]
        problems += tuple(f"pstree.img: it has no process {pid}" for pid in missing)
    outer = {record.ns_pids[-1]: record.pid for record in records}
    return SnapshotContents(
        snapshot=opened,
        processes=tuple(_process(record, imaged.get(record.ns_pids[-1]), source) for record in records),
        shared=tuple(_with_outer_pids(each, outer) for contents in trees for each in contents.shared),
        problems=problems,
        packed_bytes=source.packed_bytes(),
    )


def _process(record: ProcessRecord, imaged: ImagedProcess | None, source: RestoreSource | None) -> ProcessContents:
    memory = imaged.memory if imaged is not None else ()
    for part, data in reversed(record.device_parts.items()):
        packed_bytes = source.packed_bytes(part) if source is not None else None
        memory = (MemoryUse("device", len(data.extents), data.size_bytes, data.stored_bytes, packed_bytes), *memory)
    return ProcessContents(record, memory, imaged.descriptors if imaged is not None else ())


def _with_outer_pids(shared: SharedMemory, outer: dict[int, int]) -> SharedMemory:
    pids = tuple(outer.get(pid, pid) for pid in shared.pids)
    return SharedMemory(shared.image_id, shared.name, shared.size_bytes, shared.stored_bytes, pids)


def _sum(uses: Iterable[MemoryUse], shared_stored_bytes: int) -> tuple[MemoryUse, ...]:
    totals: dict[str, MemoryUse] = {}
    for use in uses:
        so_far = totals.get(use.kind, MemoryUse(use.kind, 0, 0, 0))
        totals[use.kind] = MemoryUse(
            use.kind,
            so_far.mappings + use.mappings,
            so_far.mapped_bytes + use.mapped_bytes,
            shared_stored_bytes if use.kind == "shared" else so_far.stored_bytes + use.stored_bytes,
            None if use.packed_bytes is None else (so_far.packed_bytes or 0) + use.packed_bytes,
        )
    return tuple(totals[kind] for kind in KINDS if kind in totals)

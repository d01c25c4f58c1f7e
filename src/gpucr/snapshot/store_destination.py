"""A dump into a store: device memory goes there as the driver delivers it, CRIU's images through a working folder."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from msgspec import structs

from gpucr.criu import page_images
from gpucr.diagnosis import preflight
from gpucr.diagnosis.preflight.support import machine as facts
from gpucr.linux import memory
from gpucr.model import CHECK_KNOWN_S, DevicePart, Job, StagedExtent
from gpucr.snapshot.destination import DumpCounts
from gpucr.snapshot.device.crew import THREADS, PieceBuffer, buffers_bytes
from gpucr.snapshot.device.sink import DeviceSink
from gpucr.snapshot.device.writer import DeviceWriter
from gpucr.snapshot.folder import UnfinishedSnapshot, completed
from gpucr.snapshot.in_store import SnapshotInStore, device_area, snapshot_url
from gpucr.snapshot.job_snapshot import JobSnapshot
from gpucr.snapshot.manifest import DeviceData, FileRecord, Manifest, encode
from gpucr.snapshot.recovery import RemoveWorkingFolder, discard_folder
from gpucr.snapshot.working_folder import WorkingFolder
from gpucr.store import snapshots
from gpucr.store.checks import Checks
from gpucr.store.codec import Compress
from gpucr.store.local import LocalBackend
from gpucr.store.opened import Store
from gpucr.store.pack import PREFIX as PACKS_PREFIX
from gpucr.store.pieces import ZERO_ID, PieceRef
from gpucr.store.session import WriteSession
from gpucr.store.stored_snapshot import Area, SetPart
from gpucr.undo.protection import Protection
from gpucr.undo.steps import Result

_NO_SPACE_HINT = "free space in the folder for temporary files, or name another one with TMPDIR"


_PIECES_A_THREAD = 4


class StoreTarget:
    """A snapshot in a store (see `DumpTarget`). ``job`` and ``device_bytes``: what will be dumped.

    ``trust_store``: assume that data which the store already has is intact, without reading it; what was last read
    longer ago than ``check_known_s`` is read else. ``part``: its place in
    a set of several nodes.

    Raises InvalidRequest for an invalid name.
    """

    def __init__(
        self,
        store: Store,
        name: str | None,
        *,
        compress: Compress,
        trust_store: bool,
        check_known_s: float = CHECK_KNOWN_S,
        job: Job,
        device_bytes: int,
        part: SetPart | None = None,
    ) -> None:
        if name is not None:
            snapshots.check_name(name)
        self._store = store
        self._name = name
        self._part = part
        self._compress: Compress = compress
        self._checks = Checks(trust=trust_store, known_s=check_known_s)
        resident_bytes = sum(memory.resident_bytes(pid) for pid in job.pids)
        self._sink = StoreSink(store)
        self._working = WorkingFolder(resident_bytes, besides_bytes=device_bytes + self.buffers_bytes)
        self.folder = UnfinishedSnapshot(self._working.snapshot)
        self._session: Result[WriteSession] = Result()
        self._records: Result[tuple[FileRecord, ...]] = Result()
        self._areas: list[Area] = []
        self._snapshot: SnapshotInStore | None = None

    @property
    def where(self) -> str:
        """The store, and the name of the snapshot if it has one."""
        return snapshot_url(self._store, self._name)

    @property
    def preparation(self) -> str:
        return f"look what the store {self._store.backend.url} has already"

    @property
    def images_at(self) -> str:
        return f"{self._store.backend.url}, by way of {self._working.path.parent}"

    @property
    def sink(self) -> DeviceSink:
        return self._sink

    @property
    def disk(self) -> Path | None:
        """The store's folder, if it is in one."""
        backend = self._store.backend
        return Path(backend.url) if isinstance(backend, LocalBackend) else None

    @property
    def buffers_bytes(self) -> int:
        """Per thread: a piece, its compressed form, and the compressor's state."""
        return _PIECES_A_THREAD * buffers_bytes(self._sink.piece_bytes)

    def findings(self, job: Job, device_bytes: int) -> list[preflight.Finding]:
        """Whether the disk has room, if known, counting data that is also elsewhere meanwhile."""
        return [*self._findings_of_room(job, device_bytes), *self._findings_of_secrecy()]

    def _findings_of_room(self, job: Job, device_bytes: int) -> list[preflight.Finding]:
        if self.disk is None:
            return []
        # How much of the data is new to a store, or can be compressed, is only known once it arrives.
        is_new = self._compress == "none" and not any(True for _ in self._store.backend.list(PACKS_PREFIX))
        return preflight.check_disk(job, self.disk, device_bytes, surely_bytes=device_bytes if is_new else 0)

    def _findings_of_secrecy(self) -> list[preflight.Finding]:
        if self._store.keys is None or self._working.is_in_memory:
            return []
        why = "there is too little memory for them, or TMPDIR names a folder on a disk"
        return [facts.IMAGES_ON_DISK.seen(why, folder=self._working.path.parent)]

    def create(self, protection: Protection) -> None:
        """Make the working folder, and check what the store already has, while the job still runs."""
        protection.protect(RemoveWorkingFolder(str(self._working.path)))
        self._working.create()
        self.folder.create()
        protection.protect(*discard_folder(self.folder))
        session = WriteSession.begin(self._store, compress=self._compress, checks=self._checks)
        self._session.set(session)
        self._sink.session.set(session)

    @property
    def is_committed(self) -> bool:
        """Whether the snapshot's object is in the store."""
        return self._snapshot is not None

    def seal_images(self) -> None:
        if self._records.if_known is None:
            with completed(self.where, hint=_NO_SPACE_HINT):
                self._records.set(self._store_files())

    def commit(self, draft: Manifest) -> JobSnapshot:
        """Publish the packs and their index, then create the snapshot's object."""
        self.seal_images()
        session = self._session.value
        complete = structs.replace(draft, files=self._records.value)
        with completed(self.where, hint=_NO_SPACE_HINT):
            stored = session.commit(
                name=self._name,
                manifest=encode(complete),
                areas=(*self._areas, *self._sink.areas),
                part=self._part,
            )
        self._snapshot = SnapshotInStore(self._store, stored, complete)
        # For the guard: CRIU may end the job now. Without it the guard brings the job back, which is harmless too.
        with contextlib.suppress(OSError):
            self.folder.mark_committed()
        return self._snapshot

    def counts(self, writer: DeviceWriter) -> DumpCounts:
        """The writer's counts; the written bytes include index and snapshot."""
        counts = self._session.value.writer.counts
        return DumpCounts(**structs.asdict(structs.replace(counts, seen_bytes=counts.seen_bytes - writer.again_bytes)))

    def discard(self) -> None:
        """End the session, or remove the snapshot. A prune removes what was stored for it."""
        try:
            if self._snapshot is not None:
                snapshots.remove(self._store, self._snapshot.stored.id)
            elif (session := self._session.if_known) is not None:
                session.discard()
        finally:
            self.close()

    def close(self) -> None:
        self.folder.close()
        self._working.remove()

    # --- files -----------------------------------------------------------------------------------------------

    def _store_files(self) -> tuple[FileRecord, ...]:
        session = self._session.value
        files = list(self._files())
        with ThreadPoolExecutor(THREADS, "store-files") as pool:
            refs = pool.map(lambda part: session.writer.add(_read(part)), [p for file in files for p in file.parts])
            self._areas = [session.area(file.path, [next(refs) for _ in file.parts]) for file in files]
        return tuple(FileRecord(file.path, file.size_bytes, ()) for file in files)

    def _files(self) -> Iterator[_File]:
        piece_bytes = self._store.config.piece_bytes
        for path in (*self.folder.image_folders, self.folder.shared):
            cuts = page_images.cuts(path, piece_bytes)
            for name in sorted(os.listdir(path)) if path.is_dir() else ():
                size_bytes = os.lstat(path / name).st_size
                starts = cuts.get(name, tuple(range(0, size_bytes, piece_bytes)))
                ends = [*starts[1:], size_bytes] if starts else []
                parts = [_Part(path / name, start, end - start) for start, end in zip(starts, ends, strict=True)]
                yield _File(f"{path.name}/{name}", size_bytes, parts)


class _Part(NamedTuple):
    path: Path
    start: int
    length: int


class _File(NamedTuple):
    path: str
    size_bytes: int
    parts: Sequence[_Part]


def _read(part: _Part) -> bytearray:
    data = bytearray(part.length)
    view, done = memoryview(data), 0
    # Reopen for each part: there may be more files than a process may have open.
    fd = os.open(part.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        while done < part.length:
            count = os.preadv(fd, [view[done:]], part.start + done)
            if count == 0:
                raise OSError("a file of the snapshot has become shorter")
            done += count
    finally:
        os.close(fd)
    return data


class StoreSink:
    """A store as a sink for device memory (see `DeviceSink`). ``areas``: the result, from `record` on."""

    def __init__(self, store: Store) -> None:
        self.session: Result[WriteSession] = Result()
        self.areas: list[Area] = []
        self._store = store
        self._piece_bytes = store.config.piece_bytes

    keeps_files = False

    @property
    def digest_key(self) -> bytes | None:
        return self._store.digest_key

    @property
    def names_are_digests(self) -> bool:
        """Of a store with BLAKE3."""
        return self._store.config.hash == "blake3"

    def has(self, digest: bytes, length: int, before: bytes | None) -> bytes | None:
        """What the store has, and what was put into it."""
        is_known = digest == ZERO_ID or self.names_are_digests
        return digest if is_known and self.session.value.writer.rely(PieceRef(digest, length)) else None

    def files(self, part: DevicePart) -> Sequence[int]:
        """None: pieces are compressed, encrypted, and shared."""
        raise ValueError("a store has no files of device memory")

    @property
    def piece_bytes(self) -> int:
        return self._piece_bytes

    def add(self, part: DevicePart, size_bytes: int) -> None:
        """Nothing: pieces have no fixed place."""

    def grow(self, part: DevicePart, size_bytes: int) -> None:
        pass

    def put(self, part: DevicePart, piece: int, buffer: PieceBuffer, length: int, before: bytes | None) -> bytes:
        """Store a piece. A changed one becomes an additional piece; nothing refers to the old one."""
        writer, data = self.session.value.writer, buffer.part(0, length)
        if before is not None and writer.name(data) == before:
            return before
        return writer.add(data).id

    def sync(self) -> None:
        """Nothing yet: the commit publishes all open packs, including those with the images."""

    def record(
        self,
        part: DevicePart,
        size_bytes: int,
        names: Sequence[bytes],
        extents: Sequence[StagedExtent],
        contents: Sequence[bytes | None],
    ) -> DeviceData:
        """Store the list of the pieces."""
        starts = range(0, size_bytes, self._piece_bytes)
        refs = [
            PieceRef(name, min(self._piece_bytes, size_bytes - start))
            for name, start in zip(names, starts, strict=True)
        ]
        self.areas.append(self.session.value.area(device_area(part), refs))
        store_bytes = sum(ref.length for ref in refs if not ref.is_zero)
        return DeviceData(tuple(extents), size_bytes, self._piece_bytes, 0, (), store_bytes)

    def close(self) -> None:
        """Nothing: the target owns the session."""

"""Where a dump goes: a folder that becomes a snapshot, or a store (store_destination.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from msgspec import Struct

from gpucr.diagnosis import preflight
from gpucr.model import Job
from gpucr.snapshot.device.crew import buffers_bytes
from gpucr.snapshot.device.folder_sink import FolderSink
from gpucr.snapshot.device.sink import DeviceSink
from gpucr.snapshot.device.writer import DeviceWriter
from gpucr.snapshot.folder import IMAGES_NAME, UnfinishedSnapshot, check_target
from gpucr.snapshot.job_snapshot import JobSnapshot
from gpucr.snapshot.manifest import Manifest
from gpucr.snapshot.recovery import discard_folder
from gpucr.undo.protection import Protection
from gpucr.undo.steps import Result


class DumpCounts(Struct, frozen=True):
    """A dump's data, in bytes.

    ``seen_bytes``: device memory, and all files (CRIU's images, shared memory). Of these ``zero_bytes`` were zero,
    ``known_bytes`` were in the store already, and compression saved ``compressed_saved_bytes``. ``written_bytes`` were
    written. Of the data that the store had already, ``checked_bytes`` were read and ``repaired_bytes`` were damaged and
    rewritten.
    """

    seen_bytes: int
    written_bytes: int
    zero_bytes: int
    known_bytes: int = 0
    compressed_saved_bytes: int = 0
    checked_bytes: int = 0
    repaired_bytes: int = 0


class DumpTarget(Protocol):
    """A snapshot in the making. It exists only once `commit` returns; after `discard` it never will.

    ``folder`` is where CRIU writes its images, and where files of shared memory go.
    """

    folder: UnfinishedSnapshot

    @property
    def where(self) -> str:
        """Where the snapshot goes, as messages name it."""

    @property
    def preparation(self) -> str:
        """One line that says what `create` will do."""

    @property
    def images_at(self) -> str:
        """The name of the images' folder in messages."""

    @property
    def sink(self) -> DeviceSink:
        """The sink for device memory, from `create` on."""

    @property
    def disk(self) -> Path | None:
        """A folder on the file system that device memory goes to; None: not on this machine."""

    @property
    def buffers_bytes(self) -> int:
        """Maximum host memory of the writers' buffers."""

    def findings(self, job: Job, device_bytes: int) -> list[preflight.Finding]:
        """Findings against it, before anything is changed."""

    def create(self, protection: Protection) -> None:
        """Make the place for the snapshot's files. Raises SnapshotExists, SnapshotError."""

    @property
    def is_committed(self) -> bool:
        """Whether the snapshot is complete: `commit` has returned."""

    def seal_images(self) -> None:
        """Store the files of the complete ``folder``, while pieces are still being written."""

    def commit(self, draft: Manifest) -> JobSnapshot:
        """Make everything durable, then create the snapshot. The draft lacks only what `seal_images` adds."""

    def counts(self, writer: DeviceWriter) -> DumpCounts:
        """What was written and what the place already had; known after `commit`."""

    def discard(self) -> None:
        """Remove everything that could be in the way, even after `commit`."""

    def close(self) -> None:
        """Remove and close temporary resources of the operation. Idempotent."""


class FolderTarget:
    """A folder that becomes a plain snapshot, or the GPU part of a container's checkpoint (see `DumpTarget`)."""

    def __init__(self, path: Path, *, with_images: bool = True) -> None:
        check_target(path)
        self.folder = UnfinishedSnapshot(path, with_images=with_images)
        self._sink = FolderSink()
        self._manifest: Result[Manifest] = Result()

    @property
    def where(self) -> str:
        return str(self.folder.path)

    @property
    def preparation(self) -> str:
        return f"make the private folder {self.where}"

    @property
    def images_at(self) -> str:
        return str(self.folder.path / IMAGES_NAME)

    @property
    def sink(self) -> DeviceSink:
        return self._sink

    @property
    def disk(self) -> Path:
        """The folder, or its parent if it does not exist yet."""
        path = self.folder.path
        return path if path.is_dir() else path.resolve().parent

    @property
    def buffers_bytes(self) -> int:
        return buffers_bytes(self._sink.piece_bytes)

    def findings(self, job: Job, device_bytes: int) -> list[preflight.Finding]:
        """Whether the disk has room."""
        return preflight.check_disk(job, self.disk, device_bytes)

    def create(self, protection: Protection) -> None:
        self.folder.create(lambda: protection.protect(*discard_folder(self.folder)))
        self._sink.folder = self.folder.device

    @property
    def is_committed(self) -> bool:
        """Whether the manifest has been written."""
        return self.folder.is_committed

    def seal_images(self) -> None:
        """Hash and sync the files."""
        self.folder.seal_images()

    def commit(self, draft: Manifest) -> JobSnapshot:
        snapshot = self.folder.commit(draft)
        self._manifest.set(snapshot.manifest)
        return snapshot

    def counts(self, writer: DeviceWriter) -> DumpCounts:
        """Everything but zeros of device memory is written."""
        manifest = self._manifest.value
        files_bytes = sum(file.size_bytes for file in manifest.files)
        stored_bytes = sum(data.stored_bytes for data in manifest.device_parts.values())
        return DumpCounts(
            seen_bytes=files_bytes + writer.seen_bytes,
            written_bytes=files_bytes + writer.written_bytes,
            zero_bytes=writer.seen_bytes - stored_bytes,
        )

    def discard(self) -> None:
        self.folder.discard()

    def close(self) -> None:
        """Close the folder: it is the snapshot now, or discarded."""
        self.folder.close()


def repairs_of(target: DumpTarget, writer: DeviceWriter) -> tuple[str, ...]:
    """A sentence for the user if data that the snapshot shares in a store was damaged."""
    repaired_bytes = target.counts(writer).repaired_bytes
    if not repaired_bytes:
        return ()
    return (
        f"{repaired_bytes} bytes that {target.where} relies on were damaged in the store, and were written "
        "again; other snapshots there may be damaged too: check them with gpucr verify --deep",
    )

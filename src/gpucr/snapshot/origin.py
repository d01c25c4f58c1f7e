"""What a restore gets a job from: a folder that is a snapshot, or a store (store_source.py)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, BinaryIO, Protocol

from gpucr.criu.image_entries import ImageError, images_in
from gpucr.errors import SnapshotDamaged
from gpucr.model import DevicePart
from gpucr.snapshot.device.crew import buffers_bytes
from gpucr.snapshot.device.folder_pieces import FolderPieces
from gpucr.snapshot.device.reader import StoredPieces
from gpucr.snapshot.device.stripes import PIECE_BYTES
from gpucr.snapshot.folder import IMAGES_NAME, Snapshot
from gpucr.snapshot.job_snapshot import JobSnapshot
from gpucr.snapshot.manifest import Manifest
from gpucr.undo.interrupts import Interrupts
from gpucr.undo.steps import Meter

if TYPE_CHECKING:  # what only looks at a snapshot needs no driver
    from gpucr.undo.protection import Protection


def device_bytes_of(manifest: Manifest) -> int:
    """What the staging files of its processes will hold."""
    return sum(data.size_bytes for data in manifest.device_parts.values())


def private_bytes_of(manifest: Manifest) -> int:
    """The private memory of its processes: CRIU's images of pages, all of which it makes again."""
    return sum(file.size_bytes for file in manifest.files if PurePosixPath(file.path).name.startswith("pages-"))


@contextlib.contextmanager
def images_read_from(folder: Path) -> Iterator[None]:
    """For a block that reads CRIU's images in this folder: what is wrong with them is SnapshotDamaged.

    They have been verified; somebody may have taken them away since.
    """
    try:
        yield
    except (OSError, ImageError) as e:
        raise SnapshotDamaged(
            f"CRIU's images cannot be read: {e}",
            path=str(folder),
            hint="this snapshot cannot be restored: use another",
        ) from e


class RestoreSource(Protocol):
    """A snapshot on its way into a job. ``folder`` holds its files (``images``, ``shared``) once `provide` has run.

    Nothing is made before that: `open_image` and `packed_bytes` are also for who only looks at a snapshot.
    """

    folder: Path

    @property
    def snapshot(self) -> JobSnapshot:
        """Which one."""

    @property
    def images(self) -> Path:
        """The folder with CRIU's images."""

    @property
    def buffers_bytes(self) -> int:
        """Host memory that those who read hold at most."""

    @property
    def provides_first(self) -> bool:
        """Whether the files are to be there before device memory is read: both come by the same way."""

    @property
    def provision(self) -> tuple[str, str]:
        """The name of the step that runs `provide`, and one line that says what it does."""

    def provide(self, protection: Protection | None, interrupts: Interrupts, meter: Meter) -> int:
        """Have all files in ``folder``, checked. Returns their bytes. Raises SnapshotDamaged, StoreDamaged."""

    def pieces(self) -> StoredPieces:
        """All device memory, for a `DeviceReader`, which closes it. Raises SnapshotDamaged, StoreDamaged."""

    def open_image(self, name: str) -> BinaryIO:
        """An image of CRIU's where it is stored, also before `provide` (see `OpenImage`)."""

    def packed_bytes(self, part: DevicePart | None = None) -> int | None:
        """What this part of device memory takes there, or the whole snapshot; None: nothing is compressed."""

    def close(self) -> None:
        """Remove what was needed only while the operation lasted. Idempotent."""


class FolderSource:
    """A folder that is a snapshot (see `RestoreSource`): everything is in its place, and has to be checked."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self.folder = snapshot.held.path

    @property
    def snapshot(self) -> JobSnapshot:
        """The snapshot."""
        return self._snapshot

    @property
    def images(self) -> Path:
        """The snapshot's own."""
        return self.folder / IMAGES_NAME

    @property
    def buffers_bytes(self) -> int:
        """One piece a thread."""
        return buffers_bytes(PIECE_BYTES)

    @property
    def provides_first(self) -> bool:
        """No: device memory is read from the disk while the images are checked."""
        return False

    @property
    def provision(self) -> tuple[str, str]:
        """A verification."""
        return "verify", f"verify {self._snapshot.path}"

    def provide(self, protection: Protection | None, interrupts: Interrupts, meter: Meter) -> int:
        """Check every file."""
        with interrupts.allowed():
            self._snapshot.verify_files(interrupts.check)
        return sum(file.size_bytes for file in self._snapshot.manifest.files)

    def pieces(self) -> StoredPieces:
        """The device folder."""
        snapshot = self._snapshot
        return FolderPieces(snapshot.device, snapshot.manifest.device_parts, prefix=snapshot.device_prefix)

    def open_image(self, name: str) -> BinaryIO:
        """One of the snapshot's, or of the container whose GPU part it is: the part lies among them."""
        around = self.folder if self._snapshot.is_scattered else self.folder.resolve().parent
        is_part = not self.images.exists() and (around / "pstree.img").is_file()
        return images_in(around if is_part else self.images)(name)

    def packed_bytes(self, part: DevicePart | None = None) -> int | None:
        """None: a folder is not compressed."""
        return None

    def close(self) -> None:
        """Nothing: the folder is the snapshot."""

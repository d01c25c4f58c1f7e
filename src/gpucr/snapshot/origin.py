"""Where a restore gets a job from: a snapshot folder, or a store (store_origin.py)."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from gpucr.criu.image_entries import ImageError, OpenImage, images_in
from gpucr.errors import SnapshotDamaged, reason_of
from gpucr.gpu_state.backend import CUSTOM_STORAGE, INTERPOSED
from gpucr.linux.work import Work
from gpucr.model import DevicePart
from gpucr.snapshot.device import crew
from gpucr.snapshot.device.folder_pieces import FolderPieces
from gpucr.snapshot.device.reader import StoredPieces
from gpucr.snapshot.device.stripes import PIECE_BYTES
from gpucr.snapshot.folder import Snapshot
from gpucr.snapshot.job_snapshot import JobSnapshot
from gpucr.snapshot.manifest import Manifest
from gpucr.undo.interrupts import Interrupts
from gpucr.undo.steps import Meter

if TYPE_CHECKING:  # not needed for just reading a snapshot
    from gpucr.undo.protection import Protection

_LOOK_S = 0.05


def device_bytes_of(manifest: Manifest) -> int:
    """Size of files in host memory: for the driver, and kept by suspended processes."""
    suspended = manifest.suspended_pids
    return sum(
        data.size_bytes
        for part, data in manifest.device_parts.items()
        if data.kind not in (INTERPOSED, CUSTOM_STORAGE) or part.pid in suspended
    )


def private_bytes_of(manifest: Manifest) -> int:
    """The private memory of its processes: the size of CRIU's page images."""
    return sum(file.size_bytes for file in manifest.files if file.path.rpartition("/")[2].startswith("pages-"))


@contextlib.contextmanager
def images_read_from(folder: Path) -> Iterator[None]:
    """For a block that reads CRIU's images in this folder: errors become SnapshotDamaged.

    They were verified, but may have been removed since.
    """
    try:
        yield
    except (OSError, ImageError) as e:
        raise SnapshotDamaged(
            f"CRIU's images cannot be read: {reason_of(e)}",
            path=str(folder),
            hint="this snapshot cannot be restored: use another",
        ) from e


class RestoreSource(ABC):
    """A snapshot on its way into a job. ``folder`` holds its files (images, ``shared``) once `provide` has run.

    Nothing is created before that: `openers` and `packed_bytes` also serve readers that do not restore. ``provision``:
    the name of the step that runs `provide`, and a line that describes it. ``provides_first``: get the files before
    reading device memory, since both use the same connection. ``buffers_bytes``: maximum host memory of the readers'
    buffers.
    """

    provides_first: bool
    buffers_bytes: int

    def __init__(self, snapshot: JobSnapshot, folder: Path, provision: tuple[str, str]) -> None:
        self.snapshot = snapshot
        self.folder = folder
        self.provision = provision

    @property
    def image_folders(self) -> tuple[Path, ...]:
        """The folders with CRIU's images, one for each tree of the job."""
        return tuple(self.folder / name for name in self.snapshot.manifest.image_folders)

    @property
    def openers(self) -> tuple[OpenImage, ...]:
        """For each tree, a function that opens a stored image, even before `provide`."""
        return tuple(partial(self.open_image, name) for name in self.snapshot.manifest.image_folders)

    @property
    def files_bytes(self) -> int:
        """The size of all files."""
        return sum(file.size_bytes for file in self.snapshot.manifest.files)

    @abstractmethod
    def begin(self) -> None:
        """`provide` will follow after a wait: its work may begin."""

    @abstractmethod
    def provide(self, protection: Protection, interrupts: Interrupts, meter: Meter) -> int:
        """Put all files into ``folder``, checked. Returns their bytes. Raises SnapshotDamaged, StoreDamaged."""

    @abstractmethod
    def pieces(self) -> StoredPieces:
        """All device memory, for a `DeviceReader`, which closes it. Raises SnapshotDamaged, StoreDamaged."""

    @abstractmethod
    def open_image(self, folder: str, name: str) -> BinaryIO:
        """An image of this folder of the snapshot, as `OpenImage` does."""

    def packed_bytes(self, part: DevicePart | None = None) -> int | None:
        """The compressed size of this part of device memory, or of the whole snapshot; None: not compressed."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Remove temporary resources of the operation. Idempotent."""


class FolderSource(RestoreSource):
    """A snapshot folder: everything is there, and must be checked.

    Device memory is read from the disk while the images are checked.
    """

    provides_first = False
    buffers_bytes = crew.buffers_bytes(PIECE_BYTES)

    def __init__(self, snapshot: Snapshot) -> None:
        super().__init__(snapshot, snapshot.held.path, ("verify", f"verify {snapshot.path}"))
        self._snapshot = snapshot
        self._images: dict[str, OpenImage] = {}
        self._verified: Work[None] | None = None
        self._is_closed = False

    def begin(self) -> None:
        """Check the files meanwhile: creating a GPU context takes about as long."""
        self._verified = Work(partial(self._snapshot.verify_files, self._require_open), "verify")

    def provide(self, protection: Protection, interrupts: Interrupts, meter: Meter) -> int:
        with interrupts.allowed():
            if self._verified is None:
                self._snapshot.verify_files(interrupts.check)
            else:
                while not self._verified.is_done(_LOOK_S):
                    interrupts.check()
                self._verified.wait()
        return self.files_bytes

    def _require_open(self) -> None:
        if self._is_closed:
            raise KeyboardInterrupt("nobody waits for this")

    def pieces(self) -> StoredPieces:
        snapshot = self._snapshot
        return FolderPieces(snapshot.device, snapshot.manifest.device_parts, prefix=snapshot.device_prefix)

    def open_image(self, folder: str, name: str) -> BinaryIO:
        """An image of the snapshot, or of the container whose images surround this GPU part."""
        if folder not in self._images:
            images = self.folder / folder
            around = self.folder if self._snapshot.is_scattered else self.folder.resolve().parent
            is_part = not images.exists() and (around / "pstree.img").is_file()
            self._images[folder] = images_in(around if is_part else images)
        return self._images[folder](name)

    def close(self) -> None:
        """Nothing to remove: the folder is the snapshot."""
        self._is_closed = True
        if self._verified is not None:
            self._verified.results()


class ProvideFiles:
    """Make every file of the snapshot available and checked. Device memory is checked as it is read."""

    def __init__(self, source: RestoreSource, protection: Protection) -> None:
        self._source = source
        self._protection = protection
        self.name = source.provision[0]

    def describe(self) -> str:
        return self._source.provision[1]

    def run(self, interrupts: Interrupts, meter: Meter) -> int:
        """Verify or fetch. Returns the bytes of the files."""
        return self._source.provide(self._protection, interrupts, meter)

    def undo(self) -> None:
        """Nothing: fetched files are removed when the operation ends."""

"""Make sure that a GPU part among a container's images belongs to them.

CRIU overwrites the images in its folder, and does not report whether they are complete. Whichever process is killed, at
any time: new images never have an older GPU part beside them, which would be mistaken for theirs; and images whose GPU
part was never completed are marked, so that no restore mistakes them for those of a container without GPU state.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from gpucr.errors import Busy, SnapshotError, SnapshotUnfinished
from gpucr.linux import durable, locks
from gpucr.snapshot import files
from gpucr.snapshot.folder import (
    GPU_PART_NAME,
    MANIFEST_NAME,
    OLDER_PART_NAME,
    SCATTERED_MANIFEST_NAME,
    UNFINISHED_MARK_NAME,
    UnfinishedSnapshot,
)

_WITHOUT_GPU_STATE = b"none"
"""The mark's content if no GPU part will come: removed when CRIU has ended."""


@contextlib.contextmanager
def claimed(images: Path) -> Iterator[int]:
    """Lock the GPU part in this folder against other gpucr processes while the yielded descriptor, or a copy, is open.

    Does not lock if the file system lacks flock(2). Raises Unsupported if another one holds it.
    """
    fd = os.open(images, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            locks.lock(fd)
        except BlockingIOError as e:
            raise Busy(
                f"another checkpoint is being written to {images}",
                hint="wait until it has finished, then try again",
            ) from e
        except OSError:  # a file system without locks
            pass
        yield fd
    finally:
        os.close(fd)


class GpuPart:
    """The GPU part in this folder of images. All methods raise SnapshotError if it cannot be changed.

    ``claim``: a descriptor of `claimed` that `finish` closes.
    """

    def __init__(self, images: Path, claim: int | None = None) -> None:
        self.path = images / GPU_PART_NAME
        self._claim = claim
        self._images = images
        self._aside = images / OLDER_PART_NAME
        self._mark = images / UNFINISHED_MARK_NAME

    @property
    def is_complete(self) -> bool:
        """Whether it exists. False if the caller may not look."""
        return os.path.exists(self.path / MANIFEST_NAME)

    @property
    def is_scattered(self) -> bool:
        """Whether it exists as plain files (containers/plain_files.py)."""
        return os.path.exists(self._images / SCATTERED_MANIFEST_NAME)

    @property
    def is_known(self) -> bool:
        """Whether there is any trace of it: otherwise the container had no GPU state."""
        return self.is_scattered or any(map(os.path.exists, (self.path, self._aside, self._mark)))

    def require_finished(self) -> None:
        """Raise SnapshotUnfinished if one is missing."""
        if os.path.exists(self._mark) and not self.is_complete:
            raise SnapshotUnfinished(
                f"the images in {self._images} lack their GPU part: their dump was never finished",
                path=str(self._mark),
                hint="restore another checkpoint; a new dump into that folder replaces what is there",
            )

    def recover(self) -> None:
        """Clean up after a killed gpucr: put the older part back, unless its images are gone."""
        with self._explained("put back"):
            is_marked = os.path.exists(self._mark)
            if self.is_complete:
                if is_marked:  # otherwise touch nothing: the file system may be read-only
                    self._mark.unlink()
            elif not is_marked and os.path.exists(self._aside / MANIFEST_NAME):
                UnfinishedSnapshot.left_behind(self.path, None).discard()
                self._aside.rename(self.path)
            if os.path.exists(self._aside):
                shutil.rmtree(self._aside)

    @contextlib.contextmanager
    def older_aside(self) -> Iterator[None]:
        """Move an older part out of the way during the block, and back afterwards, unless `begin` was called."""
        self.recover()
        if self.is_complete:
            with self._explained("moved aside"):
                self.path.rename(self._aside)
        try:
            yield
        finally:
            self.recover()

    def begin(self) -> None:
        """CRIU may write from now on: until `finish` these images lack their GPU part. Durable."""
        self._begin(b"")

    def begin_without(self) -> None:
        """CRIU may write from now on, without GPU state: until `finish_without` the images cannot be restored.

        Does nothing if there is no sign of earlier GPU state. Durable.
        """
        if not (self.is_complete or os.path.exists(self._mark)):
            return
        with self.older_aside():
            self._begin(_WITHOUT_GPU_STATE)

    def finish_without(self) -> None:
        """CRIU has written the images of a container without GPU state.

        Raises SnapshotUnfinished if they were begun as a container's with GPU state.
        """
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            if self._mark.read_bytes() == _WITHOUT_GPU_STATE:
                self.finish()
            self.require_finished()

    def _begin(self, content: bytes) -> None:
        with self._explained("replaced"):
            durable.write(self._mark, content)
        shutil.rmtree(self._aside, ignore_errors=True)

    def sync_images(self) -> None:
        """Make the images around it durable: CRIU does not, and the container may be ended because of them."""
        with self._explained("completed"):
            entries = os.scandir(self._images)
            files.sync(self._images, [entry.name for entry in entries if entry.is_file(follow_symlinks=False)])

    def finish(self) -> None:
        """The part is complete, and durable."""
        with self._explained("completed"):
            self._mark.unlink(missing_ok=True)
        if self._claim is not None:
            os.close(self._claim)
            self._claim = None

    @contextlib.contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as e:
            raise SnapshotError(
                f"the GPU part in {self._images} cannot be {what}: {e.strerror}",
                path=str(e.filename or self._images),
                hint="check that root can write there",
            ) from e

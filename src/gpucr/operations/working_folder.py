"""A private folder on this machine for what CRIU writes or reads, where the snapshot itself lies in a store."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from pathlib import Path

from gpucr.errors import SnapshotError
from gpucr.linux import memory

PREFIX = "gpucr-work-"
SNAPSHOT_NAME = "snapshot"
_IN_MEMORY = Path("/dev/shm")  # noqa: S108 - where memory is to be had under a name
_MARGIN_BYTES = 64 << 20


class WorkingFolder:
    """A folder with a name that nobody guesses. `create` makes it (0700), `remove` removes all of it.

    ``size_bytes`` is what will be in it, more or less, ``besides_bytes`` the host memory that is needed beside it.
    Where ``TMPDIR`` names no place, it is in memory if there is room (nothing of it is left on a disk then), else where
    temporary files go.
    """

    def __init__(self, size_bytes: int, besides_bytes: int) -> None:
        self.path = place(size_bytes, besides_bytes) / f"{PREFIX}{secrets.token_hex(16)}"

    @property
    def snapshot(self) -> Path:
        """A folder in it for images and shared files. What makes changed copies of these puts them beside it."""
        return self.path / SNAPSHOT_NAME

    @property
    def is_in_memory(self) -> bool:
        """Whether nothing of it reaches a disk (but by swapping)."""
        return memory.lies_in_memory(self.path.parent)

    def create(self) -> None:
        """Make it. Raises SnapshotError."""
        try:
            self.path.mkdir(mode=0o700)
        except OSError as e:
            raise SnapshotError(
                f"the working folder {self.path} cannot be made: {e.strerror}",
                path=str(self.path),
                hint="name a folder for temporary files with TMPDIR",
            ) from e

    def remove(self) -> None:
        """Remove it with all that is in it. Idempotent."""
        remove(self.path)


def remove(path: Path) -> None:
    """Remove a working folder that this or another process has made. Raises ValueError for anything else."""
    if not path.is_absolute() or not path.name.startswith(PREFIX):
        raise ValueError(f"{path} is no working folder")
    if path.exists():
        shutil.rmtree(path)


def place(size_bytes: int, besides_bytes: int) -> Path:
    """Where a working folder of this size is put. Half of what memory the machine has left is for others."""
    if not os.environ.get("TMPDIR") and _IN_MEMORY.is_dir() and memory.lies_in_memory(_IN_MEMORY):
        room = min(memory.free_disk_bytes(_IN_MEMORY), (memory.available_bytes() - besides_bytes) // 2)
        if size_bytes + _MARGIN_BYTES <= room:
            return _IN_MEMORY
    return Path(tempfile.gettempdir()).absolute()

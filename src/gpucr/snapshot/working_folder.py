"""A private local folder for CRIU's images if the snapshot itself is in a store."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from pathlib import Path

from gpucr.errors import SnapshotError
from gpucr.linux import locks, memory, trusted_paths

PREFIX = "gpucr-work-"
SNAPSHOT_NAME = "snapshot"
_IN_MEMORY = Path("/dev/shm")  # noqa: S108 - memory with a path
_MARGIN_BYTES = 64 << 20
_LEFT_BEHIND_S = 3600.0
"""A guard removes a killed gpucr's folder at once. Without a guard (no CUDA) the next gpucr does."""
_LOOKED_AT_S = 10.0
"""How long a maker waits for another gpucr that has the new folder locked, to see whether its maker lives."""


class WorkingFolder:
    """A folder with an unguessable name. `create` makes it (0700), `remove` removes it with its content.

    It is locked (``flock``) while its maker lives.

    ``size_bytes``: its approximate content; ``besides_bytes``: other host memory needed. Without ``TMPDIR`` it is in
    memory if there is room (then nothing remains on a disk), otherwise in the temporary folder.
    """

    def __init__(self, size_bytes: int, besides_bytes: int) -> None:
        self.path = place(size_bytes, besides_bytes) / f"{PREFIX}{os.urandom(16).hex()}"
        self._lock: int | None = None

    @property
    def snapshot(self) -> Path:
        """A subfolder for images and shared files. Changed copies of these go beside it."""
        return self.path / SNAPSHOT_NAME

    @property
    def is_in_memory(self) -> bool:
        """Whether nothing of it reaches a disk (except by swapping)."""
        return memory.lies_in_memory(self.path.parent)

    def create(self) -> None:
        """Make it, and remove those that dead processes left. Raises SnapshotError."""
        _remove_left_behind(self.path.parent)
        unlocked = _before_it_is_locked(self.path)
        try:
            trusted_paths.require_ours(self.path.parent, is_sticky_enough=True)
            unlocked.mkdir(mode=0o700)
            self._lock = _locked(unlocked, wait_s=_LOOKED_AT_S)
            unlocked.rename(self.path)
        except OSError as e:
            raise SnapshotError(
                f"the working folder {self.path} cannot be made: {e.strerror}",
                path=str(self.path),
                hint="name a folder for temporary files with TMPDIR",
            ) from e

    def remove(self) -> None:
        """Remove it with its content. Idempotent."""
        remove(self.path)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def remove(path: Path) -> None:
    """Remove a working folder that this or another process has made. Raises ValueError for anything else."""
    if not path.is_absolute() or not path.name.startswith(PREFIX):
        raise ValueError(f"{path} is no working folder")
    for made in (path, _before_it_is_locked(path)):
        if made.exists():
            shutil.rmtree(made)


def _before_it_is_locked(path: Path) -> Path:
    """The name that it is made with."""
    return path.with_name(f".{path.name}")


def _remove_left_behind(parent: Path) -> None:
    """Remove this user's folders whose makers and guards, if any, have died."""
    for path in (*parent.glob(f"{PREFIX}*"), *parent.glob(f".{PREFIX}*")):
        with contextlib.suppress(OSError):
            lock = _locked(path)
            try:
                if time.time() - os.fstat(lock).st_mtime > _LEFT_BEHIND_S:
                    remove(path.with_name(path.name.removeprefix(".")))
            finally:
                os.close(lock)


def _locked(path: Path, *, wait_s: float = 0.0) -> int:
    """The folder, opened and locked. Raises OSError if it is another user's, or its maker still runs after `wait_s`."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(fd).st_uid != os.geteuid():
            raise PermissionError(f"{path} is another user's")
        locks.lock(fd, wait_s=wait_s)
    except BaseException:
        os.close(fd)
        raise
    return fd


def place(size_bytes: int, besides_bytes: int) -> Path:
    """Where to put a working folder of this size. Leaves half of the machine's free memory to others."""
    if not os.environ.get("TMPDIR") and _IN_MEMORY.is_dir() and memory.lies_in_memory(_IN_MEMORY):
        room = min(memory.free_disk_bytes(_IN_MEMORY), (memory.available_bytes() - besides_bytes) // 2)
        if size_bytes + _MARGIN_BYTES <= room:
            return _IN_MEMORY
    return Path(tempfile.gettempdir()).absolute()

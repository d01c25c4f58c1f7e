"""Device memory in a file on a disk while it is away from its GPU, if host memory has no room for it.

The file is unnamed: nobody else can open it, and its space is freed when the last process that holds it ends.
"""

from __future__ import annotations

import ctypes
import errno
import os
import tempfile
from pathlib import Path

from msgspec import Struct

from gpucr.errors import CustomStorageError
from gpucr.linux import libc, memory, trusted_paths
from gpucr.quantities import format_bytes

_ON_DISK = Path("/var/tmp")  # noqa: S108 - where large temporary files go (file-hierarchy(7)); /tmp is often in memory
_MARGIN_BYTES = 64 << 20

_fallocate = libc.function("fallocate", ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)


class Spool(Struct, frozen=True):
    """A folder for ``size_bytes`` in such files. ``why_not``: why it cannot be used (None: it can)."""

    folder: Path
    size_bytes: int
    why_not: str | None

    @classmethod
    def find(cls, size_bytes: int) -> Spool:
        """The temporary folder; /var/tmp without ``TMPDIR`` or if that is in memory. Reserves nothing."""
        folder = _folder()
        try:
            why_not = _why_not(folder, size_bytes)
        except OSError as e:
            why_not = f"{folder} cannot be used: {e.strerror}"
        return cls(folder, size_bytes, why_not)

    def file(self, size_bytes: int) -> SpoolFile:
        """A file for one process, with reserved space. Raises CustomStorageError if the disk is full."""
        try:
            return SpoolFile(self.folder, size_bytes)
        except OSError as e:
            raise CustomStorageError(
                f"{format_bytes(size_bytes)} of device memory cannot be put into a file in {self.folder}: {e.strerror}",
                hint="free space there, or name a folder on another disk with TMPDIR",
                code="GPUCR-NO-SPACE",
            ) from e


class SpoolFile:
    """An unnamed file (0600) with its space reserved, for the device memory of one process. Raises OSError."""

    def __init__(self, folder: Path, size_bytes: int) -> None:
        self.fd = _unnamed(folder)
        self.size_bytes = 0
        try:
            self.resize(size_bytes)
        except BaseException:
            self.close()
            raise

    def resize(self, size_bytes: int) -> None:
        """Set its size. Additional space is reserved, if the file system can do that."""
        if size_bytes > self.size_bytes and _fallocate(self.fd, 0, 0, size_bytes) < 0:
            error = libc.last_error("")
            if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS):
                raise error
        os.ftruncate(self.fd, size_bytes)
        self.size_bytes = size_bytes

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


def _folder() -> Path:
    try:
        folder = Path(tempfile.gettempdir()).absolute()
        if not os.environ.get("TMPDIR") and memory.lies_in_memory(folder):
            return _ON_DISK
    except OSError:
        return _ON_DISK
    return folder


def _why_not(folder: Path, size_bytes: int) -> str | None:
    if memory.lies_in_memory(folder):
        return f"{folder} lies in memory"
    trusted_paths.require_ours(folder, is_sticky_enough=True)
    free_bytes = memory.free_disk_bytes(folder)
    if free_bytes < size_bytes + _MARGIN_BYTES:
        return f"{folder} has {format_bytes(free_bytes)} free"
    return None


def _unnamed(folder: Path) -> int:
    # O_TMPFILE, or, if the file system lacks it, a name that is removed at once.
    with tempfile.TemporaryFile(prefix="gpucr-spool-", dir=folder, buffering=0) as file:
        return os.dup(file.fileno())

"""The files that hold a part of a process's device memory, and the position of each piece.

Several files, because the kernel serializes writers of one file: ext4 at the inode's lock, tmpfs at the page cache's.
On a virtual disk with ext4 one file took 1.6 to 2.2 GiB/s of O_DIRECT, four to sixteen 2.2 to 2.9.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path

from msgspec import Struct

from gpucr.errors import SnapshotDamaged, SnapshotError
from gpucr.linux import libc
from gpucr.model import DevicePart
from gpucr.snapshot.manifest import DeviceData

PIECE_BYTES = 4 << 20
"""Large enough that Python's work (about 15 µs a piece) is small against hashing (2.4 ms at 1.7 GiB/s) and that a disk
reaches its bandwidth; small enough that what is saved stays close behind the driver, and 32 buffers are 128 MiB."""
STRIPES = 8

HINT_CHANGED = "the snapshot was changed after it was written: restore from another snapshot or copy"
HINT_DAMAGED = "the disk or a copy damaged it: restore from another snapshot or copy"

_Prepare = Callable[[int, Path, int], None]
_Transfer = Callable[[int, list[memoryview], int], int]

_SYNC_FILE_RANGE_WRITE = 2  # linux/fs.h
_sync_file_range = libc.function("sync_file_range", ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)


class Layout(Struct, frozen=True):
    """How ``size_bytes`` of a staging file are cut into pieces, and the pieces distributed over stripes."""

    size_bytes: int
    piece_bytes: int
    stripes: int

    @classmethod
    def of(cls, data: DeviceData) -> Layout:
        """The layout that the manifest records for a part."""
        return cls(data.size_bytes, data.piece_bytes, data.stripes)

    @property
    def pieces(self) -> int:
        return -(-self.size_bytes // self.piece_bytes)

    def start(self, piece: int) -> int:
        """The piece's offset in the staging file."""
        return piece * self.piece_bytes

    def length(self, piece: int) -> int:
        """The size of the piece: the last one may be shorter."""
        return min(self.piece_bytes, self.size_bytes - self.start(piece))

    def place(self, piece: int) -> tuple[int, int]:
        """The stripe that holds the piece, and the offset in it."""
        return piece % self.stripes, piece // self.stripes * self.piece_bytes

    def stripe_bytes(self, stripe: int) -> int:
        """The size of one stripe's file."""
        pieces = range(stripe, self.pieces, self.stripes)
        return (len(pieces) - 1) * self.piece_bytes + self.length(pieces[-1]) if pieces else 0


class Stripes:
    """The open files of one part. Reads and writes are thread-safe.

    ``prefix``: of their names.
    """

    def __init__(self, folder: Path, part: DevicePart, layout: Layout, prefix: str = "") -> None:
        self.layout = layout
        self._folder = folder
        self._name = f"{prefix}{part}"
        # With a prefix they are in the snapshot's own folder, whose path may be a descriptor's, which is a link too.
        self._nofollow = 0 if prefix else os.O_NOFOLLOW
        self._fds: list[int] = []
        self._is_direct = True

    @classmethod
    def create(cls, folder: Path, part: DevicePart, layout: Layout) -> Stripes:
        """Make the files in their full size, as holes, mode 0600. Raises OSError."""
        made = cls(folder, part, layout)
        # The full size first: a write that extends a file holds the inode's lock exclusively.
        made._open(os.O_RDWR | os.O_CREAT | os.O_EXCL, lambda fd, path, size: os.ftruncate(fd, size))
        return made

    @classmethod
    def open(cls, folder: Path, part: DevicePart, layout: Layout, prefix: str = "") -> Stripes:
        """Open the files for reading.

        Raises SnapshotDamaged if one is missing, not a plain file, or has another size, and SnapshotError if it cannot
        be opened for another reason.
        """
        found = cls(folder, part, layout, prefix)
        try:
            # Without O_NONBLOCK the open of a named pipe waits for a writer that never comes.
            found._open(os.O_RDONLY | os.O_NONBLOCK, _check_file)
        except OSError as e:
            raise _not_opened(e, part.pid) from e
        return found

    def _open(self, flags: int, prepare: _Prepare) -> None:
        # O_NOFOLLOW only applies to the last part of a path: so open the folder first, then the files in it.
        folder_fd = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | self._nofollow | os.O_CLOEXEC)
        try:
            for stripe in range(self.layout.stripes):
                path = self.path(stripe)
                try:
                    fd = os.open(path.name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder_fd)
                except OSError as e:
                    raise OSError(e.errno, e.strerror, str(path)) from e
                self._fds.append(fd)
                prepare(fd, path, self.layout.stripe_bytes(stripe))
                self._is_direct = _set_direct(fd, on=True) and self._is_direct
        except BaseException:
            self.close()
            raise
        finally:
            os.close(folder_fd)

    def path(self, stripe: int) -> Path:
        """The file of one stripe."""
        return self._folder / f"{self._name}.{stripe}"

    @property
    def fds(self) -> tuple[int, ...]:
        """The descriptors of the open files, in the order of the stripes."""
        return tuple(self._fds)

    def grow(self, layout: Layout) -> None:
        """Resize the files to this layout, which differs only in size. Raises OSError."""
        for stripe, fd in enumerate(self._fds):
            os.ftruncate(fd, layout.stripe_bytes(stripe))
        self.layout = layout

    def write(self, piece: int, data: memoryview) -> None:
        """Write a piece to its place. Raises OSError with the file's name."""
        stripe, offset = self.layout.place(piece)
        if self._transfer(os.pwritev, stripe, data, offset) < len(data):
            raise OSError(errno.EIO, "the file system takes no more bytes", str(self.path(stripe)))
        if not self._is_direct:
            # Only starts writeback: the fsync at the end reports errors.
            _sync_file_range(self._fds[stripe], offset, len(data), _SYNC_FILE_RANGE_WRITE)

    def read(self, piece: int, data: memoryview) -> int:
        """Read a piece; the number of bytes is smaller than asked if the file ends. Raises OSError with its name."""
        stripe, offset = self.layout.place(piece)
        return self._transfer(os.preadv, stripe, data, offset)

    def _transfer(self, call: _Transfer, stripe: int, data: memoryview, offset: int) -> int:
        fd, done, is_direct = self._fds[stripe], 0, self._is_direct
        while done < len(data):
            try:
                count = call(fd, [data[done:]], offset + done)
            except OSError as e:
                if e.errno != errno.EINVAL or not is_direct:
                    raise OSError(e.errno, e.strerror, str(self.path(stripe))) from e
                # Some file systems accept O_DIRECT at open but refuse it here, or need another alignment.
                for each in self._fds:
                    _set_direct(each, on=False)
                is_direct = self._is_direct = False
                continue
            if count == 0:
                break
            done += count
        return done

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.pop())


def check_shape(folder: Path, data: Mapping[DevicePart, DeviceData]) -> None:
    """Raise SnapshotDamaged if a stripe of one of these parts is missing, not a plain file, or has another size."""
    for part, each in data.items():
        Stripes.open(folder, part, Layout.of(each)).close()


def _not_opened(error: OSError, pid: int) -> SnapshotError:
    path = Path(error.filename)
    text = f"{path.parent.name}/{path.name}, which holds device memory of process {pid},"
    if error.errno == errno.ENOENT:
        return SnapshotDamaged(f"{text} is missing", path=str(path), hint=HINT_CHANGED)
    if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.ENXIO):
        kind = "a symbolic link" if path.is_symlink() else "no plain file or folder"
        return SnapshotDamaged(f"{text} is {kind}", path=str(path), hint=HINT_CHANGED)
    hint = "raise the limit of open files (ulimit -n)" if error.errno == errno.EMFILE else None
    return SnapshotError(f"{text} cannot be opened: {error.strerror}", path=str(path), hint=hint)


def _check_file(fd: int, path: Path, size_bytes: int) -> None:
    found = os.fstat(fd)
    name = f"{path.parent.name}/{path.name}"
    if not stat.S_ISREG(found.st_mode):
        raise SnapshotDamaged(f"{name} is not a plain file", path=str(path), hint=HINT_CHANGED)
    if found.st_size != size_bytes:
        message = f"{name} has {found.st_size} bytes where {size_bytes} were written"
        raise SnapshotDamaged(message, path=str(path), hint=HINT_CHANGED)


def _set_direct(fd: int, *, on: bool) -> bool:
    """Whether O_DIRECT could be switched; after open, since a failed open would leave the file behind."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)
    except OSError as e:
        if e.errno != errno.EINVAL:
            raise
        return False
    return True

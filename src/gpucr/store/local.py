"""A store in a folder: every object is a file, filled under another name and published by a hard link.

::

    STORE/               0700; what lies below is 0600 and 0700. Shared by a group: see sharing.py
      packs/ab/...       objects, by their names
      .incoming/         objects that are not finished: no name of an object begins with a dot

A second link to a name fails, also on NFS; rename(2) would replace the first. Folders are made on demand, and files and
folders are synced before an object is reported as created or deleted.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from gpucr.linux import durable
from gpucr.linux.held_folder import HeldFolder
from gpucr.store.backend import Buffer, Exists, Missing, ObjectInfo, as_parts, check_name

INCOMING_NAME = ".incoming"
FOLDER_MODE = 0o3750
"""The mode of a group-shared store's folder, which is root's, and of no other."""
_SHARED_FILE_MODE = 0o640
_DIRECT_BYTES = 4096
"""O_DIRECT needs memory, offset and length in multiples of the disk's block size, which is never larger."""
_TAIL_BYTES = 2 << 20
_LARGE_BYTES = 64 << 10
_GROW_BYTES = 64 << 20


class LocalBackend:
    """A folder of this machine, or one that it has mounted, as a `Backend`.

    Raises NotADirectoryError, FileNotFoundError, OSError (ELOOP: it is behind a link that another user can change), and
    PermissionError if another user could change the folder: a restore runs its content with the caller's privileges.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root).absolute()
        # The parent's owner could replace the folder: everything is opened below this descriptor.
        self._held = HeldFolder.open(self.root)
        status = self._held.status()
        self.group = status.st_gid if status.st_uid == 0 and stat.S_IMODE(status.st_mode) == FOLDER_MODE else None
        """The group that shares it; None: a single user's."""
        if self.group is None:
            _require_ours(status, self.root)

    @property
    def url(self) -> str:
        """The path of the folder."""
        return str(self.root)

    @property
    def identity(self) -> str:
        """The folder's device and inode. After a restart of the machine the device may have another number."""
        status = self._held.status()
        return f"{status.st_dev}:{status.st_ino}"

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        with self._opened(name) as fd:
            there = max(0, os.fstat(fd).st_size - offset)
            wanted = there if length is None else min(length, there)
            parts = []
            while wanted > 0 and (part := os.pread(fd, min(wanted, 64 << 20), offset)):
                parts.append(part)
                offset += len(part)
                wanted -= len(part)
        return b"".join(parts)

    def read_into(self, name: str, offset: int, buffer: memoryview) -> int:
        with self._opened(name) as fd:
            if _is_aligned(buffer) and offset % _DIRECT_BYTES == 0:
                _set_direct(fd, on=True)
            return _transfer(os.preadv, fd, buffer, offset)

    def size(self, name: str) -> int:
        with self._opened(name) as fd:
            return os.fstat(fd).st_size

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """See `Backend.list`. Files with invalid object names are skipped."""
        below = prefix.rpartition("/")[0]
        found = [
            ObjectInfo(name, at.st_size, at.st_mtime)
            for name, at in _walk(
                self._held.path / below, f"{below}/" if below else "", is_shared=self.group is not None
            )
            if name.startswith(prefix)
        ]
        return iter(sorted(found, key=lambda info: info.name))

    def create(self, name: str, parts: Buffer | Sequence[Buffer]) -> None:
        sink = self.open_new(name)
        try:
            for part in as_parts(parts):
                sink.write(part)
        except BaseException:
            sink.discard()
            raise
        sink.publish()

    def open_new(self, name: str) -> LocalSink:
        return LocalSink(name, self._held, self.group)

    def delete(self, name: str) -> None:
        path = self._path(name)
        with contextlib.suppress(FileNotFoundError):
            try:
                path.unlink()
            except PermissionError as e:
                if self.group is None:
                    raise
                what = "only root may delete what another member of the group has stored"
                raise PermissionError(errno.EACCES, what, name) from e
            # A snapshot that reappears after a power failure, without its packs, would be damaged.
            durable.sync(path.parent)

    def sweep(self, unchanged_s: float) -> int:
        """See `Backend.sweep`. If it is still being filled, publishing it fails: nothing is lost."""
        removed = 0
        oldest_s = time.time() - unchanged_s
        with contextlib.suppress(FileNotFoundError):
            for entry in os.scandir(self._held.path / INCOMING_NAME):
                with contextlib.suppress(FileNotFoundError):
                    if entry.stat(follow_symlinks=False).st_mtime <= oldest_s:
                        os.unlink(entry.path)
                        removed += 1
        return removed

    def _path(self, name: str) -> Path:
        check_name(name)
        return self._held.path / name

    @contextlib.contextmanager
    def _opened(self, name: str) -> Iterator[int]:
        path = self._path(name)
        try:
            # Without O_NONBLOCK the open of a named pipe waits for a writer that never comes.
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError) as e:
            raise Missing(name) from e
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                raise OSError(errno.EINVAL, "it is not a plain file", str(path))
            if self.group is None:
                _require_ours(found, path)
            else:
                _require_the_groups(found, path, self.group)
            yield fd
        finally:
            os.close(fd)


class LocalSink:
    """A file being filled: large aligned buffers go straight to the disk, others are collected first."""

    def __init__(self, name: str, folder: HeldFolder, group: int | None = None) -> None:
        check_name(name)
        self._is_shared = group is not None
        self._held = folder  # as long as there is anything to write
        root = folder.path
        self._path = root / name
        self._name = name
        incoming = root / INCOMING_NAME
        if not self._is_shared:  # all folders exist, and are root's
            _make_folders(incoming, root)
        self._temporary = incoming / secrets.token_hex(16)
        self._root = root
        self._fd = os.open(self._temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._is_open = True
        if self._is_shared:
            os.fchmod(self._fd, _SHARED_FILE_MODE)  # regardless of the umask
        self._tail = mmap.mmap(-1, _TAIL_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # open(2): O_DIRECT into private memory is not safe while the process forks.
        self._tail.madvise(mmap.MADV_DONTFORK)
        self._tail_view = memoryview(self._tail)
        self._tail_bytes = 0
        self._written_bytes = 0
        self._size_bytes = 0
        self._grown_bytes = 0
        _set_direct(self._fd, on=True)

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    def write(self, data: Buffer) -> None:
        view = memoryview(data)
        self._size_bytes += len(view)
        if self._tail_bytes % _DIRECT_BYTES == 0 and len(view) >= _LARGE_BYTES and _is_aligned(view):
            self._flush(self._tail_bytes)
            self._put(view)
            return
        while view:
            count = min(len(view), _TAIL_BYTES - self._tail_bytes)
            self._tail_view[self._tail_bytes : self._tail_bytes + count] = view[:count]
            self._tail_bytes += count
            view = view[count:]
            if self._tail_bytes == _TAIL_BYTES:
                self._flush(_TAIL_BYTES)

    def publish(self) -> None:
        try:
            self._flush(-(-self._tail_bytes // _DIRECT_BYTES) * _DIRECT_BYTES)
            os.ftruncate(self._fd, self._size_bytes)
            os.fsync(self._fd)
            if not self._is_shared:
                _make_folders(self._path.parent, self._root)
            self._link()
            durable.sync(self._path.parent)
        finally:
            self.discard()

    def _link(self) -> None:
        try:
            os.link(self._temporary, self._path)
        except FileExistsError as e:
            # link(2): NFS may make the link, lose the answer, and find it when it retries.
            if os.fstat(self._fd).st_nlink != 2:
                raise Exists(self._name) from e
        except OSError as e:
            if e.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            what = "its file system has no hard links, which a store needs"
            raise OSError(errno.EOPNOTSUPP, what, str(self._path)) from e

    def discard(self) -> None:
        if self._is_open:
            self._is_open = False
            os.close(self._fd)
            self._temporary.unlink(missing_ok=True)

    def _flush(self, length: int) -> None:
        """Write this much of the tail, then empty it. Bytes beyond its end are never visible."""
        if length:
            self._put(self._tail_view[:length])
            self._tail_bytes = 0

    def _put(self, data: memoryview) -> None:
        while self._written_bytes + len(data) > self._grown_bytes:
            # A write that extends a file holds the inode's lock exclusively.
            self._grown_bytes += _GROW_BYTES
            os.ftruncate(self._fd, self._grown_bytes)
        if _transfer(os.pwritev, self._fd, data, self._written_bytes) < len(data):
            raise OSError(errno.EIO, "the file system takes no more bytes", str(self._temporary))
        self._written_bytes += len(data)


def _transfer(call: Callable[[int, list[memoryview], int], int], fd: int, data: memoryview, offset: int) -> int:
    done = 0
    while done < len(data):
        try:
            count = call(fd, [data[done:]], offset + done)
        except OSError as e:
            # Some file systems accept O_DIRECT at open but refuse it here, or need another alignment.
            if e.errno == errno.EINVAL and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
                _set_direct(fd, on=False)
                continue
            raise
        if count == 0:
            break
        done += count
    return done


def _walk(folder: str | os.PathLike[str], before: str, *, is_shared: bool) -> Iterator[tuple[str, os.stat_result]]:
    """The files below, with ``before`` and their path below ``folder`` as their names."""
    try:
        entries = list(os.scandir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry in entries:
        if entry.name.startswith("."):
            continue
        if entry.is_dir(follow_symlinks=False):
            # A member could replace their own folder by a link while root works below it.
            if not is_shared or entry.stat(follow_symlinks=False).st_uid == 0:
                yield from _walk(entry.path, f"{before}{entry.name}/", is_shared=is_shared)
        elif entry.is_file(follow_symlinks=False):
            name = f"{before}{entry.name}"
            with contextlib.suppress(FileNotFoundError, ValueError):
                check_name(name)
                yield name, entry.stat(follow_symlinks=False)


def _make_folders(folder: Path, root: Path) -> None:
    if folder == root or folder.is_dir():
        return
    _make_folders(folder.parent, root)
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
        durable.sync(folder.parent)


def _is_aligned(buffer: memoryview) -> bool:
    if len(buffer) % _DIRECT_BYTES or not len(buffer) or buffer.readonly:
        return False
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer)) % _DIRECT_BYTES == 0


def _set_direct(fd: int, *, on: bool) -> None:
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    with contextlib.suppress(OSError):  # a file system without it: slower, nothing else
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)


def _require_the_groups(found: os.stat_result, path: Path, group: int) -> None:
    """A member's file gets the folder's group, and only its owner can change it."""
    if (found.st_gid != group and found.st_uid != 0) or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        what = f"it did not come there from a member (gid {found.st_gid}, mode {stat.S_IMODE(found.st_mode):04o})"
        raise PermissionError(errno.EPERM, what, str(path))


def _require_ours(found: os.stat_result, path: Path) -> None:
    if found.st_uid not in (0, os.geteuid()) or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = stat.S_IMODE(found.st_mode)
        raise PermissionError(errno.EPERM, f"others can write it (uid {found.st_uid}, mode {mode:04o})", str(path))

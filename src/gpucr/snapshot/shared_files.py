"""Shared memory files: files in /dev/shm are memory of the job, and go into the snapshot and back.

POSIX shared memory (shm_open), named semaphores (``sem.*``) and Python's SharedMemory are files of a tmpfs. CRIU saves
only their names. Their contents are saved while the job is frozen, in the folder ``shared`` of the snapshot, and put
back before CRIU opens them.

Every function takes the folder of such files, ``root``: /dev/shm on this machine; another mount namespace's is reached
through ``/proc/PID/root``. Names are relative to it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from msgspec import Struct

from gpucr.linux.sparse import copy_data
from gpucr.linux.trusted_paths import make_folder_in
from gpucr.snapshot.manifest import SharedFileRecord

ROOT = Path("/dev/shm")  # noqa: S108 - where the C library puts them
FOLDER_NAME = "shared"

_REMAP = re.compile(r"(^|/)link_remap\.\d+$")

_OTHERS_WORK = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.EIO)

_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def save(root: Path, snapshot: Path, *, inodes: Collection[int] | None = None) -> tuple[SharedFileRecord, ...]:
    """Copy the regular files of ``root`` into the folder ``shared`` of a snapshot, made if needed.

    ``inodes``: only these. The files must not change meanwhile. Zeros are not written, so holes stay holes. Raises
    OSError.
    """
    found: dict[int, list[str]] = {}
    for name, inode in _walk(root):
        if inodes is None or inode in inodes:
            found.setdefault(inode, []).append(name)
    records: list[SharedFileRecord] = []
    for number, names in enumerate(found.values()):
        if number == 0:
            (snapshot / FOLDER_NAME).mkdir(mode=0o700)
        records.append(_save_one(root, snapshot, f"{FOLDER_NAME}/{number}", sorted(names)))
    return tuple(records)


class MadeFile(Struct, frozen=True):
    """A file of shared memory that a restore makes: its name, and what tells it from another one of that name."""

    name: str
    size_bytes: int
    modified_ns: int


class SharedFiles:
    """Restores a snapshot's shared files. `undo` brings back what they replaced.

    ``mark``: in the names of files that are not complete.
    """

    def __init__(self, root: Path, snapshot: Path, records: Sequence[SharedFileRecord], mark: str = "") -> None:
        self._root = root
        self._snapshot = snapshot
        self._records = records
        self._mark = mark
        self._made: list[tuple[str, tuple[int, int]]] = []
        self._made_folders: list[str] = []
        self._replaced: dict[str, int] = {}

    def to_be_made(self) -> tuple[tuple[MadeFile, ...], tuple[str, ...]]:
        """The files that `put_back` will make where there is none, and all folders of such files, outermost first."""
        there = names_in_use(self._root, self._records)
        files = [
            MadeFile(name, record.size_bytes, record.modified_ns)
            for record in self._records
            for name in record.names
            if name not in there
        ]
        folders = {str(folder) for file in files for folder in Path(file.name).parents} - {"."}
        return tuple(files), tuple(sorted(folders))

    def put_back(self) -> int:
        """Make them as they were at the dump, replacing files with the same names. Returns their bytes.

        Keeps the content of replaced files until `close`. The caller must own them, or be root. Raises OSError.
        """
        for record in self._records:
            self._put_back_one(record)
        return sum(record.size_bytes for record in self._records)

    def undo(self) -> None:
        """Remove what was put back, and rewrite what was there before. Raises OSError.

        A name that leads to another file by now is somebody else's, and is left alone.
        """
        while self._made:
            name, inode = self._made.pop()
            with self._folder_of(name) as folder:
                with contextlib.suppress(FileNotFoundError):
                    if _inode(os.lstat(Path(name).name, dir_fd=folder)) != inode:
                        continue
                    os.unlink(Path(name).name, dir_fd=folder)
                if name in self._replaced:
                    source = self._replaced.pop(name)
                    try:
                        self._write(folder, Path(name).name, source, os.fstat(source))
                    finally:
                        os.close(source)
        while self._made_folders:
            path = self._made_folders.pop()
            with contextlib.suppress(OSError), self._folder_of(path) as folder:
                os.rmdir(Path(path).name, dir_fd=folder)
        self.close()

    def close(self) -> None:
        for fd in self._replaced.values():
            os.close(fd)
        self._replaced.clear()

    def _put_back_one(self, record: SharedFileRecord) -> None:
        source = os.open(self._snapshot / record.stored, _READ)
        try:
            first = record.names[0]
            self._keep(first)
            with self._folder_of(first, record) as folder:
                inode = self._write(folder, Path(first).name, source, record)
                self._made.append((first, inode))
                for name in record.names[1:]:
                    self._keep(name)
                    with self._folder_of(name, record) as other:
                        temporary = _temporary_name(self._mark)
                        os.link(Path(first).name, temporary, src_dir_fd=folder, dst_dir_fd=other, follow_symlinks=False)
                        os.rename(temporary, Path(name).name, src_dir_fd=other, dst_dir_fd=other)
                        self._made.append((name, inode))
        finally:
            os.close(source)

    def _keep(self, name: str) -> None:
        """Save the file that has this name now."""
        with contextlib.suppress(FileNotFoundError), self._folder_of(name) as folder:
            fd = os.open(Path(name).name, _READ, dir_fd=folder)
            self._replaced[name] = fd
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise FileExistsError(errno.EEXIST, "something else has the name of a shared file", name)

    def _write(self, folder: int, name: str, source: int, wanted: SharedFileRecord | os.stat_result) -> tuple[int, int]:
        """Atomically create or replace a file of this name with the content of ``source``.

        Returns its device and inode.
        """
        temporary = _temporary_name(self._mark)
        fd = os.open(temporary, _CREATE, 0o600, dir_fd=folder)
        try:
            if isinstance(wanted, SharedFileRecord):
                size_bytes, mode, owner = wanted.size_bytes, wanted.mode, (wanted.uid, wanted.gid)
                modified_ns = wanted.modified_ns
            else:
                size_bytes, mode, owner = wanted.st_size, stat.S_IMODE(wanted.st_mode), (wanted.st_uid, wanted.st_gid)
                modified_ns = wanted.st_mtime_ns
            copy_data(source, fd, size_bytes)
            os.fchown(fd, *owner)
            os.fchmod(fd, mode)
            os.utime(fd, ns=(modified_ns, modified_ns))
            os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
            return _inode(os.fstat(fd))
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary, dir_fd=folder)
            raise
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def _folder_of(self, name: str, record: SharedFileRecord | None = None) -> Iterator[int]:
        """The folder that holds ``name``. With a ``record`` it is made if missing, for the record's owner."""
        parents = Path(name).parts[:-1]
        if record is not None:
            for depth, name in enumerate(parents):
                with _folder_in(self._root, parents[:depth]) as above, contextlib.suppress(FileExistsError):
                    make_folder_in(above, name, mode=0o755, uid=record.uid, gid=record.gid)
                    self._made_folders.append("/".join(parents[: depth + 1]))
        with _folder_in(self._root, parents) as folder:
            yield folder


@contextlib.contextmanager
def _folder_in(root: Path, parts: Sequence[str]) -> Iterator[int]:
    """A folder below the root. Every user may write to /dev/shm: no symbolic link is followed."""
    top = os.open(root, _FOLDER & ~os.O_NOFOLLOW)
    try:
        with _folder_below(top, "/".join(parts)) as folder:
            yield folder
    finally:
        os.close(top)


def _inode(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def remove_remaps(root: Path, records: Sequence[SharedFileRecord]) -> None:
    """Remove CRIU's names for the job's files whose own name was gone (``link_remap.N``).

    CRIU leaves them for the restore, but a restore here uses the snapshot; a later dump that needs the same number
    would fail, and they use memory.
    """
    for record in records:
        for name in record.names:
            if _REMAP.search(name):
                with contextlib.suppress(OSError), _folder_in(root, Path(name).parts[:-1]) as folder:
                    os.unlink(Path(name).name, dir_fd=folder)


def remove_made(root: Path, mark: str, files: Sequence[MadeFile], folders: Sequence[str]) -> None:
    """Remove what a dead process has made by `SharedFiles.put_back`, as `to_be_made` says. Others' files stay."""
    for inside in {"", *folders}:
        with contextlib.suppress(OSError), _folder_in(root, Path(inside).parts) as folder:
            for name in os.listdir(folder):
                if name.startswith(f".gpucr-{mark}"):
                    os.unlink(name, dir_fd=folder)
    for file in files:
        path = Path(file.name)
        with contextlib.suppress(OSError), _folder_in(root, path.parts[:-1]) as folder:
            status = os.lstat(path.name, dir_fd=folder)
            if (status.st_size, status.st_mtime_ns) == (file.size_bytes, file.modified_ns):
                os.unlink(path.name, dir_fd=folder)
    for inside in reversed(folders):
        path = Path(inside)
        with contextlib.suppress(OSError), _folder_in(root, path.parts[:-1]) as folder:
            os.rmdir(path.name, dir_fd=folder)


def names_in_use(root: Path, records: Sequence[SharedFileRecord]) -> dict[str, tuple[int, int]]:
    """Those names of the records that exist in ``root`` now, with device and inode."""
    found: dict[str, tuple[int, int]] = {}
    for name in (name for record in records for name in record.names):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            status = (root / name).lstat()
            found[name] = (status.st_dev, status.st_ino)
    return found


def _walk(root: Path) -> Iterator[tuple[str, int]]:
    """Names and inodes of the regular files of the root's own file system.

    Other programs use it too. What they remove, move or nest meanwhile, or have mounted so that even root may not look
    (FUSE), holds none of the job's files, and must not fail its dump.
    """
    top = os.open(root, _FOLDER & ~os.O_NOFOLLOW)
    try:
        device = os.fstat(top).st_dev
        waiting = [""]
        while waiting:
            inside = waiting.pop()
            with _others_passed_over(), _folder_below(top, inside) as folder, os.scandir(folder) as entries:
                if os.fstat(folder).st_dev != device:
                    continue
                for entry in entries:
                    name = f"{inside}/{entry.name}" if inside else entry.name
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(name)
                    elif entry.is_file(follow_symlinks=False):
                        with _others_passed_over():
                            yield name, entry.stat(follow_symlinks=False).st_ino
    finally:
        os.close(top)


@contextlib.contextmanager
def _others_passed_over() -> Iterator[None]:
    try:
        yield
    except OSError as e:
        if e.errno not in _OTHERS_WORK:
            raise


@contextlib.contextmanager
def _folder_below(top: int, inside: str) -> Iterator[int]:
    """Open a folder by its relative name, without following links."""
    fd = os.dup(top)
    try:
        for part in Path(inside).parts:
            inner = os.open(part, _FOLDER, dir_fd=fd)
            os.close(fd)
            fd = inner
        yield fd
    finally:
        os.close(fd)


def _save_one(root: Path, snapshot: Path, stored: str, names: list[str]) -> SharedFileRecord:
    with _folder_in(root, Path(names[0]).parts[:-1]) as folder:
        source = os.open(Path(names[0]).name, _READ, dir_fd=folder)
    try:
        status = os.fstat(source)
        target = os.open(snapshot / stored, _CREATE, 0o600)
        try:
            copy_data(source, target, status.st_size)
        finally:
            os.close(target)
    finally:
        os.close(source)
    return SharedFileRecord(
        names=tuple(names),
        size_bytes=status.st_size,
        mode=stat.S_IMODE(status.st_mode),
        uid=status.st_uid,
        gid=status.st_gid,
        modified_ns=status.st_mtime_ns,
        stored=stored,
    )


def _temporary_name(mark: str) -> str:
    return f".gpucr-{mark}{os.urandom(8).hex()}"

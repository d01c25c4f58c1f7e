"""Copies of a job's databases: all files of each, as they were while the job was frozen, to be put back together.

A program that opens a SQLite database while nobody else has it open removes its ``-wal`` and ``-shm`` when it leaves.
Without them CRIU cannot restore the job; and an old ``-wal`` beside a newer database damages it. So either all files of
a database are put back, or none, and what was there is kept beside. The copies lie with the files of shared memory.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from gpucr.diagnosis.preflight.databases import ENDINGS, LIMIT_BYTES, SavedState
from gpucr.linux.sparse import copy_data
from gpucr.linux.trusted_paths import open_file, opened_folder
from gpucr.snapshot.manifest import SavedDatabase, SavedFile
from gpucr.snapshot.shared_files import FOLDER_NAME

_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_MOST_KEPT = 1000
_NEW = ".gpucr-new-"
"""In the names of copies that are not in their place yet."""

Inode = tuple[int, int]


def save(databases: Mapping[str, Mapping[str, Inode]], snapshot: Path, first_number: int) -> tuple[SavedDatabase, ...]:
    """Copy databases, given by path with the inodes of their files by path, into a snapshot's folder.

    ``first_number``: of the first copy's name. A database that another program changes meanwhile, that lies elsewhere
    now, or that would exceed the limit, is left out. Raises OSError if the copies cannot be written.
    """
    saved: list[SavedDatabase] = []
    left_bytes, number = LIMIT_BYTES, first_number
    for path, members in databases.items():
        with contextlib.ExitStack() as opened:
            sources = _opened(members, opened)
            before = {name: os.fstat(fd) for name, fd in sources.items()}
            size_bytes = sum(status.st_size for status in before.values())
            if not sources or size_bytes > left_bytes:
                continue
            (snapshot / FOLDER_NAME).mkdir(mode=0o700, exist_ok=True)
            files = [
                _copied(name, sources[name], before[name], snapshot, f"{FOLDER_NAME}/{place}")
                for place, name in enumerate(sorted(sources), number)
            ]
            if any(_version(os.fstat(fd)) != _version(before[name]) for name, fd in sources.items()):
                for file in files:
                    (snapshot / file.stored).unlink()
                continue
            saved.append(SavedDatabase(path, tuple(files)))
            left_bytes, number = left_bytes - size_bytes, number + len(files)
    return tuple(saved)


def state_now(database: SavedDatabase) -> SavedState:
    """Return those of its files that are not as they were at the dump.

    The database itself counts as gone if a gpucr was killed while it put it back.
    """
    newer = tuple(file.path for file in database.files if not _is_as_saved(file))
    members = tuple(file.path for file in database.files)
    gone = [path for path in newer if not os.path.lexists(path)]
    main = Path(database.path)
    if any(main.parent.glob(f".{glob.escape(main.name)}{_NEW}*")):
        newer, gone = tuple({database.path: None, **dict.fromkeys(newer)}), [database.path, *gone]
    return SavedState(database.path, members, newer, tuple(gone))


class PutBackDatabase:
    """One database of a snapshot, put back. ``kept``: the names of the files that keep what it has replaced.

    The database itself keeps its inode: SQLite takes a file with another one for a database that was moved away, and
    refuses to write to it (SQLITE_READONLY_DBMOVED, seen with a rollback journal).
    """

    def __init__(self, database: SavedDatabase, snapshot: Path, stamp: str) -> None:
        self._main = next(file for file in database.files if file.path == database.path)
        self._others = sorted((file for file in database.files if file is not self._main), key=lambda file: file.path)
        self._folder = Path(database.path).parent
        self._snapshot = snapshot
        self._stamp = stamp
        self._mark = os.urandom(8).hex()
        self._made: list[tuple[str, Inode]] = []
        self._is_rewritten = False
        self.kept: dict[str, str] = {}

    def put_back(self) -> int:
        """Replace all of its files. Returns their bytes. Raises OSError; then `undo` is to be called.

        What is replaced is kept, and all copies are complete, before the first file changes. The logs go first and
        come last: at no time is there one beside a database that it does not belong to.
        """
        main = _name(self._main)
        with opened_folder(self._folder) as folder:
            in_place = _exists(folder, main) and os.stat(main, dir_fd=folder).st_ino == self._main.inode
            for file in (*self._others, self._main):
                self._write(folder, file)
            if in_place:
                self._keep_copy(folder, main)
            beside = {f"{main}{end}" for end in ENDINGS} | {_name(file) for file in self._others}
            for name in sorted(name for name in beside if _exists(folder, name)):
                self._move_aside(folder, name)
            if in_place:
                self._is_rewritten = True
                self._rewrite(folder, main, self._temporary(self._main))
            else:
                if _exists(folder, main):
                    self._move_aside(folder, main)
                self._come_in(folder, self._main)
            for file in self._others:
                self._come_in(folder, file)
            os.fsync(folder)
            self._remove_marks(folder)
        return sum(file.size_bytes for file in (self._main, *self._others))

    def undo(self) -> None:
        """Bring back what was there. Raises OSError.

        A name that leads to another file by now is somebody else's, and is left alone.
        """
        main = _name(self._main)
        with opened_folder(self._folder) as folder:
            for name, inode in reversed(self._made):
                with contextlib.suppress(FileNotFoundError):
                    if _inode(os.stat(name, dir_fd=folder, follow_symlinks=False)) == inode:
                        os.unlink(name, dir_fd=folder)
            self._made.clear()
            if self._is_rewritten:
                self._rewrite(folder, main, self.kept[main])
                self._is_rewritten = False
            for name, copy in reversed(self.kept.items()):
                if _exists(folder, name):  # it was copied, not moved, or is somebody else's now
                    if name == main:
                        os.unlink(copy, dir_fd=folder)
                else:
                    os.rename(copy, name, src_dir_fd=folder, dst_dir_fd=folder)
            self.kept.clear()
            for file in (self._main, *self._others):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._temporary(file), dir_fd=folder)

    def _remove_marks(self, folder: int) -> None:
        """Until now they have said that the database is not complete; also those of a gpucr that was killed."""
        for name in os.listdir(folder):
            if name.startswith(f".{_name(self._main)}") and _NEW in name:
                os.unlink(name, dir_fd=folder)

    def _write(self, folder: int, file: SavedFile) -> None:
        """Write the copy beside its place."""
        source = os.open(self._snapshot / file.stored, _READ)
        try:
            fd = os.open(self._temporary(file), _CREATE, 0o600, dir_fd=folder)
            try:
                copy_data(source, fd, file.size_bytes)
                os.fchown(fd, file.uid, file.gid)
                os.fchmod(fd, file.mode)
                os.utime(fd, ns=(file.modified_ns, file.modified_ns))
                os.fsync(fd)
            finally:
                os.close(fd)
        finally:
            os.close(source)

    def _keep_copy(self, folder: int, name: str) -> None:
        source = os.open(name, _READ, dir_fd=folder)
        try:
            status = os.fstat(source)
            kept = self._name_of_kept(folder, name)
            fd = os.open(kept, _CREATE, 0o600, dir_fd=folder)
            self.kept[name] = kept
            try:
                copy_data(source, fd, status.st_size)
                os.fchown(fd, status.st_uid, status.st_gid)
                os.fchmod(fd, stat.S_IMODE(status.st_mode))
                os.utime(fd, ns=(status.st_atime_ns, status.st_mtime_ns))
                os.fsync(fd)
            finally:
                os.close(fd)
        finally:
            os.close(source)

    @staticmethod
    def _rewrite(folder: int, name: str, other: str) -> None:
        """Give this file the content and the time of the other one."""
        source = os.open(other, _READ, dir_fd=folder)
        try:
            fd = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
            try:
                status = os.fstat(source)
                os.ftruncate(fd, 0)
                copy_data(source, fd, status.st_size)
                os.utime(fd, ns=(status.st_atime_ns, status.st_mtime_ns))
                os.fsync(fd)
            finally:
                os.close(fd)
        finally:
            os.close(source)

    def _come_in(self, folder: int, file: SavedFile) -> None:
        os.rename(self._temporary(file), _name(file), src_dir_fd=folder, dst_dir_fd=folder)
        self._made.append((_name(file), _inode(os.stat(_name(file), dir_fd=folder, follow_symlinks=False))))

    def _move_aside(self, folder: int, name: str) -> None:
        kept = self._name_of_kept(folder, name)
        os.rename(name, kept, src_dir_fd=folder, dst_dir_fd=folder)
        self.kept[name] = kept

    def _name_of_kept(self, folder: int, name: str) -> str:
        """``NAME.gpucr-STAMP``, with a number if that is taken."""
        for number in range(_MOST_KEPT):
            kept = f"{name}.gpucr-{self._stamp}" + (f"-{number}" if number else "")
            if not _exists(folder, kept):
                return kept
        raise FileExistsError(errno.EEXIST, "too many files keep what was replaced", name)

    def _temporary(self, file: SavedFile) -> str:
        return f".{_name(file)}{_NEW}{self._mark}"


def _name(file: SavedFile) -> str:
    return Path(file.path).name


def _exists(folder: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _opened(members: Mapping[str, Inode], opened: contextlib.ExitStack) -> dict[str, int]:
    """Descriptors of these files; none if one of them is another file by now, or cannot be read."""
    found: dict[str, int] = {}
    for path, inode in members.items():
        try:
            fd = open_file(path, _READ)
        except OSError:
            return {}
        opened.callback(os.close, fd)
        status = os.fstat(fd)
        if _inode(status) != inode or not stat.S_ISREG(status.st_mode):
            return {}
        found[path] = fd
    return found


def _copied(path: str, source: int, status: os.stat_result, snapshot: Path, stored: str) -> SavedFile:
    target = os.open(snapshot / stored, _CREATE, 0o600)
    try:
        copy_data(source, target, status.st_size)
    finally:
        os.close(target)
    return SavedFile(
        path=path,
        size_bytes=status.st_size,
        mode=stat.S_IMODE(status.st_mode),
        uid=status.st_uid,
        gid=status.st_gid,
        modified_ns=status.st_mtime_ns,
        inode=status.st_ino,
        stored=stored,
    )


def _is_as_saved(file: SavedFile) -> bool:
    try:
        status = os.lstat(file.path)
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and (status.st_size, status.st_mtime_ns) == (file.size_bytes, file.modified_ns)


def _version(status: os.stat_result) -> tuple[int, int]:
    return status.st_size, status.st_mtime_ns


def _inode(status: os.stat_result) -> Inode:
    return status.st_dev, status.st_ino

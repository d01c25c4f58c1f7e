"""SQLite databases among a job's files: pages change in place, so sizes say little, and the files belong together.

In WAL mode the index in ``-shm`` records how far ``-wal`` is written. A truncated ``-wal`` no longer matches it, and
SQLite fails every query with "disk I/O error" (seen). Left alone, the files match, and a restored job sees new content
as another program's work, which SQLite supports. The last program that closes a database removes ``-wal`` and ``-shm``,
which a dumped job still needs: so a snapshot has copies of all files (snapshot/databases.py).
"""

from __future__ import annotations

import contextlib
import datetime
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from gpucr.diagnosis.preflight.findings import Finding
from gpucr.diagnosis.preflight.support import outside as facts
from gpucr.linux import files_in_use
from gpucr.linux.one_look import OneLook
from gpucr.linux.processes import PROC
from gpucr.model import Job, JobFile
from gpucr.quantities import format_bytes

ENDINGS = ("-wal", "-shm", "-journal")
_MAGIC = b"SQLite format 3\0"
LIMIT_BYTES = 1 << 30
"""Databases that are larger in all are not copied: the job stands still meanwhile."""


def databases_of(paths: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """The databases among these files, by the path of each, with all of its files that are among them.

    Recognised by the files beside it, or by its first bytes.
    """
    known = sorted(set(paths))
    beside: dict[str, list[str]] = {}
    for path in known:
        for suffix in ENDINGS:
            if path.endswith(suffix):
                beside.setdefault(path.removesuffix(suffix), []).append(path)
    return {
        path: (path, *beside.get(path, ()))
        for path in known
        if path in beside or (not path.endswith(ENDINGS) and _begins_as_one(path))
    }


def spared_by_rewind(files: Iterable[JobFile]) -> frozenset[str]:
    """Database files, by path, which a rewind must not truncate."""
    written = [file.path for file in files if file.is_written]
    return frozenset(member for members in databases_of(written).values() for member in members)


def check_databases(job: Job, *, leave_running: bool, look: OneLook | None = None) -> list[Finding]:
    """Databases of a job that is to be dumped: the snapshot gets a copy, unless they are too large."""
    found: list[Finding] = []
    left_bytes = LIMIT_BYTES
    for path, files in databases_of(_written_files(job.pids, look or OneLook())).items():
        size_bytes = sum(map(_size_bytes, files))
        is_too_large = size_bytes > left_bytes
        left_bytes -= 0 if is_too_large else size_bytes
        fact = facts.DATABASE_TOO_LARGE if is_too_large else facts.DATABASE if leave_running else facts.DATABASE_ENDS
        evidence = f"{len(files)} of its files" if len(files) > 1 else "it begins as one"
        found.append(fact.seen(evidence, file=path, size=format_bytes(size_bytes)))
    return found


class SavedState(NamedTuple):
    """A database with a copy in a snapshot: its files then, those that differ now, and those that are gone."""

    path: str
    members: tuple[str, ...]
    newer: tuple[str, ...]
    gone: tuple[str, ...]


def check_changed_databases(
    files: Sequence[JobFile], created: str, *, rewind: bool, saved: Sequence[SavedState] = ()
) -> list[Finding]:
    """Databases of a snapshot that were changed since the dump, at ``created``."""
    known = {member for database in saved for member in database.members}
    sizes = {file.path: file.size_bytes for file in files if file.is_written and file.path not in known}
    fact = facts.DATABASE_REWIND if rewind else facts.DATABASE_CHANGED
    found = [fact.seen(", ".join(changed), file=path) for path, changed in _changed(sizes, created).items()]
    return [*found, *(finding for database in saved for finding in _judge_saved(database, rewind=rewind))]


def _judge_saved(database: SavedState, *, rewind: bool) -> Iterator[Finding]:
    if not database.newer:
        return
    if rewind:
        yield facts.DATABASE_PUT_BACK.seen(", ".join(database.newer), file=database.path)
        present = [(path, status) for path in database.newer if (status := _status(path)) is not None]
        inodes = {(status.st_dev, status.st_ino): path for path, status in present}
        for inode, pid in (files_in_use.holders(set(inodes)) if inodes else {}).items():
            yield facts.REWIND_IN_USE.seen(f"by process {pid}", pid, file=inodes[inode])
    elif database.gone:
        yield facts.DATABASE_MISSING.seen(", ".join(database.gone), file=database.path)
    else:
        yield facts.DATABASE_NEWER.seen(", ".join(database.newer), file=database.path)


def _status(path: str) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except OSError:
        return None


def _size_bytes(path: str) -> int:
    status = _status(path)
    return status.st_size if status is not None else 0


def _changed(sizes: Mapping[str, int], created: str) -> dict[str, tuple[str, ...]]:
    """By database, files whose size has changed or that were written after the second of the dump."""
    found: dict[str, tuple[str, ...]] = {}
    dumped = _timestamp(created)
    for path, members in databases_of(sizes).items():
        changed = []
        for member in members:
            with contextlib.suppress(OSError):  # a missing file has its own finding
                status = os.stat(member)
                if status.st_size != sizes[member] or (dumped is not None and status.st_mtime >= dumped + 1):
                    changed.append(member)
        if changed:
            found[path] = tuple(changed)
    return found


def _timestamp(created: str) -> float | None:
    try:
        return datetime.datetime.fromisoformat(created).timestamp()
    except (ValueError, OverflowError):
        return None


def _written_files(pids: Iterable[int], look: OneLook) -> set[str]:
    """What these processes have open for writing."""
    found: set[str] = set()
    for target, files in look.files_of(pids).items():
        if target.startswith("/"):
            with contextlib.suppress(OSError):  # closed meanwhile
                if any(os.lstat(f"{PROC}/{each.pid}/fd/{each.fd}").st_mode & stat.S_IWUSR for each in files):
                    found.add(target)
    return found


def _begins_as_one(path: str) -> bool:
    """Whether a plain file of this path is a database. Never waits, and follows no link at its end."""
    with contextlib.suppress(OSError, ValueError):
        if not stat.S_ISREG(os.lstat(path).st_mode):
            return False
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            fd = os.open(path, flags | os.O_NOATIME)  # a look leaves no trace
        except PermissionError:  # it is another user's
            fd = os.open(path, flags)
        try:
            return os.read(fd, len(_MAGIC)) == _MAGIC
        finally:
            os.close(fd)
    return False

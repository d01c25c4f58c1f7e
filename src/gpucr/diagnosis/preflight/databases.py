"""SQLite databases among a job's files: pages change in place, so sizes say little, and the files belong together.

In WAL mode the index in ``-shm`` records how far ``-wal`` is written. A truncated ``-wal`` no longer matches it, and
SQLite fails every query with "disk I/O error" (seen). Left alone, the files match, and a restored job sees new content
as another program's work, which SQLite supports.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import stat
from collections.abc import Iterable, Mapping, Sequence

from gpucr.diagnosis.preflight.findings import Finding
from gpucr.diagnosis.preflight.support import outside as facts
from gpucr.linux import processes
from gpucr.model import Job, JobFile

_BESIDE = ("-wal", "-shm", "-journal")
_MAGIC = b"SQLite format 3\0"


def databases_of(paths: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """The databases among these files, by the path of each, with all of its files that are among them.

    Recognised by the files beside it, or by its first bytes.
    """
    known = sorted(set(paths))
    beside: dict[str, list[str]] = {}
    for path in known:
        for suffix in _BESIDE:
            if path.endswith(suffix):
                beside.setdefault(path.removesuffix(suffix), []).append(path)
    return {
        path: (path, *beside.get(path, ()))
        for path in known
        if path in beside or (not path.endswith(_BESIDE) and _begins_as_one(path))
    }


def spared_by_rewind(files: Iterable[JobFile]) -> frozenset[str]:
    """Database files, by path, which a rewind must not truncate."""
    written = [file.path for file in files if file.is_written]
    return frozenset(member for members in databases_of(written).values() for member in members)


def check_databases(job: Job) -> list[Finding]:
    """Databases of a job that will continue after its dump: the snapshot lacks their content."""
    targets = {file.target for process in job.processes for file in _open_files(process.pid)}
    return [
        facts.DATABASE.seen(f"{len(files)} of its files" if len(files) > 1 else "it begins as one", file=path)
        for path, files in databases_of(targets).items()
    ]


def check_changed_databases(files: Sequence[JobFile], created: str, *, rewind: bool) -> list[Finding]:
    """Databases of a snapshot that were changed since the dump, at ``created``."""
    sizes = {file.path: file.size_bytes for file in files if file.is_written}
    fact = facts.DATABASE_REWIND if rewind else facts.DATABASE_CHANGED
    return [fact.seen(", ".join(changed), file=path) for path, changed in _changed(sizes, created).items()]


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


def _open_files(pid: int) -> Sequence[processes.OpenFile]:
    try:
        return processes.open_files(pid)
    except PermissionError:
        return ()


def _begins_as_one(path: str) -> bool:
    """Whether a plain file of this path is a database. Never waits, and follows no link at its end."""
    with contextlib.suppress(OSError, ValueError):
        if not stat.S_ISREG(os.lstat(path).st_mode):
            return False
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            return os.read(fd, len(_MAGIC)) == _MAGIC
        finally:
            os.close(fd)
    return False

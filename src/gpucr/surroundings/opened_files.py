"""Check that what CRIU opened for a restored job is what the job had open, not the target of another user's link.

CRIU opens a job's files and folders by path, as root, before the processes get their own credentials. A user who can
change a folder on the way could have any file of the machine handed to the job. CRIU offers no other way to open them,
so gpucr checks the result when all processes exist and none has run.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress

from gpucr.errors import Unsupported
from gpucr.linux import trusted_paths
from gpucr.linux.one_look import OneLook
from gpucr.linux.processes import PROC

_GONE = " (deleted)"


def require_as_recorded(pids: Iterable[int], names: Collection[str]) -> None:
    """Raise Unsupported if these processes have a file or folder open that none of the ``names`` stands for.

    The kernel shows where a path led: a name that leads elsewhere now is fine if only root can have changed it.
    """
    safe: set[tuple[int, int]] | None = None
    for path, inode in _opened(pids, apart_from=names):
        safe = _inodes(names) if safe is None else safe
        if inode not in safe:
            raise Unsupported(
                f"the restored job would have {path} open, which it did not have: a file of its own leads there by a "
                "link that another user can change",
                hint="put the job's files back in their places, without links that other users can change",
                code="GPUCR-UNTRUSTED-PATH",
            )


def _opened(pids: Iterable[int], *, apart_from: Collection[str]) -> Iterator[tuple[str, tuple[int, int]]]:
    """Paths and inodes of named plain files and folders. (CRIU accepts nothing else in their place.)"""
    for pid in pids:
        folder = f"{PROC}/{pid}"
        mapped = _entries(f"{folder}/map_files") if _may_have_mapped_others(pid, apart_from) else []
        for link in (f"{folder}/cwd", *_entries(f"{folder}/fd"), *mapped):
            with suppress(FileNotFoundError, ProcessLookupError):
                path = os.readlink(link)
                if path in apart_from or not path.startswith("/") or path.endswith(_GONE):
                    continue
                status = os.stat(link)
                if status.st_nlink and (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
                    yield path, (status.st_dev, status.st_ino)


def _may_have_mapped_others(pid: int, names: Collection[str]) -> bool:
    """Whether files that are not among these. In ``maps`` ``\\012`` stands for itself, or for a line feed."""
    with suppress(FileNotFoundError, ProcessLookupError):
        paths = OneLook().mapped(pid).paths
        return any(path not in names or "\\" in path for path in paths if path[0] == "/" and path[-10:] != _GONE)
    return False


def _entries(folder: str) -> list[str]:
    with suppress(FileNotFoundError, ProcessLookupError):
        return [f"{folder}/{name}" for name in os.listdir(folder)]
    return []


def _inodes(names: Iterable[str]) -> set[tuple[int, int]]:
    """The inodes of these names, if nobody else can change them."""
    found: set[tuple[int, int]] = set()
    for name in names:
        with suppress(OSError):
            fd = trusted_paths.open_file(name, os.O_PATH)
            try:
                status = os.fstat(fd)
                found.add((status.st_dev, status.st_ino))
            finally:
                os.close(fd)
    return found

"""What CRIU has opened for a restored job is what the job had open, and nothing that a link of another user led to.

CRIU opens a job's files and folders by their paths, as root, before the processes become who they were. Whoever can
change a folder on the way could have the job handed any file of the machine. CRIU cannot be told to open them in
another way, so gpucr looks what came of it, when all processes are there and none has run.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress

from gpucr.errors import Unsupported
from gpucr.linux import trusted_paths
from gpucr.linux.processes import PROC

_GONE = " (deleted)"


def require_as_recorded(pids: Iterable[int], names: Collection[str]) -> None:
    """Raise Unsupported where these processes have a file or folder that none of the ``names`` stands for.

    The kernel shows where a path has led: a name that leads elsewhere now is fine where only root can have changed it.
    """
    safe: set[tuple[int, int]] | None = None
    for path, inode in _opened(pids):
        if path not in names:
            safe = _inodes(names) if safe is None else safe
            if inode not in safe:
                raise Unsupported(
                    f"the restored job would have {path} open, which it did not have: a file of its own leads there by "
                    "a link that another user can change",
                    hint="put the job's files back in their places, without links that other users can change",
                    code="GPUCR-UNTRUSTED-PATH",
                )


def _opened(pids: Iterable[int]) -> Iterator[tuple[str, tuple[int, int]]]:
    """Paths and inodes of what has a name and is a plain file or a folder. (CRIU takes nothing else in their place.)"""
    for pid in pids:
        folder = PROC / str(pid)
        for link in (f"{folder}/cwd", *_entries(f"{folder}/fd"), *_entries(f"{folder}/map_files")):
            with suppress(FileNotFoundError, ProcessLookupError):
                status, path = os.stat(link), os.readlink(link)
                is_plain = stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)
                if is_plain and status.st_nlink and path.startswith("/") and not path.endswith(_GONE):
                    yield path, (status.st_dev, status.st_ino)


def _entries(folder: str) -> list[str]:
    with suppress(FileNotFoundError, ProcessLookupError):
        return [f"{folder}/{name}" for name in os.listdir(folder)]
    return []


def _inodes(names: Iterable[str]) -> set[tuple[int, int]]:
    """What these names stand for where nobody else can change that."""
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

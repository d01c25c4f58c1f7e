"""The one way to lock: flock(2) on a file, a folder or a pidfd. A lock ends with the last copy of the descriptor."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from pathlib import Path

_POLL_S = 0.01
_REMOVED = ".removed-"


def lock(fd: int, *, wait_s: float | None = 0.0, is_shared: bool = False) -> None:
    """Lock this open file against all others who lock it.

    ``wait_s``: how long to wait for another holder; None: until it is free. Raises BlockingIOError if it is not free by
    then, and OSError if its file system has no locks. ``is_shared``: against those who lock it for themselves alone.
    """
    kind = fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX
    if wait_s is None:
        fcntl.flock(fd, kind)
        return
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(_POLL_S)


def share(fd: int) -> None:
    """Lock this open file together with others who share it: `lock` waits for all of them. Raises OSError."""
    fcntl.flock(fd, fcntl.LOCK_SH)


def unlock(fd: int) -> None:
    """Release the lock before the descriptor is closed. Raises OSError."""
    fcntl.flock(fd, fcntl.LOCK_UN)


def is_lock_of(fd: int, path: Path) -> bool:
    """Whether this open file still has that name: who held the lock before may have removed the folder."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(path.stat(), os.fstat(fd))
    return False


def remove_folder(folder: Path) -> None:
    """Remove a folder whose lock is in it, and held. Raises OSError.

    It loses its name first: while it was emptied, another one could lock a new file there, and lose what it wrote. What
    a killed process leaves has a hidden name; `remove_left_aside` removes that.
    """
    aside = folder.with_name(f"{_REMOVED}{folder.stat().st_ino}")
    folder.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


def remove_left_aside(parent: Path) -> None:
    """Remove what killed processes left of the folders that they removed below this one. Raises nothing."""
    for each in parent.glob(f"{_REMOVED}*"):
        shutil.rmtree(each, ignore_errors=True)

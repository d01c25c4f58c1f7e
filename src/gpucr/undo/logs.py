"""CRIU's logs: written to a private folder, kept when the operation failed."""

from __future__ import annotations

import contextlib
import os
import shutil
import syslog
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from gpucr.errors import GpucrError
from gpucr.linux import locks, trusted_paths
from gpucr.linux.private_folders import state_folder

_AT_WORK = ".at-work"
"""A file with the pid of the log's writer. A log without it has been reported to somebody and is kept."""


def append_to_log(name: str, line: str) -> None:
    """Add a line with the time to ``NAME.log`` in the log folder, or to syslog if that cannot be written."""
    try:
        base = state_folder() / "log"
        trusted_paths.make_private(base)
        fd = trusted_paths.open_file(base / f"{name}.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        with os.fdopen(fd, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')} {line}\n")
    except OSError:
        syslog.syslog(syslog.LOG_WARNING, f"gpucr {name}: {line}")


@contextlib.contextmanager
def log_kept_on_failure(phase: str) -> Iterator[Path]:
    """A path for CRIU's log in a new private folder, which is removed when the block succeeds.

    If the state folder cannot be written (a full or read-only disk), the system's temporary folder is used.
    """
    prefix = f"{phase}-{time.strftime('%Y%m%dT%H%M%S')}-"
    try:
        base = state_folder() / "log"
        trusted_paths.make_private(base)
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=base))
    except OSError:
        folder = Path(tempfile.mkdtemp(prefix=f"gpucr-{prefix}"))
    with _at_work(folder):
        try:
            yield folder / f"{phase}.log"
        except GpucrError:
            raise
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)  # nobody has been told about it
            raise
        shutil.rmtree(folder, ignore_errors=True)


def remove_logs_of(pid: int) -> None:
    """Remove what the killed gpucr with this pid left in the log folder. For its guard. Raises nothing."""
    with contextlib.suppress(OSError):
        for folder in _marked(state_folder() / "log"):
            if (folder / _AT_WORK).read_bytes() == b"%d" % pid and not _is_in_use(folder):
                shutil.rmtree(folder, ignore_errors=True)


def remove_left_behind() -> None:
    """Remove the logs of operations that were killed: nobody has been told about them. Raises nothing."""
    with contextlib.suppress(OSError):
        for folder in _marked(state_folder() / "log"):
            if not _is_in_use(folder):
                shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _at_work(folder: Path) -> Iterator[None]:
    """Mark this folder as temporary, and lock it while this process lives."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        locks.lock(fd, wait_s=None)
        with contextlib.suppress(OSError):  # a full disk
            (folder / _AT_WORK).write_text(str(os.getpid()), encoding="ascii")
        yield
    finally:
        with contextlib.suppress(OSError):
            (folder / _AT_WORK).unlink(missing_ok=True)
        os.close(fd)


def _marked(base: Path) -> list[Path]:
    folder = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with os.scandir(folder) as entries:  # there may be many, and every operation checks
            names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        return [base / name for name in names if os.access(f"{name}/{_AT_WORK}", os.F_OK, dir_fd=folder)]
    finally:
        os.close(folder)


def _is_in_use(folder: Path) -> bool:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        locks.lock(fd)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False

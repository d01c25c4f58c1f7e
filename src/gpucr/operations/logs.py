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
from gpucr.linux import trusted_paths
from gpucr.linux.private_folders import state_folder


def append_to_log(name: str, line: str) -> None:
    """Add a line with the time to ``NAME.log`` in the log folder, or to syslog where that cannot be written."""
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

    Where the state folder cannot be written (a full or read-only disk), the system's folder for temporary files is
    used instead.
    """
    prefix = f"{phase}-{time.strftime('%Y%m%dT%H%M%S')}-"
    try:
        base = state_folder() / "log"
        trusted_paths.make_private(base)
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=base))
    except OSError:
        folder = Path(tempfile.mkdtemp(prefix=f"gpucr-{prefix}"))
    try:
        yield folder / f"{phase}.log"
    except GpucrError:
        raise
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)  # nobody would be told where it is
        raise
    shutil.rmtree(folder, ignore_errors=True)

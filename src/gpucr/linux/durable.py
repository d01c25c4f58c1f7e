"""Atomic, durable files: complete or absent, even after a power failure. Standard library only."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def write(
    path: Path, data: bytes, *, mode: int = 0o600, owner: tuple[int, int] | None = None, temporary: str | None = None
) -> None:
    """Like `write_below`, in the folder of this path."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        write_below(folder, path.name, data, mode=mode, owner=owner, temporary=temporary)
    finally:
        os.close(folder)


def write_below(
    folder: int,
    name: str,
    data: bytes,
    *,
    mode: int = 0o600,
    owner: tuple[int, int] | None = None,
    temporary: str | None = None,
) -> None:
    """Create or replace the file in one step. Its data and its name are durable on return.

    ``folder``: a descriptor. The data goes first to a file named ``temporary``, which replaces one that a killed
    process has left; for callers who are the only writer there. None: a unique name. No link is followed. ``owner``:
    uid and gid. Raises OSError; the folder is then as before.
    """
    if temporary is None:
        temporary = f".{name}.{os.urandom(8).hex()}"
    else:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=folder)
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
    try:
        with open(fd, "wb") as file:
            file.write(data)
            file.flush()
            if owner is not None:
                os.fchown(fd, *owner)
            os.fchmod(fd, mode)
            os.fsync(fd)
        os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        raise
    os.fsync(folder)


def sync(path: str | os.PathLike[str]) -> None:
    """Make a file or folder that others have written durable. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        sync_open(fd)
    finally:
        os.close(fd)


def sync_open(fd: int) -> None:
    """The same for an open one: what was written through any descriptor of the file."""
    os.fsync(fd)

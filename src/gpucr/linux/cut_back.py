"""Truncate a file to an earlier size, and keep what is cut off in a file beside it."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from msgspec import Struct

from gpucr.linux.trusted_paths import opened_folder

_COPY_BYTES = 1 << 20


class CutOff(Struct, frozen=True):
    """What was cut off: the file, its size after the cut, and the file that holds the rest."""

    path: Path
    size_bytes: int
    kept_as: Path


def cut_back(path: Path, size_bytes: int, *, stamp: str) -> CutOff:
    """Save what lies beyond ``size_bytes`` as ``PATH.gpucr-STAMP``, with the file's owner and mode, and cut it off.

    The copy is durable before anything is cut off. Symbolic links on the way are followed only if no other user can
    change them: they could lead root to another file. Raises OSError; the file is then unchanged.
    """
    with opened_folder(path.parent) as folder:
        file = os.open(path.name, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        try:
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode) or status.st_size < size_bytes:
                raise OSError(errno.EINVAL, "it is no plain file of that size", str(path))
            name = _copy_rest(file, size_bytes, folder, f"{path.name}.gpucr-{stamp}", status)
            os.fsync(folder)
            os.ftruncate(file, size_bytes)
        finally:
            os.close(file)
    return CutOff(path, size_bytes, path.with_name(name))


def put_back(cut: CutOff) -> None:
    """Undo `cut_back`: append what was cut off, and remove the file that kept it.

    Raises OSError; if the file has got another size meanwhile (EBUSY), nothing is changed and both stay.
    """
    with opened_folder(cut.path.parent) as folder:
        file = os.open(cut.path.name, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        try:
            if os.fstat(file).st_size != cut.size_bytes:
                raise OSError(
                    errno.EBUSY, f"it was written to in the meantime; its old end is in {cut.kept_as}", str(cut.path)
                )
            rest = os.open(cut.kept_as.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            try:
                _copy(rest, 0, file, cut.size_bytes)
            finally:
                os.close(rest)
            os.fsync(file)
        finally:
            os.close(file)
        os.unlink(cut.kept_as.name, dir_fd=folder)


def _copy_rest(file: int, size_bytes: int, folder: int, name: str, status: os.stat_result) -> str:
    """Returns the name of the new file: ``name``, with a number if that is taken."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    for number in range(1000):
        chosen = f"{name}-{number}" if number else name
        try:
            rest = os.open(chosen, flags, 0o600, dir_fd=folder)
            break
        except FileExistsError:
            continue
    else:
        raise FileExistsError(errno.EEXIST, "too many files keep what was cut off", name)
    try:
        _copy(file, size_bytes, rest, 0)
        os.fchown(rest, status.st_uid, status.st_gid)
        os.fchmod(rest, stat.S_IMODE(status.st_mode))
        os.fsync(rest)
    except BaseException:
        os.unlink(chosen, dir_fd=folder)
        raise
    finally:
        os.close(rest)
    return chosen


def _copy(source: int, source_offset: int, target: int, target_offset: int) -> None:
    while block := os.pread(source, _COPY_BYTES, source_offset):
        source_offset += len(block)
        view = memoryview(block)
        while view:
            written = os.pwrite(target, view, target_offset)
            view, target_offset = view[written:], target_offset + written

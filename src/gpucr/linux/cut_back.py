"""Truncate a file to an earlier size, and keep what is cut off in a file beside it."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from gpucr.linux.trusted_paths import opened_folder

_COPY_BYTES = 1 << 20


class CutOff(Struct, frozen=True):
    """What is cut off: the file, its size after the cut and before, and the file that holds the rest."""

    path: str
    size_bytes: int
    whole_bytes: int
    kept_as: str


def cut_back(
    path: Path, size_bytes: int, *, stamp: str, about_to: Callable[[CutOff], None] = lambda cut: None
) -> CutOff:
    """Save what lies beyond ``size_bytes`` as ``PATH.gpucr-STAMP``, with the file's owner and mode, and cut it off.

    ``about_to`` is called before anything is changed: from then on `put_back` undoes what was done. The copy is durable
    before anything is cut off. Symbolic links on the way are followed only if no other user can change them: they could
    lead root to another file. Raises OSError; the file is then unchanged.
    """
    with opened_folder(path.parent) as folder:
        file = os.open(path.name, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        try:
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode) or status.st_size < size_bytes:
                raise OSError(errno.EINVAL, "it is no plain file of that size", str(path))
            name = _free_name(folder, f"{path.name}.gpucr-{stamp}")
            cut = CutOff(str(path), size_bytes, status.st_size, str(path.with_name(name)))
            about_to(cut)
            _copy_rest(file, size_bytes, folder, name, status)
            os.fsync(folder)
            os.ftruncate(file, size_bytes)
        finally:
            os.close(file)
    return cut


def put_back(cut: CutOff) -> None:
    """Undo `cut_back`, wherever it ended: append what was cut off, and remove the file that kept it.

    Raises OSError; if the file has got another size meanwhile (EBUSY), nothing is changed and both stay.
    """
    path, kept_as = Path(cut.path), Path(cut.kept_as).name
    with opened_folder(path.parent) as folder:
        try:
            rest = os.open(kept_as, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
        except FileNotFoundError:
            return
        try:
            _append(rest, folder, path.name, cut)
        finally:
            os.close(rest)
        os.unlink(kept_as, dir_fd=folder)


def _append(rest: int, folder: int, name: str, cut: CutOff) -> None:
    file = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    try:
        size_bytes = os.fstat(file).st_size
        if size_bytes == cut.whole_bytes:
            return  # nothing was cut off
        if size_bytes != cut.size_bytes:
            raise OSError(errno.EBUSY, f"it was written to in the meantime; its old end is in {cut.kept_as}", cut.path)
        _copy(rest, 0, file, cut.size_bytes)
        os.fsync(file)
    finally:
        os.close(file)


def _free_name(folder: int, name: str) -> str:
    """This name, with a number if it is taken."""
    taken, chosen, number = set(os.listdir(folder)), name, 0
    while chosen in taken:
        number += 1
        chosen = f"{name}-{number}"
    return chosen


def _copy_rest(file: int, size_bytes: int, folder: int, name: str, status: os.stat_result) -> None:
    rest = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
    try:
        _copy(file, size_bytes, rest, 0)
        os.fchown(rest, status.st_uid, status.st_gid)
        os.fchmod(rest, stat.S_IMODE(status.st_mode))
        os.fsync(rest)
    except BaseException:
        os.unlink(name, dir_fd=folder)
        raise
    finally:
        os.close(rest)


def _copy(source: int, source_offset: int, target: int, target_offset: int) -> None:
    while block := os.pread(source, _COPY_BYTES, source_offset):
        source_offset += len(block)
        view = memoryview(block)
        while view:
            written = os.pwrite(target, view, target_offset)
            view, target_offset = view[written:], target_offset + written

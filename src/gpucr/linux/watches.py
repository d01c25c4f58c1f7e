"""What an inotify or fanotify descriptor watches, as the kernel shows it, and whether that can be opened again."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterator

from msgspec import Struct

from gpucr.linux import libc, proc_text
from gpucr.linux.processes import PROC, OpenFile

_WATCH = re.compile(
    r"(?:inotify wd:[0-9a-f]+|fanotify) ino:(?P<inode>[0-9a-f]+) sdev:(?P<device>[0-9a-f]+) .*"
    r"fhandle-bytes:[0-9a-f]+ fhandle-type:(?P<type>[0-9a-f]+) f_handle:(?P<handle>[0-9a-f]*)"
)
_OF_A_FILE_SYSTEM = "fanotify sdev:"
_MINOR_BITS = 20  # include/linux/kdev_t.h
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC

_open_by_handle_at = libc.function("open_by_handle_at", ctypes.c_int, ctypes.c_char_p, ctypes.c_int)


class Watched(Struct, frozen=True):
    """A file or folder: where it is, and by what its file system says that it can be found (name_to_handle_at(2))."""

    device: int
    inode: int
    handle_type: int
    handle: bytes


def is_watcher(file: OpenFile) -> bool:
    """Whether this descriptor watches files."""
    return file.target in ("anon_inode:inotify", "anon_inode:[fanotify]")


def watched_by(file: OpenFile) -> Iterator[Watched | None]:
    """What this descriptor watches; None: a whole file system (FAN_MARK_FILESYSTEM). Mounts are left out."""
    try:
        lines = proc_text.lines(f"{PROC}/{file.pid}/fdinfo/{file.fd}")
    except OSError:  # closed meanwhile
        return
    for line in lines:
        match = _WATCH.match(line)
        if match is not None:
            device = int(match["device"], 16)
            number = os.makedev(device >> _MINOR_BITS, device & (1 << _MINOR_BITS) - 1)
            handle = bytes.fromhex(match["handle"][: len(match["handle"]) & ~1])
            yield Watched(number, int(match["inode"], 16), int(match["type"], 16), handle)
        elif line.startswith(_OF_A_FILE_SYSTEM):
            yield None


def opened(watched: Watched, folder: str) -> int:
    """A descriptor (O_PATH) of it, by its handle. ``folder``: one on the same file system.

    Raises PermissionError without CAP_DAC_READ_SEARCH, and OSError if the file system cannot open by handle.
    """
    mount = os.open(folder, _FOLDER)
    try:
        data = len(watched.handle).to_bytes(4, "little") + watched.handle_type.to_bytes(4, "little") + watched.handle
        return libc.check(_open_by_handle_at(mount, data, os.O_PATH | os.O_CLOEXEC), "open_by_handle_at", folder)
    finally:
        os.close(mount)

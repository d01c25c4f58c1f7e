"""The mounts of the caller's mount namespace, and detaching one."""

from __future__ import annotations

import ctypes
import os
import struct
from pathlib import Path

from gpucr.linux import libc, proc_text

_MNT_DETACH = 2  # include/linux/fs.h

_AT_FDCWD, _AT_STATX_DONT_SYNC = -100, 0x4000  # include/uapi/linux/fcntl.h
_STATX_MNT_ID, _MASK_AT, _MNT_ID_AT, _STATX_BYTES = 0x1000, 0, 144, 256  # struct statx of include/uapi/linux/stat.h

_umount2 = libc.function("umount2", ctypes.c_char_p, ctypes.c_int)
_statx = libc.function("statx", ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_uint, ctypes.c_char_p)
_MASK, _NUMBER = struct.Struct("=I"), struct.Struct("=Q")


def mount_points() -> tuple[Path, ...]:
    """All mounts, in the kernel's order."""
    return tuple(Path(mount.point) for mount in proc_text.mounts())


def mount_of(path: str) -> int:
    """The number of the mount that this leads to. Raises OSError.

    In one call where the kernel tells (statx(2) since Linux 5.8): it is asked for every descriptor of a job.
    """
    found = ctypes.create_string_buffer(_STATX_BYTES)
    if _statx(_AT_FDCWD, os.fsencode(path), _AT_STATX_DONT_SYNC, _STATX_MNT_ID, found) == 0:
        mask, number = _MASK.unpack_from(found, _MASK_AT)[0], _NUMBER.unpack_from(found, _MNT_ID_AT)[0]
        if mask & _STATX_MNT_ID:
            return int(number)
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        lines = proc_text.lines(f"/proc/self/fdinfo/{fd}")
    finally:
        os.close(fd)
    return next(int(line.split()[1]) for line in lines if line.startswith("mnt_id:"))


def detach(mount_point: Path) -> None:
    """Detach a mount and those below it; parts in use go away with their users (MNT_DETACH). Needs CAP_SYS_ADMIN.

    Raises OSError.
    """
    libc.check(_umount2(os.fsencode(mount_point), _MNT_DETACH), "", os.fspath(mount_point))

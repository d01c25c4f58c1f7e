"""The mounts of the caller's mount namespace, and detaching one."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from gpucr.linux import libc, proc_text

_MNT_DETACH = 2  # include/linux/fs.h

_umount2 = libc.function("umount2", ctypes.c_char_p, ctypes.c_int)


def mount_points() -> tuple[Path, ...]:
    """All mounts, in the kernel's order."""
    return tuple(Path(mount.point) for mount in proc_text.mounts())


def detach(mount_point: Path) -> None:
    """Detach a mount and those below it; parts in use go away with their users (MNT_DETACH). Needs CAP_SYS_ADMIN.

    Raises OSError.
    """
    libc.check(_umount2(os.fsencode(mount_point), _MNT_DETACH), "", os.fspath(mount_point))

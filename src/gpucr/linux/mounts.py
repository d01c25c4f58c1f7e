"""The mounts of the caller's mount namespace, and detaching one."""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path

from gpucr.linux import libc

MOUNTINFO = Path("/proc/self/mountinfo")

_MNT_DETACH = 2  # include/linux/fs.h
_ESCAPED = re.compile(rb"\\([0-7]{3})")

_umount2 = libc.function("umount2", ctypes.c_char_p, ctypes.c_int)


def mount_points() -> tuple[Path, ...]:
    """All mounts, in the kernel's order (proc_pid_mountinfo(5): blanks and the like are octal escapes)."""
    found: list[Path] = []
    for line in MOUNTINFO.read_bytes().splitlines():
        escaped = line.split()[4]
        found.append(Path(os.fsdecode(_ESCAPED.sub(lambda match: bytes([int(match[1], 8)]), escaped))))
    return tuple(found)


def detach(mount_point: Path) -> None:
    """Detach a mount and those below it; parts in use go away with their users (MNT_DETACH). Needs CAP_SYS_ADMIN.

    Raises OSError.
    """
    libc.check(_umount2(os.fsencode(mount_point), _MNT_DETACH), "", os.fspath(mount_point))

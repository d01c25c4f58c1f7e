"""What two processes share with each other: open files, memory, tables of the kernel (kcmp(2)).

An open file is what open(2) makes: it has a position and locks, and it is one for all who have inherited, duplicated
or received its descriptor.
"""

from __future__ import annotations

import ctypes
import errno
import os
from typing import Literal

from gpucr.linux import libc

Part = Literal["memory", "file descriptors", "working folder and umask", "signal handlers"]
"""Parts of a process that clone(2) can make one with another process's."""

_NUMBERS = {"x86_64": 312, "aarch64": 272}  # arch/x86/entry/syscalls/syscall_64.tbl, uapi/asm-generic/unistd.h
_NUMBER = _NUMBERS.get(os.uname().machine)
_KCMP_FILE = 0  # include/uapi/linux/kcmp.h
_PARTS: dict[Part, int] = {"memory": 1, "file descriptors": 2, "working folder and umask": 3, "signal handlers": 4}
_LESS = 1

_syscall = libc.function("syscall", *(ctypes.c_long,) * 6, result=ctypes.c_long)


def file_order(pid: int, fd: int, other_pid: int, other_fd: int) -> int:
    """0: the same open file; otherwise -1 or 1, a sort order of open files.

    Needs ptrace access (read) to both. Raises OSError without it, if a process or descriptor does not exist, or if the
    kernel lacks the call.
    """
    return _order(pid, other_pid, _KCMP_FILE, fd, other_fd)


def shares(pid: int, other_pid: int, part: Part) -> bool:
    """Whether this part of the two processes is one. Raises OSError like `file_order`."""
    return _order(pid, other_pid, _PARTS[part], 0, 0) == 0


def _order(pid: int, other_pid: int, kind: int, one: int, other: int) -> int:
    if _NUMBER is None:
        raise OSError(errno.ENOSYS, "this processor's number of kcmp(2) is not known")
    result = libc.check(_syscall(_NUMBER, pid, other_pid, kind, one, other), "kcmp")
    return 0 if result == 0 else -1 if result == _LESS else 1

"""Whether descriptors of two processes are one open file: opened once, then inherited, duplicated or sent (kcmp(2))."""

from __future__ import annotations

import ctypes
import errno
import os

from gpucr.linux import libc

_KCMP = {"x86_64": 312, "aarch64": 272}  # arch/x86/entry/syscalls/syscall_64.tbl, include/uapi/asm-generic/unistd.h
_KCMP_FILE = 0  # include/uapi/linux/kcmp.h
_LESS = 1

_syscall = libc.function("syscall", *(ctypes.c_long,) * 6, result=ctypes.c_long)


def order(pid: int, fd: int, other_pid: int, other_fd: int) -> int:
    """0: the same open file; otherwise -1 or 1, a sort order of open files.

    Needs ptrace access (read) to both. Raises OSError without it, if a process or descriptor does not exist, or if the
    kernel lacks the call.
    """
    number = _KCMP.get(os.uname().machine)
    if number is None:
        raise OSError(errno.ENOSYS, "this processor's number of kcmp(2) is not known")
    result = int(libc.check(_syscall(number, pid, other_pid, _KCMP_FILE, fd, other_fd), "kcmp"))
    return 0 if result == 0 else -1 if result == _LESS else 1

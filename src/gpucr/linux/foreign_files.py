"""The open files of another process."""

from __future__ import annotations

import ctypes
import os

from gpucr.linux import libc

_PIDFD_GETFD = 438

_syscall = libc.function("syscall", ctypes.c_long, ctypes.c_int, ctypes.c_int, ctypes.c_uint, result=ctypes.c_long)


def copied(pid: int, number: int) -> int:
    """A copy here of the process's descriptor (pidfd_getfd(2), Linux 5.6). The caller closes it.

    Raises OSError: PermissionError if the caller may not trace the process.
    """
    process = os.pidfd_open(pid)
    try:
        return libc.check(_syscall(_PIDFD_GETFD, process, number, 0), f"descriptor {number} of process {pid}")
    finally:
        os.close(process)

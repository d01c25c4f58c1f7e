"""What a pidfd (pidfd_open(2)) is good for besides waiting and signals."""

from __future__ import annotations

import ctypes
import os

from gpucr.linux import libc

_PIDFD_GETFD = 438

_syscall = libc.function("syscall", ctypes.c_long, ctypes.c_int, ctypes.c_int, ctypes.c_uint, result=ctypes.c_long)


def copied_descriptor(pid: int, number: int) -> int:
    """A copy of the process's descriptor here (pidfd_getfd(2), Linux 5.6). Needs ptrace access. Raises OSError."""
    process = os.pidfd_open(pid)
    try:
        return libc.check(_syscall(_PIDFD_GETFD, process, number, 0), f"descriptor {number} of process {pid}")
    finally:
        os.close(process)

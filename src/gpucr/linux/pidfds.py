"""What a pidfd (pidfd_open(2)) is good for besides waiting and signals."""

from __future__ import annotations

import ctypes
import os
import socket

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


def copied_socket(pid: int, number: int) -> socket.socket:
    """A copy of the process's socket here, of the kind that it is. Raises OSError, also if it is not a socket."""
    fd = copied_descriptor(pid, number)
    try:
        return socket.socket(fileno=fd)
    except OSError:
        os.close(fd)
        raise

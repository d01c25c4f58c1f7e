"""Terminals of a job: whether CRIU can restore them with the capabilities that the helper gives it."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterable

from gpucr.linux import credentials
from gpucr.linux.terminal import has_terminal
from gpucr.privileged.rights import Refused

_GET_LOCKED, _SET_LOCKED = 0x5456, 0x5457  # TIOCGLCKTRMIOS, TIOCSLCKTRMIOS of include/uapi/asm-generic/ioctls.h
_TERMIOS_BYTES = 64  # more than a struct termios of the kernel


def require_restorable(pids: Iterable[int], wanted: int, *, joins: bool = False) -> None:
    """Raise Refused if one of these processes has a terminal open that CRIU could not restore with these capabilities.

    Or has any, where they are in the session of another process (``joins``): it may be that session's.

    Called before CRIU starts: CRIU takes a terminal's unread input, and does not put it back on failure.
    """
    if not any(map(has_terminal, pids)):
        return
    if joins:
        raise Refused("the job has a terminal, and is in a session whose leader is not part of it")
    if not can_lock(wanted):
        raise Refused("the job has terminals, which on this kernel take CAP_SYS_ADMIN (TIOCSLCKTRMIOS)")


def can_lock(wanted: int) -> bool:
    """Whether a process with these capabilities may lock a terminal's settings, as CRIU does. Tries it in a child."""
    child = os.fork()
    if child == 0:
        with contextlib.suppress(OSError):
            ends = os.openpty()
            credentials.reduce_to(wanted)
            locked = fcntl.ioctl(ends[1], _GET_LOCKED, bytes(_TERMIOS_BYTES))
            fcntl.ioctl(ends[1], _SET_LOCKED, locked)
            os._exit(0)
        os._exit(1)
    return os.waitpid(child, 0)[1] == 0

"""The controlling terminal of this process, and pseudoterminals that processes have made."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable, Iterator

from gpucr.linux import proc_text, processes
from gpucr.linux.processes import OpenFile

MASTER = "/ptmx"
"""What a master leads to ends so: /dev/ptmx, or /dev/pts/ptmx."""


@contextlib.contextmanager
def foreground_kept() -> Iterator[None]:
    """Restore the terminal's foreground process group after the body, which may change it.

    A process of another group that reads from the terminal is stopped (SIGTTIN) or gets EIO, see termios(3), "job
    control"; without this the former foreground group would notice at its next read. Does nothing without a controlling
    terminal.
    """
    try:
        terminal = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:  # ENXIO: no controlling terminal
        yield
        return
    try:
        foreground = os.tcgetpgrp(terminal)
        try:
            yield
        finally:
            _give(terminal, foreground)
    finally:
        os.close(terminal)


def _give(terminal: int, group: int) -> None:
    # Setting the foreground group from the background raises SIGTTOU, unless that is blocked.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
    try:
        with contextlib.suppress(OSError):  # the group has ended meanwhile, or the terminal was hung up
            if os.tcgetpgrp(terminal) != group:
                os.tcsetpgrp(terminal, group)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def has_terminal(pid: int) -> bool:
    """Whether the process has either side of a pseudoterminal open. Raises PermissionError."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(FileNotFoundError):
                if os.readlink(f"/proc/{pid}/fd/{name}").startswith(("/dev/pts/", "/dev/ptmx")):
                    return True
    return False


def makes_terminals(pid: int) -> bool:
    """Whether the process has the master side of a pseudoterminal open. False if the caller may not look."""
    return bool(made_by(pid))


def made_by(pid: int) -> frozenset[int]:
    """The numbers in /dev/pts of the pseudoterminals whose master side the process has open.

    Empty if it has ended, or the caller may not look.
    """
    with contextlib.suppress(OSError):
        return made_in(processes.open_files(pid))
    return frozenset()


def made_in(files: Iterable[OpenFile]) -> frozenset[int]:
    """The same, of these descriptors."""
    found: set[int] = set()
    for file in files:
        if file.target.endswith(MASTER):
            with contextlib.suppress(OSError):  # closed meanwhile
                found.add(_index(f"/proc/{file.pid}/fdinfo/{file.fd}"))
    return frozenset(found)


def _index(fdinfo: str) -> int:
    """-1 on a kernel that does not tell (before 4.14)."""
    fields = (line.partition(":") for line in proc_text.lines(fdinfo))
    return next((int(value) for name, _, value in fields if name == "tty-index"), -1)

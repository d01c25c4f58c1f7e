"""The controlling terminal of this process."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def foreground_kept() -> Iterator[None]:
    """Leave the terminal's foreground to the process group that had it, whatever the body does to it.

    A process of another group that reads from the terminal is stopped (SIGTTIN) or gets EIO, see termios(3), "job
    control"; whoever gave the terminal away for the body would find that out at its next read. Without a controlling
    terminal nothing happens.
    """
    try:
        terminal = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:  # ENXIO: there is none
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
    # Who sets the foreground from the background is sent SIGTTOU, unless it has that blocked.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
    try:
        with contextlib.suppress(OSError):  # the group has ended meanwhile, or the terminal was hung up
            if os.tcgetpgrp(terminal) != group:
                os.tcsetpgrp(terminal, group)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

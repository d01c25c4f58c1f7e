"""The process of a borrower's guard. Recovery code is imported only when needed: waiting needs 10 MiB."""

from __future__ import annotations

import os
import select
import time
from types import ModuleType

from gpucr.linux import oom

DISMISSED, TRY_AGAIN = b".", b"!"
"""What the borrower writes when it has done everything itself, and when it could not."""


def main(borrower_pid: str, dismissal_fd: str) -> None:
    """Wait until this guard is dismissed, or the borrower has ended: then do the rest of its work."""
    dismissal = int(dismissal_fd)
    borrower = os.pidfd_open(int(borrower_pid))  # before it continues: its pid is its own
    if not oom.lift_memory_limits():
        _recovery()  # too much for these limits: then the borrower takes nothing
    if os.fork():
        os._exit(0)
    select.select([borrower, dismissal], [], [])
    word = os.read(dismissal, 1) if select.select([dismissal], [], [], 0)[0] else b""
    if word == DISMISSED:
        os._exit(0)
    if word != TRY_AGAIN:  # its descriptors are closed before it has ended
        select.select([borrower], [], [])
    os._exit(_recover())


def _recover() -> int:
    recovery = _recovery()
    try:
        recovery.recover(_say)
    except recovery.GpucrError as e:
        _say(f"error: {e}")
        code: int = e.exit_code
        return code
    return 0


def _recovery() -> ModuleType:
    from gpucr.borrow import recovery

    return recovery


def _say(line: str) -> None:
    os.write(2, f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {line}\n".encode())

"""The process of a borrower's guard. Recovery code is imported only when needed: waiting needs 10 MiB."""

from __future__ import annotations

import os
import select

from gpucr.linux import oom

DISMISSED, TRY_AGAIN = b".", b"!"
"""What the borrower writes when it has done everything itself, and when it could not."""


def main(borrower_pid: str, dismissal_fd: str) -> None:
    """Wait until this guard is dismissed, or the borrower has ended: then do the rest of its work."""
    dismissal = int(dismissal_fd)
    borrower = os.pidfd_open(int(borrower_pid))  # before it continues: its pid is its own
    if not oom.lift_memory_limits():
        import gpucr.borrow.recovery  # too much for these limits: then the borrower takes nothing  # noqa: F401
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
    from gpucr.borrow.recovery import recover
    from gpucr.errors import GpucrError

    try:
        recover(_say)
    except GpucrError as e:
        _say(f"error: {e}")
        return e.exit_code
    return 0


def _say(line: str) -> None:
    import time

    os.write(2, f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {line}\n".encode())

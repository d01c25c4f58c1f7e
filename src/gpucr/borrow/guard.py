"""A borrower's guard: a process of its own that brings the jobs back when the borrower was killed."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import time
from collections.abc import Iterator
from typing import NoReturn

from gpucr.borrow import ledger
from gpucr.borrow.recovery import recover
from gpucr.errors import BrokenInstall, GpucrError
from gpucr.linux import own_python

_DISMISSED, _TRY_AGAIN = b".", b"!"


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Should this process end in the block, a guard does what is left to do. It is in a session of its own.

    Raises BrokenInstall, Unsupported.
    """
    theirs, ours = os.pipe()
    word = _TRY_AGAIN
    try:
        _start(theirs)
        yield
        word = _DISMISSED
    finally:
        os.write(ours, word)
        os.close(theirs)
        os.close(ours)


def _start(dismissal: int) -> None:
    log = ledger.guard_log()
    try:
        with subprocess.Popen(
            own_python.command("gpucr.borrow.guard", os.getpid(), dismissal),
            env=own_python.environment(),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[dismissal],
            start_new_session=True,
        ) as started:
            code = started.wait()
    finally:
        os.close(log)
    if code != 0:
        raise BrokenInstall(
            "the process that would bring the jobs back cannot be started", hint="see `guards.log` in gpucr's folder"
        )


def main(borrower_pid: str, dismissal_fd: str) -> NoReturn:
    """Wait until this guard is dismissed, or the borrower has ended: then do what that one has left to do."""
    dismissal = int(dismissal_fd)
    borrower = os.pidfd_open(int(borrower_pid))  # before it goes on: its pid is its own
    if os.fork():
        os._exit(0)
    select.select([borrower, dismissal], [], [])
    word = os.read(dismissal, 1) if select.select([dismissal], [], [], 0)[0] else b""
    if word == _DISMISSED:
        os._exit(0)
    if word != _TRY_AGAIN:  # its descriptors are closed before it has ended
        select.select([borrower], [], [])
    code = 0
    try:
        recover(_say)
    except GpucrError as e:
        _say(f"error: {e}")
        code = e.exit_code
    os._exit(code)


def _say(line: str) -> None:
    os.write(2, f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {line}\n".encode())

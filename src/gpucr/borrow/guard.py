"""A borrower's guard: a separate process that brings the jobs back if the borrower is killed."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator

from gpucr.borrow import guard_process, ledger
from gpucr.borrow.guard_process import DISMISSED, TRY_AGAIN
from gpucr.errors import BrokenInstall
from gpucr.linux import own_python


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """If this process ends in the block, a guard, in its own session, does the rest.

    Raises BrokenInstall, Unsupported.
    """
    theirs, ours = os.pipe()
    word = TRY_AGAIN
    try:
        _start(theirs)
        yield
        word = DISMISSED
    finally:
        os.write(ours, word)
        os.close(theirs)
        os.close(ours)


def _start(dismissal: int) -> None:
    log = ledger.guard_log()
    try:
        with subprocess.Popen(
            own_python.command(guard_process.__name__, os.getpid(), dismissal),
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

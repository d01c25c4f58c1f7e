"""A running CRIU whose gpucr has died.

It undoes when it finds its socket closed at its next hook. That can take minutes, during which the job is stopped and
nobody else can trace its threads. So it is told to end, by the same means as in engine.py.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import time
from collections.abc import Collection

from gpucr.criu.remains import kill_orphans
from gpucr.linux import processes
from gpucr.model import ProcessId

UNDO_LIMIT_S = 60.0
"""How long CRIU may take to undo before it is killed."""

_RETELL_S = 0.05


def wait(criu: ProcessId, timeout_s: float = UNDO_LIMIT_S) -> bool:
    """Wait until it has ended (zombies count). False if it still runs when the time is up."""
    try:
        fd = os.pidfd_open(criu.pid)
    except ProcessLookupError:
        return True
    try:
        if not processes.is_alive(criu):  # asked after the pidfd was opened: now the two name the same process
            return True
        poller = select.poll()
        poller.register(fd, select.POLLIN)
        return bool(poller.poll(timeout_s * 1000))
    finally:
        os.close(fd)


def end_dump(criu: ProcessId) -> None:
    """Make a dump fail: its writes fail from now on (CriuService.refuse_writes), so CRIU releases the tree and ends."""
    if processes.is_alive(criu):
        with contextlib.suppress(ProcessLookupError, PermissionError):  # the privileged helper has noticed the hang-up
            _, hard = resource.prlimit(criu.pid, resource.RLIMIT_FSIZE)
            resource.prlimit(criu.pid, resource.RLIMIT_FSIZE, (0, hard))
    if not wait(criu):
        with contextlib.suppress(PermissionError):
            processes.kill_and_wait([criu])


def is_told_to_end(criu: ProcessId) -> bool:
    """Whether `end_dump` has been called for it, or it has ended: also while it waits for a hook."""
    if not processes.is_alive(criu):
        return True
    with contextlib.suppress(ProcessLookupError, PermissionError):
        return resource.prlimit(criu.pid, resource.RLIMIT_FSIZE)[0] == 0
    return False


def end_restore(criu: ProcessId, pids: Collection[int]) -> None:
    """Make a restore fail: kill all tasks of the tree with these pids, and CRIU ends.

    CRIU's restore fails when a task dies.
    """
    end = time.monotonic() + UNDO_LIMIT_S
    while not wait(criu, _RETELL_S) and time.monotonic() < end:
        with contextlib.suppress(PermissionError):
            processes.kill_tree(criu.pid, including_root=False, timeout_s=0)
    with contextlib.suppress(PermissionError):
        processes.kill_and_wait([criu])
    kill_orphans(pids, since_ticks=criu.start_time_ticks)

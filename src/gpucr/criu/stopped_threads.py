"""CRIU may be killed while it runs code of its own in a job's stopped threads: they are put back where they were."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from gpucr.criu.recovery import NOTES, PutBackThreads
from gpucr.linux import processes
from gpucr.undo.protection import Protection

if TYPE_CHECKING:
    from gpucr.linux.noted_threads import NotedProcess

_CAN_NOTE = os.uname().machine == "x86_64"


@contextlib.contextmanager
def threads_noted(root_pids: Sequence[int], protection: Protection) -> Iterator[None]:
    """CRIU works on these trees in the block. If that fails, threads of stopped processes are as before it.

    If gpucr is killed meanwhile, the guard or the next gpucr does it. What runs when CRIU comes has no such help: CRIU
    undoes, but if it is killed, a process may die of its breakpoint.
    """
    noted = _note(root_pids) if _CAN_NOTE else ()
    if not noted:
        yield
        return
    action = PutBackThreads(tuple(each.id for each in noted))
    protection.protect(action)
    try:
        for each in noted:
            NOTES.replace(each.id, each)
        yield
    except BaseException:
        action.recover(())
        raise
    finally:
        for each in noted:
            NOTES.remove(each.id)
        protection.withdraw(PutBackThreads)


def _note(root_pids: Sequence[int]) -> tuple[NotedProcess, ...]:
    """Without what cannot be looked at: a killed CRIU can take that along."""
    stopped = [each.pid for tree in processes.trees(root_pids) for each in tree if each.status == "T"]
    if not stopped:
        return ()
    from gpucr.linux.noted_threads import note_stopped  # late: most jobs without CUDA are not stopped

    noted: list[NotedProcess] = []
    for pid in stopped:
        with contextlib.suppress(OSError):
            if (found := note_stopped(pid)) is not None:
                noted.append(found)
    return tuple(noted)

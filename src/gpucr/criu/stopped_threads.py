"""CRIU may be killed while it runs code of its own in a job's stopped threads: they are put back where they were."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence

from gpucr.criu.recovery import PutBackThreads
from gpucr.linux import processes
from gpucr.linux.noted_threads import NotedProcess, encode, note_stopped, put_back
from gpucr.undo.protection import Protection

_CAN_NOTE = os.uname().machine == "x86_64"


@contextlib.contextmanager
def threads_noted(root_pids: Sequence[int], protection: Protection) -> Iterator[None]:
    """CRIU works on these trees in the block. If that fails, threads of stopped processes are as before it.

    If gpucr is killed meanwhile, the guard does it. What runs when CRIU comes has no such help: CRIU undoes, but if it
    is killed, a process may die of its breakpoint.
    """
    noted = _note(root_pids) if _CAN_NOTE else ()
    if not noted:
        yield
        return
    with open(os.memfd_create("gpucr-noted", os.MFD_CLOEXEC), "wb", buffering=0) as notes:
        notes.write(encode(noted))
        protection.protect(PutBackThreads(), [notes.fileno()])
        try:
            yield
        except BaseException:
            for each in noted:
                with contextlib.suppress(OSError):  # it has ended; or the others get theirs
                    put_back(each)
            raise
        finally:
            protection.withdraw(PutBackThreads)


def _note(root_pids: Sequence[int]) -> tuple[NotedProcess, ...]:
    """Without what cannot be looked at: a killed CRIU can take that along."""
    noted: list[NotedProcess] = []
    for process in (each for tree in processes.trees(root_pids) for each in tree):
        if process.status == "T":
            with contextlib.suppress(OSError):
                if (found := note_stopped(process.pid)) is not None:
                    noted.append(found)
    return tuple(noted)

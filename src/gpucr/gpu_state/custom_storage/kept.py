"""The bytes of a suspended process's device memory, in a file that the process itself has mapped.

So they live exactly as long as the process, without gpucr.
"""

from __future__ import annotations

import contextlib
from mmap import MAP_SHARED, PROT_READ, PROT_WRITE

from gpucr.gang.threads import explained
from gpucr.gpu_state.staging.attach import keep_from_children, sent, traced
from gpucr.gpu_state.staging.extents import open_file
from gpucr.linux.injection import MMAP, MUNMAP, run_syscall
from gpucr.linux.memory import read_maps
from gpucr.linux.tmpfs import KEPT_NAME, StagingFile
from gpucr.model import StagedExtent


def keep(thread_id: int, fd: int, size_bytes: int) -> None:
    """Map a whole memory file into a process, using this thread of it. Raises JobChanged, NotPermitted."""
    with explained(thread_id), traced(thread_id) as thread, sent(thread, fd) as number:
        address = run_syscall(thread, MMAP, 0, size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, number, 0)
        keep_from_children(thread, address, size_bytes)


def find(pid: int) -> StagedExtent | None:
    """Its address in a process; None: it keeps nothing."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for mapping in read_maps(pid):
            if mapping.path.startswith(f"/{KEPT_NAME}") and mapping.permissions.startswith("rw-s"):
                return StagedExtent(mapping.start, mapping.end - mapping.start, mapping.offset)
    return None


def open_kept(pid: int) -> StagingFile | None:
    """The file; None: it keeps nothing. Raises OSError."""
    extent = find(pid)
    return StagingFile.adopt(open_file(pid, extent)) if extent is not None else None


def let_go(pid: int, thread_id: int) -> None:
    """Unmap it: the process has its memory again. Raises JobChanged, NotPermitted."""
    extent = find(pid)
    if extent is not None:
        with explained(pid), traced(thread_id) as thread:
            run_syscall(thread, MUNMAP, extent.address, extent.size_bytes)

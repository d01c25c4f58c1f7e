"""Take a staging file out of a process, and put it back. The data stays in the file; nothing is copied.

In between the process has an empty reservation in its place (``PROT_NONE``, as the driver itself leaves for its device
mappings), which is all that CRIU dumps and restores. Both work on a running or blocked thread that nobody else traces;
each injected call happens completely or not at all, even if gpucr dies.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from mmap import MADV_DONTFORK, MAP_ANONYMOUS, MAP_PRIVATE, MAP_SHARED, PROT_READ, PROT_WRITE

from gpucr.linux.descriptors import close_descriptor, send_descriptor, sockets_left_behind
from gpucr.linux.injection import MADVISE, MAP_FIXED, MAP_NORESERVE, MMAP, PROT_NONE, run_syscall
from gpucr.linux.processes import open_files
from gpucr.linux.ptrace import TracedThread
from gpucr.linux.tmpfs import FILE_NAME
from gpucr.model import StagedExtent


def detach(restore_thread: int, extents: Sequence[StagedExtent]) -> None:
    """Mapped → an empty reservation. The caller holds the file, which is then the only copy.

    Raises OSError (PermissionError if tracing is refused, ProcessLookupError if the process has ended) or
    InjectionUnavailable.
    """
    with traced(restore_thread) as thread:
        for extent in extents:
            reserve(thread, extent)


def attach(restore_thread: int, fd: int, extents: Sequence[StagedExtent]) -> None:
    """A reservation → mapped, from the caller's descriptor of the file. Raises as `detach` does."""
    with traced(restore_thread) as thread, sent(thread, fd) as number:
        for extent in extents:
            map_part(thread, number, extent)


def close_left_behind(restore_thread: int) -> None:
    """Close what a killed gpucr has left open in the process. Raises as `detach` does.

    A staging file keeps its memory while it is open or in transit in a socket, and CRIU cannot dump a process that has
    it open. No capture may be running.
    """
    if left_behind(restore_thread):
        with traced(restore_thread) as thread:
            close_left(thread)


def close_left(thread: TracedThread) -> None:
    """`close_left_behind` in a stopped thread."""
    for number in left_behind(thread.tid):
        close_descriptor(thread, number)


def left_behind(tid: int) -> Sequence[int]:
    """The descriptors of staging files, and of the sockets that carry them, in the thread's process.

    Raises PermissionError.
    """
    files = [file.fd for file in open_files(tid) if file.target == f"/{FILE_NAME} (deleted)"]
    return [*files, *sockets_left_behind(tid)]


def reserve(thread: TracedThread, extent: StagedExtent) -> None:
    """Replace the extent by an empty reservation, in a stopped thread."""
    flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED
    run_syscall(thread, MMAP, extent.address, extent.size_bytes, PROT_NONE, flags, -1, 0)


def map_part(thread: TracedThread, number: int, extent: StagedExtent) -> None:
    """Map the file, descriptor ``number`` in the process, over the extent, in a stopped thread."""
    protection, flags = PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED
    run_syscall(thread, MMAP, extent.address, extent.size_bytes, protection, flags, number, extent.offset)
    keep_from_children(thread, extent.address, extent.size_bytes)


def keep_from_children(thread: TracedThread, address: int, size_bytes: int) -> None:
    """Exclude staging from fork (MADV_DONTFORK), in a stopped thread.

    The CPU threads of a suspended process keep running, and may fork (PyTorch's DataLoader). A child with the staging
    would keep its memory after the resume, and CRIU could no longer dump the two. The child has no use for it: it
    cannot use its parent's CUDA state.
    """
    with contextlib.suppress(OSError):  # then a fork behaves as without gpucr
        run_syscall(thread, MADVISE, address, size_bytes, MADV_DONTFORK)


@contextlib.contextmanager
def traced(tid: int) -> Iterator[TracedThread]:
    """A thread that is stopped during the block and continues afterwards."""
    thread = TracedThread.seize(tid)
    try:
        yield thread
    finally:
        with contextlib.suppress(ProcessLookupError):
            thread.detach()


@contextlib.contextmanager
def sent(thread: TracedThread, fd: int) -> Iterator[int]:
    """The number of our descriptor in the process during the block."""
    number = send_descriptor(thread, fd)
    try:
        yield number
    finally:
        with contextlib.suppress(ProcessLookupError):
            close_descriptor(thread, number)

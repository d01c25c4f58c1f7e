"""Who works on a process: one gpucr at a time, whatever /proc mount, mount, pid or user namespace each of them is in.

Two at once would each take the other's half-way states for those in which it found the job. A claim is a lock on an
object that the kernel has once a process, or once a pid namespace, and not once a mount. It lasts until the last copy
of its descriptor is closed: it ends with its holder, or with the guard that was given a copy.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import struct
from collections.abc import Iterable, Iterator

from gpucr.errors import ProcessNotFound, Unsupported
from gpucr.linux import locks, processes
from gpucr.linux.processes import PROC
from gpucr.model import ProcessInfo

_FLOCK = struct.Struct("@hhqqi4x")
"""struct flock of fcntl(2): type, whence, start, length, pid. (64-bit machines)"""


@contextlib.contextmanager
def claimed(pids: Iterable[int]) -> Iterator[tuple[int, ...]]:
    """Keep every other gpucr off these processes during the block, which gets the descriptors of the claims.

    Whoever is given a copy of a descriptor holds that claim as well. Processes that have ended are passed over. Raises
    Unsupported where a process is claimed already, and names the holder where it can be seen.
    """
    claim = _claim_process if pidfds_are_processes() else _claim_number_of
    with contextlib.ExitStack() as opened:
        fds = []
        for pid in sorted(set(pids)):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                fds.append(claim(pid))
                opened.callback(os.close, fds[-1])
        yield tuple(fds)


@contextlib.contextmanager
def claimed_pids(pids: Iterable[int]) -> Iterator[None]:
    """No other gpucr restores processes with these pids, of this pid namespace, during the block.

    Both would find the pids free, and the one that loses takes back what it has put into /dev/shm, under the other's
    job. Raises Unsupported where a pid is claimed.
    """
    fd = os.open(PROC / "self" / "ns" / "pid", os.O_RDONLY)
    try:
        for pid in sorted(set(pids)):
            if not _lock_number(fd, pid):
                raise Unsupported(
                    f"another gpucr is restoring a job with process {pid}",
                    hint="wait until it has finished; `gpucr restore --clone` makes a copy beside it",
                    code="GPUCR-BUSY",
                )
        yield
    finally:
        os.close(fd)


@functools.cache
def pidfds_are_processes() -> bool:
    """Whether the pidfds of a process have an inode of their own (pidfs, Linux 6.9), not that of all eventfds."""
    pidfd, eventfd = os.pidfd_open(os.getpid()), os.eventfd(0)
    try:
        return not os.path.sameopenfile(pidfd, eventfd)
    finally:
        os.close(pidfd)
        os.close(eventfd)


def _claim_process(pid: int) -> int:
    """flock(2) on a pidfd. Who comes second is told so by the kernel."""
    fd = os.pidfd_open(pid)
    try:
        locks.lock(fd)
    except BlockingIOError:
        raise _busy(pid, _close_and_name(fd)) from None
    except BaseException:
        os.close(fd)
        raise
    return fd


def _claim_number_of(pid: int) -> int:
    """The fallback of older kernels: a lock of one byte, at the process's own number, on its pid namespace."""
    fd = os.open(PROC / str(pid) / "ns" / "pid", os.O_RDONLY)
    try:
        number = processes.innermost_thread_id(pid, pid)
        if not _lock_number(fd, number):
            raise _busy(pid, _close_and_name(os.dup(fd), number))
    except BaseException:
        os.close(fd)
        raise
    return fd


def _lock_number(fd: int, number: int) -> bool:
    """Lock one byte of a file that nobody can open for writing, so that a write lock (F_OFD_SETLK) is out of reach.

    Everyone sets a read lock first and looks for those of others then. So two never go on; two that come in the same
    moment may both be refused.
    """
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, number, 1, 0))
    others = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, number, 1, 0))
    if _FLOCK.unpack(others)[0] == fcntl.F_UNLCK:
        return True
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, number, 1, 0))
    return False


def _busy(pid: int, holder: ProcessInfo | None) -> Unsupported:
    who = f": process {holder.pid} ({holder.name}) of uid {holder.uid}" if holder is not None else ""
    return Unsupported(
        f"another gpucr is at work on process {pid}{who}",
        hint="wait until it has finished, then try again",
        code="GPUCR-BUSY",
    )


def _close_and_name(fd: int, number: int | None = None) -> ProcessInfo | None:
    """Who holds a lock on this file, or on this byte of it, as far as the caller may look (proc_pid_fdinfo(5)).

    The kernel's own note of who took it is of no use: that process may have ended, and left its guard with a copy.
    """
    found = os.fstat(fd)
    os.close(fd)
    file = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    span = f"{file} {number} {number}" if number is not None else file
    for pid in sorted(processes.all_pids()):
        with contextlib.suppress(OSError, ProcessNotFound):
            if _has_lock(pid, span):
                return processes.describe(pid)
    return None


def _has_lock(pid: int, span: str) -> bool:
    for fd in os.listdir(PROC / str(pid) / "fdinfo"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            lines = (PROC / str(pid) / "fdinfo" / fd).read_text().splitlines()
            if any(line.startswith("lock:") and f"{span} " in f"{line} " for line in lines):
                return True
    return False

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
from collections.abc import Iterable, Iterator, Set

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
    with contextlib.ExitStack() as opened:
        fds = []
        for pid in sorted(set(pids)):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                fds.append(_claim(pid))
                opened.callback(os.close, fds[-1])
        yield tuple(fds)


def at_work_on(pids: Iterable[int]) -> dict[int, ProcessInfo]:
    """Those of these processes that a gpucr works on now, and which, as far as the caller may look.

    Takes nothing: nobody is refused for it.
    """
    objects = {}
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            fd, number = _object_of(pid)
            objects[pid] = _span(fd, number)
            os.close(fd)
    holders = _holders(set(objects.values()))
    return {pid: holders[span] for pid, span in objects.items() if span in holders}


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


def _object_of(pid: int) -> tuple[int, int | None]:
    """What is locked for a process: a descriptor, and the byte; None: all of it (flock(2) on a pidfd).

    Older kernels have all pidfds in one inode; there it is a byte, at the process's own number, of its pid namespace.
    """
    if pidfds_are_processes():
        return os.pidfd_open(pid), None
    fd = os.open(PROC / str(pid) / "ns" / "pid", os.O_RDONLY)
    try:
        return fd, processes.innermost_thread_id(pid, pid)
    except BaseException:
        os.close(fd)
        raise


def _claim(pid: int) -> int:
    """Who comes second is told so by the kernel, or by `_lock_number`."""
    fd, number = _object_of(pid)
    try:
        if not (_lock_whole(fd) if number is None else _lock_number(fd, number)):
            span = _span(fd, number)
            raise _busy(pid, _holders({span}).get(span))
    except BaseException:
        os.close(fd)
        raise
    return fd


def _lock_whole(fd: int) -> bool:
    try:
        locks.lock(fd)
    except BlockingIOError:
        return False
    return True


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


def _span(fd: int, number: int | None) -> str:
    """A lock of all of this file, or of this byte, as the kernel writes it."""
    found = os.fstat(fd)
    where = "0 EOF" if number is None else f"{number} {number}"
    return f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino} {where}"


def _holders(spans: Set[str]) -> dict[str, ProcessInfo]:
    """Who holds these locks (proc_pid_fdinfo(5)).

    The kernel's own note of who took it comes last: that process may have ended, and left its guard with a copy. But
    it is there for everyone to see, and says of processes of other users as well that there is a lock (proc_locks(5)).
    """
    found: dict[str, ProcessInfo] = {}
    for pid in sorted(processes.all_pids()) if spans else ():
        with contextlib.suppress(OSError, ProcessNotFound):
            for span in _locks_of(pid) & spans - found.keys():
                found[span] = processes.describe(pid)
    for line in (PROC / "locks").read_text().splitlines() if len(found) < len(spans) else ():
        taker, span = _taker_and_span(line)
        if span in spans and span not in found and taker > 0:
            with contextlib.suppress(OSError, ProcessNotFound):
                found[span] = processes.describe(taker)
    return found


def _locks_of(pid: int) -> set[str]:
    found = set()
    for fd in os.listdir(PROC / str(pid) / "fdinfo"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            lines = (PROC / str(pid) / "fdinfo" / fd).read_text().splitlines()
            found |= {_taker_and_span(line)[1] for line in lines if line.startswith("lock:")}
    return found


def _taker_and_span(line: str) -> tuple[int, str]:
    """Of ``1: FLOCK  ADVISORY  WRITE 27713 00:05:260072 0 EOF``; a lock of several bytes is none of ours."""
    taker, *span = line.split()[-4:]
    return int(taker), " ".join(span)

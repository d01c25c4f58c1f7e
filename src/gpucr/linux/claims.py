"""Claims: one gpucr at a time works on a process, across /proc mounts and mount, pid and user namespaces.

Two at once would each mistake the other's intermediate states for the state in which it found the job. A claim is a
lock on a kernel object that exists once per process, or once per pid namespace, but not once per mount. It lasts until
the last copy of its descriptor is closed: it ends with its holder, or with the guard that got a copy.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import struct
from collections.abc import Iterable, Iterator, Set

from gpucr.errors import Busy, ProcessNotFound
from gpucr.linux import locks, proc_text, processes
from gpucr.linux.processes import PROC
from gpucr.model import ProcessInfo

_FLOCK = struct.Struct("@hhqqi4x")
"""struct flock of fcntl(2): type, whence, start, length, pid. (64-bit machines)"""
_RESTORED = 1 << 22
"""Where the bytes of pids that are being restored begin: above all pids (PID_MAX_LIMIT), which are claims on older
kernels. A restore holds both, of a process that it has restored; with one byte for both it refused itself on 6.1."""


@contextlib.contextmanager
def claimed(pids: Iterable[int]) -> Iterator[tuple[int, ...]]:
    """Keep every other gpucr off these processes during the block. Yields the descriptors of the claims.

    A process with a copy of a descriptor holds that claim too. Processes that have ended are skipped. Raises
    Unsupported if a process is claimed already, and names the holder if it is visible.
    """
    with contextlib.ExitStack() as opened:
        fds = []
        for pid in sorted(set(pids)):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                fds.append(_claim(pid))
                opened.callback(os.close, fds[-1])
        yield tuple(fds)


def at_work_on(pids: Iterable[int]) -> dict[int, ProcessInfo]:
    """Return those of these processes that are claimed now, if the caller may see it.

    It claims nothing, so nobody is refused for it.
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
    """Keep every other gpucr from restoring processes with these pids, in this pid namespace, during the block.

    Otherwise both would find the pids free, and the undo of the one that loses would remove files in /dev/shm that the
    other's job uses. Raises Unsupported if a pid is claimed.
    """
    fd = os.open(PROC / "self" / "ns" / "pid", os.O_RDONLY)
    try:
        for pid in sorted(set(pids)):
            if not _lock_number(fd, _RESTORED + pid):
                raise Busy(
                    f"another gpucr is restoring a job with process {pid}",
                    hint="wait until it has finished; `gpucr restore --clone` makes a copy beside it",
                )
        yield
    finally:
        os.close(fd)


@functools.cache
def pidfds_are_processes() -> bool:
    """Whether each process's pidfds have their own inode (pidfs, Linux 6.9) instead of the shared anonymous inode."""
    pidfd, eventfd = os.pidfd_open(os.getpid()), os.eventfd(0)
    try:
        return not os.path.sameopenfile(pidfd, eventfd)
    finally:
        os.close(pidfd)
        os.close(eventfd)


def _object_of(pid: int) -> tuple[int, int | None]:
    """What is locked for a process: a descriptor, and the byte; None: all of it (flock(2) on a pidfd).

    On older kernels all pidfds share one inode. There it is one byte of the pid namespace's file, at the process's pid.
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
    """The second caller is refused by the kernel, or by `_lock_number`."""
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
    """Lock one byte of a file that nobody can open for writing, which rules out write locks (F_OFD_SETLK).

    Everyone sets a read lock first, then looks for those of others. So two never both succeed; two that come at the
    same moment may both be refused.
    """
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, number, 1, 0))
    others = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, number, 1, 0))
    if _FLOCK.unpack(others)[0] == fcntl.F_UNLCK:
        return True
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, number, 1, 0))
    return False


def _busy(pid: int, holder: ProcessInfo | None) -> Busy:
    holder_text = f": process {holder.pid} ({holder.name}) of uid {holder.uid}" if holder is not None else ""
    return Busy(
        f"another gpucr is at work on process {pid}{holder_text}",
        hint="wait until it has finished, then try again",
    )


def _span(fd: int, number: int | None) -> str:
    """A pattern for a lock on this whole file, or on this byte, as the kernel prints it."""
    found = os.fstat(fd)
    where = "0 EOF" if number is None else f"{number} {number}"
    return f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino} {where}"


def _holders(spans: Set[str]) -> dict[str, ProcessInfo]:
    """Who holds these locks (proc_pid_fdinfo(5)).

    The process that the kernel notes as the owner comes last: it may have ended and left a copy to its guard. But
    everyone can see that note, also for locks of other users' processes (proc_locks(5)).
    """
    found: dict[str, ProcessInfo] = {}
    for pid in sorted(processes.all_pids()) if spans else ():
        with contextlib.suppress(OSError, ProcessNotFound):
            for span in _locks_of(pid) & spans - found.keys():
                found[span] = processes.describe(pid)
    for line in proc_text.lines(PROC / "locks") if len(found) < len(spans) else ():
        taker, span = _taker_and_span(line)
        if span in spans and span not in found and taker > 0:
            with contextlib.suppress(OSError, ProcessNotFound):
                found[span] = processes.describe(taker)
    return found


def _locks_of(pid: int) -> set[str]:
    found = set()
    for fd in os.listdir(PROC / str(pid) / "fdinfo"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            lines = proc_text.lines(PROC / str(pid) / "fdinfo" / fd)
            found |= {_taker_and_span(line)[1] for line in lines if line.startswith("lock:")}
    return found


def _taker_and_span(line: str) -> tuple[int, str]:
    """Parse ``1: FLOCK  ADVISORY  WRITE 27713 00:05:260072 0 EOF``. A lock of several bytes is not ours."""
    taker, *span = line.split()[-4:]
    return int(taker), " ".join(span)

"""Locks on files, as /proc shows them, and whether they could be taken (fcntl(2), flock(2))."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import struct
from collections.abc import Iterable, Iterator

from gpucr.linux import files_in_use, locks, proc_text
from gpucr.linux.one_look import OneLook
from gpucr.linux.processes import PROC
from gpucr.model import FileLock

_LINE = re.compile(
    r"\d+: (?P<kind>FLOCK|POSIX|OFDLCK) +\w+ +(?P<mode>READ|WRITE) +(?P<pid>-?\d+) "
    r"[0-9a-f]+:[0-9a-f]+:(?P<inode>\d+) (?P<start>\d+) (?P<end>\d+|EOF)"
)
_QUERY = struct.Struct("hhqqi4x")  # struct flock: type, whence, start, length, pid
_F_OFD_GETLK = 36  # include/uapi/linux/fcntl.h
_OPEN = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


def locks_of(pids: Iterable[int], look: OneLook) -> Iterator[FileLock]:
    """The locks that these processes hold, by the paths of the files; some perhaps twice."""
    locked = {match["inode"] for match in _matches(PROC / "locks")}
    for pid in pids if locked else ():
        with contextlib.suppress(OSError):  # the caller may not look
            for file in look.files(pid):
                status = look.opened(file)
                if status is not None and str(status.st_ino) in locked:
                    for match in _matches(f"{PROC}/{pid}/fdinfo/{file.fd}"):
                        yield _lock(file.target, match)


def _matches(path: str | os.PathLike[str]) -> Iterator[re.Match[str]]:
    """The lines about locks in /proc/locks, or in a descriptor's fdinfo. None of leases, and of those who wait."""
    try:
        lines = proc_text.lines(path)
    except OSError:
        return
    for line in lines:
        match = _LINE.fullmatch(line.removeprefix("lock:").strip())
        if match is not None:
            yield match


def _lock(path: str, match: re.Match[str]) -> FileLock:
    end = None if match["end"] == "EOF" else int(match["end"])
    return FileLock(path, match["kind"], match["mode"] == "WRITE", int(match["start"]), end)


def holder_of(lock: FileLock) -> int | None:
    """A process that holds what conflicts with this lock: 0 if it is not known which; None if nobody does.

    None also if the file cannot be opened. Takes a lock of the whole file (flock) for a moment.
    """
    try:
        fd = os.open(lock.path, _OPEN)
    except OSError:
        return None
    try:
        return _by_flock(fd, lock) if lock.kind == "FLOCK" else _by_query(fd, lock)
    except OSError as e:
        if e.errno in (errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL):  # a file system without locks
            return None
        raise
    finally:
        os.close(fd)


def _by_flock(fd: int, lock: FileLock) -> int | None:
    try:
        locks.lock(fd, is_shared=not lock.is_write)
    except BlockingIOError:
        inode = str(os.fstat(fd).st_ino)
        same = (each for each in _matches(PROC / "locks") if (each["kind"], each["inode"]) == ("FLOCK", inode))
        return next((int(each["pid"]) for each in same), 0) or _user_of(fd)
    return None


def _by_query(fd: int, lock: FileLock) -> int | None:
    kind = fcntl.F_WRLCK if lock.is_write else fcntl.F_RDLCK
    length = 0 if lock.end is None else lock.end - lock.start + 1
    answer = fcntl.fcntl(fd, _F_OFD_GETLK, _QUERY.pack(kind, os.SEEK_SET, lock.start, length, 0))
    found, _, _, _, pid = _QUERY.unpack(answer)
    if found == fcntl.F_UNLCK:
        return None
    return pid if pid > 0 else _user_of(fd)


def _user_of(fd: int) -> int:
    status = os.fstat(fd)
    return files_in_use.holders([(status.st_dev, status.st_ino)]).get((status.st_dev, status.st_ino), 0)

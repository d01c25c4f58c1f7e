"""Who else has a file open, or memory mapped: found in one look at all processes of a machine."""

from __future__ import annotations

import ctypes
import os
import select
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from msgspec import Struct

from gpucr.linux import libc, proc_text
from gpucr.linux.processes import PROC, OpenFile, all_pids

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_PIDFD_GETFD = 438  # the same number on all architectures

_syscall = libc.function("syscall", ctypes.c_long, ctypes.c_int, ctypes.c_int, ctypes.c_uint, result=ctypes.c_long)

NAMELESS = " (deleted)"
"""What the kernel appends to the names of files and memory that have none any more, or never had one."""
SHARED_MEMORY = "/dev/shm/"  # noqa: S108 - where the C library has it
"""Files of memory, with names."""

MemoryKey = tuple[str, int]
"""Device and inode of a file of memory, as ``/proc/PID/maps`` has them: ``00:01``, 1234."""


class SharedMapping(Struct, frozen=True):
    """Memory of one process that others can have, too: mapped with MAP_SHARED, and not of a file that lasts."""

    pid: int
    key: MemoryKey
    path: str
    is_writable: bool


def descriptors_of(pids: Collection[int], only: Collection[str] | None = None) -> dict[str, list[OpenFile]]:
    """The descriptors of these processes, by what they lead to. ``only``: to one of these; should be a set.

    Processes that have ended, and those that the caller may not look into, have none.
    """
    found: dict[str, list[OpenFile]] = {}
    for pid in pids:
        try:
            folder = os.open(f"{PROC}/{pid}/fd", _FOLDER)
        except OSError:
            continue
        try:
            for name in os.listdir(folder):
                try:
                    target = os.readlink(name, dir_fd=folder)
                except OSError:  # closed meanwhile
                    continue
                if only is None or target in only:
                    found.setdefault(target, []).append(OpenFile(pid, int(name), target))
        except OSError:  # it has ended
            continue
        finally:
            os.close(folder)
    return found


class Kin(NamedTuple):
    """How a process is related to others: fields of ``/proc/PID/stat`` (proc_pid_stat(5)).

    ``stack_start``: where its stack begins, at random for each program that is started, and the same after a fork; 0
    for threads of the kernel, and where the caller may not know.
    """

    status: str
    parent_pid: int
    group_id: int
    session_id: int
    stack_start: int


def kin_of(pids: Iterable[int]) -> dict[int, Kin]:
    """Those of these processes that are there."""
    found: dict[int, Kin] = {}
    for pid in pids:
        try:
            text = proc_text.read(f"{PROC}/{pid}/stat")
        except OSError:  # it has ended
            continue
        fields = text[text.rindex(b")") + 2 :].split()
        found[pid] = Kin(fields[0].decode(), int(fields[1]), int(fields[2]), int(fields[3]), int(fields[25]))
    return found


def is_memory(path: str) -> bool:
    """Whether this is memory that lives as long as its users, or a file without a name."""
    return path.endswith(NAMELESS) or path.startswith(SHARED_MEMORY)


def shared_mappings(pid: int) -> Iterator[SharedMapping]:
    """A process's memory that lives as long as its users: without a name, or in /dev/shm. Nothing if it has ended."""
    data = _maps(pid)
    if NAMELESS.encode() in data or SHARED_MEMORY.encode() in data:
        yield from shared_mappings_in(proc_text.in_lines(data, errors="surrogateescape"), pid)


def shared_mappings_in(lines: Iterable[str], pid: int) -> Iterator[SharedMapping]:
    """The same, in lines of its ``maps``."""
    for line in lines:
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[1][3] == "s" and is_memory(fields[5]):
            yield SharedMapping(pid, (fields[3], int(fields[4])), fields[5], fields[1][1] == "w")


def mappings_of(keys: Collection[MemoryKey], pids: Collection[int]) -> dict[MemoryKey, list[SharedMapping]]:
    """Where these processes have this memory mapped, by memory."""
    found: dict[MemoryKey, list[SharedMapping]] = {}
    for pid in pids if keys else ():
        for mapping in shared_mappings(pid):
            if mapping.key in keys:
                found.setdefault(mapping.key, []).append(mapping)
    return found


def has_other_end(pid: int, fd: int) -> bool:
    """Whether anybody has the other end of this end of a pipe open. False if that is unknown.

    Asked of a copy of the descriptor (pidfd_getfd(2)), which needs the right to attach to the process. A pipe without a
    writer, or a reader, is ready with POLLHUP, or POLLERR.
    """
    try:
        process = os.pidfd_open(pid)
        try:
            copy = libc.check(_syscall(_PIDFD_GETFD, process, fd, 0), "pidfd_getfd")
        finally:
            os.close(process)
    except OSError:
        return False
    try:
        poller = select.poll()
        poller.register(copy, 0)
        return not poller.poll(0)
    finally:
        os.close(copy)


def other_pids(apart_from: Collection[int]) -> list[int]:
    """All processes but these."""
    return [pid for pid in all_pids() if pid not in apart_from]


def _maps(pid: int) -> bytes:
    try:
        return proc_text.read(f"{PROC}/{pid}/maps")
    except OSError:  # it has ended
        return b""

"""Who uses a pid and so keeps the kernel from giving it to a new process."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Collection
from typing import Literal

from msgspec import Struct

from gpucr.errors import ProcessNotFound
from gpucr.linux.processes import PF_EXITING, all_pids, read_stat, thread_group_leader

_PID_LIMIT = 1 << 22  # PID_MAX_LIMIT of include/linux/threads.h


class PidUse(Struct, frozen=True):
    """Why no new process can get this pid: it belongs to process or thread ``holder``, or to its group or session.

    A group and a session keep their pid after the process that started them has ended.
    """

    pid: int
    kind: Literal["process", "process group", "session"]
    holder: int


def uses_of_pids(pids: Collection[int]) -> list[PidUse]:
    """Return those of these pids that are taken, and by whom: one use per pid. Thread ids count too.

    ``holder`` is the pid itself if no user is found: a process or thread that has just been reaped.
    """
    taken = _taken(pids)
    uses = {pid: PidUse(pid, "process", pid) for pid in taken if read_stat(pid) is not None}
    wanted = taken - uses.keys()
    for holder in all_pids() if wanted else ():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            session, group = os.getsid(holder), os.getpgid(holder)
            if session in wanted:
                uses.setdefault(session, PidUse(session, "session", holder))
            if group in wanted:
                uses.setdefault(group, PidUse(group, "process group", holder))
    return [uses.get(pid) or PidUse(pid, "process", pid) for pid in taken]


def _taken(pids: Collection[int]) -> set[int]:
    """Return those of these pids that the kernel cannot assign now.

    /proc does not show it: since Linux 6.15 a reaped process leaves /proc first and frees its pid later, up to 0.1 s on
    a busy machine. F_SETOWN (fcntl(2)) looks in the pid table itself; the file used here sends no signals.
    """
    found: set[int] = set()
    fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for pid in pids:
            if 0 < pid <= _PID_LIMIT:  # a damaged snapshot may name any number
                with contextlib.suppress(ProcessLookupError):
                    fcntl.fcntl(fd, fcntl.F_SETOWN, pid)
                    found.add(pid)
    finally:
        os.close(fd)
    return found


def wait_for_reaping(pids: Collection[int], timeout_s: float) -> list[PidUse]:
    """Wait up to ``timeout_s`` until no dead process uses one of these pids: some inits reap only now and then.

    Then the kernel can assign each of them again. Returns the uses that remain when the time is up or a live process
    has one of them.
    """
    end = time.monotonic() + timeout_s
    while True:
        uses = uses_of_pids(pids)
        if not uses or time.monotonic() >= end or not all(_is_ending(use.holder) for use in uses):
            return uses
        time.sleep(0.01)


def _is_ending(pid_or_tid: int) -> bool:
    """Whether the process with this id is gone, a zombie, or about to be.

    Right after a SIGKILL a process can be a zombie while its other threads, which have pids too, are still shown alive.
    """
    try:
        stats = read_stat(pid_or_tid), read_stat(thread_group_leader(pid_or_tid))
    except ProcessNotFound:
        return True
    return any(stat is None or stat.status in "ZX" or stat.flags & PF_EXITING for stat in stats)

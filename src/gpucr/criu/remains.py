"""Kill what a killed CRIU has left: of a tree that it was restoring, and of itself."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path

from gpucr.errors import ProcessNotFound
from gpucr.linux import processes
from gpucr.linux.namespaces import PidNamespace
from gpucr.model import ProcessId

SERVICE_WORD = "swrk"
"""What makes CRIU serve one request, on its command line."""

_TITLE = b"criu: "


def task_pids(images_dir: Path) -> tuple[int, ...]:
    """The pids and thread ids of the tree in these images, from the images' names."""
    matches = (re.fullmatch(r"core-(\d+)\.img", name) for name in os.listdir(images_dir))
    return tuple(int(match[1]) for match in matches if match is not None)


def kill_orphans(pids: Collection[int], *, since_ticks: int, sandbox: PidNamespace | None = None) -> None:
    """SIGKILL half-made tasks of a tree with these `task_pids`, which wait for their CRIU forever.

    They are identified by pid (CRIU gives the tasks no others) and by a start time not before ``since_ticks`` (that
    CRIU's start): the pids were free then, or CRIU would have failed. In a ``sandbox`` they are that pid namespace's
    pids.
    """
    ended: set[ProcessId] = set()
    # Repeat until there is none: a task may have forked the next one during the search.
    while found := set(_orphans(pids, since_ticks, sandbox)) - ended:
        processes.kill_and_wait(found)
        ended |= found


def kill_session(criu: ProcessId) -> None:
    """SIGKILL the children of this CRIU, which has ended. Its tasks are in sessions of their own.

    CRIU starts children to find out what the kernel can do, and ends them; without it they wait without end (``while
    (1) sleep(1)`` in kerndat.c).
    """
    processes.kill_and_wait(_of_session(criu))


def _of_session(criu: ProcessId) -> Iterator[ProcessId]:
    """Another session may have got the number when this one was over: but not CRIU's command line."""
    for pid in processes.all_pids():
        stat = processes.read_stat(pid)
        if stat is None or stat.session_id != criu.pid or pid == criu.pid:
            continue
        if stat.start_time_ticks >= criu.start_time_ticks and is_criu(pid):
            yield ProcessId(pid, stat.start_time_ticks)


def is_criu(pid: int) -> bool:
    """Whether this process is a CRIU that serves a request, or a child of one. Its title changes at the request."""
    try:
        words = (processes.PROC / str(pid) / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return SERVICE_WORD.encode() in words or any(word.startswith(_TITLE) for word in words)


def _orphans(pids: Collection[int], since_ticks: int, sandbox: PidNamespace | None) -> Iterator[ProcessId]:
    for inner in pids:
        pid = inner if sandbox is None else sandbox.outer_pid(inner)
        if pid is None or not _is_process(pid):
            continue
        stat = processes.read_stat(pid)
        if stat is not None and stat.start_time_ticks >= since_ticks:
            yield ProcessId(pid, stat.start_time_ticks)


def _is_process(pid_or_tid: int) -> bool:
    """Threads have their own images, and end with their process."""
    try:
        return processes.thread_group_leader(pid_or_tid) == pid_or_tid
    except ProcessNotFound:
        return False

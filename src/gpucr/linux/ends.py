"""How processes end that are no children of ours, and whether those that were woken have run since.

A wait status is known from two places: the process's line in /proc as long as it is a zombie, and its pidfd afterwards
(PIDFD_GET_INFO with PIDFD_INFO_EXIT, Linux 6.15). On older kernels one that its parent has collected leaves nothing.
"""

from __future__ import annotations

import fcntl
import os
import signal
import struct
import time
from collections.abc import Iterable

from gpucr.linux import processes
from gpucr.linux.processes import PROC
from gpucr.model import ProcessId

# include/uapi/linux/pidfd.h: the first 64 bytes of struct pidfd_info, whose mask comes first and exit_code last
_INFO_BYTES, _EXIT_CODE_OFFSET, _INFO_EXIT = 64, 60, 1 << 3
_GET_INFO = 0xC000FF0B | _INFO_BYTES << 16
_STAT_EXIT_CODE = 49  # counted from the state; the last field of proc_pid_stat(5)

RUN_LIMIT_S = 5.0
"""How long processes that were let go are waited for to run: a machine may be busy."""

_RUN_NS = 1_000_000
_LOOK_EVERY_S = 0.005


def wait_status(process: ProcessId, pidfd: int | None) -> int | None:
    """The wait status of a process that has ended. None where it is not known, or the process has not ended yet.

    ``pidfd``: one that was opened while the process was alive, if there is one.
    """
    stat = processes.read_stat(process.pid)
    if stat is not None and process.is_same(ProcessId(process.pid, stat.start_time_ticks)):
        return _status_of_zombie(process.pid) if stat.status == "Z" else None
    if pidfd is None:
        return None
    info = bytearray(_INFO_BYTES)
    struct.pack_into("=Q", info, 0, _INFO_EXIT)
    try:
        fcntl.ioctl(pidfd, _GET_INFO, info)
    except OSError:
        return None
    has_exit = struct.unpack_from("=Q", info)[0] & _INFO_EXIT
    return int(struct.unpack_from("=i", info, _EXIT_CODE_OFFSET)[0]) if has_exit else None


def _status_of_zombie(pid: int) -> int | None:
    """Needs ptrace access: the kernel shows 0 to everybody else."""
    if not processes.can_checkpoint_processes():
        return None
    try:
        fields = (PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(fields[_STAT_EXIT_CODE]) if fields[0] == "Z" else None


def how(status: int | None) -> str:
    """What a wait status says, to follow the name of the process: "exited with 1"."""
    if status is None:
        return "ended, nobody can say how"
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"exited with {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


def wait_until_they_ran(found: Iterable[ProcessId], timeout_s: float = RUN_LIMIT_S) -> None:
    """Return when every thread of these processes has run since it was woken, or has ended; at most ``timeout_s``.

    A thread that was left in a state in which it cannot go on dies with its next instruction, and not before: asked
    right after it was let go, it would still count as alive. One that sleeps in the kernel has run since, because it
    was woken from a stop to come there; one that computes has run when its CPU time grows.
    """
    waiting = {
        (process.pid, tid): _cpu_ns(process.pid, tid) for process in found for tid in processes.threads(process.pid)
    }
    end = time.monotonic() + timeout_s
    while waiting:
        waiting = {thread: begin for thread, begin in waiting.items() if not _has_run(*thread, begin)}
        if not waiting or time.monotonic() > end:
            return
        time.sleep(_LOOK_EVERY_S)


def _has_run(pid: int, tid: int, begin_ns: int) -> bool:
    stat = processes.read_stat(tid)
    return stat is None or stat.status not in "RTt" or _cpu_ns(pid, tid) >= begin_ns + _RUN_NS


def _cpu_ns(pid: int, tid: int) -> int:
    try:
        return int((PROC / str(pid) / "task" / str(tid) / "schedstat").read_text().split()[0])
    except (OSError, IndexError):
        return 0

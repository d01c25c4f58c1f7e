"""How processes that are not our children ended, and whether woken ones have run since.

A wait status has two sources: /proc/PID/stat while the process is a zombie, and its pidfd afterwards (PIDFD_GET_INFO
with PIDFD_INFO_EXIT, Linux 6.15). On older kernels nothing remains once the parent has reaped it.
"""

from __future__ import annotations

import fcntl
import os
import signal
import struct
import time
from collections.abc import Iterable

from gpucr.linux import capabilities, processes
from gpucr.linux.processes import PROC
from gpucr.model import ProcessId

# include/uapi/linux/pidfd.h: the first 64 bytes of struct pidfd_info, whose mask comes first and exit_code last
_INFO_BYTES, _EXIT_CODE_OFFSET, _INFO_EXIT = 64, 60, 1 << 3
_GET_INFO = 0xC000FF0B | _INFO_BYTES << 16
_STAT_EXIT_CODE = 49  # counted from the state; the last field of proc_pid_stat(5)

RUN_LIMIT_S = 5.0
"""How long to wait until released processes have run: the machine may be busy."""

_RUN_NS = 1_000_000
_LOOK_EVERY_S = 0.005


def wait_status(process: ProcessId, pidfd: int | None) -> int | None:
    """The wait status of a process that has ended. None if it is unknown or the process has not ended yet.

    ``pidfd``: opened while the process was alive, if available.
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
    if not capabilities.can_checkpoint_processes():
        return None
    try:
        fields = (PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(fields[_STAT_EXIT_CODE]) if fields[0] == "Z" else None


def how(status: int | None) -> str:
    """A wait status in words, to follow the process's name: "exited with 1"."""
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

    A thread left in a broken state dies at its next instruction, not before: right after its release it would still
    look alive. A thread that sleeps in the kernel has run since, because it had to wake from its stop to get there; one
    that computes has run when its CPU time grows.
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

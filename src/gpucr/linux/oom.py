"""Protect a process from the out-of-memory killer (proc_pid_oom_score_adj(5)) and from memory limits.

Children inherit the value. So nothing that becomes the parent of a job's processes is protected: CRIU is in a dump, but
not in a restore, and a keeper only when its job exists.
"""

from __future__ import annotations

import resource

_NEVER = "-1000"


def spare(pid: int | str = "self") -> bool:
    """Make the kernel kill this process last. False if that needs CAP_SYS_RESOURCE or the process has ended."""
    try:
        with open(f"/proc/{pid}/oom_score_adj", "w", encoding="ascii") as file:  # no pathlib: for the guard
            file.write(_NEVER)
    except OSError:
        return False
    return True


def lift_memory_limits() -> bool:
    """Lift this process's memory limits, which were meant for gpucr's caller. False if that is not allowed."""
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    try:
        for limit in (resource.RLIMIT_AS, resource.RLIMIT_DATA):
            resource.setrlimit(limit, unlimited)
    except (ValueError, OSError):
        return False
    return True

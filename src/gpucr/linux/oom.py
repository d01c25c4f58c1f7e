"""Have a process not end for want of memory: the kernel's out-of-memory killer (proc_pid_oom_score_adj(5)), and limits.

A process passes its value on to its children. So nothing is spared here that becomes the parent of a job's processes:
CRIU in a dump is, CRIU in a restore is not, and a keeper only when its job is there.
"""

from __future__ import annotations

import resource

_NEVER = "-1000"


def spare(pid: int | str = "self") -> bool:
    """The kernel kills this process last. False where that is not allowed (CAP_SYS_RESOURCE), or it has ended."""
    try:
        with open(f"/proc/{pid}/oom_score_adj", "w", encoding="ascii") as file:  # no pathlib: the guard imports this
            file.write(_NEVER)
    except OSError:
        return False
    return True


def lift_memory_limits() -> bool:
    """End this process's limits on memory, which were meant for gpucr's caller. False where that is not allowed."""
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    try:
        for limit in (resource.RLIMIT_AS, resource.RLIMIT_DATA):
            resource.setrlimit(limit, unlimited)
    except (ValueError, OSError):
        return False
    return True

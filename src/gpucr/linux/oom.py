"""Have the kernel's out-of-memory killer spare a process (proc_pid_oom_score_adj(5)).

A process passes its value on to its children. So nothing is spared here that becomes the parent of a job's processes:
CRIU in a dump is, CRIU in a restore is not, and a keeper only when its job is there.
"""

from __future__ import annotations

_NEVER = "-1000"


def spare(pid: int | str = "self") -> bool:
    """The kernel kills this process last. False where that is not allowed (CAP_SYS_RESOURCE), or it has ended."""
    try:
        with open(f"/proc/{pid}/oom_score_adj", "w", encoding="ascii") as file:  # no pathlib: the guard imports this
            file.write(_NEVER)
    except OSError:
        return False
    return True

"""Processes that live with a job, in its pid namespace or its container's cgroup, but are not below its first process.

Nobody in there has started them: `gpucr exec`, `runc exec` or nsenter did; or the namespace's first process has adopted
them when their parent had ended. No dump has them, and they end with the job.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import suppress

from gpucr.errors import ProcessNotFound
from gpucr.linux import namespaces, proc_text, processes
from gpucr.linux.processes import PROC
from gpucr.model import Job, ProcessInfo


def left_out(job: Job, *, in_container: bool, apart_from: Collection[int] = ()) -> tuple[ProcessInfo, ...]:
    """Those processes, without ``apart_from``. ``in_container``: the cgroup is the job's, too.

    None of a job in this process's own pid namespace, unless it has a cgroup that its parent does not have.
    """
    known = {*job.pids, *apart_from, os.getpid()}
    found = []
    for pid in _neighbours(job.root, in_container=in_container):
        if pid not in known:
            with suppress(ProcessNotFound):  # it has ended, or is a zombie
                found.append(processes.describe(pid))
    return tuple(found)


def _neighbours(root: ProcessInfo, *, in_container: bool) -> Iterator[int]:
    own = namespaces.namespace_id(root.pid, "pid")
    is_shared = own == namespaces.namespace_id("self", "pid")
    cgroup = _cgroup_of_its_own(root) if in_container else None
    if is_shared and cgroup is None:
        return
    for pid in processes.all_pids():
        with suppress(OSError):
            inside = not is_shared and namespaces.namespace_id(pid, "pid") == own
            if inside or (cgroup is not None and _is_below(_cgroups_of(pid), cgroup)):
                yield pid


def _cgroup_of_its_own(root: ProcessInfo) -> list[str] | None:
    """The lines of its /proc/PID/cgroup, if what has started it is in other cgroups."""
    with suppress(OSError):
        own = _cgroups_of(root.pid)
        return own if root.parent_pid and own != _cgroups_of(root.parent_pid) else None
    return None


def _cgroups_of(pid: int) -> list[str]:
    return proc_text.lines(PROC / str(pid) / "cgroup", errors="surrogateescape")


def _is_below(lines: list[str], cgroup: list[str]) -> bool:
    return len(lines) == len(cgroup) and all(
        line == above or line.startswith(f"{above.rstrip('/')}/") for line, above in zip(lines, cgroup, strict=True)
    )

"""Is a process tree one job? What belongs to several users, or holds several jobs, is not frozen by the pid above it.

A pid given by mistake (of an init, a login service, a supervisor) would take everything below it: `gpucr suspend 1`
would suspend every CUDA process of the machine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from gpucr.errors import InvalidRequest
from gpucr.jobs import sandbox
from gpucr.linux import processes
from gpucr.model import ProcessInfo

CODE = "GPUCR-NOT-ONE-JOB"

_HINT = "name the job's own first process; `gpucr ps` and `gpucr jobs` list them"


def require_one_job(tree: Sequence[ProcessInfo]) -> None:
    """Raise InvalidRequest where the tree belongs to several users, or holds several jobs of gpucr's."""
    root, *below = tree
    named = f"the tree of process {root.pid} ({root.name})"
    users = _users(tree)
    if len(users) > 1:
        who = ", ".join(map(str, sorted(users)))
        raise InvalidRequest(f"{named} is not one job: it has processes of the users {who}", hint=_HINT, code=CODE)
    keepers = [process.pid for process in below if sandbox.is_keeper(process)]
    if keepers:
        pids = ", ".join(map(str, keepers))
        raise InvalidRequest(
            f"{named} is not one job: it holds jobs that gpucr keeps (keepers {pids})",
            hint="name each of them; `gpucr jobs` lists them, and the pid of its keeper stands for a job",
            code=CODE,
        )


def _users(tree: Sequence[ProcessInfo]) -> set[int]:
    """The users whose processes these are, where that can be more than one job's.

    Who logged in counts, whatever a process has become since (sudo, su). Otherwise root does not: launchers, container
    runtimes and login services run as root, above the processes of whoever they work for. What is in a pid namespace
    of its own, seen from here, is a container: its users are its own business.
    """
    here = [process for process in tree if len(process.ns_pids) == 1]
    logins = {login for process in here if (login := _login_uid(process.pid)) is not None}
    return logins if len(logins) > 1 else {process.uid for process in here if process.uid != 0}


def _login_uid(pid: int) -> int | None:
    """Who logged in to the session that the process comes from (pam_loginuid(8)); None where nobody did."""
    with contextlib.suppress(OSError, ValueError):  # it has ended; a kernel without CONFIG_AUDIT has no such file
        login = int((processes.PROC / str(pid) / "loginuid").read_text())
        return login if login != _NO_LOGIN else None
    return None


_NO_LOGIN = (1 << 32) - 1  # AUDIT_UID_UNSET of include/uapi/linux/audit.h

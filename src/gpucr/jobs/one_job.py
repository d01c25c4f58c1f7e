"""Check that the named processes are one job: never freeze several users' processes, jobs or logins by their parent.

A pid given by mistake (of an init, a login service, a terminal multiplexer) would include everything below it: `gpucr
suspend 1` would suspend every CUDA process on the machine. What a launcher, a script or a supervisor has started is one
job, even in other sessions and process groups, or as another user through sudo.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

from gpucr.errors import InvalidRequest
from gpucr.jobs import sandbox
from gpucr.linux import cgroups, proc_text, processes
from gpucr.model import ProcessInfo

CODE = "GPUCR-NOT-ONE-JOB"

_STARTERS_OF_SESSIONS = frozenset(
    ("systemd", "init", "login", "sshd", "sshd-session", "dropbear", "cron", "crond", "atd", "tmux: server", "screen")
)
"""Names of programs that start sessions for users. Their children are not one job."""

_NO_LOGIN = (1 << 32) - 1  # AUDIT_UID_UNSET of include/uapi/linux/audit.h


def require_one_job(trees: Sequence[Sequence[ProcessInfo]], *, cgroup: str | None = None) -> None:
    """Raise InvalidRequest, with what was found, if these trees belong to several users or jobs.

    ``cgroup``: they were found in it; otherwise each was named, and only what is below one root can be there by
    mistake.
    """
    found = next(_evidence(trees, in_cgroup=cgroup is not None), None)
    if found is not None:
        root = trees[0][0]
        what = "what was named" if len(trees) > 1 else f"the tree of process {root.pid} ({root.name})"
        raise InvalidRequest(
            f"{what if cgroup is None else cgroup} is not one job: it {found}",
            hint="name the job's own first process; `gpucr ps` and `gpucr jobs` list them, and the pid of its keeper "
            "stands for a job. --force of suspend, resume and dump takes everything that was found",
            code=CODE,
        )


def _evidence(trees: Sequence[Sequence[ProcessInfo]], *, in_cgroup: bool) -> Iterator[str]:
    everything = [process for tree in trees for process in tree]
    users = _users(everything)
    if len(users) > 1:
        yield f"has processes of the users {_listed(users)}"
    roots = {tree[0].pid for tree in trees}
    keepers = [each.pid for each in everything if (in_cgroup or each.pid not in roots) and sandbox.is_keeper(each)]
    if keepers:
        yield f"holds jobs that gpucr keeps (keepers {_listed(keepers)})"
    if in_cgroup:
        units = cgroups.units_of(each.pid for each in _of_this_machine(everything))
        if len(units) > 1:
            yield f"has processes in the units {_listed(units)}"
    for tree in trees:
        yield from _evidence_below(tree[0], _of_this_machine(tree[1:]))


def _evidence_below(root: ProcessInfo, below: Sequence[ProcessInfo]) -> Iterator[str]:
    """Separate jobs below one process."""
    units = cgroups.units_of(each.pid for each in below) - cgroups.units_of([root.pid])
    if len(units) > 1:
        yield f"has processes in the units {_listed(units)}"
    terminals = {each.terminal: each.session_id for each in below if each.terminal not in (0, root.terminal)}
    if len(terminals) > 1:
        yield f"has sessions on several terminals ({_listed(terminals.values())})"
    sessions = {each.session_id for each in below} - {root.session_id}
    if root.name in _STARTERS_OF_SESSIONS and len(sessions) > 1:
        yield f"has several sessions ({_listed(sessions)}), which {root.name} starts for others"


def _of_this_machine(tree: Sequence[ProcessInfo]) -> list[ProcessInfo]:
    """Without processes in another pid namespace: a container's inside counts as one."""
    return [process for process in tree if len(process.ns_pids) == 1]


def _users(tree: Sequence[ProcessInfo]) -> set[int]:
    """The users whose processes these are, if that can be more than one job's.

    The login user counts, even after sudo or su. Otherwise root does not count: launchers, container runtimes and login
    services run as root, above their users' processes. A process started by one user as another belongs to the first.
    """
    here = _of_this_machine(tree)
    logins = {login for process in here if (login := _login_uid(process.pid)) is not None}
    if len(logins) > 1:
        return logins
    users: dict[int, int] = {}
    for process in here:  # parents come before their children
        users[process.pid] = users.get(process.parent_pid, 0) or process.uid
    return {uid for uid in users.values() if uid != 0}


def _login_uid(pid: int) -> int | None:
    """The login user of the process's session (pam_loginuid(8)); None if there is none."""
    with contextlib.suppress(OSError, ValueError):  # it has ended; a kernel without CONFIG_AUDIT has no such file
        login = int(proc_text.read(f"{processes.PROC}/{pid}/loginuid"))
        return login if login != _NO_LOGIN else None
    return None


def _listed(found: Iterable[int] | Iterable[str]) -> str:
    return ", ".join(str(each) for each in sorted(found))

"""Find what only root can dump and restore before the privileged helper refuses it."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Literal

from gpucr.criu.options import is_shell_job
from gpucr.diagnosis.preflight.findings import Finding
from gpucr.diagnosis.preflight.support import users as facts
from gpucr.helper.messages import MAX_REQUESTS_PER_USER
from gpucr.linux import executable_memory, namespaces, tracing
from gpucr.linux.namespaces import Kind
from gpucr.linux.terminal import has_terminal
from gpucr.model import Job

if TYPE_CHECKING:
    from gpucr.criu.install import CriuInstall

_NAMESPACES: tuple[Kind | Literal["user"], ...] = ("user", "pid", "mnt", "net", "ipc")


def check_attach() -> list[Finding]:
    """Whether Yama keeps everybody, root too, from attaching to processes."""
    scope = tracing.yama_scope()
    if scope is None or scope < tracing.NO_ATTACH:
        return []
    return [facts.NO_ATTACH.seen(f"kernel.yama.ptrace_scope is {scope}")]


def check_criu(install: CriuInstall) -> list[Finding]:
    """What keeps CRIU from restoring anything, whoever the user is. The helper's has a security context of its own."""
    if (found := check_attach()) or install.is_helpers or executable_memory.is_allowed():
        return found
    return [facts.NO_EXECUTABLE_MEMORY.seen("tried it")]


def check_ptrace(pids: Iterable[int]) -> list[Finding]:
    """Whether Yama lets an ordinary user attach to these processes who has not started them.

    Those with an interposer have granted permission by now (jobs/tracing.py).
    """
    if found := check_attach():
        return found
    scope = tracing.yama_scope()
    if not scope or (closed := next((pid for pid in pids if not tracing.is_allowed(pid)), None)) is None:
        return []
    return [facts.YAMA.seen(f"kernel.yama.ptrace_scope is {scope}", closed, pid=closed)]


def check_dump_by_user(job: Job, install: CriuInstall, *, in_sandbox: bool = False) -> list[Finding]:
    """What the helper does not dump of a job, and nobody where CRIU cannot work. ``in_sandbox``: of gpucr's.

    The helper's CRIU attaches to any process; gpucr itself has to, if there is device memory.
    """
    nobody = check_criu(install)
    if nobody or not install.is_helpers:
        return nobody
    return [
        *check_ptrace(each.pid for each in job.gang),
        *_processes(job, in_sandbox=in_sandbox),
        *_of_the_job(job),
    ]


def _of_the_job(job: Job) -> Iterator[Finding]:
    """What the helper or its CRIU would refuse, if visible before the job is stopped."""
    if len(job.root_pids) > MAX_REQUESTS_PER_USER:
        yield facts.TREES_BY_HELPER.seen("the trees that were named", job.root.pid, limit=MAX_REQUESTS_PER_USER)
    for tree in job.trees:
        if is_shell_job(tree.root.pid, tree.pids) and any(map(_has_terminal, tree.pids)):
            yield facts.SESSION_BY_HELPER.seen(f"/proc/{tree.root.pid}/stat", tree.root.pid)


def _has_terminal(pid: int) -> bool:
    try:
        return has_terminal(pid)
    except PermissionError:  # reported elsewhere
        return False


def _processes(job: Job, *, in_sandbox: bool) -> Iterator[Finding]:
    for process in job.processes:
        pid, what = process.pid, f"process {process.pid} ({process.name})"
        if process.uid != os.geteuid():
            yield facts.OTHER_USER.seen(f"/proc/{pid}/status", pid, process=what, uid=process.uid)
        elif not in_sandbox and (foreign := _foreign_namespaces(pid)):
            yield facts.NAMESPACES.seen(f"/proc/{pid}/ns", pid, process=what, namespaces=", ".join(foreign))


def _foreign_namespaces(pid: int) -> list[str]:
    found: list[str] = []
    for kind in _NAMESPACES:
        try:
            if namespaces.namespace_id(pid, kind) != namespaces.namespace_id("self", kind):
                found.append(str(kind))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            return []  # ended, or permission denied: reported elsewhere
    return found


def check_restore_by_user(install: CriuInstall, uids: Collection[int]) -> list[Finding]:
    """What the helper does not restore, and nobody where CRIU cannot work. ``uids``: of all threads."""
    nobody, others = check_criu(install), sorted(set(uids) - {os.geteuid()})
    if nobody or not install.is_helpers or not others:
        return nobody
    uids_text = ", ".join(map(str, others))
    return [facts.RAN_AS_OTHER_USER.seen("CRIU's images of the job", uids=uids_text, own=os.geteuid())]

"""Find what only root can dump and restore before an ordinary user's CRIU fails."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Literal

from gpucr.diagnosis.preflight.findings import Finding
from gpucr.diagnosis.preflight.support import users as facts
from gpucr.helper import limits
from gpucr.linux import namespaces, proc_text, tracing
from gpucr.linux.namespaces import Kind
from gpucr.linux.processes import PROC
from gpucr.model import Job

if TYPE_CHECKING:
    from gpucr.criu.install import CriuInstall

_NAMESPACES: tuple[Kind | Literal["user"], ...] = ("user", "pid", "mnt", "net", "ipc")


def check_ptrace(pids: Iterable[int]) -> list[Finding]:
    """Whether Yama lets an ordinary user attach to these processes if he has not started them himself.

    Those with an interposer have granted permission by now (jobs/tracing.py).
    """
    scope = tracing.yama_scope()
    if not scope or (closed := next((pid for pid in pids if not tracing.is_allowed(pid)), None)) is None:
        return []
    return [facts.YAMA.seen(f"kernel.yama.ptrace_scope is {scope}", closed, pid=closed)]


def check_dump_by_user(job: Job, install: CriuInstall, *, in_sandbox: bool = False) -> list[Finding]:
    """What an ordinary user's CRIU cannot dump of a job. Nothing where root's CRIU is used. ``in_sandbox``: of gpucr's.

    The privileged helper's CRIU attaches to any process; gpucr itself has to, if there is device memory.
    """
    if not install.is_unprivileged:
        return []
    if install.origin == "helper":
        return [
            *check_ptrace(each.pid for each in job.gang),
            *_processes(job, may_filter=True, in_sandbox=in_sandbox),
            *_for_the_helper(job),
        ]
    return [*check_ptrace(job.pids), *_connections(job, install), *_processes(job)]


def _for_the_helper(job: Job) -> Iterator[Finding]:
    """What the helper or its CRIU would refuse, if visible before the job is stopped."""
    from gpucr.criu.options import is_shell_job

    if len(job.root_pids) > limits.MAX_REQUESTS_PER_USER:
        yield facts.TREES_BY_HELPER.seen("the trees that were named", job.root.pid, limit=limits.MAX_REQUESTS_PER_USER)
    elif is_shell_job(job.root.pid, job.pids) or any(is_shell_job(each, [each]) for each in job.other_root_pids):
        yield facts.SESSION_BY_HELPER.seen(f"/proc/{job.root.pid}/stat", job.root.pid)


def _connections(job: Job, install: CriuInstall) -> Iterator[Finding]:
    from gpucr.linux.tcp_tables import has_connections

    if not install.has_network and has_connections(job.pids):
        yield facts.CONNECTION.seen("/proc/PID/net/tcp")


def _processes(job: Job, *, may_filter: bool = False, in_sandbox: bool = False) -> Iterator[Finding]:
    for process in job.processes:
        pid, what = process.pid, f"process {process.pid} ({process.name})"
        if process.uid != os.geteuid():
            yield facts.OTHER_USER.seen(f"/proc/{pid}/status", pid, process=what, uid=process.uid)
        elif not may_filter and _has_system_call_filter(pid):
            yield facts.SYSTEM_CALL_FILTER.seen(f"Seccomp in /proc/{pid}/status", pid, process=what)
        elif not in_sandbox and (foreign := _foreign_namespaces(pid)):
            yield facts.NAMESPACES.seen(f"/proc/{pid}/ns", pid, process=what, namespaces=", ".join(foreign))


def _has_system_call_filter(pid: int) -> bool:
    try:
        return proc_text.status_fields(PROC / str(pid) / "status").get("Seccomp", "0") != "0"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _foreign_namespaces(pid: int) -> list[str]:
    found: list[str] = []
    for kind in _NAMESPACES:
        try:
            if namespaces.namespace_id(pid, kind) != namespaces.namespace_id("self", kind):
                found.append(str(kind))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            return []  # ended, or permission denied: reported elsewhere
    return found


def check_restore_by_user(
    install: CriuInstall, uids: Collection[int], *, in_sandbox: bool, has_connections: bool
) -> list[Finding]:
    """What an ordinary user's CRIU cannot restore. ``uids``: those of the job's threads."""
    if not install.is_unprivileged:
        return []
    found, images = [], "CRIU's images of the job"
    if has_connections and not install.has_network:
        found.append(facts.HAD_CONNECTION.seen(images))
    if others := sorted(set(uids) - {os.geteuid()}):
        found.append(facts.RAN_AS_OTHER_USER.seen(images, uids=", ".join(map(str, others)), own=os.geteuid()))
    if in_sandbox and install.origin != "helper":
        found.append(facts.SANDBOX.seen("--isolate, or it had them at the dump"))
    return found

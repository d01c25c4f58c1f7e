"""What only root can dump and restore, seen before an ordinary user's CRIU fails at it."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Literal

from gpucr.diagnosis.preflight.findings import Finding
from gpucr.linux import capabilities, namespaces, tracing
from gpucr.linux.namespaces import Kind
from gpucr.linux.processes import PROC
from gpucr.model import Job

if TYPE_CHECKING:
    from gpucr.criu.install import CriuInstall

_NAMESPACES: tuple[Kind | Literal["user"], ...] = ("user", "pid", "mnt", "net", "ipc")
_REMEDY = "let root dump it: the same command with sudo"


def check_ptrace(pids: Iterable[int]) -> list[Finding]:
    """Whether Yama lets an ordinary user attach to these processes, where he has not started them himself.

    Those with an interposer have been asked for their leave by now (jobs/tracing.py).
    """
    scope = tracing.yama_scope()
    if not scope or (closed := next((pid for pid in pids if not tracing.is_allowed(pid)), None)) is None:
        return []
    return [
        Finding(
            "blocking",
            f"this machine lets nobody but root attach to process {closed}, which gpucr has not started itself",
            f"kernel.yama.ptrace_scope is {scope}",
            "neither gpucr nor CRIU can stop its threads",
            "root can allow it with `sysctl kernel.yama.ptrace_scope=0`, which lets each program of a user look into "
            "his others; or run the same command with sudo. With 1, a CUDA process that was started with "
            "`gpucr run` gives its own leave",
            closed,
            code="GPUCR-ONLY-ROOT",
        )
    ]


def check_dump_by_user(job: Job, install: CriuInstall) -> list[Finding]:
    """What of a job an ordinary user's CRIU cannot dump. Nothing where root's CRIU is used."""
    if not install.is_unprivileged:
        return []
    return [*check_ptrace(job.pids), *_connections(job, install), *_processes(job)]


def _connections(job: Job, install: CriuInstall) -> Iterator[Finding]:
    from gpucr.criu.options import has_connections  # a suspend does without CRIU

    if not install.has_network and has_connections(job.pids):
        yield Finding(
            "blocking",
            "the job has a TCP connection",
            "/proc/PID/net/tcp",
            "CRIU takes connections apart with CAP_NET_ADMIN, which root has not granted to this user",
            "let it use local (AF_UNIX) sockets, or wait until it has closed them; have root grant it to a group of "
            "yours (`sudo gpucr criu --grant --network --group GROUP`); or " + _REMEDY,
            code="GPUCR-ONLY-ROOT",
        )


def _processes(job: Job) -> Iterator[Finding]:
    for process in job.processes:
        what = f"process {process.pid} ({process.name})"
        if process.uid != os.geteuid():
            yield Finding(
                "blocking",
                f"{what} runs as uid {process.uid}",
                f"/proc/{process.pid}/status",
                "an ordinary user can dump processes of his own only",
                _REMEDY,
                process.pid,
                code="GPUCR-ONLY-ROOT",
            )
        elif _has_system_call_filter(process.pid):
            yield Finding(
                "blocking",
                f"{what} has a system call filter",
                f"Seccomp in /proc/{process.pid}/status",
                "only root can read it out of the kernel (CAP_SYS_ADMIN)",
                "start the job without one, outside sandboxes of containers and browsers; or " + _REMEDY,
                process.pid,
                code="GPUCR-ONLY-ROOT",
            )
        elif foreign := _foreign_namespaces(process.pid):
            yield Finding(
                "blocking",
                f"{what} is in namespaces of its own ({', '.join(foreign)})",
                f"/proc/{process.pid}/ns",
                "only root can make them again",
                _REMEDY,
                process.pid,
                code="GPUCR-ONLY-ROOT",
            )


def _has_system_call_filter(pid: int) -> bool:
    try:
        return capabilities.status_fields(PROC / str(pid) / "status").get("Seccomp", "0") != "0"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _foreign_namespaces(pid: int) -> list[str]:
    found: list[str] = []
    for kind in _NAMESPACES:
        try:
            if namespaces.namespace_id(pid, kind) != namespaces.namespace_id("self", kind):
                found.append(str(kind))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            return []  # it has ended, or is closed: said elsewhere
    return found


def check_restore_by_user(
    install: CriuInstall, uids: Collection[int], *, in_sandbox: bool, has_connections: bool
) -> list[Finding]:
    """What an ordinary user's CRIU cannot restore. ``uids``: those of the job's threads."""
    if not install.is_unprivileged:
        return []
    found = []
    if has_connections and not install.has_network:
        found.append(
            Finding(
                "blocking",
                "the job had a TCP connection",
                "CRIU's images of the job",
                "CRIU puts connections together with CAP_NET_ADMIN, which root has not granted to this user",
                "restore it with sudo, or have root grant it to a group of yours (`sudo gpucr criu --grant --network "
                "--group GROUP`)",
                code="GPUCR-ONLY-ROOT",
            )
        )
    if others := sorted(set(uids) - {os.geteuid()}):
        found.append(
            Finding(
                "blocking",
                f"the job ran as uid {', '.join(map(str, others))}",
                "CRIU's images of the job",
                f"uid {os.geteuid()} cannot start processes of another user",
                "restore it as that user, or with sudo",
                code="GPUCR-ONLY-ROOT",
            )
        )
    if in_sandbox:
        found.append(
            Finding(
                "blocking",
                "the job needs namespaces of its own",
                "--isolate, or it had them at the dump",
                "only root can make them (CAP_SYS_ADMIN)",
                "restore it with sudo, or leave out --isolate",
                code="GPUCR-ONLY-ROOT",
            )
        )
    return found

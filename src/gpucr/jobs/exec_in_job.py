"""Run a command inside a job's namespaces."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from gpucr.errors import InvalidRequest, NotPermitted, ProcessNotFound
from gpucr.jobs.registered import resolve_pid
from gpucr.jobs.visit import Visit, raise_failure, start_inside, wait_for_command
from gpucr.linux import credentials, mount_root, namespaces, processes
from gpucr.linux.namespaces import Kind
from gpucr.undo.cancellation import Cancellation
from gpucr.undo.interrupts import interrupted


def run_inside(job: int | str, command: Sequence[str], *, cancel: Cancellation | None = None) -> int:
    """Run a command in a job's pid, mount, IPC, network and time namespaces and root folder, and return its exit code.

    Ended by a signal: 128 plus its number. It gets the credentials and capabilities of the job's process, since the
    program may be the job's file, and the caller's input, output, working folder, and environment without
    GPUCR_PASSPHRASE. The calling process must have one thread; its children are in that pid namespace afterwards. Needs
    CAP_SYS_ADMIN and CAP_SYS_CHROOT if the job has namespaces of its own, CAP_SYS_CHROOT if it has another root folder,
    and what another user's credentials need.

    Raises InvalidRequest (also if the command cannot be run), ProcessNotFound, NotPermitted (also for a job in another
    user namespace, in which a user is root who is not root here): then nothing was run. With ``cancel``, which a signal
    handler may use, the command gets SIGTERM, and SIGKILL when that has not ended it in 10 s; Interrupted is raised
    when it has ended.
    """
    if cancel is not None and cancel.is_cancelled:
        raise interrupted(KeyboardInterrupt(cancel.reason), "nothing was run")
    if not command:
        raise InvalidRequest("there is no command to run", hint="gpucr exec NAME|PID [--] CMD...")
    pid = resolve_pid(job)
    target = processes.describe(pid).id
    folder = os.getcwd()
    try:
        visit = Visit(command, folder, credentials.of(pid))
        own = _namespaces_of_its_own(pid)
        with namespaces.opened(pid, *own) as fds, mount_root.of_process(pid) as (root, is_another):
            if not processes.is_alive(target):
                raise ProcessLookupError
            _require_owned_here(pid, fds)
            child, failures = start_inside(visit, fds, root if is_another else None)
    except PermissionError as e:
        raise NotPermitted(
            f"the namespaces of process {pid} cannot be entered: {e.strerror}", pid=pid, hint="run gpucr as root"
        ) from e
    except (FileNotFoundError, ProcessLookupError) as e:
        raise ProcessNotFound(f"process {pid} ended while it was looked at", pid=pid) from e
    raise_failure(failures, child, pid, visit)
    return wait_for_command(child, cancel)


def _namespaces_of_its_own(pid: int) -> list[Kind]:
    if namespaces.namespace_id(pid, "user") != namespaces.namespace_id("self", "user"):
        raise _foreign(pid)
    return [
        kind
        for kind in namespaces.kinds_here()
        if namespaces.namespace_id(pid, kind) != namespaces.namespace_id("self", kind)
    ]


def _require_owned_here(pid: int, fds: Mapping[Kind, int]) -> None:
    if not all(map(namespaces.is_owned_here, fds.values())):
        raise _foreign(pid)


def _foreign(pid: int) -> NotPermitted:
    return NotPermitted(
        f"process {pid} is in another user namespace, whose root could have gpucr run any program as root here",
        pid=pid,
        hint="use the tool that made the container, such as `podman exec`, or `nsenter --user` and what it asks for",
    )

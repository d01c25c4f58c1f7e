"""Running a command inside a job's namespaces."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from gpucr.errors import InvalidRequest, NotPermitted, ProcessNotFound
from gpucr.linux import namespaces, processes
from gpucr.operations.registered import resolve_pid

NOT_RUN = 127
"""The exit code where the command could not be run, as that of a shell."""

_PASSED_ON = (signal.SIGTERM, signal.SIGHUP)


def run_inside(job: int | str, command: Sequence[str]) -> int:
    """Run a command in the pid, mount, IPC, network and time namespaces of a job, and return its exit code.

    Ended by a signal: 128 and its number. Input, output, environment and working folder are the caller's. The calling
    process must have one thread, and is in these namespaces afterwards: there is nothing left for it to do but to end.
    Needs CAP_SYS_ADMIN and CAP_SYS_CHROOT where the job has namespaces of its own.

    Raises InvalidRequest, ProcessNotFound, NotPermitted: then nothing was run.
    """
    if not command:
        raise InvalidRequest("there is no command to run", hint="gpucr exec NAME|PID [--] CMD...")
    pid = resolve_pid(job)
    processes.describe(pid)
    folder = os.getcwd()
    try:
        _enter(pid)
    except PermissionError as e:
        raise NotPermitted(
            f"the namespaces of process {pid} cannot be entered: {e.strerror}", pid=pid, hint="run gpucr as root"
        ) from e
    except (FileNotFoundError, ProcessLookupError) as e:
        raise ProcessNotFound(f"process {pid} ended while it was looked at", pid=pid) from e
    try:
        os.chdir(folder)
    except OSError as e:
        raise InvalidRequest(
            f"the current folder {folder} cannot be used inside the job: {e.strerror}",
            hint="an isolated job has a /dev/shm of its own; change to another folder first (cd /)",
        ) from e
    # What comes before there is somebody to pass it on to, and before this process does that, waits.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGCHLD, *_PASSED_ON))
    # A process enters a pid namespace by being born there.
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        _become(command)
    return _wait(child)


def _enter(pid: int) -> None:
    own = [
        kind
        for kind in namespaces.kinds_here()
        if namespaces.namespace_id(pid, kind) != namespaces.namespace_id("self", kind)
    ]
    with namespaces.opened(pid, *own) as fds:
        # The mounts come last: the others' descriptors are open, and /proc may be another one then.
        for kind in sorted(own, key=lambda kind: kind == "mnt"):
            namespaces.enter(fds[kind], kind)


def _become(command: Sequence[str]) -> NoReturn:
    try:
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and what is ignored stays so
            signal.signal(number, signal.SIG_DFL)
        os.execvp(command[0], list(command))  # noqa: S606 (an argument list, no shell)
    except OSError as e:
        sys.stderr.write(f"error: {command[0]} cannot be run: {e.strerror}\n")
        sys.stderr.flush()
    finally:
        os._exit(NOT_RUN)


def _wait(child: int) -> int:
    """Wait for the command. A Ctrl-C on the terminal reaches it without gpucr; other signals are passed on.

    They stay blocked, as SIGCHLD does, and are fetched: a handler of Python's runs only after waitpid(2), if the signal
    comes right before that.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        received = signal.sigwait((signal.SIGCHLD, *_PASSED_ON))
        if received != signal.SIGCHLD:
            os.kill(child, received)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code

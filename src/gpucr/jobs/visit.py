"""Start a command in a job's namespaces, wait for it, and end it."""

from __future__ import annotations

import errno
import os
import select
import signal
import time
from collections.abc import Mapping, Sequence
from typing import NoReturn

from msgspec import Struct

from gpucr.errors import InvalidRequest, NotPermitted
from gpucr.linux import credentials, namespaces
from gpucr.linux.credentials import Credentials
from gpucr.linux.namespaces import Kind
from gpucr.linux.own_python import without_passphrase
from gpucr.undo.cancellation import Cancellation
from gpucr.undo.interrupts import interrupted

NO_PROGRAM = "GPUCR-NO-PROGRAM"
_PASSED_ON = (signal.SIGTERM, signal.SIGHUP)
_LOOK_EVERY_S, _TERM_LIMIT_S = 0.1, 10.0


class Visit(Struct, frozen=True):
    """What to run, where, and with which credentials."""

    command: Sequence[str]
    folder: str
    as_whom: Credentials

    def programs(self) -> list[str]:
        """The candidate paths of the program, as a shell would search."""
        name = self.command[0]
        return [name] if "/" in name else [os.path.join(each, name) for each in os.get_exec_path()]


def start_inside(visit: Visit, fds: Mapping[Kind, int], root: int | None) -> tuple[int, int]:
    """The command's pid, and a pipe for errors before exec. ``root``: its root folder, if not the caller's."""
    read, write = os.pipe()
    # Signals that arrive before there is a process to pass them to stay pending.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGCHLD, *_PASSED_ON))
    if "pid" in fds:
        credentials.hide_from_tracers()  # the container must not reach this Python through its /proc
        namespaces.enter(fds["pid"], "pid")  # a process enters a pid namespace by being forked there
    programs, environment = visit.programs(), without_passphrase(os.environ)
    child = os.fork()
    if child == 0:
        for number in (signal.SIGINT, *_PASSED_ON):
            if signal.getsignal(number) != signal.SIG_IGN:  # a handler of Python's is nothing that it could run
                signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        _become(visit, fds, root, programs, environment, write)
    os.close(write)
    return child, read


def _become(
    visit: Visit,
    fds: Mapping[Kind, int],
    root: int | None,
    programs: Sequence[str],
    environment: Mapping[str, str],
    failures: int,
) -> NoReturn:
    """Import nothing from here on: the files are the job's."""
    part = "enter"
    try:
        # The mounts come last: the others' descriptors are open, and /proc may differ then.
        for kind in sorted(fds.keys() - {"pid"}, key=lambda kind: kind == "mnt"):
            namespaces.enter(fds[kind], kind)
        if root is not None:
            os.fchdir(root)
            os.chroot(".")
        part = "credentials"
        credentials.take_on(visit.as_whom)
        part = "folder"
        os.chdir(visit.folder)
        part = "program"
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and what is ignored stays so
            signal.signal(number, signal.SIG_DFL)
        _execute(programs, visit.command, environment)
    except OSError as e:
        os.write(failures, f"{part} {e.errno}".encode())
    finally:
        os._exit(1)


def _execute(programs: Sequence[str], command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Raises OSError: as execvp(3), of one that is there but cannot be run, else that there is none."""
    refused: OSError = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    for program in programs:
        try:
            os.execve(program, list(command), environment)  # noqa: S606 (an argument list, no shell)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as e:
            refused = e
    raise refused


def raise_failure(failures: int, child: int, pid: int, visit: Visit) -> None:
    """Raise the error that prevented the exec."""
    with open(failures, "rb") as stream:
        part, _, number = stream.read().decode().partition(" ")
    if not part:
        return
    os.waitpid(child, 0)
    reason = os.strerror(int(number))
    if part == "program":
        raise InvalidRequest(
            f"{visit.command[0]} cannot be run: {reason}",
            hint="it is looked for in the job's files, with PATH as it is here: see the name, its mode, and a script's "
            "interpreter",
            code=NO_PROGRAM,
        ) from OSError(int(number), reason)
    if part == "folder":
        raise InvalidRequest(
            f"the current folder {visit.folder} cannot be used inside the job: {reason}",
            hint="an isolated job has a /dev/shm of its own; change to another folder first (cd /)",
        )
    what = "its namespaces cannot be entered" if part == "enter" else "its credentials cannot be taken on"
    raise NotPermitted(f"process {pid}: {what}: {reason}", pid=pid, hint="run gpucr as root")


def wait_for_command(child: int, cancel: Cancellation | None) -> int:
    """Wait for the command. A Ctrl-C on the terminal reaches it without gpucr; other signals are passed on.

    They and SIGCHLD stay blocked and are fetched: a Python handler would run only after waitpid(2) if the signal came
    right before it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    status = _wait(child) if cancel is None else _wait_or_end(child, cancel)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _wait(child: int) -> int:
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status
        received = signal.sigwaitinfo((signal.SIGCHLD, *_PASSED_ON)).si_signo
        if received != signal.SIGCHLD:
            os.kill(child, received)


def _wait_or_end(child: int, cancel: Cancellation) -> int:
    """Raises Interrupted if it was cancelled, once the command has ended.

    Without `signal.sigtimedwait`: if a Python handler runs until the timeout, it returns a signal that
    never came, with an arbitrary number (seen with CPython 3.8 to 3.13).
    """
    kill_at: float | None = None
    poller = select.poll()
    fd = os.pidfd_open(child)
    try:
        poller.register(fd, select.POLLIN)
        while not poller.poll(_LOOK_EVERY_S * 1000):
            for number in signal.sigpending() & set(_PASSED_ON):
                os.kill(child, signal.sigwait({number}))
            if cancel.is_cancelled and kill_at is None:
                kill_at = time.monotonic() + _TERM_LIMIT_S
                os.kill(child, signal.SIGTERM)
            elif kill_at is not None and time.monotonic() > kill_at:
                os.kill(child, signal.SIGKILL)
    finally:
        os.close(fd)
    _, status = os.waitpid(child, 0)
    if kill_at is not None:
        raise interrupted(KeyboardInterrupt(cancel.reason), "the command was ended")
    return status

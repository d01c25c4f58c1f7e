"""Start a sidecar as a process of its own, be one, and wait for their end. See `gpucr.jobs.sidecar`."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

from msgspec import Struct

from gpucr.errors import BrokenInstall, DeadlineExceeded, GpucrError, InvalidRequest, Unsupported
from gpucr.jobs.sidecar import FolderT, SidecarFolder
from gpucr.linux import own_python, processes, trusted_paths
from gpucr.model import ProcessId
from gpucr.quantities import whole_number

_MOST_ANSWER_BYTES = 4096
_POLL_S = 0.05


def start(folder: SidecarFolder[Any, Any]) -> int:
    """Start the sidecar of a prepared job, and return its pid when it is ready. It outlives the caller.

    Raises InvalidRequest and other errors of its start; BrokenInstall if it exits silently.
    """
    folder.settings()
    log = trusted_paths.open_file(folder.log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW)
    ours, theirs = os.pipe()
    try:
        with subprocess.Popen(
            own_python.command(folder.MODULE, folder.name, theirs),
            env=own_python.without_passphrase(os.environ),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[theirs],
            start_new_session=True,
        ):
            os.close(theirs)
            theirs = -1
            with os.fdopen(ours, "rb", closefd=False) as answers:
                answer = answers.read(_MOST_ANSWER_BYTES).decode(errors="replace")
    finally:
        for fd in (log, ours, theirs):
            if fd >= 0:
                os.close(fd)
    word, *words = answer.split("\0")
    pid = whole_number(words[0]) if word == "ready" and words else None
    if pid is not None:
        return pid
    output = f"its output is in {folder.log_path}"
    if word == "refused" and len(words) == len(("exit code", "code", "message", "hint")):
        exit_code, code, message, hint = words
        kind = Unsupported if exit_code == str(Unsupported.exit_code) else InvalidRequest
        raise kind(message, hint=hint or output, code=code)
    raise BrokenInstall(f"the {folder.WORD} of {folder.name} has ended before it was at work", hint=output)


def serve(answer_fd: str, work: Callable[[Callable[[], None]], object]) -> NoReturn:
    """Be a sidecar that `start` has started: reparented to init, in its own session.

    ``work`` calls its argument when it is ready. ``answer_fd`` gets the words ``ready`` and the pid, or ``refused``, an
    exit code, a code, a message and a hint, with NUL between them.
    """
    if os.fork():
        os._exit(0)
    answer = int(answer_fd)
    os.set_inheritable(answer, False)

    def tell(*words: object) -> None:
        with contextlib.suppress(OSError):  # the caller may be gone
            os.write(answer, "\0".join(map(str, words)).encode())
        os.close(answer)

    code = 0
    try:
        work(lambda: tell("ready", os.getpid()))
    except GpucrError as e:
        code = e.exit_code
        with contextlib.suppress(OSError):
            os.write(2, f"error: {e}\n".encode())
            tell("refused", e.exit_code, e.code, e, e.hint or "")
    os._exit(code)


class SidecarStarted(Struct, frozen=True):
    """A job whose sidecar was missing. ``pid``: the new one's; None: it was not started, and ``problem`` says why."""

    name: str
    pid: int | None
    problem: str | None = None


def start_missing(folders: Iterable[FolderT], should_run: Callable[[FolderT], bool]) -> tuple[SidecarStarted, ...]:
    """Start those that should run and do not: after a boot, or a crash."""
    found = []
    for folder in folders:
        try:
            if should_run(folder) and folder.running() is None:
                found.append(SidecarStarted(folder.name, start(folder)))
        except GpucrError as e:
            found.append(SidecarStarted(folder.name, None, str(e)))
    return tuple(found)


def end(
    folders: Iterable[SidecarFolder[Any, Any]], number: signal.Signals, *, all_run: bool, timeout_s: float | None
) -> tuple[str, ...]:
    """Send sidecars this signal, and wait for them. Returns the names of the jobs that had one.

    ``all_run``: raise InvalidRequest if one of them has no sidecar. Raises DeadlineExceeded if one is still at work.
    """
    asked: dict[str, ProcessId] = {}
    for folder in folders:
        running = folder.running()
        if running is not None:
            processes.send_signal(running, number)
            asked[folder.name] = running
        elif all_run:
            folder.settings()
            raise folder.none(f"the job {folder.name} has no {folder.WORD}")
        word = folder.WORD
    deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
    while left := _alive(asked):
        if deadline_s is not None and time.monotonic() > deadline_s:
            raise DeadlineExceeded(f"the {word}s of {', '.join(left)} are still at work", hint="give them more time")
        time.sleep(_POLL_S)
    return tuple(asked)


def _alive(asked: Mapping[str, ProcessId]) -> list[str]:
    return [name for name, running in asked.items() if processes.is_alive(running)]

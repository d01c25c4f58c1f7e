"""End jobs and wait for their end, supervised or not: a restarted job has not ended."""

from __future__ import annotations

import contextlib
import time

from gpucr import Cancellation
from gpucr.errors import DeadlineExceeded, InvalidRequest
from gpucr.jobs.record import JobState
from gpucr.jobs.registered import find_by_pid_or_name
from gpucr.operations.end_job import GRACE_S, await_end, end_job
from gpucr.supervise.folder import UNFINISHED, SupervisedFolder
from gpucr.supervise.start import end_supervisors

_POLL_S = 0.1
_RUNS = ("running", "suspended")


def stop_job(job: int | str, *, grace_s: float = GRACE_S, cancel: Cancellation | None = None) -> JobState:
    """End a registered job: SIGTERM to its first process, and after ``grace_s`` seconds SIGKILL to the rest.

    With a ``grace_s`` of 0 there is no SIGTERM. A supervisor is ended first, and does not bring the job back. Record,
    log and snapshots stay. Returns how the job ended.

    Raises InvalidRequest if there is no such job, or it does not run; Interrupted (a signal, ``cancel``) during the
    grace time: SIGTERM was sent; JobDamaged if a process hangs in the kernel.
    """
    listed = find_by_pid_or_name(job)
    folder = SupervisedFolder(listed.name)
    if folder.exists():
        if folder.running() is not None:
            end_supervisors([listed.name], "leave")
        with folder.held():
            was_supervised = folder.state().phase in (*UNFINISHED, "left")
            if was_supervised:
                folder.change_phase("stopped")
        listed = find_by_pid_or_name(listed.name)
        if was_supervised and listed.state.word not in _RUNS:
            return listed.state  # it was about to be restarted
    return end_job(listed.name, grace_s=grace_s, cancel=cancel)


def wait_job(job: int | str, *, timeout_s: float | None = None, cancel: Cancellation | None = None) -> JobState:
    """Wait until a registered job has ended for good, not to be restarted by its supervisor. Returns what became of it.

    Raises InvalidRequest if there is no such job, DeadlineExceeded if it still runs after ``timeout_s``, Interrupted (a
    signal, ``cancel``).
    """
    name = find_by_pid_or_name(job).name
    folder = SupervisedFolder(name)
    end = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        left_s = None if end is None else max(0.0, end - time.monotonic())
        state = await_end(name, timeout_s=left_s, cancel=cancel)
        listed = find_by_pid_or_name(name)
        if state.word == "dumped" and listed.record is not None and listed.record.lent is not None:
            if end is not None and time.monotonic() > end:
                raise DeadlineExceeded(f"the job {name} has made room for a borrower", hint="wait longer")
            time.sleep(_POLL_S)  # it will be restarted
            continue
        with contextlib.suppress(InvalidRequest):  # never supervised, or its files are damaged
            if folder.state().phase in UNFINISHED and folder.running() is not None:
                if end is not None and time.monotonic() > end:
                    raise DeadlineExceeded(f"the job {name} is being restarted", hint="wait longer")
                time.sleep(_POLL_S)
                continue
        return find_by_pid_or_name(name).state if state.word in _RUNS else state

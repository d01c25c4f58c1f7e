"""Ending jobs, and waiting for their end."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterable

from gpucr.errors import DeadlineExceeded, JobDamaged, ProcessNotFound
from gpucr.jobs import registered
from gpucr.jobs.record import JobRecord, JobState, state_of
from gpucr.linux import processes
from gpucr.model import ProcessId
from gpucr.undo.cancellation import Cancellation
from gpucr.undo.interrupts import Interrupts
from gpucr.undo.operation import all_or_nothing

GRACE_S = 10.0
"""How long a job may take to end after SIGTERM."""
_REST_LIMIT_S = 10.0
_POLL_S = 0.05


def end_job(job: int | str, *, grace_s: float = GRACE_S, cancel: Cancellation | None = None) -> JobState:
    """End a registered job: SIGTERM to its first process, and after ``grace_s`` seconds SIGKILL to the rest.

    With a ``grace_s`` of 0 there is no SIGTERM. Its record, its log and its snapshots stay. Returns how it ended.

    Raises InvalidRequest if there is no such job, or it does not run; Interrupted (a signal, ``cancel``) during the
    grace time: SIGTERM was sent; JobDamaged if a process hangs in the kernel.
    """
    state = f"the job had SIGTERM and {grace_s:g} s to end" if grace_s > 0 else "the job runs"
    with all_or_nothing("stop", job, cancel, state=state) as interrupts:
        record = _running(job)
        known = _tree(record)
        if grace_s > 0:
            processes.send_signal(record.root, signal.SIGTERM)
            _wait(lambda: not processes.is_alive(record.root), grace_s, interrupts)
        interrupts.conclude()
        left = end_processes(record, known)
        if left:
            names = [f"process {each.pid} does not end" for each in left]
            raise JobDamaged(f"the job {record.name} does not end", failures=names, hint="it hangs in the kernel")
    return state_of(record)


def signal_job(job: int | str, number: signal.Signals) -> int:
    """Send a signal to the first process of a registered job. Returns its pid. Raises InvalidRequest."""
    record = _running(job)
    processes.send_signal(record.root, number)
    return record.pid


def end_processes(record: JobRecord, known: Iterable[ProcessId] = ()) -> tuple[ProcessId, ...]:
    """SIGKILL the rest of a job, and wait. Returns the processes that hang in the kernel.

    ``known``: processes seen in its tree. Without its own namespaces, orphans of its first process are found by these
    and by the session.
    """
    left: tuple[ProcessId, ...] = ()
    if processes.is_alive(record.root):
        left += processes.kill_tree(record.root.pid, including_root=True)
    if record.isolated and record.keeper is not None:
        # Its keeper ends the rest, and records how the job ended: kill it only if it does not finish.
        _wait(lambda: not processes.is_alive(record.keeper), _REST_LIMIT_S)  # type: ignore[arg-type]
        return left + processes.kill_and_wait([record.keeper])
    left += processes.kill_and_wait({*known, *_session(record.root)})
    if record.keeper is not None:
        _wait(lambda: not processes.is_alive(record.keeper), _REST_LIMIT_S)  # type: ignore[arg-type]
    return left


def await_end(job: int | str, *, timeout_s: float | None = None, cancel: Cancellation | None = None) -> JobState:
    """Wait until a registered job has ended, and return what became of it.

    Raises InvalidRequest if there is no such job, DeadlineExceeded if it still runs after ``timeout_s``, Interrupted (a
    signal, ``cancel``).
    """
    with all_or_nothing("wait", job, cancel, state="the job is as it was") as interrupts:
        record = registered.find_by_pid_or_name(job).record
        if record is None:
            return registered.find_by_pid_or_name(job).state
        if not _wait(lambda: state_of(record).word != "running", timeout_s, interrupts):
            raise DeadlineExceeded(f"the job {record.name} still runs", hint="wait longer (--timeout)")
        interrupts.conclude()
    return state_of(record)


def _running(job: int | str) -> JobRecord:
    if isinstance(job, int) or job.isdecimal():
        job = registered.find_by_pid_or_name(job).name
    return registered.find_running(job)


def _tree(record: JobRecord) -> tuple[ProcessId, ...]:
    with contextlib.suppress(ProcessNotFound):
        return tuple(process.id for process in processes.tree(record.pid))
    return ()


def _session(root: ProcessId) -> list[ProcessId]:
    """The rest of the session that the job's first process led. Its id cannot be reused meanwhile."""
    if processes.read_stat(root.pid) is not None:
        return []
    found = []
    for pid in processes.all_pids():
        stat = processes.read_stat(pid)
        if stat is not None and stat.session_id == root.pid and stat.start_time_ticks >= root.start_time_ticks:
            found.append(ProcessId(pid, stat.start_time_ticks))
    return found


def _wait(is_over: Callable[[], bool], timeout_s: float | None, interrupts: Interrupts | None = None) -> bool:
    end = None if timeout_s is None else time.monotonic() + timeout_s
    while not is_over():
        if interrupts is not None:
            interrupts.check()
        if end is not None and time.monotonic() > end:
            return False
        time.sleep(_POLL_S)
    return True

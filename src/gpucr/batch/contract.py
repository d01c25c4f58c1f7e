"""Run a job under a batch system: start or restore it, and dump it when its allocation ends.

The operations run in a separate thread, so that signals reach only `EndNotice`: a second SIGTERM from an impatient
batch system must not interrupt the dump that the first one requested.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

from gpucr import Cancellation
from gpucr.batch.allocation import Allocation
from gpucr.batch.relay import Relay
from gpucr.batch.snapshots import JobSnapshots
from gpucr.errors import GpucrError, Interrupted
from gpucr.jobs.record import JobRecord
from gpucr.jobs.registered import registry, registry_in_use
from gpucr.linux import durable, libc
from gpucr.linux.private_folders import state_folder
from gpucr.operations.dump import dump
from gpucr.operations.end_job import end_processes
from gpucr.operations.launch import forget_job, list_jobs, run_job
from gpucr.operations.places import count_used_gpus, in_store
from gpucr.operations.restore import restore

if TYPE_CHECKING:
    from gpucr import Manifest, Secret

T = TypeVar("T")

REQUEUE_EXIT = 99
"""Slurm requeues a job that ends with this code where slurm.conf says ``RequeueExit=99``."""

ENVIRONMENT_VARIABLE = "GPUCR_ENV_FILE"
"""Names the file with the batch system's variables of the job's current allocation."""

_LOOK_EVERY_S = 0.2
_PAUSE_S = 2.0
"""Between a failed dump and the next attempt."""

_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class BatchJob:
    """What to run, and how its allocation ends. Durations in seconds.

    ``grace_s``: how long a dump may take once the end is known. ``before_end_s``: how long before the time limit the
    dump begins. ``every_s``: the interval of periodic dumps. They leave the job running, or with ``checkpoint_exit``
    end it with that code, for a batch system that then transfers the snapshot and starts the job again. ``signals``:
    those that announce the end. ``only_while``: descriptors of processes (pidfds). Once one of these has ended, the job
    may already run elsewhere, so it is ended at once, without a dump.
    """

    command: tuple[str, ...]
    store: str
    allocation: Allocation
    grace_s: float
    before_end_s: float | None = None
    every_s: float | None = None
    checkpoint_exit: int | None = None
    signals: tuple[signal.Signals, ...] = (signal.SIGUSR1, signal.SIGTERM)
    requeue_exit: int = REQUEUE_EXIT
    run_options: tuple[tuple[str, Any], ...] = ()
    only_while: tuple[int, ...] = ()


def run_batch(
    job: BatchJob, say: Callable[[str], None], *, key: Secret | None = None, notice: EndNotice | None = None
) -> int:
    """Run the job until it or its allocation ends. Returns the exit code for the batch system.

    This is the job's own code (128 + the signal's number if a signal ended it), or ``requeue_exit`` if the job was
    dumped, or ended without a new dump, and has to be started again with the same id. An existing snapshot of the id is
    restored, and removed when the job succeeds. ``say`` gets a line for each event that belongs in the job's log.
    ``notice``: the caller is listening already.

    Needs what `gpucr.run_job`, `gpucr.dump` and `gpucr.restore` need. Raises as they do, and InvalidRequest for a
    snapshot of another command line.
    """
    with contextlib.ExitStack() as opened:
        notice = notice or opened.enter_context(EndNotice(job.signals))
        place = job.allocation
        # If the batch system would have brought the store and there is none, there was no snapshot.
        travels = place.has_alone(job.store)
        snapshots = JobSnapshots(job.store, place.id, key, may_make=place.is_first or travels, travels=travels)
        return _Run(job, say, notice, snapshots).to_its_end()


class EndNotice:
    """Whether a signal has announced the end of the allocation."""

    def __init__(self, signals: Collection[signal.Signals]) -> None:
        self._signals = signals
        self._before: dict[signal.Signals, Any] = {}
        self._raises = False
        self.reason: str | None = None

    def __enter__(self) -> EndNotice:
        self._before = {number: signal.signal(number, self._take) for number in self._signals}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def interrupting(self) -> Iterator[None]:
        """The first signal during the block raises KeyboardInterrupt."""
        self._raises = True
        yield
        self._raises = False

    def _take(self, number: int, _frame: FrameType | None) -> None:
        is_first, self.reason = self.reason is None, self.reason or signal.Signals(number).name
        if self._raises and is_first:
            raise KeyboardInterrupt(self.reason)


class _Run:
    def __init__(self, job: BatchJob, say: Callable[[str], None], notice: EndNotice, snapshots: JobSnapshots) -> None:
        self._job = job
        self._say = say
        self._notice = notice
        self._snapshots = snapshots
        self._next_s = time.monotonic() + (job.every_s or 0)

    def to_its_end(self) -> int:
        if self._notice.reason is not None:
            with contextlib.suppress(GpucrError, OSError):  # the next start is not the first, and reports it
                self._aside(self._snapshots.make_store)
            return self._not_begun(self._notice.reason)
        # Keepers and restored processes become our children, and so part of the batch system's step.
        libc.check(libc.function("prctl")(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl")
        cancellation = Cancellation()
        try:
            record, relay = self._aside(lambda: self._begin(cancellation), cancellation)
        except Interrupted:
            return self._not_begun(cancellation.reason)
        with relay:
            try:
                return self._watch(record)
            except BaseException:  # nobody would watch the job, or learn of the end of its allocation
                end_processes(record)
                self._say(f"{record.name} is ended, too; {self._snapshots.next_start()}")
                raise

    def _not_begun(self, reason: str | None) -> int:
        self._say(f"{reason} came before the job ran: it has to be started again")
        return self._job.requeue_exit

    def _begin(self, cancel: Cancellation) -> tuple[JobRecord, Relay]:
        latest = self._snapshots.latest(self._job.command)
        environment_file = _environment_file(self._job.allocation)
        if latest is None:
            self._forget_lost_start()
            if self._job.allocation.has_alone(Path.cwd()):
                self._say(
                    f"warning: the job runs in {Path.cwd()}, which only this place has: it can be restored in no other"
                )
            environment = {**os.environ, ENVIRONMENT_VARIABLE: str(environment_file)}
            options = dict(self._job.run_options)
            started = run_job(
                self._job.command,
                name=self._snapshots.job_name,
                environment=environment,
                ends_with_caller=True,
                cancel=cancel,
                **options,
            )
            self._say(f"started as {started.record.name}: there is no snapshot of {self._job.allocation.id}")
            return started.record, Relay(started.record.log, 0)
        log = latest.manifest.launch.log_path if latest.manifest.launch is not None else ""
        size = os.path.getsize(log) if os.path.isfile(log) else 0
        begin = time.monotonic()
        report = restore(latest, gpu=self._gpus_for(latest.manifest), ends_with_caller=True, cancel=cancel)
        for warning in report.warnings:
            self._say(f"warning: {warning}")
        self._say(f"restored from {latest.where} in {time.monotonic() - begin:.1f} s")
        record = _record(report.name or self._snapshots.job_name)
        return record, Relay(record.log, min(size, record.log.stat().st_size))

    def _forget_lost_start(self) -> None:
        """Remove the record of a start on a failed node, which is visible to nodes that share a home folder."""
        name = self._snapshots.job_name
        if not self._job.allocation.is_first and any(
            job.name == name and job.state.word == "elsewhere" for job in list_jobs()
        ):
            forget_job(name, force=True)

    def _gpus_for(self, manifest: Manifest) -> str | None:
        """The GPUs of the allocation that the job goes to: the first ones, if it uses fewer than it was given."""
        given = self._job.allocation.gpus
        if given is None or not manifest.has_gpu_state:
            return None
        return ",".join(given.split(",")[: count_used_gpus(manifest)]) or None

    def _aside(self, call: Callable[[], T], cancel: Cancellation | None = None, *, gives_way: bool = True) -> T:
        """Call it in a thread. It is cancelled if the allocation is lost, and by a signal if it ``gives_way``."""
        results: list[T] = []
        errors: list[BaseException] = []

        def work() -> None:
            try:
                results.append(call())
            except BaseException as e:  # noqa: BLE001 - raised in the caller's thread
                errors.append(e)

        thread = threading.Thread(target=work, name="batch")
        thread.start()
        while thread.is_alive():
            thread.join(_LOOK_EVERY_S)
            if cancel is not None and self._is_lost():
                cancel.cancel("the loss of the place")
            elif cancel is not None and gives_way and self._notice.reason is not None:
                cancel.cancel(self._notice.reason)
        if errors:
            raise errors[0]
        return results[0]

    def _watch(self, record: JobRecord) -> int:
        while True:
            self._wait(record)
            _collect()
            if (code := _exit_code(record.name, dumped=self._job.requeue_exit)) is not None:
                return self._ended(code)
            if self._is_lost():
                self._say(f"the place is lost, and the job is ended: {self._snapshots.next_start()}")
                end_processes(record)
                return self._job.requeue_exit
            if (reason := self._reason()) is not None and (code := self._leave(record, reason)) is not None:
                return code
            if (every_s := self._job.every_s) is not None and time.monotonic() >= self._next_s:
                ending = self._job.checkpoint_exit
                if self._dump(record, None, leave_running=ending is None) and ending is not None:
                    return ending
                self._next_s = time.monotonic() + every_s

    def _reason(self) -> str | None:
        end_s, before_s = self._job.allocation.end_s, self._job.before_end_s
        if (
            self._notice.reason is None
            and end_s is not None
            and before_s is not None
            and time.time() >= end_s - before_s
        ):
            return f"the time limit is {max(0, end_s - time.time()):.0f} s away"
        return self._notice.reason

    def _is_lost(self) -> bool:
        return bool(select.select(self._job.only_while, [], [], 0)[0])

    def _wait(self, record: JobRecord) -> None:
        """Wait briefly for the end of the job's first process or the loss of the allocation."""
        try:
            descriptor = os.pidfd_open(record.pid)
        except ProcessLookupError:
            time.sleep(_LOOK_EVERY_S if _exit_code(record.name, dumped=self._job.requeue_exit) is None else 0)
            return
        try:
            select.select([descriptor, *self._job.only_while], [], [], _LOOK_EVERY_S)
        finally:
            os.close(descriptor)

    def _leave(self, record: JobRecord, reason: str) -> int | None:
        """Dump the job and end it. None: it has already ended by itself."""
        self._say(f"{reason}: the job is dumped, for {self._job.grace_s:.0f} s at most")
        end_s = time.monotonic() + self._job.grace_s
        while (left_s := end_s - time.monotonic()) > 0:
            if self._dump(record, left_s, leave_running=False):
                return self._job.requeue_exit
            if _exit_code(record.name, dumped=self._job.requeue_exit) is not None:
                return None
            if self._is_lost():
                break
            time.sleep(min(_PAUSE_S, max(0.0, end_s - time.monotonic())))
        self._say(f"the job could not be dumped in time, and is ended: {self._snapshots.next_start()}")
        end_processes(record)
        return self._job.requeue_exit

    def _dump(self, record: JobRecord, limit_s: float | None, *, leave_running: bool) -> bool:
        """One attempt. A dump that leaves the job running is cancelled when the end of the allocation is announced."""
        cancellation = Cancellation()
        begin = time.monotonic()
        try:
            report = self._aside(
                lambda: dump(
                    record.name,
                    self._snapshots.place,
                    leave_running=leave_running,
                    key=self._snapshots.key,
                    timeout_s=limit_s,
                    cancel=cancellation,
                ),
                cancellation,
                gives_way=leave_running,
            )
        except (GpucrError, OSError) as e:
            self._say(f"no dump: {_said(e)}")
            return False
        self._say(f"dumped to {report.snapshot.where} in {time.monotonic() - begin:.1f} s")
        made = in_store(report.snapshot)
        try:
            self._aside(lambda: self._snapshots.keep_the_last(made.stored))
        except (GpucrError, OSError) as e:
            self._say(f"older snapshots stay: {_said(e)}")
        return True

    def _ended(self, code: int) -> int:
        """The job has ended with this code. Returns the one for the batch system."""
        with contextlib.suppress(OSError):
            _environment_file_path(self._job.allocation).unlink(missing_ok=True)
        told = self._notice.reason
        if told is not None and code == 128 + signal.Signals[told]:
            self._say(f"{told} has ended the job, too, before it could be dumped: {self._snapshots.next_start()}")
            return self._job.requeue_exit
        if code != 0 and self._snapshots.known:
            self._say(f"the job ended with {code}; {self._snapshots.next_start()}")
        elif told is not None and self._snapshots.known:
            # It may have obeyed the signal instead of finishing: only the batch system knows what comes next.
            self._say(f"the job ended with 0 after {told}, and its snapshot stays: {self._snapshots.next_start()}")
        elif code == 0:
            try:
                self._aside(self._snapshots.remove_all)
            except (GpucrError, OSError) as e:
                self._say(f"the snapshots of {self._job.allocation.id} stay: {_said(e)}")
                return code
            with contextlib.suppress(GpucrError, OSError):  # its record and log do no harm
                self._aside(lambda: forget_job(self._snapshots.job_name))
        return code


def _said(error: GpucrError | OSError) -> str:
    if isinstance(error, OSError):
        return str(error)
    return f"{error.message} ({error.hint})" if error.hint else error.message


def _record(name: str) -> JobRecord:
    with registry_in_use():
        return registry().find(name).readable()


def _exit_code(name: str, *, dumped: int) -> int | None:
    """The job's exit code; None: it still runs. ``dumped``: the code if another gpucr has dumped it."""
    with registry_in_use():
        found = registry().find(name)
    state = found.state
    if state.word in ("running", "suspended"):
        return None
    if state.word == "dumped":
        return dumped
    if state.signal is not None:
        return 128 + state.signal
    return state.exit_code if state.exit_code is not None else 1


def _collect() -> None:
    """Reap ended processes that we have adopted."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _environment_file_path(allocation: Allocation) -> Path:
    return state_folder() / "batch" / f"{allocation.id}.env"


def _environment_file(allocation: Allocation) -> Path:
    path = _environment_file_path(allocation)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    durable.write(path, allocation.as_shell().encode())
    return path

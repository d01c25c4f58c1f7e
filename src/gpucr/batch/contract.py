"""Run a job under a batch system: start or restore it, and dump it when its allocation ends.

On several nodes each has its part of the job, and node 0 decides what all do (rules.py); on one node, this one does.
The operations run in a separate thread, so that signals reach only `EndNotice`: a second SIGTERM from an impatient
batch system must not interrupt the dump that the first one requested.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from gpucr import Cancellation, Contact
from gpucr.batch.allocation import Allocation
from gpucr.batch.aside import Aside
from gpucr.batch.company import Company
from gpucr.batch.notice import EndNotice
from gpucr.batch.one_job import OneJob
from gpucr.batch.part import Part
from gpucr.batch.relay import Relay
from gpucr.batch.rules import Kind, News, Order, Rules, cut
from gpucr.batch.snapshots import JobSnapshots
from gpucr.errors import GpucrError, Interrupted, NodeFailed, NotPermitted
from gpucr.jobs.record import JobRecord
from gpucr.jobs.registered import registry, registry_in_use
from gpucr.linux import libc
from gpucr.operations.dump import DumpReport
from gpucr.operations.end_job import end_processes
from gpucr.operations.places import in_store

if TYPE_CHECKING:
    from gpucr import Rendezvous, Secret, StoredSnapshot

T = TypeVar("T")

REQUEUE_EXIT = 99
"""Slurm requeues a job that ends with this code where slurm.conf says ``RequeueExit=99``."""

_LOOK_EVERY_S = 0.2
_LAST_WORD_S = 5.0
"""How long a node whose restore has failed because of another one waits for what all end with."""
_MEET_S = 120.0
"""How long nodes wait for each other at the start: a batch system starts its tasks one after the other."""

_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class BatchJob:
    """What to run, and how its allocation ends. Durations in seconds.

    ``grace_s``: how long a dump may take once the end is known. ``before_end_s``: how long before the time limit the
    dump begins. ``every_s``: the interval of periodic dumps. They leave the job running, or with ``checkpoint_exit``
    end it with that code, for a batch system that then transfers the snapshot and starts the job again. ``signals``:
    those that announce the end. ``only_while``: descriptors of processes (pidfds). Once one of these has ended, the job
    may already run elsewhere, so it is ended at once, without a dump. ``one_job``: it has a part on each of several
    nodes, and this is one of these.
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
    one_job: OneJob | None = None


def run_batch(
    job: BatchJob, say: Callable[[str], None], *, key: Secret | None = None, notice: EndNotice | None = None
) -> int:
    """Run the job until it or its allocation ends. Returns the exit code for the batch system.

    This is the job's own code (128 + the signal's number if a signal ended it), or ``requeue_exit`` if the job was
    dumped, or ended without a new dump, and has to be started again with the same id. An existing snapshot of the id is
    restored, and removed when the job succeeds. ``say`` gets a line for each event that belongs in the job's log.
    ``notice``: the caller is listening already.

    Needs what `gpucr.run_job`, `gpucr.dump` and `gpucr.restore` need, for one job on several nodes `gpucr.dump_part`
    and `gpucr.restore_part`, as root. Raises as they do, and InvalidRequest for a snapshot of another command line, or
    of another number of nodes.
    """
    if job.one_job is not None:
        _require_root()
    with contextlib.ExitStack() as opened:
        notice = notice or opened.enter_context(EndNotice(job.signals))
        place = job.allocation
        # If the batch system would have brought the store and there is none, there was no snapshot.
        travels = place.has_alone(job.store)
        snapshots = JobSnapshots(
            job.store, place.id, key, one_job=job.one_job, may_make=place.is_first or travels, travels=travels
        )
        return _Run(job, say, notice, snapshots).to_its_end()


class _OthersEnded(Exception):
    """The order that it is over, before this node's part ran."""

    def __init__(self, order: Order) -> None:
        super().__init__(order.text)
        self.order = order


@dataclass(frozen=True)
class _Attempt:
    order: Order
    aside: Aside[DumpReport]
    begin_s: float


class _Run:
    def __init__(self, job: BatchJob, say: Callable[[str], None], notice: EndNotice, snapshots: JobSnapshots) -> None:
        self._job = job
        self._say_line = say
        self._notice = notice
        self._snapshots = snapshots
        self._company: Company | None = None
        self._attempt: _Attempt | None = None
        self._stored: StoredSnapshot | None = None
        """Of the last attempt that succeeded here."""
        self._has_ended = False
        """The part here: by itself, or dumped."""
        self._told_leave: set[int] = set()
        """By the time limit (0), by a signal (1)."""
        self._leaves = False

    def _say(self, line: str) -> None:
        here = self._job.one_job
        self._say_line(line if here is None else f"node {here.node}: {line}")

    def to_its_end(self) -> int:
        if self._notice.reason is not None:
            if self._job.one_job is None or self._job.one_job.node == 0:
                with contextlib.suppress(GpucrError, OSError):  # the next start is not the first, and reports it
                    self._aside(lambda _: self._snapshots.make_store())
            return self._not_begun(self._notice.reason)
        # Keepers and restored processes become our children, and so part of the batch system's step.
        libc.check(libc.function("prctl")(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl")
        with contextlib.ExitStack() as opened:
            try:
                company, part = self._join(opened)
                self._company = company
                record, relay = self._begin(company, part)
            except _OthersEnded as e:
                return self._over_before_it_ran(e.order)
            except (Interrupted, KeyboardInterrupt):
                if self._company is not None and (over := self._company.over) is not None:
                    return self._over_before_it_ran(over)
                if (reason := self._why_stop()) is None:
                    raise
                self._tell("over", self._job.requeue_exit, f"{reason} came before its part ran")
                return self._not_begun(reason)
            except (GpucrError, OSError) as e:
                if isinstance(e, NodeFailed) and (last := self._last_word(self._company)) is not None:
                    return self._over_before_it_ran(last)
                code, message = (e.exit_code, e.message) if isinstance(e, GpucrError) else (1, str(e))
                self._tell("over", code, message)
                raise
            with relay:
                try:
                    return self._watch(company, part, record)
                except BaseException:  # nobody would watch the job, or learn of the end of its allocation
                    end_processes(record)
                    self._say(f"{record.name} is ended, too; {self._snapshots.next_start()}")
                    raise

    def _not_begun(self, reason: str | None) -> int:
        self._say(f"{reason} came before the job ran: it has to be started again")
        return self._job.requeue_exit

    def _over_before_it_ran(self, order: Order) -> int:
        self._say(f"the job did not run: {order.text}")
        return order.number

    # --- the start ------------------------------------------------------------------------------------------------

    def _join(self, opened: contextlib.ExitStack) -> tuple[Company, Part]:
        """Get into contact with the other nodes, if there are any."""
        job, snapshots = self._job, self._snapshots
        contact: Contact | None = None
        for_sets: Rendezvous | None = None
        if job.one_job is not None:
            here = job.one_job
            contact, for_sets = self._aside(lambda cancel: self._in_contact(here, cancel))
            opened.push(contact)
        rules = Rules(
            job.one_job.node_count if job.one_job is not None else 1,
            every_s=job.every_s,
            grace_s=job.grace_s,
            checkpoint_exit=job.checkpoint_exit,
            requeue_exit=job.requeue_exit,
            next_start=snapshots.next_start,
        )
        node = job.one_job.node if job.one_job is not None else 0
        part = Part(job.command, job.allocation, snapshots, dict(job.run_options), for_sets, job.every_s, self._say)
        return Company(node, rules if node == 0 else None, contact, job.requeue_exit), part

    def _in_contact(self, here: OneJob, cancel: Cancellation) -> tuple[Contact, Rendezvous]:
        def check() -> None:
            if cancel.is_cancelled:
                raise KeyboardInterrupt(cancel.reason)

        secret = self._snapshots.secret(_MEET_S, check)
        contact = Contact(here.rendezvous(secret, meet_s=_MEET_S), self._job.allocation.id, cancel=cancel)
        try:
            contact.__enter__()
        except NodeFailed as e:
            if e.code == "GPUCR-NODES-SECRET":
                e.hint = "do all nodes see the same store? Or another program has this port: give --rendezvous"
            raise
        return contact, here.for_sets(secret)

    def _begin(self, company: Company, part: Part) -> tuple[JobRecord, Relay]:
        if company.leads:
            company.order(Order("start", text=self._aside(lambda _: self._snapshots.latest()) or ""))
        wanted = self._ordered_start(company)
        record, relay = self._aside(lambda cancel: part.begin(wanted, cancel))
        self._tell("runs")
        return record, relay

    def _ordered_start(self, company: Company) -> str | None:
        while True:
            for order in company.orders():
                if order.kind == "over":
                    raise _OthersEnded(order)
                return order.text or None
            if (reason := self._why_stop()) is not None:
                raise KeyboardInterrupt(reason)
            time.sleep(_LOOK_EVERY_S)

    def _last_word(self, company: Company | None) -> Order | None:
        """When another node has failed: what all end with. None: nobody says it."""
        end_s = time.monotonic() + _LAST_WORD_S
        while company is not None and time.monotonic() < end_s:
            if (over := company.over) is not None:
                return over
            time.sleep(_LOOK_EVERY_S)
        return None

    # --- while it runs --------------------------------------------------------------------------------------------

    def _watch(self, company: Company, part: Part, record: JobRecord) -> int:
        while True:
            self._wait(record)
            if self._attempt is None:
                _collect()
            self._tell_all(record)
            for order in company.orders():
                if order.kind == "dump":
                    self._begin_attempt(part, order)
                elif order.kind == "stop" and self._attempt is not None:
                    self._attempt.aside.cancellation.cancel(order.text)
                elif order.kind == "made" and company.leads:
                    self._keep_the_last()
                elif order.kind == "over":
                    return self._finish(order, part, record)

    def _wait(self, record: JobRecord) -> None:
        """Wait briefly for the end of the attempt, of the job's first process, or the loss of the allocation."""
        if self._attempt is not None:
            self._attempt.aside.is_done(_LOOK_EVERY_S)
            return
        try:
            descriptor = None if self._has_ended else os.pidfd_open(record.pid)
        except ProcessLookupError:
            if _exit_code(record.name, dumped=self._job.requeue_exit) is not None:
                return
            descriptor = None
        try:
            watched = [] if descriptor is None else [descriptor]
            select.select([*watched, *self._job.only_while], [], [], _LOOK_EVERY_S)
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def _tell_all(self, record: JobRecord) -> None:
        """Tell node 0 what has happened here."""
        if self._attempt is not None and self._attempt.aside.is_done():
            self._end_attempt(self._attempt)
        told = self._notice.reason
        for reason, is_signal in ((told, 1), (self._near_limit(), 0)):
            if reason is not None and is_signal not in self._told_leave:
                self._told_leave.add(is_signal)
                self._tell("leave", is_signal, reason)
        if self._is_lost():
            self._tell("over", self._job.requeue_exit, "the place is lost, and the job is ended")
        elif not self._has_ended and self._attempt is None:
            code = _exit_code(record.name, dumped=self._job.requeue_exit)
            if code is None:
                return
            self._has_ended = True
            if told is not None and code == 128 + signal.Signals[told]:
                what = f"{told} has ended the job, too, before it could be dumped"
                self._tell("over", self._job.requeue_exit, what)
            else:
                self._tell("ended", code)
                if self._job.one_job is not None:
                    self._say(f"its part has ended with {code}")

    def _tell(self, kind: Kind, number: int = 0, text: str = "") -> None:
        if self._company is not None:
            self._company.say(News(kind, number, cut(text)))

    def _near_limit(self) -> str | None:
        end_s, before_s = self._job.allocation.end_s, self._job.before_end_s
        if end_s is not None and before_s is not None and time.time() >= end_s - before_s:
            return f"the time limit is {max(0, end_s - time.time()):.0f} s away"
        return None

    def _is_lost(self) -> bool:
        return bool(select.select(self._job.only_while, [], [], 0)[0])

    def _why_stop(self) -> str | None:
        """Why what has just begun is cut short."""
        if self._is_lost():
            return "the loss of the place"
        if self._notice.reason is not None:
            return self._notice.reason
        over = self._company.over if self._company is not None else None
        return None if over is None else over.text or "the end of the job"

    def _aside(self, call: Callable[[Cancellation], T]) -> T:
        """Call it in a thread. It is cancelled if there is no use in it any more."""
        aside = Aside(call)
        while not aside.is_done(_LOOK_EVERY_S):
            if (reason := self._why_stop()) is not None:
                aside.cancellation.cancel(reason)
        return aside.wait()

    # --- dumps ----------------------------------------------------------------------------------------------------

    def _begin_attempt(self, part: Part, order: Order) -> None:
        if order.text and not self._leaves:
            self._leaves = True
            self._say(f"{order.text}: the job is dumped, for {self._job.grace_s:.0f} s at most")
        aside = Aside(lambda cancel: part.dump(order.limit_s, cancel, leave_running=order.leave_running))
        self._attempt = _Attempt(order, aside, time.monotonic())

    def _end_attempt(self, attempt: _Attempt) -> None:
        self._attempt = None
        try:
            report = attempt.aside.wait()
        except (GpucrError, OSError) as e:
            self._say(f"no dump: {_said(e)}")
            self._tell("failed", attempt.order.number)
            return
        self._say(f"dumped to {report.snapshot.where} in {time.monotonic() - attempt.begin_s:.1f} s")
        self._stored = in_store(report.snapshot).stored
        self._has_ended |= not attempt.order.leave_running
        self._tell("dumped", attempt.order.number)

    def _keep_the_last(self) -> None:
        try:
            self._aside(lambda _: self._snapshots.keep_the_last(self._stored))
        except (GpucrError, OSError) as e:
            self._say(f"older snapshots stay: {_said(e)}")

    # --- the end --------------------------------------------------------------------------------------------------

    def _finish(self, over: Order, part: Part, record: JobRecord) -> int:
        if self._attempt is not None:
            self._attempt.aside.cancellation.cancel(over.text or "the end of the job")
            self._end_attempt(self._attempt)
        if over.text and not over.by_itself:
            self._say(over.text)
        if not self._has_ended:
            if over.by_itself:
                self._say("another part has failed, and this one is ended")
            end_processes(record)
        return self._ended(over.number, over.text or None, part) if over.by_itself else over.number

    def _ended(self, code: int, told: str | None, part: Part) -> int:
        """The job has ended with this code, after this signal. Returns the one for the batch system."""
        part.forget_environment()
        if code != 0 and self._snapshots.known:
            self._say(f"the job ended with {code}; {self._snapshots.next_start()}")
        elif told is not None and self._snapshots.known:
            # It may have obeyed the signal instead of finishing: only the batch system knows what comes next.
            self._say(f"the job ended with 0 after {told}, and its snapshot stays: {self._snapshots.next_start()}")
        elif code == 0:
            try:
                self._aside(lambda _: self._snapshots.remove_all())
            except (GpucrError, OSError) as e:
                self._say(f"the snapshots of {self._job.allocation.id} stay: {_said(e)}")
                return code
            with contextlib.suppress(GpucrError, OSError):  # its record and log do no harm
                self._aside(lambda _: part.forget())
        return code


def _require_root() -> None:
    if os.geteuid() != 0:
        raise NotPermitted(
            "only root can block the connections between nodes, which a job on several nodes needs",
            pid=os.getpid(),
            hint="run it as root; jobs on one node need root's helper alone",
        )


def _said(error: GpucrError | OSError) -> str:
    if isinstance(error, OSError):
        return str(error)
    return f"{error.message} ({error.hint})" if error.hint else error.message


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
    """Reap ended processes that we have adopted. Not while a dump waits for the end of its own."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass

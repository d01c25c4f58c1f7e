"""A borrower waits for its turn, makes the jobs on its GPUs yield, runs a command, and brings the jobs back."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec import Struct

from gpucr import Cancellation
from gpucr.borrow import ledger, lend, policy
from gpucr.borrow.guard import guarded
from gpucr.borrow.ledger import Borrowing
from gpucr.borrow.lend import Say, Seen, folder_of, look, plan, read_key
from gpucr.borrow.recovery import end_command, recover, settle
from gpucr.errors import Busy, GpucrError, Interrupted, Unsupported
from gpucr.jobs.log import job_log
from gpucr.jobs.record import JobState, Network, check_priority
from gpucr.jobs.registered import registry, registry_in_use
from gpucr.linux import processes
from gpucr.linux.own_python import without_passphrase
from gpucr.linux.work import Work
from gpucr.operations import chosen
from gpucr.operations.launch import launch, plan_of_launch
from gpucr.operations.requests import LaunchRequest
from gpucr.records import DEFAULT_PRIORITY

BORROWERS_PRIORITY = 2 * DEFAULT_PRIORITY
"""A borrower's default priority: jobs started without a priority make room."""

_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_BY_SIGNAL = 128
_LOOK_EVERY_S, _LAST_LINES_S = 0.1, 5.0


def borrow_gpus(
    command: Sequence[str],
    gpus: str,
    *,
    priority: int = BORROWERS_PRIORITY,
    to: str | None = None,
    key_file: str | os.PathLike[str] | None = None,
    wait: bool = True,
    isolate: bool | None = None,
    network: Network | None = None,
    say: Callable[[str], None] | None = None,
    cancel: Cancellation | None = None,
) -> int:
    """Suspend lower-priority jobs on these GPUs (``"0,1"``), run a command there, and bring the jobs back afterwards.

    The jobs are suspended to host memory, or, if that is short, dumped to ``to`` (a folder, or a store that
    ``key_file`` opens). The command is a registered job, with CUDA_VISIBLE_DEVICES; its output also goes to stdout.
    SIGTERM, SIGINT and SIGHUP are passed on to it; ``cancel`` sends it SIGTERM. If jobs or borrowers of the same or a
    higher priority have a GPU, it waits for them, or without ``wait`` raises Unsupported. ``say`` gets a line for each
    event. If this process is killed, a guard ends the command and brings the jobs back.

    Returns the command's exit code (128 plus the signal's number if a signal ended it; 1 if it was dumped). Raises
    InvalidRequest, Unsupported, Interrupted, and errors of suspend or dump (before the command runs: nothing was
    changed, or all is back); and errors of bringing a job back.
    """
    request = BorrowRequest(tuple(command), gpus, priority, to, key_file, wait, isolate, network)
    return run_borrow(request, say or (lambda _: None), cancel)


@dataclass(frozen=True)
class BorrowRequest:
    """See `borrow_gpus`."""

    command: tuple[str, ...]
    gpus: str
    priority: int = BORROWERS_PRIORITY
    to: str | None = None
    key_file: str | os.PathLike[str] | None = None
    wait: bool = True
    isolate: bool | None = None
    network: Network | None = None


def run_borrow(request: BorrowRequest, say: Callable[[str], None], cancel: Cancellation | None = None) -> int:
    """See `borrow_gpus`."""
    key, uuids = _checked(request)
    recover(say)
    with guarded():
        me = ledger.enter(priority=request.priority, gpus=uuids, command=request.command)
        return _Borrower(me, request, key, say, cancel).to_the_end()


class BorrowPlan(Struct, frozen=True):
    """What `borrow_gpus` would do now, with GPUs by UUID.

    ``waits_for``: borrowers and jobs that have to end or finish first; what makes room then is not known yet. ``room``:
    what happens to each job that makes room, by name: None is host memory, else it is the place of a snapshot.
    """

    gpus: tuple[str, ...]
    waits_for: tuple[str, ...] = ()
    room: Mapping[str, str | None] = {}


def plan_borrow(
    command: Sequence[str],
    gpus: str,
    *,
    priority: int = BORROWERS_PRIORITY,
    to: str | None = None,
    key_file: str | os.PathLike[str] | None = None,
    wait: bool = True,
    isolate: bool | None = None,
    network: Network | None = None,
) -> BorrowPlan:
    """What `borrow_gpus` would do with the same arguments. Changes nothing; raises as it does before its first change.

    What killed borrowers have left is not brought back first.
    """
    return plan_of_borrow(BorrowRequest(tuple(command), gpus, priority, to, key_file, wait, isolate, network))


def plan_of_borrow(request: BorrowRequest) -> BorrowPlan:
    """See `plan_borrow`."""
    key, uuids = _checked(request)
    others, seen = ledger.borrowings(), _seen(uuids)
    me = ledger.would_be(others, priority=request.priority, gpus=uuids, command=request.command)
    blockers = policy.blockers(me, others, seen.jobs)
    if blockers and not request.wait:
        raise _has_to_wait(blockers, request.priority)
    if blockers or seen.busy:
        return BorrowPlan(uuids, blockers or seen.busy)
    with folder_of(request.to, stays=False):
        ways = plan(policy.victims(me, seen.jobs), request.to, key, Cancellation())
    return BorrowPlan(uuids, room={way.job.name: way.place for way in ways})


def _checked(request: BorrowRequest) -> tuple[str | None, tuple[str, ...]]:
    """The key file and the UUIDs, if these can be asked for."""
    check_priority(request.priority)
    key = None if request.key_file is None else str(Path(request.key_file).absolute())
    read_key(key)
    plan_of_launch(LaunchRequest(request.command, isolate=request.isolate, network=request.network))
    return key, tuple(gpu.uuid for gpu in chosen.named_gpus(request.gpus))


def _has_to_wait(blockers: Sequence[str], priority: int) -> Unsupported:
    return Unsupported(
        f"{', '.join(blockers)} cannot be asked to make room by a priority of {priority}",
        hint="omit --no-wait to wait in line, or give a higher --priority; `gpucr borrow --list`",
        code="GPUCR-BORROW-BUSY",
    )


def _seen(wanted: Sequence[str]) -> Seen:
    seen = look(wanted)
    strangers = sorted({use.pid for use in seen.strangers if use.gpu_uuid in wanted})
    if strangers:
        raise Unsupported(
            f"the GPUs are in use by {'process' if len(strangers) == 1 else 'processes'} "
            f"{', '.join(map(str, strangers))}, which belong to no job in your registry and have no priority",
            hint="end them, or start such jobs with `gpucr run --priority`",
            code="GPUCR-BORROW-STRANGER",
        )
    return seen


class _Borrower:
    def __init__(
        self,
        me: Borrowing,
        request: BorrowRequest,
        key_file: str | None,
        say: Say,
        cancel: Cancellation | None,
    ) -> None:
        self._me = me
        self._request = request
        self._key_file = key_file
        self._say = say
        self._outer = cancel
        self._cancel = Cancellation()
        self._signals: deque[signal.Signals] = deque()
        self._is_started = False
        self._code = 1

    def to_the_end(self) -> int:
        """Another thread does the work: otherwise operations would handle the signals."""
        with self._signals_noted():
            work = Work(self._work, "borrower", daemon=False)
            while not work.is_done(_LOOK_EVERY_S):
                if self._outer is not None and self._outer.is_cancelled and not self._cancel.is_cancelled:
                    self._take_notice(signal.SIGTERM)
        return work.wait()

    def _work(self) -> int:
        """The program's exit code."""
        try:
            self._take()
            self._code = self._until_it_ends()
        finally:
            self._give_back()
        return self._code

    # --- the way to the GPUs ---------------------------------------------------------------------------------------

    def _take(self) -> None:
        """Wait for the turn, then do everything before anybody else can get these GPUs."""
        needed, told = set(self._me.gpus), ""
        busy_since_s: float | None = None
        while True:
            self._check()
            with ledger.gpus_held(needed, self._check):
                others, seen = ledger.borrowings(), _seen(self._me.gpus)
                jobs = seen.jobs
                blockers = policy.blockers(self._me, others, jobs)
                victims = () if blockers else policy.victims(self._me, jobs)
                more = needed.union(*(job.gpus for job in victims))
                if not blockers and not seen.busy and more == needed:
                    self._make_room(victims)
                    return
            if not blockers and not seen.busy:
                needed = more  # jobs on other GPUs too: nobody may change these either
                continue
            if any(each.is_gone for each in others if each.name in blockers):
                recover(self._say)
                continue
            if blockers and not self._request.wait:
                raise _has_to_wait(blockers, self._me.priority)
            if blockers:
                busy_since_s = None
            elif busy_since_s is None:
                busy_since_s = time.monotonic()
            elif time.monotonic() > busy_since_s + chosen.BUSY_S:
                raise Busy(
                    f"another gpucr still works on {', '.join(seen.busy)}, whose GPUs cannot be seen meanwhile",
                    hint="wait until it has finished, or thaw the job, then try again",
                )
            needed = set(self._me.gpus)
            why = ", ".join(blockers) if blockers else f"another gpucr's work on {', '.join(seen.busy)}"
            if told != (told := f"{self._me.name} waits for {why}"):
                self._say(told)
            time.sleep(_LOOK_EVERY_S)

    def _make_room(self, victims: Sequence[policy.Occupant]) -> None:
        to = self._request.to
        with folder_of(to, stays=True):
            ways = plan(victims, to, self._key_file, self._cancel)
        self._check()
        self._me = ledger.change(self._me, "taking")
        for way in ways:
            lend.lend(way, self._key_file, self._cancel, self._say)
        self._check()
        self._me = ledger.change(self._me, "running")
        variables = {**without_passphrase(os.environ), "CUDA_VISIBLE_DEVICES": ",".join(self._me.gpus)}
        started = launch(
            LaunchRequest(
                self._me.command,
                self._me.name,
                self._request.isolate,
                self._request.network,
                environment=variables,
                priority=self._me.priority,
            )
        )
        self._is_started = True
        for warning in started.plan.warnings:
            self._say(f"warning: {warning}")
        self._say(f"{self._me.name} runs (process {started.record.pid})")

    def _check(self) -> None:
        if self._cancel.is_cancelled:
            raise Interrupted(f"{self._cancel.reason}: the command was not started", hint="the jobs are as before")

    # --- the command -----------------------------------------------------------------------------------------------

    def _until_it_ends(self) -> int:
        printing = threading.Thread(target=self._print, name="output", daemon=True)
        printing.start()
        while True:
            with registry_in_use():
                listed = registry().find(self._me.name)
            record, state = listed.record, listed.state
            if state.word == "running" and record is not None:
                while self._signals:
                    processes.send_signal(record.root, self._signals.popleft())
            elif state.word != "dumped" or record is None or record.lent is None:  # otherwise it comes back
                break
            time.sleep(_LOOK_EVERY_S)
        printing.join(_LAST_LINES_S)
        return self._code_of(state)

    def _code_of(self, state: JobState) -> int:
        if state.exit_code is not None:
            return state.exit_code
        if state.signal is not None:
            return _BY_SIGNAL + state.signal
        self._say(f"the exit status of {self._me.name} is unknown ({state.word})")
        return 1

    def _print(self) -> None:
        with contextlib.suppress(OSError, GpucrError):  # no reader, or the log is gone: the command keeps running
            for piece in job_log(self._me.name, follow=True):
                if hasattr(sys.stdout, "buffer"):
                    sys.stdout.buffer.write(piece)
                else:  # a notebook's
                    sys.stdout.write(piece.decode(errors="replace"))
                sys.stdout.flush()

    # --- the way back ----------------------------------------------------------------------------------------------

    def _give_back(self) -> None:
        if self._is_started:
            end_command(self._me.name)  # including orphans of its first process
        ledger.leave(self._me)
        settled = settle(self._say)
        for name, away in settled.waiting:
            self._say(f"{name} comes back when {', '.join(away)} has ended")
        for name, error in settled.failed:
            error.hint = f"`gpucr borrow --recover` tries again to bring back {name}" + (
                f"; {error.hint}" if error.hint else ""
            )
            if self._code == 0 or not self._is_started:
                raise error

    # --- signals ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _signals_noted(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {}
        for number in _PASSED_ON:
            if signal.getsignal(number) not in (signal.SIG_IGN, None):  # nohup ignores SIGHUP on purpose
                before[number] = signal.signal(number, lambda number, _: self._take_notice(signal.Signals(number)))
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _take_notice(self, number: signal.Signals) -> None:
        """Before the command starts, cancel; while it runs, pass the signal on; afterwards, ignore it."""
        self._cancel.cancel(number.name)
        self._signals.append(number)

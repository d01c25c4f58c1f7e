"""An operation is a list of steps. Each can say what it will do, do it, and undo it.

`run_steps` runs them in order. When one fails, the deadline passes, or the user interrupts, the started steps are
undone in reverse, and the error says whether the job is as it was found. `--dry-run`, progress and the timing table
come from the same list.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

from msgspec import Struct

from gpucr.errors import DeadlineExceeded, GpucrError, JobDamaged
from gpucr.undo.events import Listener, Progress
from gpucr.undo.interrupts import Interrupts, interrupted
from gpucr.undo.roll import Ended, Roll


class Phase(Struct, frozen=True):
    """What one step took: wall seconds, and the bytes that it moved (0 if it moves none)."""

    name: str
    seconds: float
    size_bytes: int = 0


REPORT_INTERVAL_S = 0.1
"""Interval of a phase's "advance" events; the last one comes when it ends."""


class Meter:
    """Progress of a long step.

    Every method may be called from any thread, at any rate: it only records. A thread of `run_steps` passes it on.
    """

    def __init__(self, phase: str, description: str = "") -> None:
        self.phase = phase
        self._description = description
        self._start = time.monotonic()
        self._lock = threading.Lock()
        self._done_bytes = 0
        self._total_bytes = 0
        self._notes: list[Progress] = []

    @property
    def seconds(self) -> float:
        """Since the phase began."""
        return time.monotonic() - self._start

    def expect(self, total_bytes: int) -> None:
        """Set how many bytes will be moved in all. A later call replaces it."""
        with self._lock:
            self._total_bytes = total_bytes

    def add(self, size_bytes: int) -> None:
        """This many more bytes have been moved."""
        with self._lock:
            self._done_bytes += size_bytes

    def set(self, done_bytes: int) -> None:
        """This many bytes have been moved since the phase began."""
        with self._lock:
            self._done_bytes = done_bytes

    def note(self, text: str) -> None:
        """Add a line that explains how the step works, for ``--verbose``."""
        with self._lock:
            self._notes.append(Progress("note", self.phase, text, self.seconds))

    def take_news(self) -> list[Progress]:
        """The notes since the last call, and the phase's progress if it expects bytes, or has moved some."""
        with self._lock:
            news, self._notes = self._notes, []
            if self._total_bytes > 0 or self._done_bytes > 0:
                done, total = self._done_bytes, self._total_bytes
                news.append(Progress("advance", self.phase, self._description, self.seconds, done, total))
        return news


Value = TypeVar("Value")


class Result(Generic[Value]):
    """A step's result for later steps, which get this object before it is filled."""

    def __init__(self) -> None:
        self._values: list[Value] = []

    def set(self, value: Value) -> None:
        """Fill it."""
        self._values = [value]

    @property
    def value(self) -> Value:
        """The result. Raises RuntimeError if the step has not run, a wrong order of steps."""
        if not self._values:
            raise RuntimeError("a step asks for what another one has not done yet")
        return self._values[0]

    @property
    def if_known(self) -> Value | None:
        """None if the step has not run, or not that far: for an undo."""
        return self._values[0] if self._values else None


class LeftBehind(Exception):
    """An undo restored the job, but left something that should be removed; the message names it."""


class Step(Protocol):
    """One reversible part of an operation."""

    @property
    def name(self) -> str:
        """One word for the timing table: lock, checkpoint, ..."""
        ...

    def describe(self) -> str:
        """One line that says what will be done, with pids and paths."""
        ...

    def run(self, interrupts: Interrupts, meter: Meter) -> int:
        """Do it. Returns the bytes moved. May fail midway: then undo is called too.

        A step that moves many bytes reports them to ``meter``, and calls ``interrupts.check()`` where it can be
        interrupted.
        """
        ...

    def undo(self) -> None:
        """Undo the part of this step that was done, if any.

        Raises LeftBehind if the job is as it was before the step, and any other error if it may not be.
        """
        ...


class AroundStep:
    """A step that wraps another one; override what differs."""

    def __init__(self, step: Step) -> None:
        self._step = step

    @property
    def name(self) -> str:
        return self._step.name

    def describe(self) -> str:
        return self._step.describe()

    def run(self, interrupts: Interrupts, meter: Meter) -> int:
        return self._step.run(interrupts, meter)

    def undo(self) -> None:
        self._step.undo()


class WithoutUndo(AroundStep):
    """A step whose effects another step's undo reverts."""

    def undo(self) -> None:
        pass


def run_steps(
    steps: Sequence[Step],
    *,
    listener: Listener,
    interrupts: Interrupts,
    roll: Roll | None = None,
    deadline: float | None = None,
    begun_before: Sequence[Step] = (),
    before_undo: Callable[[], None] = lambda: None,
    second_undo: Callable[[], bool] | None = None,
) -> tuple[Phase, ...]:
    """Run the steps in order; on any failure undo those that were begun, in reverse order.

    ``roll``: the job's processes, which must all exist after an undo. ``begun_before``: steps of an earlier run, which
    are undone too.

    Raises the step's own error when the undo succeeded, Interrupted after Ctrl-C or SIGTERM, DeadlineExceeded when
    ``deadline`` (time.monotonic()) passed between steps before one of them committed, and JobDamaged when the undo
    failed too or the job has lost processes.

    ``listener`` and ``interrupts`` are the enclosing operation's (operation.py). ``second_undo`` is called if the undo
    failed, and returns whether everything is as it was found after it.
    """
    interrupts.postpone()
    begun: list[Step] = list(begun_before)
    phases: list[Phase] = []
    try:
        for step in steps:
            interrupts.check()
            if deadline is not None and time.monotonic() > deadline and not interrupts.is_committed:
                raise DeadlineExceeded(f"timed out before: {step.describe()}", hint="give a longer --timeout")
            begun.append(step)
            phases.append(_run_one(step, interrupts, listener))
        if deadline is not None and time.monotonic() > deadline and not interrupts.is_committed:
            raise DeadlineExceeded("timed out before everything was done", hint="give a longer --timeout")
        interrupts.conclude()
        interrupts.is_done = True
    except BaseException as error:
        with interrupts.undoing():
            before_undo()
            failures, left = _undo(begun, listener)
            if failures and second_undo is not None and second_undo():
                failures = []
            outcome = _outcome(error, failures, left, roll.call_after_undo() if roll is not None else ())
        if outcome is error:
            raise
        raise outcome from error
    return tuple(phases)


def _run_one(step: Step, interrupts: Interrupts, listener: Listener) -> Phase:
    description = step.describe()
    listener.tell(Progress("begin", step.name, description))
    meter = Meter(step.name, description)
    with _followed(meter, listener, interrupts):
        size_bytes = step.run(interrupts, meter)
        phase = Phase(step.name, meter.seconds, size_bytes)
    end = Progress("end", step.name, step.describe(), phase.seconds, size_bytes)
    if interrupts.is_committed:  # a failing listener must not turn something irreversible into a failure
        listener.try_to_report(end)
    else:
        listener.tell(end)
    return phase


def _undo(begun: Sequence[Step], listener: Listener) -> tuple[list[str], list[str]]:
    """Undo the steps. Returns what could not be undone, and what was left behind."""
    failures: list[str] = []
    left: list[str] = []
    for step in reversed(begun):
        listener.try_to_report(Progress("undo", step.name, step.describe()))
        try:
            step.undo()
        except LeftBehind as error:
            left.append(str(error))
        except Exception as error:  # noqa: BLE001 - the other steps must still be undone
            failures.append(f"{step.name}: {error}")
    return failures, left


@contextlib.contextmanager
def _followed(meter: Meter, listener: Listener, interrupts: Interrupts) -> Iterator[None]:
    """Report the meter's progress while the block runs.

    A separate thread does that, so that a slow or failing listener never delays or ends the threads that move the
    bytes. Its failure is kept for the operation's next safe point.
    """
    if not listener.is_heard:
        yield
        return
    over = threading.Event()

    def pass_on() -> bool:
        try:
            for progress in meter.take_news():
                listener.tell(progress)
        except BaseException as error:  # noqa: BLE001 - a listener's error is raised at a safe point
            interrupts.stop_with(error)
            return False
        return True

    def follow() -> None:
        while not over.wait(REPORT_INTERVAL_S) and pass_on():
            pass

    follower = threading.Thread(target=follow, name=f"gpucr progress of {meter.phase}", daemon=True)
    follower.start()
    try:
        yield
    finally:
        over.set()
        follower.join()
        pass_on()


def _outcome(
    error: BaseException, failures: Sequence[str], left: Sequence[str], ended: Sequence[Ended]
) -> BaseException:
    lost = [each.sentence() for each in ended if each.is_loss]
    if isinstance(error, JobDamaged) and not failures:
        return error  # it already says what is lost
    if failures or lost:
        return _damage(str(error) or type(error).__name__, (*failures, *left), lost)
    if isinstance(error, KeyboardInterrupt):
        return interrupted(error, "the job is as it was found", hint="; ".join(left) or None)
    if isinstance(error, GpucrError):
        meanwhile = ["; ".join(each.sentence() for each in ended) + " meanwhile"] if ended else []
        error.hint = "; ".join(([error.hint] if error.hint else []) + [*left, *meanwhile]) or None
    return error


def _damage(said: str, failures: Sequence[str], lost: Sequence[str]) -> JobDamaged:
    parts, hints = [said], []
    if failures:
        parts.append("and it could not be undone: " + "; ".join(failures))
        hints.append("`gpucr ps` shows where the processes are now; `gpucr resume PID` brings back what is suspended")
    if lost:
        parts.append("and the job has lost processes: " + "; ".join(lost))
        hints.append("if the job cannot do without them, end it and restore its last snapshot")
    return JobDamaged("; ".join(parts), failures=(*failures, *lost), hint="; ".join(hints))

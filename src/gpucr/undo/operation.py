"""Everything around the steps of an operation on a job, from its first look at the job to its report.

- A signal ends it: at once while nothing has been changed, with an undo while steps run, and not at all afterwards,
  when only the report is left (interrupts.py).
- It may open as many files as the machine allows, and the undo's descriptors are reserved before the first step
  (linux/descriptor_limit.py): without descriptors not even a process's state can be read.
- If an undo fails, the guard tries again, in its own process (protection.py).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from gpucr.errors import InvalidRequest, JobChanged, Unsupported
from gpucr.linux import descriptor_limit, processes
from gpucr.linux.descriptor_limit import OUT_OF_DESCRIPTORS, Reserve
from gpucr.undo.cancellation import Cancellation
from gpucr.undo.events import Listener, OnProgress
from gpucr.undo.interrupts import Interrupts, interrupted
from gpucr.undo.left_behind import remove_left_behind
from gpucr.undo.protection import Protection
from gpucr.undo.roll import Roll
from gpucr.undo.steps import Phase, Step, run_steps

TO_CHANGE, TO_MOVE = 4, 13
"""How many files an operation opens per CUDA process: for suspend and resume; for dump and restore.

Measured with 2, 8 and 16 processes: 4.1 and 12.1 (a dump to a folder) for each, plus 5.
"""

_IN_ALL, _TO_UNDO = 24, 3
LONGEST_TIMEOUT_S = 1e6


@dataclass(frozen=True)
class Terms:
    """On which terms an operation runs.

    ``timeout_s``: its time limit, from its begin (None: none). ``force``: blocking findings do not stop it.
    ``on_progress`` hears of its steps; ``cancel`` ends it from another thread.
    """

    timeout_s: float | None = None
    force: bool = False
    on_progress: OnProgress | None = None
    cancel: Cancellation | None = None

    def within(self, deadline: float | None) -> Terms:
        """The same for a part of the operation that ends at this deadline."""
        return replace(self, timeout_s=None if deadline is None else max(deadline - time.monotonic(), 0.001))


AS_USUAL = Terms()


class Operation:
    """A running operation. Made by `operation`.

    ``deadline``: its end as a value of time.monotonic() (None: none). ``force``: whether blocking findings count.
    """

    def __init__(self, listener: Listener, interrupts: Interrupts, terms: Terms) -> None:
        self.interrupts = interrupts
        self.terms = terms
        self.deadline = deadline_after(terms.timeout_s)
        self.force = terms.force
        self._listener = listener
        self._reserve: Reserve | None = None
        self._roll: Roll | None = None
        self._protection: Protection | None = None

    def works_on(self, roll: Roll | None, protection: Protection | None) -> None:
        """From now on a failed step leads to an undo of all of ``roll``, which the guard of ``protection`` repeats."""
        self._roll, self._protection = roll, protection

    def require_descriptors(self, processes: int, cuda_processes: int, each: int) -> None:
        """Reserve descriptors for steps and undo of a job with that many processes; ``each``: per CUDA process.

        Raises Unsupported if the process may not open that many files.
        """
        self.release()
        for_undo = _TO_UNDO * cuda_processes
        count = _IN_ALL + 2 * processes + each * cuda_processes
        try:
            self._reserve = Reserve(for_undo)  # for the undo, after the steps have used up the rest
            Reserve(count).release()
        except OSError as e:
            if e.errno not in OUT_OF_DESCRIPTORS:
                raise
            raise _too_few(f"a job of {processes} processes takes {count + for_undo} more") from e

    def run(self, steps: Sequence[Step], *, begun_before: Sequence[Step] = ()) -> tuple[Phase, ...]:
        """Like `run_steps`. When it returns, the operation has succeeded and signals have no effect."""
        protection = self._protection

        def before_undo() -> None:
            self.release()
            if protection is not None:
                protection.needs_no_guard()

        try:
            return run_steps(
                steps,
                roll=self._roll,
                deadline=self.deadline,
                listener=self._listener,
                interrupts=self.interrupts,
                begun_before=begun_before,
                before_undo=before_undo,
                second_undo=protection.undo_by_guard if protection is not None else None,
            )
        finally:
            self.release()

    def release(self) -> None:
        if self._reserve is not None:
            self._reserve.release()
            self._reserve = None


def deadline_after(timeout_s: float | None) -> float | None:
    """The time.monotonic() value at which ``timeout_s`` seconds from now are over. Raises InvalidRequest."""
    if timeout_s is None:
        return None
    if not 0 < timeout_s <= LONGEST_TIMEOUT_S:
        raise InvalidRequest(
            f"the timeout {timeout_s:g} s is out of range",
            hint=f"give a number of seconds above 0 and up to {LONGEST_TIMEOUT_S:.0f}, or none at all",
        )
    return time.monotonic() + timeout_s


@contextlib.contextmanager
def operation(name: str, subject: object, terms: Terms = AS_USUAL, *, is_undo: bool = False) -> Iterator[Operation]:
    """The block is the whole operation. Raises Interrupted, InvalidRequest, Unsupported (no open files), JobChanged.

    ``name`` and ``subject`` are for its events (events.py). With ``is_undo`` it cannot be interrupted.
    """
    remove_left_behind()
    listener = Listener(terms.on_progress, name, subject)
    with (
        descriptor_limit.raised(),
        Interrupts(listener.report_ignored, cancel=terms.cancel) as interrupts,
        listener.announced(),
    ):
        running = Operation(listener, interrupts, terms)
        try:
            if is_undo:
                interrupts.commit()
            else:
                interrupts.raise_at_once()
            yield running
        except KeyboardInterrupt as e:
            raise interrupted(e, "the job is as it was found") from e
        except OSError as e:
            if e.errno in OUT_OF_DESCRIPTORS and not interrupts.is_done:
                raise _too_few("there was none left for what had to be looked at") from e
            if (pid := processes.ended_under_a_look(e)) is not None:
                raise JobChanged(f"process {pid} ended meanwhile", pids=[pid], hint="its own log may say why") from e
            raise
        finally:
            running.release()


@contextlib.contextmanager
def all_or_nothing(
    name: str,
    subject: object,
    cancel: Cancellation | None = None,
    *,
    state: str = "nothing was changed",
    at_once: bool = True,
) -> Iterator[Interrupts]:
    """For short operations without undo: a signal ends the block at once until it calls `conclude`, and never after.

    Without ``at_once`` the block says where it may be interrupted. Raises Interrupted with the ``state``.
    """
    listener = Listener(None, name, subject)
    with Interrupts(cancel=cancel) as interrupts, listener.announced():
        try:
            if at_once:
                interrupts.raise_at_once()
            interrupts.check()
            yield interrupts
        except KeyboardInterrupt as e:
            raise interrupted(e, state) from e


def _too_few(why: str) -> Unsupported:
    return Unsupported(
        f"this process may not open enough files: {why}",
        hint="raise the limit (`ulimit -Hn`, LimitNOFILE= of a service), or close what the calling program has open",
        code="GPUCR-OPEN-FILES",
    )

"""Everything around the steps of an operation on a job, from its first look at the job to its report.

- A signal ends it: at once while nothing has been changed, with an undo while steps run, and not at all afterwards,
  when only the report is left (interrupts.py).
- It may open as many files as the machine allows, and the undo's descriptors are reserved before the first step
  (linux/descriptor_limit.py): without descriptors not even a process's state can be read.
- If an undo fails, the guard tries again, in its own process (protection.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from gpucr.errors import JobChanged, Unsupported
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


class Operation:
    """A running operation. Made by `operation`."""

    def __init__(self, listener: Listener, interrupts: Interrupts) -> None:
        self.interrupts = interrupts
        self._listener = listener
        self._reserve: Reserve | None = None

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

    def run(
        self,
        steps: Sequence[Step],
        *,
        roll: Roll | None = None,
        deadline: float | None = None,
        protection: Protection | None = None,
        begun_before: Sequence[Step] = (),
    ) -> tuple[Phase, ...]:
        """Like `run_steps`. When it returns, the operation has succeeded and signals have no effect.

        The undo does not need the guard of ``protection``.
        """

        def before_undo() -> None:
            self.release()
            if protection is not None:
                protection.needs_no_guard()

        try:
            return run_steps(
                steps,
                roll=roll,
                deadline=deadline,
                listener=self._listener,
                interrupts=self.interrupts,
                begun_before=begun_before,
                before_undo=before_undo,
                second_undo=protection.undo_by_guard if protection is not None else None,
            )
        finally:
            self.release()

    def release(self) -> None:
        """Release the reserved descriptors."""
        if self._reserve is not None:
            self._reserve.release()
            self._reserve = None


@contextlib.contextmanager
def operation(
    name: str,
    subject: object,
    *,
    on_progress: OnProgress | None = None,
    cancel: Cancellation | None = None,
    is_undo: bool = False,
) -> Iterator[Operation]:
    """The block is the whole operation. Raises Interrupted, Unsupported (no open files left) and JobChanged.

    ``name`` and ``subject`` are for its events (events.py). With ``is_undo`` it cannot be interrupted.
    """
    remove_left_behind()
    listener = Listener(on_progress, name, subject)
    with (
        descriptor_limit.raised(),
        Interrupts(listener.report_ignored, cancel=cancel) as interrupts,
        listener.announced(),
    ):
        running = Operation(listener, interrupts)
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

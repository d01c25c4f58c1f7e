"""An operation is a list of steps. Each can say what it will do, do it, and take it back.

`run_steps` runs them in order. When one fails, the deadline passes, or the user interrupts, the steps that were begun
are undone in reverse, and the error says whether the job is as it was found. `--dry-run`, progress and the timing
table come from the same list.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from gpucr.errors import DeadlineExceeded, Interrupted, JobDamaged
from gpucr.operations.interrupts import Interrupts


@dataclass(frozen=True)
class Phase:
    """What one step took: wall seconds, and the bytes that it moved (0 where it moves none)."""

    name: str
    seconds: float
    size_bytes: int = 0


@dataclass(frozen=True)
class Progress:
    """An event for ``on_progress``: a phase begins, ends, is undone, or a signal had to be ignored meanwhile."""

    event: Literal["begin", "end", "undo", "signal-ignored"]
    phase: str
    description: str = ""
    seconds: float = 0.0
    size_bytes: int = 0


OnProgress = Callable[[Progress], None]


class Step(Protocol):
    """One reversible part of an operation."""

    @property
    def name(self) -> str:
        """One word for the timing table: lock, checkpoint, ..."""
        ...

    def describe(self) -> str:
        """One line that says what will be done, with pids and paths."""
        ...

    def run(self, interrupts: Interrupts) -> int:
        """Do it. Returns the bytes that were moved. May fail half-way: undo is called then as well."""
        ...

    def undo(self) -> None:
        """Take back whatever was done of this step, nothing if nothing was. Raises where that fails."""
        ...


class WithoutUndo:
    """A step whose effects another step's undo takes back."""

    def __init__(self, step: Step) -> None:
        self._step = step

    @property
    def name(self) -> str:
        """The step's own."""
        return self._step.name

    def describe(self) -> str:
        """The step's own."""
        return self._step.describe()

    def run(self, interrupts: Interrupts) -> int:
        """The step's own."""
        return self._step.run(interrupts)

    def undo(self) -> None:
        """Nothing."""


def run_steps(
    steps: Sequence[Step],
    *,
    deadline: float | None = None,
    on_progress: OnProgress | None = None,
) -> tuple[Phase, ...]:
    """Run the steps in order; on any failure undo those that were begun, in reverse order.

    Raises the step's own error when the undo succeeded, Interrupted after Ctrl-C or SIGTERM, DeadlineExceeded when
    ``deadline`` (time.monotonic()) passed between steps, and JobDamaged when the undo failed too.
    """
    report = on_progress or (lambda progress: None)
    begun: list[Step] = []
    phases: list[Phase] = []
    ignored = Progress("signal-ignored", "undo", "the job is being brought back; this cannot be cut short")
    with Interrupts(on_ignored=lambda: _try_to_report(report, ignored)) as interrupts:
        try:
            for step in steps:
                interrupts.check()
                if deadline is not None and time.monotonic() > deadline:
                    raise DeadlineExceeded(
                        f"the time was over before: {step.describe()}", hint="give a longer --timeout"
                    )
                begun.append(step)
                report(Progress("begin", step.name, step.describe()))
                start = time.monotonic()
                size_bytes = step.run(interrupts)
                phases.append(Phase(step.name, time.monotonic() - start, size_bytes))
                report(Progress("end", step.name, step.describe(), phases[-1].seconds, size_bytes))
            interrupts.check()
        except BaseException as error:
            interrupts.begin_undo()
            outcome = _outcome(error, _undo(begun, report))
            if outcome is error:
                raise
            raise outcome from error
    return tuple(phases)


def _undo(begun: Sequence[Step], report: OnProgress) -> list[str]:
    failures: list[str] = []
    for step in reversed(begun):
        _try_to_report(report, Progress("undo", step.name, step.describe()))
        try:
            step.undo()
        except Exception as error:  # noqa: BLE001 - the other steps must be undone whatever happens here
            failures.append(f"{step.name}: {error}")
    return failures


def _try_to_report(report: OnProgress, progress: Progress) -> None:
    """A listener that fails (a terminal that is gone) ends an operation, but never an undo."""
    with contextlib.suppress(Exception):
        report(progress)


def _outcome(error: BaseException, failures: Sequence[str]) -> BaseException:
    if failures:
        said = str(error) or type(error).__name__
        return JobDamaged(
            f"{said}; and it could not be undone: " + "; ".join(failures),
            failures=failures,
            hint="`gpucr ps` shows where the processes are now; `gpucr resume PID` brings back what is suspended",
        )
    if isinstance(error, KeyboardInterrupt):
        return Interrupted("interrupted; the job is as it was found")
    return error

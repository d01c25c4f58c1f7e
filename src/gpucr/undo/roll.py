"""Which processes existed when an operation began, and what became of them.

An undo leads processes back to where they were found and skips those that have ended. So its success is not enough: a
job that has lost a process is not as it was found, no matter who ended it. The roll is taken before the first step and
called when all steps are done or undone.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence

from msgspec import Struct

from gpucr.errors import JobDamaged
from gpucr.linux import ends, processes
from gpucr.model import Job, ProcessInfo

END_LIMIT_S = 10.0
"""How long killed processes may take to end: the driver frees their device memory first."""


class Ended(Struct, frozen=True):
    """A process that has ended. ``status``: its wait status; None if unknown."""

    process: ProcessInfo
    status: int | None

    @property
    def is_loss(self) -> bool:
        """Whether it counts as a loss: true unless it is known to have exited with 0."""
        return self.status != 0

    def sentence(self) -> str:
        """Process and how it ended, in words."""
        return f"process {self.process.pid} ({self.process.name}) {ends.how(self.status)}"


class Roll:
    """The processes of a job, by pid and start time. A context manager: holds a pidfd for each."""

    def __init__(self, job: Job) -> None:
        self._known = job.processes
        self._gang = {member.id for member in job.gang}
        self._pidfds: dict[int, int] = {}

    def __enter__(self) -> Roll:
        for process in self._known:
            # Without a pidfd (no descriptor left, the process has just ended) its exit status stays unknown.
            with contextlib.suppress(OSError):
                self._pidfds[process.pid] = os.pidfd_open(process.pid)
        return self

    def __exit__(self, *error: object) -> None:
        while self._pidfds:
            os.close(self._pidfds.popitem()[1])

    def call_after_undo(self) -> tuple[Ended, ...]:
        """Return the processes that ended, after undoing everything. Waits until released processes have run."""
        ids = [process.id for process in self._known]
        ends.wait_until_they_ran(filter(processes.keeps_running, ids))
        processes.wait_for_killed(ids, END_LIMIT_S)
        return tuple(self._ended(self._known))

    def require_gang(self, state: str, *, hint: str | None = None) -> None:
        """After all steps: raise JobDamaged if a CUDA process is lost. ``state``: the state otherwise, in words.

        The other processes run, and may start and end as the job needs.
        """
        gang = [process for process in self._known if process.id in self._gang]
        lost = [each.sentence() for each in self._ended(gang) if each.is_loss]
        if lost:
            raise JobDamaged(f"{state}, but it has lost processes: " + "; ".join(lost), failures=lost, hint=hint)

    def _ended(self, known: Sequence[ProcessInfo]) -> Iterator[Ended]:
        for process in known:
            if not processes.keeps_running(process.id):
                yield Ended(process, ends.wait_status(process.id, self._pidfds.get(process.pid)))

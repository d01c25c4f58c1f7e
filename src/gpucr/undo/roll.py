"""Who was there when an operation began, and what has become of them.

An undo leads processes back to where they were found, and passes over those that have ended. So what it says of the
others is not all: a job that has lost a member is not as it was found, whoever ended it. The roll is taken before the
first step and called when all steps are done or undone.
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
"""How long those that were killed may take to end: the driver gives their device memory back first."""


class Ended(Struct, frozen=True):
    """A process that was there and has ended. ``status``: its wait status; None where nobody can say."""

    process: ProcessInfo
    status: int | None

    @property
    def is_loss(self) -> bool:
        """Whether the job may miss it: all that is not known to have ended by itself, and well."""
        return self.status != 0

    def sentence(self) -> str:
        """Which process, and how it ended."""
        return f"process {self.process.pid} ({self.process.name}) {ends.how(self.status)}"


class Roll:
    """The processes of a job, by pid and start time. A context manager: holds a pidfd for each meanwhile."""

    def __init__(self, job: Job) -> None:
        self._known = job.processes
        self._gang = {member.id for member in job.gang}
        self._pidfds: dict[int, int] = {}

    def __enter__(self) -> Roll:
        for process in self._known:
            # Without one (no descriptor left, the process has just ended) it is not known how it ends.
            with contextlib.suppress(OSError):
                self._pidfds[process.pid] = os.pidfd_open(process.pid)
        return self

    def __exit__(self, *error: object) -> None:
        while self._pidfds:
            os.close(self._pidfds.popitem()[1])

    def call_after_undo(self) -> tuple[Ended, ...]:
        """Who has ended, after everything was undone. Waits until those that were let go have run."""
        ids = [process.id for process in self._known]
        ends.wait_until_they_ran(filter(processes.goes_on, ids))
        processes.wait_for_the_killed(ids, END_LIMIT_S)
        return tuple(self._ended(self._known))

    def require_gang(self, state: str, *, hint: str | None = None) -> None:
        """After all steps: raise JobDamaged where a CUDA process is lost. ``state``: what is true otherwise.

        The other processes run, and start and end as it suits the job.
        """
        gang = [process for process in self._known if process.id in self._gang]
        lost = [each.sentence() for each in self._ended(gang) if each.is_loss]
        if lost:
            raise JobDamaged(f"{state}, but it has lost processes: " + "; ".join(lost), failures=lost, hint=hint)

    def _ended(self, known: Sequence[ProcessInfo]) -> Iterator[Ended]:
        for process in known:
            if not processes.goes_on(process.id):
                yield Ended(process, ends.wait_status(process.id, self._pidfds.get(process.pid)))

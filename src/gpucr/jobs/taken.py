"""A job that an operation works on: claimed, guarded, and with a roll of its processes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from msgspec import Struct

from gpucr.driver.gpus import nvml_kept_open
from gpucr.jobs import selection
from gpucr.jobs.selection import FoundJob
from gpucr.jobs.selector import JobSelector
from gpucr.undo.operation import Operation
from gpucr.undo.protection import Protection
from gpucr.undo.roll import Roll


class TakenJob(Struct, frozen=True, kw_only=True):
    """A job on which only this gpucr works."""

    found: FoundJob
    roll: Roll
    protection: Protection

    def cuda(self) -> tuple[FoundJob, Protection]:
        """The job and its guard. Raises NotACudaProcess."""
        self.found.require_cuda()
        return self.found, self.protection


@contextlib.contextmanager
def taken_job(running: Operation, pid: int | str | JobSelector, each: int, *, only: bool = False) -> Iterator[TakenJob]:
    """Take the job for this operation, which works on it during the block. ``each``: TO_CHANGE or TO_MOVE.

    Raises as `selection.claimed_job`.
    """
    with contextlib.ExitStack() as opened:
        found = opened.enter_context(selection.claimed_job(pid, only=only, force=running.force))
        roll = opened.enter_context(Roll(found.job))
        running.require_descriptors(len(found.job.processes), len(found.job.gang), each)
        protection = opened.enter_context(Protection(found.claims, found.job.processes))
        if found.job.gang:
            from gpucr.jobs import tracing  # jobs without CUDA start without it

            opened.enter_context(tracing.open_to_us(found.job.gang, protection))
            opened.enter_context(nvml_kept_open())
        running.works_on(roll, protection)
        yield TakenJob(found=found, roll=roll, protection=protection)

"""End a stopped job that is in a snapshot."""

from __future__ import annotations

import contextlib

from gpucr.errors import JobDamaged, ProcessNotFound
from gpucr.gpu_state.recovery import BringBack, EndStop
from gpucr.jobs.recovery import EndJob
from gpucr.linux import processes
from gpucr.model import Job, ProcessId
from gpucr.quantities import counted
from gpucr.undo.interrupts import Interrupts
from gpucr.undo.protection import Protection
from gpucr.undo.steps import Meter


class EndFrozenJob:
    """End all trees of a stopped job that is in a committed snapshot."""

    name = "end"

    def __init__(self, job: Job, protection: Protection) -> None:
        self._job = job
        self._protection = protection

    def describe(self) -> str:
        return f"kill {counted(len(self._job.processes), 'process')}"

    def run(self, interrupts: Interrupts, meter: Meter) -> int:
        """Kill all processes. Raises JobDamaged if one does not end: it hangs in the kernel."""
        ids = self._all()
        # A guard must not resume half of a job. Without a guard the job is ended too: its snapshot says that it is.
        self._protection.needs_no_guard()
        self._protection.protect(EndJob(tuple(ids)))
        self._protection.withdraw(BringBack, EndStop)
        if left := processes.kill_and_wait(ids):
            names = ", ".join(str(process.pid) for process in left)
            raise JobDamaged(
                f"the job was killed, but these processes do not end: {names}",
                failures=[f"process {process.pid} does not end" for process in left],
                hint="they hang in the kernel, and end when that ends",
            )
        return 0

    def undo(self) -> None:
        """Nothing: the snapshot has the job."""

    def _all(self) -> set[ProcessId]:
        """Those that were known, and what is in their trees now; one of them may have been killed meanwhile."""
        found = {process.id for process in self._job.processes}
        for root_pid in self._job.root_pids:
            with contextlib.suppress(ProcessNotFound):
                tree = processes.tree(root_pid)
                found |= {process.id for process in tree if tree[0].id in found}
        return found

"""Stop a job's processes that do not use CUDA."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence

from gpucr.gang.threads import STOP_TIMEOUT_S, GangThreads
from gpucr.gpu_state.recovery import GangProtection
from gpucr.gpu_state.steps import ReleaseThreads
from gpucr.linux import processes
from gpucr.model import GangMember, Job, ProcessId
from gpucr.undo.interrupts import Interrupts
from gpucr.undo.protection import Protection
from gpucr.undo.steps import Meter, Step


def steps_without_cuda(job: Job, protection: Protection) -> tuple[list[Step], list[Step]]:
    """The step after which a job without CUDA stands still, and the one after which it runs as found."""
    others = StopOthers(job, tuple, GangProtection(protection))
    return [others], [ReleaseThreads(GangThreads(), protection, others.stopped)]


class StopOthers:
    """The processes of a job that do not use CUDA: running → stopped by SIGSTOP.

    ``members`` returns those that do, which are stopped before. Processes found stopped stay stopped in the end.
    """

    name = "halt"

    def __init__(self, job: Job, members: Callable[[], Sequence[GangMember]], protection: GangProtection) -> None:
        self._job = job
        self._members = members
        self._protection = protection
        self._stopped: list[ProcessId] = []

    def stopped(self) -> tuple[ProcessId, ...]:
        """The processes that this has stopped."""
        return tuple(self._stopped)

    def describe(self) -> str:
        return "stop the processes that do not use CUDA"

    def run(self, interrupts: Interrupts, meter: Meter) -> int:
        """Stop them until there is no new one: a running one may fork."""
        members = [member.id for member in self._members()]
        while new := self._running({*members, *self._stopped}):
            interrupts.check()
            self._stopped += new
            self._protection.stopped([*members, *self._stopped])
            for process in new:
                processes.send_signal(process, signal.SIGSTOP)
            processes.wait_for_stop([process.pid for process in new], STOP_TIMEOUT_S)
        return 0

    def undo(self) -> None:
        processes.continue_stopped(self._stopped)

    def _running(self, known: set[ProcessId]) -> list[ProcessId]:
        found = [process for tree in processes.trees(self._job.root_pids) for process in tree]
        return [process.id for process in found if process.id not in known and process.status not in "TtZX"]

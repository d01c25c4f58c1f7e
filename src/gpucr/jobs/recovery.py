"""What becomes of a job that is being ended, and of a sandbox that is being filled, where gpucr dies."""

from __future__ import annotations

from collections.abc import Sequence

from gpucr.errors import JobChanged
from gpucr.linux import processes
from gpucr.model import ProcessId
from gpucr.undo.recovery import Action


class EndJob(Action):
    """A job that stands still, and that is in a snapshot, ends. Half of it must not run."""

    processes: tuple[ProcessId, ...]

    def recover(self, descriptors: Sequence[int]) -> bool:
        """Kill what is left of it. Raises JobChanged where one does not end."""
        if left := processes.kill_and_wait(self.processes):
            raise JobChanged(f"a job that was dumped does not end: {left[0].pid}", pids=[each.pid for each in left])
        return True


class CloseToTracers(Action):
    """Processes that their agents have opened to tracers are closed again (tracing.py)."""

    outlives_job = True
    processes: tuple[ProcessId, ...]

    def recover(self, descriptors: Sequence[int]) -> bool:
        """Ask the agents of those that run."""
        from gpucr.jobs.tracing import set_open  # the agents' client is needed nowhere else here

        for each in filter(processes.goes_on, self.processes):
            set_open(each.pid, is_open=False)
        return False


class EndSandbox(Action):
    """The keeper of a half-filled sandbox ends, and with it everything in there, CRIU too."""

    keeper: ProcessId

    def recover(self, descriptors: Sequence[int]) -> bool:
        """Kill it. Raises JobChanged where it does not end."""
        if processes.kill_and_wait([self.keeper]):
            raise JobChanged(f"a half-filled sandbox does not end: {self.keeper.pid}", pids=[self.keeper.pid])
        return False

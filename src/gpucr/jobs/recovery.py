"""Recovery of a job that is being ended, and of a sandbox that is being filled, if gpucr dies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from gpucr.errors import JobChanged
from gpucr.linux import processes
from gpucr.model import ProcessId
from gpucr.undo.recovery import Action


class EndJob(Action):
    """End a stopped job that is in a snapshot. Half of it must not run."""

    is_on_record: ClassVar[bool] = True

    processes: tuple[ProcessId, ...]

    def recover(self, descriptors: Sequence[int]) -> bool:
        """Kill the rest of it. Raises JobChanged if a process does not end."""
        if left := processes.kill_and_wait(self.processes):
            raise JobChanged(f"a job that was dumped does not end: {left[0].pid}", pids=[each.pid for each in left])
        return True


class CloseToTracers(Action):
    """Revoke permission to trace that agents have granted (tracing.py)."""

    outlives_job = True
    processes: tuple[ProcessId, ...]

    def recover(self, descriptors: Sequence[int]) -> bool:
        """Tell the agents of running processes."""
        from gpucr.jobs.tracing import set_open  # the agents' client is needed nowhere else here

        for each in filter(processes.keeps_running, self.processes):
            set_open(each.pid, is_open=False)
        return False


class EndSandbox(Action):
    """End a half-filled sandbox's keeper, and so everything in it, including CRIU."""

    keeper: ProcessId

    def recover(self, descriptors: Sequence[int]) -> bool:
        """Kill it. Raises JobChanged if it does not end."""
        if processes.kill_and_wait([self.keeper]):
            raise JobChanged(f"a half-filled sandbox does not end: {self.keeper.pid}", pids=[self.keeper.pid])
        return False

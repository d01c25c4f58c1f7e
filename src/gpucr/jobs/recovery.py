"""What becomes of a sandbox that is being filled where gpucr dies."""

from __future__ import annotations

from collections.abc import Sequence

from gpucr.errors import JobChanged
from gpucr.linux import processes
from gpucr.model import ProcessId
from gpucr.undo.recovery import Action


class EndSandbox(Action):
    """The keeper of a half-filled sandbox ends, and with it everything in there, CRIU too."""

    keeper: ProcessId

    def recover(self, descriptors: Sequence[int]) -> bool:
        """Kill it. Raises JobChanged where it does not end."""
        if processes.kill_and_wait([self.keeper]):
            raise JobChanged(f"a half-filled sandbox does not end: {self.keeper.pid}", pids=[self.keeper.pid])
        return False

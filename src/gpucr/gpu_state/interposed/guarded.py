"""What the guard has to know of device memory that is out of its process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from gpucr.interposer.client import Held


class Guarded(Protocol):
    """What the guard is told (`gpu_state.recovery.GangProtection`)."""

    def blocks(self, pid: int, uuids: Sequence[str], held: Sequence[Held]) -> None:
        """This memory of the process is about to be in these descriptors alone.

        None: it is back, or the process keeps it. ``uuids``: the GPUs that the process sees.
        """

    def going_on(self, pids: Sequence[int]) -> None:
        """These have everything again, and one after the other gives up what it keeps: there is no way back."""

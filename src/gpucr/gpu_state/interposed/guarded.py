"""What the guard must know about device memory that is out of its process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from gpucr.interposer.client import Held


class Guarded(Protocol):
    """Reports to the guard (`gpu_state.recovery.GangProtection`)."""

    def blocks(self, pid: int, uuids: Sequence[str], held: Sequence[Held]) -> None:
        """Only these descriptors are about to hold this memory of the process.

        None: it is back, or the process keeps it.
        """

    def going_on(self, pids: Sequence[int]) -> None:
        """These have everything again, and each frees what it keeps: there is no way back."""

"""All backends of one kind in an operation."""

from __future__ import annotations

from collections.abc import Callable, Collection

from gpucr.gang.around import Around
from gpucr.gpu_state.backend import Backend, Stored
from gpucr.model import CudaState, DevicePart
from gpucr.undo.steps import Meter

StateOf = Callable[[int], "CudaState | None"]
"""A process's current state (None: it has ended)."""


class Holders(Around):
    """The backends of one kind, for the processes of an operation. `order.Order` treats all kinds alike.

    A kind that only holds memory needs `backend_for`. `rank` and `bring_back` are as in `Around`.
    """

    def backend_for(self, part: DevicePart) -> Backend | None:
        """The backend for this running process at this level, asked once; None: it holds nothing of it."""
        return None

    def kept_by(self, pid: int, meter: Meter) -> Stored | None:
        """What this process keeps itself since it was suspended earlier. Raises GpucrError, OSError."""
        return None

    def final_place(self, pid: int) -> str | None:
        """In words, where a process's memory goes, if that cannot be called off once it has begun."""
        return None

    def note(self, pid: int) -> str | None:
        """In words, why a process's memory goes another way, if this kind could have held it."""
        return None

    def withdrawn(self) -> Collection[Backend]:
        """After `prepare`, while all run: the backends that cannot do it after all, closed."""
        return ()

    def given_back(self, state: StateOf) -> None:
        """Each backend of the gang has given back what it held; no process runs yet. May raise as `give_back`."""

    def close(self) -> None:
        """Free what they had in common."""

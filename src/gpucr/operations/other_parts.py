"""What the dump of one part of a job on several nodes, which is left running, does together with the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gpucr.gang.holdable import Others
from gpucr.network.lock import JobNetwork
from gpucr.undo.interrupts import Interrupts
from gpucr.undo.steps import Meter


@dataclass(frozen=True)
class OtherParts:
    """``others`` are held at the same time as the part's GPU work; ``hold_nothing`` waits for them if it has none.

    ``frozen`` blocks the part's connections, and returns when all parts are frozen; ``imaged`` returns when CRIU has
    saved all.
    """

    others: Others
    hold_nothing: Callable[[], None]
    frozen: Callable[[JobNetwork], None]
    imaged: Callable[[], None]


class MeetFrozen:
    """Frozen part: its connections are blocked, and all other parts are frozen too."""

    name = "meet"

    def __init__(self, parts: OtherParts, network: JobNetwork, *, has_gpu_work: bool) -> None:
        self._parts = parts
        self._network = network
        self._has_gpu_work = has_gpu_work

    def describe(self) -> str:
        return "wait until all parts of the job are frozen"

    def run(self, interrupts: Interrupts, meter: Meter) -> int:
        """Wait. Raises what the others' failures do."""
        with interrupts.allowed():
            if not self._has_gpu_work:
                self._parts.hold_nothing()
            self._parts.frozen(self._network)
        return 0

    def undo(self) -> None:
        """Nothing: the undo of `Quiet` lets all packets through."""


class MeetImaged:
    """Part that CRIU has saved: so are all others, and packets may pass again."""

    name = "meet"

    def __init__(self, parts: OtherParts) -> None:
        self._parts = parts

    def describe(self) -> str:
        return "wait until CRIU has saved all parts of the job"

    def run(self, interrupts: Interrupts, meter: Meter) -> int:
        """Wait. Raises what the others' failures do."""
        with interrupts.allowed():
            self._parts.imaged()
        return 0

    def undo(self) -> None:
        pass

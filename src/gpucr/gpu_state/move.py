"""Takes a gang to other GPUs in one go, and back to those that it had where that fails."""

from __future__ import annotations

from msgspec.structs import replace

from gpucr.gang import Gang
from gpucr.gpu_state.placement import Placement
from gpucr.gpu_state.recovery import GangProtection
from gpucr.gpu_state.steps import RestoreGang
from gpucr.model import CudaState
from gpucr.undo.interrupts import Interrupts
from gpucr.undo.steps import Meter


class MoveGang:
    """CHECKPOINTED → LOCKED on other GPUs, for the members that were found LOCKED or RUNNING.

    A member that is there already when another one fails goes back: it may stand where that one belongs.
    """

    name = "move"

    def __init__(self, gang: Gang, placement: Placement, protection: GangProtection) -> None:
        self._gang = gang
        self._placement = placement
        self._protection = protection
        self._there = RestoreGang(gang, placement, down_to=lambda member: member.found)

    def describe(self) -> str:
        """What will be restored, and where to."""
        return self._there.describe()

    def run(self, interrupts: Interrupts, meter: Meter) -> int:
        """Restore all members with the map."""
        self._protection.moving(self._placement.maps(self._gang))
        return self._there.run(interrupts, meter)

    def undo(self) -> None:
        """Every member is on the GPUs that it had, and as it was found."""
        gang = self._gang
        try:
            moved = self._placement.moved(gang)
            if moved:
                away = [replace(each, found=CudaState.CHECKPOINTED) for each in gang.members if each.pid in moved]
                Gang(gang.driver, away).return_to_found()
                gang.restore({pid: gpu_map.reversed for pid, gpu_map in moved.items()}, down_to=lambda each: each.found)
                self._placement.stayed(gang)
        finally:
            gang.return_to_found()

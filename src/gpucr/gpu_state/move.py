"""Move a gang to other GPUs in one go, and back to those that it had if that fails."""

from __future__ import annotations

from msgspec.structs import replace

from gpucr.driver.gpus import list_gpus, unreachable_pairs
from gpucr.gang import Gang
from gpucr.gpu_state.gpu_choice import GpuChoice
from gpucr.gpu_state.interposed.interposers import Interposers
from gpucr.gpu_state.placement import Placement
from gpucr.gpu_state.recovery import GangProtection
from gpucr.gpu_state.steps import RestoreGang
from gpucr.model import CudaState
from gpucr.undo.interrupts import Interrupts
from gpucr.undo.steps import Meter


def goes_from_gpu_to_gpu(choice: GpuChoice) -> bool:
    """Whether the GPUs can copy the interposers' memory: they reach each other, and there is room."""
    if choice.gpu_map is None:
        return True
    free, apart = {gpu.uuid: gpu.memory_free_bytes for gpu in list_gpus()}, unreachable_pairs()
    ways = [(old, choice.gpu_map.new_for(old), size) for old, size in choice.needed_bytes.items()]
    return all(
        old == new or (frozenset((old, new)) not in apart and size <= free.get(new, 0)) for old, new, size in ways
    )


class MoveGang:
    """CHECKPOINTED → LOCKED on other GPUs, for the members that were found LOCKED or RUNNING.

    If one fails, members already moved go back: they may occupy its place.
    """

    name = "move"

    def __init__(self, gang: Gang, placement: Placement, protection: GangProtection, interposers: Interposers) -> None:
        self._interposers = interposers
        self._gang = gang
        self._placement = placement
        self._protection = protection
        self._there = RestoreGang(gang, placement, down_to=lambda member: member.found)

    def describe(self) -> str:
        """What will be restored, and where to."""
        return self._there.describe()

    def run(self, interrupts: Interrupts, meter: Meter) -> int:
        """Restore all members with the map."""
        self._protection.moving(self._placement.maps(self._gang.members))
        moved = self._there.run(interrupts, meter)
        self._interposers.moved(self._placement.moved(self._gang))
        return moved

    def undo(self) -> None:
        """Bring every member back to the GPUs that it had, as it was found.

        If the memory of an interposed one has arrived, all have arrived: they stay there.
        """
        gang = self._gang
        try:
            moved = self._placement.moved(gang)
            if moved and not self._interposers.is_given_back():
                away = [replace(each, found=CudaState.CHECKPOINTED) for each in gang.members if each.pid in moved]
                Gang(gang.driver, away).return_to_found()
                gang.restore({pid: gpu_map.reversed for pid, gpu_map in moved.items()}, down_to=lambda each: each.found)
                self._interposers.moved({pid: gpu_map.reversed for pid, gpu_map in moved.items()})
                self._placement.stayed(gang)
        finally:
            gang.return_to_found()

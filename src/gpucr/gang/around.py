"""What surrounds the driver's actions on a gang."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from gpucr.model import GpuMap

if TYPE_CHECKING:
    from gpucr.gang.actions import Gang
    from gpucr.gang.holdable import Holdable

Results = Mapping[int, Exception | None]
"""By pid, what went wrong (None: nothing)."""


class Around:
    """Nothing surrounds them. Who holds memory that the driver does not have does more (`gpu_state.order`).

    Each method but `rank` gets the gang, and may raise GpucrError or OSError, which ends the action.
    """

    def rank(self, pid: int) -> Holdable | None:
        """What else keeps this process from submitting work and can release it; None: only the driver's lock."""
        return None

    def bring_back(self, gang: Gang, maps: Mapping[int, GpuMap | None]) -> Results:
        """CHECKPOINTED → LOCKED, with these maps, for those members whose memory is not in the driver."""
        return {}

    def before_restore(self, gang: Gang, pids: Sequence[int]) -> None:
        """The driver is about to restore these CHECKPOINTED members."""

    def before_climb(self, gang: Gang, pid: int) -> None:
        """This LOCKED member was found CHECKPOINTED, and is about to be checkpointed again."""

    def before_unlock(self, gang: Gang) -> None:
        """All are LOCKED again, and none runs yet."""


class AllAround(Around):
    """Several, one after the other."""

    def __init__(self, *each: Around) -> None:
        self._each = each

    def rank(self, pid: int) -> Holdable | None:
        return next((found for each in self._each if (found := each.rank(pid)) is not None), None)

    def bring_back(self, gang: Gang, maps: Mapping[int, GpuMap | None]) -> Results:
        results: dict[int, Exception | None] = {}
        for each in self._each:
            results.update(each.bring_back(gang, {pid: maps[pid] for pid in maps if pid not in results}))
        return results

    def before_restore(self, gang: Gang, pids: Sequence[int]) -> None:
        for each in self._each:
            each.before_restore(gang, pids)

    def before_climb(self, gang: Gang, pid: int) -> None:
        for each in self._each:
            each.before_climb(gang, pid)

    def before_unlock(self, gang: Gang) -> None:
        for each in self._each:
            each.before_unlock(gang)

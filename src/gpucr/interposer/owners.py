"""Find the owner of an imported block: the exporter's and the importer's descriptor are the same open file.

At a freeze importers drop what they imported, and creators what they made. At a thaw the creators come first; then each
exports again what it had given out, and its importers get those descriptors. By then nothing shows who owns what, so it
is recorded before (`sharing.Share`).
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence

from msgspec import Struct

from gpucr.interposer.client import Agent
from gpucr.interposer.protocol import BadAnswer, Block, Flag, Refused
from gpucr.interposer.sharing import Part, Share
from gpucr.linux import kcmp


class Place(Struct, frozen=True):
    """A block of process ``pid``."""

    pid: int
    block: Block


def part_of(place: Place) -> Part:
    """Identifies this block during its lifetime."""
    return Part(place.pid, place.block.index, place.block.generation)


class Sharing(Struct, frozen=True):
    """Imported blocks: ``owned`` maps each to its owner's block; ``unowned`` have no owner in the gang."""

    owned: Mapping[Place, Place]
    unowned: tuple[Place, ...]

    def shares(self) -> tuple[Share, ...]:
        """As plain data."""
        return tuple(Share(part_of(place), part_of(owner)) for place, owner in self.owned.items())


def find(blocks: Mapping[int, Sequence[Block]]) -> Sharing:
    """Match a gang's imported blocks, by pid, with the blocks that its processes exported.

    Needs ptrace access (read) and closed gates, so that no number changes. A block has no owner if the owner is outside
    the gang or has released it, or if no descriptor was free for it.

    Raises OSError if the kernel cannot tell.
    """
    everything = [Place(pid, block) for pid, each in blocks.items() for block in each]
    imported = [place for place in everything if Flag.IMPORTED in place.block.flags]
    if not imported:
        return Sharing({}, ())
    exported = [place for place in everything if Flag.IMPORTED not in place.block.flags and place.block.descriptor >= 0]
    exported.sort(key=functools.cmp_to_key(_order))
    owned: dict[Place, Place] = {}
    for place in imported:
        owner = _search(exported, place) if place.block.descriptor >= 0 else None
        if owner is not None:
            owned[place] = owner
    return Sharing(owned, tuple(place for place in imported if place not in owned))


def ask(pids: Collection[int]) -> Sharing | None:
    """As `find`, of processes that run. None: one of them does not tell.

    They may share more while they are asked: an owner may export after its turn what another one has imported before
    its own. So a block has no owner if it has none in two looks.
    """
    first = _look(pids)
    if first is None or not first.unowned:
        return first
    before = {part_of(each) for each in first.unowned}
    second = _look(pids)
    return second and Sharing(second.owned, tuple(each for each in second.unowned if part_of(each) in before))


def _look(pids: Collection[int]) -> Sharing | None:
    blocks: dict[int, Sequence[Block]] = {}
    try:
        for pid in pids:
            with Agent(pid, looks=True) as agent:
                blocks[pid] = agent.blocks()
        return find(blocks)
    except (OSError, Refused, BadAnswer):  # ended, busy, or just closed the identifying descriptor
        return None


def _order(one: Place, other: Place) -> int:
    return kcmp.file_order(one.pid, one.block.descriptor, other.pid, other.block.descriptor)


def _search(exported: Sequence[Place], wanted: Place) -> Place | None:
    low, high = 0, len(exported)
    while low < high:
        middle = (low + high) // 2
        place = _order(exported[middle], wanted)
        if place == 0:
            return exported[middle]
        low, high = (middle + 1, high) if place < 0 else (low, middle)
    return None

"""Differences between two snapshots of one store, by area and range, using only piece names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec import Struct

from gpucr.store.pieces import PieceRef
from gpucr.store.reader import StoreReader
from gpucr.store.stored_snapshot import StoredSnapshot


class AreaDiff(Struct, frozen=True):
    """One area that differs: a file, or the device memory of one process.

    Sizes in bytes; None: the snapshot has no such area. ``ranges`` are offsets in the area, end excluded, in which the
    two differ, with the resolution of pieces; data beyond the end of the shorter one differs.
    """

    name: str
    size_before_bytes: int | None
    size_after_bytes: int | None
    ranges: tuple[tuple[int, int], ...]

    @property
    def changed_bytes(self) -> int:
        """The size of all ranges."""
        return sum(end - start for start, end in self.ranges)


def diff(reader: StoreReader, before: StoredSnapshot, after: StoredSnapshot) -> Sequence[AreaDiff]:
    """All differing areas, by name. Both snapshots must be in the reader's store. Raises StoreDamaged, StoreError."""
    old = {area.name: area for area in before.areas}
    new = {area.name: area for area in after.areas}
    found = []
    for name in sorted(old.keys() | new.keys()):
        one, other = old.get(name), new.get(name)
        if one is not None and other is not None and (one.listed, one.is_long) == (other.listed, other.is_long):
            continue  # equal lists have equal names, so they need not be read
        ranges = _merged(
            _differing(one.pieces(reader) if one else (), other.pieces(reader) if other else ()),
        )
        if ranges or one is None or other is None:
            sizes = (one.size_bytes if one else None, other.size_bytes if other else None)
            found.append(AreaDiff(name, *sizes, tuple(ranges)))
    return found


def _differing(before: Sequence[PieceRef], after: Sequence[PieceRef]) -> Iterator[tuple[int, int]]:
    """Ranges in which pieces differ. If the two were cut differently, a whole piece counts as different."""
    ends_before, ends_after = _by_end(before), _by_end(after)
    start = 0
    for end in sorted(ends_before.keys() | ends_after.keys()):
        # References include the length: equal ones with the same end have the same start.
        if ends_before.get(end) != ends_after.get(end):
            yield start, end
        start = end


def _by_end(refs: Sequence[PieceRef]) -> dict[int, PieceRef]:
    found: dict[int, PieceRef] = {}
    end = 0
    for ref in refs:
        end += ref.length
        found[end] = ref
    return found


def _merged(ranges: Iterator[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, end in ranges:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged

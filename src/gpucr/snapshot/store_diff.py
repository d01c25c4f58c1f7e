"""Differences between two snapshots of one store: by process and address range, and by file."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product

from msgspec import Struct
from msgspec.structs import replace

from gpucr.criu.image_entries import ImageError
from gpucr.criu.page_images import PageMap
from gpucr.errors import InvalidRequest
from gpucr.model import StagedExtent
from gpucr.snapshot.in_store import SnapshotInStore, device_area
from gpucr.snapshot.location import Place, open_snapshot
from gpucr.snapshot.manifest import Manifest, ProcessRecord
from gpucr.store import snapshots
from gpucr.store.diff import AreaDiff, diff
from gpucr.store.keys import Secret
from gpucr.store.pieces import PieceRef

Range = tuple[int, int]


class Difference(Struct, frozen=True):
    """One difference. Sizes in bytes; None: not in that snapshot.

    ``kind``: ``device`` (device memory of process ``pid``) or ``memory`` (its host memory), with ``ranges`` of
    addresses; or ``file``, with offsets. Ends are exclusive; the resolution is a piece.
    """

    kind: str
    name: str
    pid: int | None
    size_before_bytes: int | None
    size_after_bytes: int | None
    changed_bytes: int
    ranges: tuple[Range, ...]


def diff_snapshots(before: Place, after: Place, *, key: Secret | None = None) -> tuple[Difference, ...]:
    """The differences between two snapshots (``STORE#NAME``) of one store. Reads only lists and small images.

    Raises InvalidRequest if they are not in one store, StoreDamaged, StoreError, WrongKey.
    """
    old, new = open_snapshot(before, key), open_snapshot(after, key)
    if not (isinstance(old, SnapshotInStore) and isinstance(new, SnapshotInStore)):
        raise InvalidRequest("only snapshots of a store can be compared", hint="dump into one: STORE#NAME")
    if old.store.config.store_id != new.store.config.store_id:
        raise InvalidRequest(
            "the snapshots are in different stores, and their pieces have different names",
            hint="copy one of them to the other's store first: gpucr copy",
        )
    sides = _Side(old), _Side(new)
    found = [
        difference for area in diff(sides[0].reader, old.stored, new.stored) for difference in _explain(area, *sides)
    ]
    order = {"device": 0, "memory": 1, "file": 2}
    return tuple(sorted(found, key=lambda each: (order[each.kind], each.pid or 0, each.name)))


class _Side:
    """One of the two snapshots, and the content of its page images, by file name."""

    def __init__(self, snapshot: SnapshotInStore) -> None:
        self.manifest = snapshot.manifest
        self.reader = snapshots.open_reader(snapshot.store, snapshot.stored)
        self._stored = snapshot.stored
        self._piece_bytes = snapshot.store.config.piece_bytes
        self._pages = {name: (process, pagemap) for process, name, pagemap in self._page_maps()}

    def owner(self, area: str) -> ProcessRecord | None:
        """The process whose host memory this page image holds."""
        found = self._pages.get(area)
        return found[0] if found is not None else None

    def windows(self, area: str) -> Mapping[int, tuple[PieceRef, int]] | None:
        """The pieces of a page image by address window, with sizes; None: it was cut differently."""
        found = self._pages.get(area)
        if found is None:
            return None
        stored = self._stored.area(area)
        if found[1].size_bytes != stored.size_bytes:
            return None
        refs, pieces = stored.pieces(self.reader), found[1].cut(self._piece_bytes)
        if [ref.length for ref in refs] != [piece.size_bytes for piece in pieces]:
            return None
        return {
            piece.address // self._piece_bytes * self._piece_bytes: (ref, piece.size_bytes)
            for piece, ref in zip(pieces, refs, strict=True)
        }

    @property
    def piece_bytes(self) -> int:
        """The size of a window."""
        return self._piece_bytes

    def _page_maps(self) -> Iterator[tuple[ProcessRecord, str, PageMap]]:
        areas = {area.name: area for area in self._stored.areas}
        for folder, process in product(self.manifest.image_folders, self.manifest.processes):
            area = areas.get(f"{folder}/pagemap-{process.ns_pids[-1]}.img")
            if area is None:
                continue
            try:
                pagemap = PageMap.read(io.BytesIO(self.reader.read_all(area.pieces(self.reader))))
            except ImageError:
                continue
            if f"{folder}/{pagemap.name}" in areas:
                yield process, f"{folder}/{pagemap.name}", pagemap


def _explain(area: AreaDiff, old: _Side, new: _Side) -> Iterator[Difference]:
    for manifest in (new.manifest, old.manifest):
        for part, data in manifest.device_parts.items():
            if area.name == device_area(part):
                found = _difference("device", _process(manifest, part.pid), area)
                yield replace(found, ranges=tuple(_addresses(area.ranges, data.extents)))
                return
    owner = new.owner(area.name) or old.owner(area.name)
    windows = old.windows(area.name), new.windows(area.name)
    if owner is None or windows[0] is None or windows[1] is None:
        yield _difference("file", None, area)
        return
    found = _difference("memory", owner, area)
    differing = [at for at in sorted(windows[0].keys() | windows[1].keys()) if windows[0].get(at) != windows[1].get(at)]
    if differing:
        changed = sum(max(side[at][1] if at in side else 0 for side in (windows[0], windows[1])) for at in differing)
        ranges = _merged((at, at + new.piece_bytes) for at in differing)
        yield replace(found, changed_bytes=changed, ranges=tuple(ranges))


def _difference(kind: str, process: ProcessRecord | None, area: AreaDiff) -> Difference:
    return Difference(
        kind,
        process.name if process is not None else area.name,
        process.pid if process is not None else None,
        area.size_before_bytes,
        area.size_after_bytes,
        area.changed_bytes,
        area.ranges,
    )


def _process(manifest: Manifest, pid: int) -> ProcessRecord:
    return next(process for process in manifest.processes if process.pid == pid)


def _addresses(ranges: Sequence[Range], extents: Sequence[StagedExtent]) -> Iterator[Range]:
    """The process's addresses for ranges of its staging file."""
    for start, end in ranges:
        for extent in extents:
            first, last = max(start, extent.offset), min(end, extent.offset + extent.size_bytes)
            if first < last:
                moved = extent.address - extent.offset
                yield first + moved, last + moved


def _merged(ranges: Iterable[Range]) -> list[Range]:
    merged: list[Range] = []
    for start, end in ranges:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged

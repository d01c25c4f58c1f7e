"""The snapshots of a store: their content, and how to find them.

``snapshots/ID`` is a sealed object (see crypto.py), written last: with it the snapshot exists. stored_snapshot.py has
what it holds. A tombstone in its place means that there is no such snapshot and never will be (see writers.py).
"""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from enum import Enum, auto

from msgspec import Struct

from gpucr.errors import InvalidRequest, StoreDamaged, StoreError
from gpucr.records import RecordError
from gpucr.store import retired, sets, writers
from gpucr.store.backend import Missing, ObjectInfo, together
from gpucr.store.crypto import SEALED_OVERHEAD_BYTES
from gpucr.store.opened import Store
from gpucr.store.pack import PREFIX as PACKS_PREFIX
from gpucr.store.pieces import PieceRef
from gpucr.store.reader import StoreReader
from gpucr.store.sets import StoredSet
from gpucr.store.stored_snapshot import (
    MAX_MANIFEST_BYTES,
    NAME,
    SHORT_ID,
    Area,
    SetPart,
    StoredSnapshot,
    decode,
    encode,
)
from gpucr.store.writer import StoreWriter
from gpucr.store.writers import Registration, snapshot_id_of

LATEST = "latest"
MAX_SNAPSHOT_BYTES = 256 << 20
_INLINE_PIECES = 64
_READERS = 8


def check_name(name: str) -> None:
    """Raise InvalidRequest for an invalid snapshot name, which would be mistaken for something else."""
    if not NAME.fullmatch(name) or name == LATEST or re.fullmatch(r"[0-9a-f]{8,32}", name):
        raise InvalidRequest(
            f"{name!r} cannot be the name of a snapshot",
            hint="up to 100 letters, digits and . _ - ; not 'latest', and not like an id (8 or more of 0-9 a-f)",
        )


def make_area(name: str, refs: Sequence[PieceRef], writer: StoreWriter) -> Area:
    """An area of these pieces. A long list is itself stored as pieces, so that equal parts are stored once."""
    size_bytes = sum(ref.length for ref in refs)
    if len(refs) <= _INLINE_PIECES:
        return Area(name, size_bytes, tuple(refs))
    return Area(name, size_bytes, tuple(writer.add_list(refs)), is_long=True)


def commit(
    store: Store,
    registration: Registration,
    *,
    name: str | None,
    manifest: bytes,
    areas: Iterable[Area],
    counters: Mapping[str, int] | None = None,
    created: str | None = None,
    host: str | None = None,
    part: SetPart | None = None,
) -> StoredSnapshot:
    """Create the snapshot, which is immutable afterwards, and end the registration.

    All pieces of the areas are durable (`StoreWriter.flush`). ``created`` and ``host`` are those of a copy's source.
    The name has passed `check_name`. Raises StoreError if it cannot be completed.
    """
    now = datetime.fromtimestamp(registration.clock_s, timezone.utc).isoformat(timespec="milliseconds")
    snapshot = StoredSnapshot(
        registration.snapshot_id,
        name,
        created or now,
        host or platform.node(),
        manifest,
        tuple(areas),
        dict(counters or {}),
        part,
    )
    data = encode(snapshot)
    if len(data) > MAX_SNAPSHOT_BYTES or len(manifest) > MAX_MANIFEST_BYTES:
        registration.end()
        path = store.path(registration.snapshot_name)
        raise StoreError(
            "the snapshot cannot be completed: it names more files and processes than one snapshot can",
            path=path,
            hint="dump the job in parts",
        )
    writers.commit(store, registration, data)
    return snapshot


def load(store: Store, snapshot_id: str) -> StoredSnapshot:
    """The snapshot with this id. Raises StoreError if there is none, StoreDamaged if it is not intact."""
    found = _load(store, snapshot_id)
    if isinstance(found, StoredSnapshot):
        return found
    path = store.path(writers.snapshot_object(snapshot_id))
    raise StoreError(f"the store {store.backend.url} holds no snapshot {snapshot_id}", path=path)


class _None(Enum):
    """Why there is no such snapshot."""

    MISSING = auto()
    TOMBSTONE = auto()


def _load(store: Store, snapshot_id: str) -> StoredSnapshot | _None:
    name = writers.snapshot_object(snapshot_id)
    try:
        sealed = store.backend.read(name, 0, MAX_SNAPSHOT_BYTES + SEALED_OVERHEAD_BYTES)
    except Missing:
        return _None.MISSING
    except OSError as e:
        raise store.unreadable(name, e) from e
    body = store.unseal(name, sealed)
    if writers.is_tombstone(body):
        return _None.TOMBSTONE
    try:
        return decode(snapshot_id, body)
    except RecordError as e:
        raise store.damaged(name, f"is no valid snapshot: {e}") from e


class Listing(Struct, frozen=True):
    """The snapshots of a store, oldest first, and the unreadable ones, by id.

    ``stored_s``: when each was put into this store, by the store's clock. ``tombstones``: of dead writers. ``sets``:
    complete ones, by id.
    """

    snapshots: tuple[StoredSnapshot, ...]
    damaged: Mapping[str, StoreDamaged]
    stored_s: Mapping[str, float]
    tombstones: tuple[ObjectInfo, ...] = ()
    sets: Mapping[str, StoredSet] = {}

    def is_whole(self, snapshot: StoredSnapshot) -> bool:
        """Whether it is independent, or part of a complete set."""
        return snapshot.part is None or sets.is_part(snapshot, self.sets)

    def parts(self, made: StoredSet) -> tuple[StoredSnapshot, ...]:
        """The existing snapshots of a complete set, in node order."""
        found = {each.id: each for each in self.snapshots}
        return tuple(found[each] for each in made.snapshot_ids if each in found)

    def intact(self) -> tuple[StoredSnapshot, ...]:
        """All snapshots. Raises StoreDamaged if one cannot be read."""
        for snapshot_id, error in self.damaged.items():
            hint = f"get it back from another copy of the store, or remove it: gpucr rm STORE#{snapshot_id[:SHORT_ID]}"
            raise StoreDamaged(error.message, path=error.path, hint=hint) from error
        return self.snapshots

    def latest(self, name: str | None = None) -> StoredSnapshot:
        """The latest, or the latest with this name; there must be at least one.

        Raises StoreDamaged if an unreadable one, whose name is unknown, may be later.
        """
        found = [each for each in self.snapshots if self.is_whole(each) and name in (None, each.name)][-1]
        for snapshot_id, error in self.damaged.items():
            if self.stored_s[snapshot_id] >= self.stored_s[found.id]:
                hint = "name another snapshot by its id: gpucr ls lists them"
                raise StoreDamaged(error.message, path=error.path, hint=hint) from error
        return found


def list_all(store: Store) -> Listing:
    """All snapshots. Snapshots removed meanwhile are skipped. Raises StoreError."""
    try:
        listed = store.backend.list(writers.SNAPSHOTS_PREFIX)
        infos = [info for info in listed if snapshot_id_of(info.name)]
    except OSError as e:
        raise store.not_usable(e) from e
    found: list[StoredSnapshot] = []
    damaged: dict[str, StoreDamaged] = {}
    tombstones: list[ObjectInfo] = []
    with ThreadPoolExecutor(_READERS, "snapshots") as pool:
        for group in together(infos, MAX_SNAPSHOT_BYTES // 4):
            for info, result in sorted(_load_group(store, group, pool), key=lambda each: each[0].name):
                if isinstance(result, StoredSnapshot):
                    found.append(result)
                elif isinstance(result, StoreDamaged):
                    damaged[_id_in(info)] = result
                elif result is _None.TOMBSTONE:
                    tombstones.append(info)
    complete, bad = _sets_of(store, found)
    damaged |= {each.id: bad[each.part.set_id] for each in found if each.part is not None and each.part.set_id in bad}
    there = {*damaged, *(each.id for each in found)}
    stored_s = {_id_in(info): info.modified_s for info in infos if _id_in(info) in there}
    in_order = sorted((each for each in found if each.id not in damaged), key=lambda each: (each.created_s, each.id))
    return Listing(tuple(in_order), damaged, stored_s, tuple(tombstones), complete)


def _sets_of(
    store: Store, found: Iterable[StoredSnapshot]
) -> tuple[Mapping[str, StoredSet], Mapping[str, StoreDamaged]]:
    """The complete sets of these snapshots, and damaged ones, whose parts cannot be restored."""
    complete: dict[str, StoredSet] = {}
    damaged: dict[str, StoreDamaged] = {}
    for set_id in sorted({each.part.set_id for each in found if each.part is not None}):
        try:
            if (made := sets.find(store, set_id)) is not None:
                complete[set_id] = made
        except StoreDamaged as e:
            damaged[set_id] = e
    return complete, damaged


def _id_in(info: ObjectInfo) -> str:
    return info.name.rpartition("/")[2]


def _load_group(
    store: Store, group: Sequence[ObjectInfo], pool: ThreadPoolExecutor
) -> Iterator[tuple[ObjectInfo, StoredSnapshot | StoreDamaged | _None]]:
    """Each with what it is, in any order. Every thread has one share: of 2,000 tasks, threads mostly wait."""
    shares = [group[number::_READERS] for number in range(min(_READERS, len(group)))]
    for found in pool.map(lambda share: [(each, _load_listed(store, each)) for each in share], shares):
        yield from found


def _load_listed(store: Store, info: ObjectInfo) -> StoredSnapshot | StoreDamaged | _None:
    if info.size_bytes > MAX_SNAPSHOT_BYTES + SEALED_OVERHEAD_BYTES:
        return store.damaged(info.name, f"is larger than {MAX_SNAPSHOT_BYTES} bytes")
    try:
        return _load(store, _id_in(info))
    except StoreDamaged as e:
        return e


def find(store: Store, wanted: str | None) -> StoredSnapshot:
    """The named snapshot: a name (the latest of that name), an id or its first 8 or more digits, ``latest``.

    None: the only one. The id of a set, or its first 8 or more digits, names that set.

    Raises InvalidRequest if none or several match, StoreDamaged, StoreError.
    """
    (found, *others) = find_parts(store, wanted)
    if others:
        raise InvalidRequest(
            f"{store.backend.url}#{wanted} is a set of {1 + len(others)} nodes",
            hint="restore it with `gpucr nodes restore` on each of them, or name one part by its id (gpucr ls)",
        )
    return found


def find_parts(store: Store, wanted: str | None) -> tuple[StoredSnapshot, ...]:
    """Like `find`, but returns all parts of a set, in node order. An id names one part.

    Raises StoreError for a name that only parts of incomplete sets have.
    """
    listing = list_all(store)
    found, url = listing.snapshots, store.backend.url
    if not found:
        listing.intact()
        raise InvalidRequest(f"the store {url} holds no snapshot", hint="dump into it first")
    count = len(found) + len(listing.damaged)
    if wanted is None and count > 1:
        raise InvalidRequest(f"the store {url} holds {count} snapshots", hint=f"name one: {url}#latest, {url}#NAME")
    wanted = LATEST if wanted is None else wanted
    named = [each for each in found if wanted in (LATEST, each.name)]
    if named:
        if not any(map(listing.is_whole, named)):
            sets.require_complete(store, named[-1])
        latest = listing.latest(None if wanted == LATEST else wanted)
        return (latest,) if latest.part is None else _all_parts(store, listing, listing.sets[latest.part.set_id])
    meant = [snapshot for snapshot in found if snapshot.id.startswith(wanted)] if len(wanted) >= SHORT_ID else []
    if len(meant) == 1:
        return (meant[0],)
    of_sets = [each for each in listing.sets if each.startswith(wanted)] if len(wanted) >= SHORT_ID else []
    if not meant and len(of_sets) == 1:
        return _all_parts(store, listing, listing.sets[of_sets[0]])
    for snapshot_id, error in listing.damaged.items():
        if not meant and len(wanted) >= SHORT_ID and snapshot_id.startswith(wanted):
            raise error
    if not meant and listing.damaged:  # their names are not known
        error = next(iter(listing.damaged.values()))
        message = f"no snapshot {wanted!r} can be found in {url}, and one that may be it is damaged: {error.message}"
        raise StoreDamaged(message, path=error.path, hint=f"check the store: gpucr verify {url}") from error
    what = f"{len(meant)} snapshots whose id begins with" if meant else "no snapshot"
    raise InvalidRequest(f"the store {url} holds {what} {wanted!r}", hint=f"list what it holds: gpucr ls {url}")


def _all_parts(store: Store, listing: Listing, made: StoredSet) -> tuple[StoredSnapshot, ...]:
    parts = listing.parts(made)
    if len(parts) < len(made.snapshot_ids):
        there = {each.id for each in parts}
        missing = [str(node) for node, each in enumerate(made.snapshot_ids) if each not in there]
        raise StoreDamaged(
            f"the set {made.label} lacks the snapshot of node {', '.join(missing)}",
            path=store.backend.url,
            hint="use another set, or another copy of the store",
        )
    whose = [(each.part.set_id, each.part.node) if each.part is not None else None for each in parts]
    strays = [str(node) for node, each in enumerate(whose) if each != (made.id, node)]
    if strays:
        raise StoreDamaged(
            f"the set {made.label} has a snapshot that is not its part of node {', '.join(strays)}",
            path=store.backend.url,
            hint="use another set, or another copy of the store",
        )
    return parts


def find_to_remove(store: Store, wanted: str) -> tuple[StoredSnapshot, ...]:
    """Like `find_parts`, but also finds an unreadable one by its id; only its id and time are known.

    Raises InvalidRequest, StoreDamaged, StoreError.
    """
    try:
        return find_parts(store, wanted)
    except StoreDamaged:
        listing = list_all(store)
        meant = [each for each in listing.damaged if each.startswith(wanted)] if len(wanted) >= SHORT_ID else []
        if len(meant) != 1:
            raise
        stored = datetime.fromtimestamp(listing.stored_s[meant[0]], timezone.utc)
        return (StoredSnapshot(meant[0], None, stored.isoformat(timespec="milliseconds"), "", b"", ()),)


def remove(store: Store, snapshot_id: str) -> None:
    """Remove a snapshot. Its pieces stay until a prune finds that nothing else needs them. Raises StoreError."""
    try:
        store.backend.delete(writers.snapshot_object(snapshot_id))
    except OSError as e:
        raise store.not_usable(e) from e


def live_pieces(snapshot: StoredSnapshot, reader: StoreReader) -> Iterable[PieceRef]:
    """All pieces that a snapshot needs, including those of its lists, without zeros. Raises StoreDamaged."""
    for area in snapshot.areas:
        yield from (ref for ref in area.listed if not ref.is_zero)
        if area.is_long:
            yield from (ref for ref in area.pieces(reader) if not ref.is_zero)


def open_reader(store: Store, snapshot: StoredSnapshot) -> StoreReader:
    """A reader that can locate everything that the snapshot needs.

    Footers of packs are read only for pieces that no index lists. Raises StoreDamaged if a piece is nowhere, and
    StoreError.
    """
    try:
        return _complete_reader(store, snapshot, footers=False)
    except StoreDamaged:
        return _complete_reader(store, snapshot, footers=True)


def _complete_reader(store: Store, snapshot: StoredSnapshot, *, footers: bool) -> StoreReader:
    index = retired.complete_index(store, footers=footers)
    reader = StoreReader(store, index)
    for ref in live_pieces(snapshot, reader):
        if index.find(ref.id) is None:
            what = f"lacks the piece {ref.id.hex()}, which the snapshot {snapshot.label} needs"
            raise store.damaged(PACKS_PREFIX, what)
    return reader

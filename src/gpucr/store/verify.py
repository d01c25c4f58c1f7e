"""Verify that snapshots of a store are readable, without restoring them.

The shallow check makes sure that every piece is where the index says: its pack exists, has its full size, and lists it
in its own footer. The deep one reads every piece and compares it with its name.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from msgspec import Struct

from gpucr.errors import StoreDamaged
from gpucr.store import index as indexes
from gpucr.store import read_back, retired, snapshots
from gpucr.store.backend import Buffer
from gpucr.store.index import Index
from gpucr.store.opened import Store
from gpucr.store.pack import Place, iter_entries, pack_name
from gpucr.store.pieces import PieceRef
from gpucr.store.reader import StoreReader
from gpucr.store.stored_snapshot import StoredSnapshot

_READERS = 8


class VerifyReport(Struct, frozen=True):
    """What was checked, and the problems by snapshot id, one sentence each. Empty: no problems.

    For a whole store, also problems of objects that no snapshot needs, by name.
    """

    snapshots: tuple[StoredSnapshot, ...]
    pieces: int
    packs: int
    read_bytes: int
    problems: Mapping[str, tuple[str, ...]]


def verify(
    store: Store,
    wanted: Sequence[StoredSnapshot] | None = None,
    *,
    deep: bool = False,
    older_than_s: float = 0.0,
    share: float = 1.0,
    on_bytes: Callable[[int], None] | None = None,
) -> VerifyReport:
    """Check these snapshots, or all. Raises StoreError if the store itself does not work.

    ``deep``: read what was last read longer ago than ``older_than_s``, and record it. Each thread reads in at most this
    ``share`` of the time. ``on_bytes`` gets the size of every piece read, from several threads.
    """
    problems: dict[str, list[str]] = {}
    is_whole_store = wanted is None
    if wanted is None:
        listing = snapshots.list_all(store)
        wanted = listing.snapshots
        problems = {snapshot_id: [error.message] for snapshot_id, error in listing.damaged.items()}
    inventory = retired.inventory(store, footers=True)
    check = _Check(store, inventory.index(), share)
    if is_whole_store:
        problems |= {name: [_without(name, error)] for name, error in inventory.damaged.items()}
        problems |= {name: [what] for name, what in store.damaged_keys().items()}
    needed = {snapshot.id: check.needed(snapshot, problems.setdefault(snapshot.id, [])) for snapshot in wanted}
    refs = list(dict.fromkeys(ref for each in needed.values() for ref in each))
    bad = check.places(refs)
    read_bytes = 0
    if deep:
        began_s = time.time()
        sound = check.not_read([ref for ref in refs if ref.id not in bad], older_than_s, began_s)
        read_bytes = sum(ref.length for ref in sound)
        try:
            bad |= check.contents(sound, on_bytes or _ignore)
        finally:
            check.note(began_s)  # also if it was cut short
    for snapshot_id, each in needed.items():
        problems[snapshot_id] += dict.fromkeys(bad[ref.id] for ref in each if ref.id in bad)
    found = {snapshot_id: tuple(texts) for snapshot_id, texts in problems.items() if texts}
    return VerifyReport(tuple(wanted), len(refs), len(check.by_pack(refs)), read_bytes, found)


class _Check:
    def __init__(self, store: Store, index: Index, share: float) -> None:
        self._store = store
        self._share = share
        self._right: list[PieceRef] = []
        self._index = index
        self._reader = StoreReader(store, index)

    def needed(self, snapshot: StoredSnapshot, problems: list[str]) -> Sequence[PieceRef]:
        """The pieces of a snapshot, each once; an unreadable list is a problem."""
        refs: dict[PieceRef, None] = {}
        for area in snapshot.areas:
            refs.update(dict.fromkeys(area.listed))
            try:
                refs.update(dict.fromkeys(area.pieces(self._reader)))
            except StoreDamaged as e:
                problems.append(f"the list of the pieces of {area.name} cannot be read: {e.message}")
        return [ref for ref in refs if not ref.is_zero]

    def by_pack(self, refs: Iterable[PieceRef]) -> Mapping[bytes, Sequence[tuple[PieceRef, Place]]]:
        """The pieces that are in the index, by pack."""
        found: dict[bytes, list[tuple[PieceRef, Place]]] = {}
        for ref in refs:
            place = self._index.find(ref.id)
            if place is not None:
                found.setdefault(place.pack_id, []).append((ref, place))
        return found

    def places(self, refs: Sequence[PieceRef]) -> dict[bytes, str]:
        """Problems with the places of these pieces, by piece."""
        bad = {ref.id: "a piece is in no pack" for ref in refs if self._index.find(ref.id) is None}

        def look(item: tuple[bytes, Sequence[tuple[PieceRef, Place]]]) -> dict[bytes, str]:
            pack_id, wanted = item
            try:
                footer = {entry.id: entry for entry in iter_entries(indexes.read_footer(self._store, pack_id).entries)}
            except StoreDamaged as e:
                return {ref.id: e.message for ref, _ in wanted}
            text = f"{self._store.path(pack_name(pack_id))} lists a piece elsewhere than the index does"
            return {ref.id: text for ref, place in wanted if footer.get(ref.id, ())[1:] != tuple(place)[1:]}

        with ThreadPoolExecutor(_READERS, "verify") as pool:
            for found in pool.map(look, self.by_pack(refs).items()):
                bad |= found
        return bad

    def not_read(self, refs: Sequence[PieceRef], older_than_s: float, now_s: float) -> list[PieceRef]:
        """Those that were not read within this time. Raises StoreError."""
        try:
            read = read_back.recent(self._store, older_than_s, now_s)
        except OSError as e:
            raise self._store.not_usable(e) from e
        places = {ref: self._index.find(ref.id) for ref in refs}
        return [ref for ref, place in places.items() if place is None or read_back.key_of(place) not in read]

    def note(self, began_s: float) -> None:
        """Record what was read and found right; not where it is not known which of several copies was."""
        places = [found for ref in self._right if len(found := self._index.places(ref.id)) == 1]
        read_back.note(self._store, [place for (place,) in places], why="verify", began_s=began_s)

    def contents(self, refs: Sequence[PieceRef], on_bytes: Callable[[int], None]) -> dict[bytes, str]:
        """Problems with the contents of these pieces, by piece, unless another pack has a good copy."""
        bad: dict[bytes, str] = {}
        in_order = [ref for wanted in self.by_pack(refs).values() for ref, _ in sorted(wanted, key=_block)]

        last = threading.local()

        def count(number: int, data: Buffer | None) -> None:
            self._right.append(in_order[number])
            on_bytes(in_order[number].length)
            now = time.monotonic()
            if self._share < 1:
                time.sleep(max(0.0, now - getattr(last, "s", now)) * (1 / self._share - 1))
            last.s = time.monotonic()

        def note(number: int, error: StoreDamaged) -> None:
            bad[in_order[number].id] = error.message

        self._reader.stream(in_order, count, note)
        return bad


def _block(item: tuple[PieceRef, Place]) -> int:
    return item[1].block


def _without(name: str, error: StoreDamaged) -> str:
    remedy = "while no prune is at work, delete it" if name.endswith(".packs") else "a prune replaces it"
    return f"{error.message}; no snapshot needs it: {remedy}"


def _ignore(size_bytes: int) -> None:
    pass

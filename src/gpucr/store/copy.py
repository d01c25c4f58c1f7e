"""Copies a snapshot from one store to another: only pieces that are missing there, encrypted for the target.

What was copied is made known to the target now and then, so that a copy that was cut off goes on from there when it is
begun again. A snapshot that was copied before gets back what it lacks by now. Between stores without encryption that
name pieces by the same hash, a piece that the target has is not even read; where one of them is encrypted, only its
content tells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from gpucr.store import retired, snapshots
from gpucr.store.backend import Buffer
from gpucr.store.index import Index
from gpucr.store.opened import Store
from gpucr.store.pieces import PieceRef
from gpucr.store.reader import StoreReader
from gpucr.store.session import WriteSession
from gpucr.store.snapshots import StoredSnapshot

_FLUSH_BYTES = 1 << 30


def copy(
    source: Store,
    snapshot: StoredSnapshot,
    target: Store,
    *,
    on_bytes: Callable[[int], None] | None = None,
    flush_bytes: int = _FLUSH_BYTES,
) -> StoredSnapshot:
    """The snapshot as it is in the target now; one that is there already, in whole packs, is not copied again.

    It gets an id of its own there; name, time and host stay. ``on_bytes`` is told the size of every piece that is done,
    by several threads. Raises StoreDamaged, also where a pack of one that is there has its size and not its content, as
    far as that shows here, and StoreError.
    """
    there = _same(snapshot, snapshots.list_all(target).snapshots)
    if there is not None and _is_whole(target, there):
        return there
    reader = snapshots.open_reader(source, snapshot)
    with WriteSession.begin(target) as session:
        lists = {area.name: area.pieces(reader) for area in snapshot.areas}
        moved = _Moved(reader, session, on_bytes or _ignore)
        for part in _parts(list(dict.fromkeys(ref for refs in lists.values() for ref in refs)), flush_bytes):
            moved.move(part)
            session.writer.flush()
        areas = tuple(session.area(name, moved.refs(refs)) for name, refs in lists.items())
        if there is not None and areas == there.areas:
            session.writer.flush()  # with what it lacked, the one that is there is whole again
            return there
        return session.commit(
            name=snapshot.name,
            manifest=snapshot.manifest,
            areas=areas,
            created=snapshot.created,
            host=snapshot.host,
            counters=snapshot.counters,
        )


class _Moved:
    """Which pieces of the target take the place of a piece of the source."""

    def __init__(self, reader: StoreReader, session: WriteSession, on_bytes: Callable[[int], None]) -> None:
        self._reader = reader
        self._writer = session.writer
        self._known = session.known
        self._on_bytes = on_bytes
        self._there: dict[PieceRef, Sequence[PieceRef]] = {}
        source, target = reader.store, session.writer.store
        self._same_names = source.keys is None and target.keys is None and source.config.hash == target.config.hash

    def move(self, refs: Sequence[PieceRef]) -> None:
        """Make sure that the target has these pieces."""
        missing = []
        for ref in refs:
            if ref.is_zero or (self._same_names and self._known.find(ref.id) is not None):
                self._there[ref] = (ref,)
                self._on_bytes(ref.length)
            else:
                missing.append(ref)

        def deliver(number: int, data: Buffer | None) -> None:
            # A piece of the source may be larger than those of the target.
            self._there[missing[number]] = self._writer.add_all(data if data is not None else b"")
            self._on_bytes(missing[number].length)

        self._reader.stream(missing, deliver)

    def refs(self, refs: Sequence[PieceRef]) -> Sequence[PieceRef]:
        """The pieces of the target for these of the source."""
        return [there for ref in refs for there in self._there[ref]]


def _same(snapshot: StoredSnapshot, there: Sequence[StoredSnapshot]) -> StoredSnapshot | None:
    def identity(each: StoredSnapshot) -> object:
        return each.name, each.created, each.host, each.manifest, [(area.name, area.size_bytes) for area in each.areas]

    return next((each for each in there if identity(each) == identity(snapshot)), None)


def _is_whole(target: Store, there: StoredSnapshot) -> bool:
    """Whether all that it needs is in packs that are there in their full size. Raises StoreDamaged, StoreError."""
    index = Index()
    for pack in retired.inventory(target, footers=True).packs.values():
        if pack.contents is not None and pack.is_whole:
            index.add(pack.contents)
    needed = snapshots.live_pieces(there, StoreReader(target, index))
    return all(index.find(piece_id) is not None for piece_id in needed)


def _parts(refs: Sequence[PieceRef], part_bytes: int) -> Iterator[Sequence[PieceRef]]:
    part: list[PieceRef] = []
    size_bytes = 0
    for ref in refs:
        part.append(ref)
        size_bytes += ref.length
        if size_bytes >= part_bytes:
            yield part
            part, size_bytes = [], 0
    if part:
        yield part


def _ignore(size_bytes: int) -> None:
    pass

"""Copy a snapshot from one store to another: only pieces missing there, encrypted for the target.

The target's index is written from time to time, so that a repeated copy continues where an interrupted one stopped. A
snapshot copied earlier gets back pieces that it lacks by now. What the target already has is read and checked there,
once. Between unencrypted stores with the same hash, the source need not be read for that; if one of them is encrypted,
the contents must be compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from gpucr.errors import StoreDamaged
from gpucr.store import retired, sharing, snapshots
from gpucr.store.backend import Buffer
from gpucr.store.checks import Checks
from gpucr.store.index import Index
from gpucr.store.opened import Store
from gpucr.store.pieces import PieceRef
from gpucr.store.reader import StoreReader
from gpucr.store.session import WriteSession
from gpucr.store.stored_snapshot import StoredSnapshot

_FLUSH_BYTES = 1 << 30


def copy(
    source: Store,
    snapshot: StoredSnapshot,
    target: Store,
    *,
    on_bytes: Callable[[int], None] | None = None,
    checks: Checks | None = None,
    flush_bytes: int = _FLUSH_BYTES,
) -> StoredSnapshot:
    """Returns the snapshot in the target; an intact existing one is not copied again.

    It gets an id of its own there; name, time and host stay. ``on_bytes`` is told the size of every piece that is done,
    by several threads. ``checks`` are those of the target: what it has is read before it is relied on, and copied again
    where it is damaged. Raises StoreDamaged, StoreError.
    """
    for each in (source, target):
        sharing.require_may_keep_jobs(each.backend)  # root's copies would belong to root there
    checks = checks if checks is not None else Checks()
    there = _same(snapshot, snapshots.list_all(target).snapshots)
    if there is not None and _is_intact(target, there, checks):
        return there
    reader = snapshots.open_reader(source, snapshot)
    with WriteSession.begin(target, checks=checks, why="copy") as session:
        lists = {area.name: area.pieces(reader) for area in snapshot.areas}
        moved = _Moved(reader, session, on_bytes or _ignore)
        for part in _parts(list(dict.fromkeys(ref for refs in lists.values() for ref in refs)), flush_bytes):
            moved.move(part)
            session.writer.flush()
        areas = tuple(session.area(name, moved.refs(refs)) for name, refs in lists.items())
        if there is not None and areas == there.areas:
            session.writer.flush()  # the existing one is complete again
            return there
        return session.commit(
            name=snapshot.name,
            manifest=snapshot.manifest,
            areas=areas,
            created=snapshot.created,
            host=snapshot.host,
            counters=snapshot.counters,
            part=snapshot.part,
        )


class _Moved:
    """Maps pieces of the source to pieces of the target."""

    def __init__(self, reader: StoreReader, session: WriteSession, on_bytes: Callable[[int], None]) -> None:
        self._reader = reader
        self._writer = session.writer
        self._on_bytes = on_bytes
        self._there: dict[PieceRef, Sequence[PieceRef]] = {}
        source, target = reader.store, session.writer.store
        self._same_names = source.keys is None and target.keys is None and source.config.hash == target.config.hash

    def move(self, refs: Sequence[PieceRef]) -> None:
        """Make sure that the target has these pieces."""
        zeros = [ref for ref in refs if ref.is_zero]
        missing = [ref for ref in refs if not ref.is_zero]
        for ref in zeros:
            self._take(ref)
        if self._same_names:
            missing = self._writer.rely_on(missing, self._take)

        def deliver(number: int, data: Buffer | None) -> None:
            # A piece of the source may be larger than those of the target.
            self._there[missing[number]] = self._writer.add_all(data if data is not None else b"")
            self._on_bytes(missing[number].length)

        self._reader.stream(missing, deliver)

    def _take(self, ref: PieceRef) -> None:
        """The target has it under the same name."""
        self._there[ref] = (ref,)
        self._on_bytes(ref.length)

    def refs(self, refs: Sequence[PieceRef]) -> Sequence[PieceRef]:
        """The pieces of the target for these of the source."""
        return [there for ref in refs for there in self._there[ref]]


def _same(snapshot: StoredSnapshot, there: Sequence[StoredSnapshot]) -> StoredSnapshot | None:
    def identity(each: StoredSnapshot) -> object:
        return each.name, each.created, each.host, each.manifest, [(area.name, area.size_bytes) for area in each.areas]

    return next((each for each in there if identity(each) == identity(snapshot)), None)


def _is_intact(target: Store, there: StoredSnapshot, checks: Checks) -> bool:
    """Whether all that it needs is intact, in packs of full size.

    Raises StoreError.
    """
    index = Index()
    for pack in retired.inventory(target, footers=True).packs.values():
        if pack.contents is not None and pack.is_whole:
            index.add(pack.contents)
    reader = StoreReader(target, index)
    try:
        places = {ref: index.find(ref.id) for ref in snapshots.live_pieces(there, reader)}
    except StoreDamaged:  # a list of its pieces
        return False
    known = [(ref, place) for ref, place in places.items() if place is not None]
    return len(known) == len(places) and not checks.damaged(reader, known)


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

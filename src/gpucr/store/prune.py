"""Remove old snapshots, dead writers' remains, and unneeded packs, while others dump and restore.

Nothing is locked. retired.py and writers.py explain the rules and why they are safe: a pack is retired by one prune and
deleted by a later one. Every step can be interrupted and repeated.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Set

from msgspec import Struct, structs

from gpucr.errors import StoreDamaged, StoreError, Unsupported
from gpucr.quantities import counted
from gpucr.store import index as indexes
from gpucr.store import read_back, retired, sets, sharing, snapshots, writers
from gpucr.store.checks import Checks
from gpucr.store.index import Index
from gpucr.store.opened import DISK_FULL, NO_SPACE, Store
from gpucr.store.pack import Entry, Place, iter_entries, pack_name
from gpucr.store.pieces import PieceRef
from gpucr.store.reader import StoreReader
from gpucr.store.retention import DEAD_AFTER_S, PruneRules, choose
from gpucr.store.retired import Batch, Inventory, Pack
from gpucr.store.snapshots import Listing
from gpucr.store.stored_snapshot import StoredSnapshot
from gpucr.store.writer import StoreWriter

_TOMBSTONE_S = 30 * 24 * 3600.0
"""A writer would have to sleep for this long, and then commit at once, to do harm."""


class LaterSpace(Struct, frozen=True):
    """Space that a later prune frees: from ``after_s`` on, once the ``writers`` now at work have ended.

    ``after_s``: seconds since 1970 by the clock of the store. None: a snapshot needs these packs, as there is no other
    intact copy.
    """

    size_bytes: int
    after_s: float | None
    writers: int


class PruneReport(Struct, frozen=True):
    """What a prune did, or with ``dry_run`` would do.

    ``retired_bytes`` are deleted by a later prune; ``waiting_bytes`` were retired before and must still wait;
    ``deleted_bytes`` is the space that is free now. ``repacked_bytes`` were stored again in other packs. ``later`` says
    when retired data can go, earliest first.
    """

    kept: tuple[StoredSnapshot, ...] = ()
    removed: tuple[StoredSnapshot, ...] = ()
    dead_writers: tuple[str, ...] = ()
    retired_packs: int = 0
    retired_bytes: int = 0
    waiting_packs: int = 0
    waiting_bytes: int = 0
    deleted_packs: int = 0
    deleted_bytes: int = 0
    repacked_bytes: int = 0
    later: tuple[LaterSpace, ...] = ()


def prune(
    store: Store,
    rules: PruneRules,
    *,
    dry_run: bool = False,
    keep_one: bool = False,
    check: Callable[[], None] = lambda: None,
) -> PruneReport:
    """Remove what the rules do not keep. ``check`` may raise to end it. Raises StoreDamaged, StoreError.

    With ``keep_one`` raises Unsupported if the rules would remove all snapshots that they apply to. If a kept snapshot
    lacks a piece, no snapshot and no pack is removed: a damaged store is not pruned.
    """
    if not dry_run:
        sharing.require_may_prune(store.backend)
    try:
        try:
            return _Prune(store, rules, dry_run=dry_run, keep_one=keep_one, check=check).run()
        except OSError as e:
            raise store.not_usable(e) from e
    except StoreError as e:
        if e.code != NO_SPACE:
            raise
        hint = "free 1 MiB there by other means, and prune again: what is to go is written down before it goes"
        raise StoreError(e.message, path=e.path, hint=hint, code=NO_SPACE) from e


class _Prune:
    """One prune. Its safety depends on the order of the steps in `run`."""

    def __init__(
        self, store: Store, rules: PruneRules, *, dry_run: bool, keep_one: bool, check: Callable[[], None]
    ) -> None:
        self._store = store
        self._must_keep = keep_one and rules.may_keep_none
        self._check = check
        self._rules = rules
        self._dry_run = dry_run
        self._now_s = time.time()
        self._removed: list[StoredSnapshot] = []
        self._damaged_writers: set[str] = set()
        self._complete: Set[str] = frozenset()

    def run(self) -> PruneReport:
        registration = None
        if not self._dry_run:
            # A prune is a writer: this gives it the store's time, and lets it repack.
            registration = self._register()
            self._now_s = registration.clock_s
        try:
            if self._must_keep:
                self._require_one_kept(snapshots.list_all(self._store))
            return self._run(registration.snapshot_id if registration else "")
        finally:
            if registration is not None:
                registration.end()

    def _register(self) -> writers.Registration:
        try:
            return writers.Registration.register(self._store)
        except StoreError as e:
            if e.code != NO_SPACE:
                raise
        # There is not even room for a record. First remove what needs none: each removed snapshot makes room for a
        # record.
        self._store.backend.sweep(max(self._rules.dead_after_s, DEAD_AFTER_S))
        listing = snapshots.list_all(self._store)
        # The store's clock is unknown, but not earlier than this, so nothing looks older than it is.
        self._now_s = min(self._now_s, max(listing.stored_s.values(), default=0.0))
        if self._must_keep:
            self._require_one_kept(listing)
        kept, removed = choose_complete(listing, self._rules, self._now_s)
        self._live_pieces(kept, retired.inventory(self._store, footers=True))
        self._remove_snapshots(removed)
        return writers.Registration.register(self._store)

    def _require_one_kept(self, listing: Listing) -> None:
        kept, removed = choose_complete(listing, self._rules, self._now_s)
        if removed and not any(map(self._rules.applies_to, kept)):
            which = f" named {' or '.join(self._rules.names)}" if self._rules.names else ""
            raise Unsupported(
                f"no rule keeps any of the {counted(len(removed), 'snapshot')}{which} in {self._store.backend.url}",
                hint="add --keep-last 1; `gpucr rm STORE#NAME` removes a last one",
                code="GPUCR-NOTHING-KEPT",
            )

    def _remove_snapshots(self, removed: Sequence[StoredSnapshot]) -> None:
        if not self._dry_run:
            for set_id in sorted({each.part.set_id for each in removed if each.part is not None}):
                if set_id in self._complete:  # otherwise it was given up, which must stay recorded
                    sets.remove(self._store, set_id)
            for each in removed:
                self._check()
                snapshots.remove(self._store, each.id)
        self._removed += removed

    def _run(self, own_id: str) -> PruneReport:
        dead = self._end_dead_writers(own_id)
        # Batches, then writers, then snapshots: a batch's writer that is gone has committed, and is listed.
        batches = retired.batches(self._store, self._on_damaged_batch)
        alive = {key: each for key, each in writers.seen(self._store.backend).items() if key not in {own_id, *dead}}
        listing = snapshots.list_all(self._store)
        kept, removed = choose_complete(listing, self._rules, self._now_s)
        self._complete = listing.sets.keys()
        kept, unfinished = self._without_unfinished(kept, listing)
        removed += unfinished
        inventory = Inventory.load(self._store, batches)
        live = self._live_pieces(kept, inventory)
        # Only once the kept ones are known to be restorable: otherwise the only restorable one might be removed.
        self._remove_snapshots(removed)
        deleted, later = self._delete(inventory, live, alive.keys())
        waiting_bytes, waiting_packs = sum(each.size_bytes for each in later), len(later)
        # Data of running writers has no snapshot yet.
        oldest_s = min((each.since_s for each in alive.values()), default=float("inf"))
        settled = [pack for pack in inventory.in_use() if pack.created_s < oldest_s]
        dead_packs = [pack for pack in settled if not _needed(pack, live)]
        sparse = [pack for pack in settled if 0 < _needed_part(pack, live) < self._rules.repack_below]
        repacked_bytes = self._repack(inventory, sparse, live)
        if not self._dry_run:
            if dead_packs or sparse:
                retired.retire(self._store, [pack.id for pack in (*dead_packs, *sparse)])
            self._mend_index(inventory, {pack.id for pack in deleted})
            self._tidy(listing, oldest_s)
        return PruneReport(
            kept=tuple(kept),
            removed=tuple(self._removed),
            dead_writers=tuple(dead),
            retired_packs=len(dead_packs) + len(sparse),
            retired_bytes=sum(pack.size_bytes for pack in (*dead_packs, *sparse)),
            waiting_packs=waiting_packs,
            waiting_bytes=waiting_bytes,
            deleted_packs=len(deleted),
            deleted_bytes=sum(pack.size_bytes for pack in deleted),
            repacked_bytes=repacked_bytes,
            later=_together([*later, *(self._later(pack, self._now_s, len(alive)) for pack in (*dead_packs, *sparse))]),
        )

    def _without_unfinished(
        self, kept: Sequence[StoredSnapshot], listing: Listing
    ) -> tuple[list[StoredSnapshot], list[StoredSnapshot]]:
        """Without parts of sets that were given up, or incomplete for so long that nobody will complete them."""
        gone: dict[str, bool] = {}
        for each in kept:
            if each.part is None or listing.is_whole(each) or each.part.set_id in gone:
                continue
            set_id = each.part.set_id
            is_old = self._now_s - each.created_s > self._rules.dead_after_s
            if is_old and not self._dry_run:
                gone[set_id] = sets.abandon(self._store, set_id) is None
            else:
                gone[set_id] = is_old or sets.is_abandoned(self._store, set_id)
        removed = [each for each in kept if each.part is not None and gone.get(each.part.set_id)]
        return [each for each in kept if each not in removed], removed

    def _end_dead_writers(self, own_id: str) -> Sequence[str]:
        dead = []
        for writer in writers.seen(self._store.backend).values():
            if writer.snapshot_id != own_id and self._now_s - writer.seen_s > self._rules.dead_after_s:
                try:
                    if not self._dry_run:
                        writers.end_dead(self._store, writer)
                except OSError as e:
                    if e.errno not in DISK_FULL:
                        raise
                    continue  # a later prune ends it, when there is room for a tombstone
                dead.append(writer.snapshot_id)
        return dead

    def _live_pieces(self, kept: Sequence[StoredSnapshot], inventory: Inventory) -> Set[bytes]:
        index = inventory.index()
        reader = StoreReader(self._store, index)
        live: set[bytes] = set()
        for snapshot in kept:
            self._check()
            needed = {ref.id for ref in snapshots.live_pieces(snapshot, reader)} - live
            for piece_id in needed:
                if index.find(piece_id) is None:
                    raise StoreDamaged(
                        f"the snapshot {snapshot.label} lacks the piece {piece_id.hex()}; nothing was removed",
                        path=self._store.path(writers.snapshot_object(snapshot.id)),
                        hint="verify the store; remove that snapshot if there is no other copy of it",
                    )
            live |= needed
        return live

    def _delete(
        self, inventory: Inventory, live: Set[bytes], alive: Set[str]
    ) -> tuple[Sequence[Pack], Sequence[LaterSpace]]:
        """Delete packs retired earlier and no longer needed. Returns those deleted, and when each other one can go."""
        batch_of = {pack_id: batch for batch in reversed(inventory.batches) for pack_id in batch.packs}
        leaving = {pack_id: pack for pack_id, pack in inventory.packs.items() if pack_id in batch_of}
        may = {pack_id for batch in inventory.batches if self._may_delete(batch, alive) for pack_id in batch.packs}
        lost = self._lost_with(leaving.values(), may, inventory, live)
        deleted = {
            pack_id: pack for pack_id, pack in leaving.items() if pack_id in may and lost.isdisjoint(_pieces(pack))
        }
        later = []
        for pack_id in leaving.keys() - deleted.keys():
            pack, batch = leaving[pack_id], batch_of[pack_id]
            writing = len(alive if batch.writers is None else batch.writers & alive)
            later.append(self._later(pack, batch.retired_s if lost.isdisjoint(_pieces(pack)) else None, writing))
        if not self._dry_run:
            for pack_id in deleted:
                self._check()
                self._store.backend.delete(pack_name(pack_id))
            self._forget(inventory, inventory.packs.keys() - deleted.keys())
        return list(deleted.values()), later

    def _later(self, pack: Pack, retired_s: float | None, writing: int) -> LaterSpace:
        if retired_s is None:
            return LaterSpace(pack.size_bytes, None, 0)
        return LaterSpace(pack.size_bytes, retired_s + self._rules.grace_s, writing)

    def _lost_with(
        self, packs: Collection[Pack], may: Set[bytes], inventory: Inventory, live: Set[bytes]
    ) -> Set[bytes]:
        """The needed pieces of these packs without a copy in a pack in use.

        Copies are checked for packs that ``may`` be deleted now.
        """
        in_use = Index()
        for pack in inventory.in_use():
            if pack.contents is not None and pack.is_whole:
                in_use.add(pack.contents)
        lost: set[bytes] = set()
        relied: dict[PieceRef, Place] = {}
        for pack in packs:
            for entry in _entries(pack):
                if entry.id in live:
                    place = in_use.find(entry.id)
                    if place is None:
                        lost.add(entry.id)
                    elif pack.id in may:
                        relied[PieceRef(entry.id, entry.raw_length)] = place
        damaged = Checks().damaged(StoreReader(self._store, in_use), relied.items())
        return lost | {ref.id for ref, _ in damaged}

    def _may_delete(self, batch: Batch, alive: Set[str]) -> bool:
        if batch.writers is None:
            if not self._dry_run:
                if batch.writers_name in self._damaged_writers:
                    self._store.backend.delete(batch.writers_name)
                retired.note_writers(self._store, batch)
            return False
        return not batch.writers & alive and self._now_s - batch.retired_s >= self._rules.grace_s

    def _forget(self, inventory: Inventory, there: Set[bytes]) -> None:
        """Remove index objects and batches whose packs are all gone."""
        for name, pack_ids in inventory.index_objects.items():
            if there.isdisjoint(pack_ids):
                self._store.backend.delete(name)
        for batch in inventory.batches:
            if there.isdisjoint(batch.packs):
                retired.remove(self._store, batch)

    def _repack(self, inventory: Inventory, sparse: Sequence[Pack], live: Set[bytes]) -> int:
        """Store the needed pieces of these packs again.

        Returns the bytes stored; with ``dry_run``, their current stored size.
        """
        if self._dry_run or not sparse:
            return sum(_needed(pack, live) for pack in sparse)
        emptied = {pack.id for pack in sparse}
        known = Index()
        for pack in inventory.in_use():
            if pack.contents is not None and pack.is_whole and pack.id not in emptied:
                known.add(pack.contents)
        reader = StoreReader(self._store, inventory.index())
        writer = StoreWriter(self._store, known)
        try:
            for pack in sparse:
                for entry in _entries(pack):
                    if entry.id in live:
                        self._check()
                        writer.add(reader.fetch(PieceRef(entry.id, entry.raw_length)))
            writer.flush()
        finally:
            writer.discard()
        return writer.counts.written_bytes

    def _on_damaged_batch(self, name: str, error: StoreDamaged) -> None:
        if name.endswith(".writers"):
            self._damaged_writers.add(name)  # running writers can be listed again at any time
            return
        # Its packs are unknown, so none may be relied on, or deleted because another one has its pieces.
        hint = "while no prune is at work, delete that file: the next prune lists unneeded data again"
        raise StoreDamaged(error.message, path=error.path, hint=hint) from error

    def _mend_index(self, inventory: Inventory, gone: Set[bytes]) -> None:
        """If an index object cannot be read, publish, from footers, the packs that no other one lists."""
        names = [name for name in inventory.damaged if name.startswith(indexes.PREFIX)]
        if not names:
            return
        told = {pack_id for pack_ids in inventory.index_objects.values() for pack_id in pack_ids}
        untold = [pack for pack in inventory.packs.values() if pack.id not in told | gone]
        indexes.publish(self._store, [pack.contents for pack in untold if pack.contents is not None])
        for name in names:
            self._store.backend.delete(name)

    def _tidy(self, listing: Listing, oldest_s: float) -> None:
        """Remove remains, except those of running writers; the oldest began at ``oldest_s``."""
        backend = self._store.backend
        backend.sweep(max(self._rules.dead_after_s, self._now_s - min(oldest_s, self._now_s)))
        for name in retired.leftovers(self._store):
            backend.delete(name)
        for info in listing.tombstones:
            if self._now_s - info.modified_s > _TOMBSTONE_S:
                backend.delete(info.name)
        read_back.tidy(self._store, self._now_s)
        used = {each.part.set_id for each in listing.snapshots if each.part is not None}
        for set_id, modified_s in sets.all_ids(self._store).items():
            if set_id not in used and self._now_s - modified_s > _TOMBSTONE_S:
                sets.remove(self._store, set_id)


def choose_complete(
    listing: Listing, rules: PruneRules, now_s: float
) -> tuple[list[StoredSnapshot], list[StoredSnapshot]]:
    """Like `choose`. A set counts as one snapshot, its last; parts of an incomplete set are kept, uncounted."""
    found = listing.intact()
    parts: dict[str, list[StoredSnapshot]] = {}
    for each in found:
        if each.part is not None and listing.is_whole(each):
            parts.setdefault(each.part.set_id, []).append(each)
    last = {group[-1].id: group for group in parts.values()}
    protected = [key for key, group in last.items() if {each.id for each in group} & {*rules.protected}]
    whole = [each for each in found if each.part is None or each.id in last]
    rules = structs.replace(rules, protected=(*rules.protected, *protected))
    if rules.counted is not None:
        count = [key for key, group in last.items() if {each.id for each in group} & {*rules.counted}]
        rules = structs.replace(rules, counted=(*rules.counted, *count))
    removed = [one for each in choose(whole, rules, now_s)[1] for one in last.get(each.id, [each])]
    gone = {each.id for each in removed}
    return [each for each in found if each.id not in gone], removed


def _together(later: Iterable[LaterSpace]) -> tuple[LaterSpace, ...]:
    """Merge what can go at the same time; needed data last."""
    sizes: dict[tuple[float | None, int], int] = {}
    for each in later:
        key = (each.after_s, each.writers)
        sizes[key] = sizes.get(key, 0) + each.size_bytes
    found = [LaterSpace(size_bytes, *key) for key, size_bytes in sizes.items()]
    return tuple(sorted(found, key=lambda each: (each.after_s is None, each.after_s or 0.0, each.writers)))


def _entries(pack: Pack) -> Iterator[Entry]:
    return iter_entries(pack.contents.entries if pack.contents is not None else b"")


def _pieces(pack: Pack) -> Iterator[bytes]:
    return (entry.id for entry in _entries(pack))


def _needed(pack: Pack, live: Set[bytes]) -> int:
    """How many bytes of the pack are needed."""
    return sum(entry.stored_length for entry in _entries(pack) if entry.id in live)


def _needed_part(pack: Pack, live: Set[bytes]) -> float:
    """Relative to the content, not the size: even a pack of only needed pieces has a footer."""
    stored = sum(entry.stored_length for entry in _entries(pack))
    return _needed(pack, live) / stored if stored else 0.0

"""Data that a writer reuses is read first, and damaged data is written again."""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest

from gpucr.errors import StoreDamaged
from gpucr.store import index, retired, snapshots
from gpucr.store.checks import Checks
from gpucr.store.copy import copy
from gpucr.store.index import Index
from gpucr.store.keys import Secret
from gpucr.store.opened import Store
from gpucr.store.pack import pack_name
from gpucr.store.prune import prune
from gpucr.store.retention import PruneRules
from gpucr.store.session import WriteSession
from gpucr.store.stored_snapshot import StoredSnapshot
from gpucr.store.verify import verify
from gpucr.store.writer import StoreWriter
from tests.store.dumps import MANIFEST, NEVER_S, PIECE_BYTES, content, dump, new_store, piece, restore
from tests.store.memory import FaultyBackend, MemoryBackend

AT_ONCE = PruneRules(grace_s=0.0)
LONG = {"a": content(*range(1, 101))}
"""More pieces than a snapshot's object lists: their list is stored as pieces itself."""

Damage = Callable[[FaultyBackend, str, int], None]


def _flip(place: FaultyBackend, name: str, offset: int) -> None:
    data, at = place.inner.objects[name]
    place.inner.objects[name] = (data[:offset] + bytes([data[offset] ^ 1]) + data[offset + 1 :], at)


def _other_bytes(place: FaultyBackend, name: str, offset: int) -> None:
    data, at = place.inner.objects[name]
    place.inner.objects[name] = (data[:offset] + bytes(PIECE_BYTES) + data[offset + PIECE_BYTES :], at)


def _bad_sector(place: FaultyBackend, name: str, offset: int) -> None:
    def fault(operation: str, read: str) -> None:
        if (operation, read) == ("read", name):
            raise OSError(errno.EIO, "Input/output error", name)

    place.fault = fault


def _place_of(store: Store, snapshot: StoredSnapshot, number: int = 0) -> tuple[str, int]:
    """The pack that holds one of its pieces, and where in it that lies."""
    reader = snapshots.open_reader(store, snapshot)
    place = reader._places(snapshot.areas[0].pieces(reader)[number])[0]
    return pack_name(place.pack_id), place.offset


def _damaged_store(secret: Secret | None, damage: Damage) -> tuple[FaultyBackend, Store, StoredSnapshot]:
    """A store with one snapshot of `LONG`, one piece is damaged."""
    place = FaultyBackend(MemoryBackend())
    store = new_store(place, secret)
    first = dump(store, LONG, "first")
    damage(place, *_place_of(store, first, 50))
    assert verify(store, deep=True).problems.keys() == {first.id}
    return place, store, first


@pytest.mark.parametrize("damage", [_flip, _other_bytes, _bad_sector])
def test_a_dump_rewrites_a_damaged_piece_and_the_good_copy_wins(damage: Damage, secret: Secret | None) -> None:
    _, store, first = _damaged_store(secret, damage)
    second = dump(store, LONG, "second")
    assert second.counters["repaired_bytes"] >= PIECE_BYTES
    for each in (first, second):
        assert restore(store, each) == LONG
    assert verify(store, deep=True).problems == {}
    third = dump(store, LONG, "third")
    assert third.counters["repaired_bytes"] == 0
    copied = copy(store, third, target := new_store(MemoryBackend()))
    assert restore(target, copied) == LONG


@pytest.mark.parametrize("repack_below", [0.0, 1.1])
def test_a_prune_keeps_the_good_copy(repack_below: float, secret: Secret | None) -> None:
    _, store, first = _damaged_store(secret, _flip)
    second = dump(store, LONG, "second")
    for _ in range(3):
        prune(store, PruneRules(grace_s=0.0, repack_below=repack_below))
        assert restore(store, first) == restore(store, second) == LONG
    snapshots.remove(store, first.id)
    for _ in range(3):
        prune(store, PruneRules(grace_s=0.0, repack_below=repack_below))
        assert restore(store, second) == LONG
    assert verify(store, deep=True).problems == {}


def test_a_list_of_pieces_is_read_before_it_is_reused(secret: Secret | None) -> None:
    place = FaultyBackend(MemoryBackend())
    store = new_store(place, secret)
    first = dump(store, LONG, "first")
    (area,) = first.areas
    found = snapshots.open_reader(store, first)._places(area.listed[0])[0]
    _flip(place, pack_name(found.pack_id), found.offset)
    assert restore(store, dump(store, LONG)) == LONG
    assert restore(store, first) == LONG


def test_every_piece_is_read_once_however_often_it_occurs(secret: Secret | None) -> None:
    place = FaultyBackend(MemoryBackend())
    store = new_store(place, secret)
    areas = {"a": content(1, 2, 3)}
    dump(store, areas)
    with WriteSession.begin(store, compress="none", refresh_s=NEVER_S) as session:
        place.calls.clear()
        for _ in range(5):
            session.writer.add_all(areas["a"])
        counts = session.writer.counts
    reads = [name for operation, name in place.calls if operation == "read" and name.startswith("packs/")]
    assert len(reads) == 3
    assert (counts.checked_bytes, counts.known_bytes) == (3 * PIECE_BYTES, 15 * PIECE_BYTES)


def test_trusted_pieces_are_not_read(secret: Secret | None) -> None:
    place = FaultyBackend(MemoryBackend())
    store = new_store(place, secret)
    first = dump(store, LONG)
    place.calls.clear()
    with WriteSession.begin(store, checks=Checks(trust=True), refresh_s=NEVER_S) as session:
        area = session.area("a", session.writer.add_all(LONG["a"]))
        second = session.commit(name=None, manifest=MANIFEST, areas=[area])
    assert not [name for operation, name in place.calls if operation == "read" and name.startswith("packs/")]
    assert second.counters["checked_bytes"] == 0
    assert second.areas == first.areas


def test_an_unreachable_store_fails_the_dump_and_is_not_damage(secret: Secret | None) -> None:
    place = FaultyBackend(MemoryBackend())
    store = new_store(place, secret)
    dump(store, LONG)
    there = place.inner.names()

    def gone(operation: str, name: str) -> str | None:
        return "before" if operation == "read" and name.startswith("packs/") else None

    place.fault = gone
    with pytest.raises(Exception, match="cannot be used: Connection reset by peer"):
        dump(store, LONG)
    assert place.inner.names() == there


def test_either_copy_of_a_piece_written_twice_can_be_used(secret: Secret | None) -> None:
    place = FaultyBackend(MemoryBackend())
    store = new_store(place, secret)
    with WriteSession.begin(store, compress="none", refresh_s=NEVER_S) as slow:
        made = slow.area("a", slow.writer.add_all(LONG["a"]))
        first = dump(store, LONG, "first")
        second = slow.commit(name="second", manifest=MANIFEST, areas=[made])
    _flip(place, *_place_of(store, first, 50))
    assert restore(store, first) == restore(store, second) == LONG
    assert verify(store, deep=True).problems == {}
    assert restore(store, dump(store, LONG)) == LONG


# --- prune -------------------------------------------------------------------------------------------------------


def test_the_last_good_copy_is_not_deleted_in_favour_of_a_damaged_one(secret: Secret | None) -> None:
    """Only the names in another pack say that a retired one is not needed any more."""
    place = FaultyBackend(MemoryBackend())
    store = new_store(place, secret)
    dump(store, {"a": content(1)}, "old")
    (leaving,) = place.inner.names("packs/")
    retired.retire(store, [bytes.fromhex(leaving.rpartition("/")[2])])
    kept = dump(store, {"a": content(1)}, "kept")
    (other,) = (name for name in place.inner.names("packs/") if name != leaving)
    whole = place.inner.objects[other]
    _flip(place, other, 0)
    for dry_run in (True, False, False, False):
        report = prune(store, AT_ONCE, dry_run=dry_run)
        assert (report.deleted_packs, report.waiting_packs) == (0, 1)
    assert restore(store, kept) == {"a": content(1)}
    place.inner.objects[other] = whole
    assert prune(store, AT_ONCE).deleted_packs == 1
    assert restore(store, kept) == {"a": content(1)}


# --- copies ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("again", [False, True])
def test_a_copy_reuses_only_what_it_has_read(again: bool, secret: Secret | None) -> None:
    """The target has this snapshot already, or the pieces of another one; one piece is damaged."""
    source, place = new_store(MemoryBackend()), FaultyBackend(MemoryBackend())
    target = new_store(place, secret)
    original = dump(source, LONG, "first")
    there = copy(source, original, target) if again else dump(target, LONG, "other")
    _flip(place, *_place_of(target, there, 50))
    copied = copy(source, original, target)
    assert (copied == there) == again
    assert restore(target, copied) == restore(target, there) == LONG
    assert verify(target, deep=True).problems == {}
    assert place.inner.names("writers/") == []


def test_a_copy_damaged_on_both_sides_fails_and_says_where() -> None:
    places = [FaultyBackend(MemoryBackend()) for _ in range(2)]
    source, target = (new_store(place) for place in places)
    dumped = dump(source, LONG, "first")
    copied = copy(source, dumped, target)
    for place, store, snapshot in ((places[0], source, dumped), (places[1], target, copied)):
        _flip(place, *_place_of(store, snapshot, 50))
    with pytest.raises(StoreDamaged, match="differs from what was written"):
        copy(source, dumped, target)
    assert len(snapshots.list_all(target).snapshots) == 1


def test_pieces_several_copies_reuse_are_read_once() -> None:
    source, place = new_store(MemoryBackend()), FaultyBackend(MemoryBackend())
    target = new_store(place)
    dumped = [dump(source, {"a": content(1, 2, number)}) for number in (3, 4, 5)]
    for each in dumped:
        copy(source, each, target)
    place.calls.clear()
    checks = Checks()
    for each in dumped:
        copy(source, each, target, checks=checks)
    assert checks.read_bytes == 5 * PIECE_BYTES
    trusted = Checks(trust=True)
    copy(source, dumped[0], target, checks=trusted)
    assert trusted.read_bytes == 0


# --- the writer alone ---------------------------------------------------------------------------------------------


def test_an_index_with_a_wrong_length_is_not_trusted() -> None:
    store = new_store(MemoryBackend())
    whole = StoreWriter(store, Index(), compress="none")
    ref = whole.add(piece(1))
    whole.flush()
    (contents,) = index.load(store).packs
    wrong = contents.entries[:40] + (PIECE_BYTES // 2).to_bytes(4, "little") + contents.entries[44:]
    known = Index()
    known.add(type(contents)(contents.pack_id, contents.size_bytes, wrong))
    writer = StoreWriter(store, known, compress="none")
    assert writer.add(piece(1)) == ref
    assert writer.counts.known_bytes == 0
    writer.discard()

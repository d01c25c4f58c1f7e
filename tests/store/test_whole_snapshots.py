"""Copy, verify and diff."""

from __future__ import annotations

import pytest

from gpucr.errors import StoreError
from gpucr.store import snapshots
from gpucr.store.copy import copy
from gpucr.store.diff import diff
from gpucr.store.keys import Secret
from gpucr.store.opened import Store
from gpucr.store.pack import iter_entries, pack_name
from gpucr.store.retired import Inventory
from gpucr.store.verify import verify
from tests.store.dumps import PIECE_BYTES, content, dump, new_store, restore
from tests.store.memory import FaultyBackend, Killed, MemoryBackend

AREAS = {"device/7": content(*range(1, 100), 0, 0), "images/a": b"abc", "images/empty": b""}


# --- copy --------------------------------------------------------------------------------------------------------


def test_a_copy_has_everything_but_the_id(secret: Secret | None) -> None:
    source, target = new_store(MemoryBackend()), new_store(MemoryBackend(), secret)
    dumped = dump(source, AREAS, "nightly")
    done: list[int] = []
    copied = copy(source, dumped, target, on_bytes=done.append)
    assert restore(target, copied) == AREAS
    assert copied.id != dumped.id
    assert (copied.name, copied.created, copied.host, copied.manifest) == (
        dumped.name, dumped.created, dumped.host, dumped.manifest,
    )  # fmt: skip
    assert sum(done) == dumped.size_bytes - PIECE_BYTES, "each piece once: the two of zeros are one"
    assert copy(source, dumped, target) == copied
    assert len(snapshots.list_all(target).snapshots) == 1


def test_only_missing_data_is_read_and_written() -> None:
    source_backend, target = MemoryBackend(), new_store(MemoryBackend())
    source = new_store(source_backend, pack_bytes=PIECE_BYTES)
    copy(source, dump(source, AREAS, "first"), target)
    second = dump(source, AREAS | {"images/b": content(1000)}, "second")
    faulty = FaultyBackend(source_backend)
    done: list[int] = []
    copy(Store.open(faulty), second, target, on_bytes=done.append)
    packs_read = {name for operation, name in faulty.calls if operation == "read" and name.startswith("packs/")}
    assert len(packs_read) <= 4, "the new piece, and the list of the long area"


def test_an_interrupted_copy_resumes(secret: Secret | None) -> None:
    source, backend = new_store(MemoryBackend()), MemoryBackend()
    dumped = dump(source, AREAS)
    new_store(backend, secret)
    indexes = 0

    def fault(operation: str, name: str) -> str | None:
        nonlocal indexes
        indexes += (operation, name[:6]) == ("create", "index/")
        return "kill" if indexes > 5 else None

    with pytest.raises(Killed):
        copy(source, dumped, Store.open(FaultyBackend(backend, fault), secret), flush_bytes=10 * PIECE_BYTES)
    stored = _stored_pieces(Store.open(backend, secret))
    assert len(stored) == 60, "ten at a time, the last ten of them in no index"
    target = Store.open(backend, secret)
    assert restore(target, copy(source, dumped, target)) == AREAS
    stored = _stored_pieces(target)
    assert len(stored) - len(set(stored)) == 10, "what an index reports is not stored again"


def _stored_pieces(store: Store) -> list[bytes]:
    packs = Inventory.load(store).packs.values()
    return [entry.id for pack in packs if pack.contents for entry in iter_entries(pack.contents.entries)]


def test_a_copy_into_a_store_with_smaller_pieces() -> None:
    source = Store.create(MemoryBackend(), piece_bytes=4 * PIECE_BYTES, pack_bytes=64 * PIECE_BYTES)
    target = new_store(MemoryBackend())
    assert restore(target, copy(source, dump(source, AREAS), target)) == AREAS


def test_a_copy_of_a_damaged_snapshot_commits_nothing() -> None:
    backend, target_backend = MemoryBackend(), MemoryBackend()
    source, target = new_store(backend), new_store(target_backend)
    dumped = dump(source, AREAS)
    _damage(backend, "packs/", 5000)
    with pytest.raises(StoreError, match="differs"):
        copy(source, dumped, target)
    assert snapshots.list_all(target).snapshots == ()
    assert target_backend.names("writers/") == []


@pytest.mark.parametrize("damage", ["missing", "short"])
def test_a_copy_replaces_a_pack_the_target_lost(damage: str, secret: Secret | None) -> None:
    backend = MemoryBackend()
    source, target = new_store(MemoryBackend()), new_store(backend, secret, pack_bytes=PIECE_BYTES)
    dumped = dump(source, AREAS)
    copied = copy(source, dumped, target)
    for name in backend.names("packs/")[::7]:
        data, at = backend.objects.pop(name)
        if damage == "short":
            backend.objects[name] = (data[:-1], at)
    assert verify(target).problems != {}
    assert copy(source, dumped, target) == copied, "the same one, which is whole again"
    assert restore(target, copied) == AREAS
    assert copy(source, dumped, target) == copied
    assert verify(target, deep=True).problems == {}


def test_a_copy_is_redone_where_pieces_had_another_size() -> None:
    """It came from a store with pieces of another size."""
    target_backend = MemoryBackend()
    target = Store.create(target_backend, piece_bytes=4 * PIECE_BYTES, pack_bytes=64 * PIECE_BYTES)
    backend = MemoryBackend()
    large = Store.create(backend, piece_bytes=4 * PIECE_BYTES, pack_bytes=64 * PIECE_BYTES)
    dumped = dump(large, AREAS)
    small = new_store(MemoryBackend())
    in_small, first = copy(large, dumped, small), copy(large, dumped, target)
    target_backend.delete(target_backend.names("packs/")[0])
    second = copy(small, in_small, target)
    assert second.id != first.id
    assert restore(target, second) == AREAS


def test_a_damaged_list_of_pieces_in_the_target_is_rewritten() -> None:
    backend = MemoryBackend()
    source, target = new_store(MemoryBackend()), new_store(backend, pack_bytes=PIECE_BYTES)
    dumped = dump(source, AREAS)
    copied = copy(source, dumped, target)
    place = snapshots.open_reader(target, copied)._index.find(copied.area("device/7").listed[0].id)
    assert place is not None
    data, at = backend.objects[pack_name(place.pack_id)]
    backend.objects[pack_name(place.pack_id)] = (b"\xff" + data[1:], at)
    assert copy(source, dumped, target) == copied
    assert restore(target, copied) == AREAS


# --- verify ------------------------------------------------------------------------------------------------------


def _damage(backend: MemoryBackend, prefix: str, offset: int) -> str:
    """Flip a bit of the largest object there."""
    name = max(backend.names(prefix), key=lambda each: len(backend.objects[each][0]))
    data, at = backend.objects[name]
    backend.objects[name] = (data[:offset] + bytes([data[offset] ^ 1]) + data[offset + 1 :], at)
    return name


def test_an_intact_store(secret: Secret | None) -> None:
    store = new_store(MemoryBackend(), secret)
    both = (dump(store, AREAS, "a"), dump(store, {"x": content(1, 500)}, "b"))
    report = verify(store)
    assert (report.snapshots, report.read_bytes, report.problems) == (both, 0, {})
    done: list[int] = []
    report = verify(store, deep=True, on_bytes=done.append)
    assert report.problems == {}
    assert sum(done) == report.read_bytes > 100 * PIECE_BYTES
    assert report.pieces == 99 + 1 + 1 + len(both[0].areas[0].listed)


def test_only_the_deep_check_finds_a_flipped_bit(secret: Secret | None) -> None:
    backend = MemoryBackend()
    store = new_store(backend, secret, pack_bytes=PIECE_BYTES)
    one, other = dump(store, {"x": content(1, 2)}, "one"), dump(store, {"x": content(2, 3)}, "other")
    index = snapshots.open_reader(store, one)
    place = index._index.find(one.areas[0].listed[0].id)
    assert place is not None
    name = next(each for each in backend.names("packs/") if place.pack_id.hex() in each)
    data, at = backend.objects[name]
    backend.objects[name] = (data[:9] + bytes([data[9] ^ 4]) + data[10:], at)
    assert verify(store).problems == {}
    report = verify(store, deep=True)
    assert list(report.problems) == [one.id]
    assert name in report.problems[one.id][0]
    assert verify(store, [other], deep=True).problems == {}


def test_a_pack_that_is_missing_truncated_or_has_another_footer(secret: Secret | None) -> None:
    for damage, text in (("missing", "no pack"), ("short", "cut short|ends elsewhere"), ("footer", "footer differs")):
        backend = MemoryBackend()
        store = new_store(backend, secret)
        dumped = dump(store, {"x": content(1)})
        (name,) = backend.names("packs/")
        data, at = backend.objects.pop(name)
        if damage == "short":
            backend.objects[name] = (data[:-10], at)
        elif damage == "footer":
            backend.objects[name] = (data[:-4096] + bytes([data[-4096] ^ 1]) + data[-4095:], at)
        (problem,) = verify(store).problems[dumped.id]
        assert any(each in problem for each in text.split("|")), problem


def test_a_damaged_snapshot_object_is_a_problem(secret: Secret | None) -> None:
    backend = MemoryBackend()
    store = new_store(backend, secret)
    dumped = dump(store, {"x": content(1)})
    _damage(backend, "snapshots/", 70)
    report = verify(store)
    assert report.snapshots == ()
    assert list(report.problems) == [dumped.id]


def test_a_damaged_list_of_pieces_is_a_problem() -> None:
    backend = MemoryBackend()
    store = new_store(backend, pack_bytes=PIECE_BYTES)
    dumped = dump(store, AREAS)
    place = snapshots.open_reader(store, dumped)._index.find(dumped.area("device/7").listed[0].id)
    assert place is not None
    name = next(each for each in backend.names("packs/") if place.pack_id.hex() in each)
    data, at = backend.objects[name]
    backend.objects[name] = (b"\xff" + data[1:], at)
    problems = verify(store).problems[dumped.id]
    assert "the list of the pieces of device/7 cannot be read" in problems[0]


# --- diff --------------------------------------------------------------------------------------------------------


def test_differences_are_reported_by_area_and_range() -> None:
    store = new_store(MemoryBackend())
    before = dump(
        store, {"same": content(1, 2), "a": content(1, 2, 3, 4, 0), "gone": content(1), "long": AREAS["device/7"]}
    )
    after = dump(store, {"same": content(1, 2), "a": content(1, 9, 8, 4, 0, 5), "new": b"", "long": AREAS["device/7"]})
    found = {each.name: each for each in diff(snapshots.open_reader(store, after), before, after)}
    assert set(found) == {"a", "gone", "new"}
    size = PIECE_BYTES
    assert found["a"].ranges == ((1 * size, 3 * size), (5 * size, 6 * size))
    assert (found["a"].size_before_bytes, found["a"].size_after_bytes) == (5 * size, 6 * size)
    assert found["a"].changed_bytes == 3 * size
    assert (found["gone"].size_before_bytes, found["gone"].size_after_bytes) == (size, None)
    assert (found["new"].size_before_bytes, found["new"].size_after_bytes, found["new"].ranges) == (None, 0, ())


def test_a_small_change_in_a_long_area() -> None:
    store = new_store(MemoryBackend())
    numbers = list(range(1, 200))
    before = dump(store, {"device/7": content(*numbers)})
    numbers[77] = 1000
    after = dump(store, {"device/7": content(*numbers)})
    (found,) = diff(snapshots.open_reader(store, after), before, after)
    assert found.ranges == ((77 * PIECE_BYTES, 78 * PIECE_BYTES),)


def test_zeros_of_different_lengths_differ_at_the_end() -> None:
    store = new_store(MemoryBackend())
    before, after = dump(store, {"a": bytes(5000)}), dump(store, {"a": bytes(6000)})
    (found,) = diff(snapshots.open_reader(store, after), before, after)
    assert found.ranges == ((4096, 6000),)

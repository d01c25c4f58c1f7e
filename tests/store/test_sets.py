"""Sets of snapshots are either complete or abandoned, and no part of one is taken for a whole."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from gpucr.errors import InvalidRequest, StoreDamaged, StoreError
from gpucr.operations.stores import copy_snapshots, init_store, list_snapshots, remove_snapshot, verify_snapshots
from gpucr.store import sets, snapshots
from gpucr.store.keys import Secret
from gpucr.store.local import LocalBackend
from gpucr.store.opened import Store
from gpucr.store.prune import prune
from gpucr.store.retention import PruneRules
from gpucr.store.sets import StoredSet
from gpucr.store.stored_snapshot import SetPart, StoredSnapshot
from tests.store.dumps import content, dump, new_store
from tests.store.memory import FaultyBackend, MemoryBackend


def parts_of(store: Store, name: str, count: int = 2) -> tuple[StoredSet, list[StoredSnapshot]]:
    """All parts of a set, which is not complete yet."""
    set_id = sets.new_id()
    found = [dump(store, {"a": content(1, 2 + n)}, name, SetPart(set_id, n, count)) for n in range(count)]
    return StoredSet(set_id, name, tuple(each.id for each in found)), found


def complete(store: Store, name: str, count: int = 2) -> tuple[StoredSet, list[StoredSnapshot]]:
    made, found = parts_of(store, name, count)
    assert sets.complete(store, made)
    return made, found


# --- complete or given up ----------------------------------------------------------------------------------------


def test_a_set_is_complete_or_abandoned(secret: Secret | None) -> None:
    store = new_store(MemoryBackend(), secret)
    made, _ = parts_of(store, "a")
    assert sets.find(store, made.id) is None
    assert sets.complete(store, made)
    assert sets.find(store, made.id) == made
    assert sets.complete(store, made), "again is the same"
    assert sets.abandon(store, made.id) == made, "too late"
    other, _ = parts_of(store, "a")
    assert sets.abandon(store, other.id) is None
    assert not sets.complete(store, other), "too late"
    assert sets.find(store, other.id) is None
    assert [sets.is_abandoned(store, each.id) for each in (made, other)] == [False, True]


@pytest.mark.parametrize("kind", ["before", "after", "late", "twice"])
@pytest.mark.parametrize("guest_first", [False, True])
def test_all_nodes_reach_the_same_outcome_under_any_request_failure(kind: str, guest_first: bool) -> None:
    """Of node 0's requests each once, while the other node asks before or after it."""
    for step in range(3):
        inner = MemoryBackend()
        backend = FaultyBackend(inner)
        store, there = new_store(backend), Store.open(inner)
        made, _ = parts_of(store, "a")
        calls = iter(range(100))
        wanted = step

        def fault(operation: str, name: str, calls: object = calls, wanted: int = wanted) -> str | None:
            return kind if name.startswith("sets/") and next(calls) == wanted else None  # type: ignore[call-overload]

        asked = [sets.abandon(there, made.id)] if guest_first else []
        backend.fault = fault
        try:
            host: bool | None = sets.complete(store, made)
        except StoreError as e:
            host, said = None, e.message
        backend.fault = lambda operation, name: None
        for late in backend.pending:
            with contextlib.suppress(OSError):
                late()
        asked.append(sets.abandon(there, made.id))
        assert len({each is not None for each in asked}) == 1
        if host is not None:
            assert host == (asked[0] is not None)
        else:
            assert "it is not known" in said


@pytest.mark.parametrize("by", ["name", "id"])
def test_a_set_with_a_part_of_another_one(by: str) -> None:
    store = new_store(MemoryBackend())
    (one, _), (other, _) = complete(store, "one"), complete(store, "other")
    sets.remove(store, one.id)
    assert sets.complete(store, StoredSet(one.id, "one", (one.snapshot_ids[0], other.snapshot_ids[1])))
    with pytest.raises(StoreDamaged, match="has a snapshot that is not its part of node 1"):
        snapshots.find_parts(store, "one" if by == "name" else one.id)
    assert len(snapshots.find_parts(store, "other")) == 2


def test_an_invalid_set_is_never_accepted() -> None:
    backend = MemoryBackend()
    store = new_store(backend)
    made, found = complete(store, "a")
    name = f"sets/{made.id}"
    backend.objects[name] = (b"x" * 100, 0.0)
    listing = snapshots.list_all(store)
    assert set(listing.damaged) == {each.id for each in found}, "none of its parts can be restored"
    with pytest.raises(StoreDamaged):
        prune(store, PruneRules(keep_last=1))
    backend.objects[name] = (bytes(2 << 20), 0.0)
    with pytest.raises(StoreDamaged, match="is larger than"):
        sets.find(store, made.id)


# --- parts -------------------------------------------------------------------------------------------------------


def test_a_part_of_an_incomplete_set_is_found_only_by_its_id() -> None:
    store = new_store(MemoryBackend())
    whole = dump(store, {"a": content(9)}, "a")
    made, found = parts_of(store, "a")
    assert snapshots.find(store, "a") == whole
    assert snapshots.find(store, "latest") == whole
    assert snapshots.find(store, found[0].id) == found[0]
    with pytest.raises(StoreError, match="is the part of node 1 in a set of 2 that is not complete") as caught:
        sets.require_complete(store, found[1])
    assert caught.value.code == "GPUCR-SET-UNFINISHED"
    sets.abandon(store, made.id)
    with pytest.raises(StoreError, match="not complete"):
        sets.require_complete(store, found[1])
    sets.require_complete(store, whole)


def test_a_snapshot_that_falsely_claims_to_be_a_part() -> None:
    store = new_store(MemoryBackend())
    made, found = complete(store, "a")
    forged = dump(store, {"a": content(7)}, "a", SetPart(made.id, 0, 2))
    with pytest.raises(StoreError, match="not complete"):
        sets.require_complete(store, forged)
    assert snapshots.find_parts(store, "a") == tuple(found)


def test_a_name_selects_the_latest_complete_set() -> None:
    store = new_store(MemoryBackend())
    _, first = complete(store, "a")
    assert snapshots.find_parts(store, "a") == tuple(first)
    with pytest.raises(InvalidRequest, match="is a set of 2 nodes"):
        snapshots.find(store, "a")
    _, second = complete(store, "a", 3)
    parts_of(store, "a")
    assert snapshots.find_parts(store, "a") == snapshots.find_parts(store, "latest") == tuple(second)
    snapshots.remove(store, second[1].id)
    with pytest.raises(StoreDamaged, match="lacks the snapshot of node 1"):
        snapshots.find_parts(store, "a")


# --- prune -------------------------------------------------------------------------------------------------------


def test_a_set_counts_as_one_snapshot() -> None:
    store = new_store(MemoryBackend())
    alone = dump(store, {"a": content(9)}, "a")
    gone, first = complete(store, "a", 3)
    _, second = complete(store, "a", 3)
    report = prune(store, PruneRules(keep_last=2))
    assert {each.id for each in report.removed} == {alone.id}
    report = prune(store, PruneRules(keep_last=1))
    assert {each.id for each in report.removed} == {each.id for each in first}
    assert {each.id for each in report.kept} == {each.id for each in second}
    assert sets.find(store, gone.id) is None, "half of it must not be restored, whenever the prune is cut off"


def test_a_set_with_a_protected_part_is_kept() -> None:
    store = new_store(MemoryBackend())
    _, first = complete(store, "a")
    complete(store, "a")
    report = prune(store, PruneRules(keep_last=1, protected=(first[0].id,)))
    assert report.removed == ()


def test_leftovers_of_abandoned_sets_are_deleted() -> None:
    backend = MemoryBackend()
    store = new_store(backend)
    given_up, left = parts_of(store, "a")
    sets.abandon(store, given_up.id)
    under_way, young = parts_of(store, "a")
    dry = prune(store, PruneRules(dead_after_s=1e12), dry_run=True)  # by the clock of this machine
    assert {each.id for each in dry.removed} == {each.id for each in left}
    report = prune(store, PruneRules())
    assert {each.id for each in report.removed} == {each.id for each in left}
    assert not sets.complete(store, given_up), "that it was given up stays known"
    backend.clock_s += 2 * 3600
    report = prune(store, PruneRules(dead_after_s=3600.0))
    assert {each.id for each in report.removed} == {each.id for each in young}
    assert not sets.complete(store, under_way), "nobody can complete it any more"
    backend.clock_s += 40 * 24 * 3600
    prune(store, PruneRules())
    assert backend.names("sets/") == []


def test_a_set_completed_while_a_prune_assumes_it_dead_is_kept() -> None:
    backend = MemoryBackend()
    faulty = FaultyBackend(backend)
    store = new_store(faulty)
    made, _ = parts_of(store, "a")
    backend.clock_s += 2 * 3600

    def fault(operation: str, name: str) -> str | None:
        if operation == "create" and name.startswith("sets/"):
            faulty.fault = lambda operation, name: None
            assert sets.complete(store, made)
        return None

    faulty.fault = fault
    assert prune(store, PruneRules(dead_after_s=3600.0)).removed == ()
    assert sets.find(store, made.id) == made


# --- in a folder -------------------------------------------------------------------------------------------------


def test_remove_verify_and_copy_take_a_set_as_a_whole(tmp_path: Path) -> None:
    for name in ("one", "other"):
        init_store(tmp_path / name)
    store, other = (Store.open(LocalBackend(tmp_path / name)) for name in ("one", "other"))
    made, found = complete(store, "a")
    parts_of(store, "b")
    report = verify_snapshots(f"{tmp_path}/one#a", deep=True)
    assert [each.id for each in report.snapshots] == [each.id for each in found]
    assert not report.problems
    copied = copy_snapshots(f"{tmp_path}/one#a", tmp_path / "other")
    there = sets.find(other, made.id)
    assert there is not None
    assert there.snapshot_ids == tuple(each.target.id for each in copied)
    copy_snapshots(tmp_path / "one", tmp_path / "other")
    listing = list_snapshots(tmp_path / "other")
    assert [(each.name, listing.is_whole(each)) for each in listing.snapshots].count(("a", True)) == 2
    assert [(each.name, listing.is_whole(each)) for each in listing.snapshots].count(("b", False)) == 2
    assert remove_snapshot(f"{tmp_path}/other#a").part == SetPart(made.id, 0, 2)
    assert [each.name for each in list_snapshots(tmp_path / "other").snapshots] == ["b", "b"]
    assert sets.find(other, made.id) is None


def test_a_copy_repairs_a_set_with_a_damaged_part(tmp_path: Path) -> None:
    for name in ("one", "other"):
        init_store(tmp_path / name)
    store, other = (Store.open(LocalBackend(tmp_path / name)) for name in ("one", "other"))
    made, _ = complete(store, "a")
    before = copy_snapshots(tmp_path / "one", tmp_path / "other")
    snapshots.remove(other, before[1].target.id)
    after = copy_snapshots(tmp_path / "one", tmp_path / "other")
    assert after[1].target.id != before[1].target.id
    assert snapshots.find_parts(other, "a") == tuple(each.target for each in after)
    assert sets.find(other, made.id) is not None

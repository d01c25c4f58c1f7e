from __future__ import annotations

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpucr.errors import InvalidRequest, StoreDamaged, StoreError, Unsupported
from gpucr.records import RecordError
from gpucr.store import retired, snapshots, stored_snapshot, writers
from gpucr.store.keys import Secret
from gpucr.store.opened import Store
from gpucr.store.pieces import PieceRef
from gpucr.store.session import WriteSession
from gpucr.store.stored_snapshot import Area, StoredSnapshot
from tests.store.dumps import MANIFEST, NEVER_S, content, dump, new_store, restore
from tests.store.memory import FaultyBackend, Killed, MemoryBackend


def test_a_dump_can_be_found_and_restored(secret: Secret | None) -> None:
    backend = MemoryBackend()
    areas = {"device/7": content(1, 0, 2, 1), "images/pages-1.img": b"abc", "images/empty.img": b""}
    dumped = dump(new_store(backend, secret), areas, "nightly")
    store = Store.open(backend, secret)
    found = snapshots.find(store, "nightly")
    assert found == dumped
    assert (found.manifest, found.name, found.size_bytes) == (MANIFEST, "nightly", 4 * 4096 + 3)
    assert found.counters["seen_bytes"] == 4 * 4096 + 3
    assert restore(store, found) == areas


def test_a_long_list_of_pieces_is_stored_as_pieces() -> None:
    backend = MemoryBackend()
    store = new_store(backend)
    areas = {"device/7": content(*range(1, 200))}
    first = dump(store, areas)
    written = len(backend.names("packs/"))
    second = dump(store, areas)
    assert first.area("device/7").is_long
    assert len(first.area("device/7").listed) < 5
    assert restore(store, second) == areas
    assert len(backend.names("packs/")) == written, "the same content and the same list are stored once"


def test_the_name_of_an_encrypted_snapshot_is_not_readable_in_the_store() -> None:
    backend = MemoryBackend()
    dump(new_store(backend, Secret.key_file(bytes(range(32)))), {"secret-area": content(1)}, "secret-name")
    stored = b"".join(data for data, _ in backend.objects.values()) + "".join(backend.objects).encode()
    for text in (b"secret-name", b"secret-area", b"the manifest"):
        assert text not in stored


def test_find() -> None:
    backend = MemoryBackend()
    store = new_store(backend)
    with pytest.raises(InvalidRequest, match="holds no snapshot"):
        snapshots.find(store, None)
    first = dump(store, {"a": content(1)}, "one")
    assert snapshots.find(store, None) == first
    second = dump(store, {"a": content(2)}, "one")
    third = dump(store, {"a": content(3)})
    assert snapshots.find(store, "one") == second, "the latest of that name"
    assert snapshots.find(store, "latest") == third
    assert snapshots.find(store, first.id[:8]) == first
    assert snapshots.find(store, first.id) == first
    for wanted, text in (("two", "no snapshot 'two'"), (None, "holds 3 snapshots"), (first.id[:4], "no snapshot")):
        with pytest.raises(InvalidRequest, match=text):
            snapshots.find(store, wanted)


def test_several_ids_with_the_same_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    store = new_store(MemoryBackend())
    ids = iter([bytes(15) + bytes([number]) for number in range(2)])
    monkeypatch.setattr(writers, "_new_id", lambda: next(ids).hex())
    dump(store, {}), dump(store, {})
    with pytest.raises(InvalidRequest, match="2 snapshots whose id begins with '00000000'"):
        snapshots.find(store, "00000000")


@pytest.mark.parametrize("name", ["", "latest", "a/b", "a#b", ".hidden", "abcdef01", "x" * 101, "a b"])
def test_ambiguous_names(name: str) -> None:
    backend = MemoryBackend()
    with pytest.raises(InvalidRequest, match="cannot be the name"):
        dump(new_store(backend), {}, name)
    assert backend.names("snapshots/") == []
    assert backend.names("writers/") == []


def test_a_damaged_snapshot_does_not_hide_the_others(secret: Secret | None) -> None:
    backend = MemoryBackend()
    store = new_store(backend, secret)
    good, bad = dump(store, {"a": content(1)}, "good"), dump(store, {"a": content(2)}, "bad")
    name = f"snapshots/{bad.id}"
    data, at = backend.objects[name]
    backend.objects[name] = (data[:70] + bytes([data[70] ^ 1]) + data[71:], at)
    assert snapshots.find(store, good.id) == good
    assert list(snapshots.list_all(store).damaged) == [bad.id]
    with pytest.raises(StoreDamaged, match=bad.id):
        snapshots.find(store, bad.id[:10])
    with pytest.raises(StoreDamaged, match=bad.id):
        snapshots.list_all(store).intact()
    snapshots.remove(store, bad.id)
    assert snapshots.list_all(store).intact() == (good,)


def test_a_missing_snapshot() -> None:
    store = new_store(MemoryBackend())
    with pytest.raises(StoreError, match="holds no snapshot 00"):
        snapshots.load(store, "00" * 16)


def test_times_come_from_the_store_and_not_the_machines_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    store = new_store(MemoryBackend())
    monkeypatch.setattr(time, "time", lambda: 4e9)
    first = dump(store, {}, "first")
    monkeypatch.setattr(time, "time", lambda: 5.0)
    second = dump(store, {}, "second")
    assert [each.name for each in snapshots.list_all(store).snapshots] == ["first", "second"]
    assert 1_000_000 < first.created_s < second.created_s < 1_000_100


def test_snapshots_within_one_second_keep_their_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = MemoryBackend(tick_s=0.0)
    store = new_store(backend)
    for here_s, name in ((1_000_000.2, "first"), (1_000_000.9, "second"), (1_000_001.1, "third")):
        backend.clock_s = float(int(here_s))
        monkeypatch.setattr(time, "time", lambda here_s=here_s: here_s)
        dump(store, {}, name)
    assert [each.name for each in snapshots.list_all(store).snapshots] == ["first", "second", "third"]


def test_a_lost_index_is_rebuilt_from_footers(secret: Secret | None) -> None:
    backend = MemoryBackend()
    store = new_store(backend, secret)
    areas = {"device/7": content(*range(1, 200)), "b": content(5)}
    dumped = dump(store, areas)
    for name in backend.names("index/"):
        backend.delete(name)
    assert restore(store, dumped) == areas


def test_a_missing_piece(secret: Secret | None) -> None:
    backend = MemoryBackend()
    store = new_store(backend, secret)
    dumped = dump(store, {"a": content(1, 2)})
    for name in backend.names("packs/"):
        backend.delete(name)
    with pytest.raises(StoreDamaged, match="lacks the piece"):
        snapshots.open_reader(store, dumped)


# --- a commit that goes wrong ------------------------------------------------------------------------------------


def _dump_with(backend: MemoryBackend, kind: str, where: str) -> FaultyBackend:
    """A dump in which every create below this folder goes wrong in this way."""
    faulty = FaultyBackend(
        backend, lambda operation, name: kind if (operation, name[: len(where)]) == ("create", where) else None
    )
    dump(Store.open(faulty), {"a": content(1)}, "wanted")
    return faulty


def test_a_commit_with_a_lost_answer_still_counts() -> None:
    backend = MemoryBackend()
    new_store(backend)
    _dump_with(backend, "after", "snapshots/")
    assert [each.name for each in snapshots.list_all(Store.open(backend)).intact()] == ["wanted"]
    assert backend.names("writers/") == []


def test_a_refused_commit_that_arrives_late_finds_a_tombstone() -> None:
    backend = MemoryBackend()
    new_store(backend)
    seen = 0

    def fault(operation: str, name: str) -> str | None:
        nonlocal seen
        seen += operation == "create" and name.startswith("snapshots/")
        return "late" if operation == "create" and name.startswith("snapshots/") and seen == 1 else None

    faulty = FaultyBackend(backend, fault)
    with pytest.raises(StoreError, match="cannot be used"):
        dump(Store.open(faulty), {"a": content(1)})
    assert len(faulty.pending) == 1
    faulty.deliver()
    assert snapshots.list_all(Store.open(backend)).intact() == ()
    assert backend.names("writers/") == [], "it is certain that there will be no snapshot"


def test_after_an_unknown_commit_outcome_the_writer_stays_registered() -> None:
    backend = MemoryBackend()
    new_store(backend)
    with pytest.raises(StoreError, match=r"not known whether the snapshot .* was completed"):
        _dump_with(backend, "late", "snapshots/")
    assert len(backend.names("writers/")) == 1, "until a prune puts a tombstone there"


def test_a_writer_declared_dead_cannot_commit() -> None:
    backend = MemoryBackend()
    store = new_store(backend)
    with WriteSession.begin(store, refresh_s=NEVER_S) as session:
        for writer in writers.seen(backend).values():
            writers.end_dead(store, writer)
        with pytest.raises(StoreError, match="took this dump for dead"):
            session.commit(name=None, manifest=b"", areas=[])
    assert snapshots.list_all(store).intact() == ()


def test_a_store_that_overwrites_objects_is_refused() -> None:
    class Overwriting(MemoryBackend):
        def create(self, name: str, parts: object) -> None:
            self.delete(name)
            super().create(name, parts)  # type: ignore[arg-type]

    backend = Overwriting()
    with pytest.raises(Unsupported, match="overwritten"):
        dump(new_store(backend), {})


def test_a_writer_killed_at_any_step_leaves_only_committed_data(secret: Secret | None) -> None:
    areas = {"a": content(1, 2, 3)}
    step = 0
    while True:
        backend = MemoryBackend()
        before = dump(new_store(backend, secret), {"a": content(1, 9)}, "before")
        count = 0

        def fault(operation: str, name: str, step: int = step) -> str | None:
            nonlocal count
            count += 1
            return "kill" if count > step else None

        faulty = FaultyBackend(backend, fault)
        try:
            dump(Store.open(faulty, secret), areas, "wanted")
            break
        except Killed:
            pass
        store = Store.open(backend, secret)
        found = snapshots.list_all(store).intact()
        assert found[0] == before
        assert restore(store, before) == {"a": content(1, 9)}
        for each in found[1:]:
            assert restore(store, each) == areas
        step += 1
    assert step > 10


# --- the format --------------------------------------------------------------------------------------------------

_refs = st.lists(st.builds(PieceRef, st.binary(min_size=32, max_size=32), st.integers(1, 1 << 20)), max_size=5)
_areas = st.dictionaries(st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1), _refs, max_size=4)


@given(
    areas=_areas,
    manifest=st.binary(),
    host=st.text(st.characters(codec="utf-8")),
    counters=st.dictionaries(st.text(), st.integers(0, (1 << 63) - 1)),
)
def test_encoding_round_trip(
    areas: dict[str, list[PieceRef]], manifest: bytes, host: str, counters: dict[str, int]
) -> None:
    made = tuple(Area(name, sum(ref.length for ref in refs), tuple(refs)) for name, refs in areas.items())
    snapshot = StoredSnapshot("ab" * 16, "name", "2026-01-02T03:04:05.678+00:00", host, manifest, made, counters)
    assert stored_snapshot.decode("ab" * 16, stored_snapshot.encode(snapshot)) == snapshot


@given(data=st.data())
def test_a_changed_snapshot_object_is_refused_or_equal(data: st.DataObject) -> None:
    area = Area("a", 4096, (PieceRef(b"x" * 32, 4096),))
    snapshot = StoredSnapshot("ab" * 16, None, "2026-01-02T03:04:05.678+00:00", "host", b"manifest", (area,), {"n": 1})
    encoded = bytearray(stored_snapshot.encode(snapshot))
    for _ in range(data.draw(st.integers(1, 4))):
        encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    try:
        decoded = stored_snapshot.decode("ab" * 16, bytes(encoded[: data.draw(st.integers(0, len(encoded)))]))
    except ValueError:
        return
    assert sum(ref.length for area in decoded.areas for ref in area.listed) == decoded.size_bytes


@given(
    body=st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: (
            st.lists(inner)
            | st.dictionaries(
                st.sampled_from(
                    [
                        "format",
                        "version",
                        "areas",
                        "name",
                        "created",
                        "manifest",
                        "counters",
                        "host",
                        "pieces",
                        "is_long",
                        "size_bytes",
                    ]
                ),
                inner,
            )
        ),
    )
)
def test_no_json_breaks_the_reader(body: object) -> None:
    with pytest.raises(RecordError):
        stored_snapshot.decode("ab" * 16, json.dumps(body).encode())


def test_a_decompression_bomb_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = StoredSnapshot("ab" * 16, None, "2026-01-02T03:04:05.678+00:00", "host", bytes(10_000), ())
    encoded = stored_snapshot.encode(snapshot)
    monkeypatch.setattr(stored_snapshot, "MAX_MANIFEST_BYTES", 9_999)
    with pytest.raises(ValueError, match="larger than 9999"):
        stored_snapshot.decode("ab" * 16, encoded)


def test_a_retired_pack_is_not_reused() -> None:
    backend = MemoryBackend()
    store = new_store(backend)
    dump(store, {"a": content(1)})
    (pack_id,) = retired.existing_packs(store)
    retired.retire(store, [pack_id])
    dump(store, {"a": content(1)})
    assert len(backend.names("packs/")) == 2

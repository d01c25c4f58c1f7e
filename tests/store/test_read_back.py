"""What was read and found right is on record: a writer does not read it again for a while."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gpucr.store import read_back, snapshots
from gpucr.store.checks import Checks
from gpucr.store.copy import copy
from gpucr.store.keys import Secret
from gpucr.store.local import LocalBackend
from gpucr.store.opened import Store
from gpucr.store.pack import pack_name
from gpucr.store.prune import prune
from gpucr.store.retention import PruneRules
from gpucr.store.session import WriteSession
from gpucr.store.verify import verify
from gpucr.supervise.reading import Reading
from tests.store.dumps import MANIFEST, NEVER_S, PIECE_BYTES, content, dump, new_store, restore
from tests.store.memory import FaultyBackend, MemoryBackend

CONTENT = {"a": content(*range(1, 21))}
DAY_S = 24 * 3600.0


def read_by(store: Store, *, known_s: float = DAY_S) -> int:
    """How many bytes a dump of the same reads of what the store has."""
    checks = Checks(known_s=known_s)
    with WriteSession.begin(store, compress="none", refresh_s=NEVER_S, checks=checks) as session:
        refs = session.writer.add_all(CONTENT["a"])
        session.commit(name=None, manifest=MANIFEST, areas=[session.area("a", refs)])
    return checks.read_bytes


@pytest.fixture
def place() -> MemoryBackend:
    """Its clock is this machine's."""
    made = MemoryBackend(tick_s=0.0)
    made.clock_s = time.time()
    return made


def test_new_data_is_read_once(place: MemoryBackend, secret: Secret | None) -> None:
    store = new_store(place, secret)
    dump(store, CONTENT)
    whole = len(CONTENT["a"])
    assert read_by(store) == whole, "nobody has read it since it was written"
    assert read_by(store) == 0
    assert read_by(store, known_s=0) == whole
    assert read_by(store) == 0
    place.clock_s += DAY_S + 60
    assert read_by(store) == whole
    assert read_by(store) == 0


def test_a_deep_verification_counts(place: MemoryBackend) -> None:
    store = new_store(place)
    first = dump(store, CONTENT)
    assert verify(store, deep=True, older_than_s=DAY_S).read_bytes == len(CONTENT["a"])
    assert verify(store, [first], deep=True, older_than_s=DAY_S).read_bytes == 0
    assert verify(store, [first], deep=True).read_bytes == len(CONTENT["a"])
    assert read_by(store) == 0


def test_an_interrupted_verification_counts_in_part(place: MemoryBackend) -> None:
    store = new_store(place)
    dump(store, CONTENT)
    seen: list[int] = []

    def stop(size_bytes: int) -> None:
        seen.append(size_bytes)
        if len(seen) > 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        verify(store, deep=True, on_bytes=stop)
    left = read_by(store)
    assert 0 < left < len(CONTENT["a"])


def _damage(place: MemoryBackend, store: Store, number: int = 0) -> None:
    (snapshot, *_) = snapshots.list_all(store).snapshots
    reader = snapshots.open_reader(store, snapshot)
    at = reader._places(snapshot.areas[0].pieces(reader)[number])[0]
    data, when = place.objects[pack_name(at.pack_id)]
    damaged = data[: at.offset] + bytes([data[at.offset] ^ 1]) + data[at.offset + 1 :]
    place.objects[pack_name(at.pack_id)] = damaged, when


def test_damaged_data_is_never_on_record(place: MemoryBackend) -> None:
    store = new_store(place)
    dump(store, CONTENT)
    _damage(place, store)
    assert verify(store, deep=True).problems
    with WriteSession.begin(store, compress="none", refresh_s=NEVER_S) as session:
        refs = session.writer.add_all(CONTENT["a"])
        again = session.commit(name=None, manifest=MANIFEST, areas=[session.area("a", refs)])
    assert again.counters["repaired_bytes"] == PIECE_BYTES
    assert restore(store, again) == CONTENT


def test_one_of_two_copies_was_read(place: MemoryBackend) -> None:
    """The first copy of a piece is damaged, the second is right: a verification finds no problem."""
    store = new_store(place)
    dump(store, CONTENT)
    _damage(place, store)
    dump(store, CONTENT)  # stores the damaged one again
    for name in place.names("read/"):
        place.delete(name)
    for name in place.names("retired/"):
        place.delete(name)  # otherwise nobody would rely on the first copy
    assert verify(store, deep=True).problems == {}
    assert read_by(store) >= PIECE_BYTES, "the piece with two copies is read"


def _other_place(place: MemoryBackend, store: Store) -> None:
    place.__class__ = type("Moved", (MemoryBackend,), {"identity": property(lambda self: "elsewhere")})


def _cut_short(place: MemoryBackend, store: Store) -> None:
    for name in place.names("read/"):
        data, when = place.objects[name]
        place.objects[name] = data[:-3], when


def _from_the_future(place: MemoryBackend, store: Store) -> None:
    place.clock_s -= 3600


@pytest.mark.parametrize("change", [_other_place, _cut_short, _from_the_future])
def test_records_that_do_not_count(place: MemoryBackend, change: Callable[[MemoryBackend, Store], None]) -> None:
    store = new_store(place)
    dump(store, CONTENT)
    verify(store, deep=True)
    change(place, store)
    assert len(read_back.recent(store, DAY_S, place.clock_s)) == 0
    assert restore(store, dump(store, CONTENT)) == CONTENT


def test_a_copy_of_the_folder_was_not_read(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir(mode=0o700)
    store = new_store(LocalBackend(tmp_path / "a"))
    dump(store, CONTENT)
    verify(store, deep=True)
    assert read_by(store) == 0
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert read_by(Store.open(LocalBackend(tmp_path / "b"))) == len(CONTENT["a"])


def test_a_store_of_a_group_has_no_records(place: MemoryBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpucr.store.sharing.is_shared", lambda _: True)
    store = new_store(place)
    dump(store, CONTENT)
    verify(store, deep=True)
    assert place.names("read/") == []
    assert read_by(store) == len(CONTENT["a"])


def test_a_place_that_takes_no_record(place: MemoryBackend) -> None:
    def refuse(operation: str, name: str) -> str | None:
        if operation == "create" and name.startswith("read/"):
            raise PermissionError(13, "Permission denied", name)
        return None

    faulty = FaultyBackend(place)
    store = new_store(faulty)
    dump(store, CONTENT)
    faulty.fault = refuse
    assert verify(store, deep=True).problems == {}
    assert read_by(store) == len(CONTENT["a"])


def test_a_copy_between_stores_counts(place: MemoryBackend) -> None:
    source, target = new_store(MemoryBackend()), new_store(place)
    first = dump(source, CONTENT)
    dump(target, CONTENT)
    copy(source, first, target)
    assert read_by(target) == 0


def test_old_records_are_pruned(place: MemoryBackend) -> None:
    store = new_store(place)
    dump(store, CONTENT)
    verify(store, deep=True)
    prune(store, PruneRules())
    assert len(place.names("read/")) == 1
    place.clock_s += read_back.KEPT_S + 60
    prune(store, PruneRules())
    assert place.names("read/") == []


def test_many_records_are_joined(place: MemoryBackend) -> None:
    """What they say counts for as long as the oldest of them did."""
    store = new_store(place)
    place.clock_s = place.clock_s // 3600 * 3600 + 60
    for number in range(1, 11):
        dump(store, {"a": content(*range(1, number + 1))})
        place.clock_s += 1
    before = read_back.recent(store, DAY_S, place.clock_s)
    assert len(place.names("read/")) == 9
    prune(store, PruneRules())
    assert len(place.names("read/")) == 1
    assert read_back.recent(store, DAY_S, place.clock_s) == before
    assert read_back.recent(store, 5.0, place.clock_s) == frozenset()


def test_reading_between_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir(mode=0o700)
    store = new_store(LocalBackend(tmp_path / "s"))
    snapshot = dump(store, CONTENT)
    reading = Reading(f"{tmp_path / 's'}#{snapshot.id}", None)
    reading._thread.join()
    reading.end()
    assert read_by(store) == 0

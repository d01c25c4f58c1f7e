"""Stores partly damaged by a disk, a copy or a person: what still works, and how they are repaired."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner

from gpucr.cli.copy import command as copy_command
from gpucr.errors import InvalidRequest, StoreDamaged, StoreError
from gpucr.operations.stores import init_store, list_snapshots, prune_store, remove_snapshot, store_keys
from gpucr.store import config, index, keys, retired, snapshots
from gpucr.store.backend import Buffer, ObjectInfo, together
from gpucr.store.keys import Secret
from gpucr.store.local import INCOMING_NAME, LocalBackend
from gpucr.store.opened import Store
from gpucr.store.pack import pack_name
from gpucr.store.prune import prune
from gpucr.store.retention import PruneRules
from gpucr.store.session import WriteSession
from gpucr.store.verify import verify
from tests.store.dumps import NEVER_S, PIECE_BYTES, content, dump, new_store, restore
from tests.store.memory import FaultyBackend, MemoryBackend

AT_ONCE = PruneRules(grace_s=0.0)


def _flip(backend: MemoryBackend, name: str) -> None:
    data, at = backend.objects[name]
    middle = len(data) // 2
    backend.objects[name] = (data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :], at)


def _cut(backend: MemoryBackend, name: str, length: int) -> None:
    data, at = backend.objects[name]
    backend.objects[name] = (data[:length], at)


# --- the index ---------------------------------------------------------------------------------------------------


def test_without_an_index_object_everything_works_and_a_prune_rebuilds_it(secret: Secret | None) -> None:
    backend = MemoryBackend()
    store = new_store(backend, secret)
    first = dump(store, {"a": content(1, 2, 3)}, "first")
    (name,) = backend.names("index/")
    _flip(backend, name)
    assert restore(store, first) == {"a": content(1, 2, 3)}
    second = dump(store, {"a": content(1, 2, 4)}, "second")
    assert restore(store, second) == {"a": content(1, 2, 4)}
    report = verify(store, deep=True)
    assert list(report.problems) == [name], "it is told, and no snapshot is said to be damaged"
    assert "a prune replaces it" in report.problems[name][0]
    assert verify(store, [first]).problems == {}
    prune(store, PruneRules(), dry_run=True)
    assert name in backend.names("index/")
    prune(store, PruneRules())
    assert name not in backend.names("index/")
    assert verify(store, deep=True).problems == {}
    assert index.load(store).pieces == 4, "found without a look at footers again"
    assert dump(store, {"a": content(1, 2, 3)}).counters["known_bytes"] == 3 * PIECE_BYTES


def test_a_bad_sector_under_an_index_object_is_damage(secret: Secret | None) -> None:
    place = FaultyBackend(MemoryBackend())
    store = new_store(place, secret)
    dumped = dump(store, {"a": content(1)})
    (name,) = place.inner.names("index/")

    def bad_sector(operation: str, read: str) -> None:
        if (operation, read) == ("read", name):
            raise OSError(errno.EIO, "Input/output error", name)

    place.fault = bad_sector
    assert restore(store, dumped) == {"a": content(1)}
    assert "cannot be read: Input/output error" in verify(store).problems[name][0]


def test_oversized_objects_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of some thousand files could be as large as memory: a listing tells their sizes."""
    place = FaultyBackend(MemoryBackend())
    store = new_store(place)
    good = dump(store, {"a": content(1)}, "good")
    monkeypatch.setattr(index, "MAX_INDEX_BYTES", 1000)
    monkeypatch.setattr(snapshots, "MAX_SNAPSHOT_BYTES", 2000)
    large = {f"index/{'1' * 32}", f"snapshots/{'2' * 32}"}
    for name in large:
        place.inner.create(name, bytes(1 << 20))
    assert snapshots.find(store, good.id) == good
    assert restore(store, good) == {"a": content(1)}
    assert set(verify(store).problems) == {f"index/{'1' * 32}", "2" * 32}
    assert not large & {name for operation, name in place.calls if operation == "read"}


def test_objects_read_together() -> None:
    infos = [ObjectInfo(str(number), size, 0.0) for number, size in enumerate((5, 5, 1, 20, 3, 7))]
    assert [[info.size_bytes for info in group] for group in together(infos, 10)] == [[5, 5], [1], [20], [3, 7]]
    assert list(together([], 10)) == []


# --- retired packs -----------------------------------------------------------------------------------------------


def _with_a_batch(secret: Secret | None) -> tuple[MemoryBackend, Store]:
    """A store with the snapshot ``kept``, and a batch in which the pack of another one was retired."""
    backend = MemoryBackend()
    store = new_store(backend, secret)
    old = dump(store, {"a": content(1, 2)})
    dump(store, {"a": content(3, 4)}, "kept")
    snapshots.remove(store, old.id)
    assert prune(store, PruneRules()).retired_packs == 1
    return backend, store


def test_without_the_list_of_retired_packs_nothing_is_reused(secret: Secret | None) -> None:
    backend, store = _with_a_batch(secret)
    (packs,) = (name for name in backend.names("retired/") if name.endswith(".packs"))
    _flip(backend, packs)
    assert restore(store, snapshots.find(store, "kept")) == {"a": content(3, 4)}
    again = dump(store, {"a": content(1, 2, 3, 4)})
    assert again.counters["known_bytes"] == 0
    assert list(verify(store).problems) == [packs]
    there = backend.names("packs/")
    with pytest.raises(StoreDamaged, match=packs) as caught:
        prune(store, AT_ONCE)
    assert "delete that file" in (caught.value.hint or "")
    assert backend.names("packs/") == there
    backend.delete(packs)
    for _ in range(3):
        prune(store, AT_ONCE)
    assert verify(store, deep=True).problems == {}
    assert restore(store, again) == {"a": content(1, 2, 3, 4)}


def test_an_unreadable_list_of_writers_is_rebuilt(secret: Secret | None) -> None:
    backend, store = _with_a_batch(secret)
    (writers,) = (name for name in backend.names("retired/") if name.endswith(".writers"))
    _flip(backend, writers)
    assert restore(store, snapshots.find(store, "kept")) == {"a": content(3, 4)}
    assert list(verify(store).problems) == [writers]
    with WriteSession.begin(store, refresh_s=NEVER_S):
        assert prune(store, AT_ONCE).deleted_packs == 0, "who is at work must be known first"
        assert verify(store).problems == {}
        assert prune(store, AT_ONCE).deleted_packs == 0, "one who is at work may rely on it"
    assert prune(store, AT_ONCE).deleted_packs == 1
    assert restore(store, snapshots.find(store, "kept")) == {"a": content(3, 4)}


# --- packs -------------------------------------------------------------------------------------------------------


def test_a_truncated_pack_is_not_reused(secret: Secret | None) -> None:
    """A job would be ended for a snapshot that cannot be restored. Stored again, its pieces repair older ones too."""
    backend = MemoryBackend()
    store = new_store(backend, secret)
    first = dump(store, {"a": content(1, 2, 3)})
    (pack,) = backend.names("packs/")
    _cut(backend, pack, 2 * PIECE_BYTES)
    with pytest.raises(StoreDamaged, match="is cut short"):
        restore(store, first)
    second = dump(store, {"a": content(1, 2, 3)})
    assert second.counters["known_bytes"] == 0
    assert restore(store, second) == restore(store, first) == {"a": content(1, 2, 3)}
    assert verify(store, deep=True).problems == {}


def test_an_intact_pack_is_not_deleted_in_favour_of_a_truncated_one(secret: Secret | None) -> None:
    backend = MemoryBackend()
    store = new_store(backend, secret)
    dump(store, {"a": content(1)}, "old")
    (retired_pack,) = backend.names("packs/")
    retired.retire(store, [bytes.fromhex(retired_pack.rpartition("/")[2])])
    kept = dump(store, {"a": content(1)}, "kept")
    (other,) = (name for name in backend.names("packs/") if name != retired_pack)
    _cut(backend, other, 100)
    for _ in range(3):
        prune(store, AT_ONCE)
    assert retired_pack in backend.names("packs/")
    assert restore(store, kept) == {"a": content(1)}


def test_a_deep_check_continues_after_a_bad_sector(secret: Secret | None) -> None:
    place = FaultyBackend(MemoryBackend())
    store = new_store(place, secret, pack_bytes=PIECE_BYTES)
    bad = dump(store, {"a": content(1)}, "bad")
    (pack,) = place.inner.names("packs/")
    good = dump(store, {"a": content(2)}, "good")

    def bad_sector(operation: str, name: str) -> None:
        if (operation, name) == ("read", pack):
            raise OSError(errno.EIO, "Input/output error", name)

    place.fault = bad_sector
    (problem,) = verify(store, deep=True).problems[bad.id]
    assert f"{pack} cannot be read: Input/output error" in problem
    assert verify(store, [good], deep=True).problems == {}
    with pytest.raises(StoreDamaged, match="Input/output error"):
        restore(store, bad)


# --- snapshots ---------------------------------------------------------------------------------------------------


def test_a_damaged_snapshot_can_be_removed_and_still_counts_as_the_latest(tmp_path: Path) -> None:
    store = init_store(tmp_path / "store")
    backend = store.backend
    old, bad = dump(store, {"a": content(1)}, "old"), dump(store, {"a": content(2)}, "bad")
    path = tmp_path / "store/snapshots" / bad.id
    path.write_bytes(path.read_bytes()[:-1])
    for wanted in ("latest", bad.id[:8]):
        with pytest.raises(StoreDamaged, match=f"{bad.id} is cut short"):
            snapshots.find(store, wanted)
    with pytest.raises(InvalidRequest, match="holds 2 snapshots"):
        snapshots.find(store, None)
    assert snapshots.find(store, old.id[:8]) == old
    with pytest.raises(StoreDamaged, match=bad.id) as caught:
        prune_store(backend.url)
    assert f"gpucr rm STORE#{bad.id[:8]}" in (caught.value.hint or "")
    with pytest.raises(StoreDamaged, match=bad.id):
        remove_snapshot(f"{backend.url}#latest")
    assert list(list_snapshots(backend.url).damaged) == [bad.id]
    removed = remove_snapshot(f"{backend.url}#{bad.id[:8]}")
    assert (removed.id, removed.name) == (bad.id, None)
    assert abs(removed.created_s - bad.created_s) < 60
    assert snapshots.find(store, "latest") == snapshots.find(store, None) == old
    assert prune_store(backend.url).retired_packs == 1


def test_an_older_damaged_snapshot_does_not_hide_the_latest() -> None:
    backend = MemoryBackend()
    store = new_store(backend)
    bad, new = dump(store, {"a": content(1)}), dump(store, {"a": content(2)})
    _flip(backend, f"snapshots/{bad.id}")
    assert snapshots.find(store, "latest") == new


def test_a_name_never_selects_an_older_snapshot_if_a_later_one_is_unreadable() -> None:
    """Otherwise the wrong one would be restored or removed."""
    backend = MemoryBackend()
    store = new_store(backend)
    old, bad = dump(store, {"a": content(1)}, "nightly"), dump(store, {"a": content(2)}, "nightly")
    _flip(backend, f"snapshots/{bad.id}")
    for look in (snapshots.find_parts, snapshots.find_to_remove):
        with pytest.raises(StoreDamaged, match=bad.id) as caught:
            look(store, "nightly")
        assert "by its id" in (caught.value.hint or "")
        assert look(store, old.id[:8]) == (old,)
    assert [each.id for each in snapshots.find_to_remove(store, bad.id)] == [bad.id]
    new = dump(store, {"a": content(3)}, "nightly")
    assert snapshots.find(store, "nightly") == new


# --- keys --------------------------------------------------------------------------------------------------------


def test_a_store_accepts_no_more_keys_than_it_tries(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    secret = Secret.key_file(bytes(32))
    url = init_store(tmp_path / "store", key=secret).backend.url
    (first,) = store_keys(url, key=secret)
    for number in range(1, 64):
        store_keys(url, key=secret, add=Secret.key_file(bytes([number]) * 32))
    with pytest.raises(StoreError, match="has 64 keys, and cannot have more") as caught:
        store_keys(url, key=secret, add=Secret.key_file(b"x" * 32))
    assert "remove one" in (caught.value.hint or "")
    assert len(store_keys(url, key=secret)) == 64
    store_keys(url, key=Secret.key_file(bytes([63]) * 32), remove=first.id)


def test_a_key_removed_while_a_store_is_opened_is_skipped() -> None:
    place = FaultyBackend(MemoryBackend())
    old, new = Secret.key_file(bytes(32)), Secret.key_file(b"n" * 32)
    store = new_store(place, old)
    first = place.inner.names("keys/")[0]
    while max(place.inner.names("keys/")) == first:  # the other one is to be read later
        if (other := store.add_key(new)) < first:
            place.inner.delete(other)

    def vanish(operation: str, name: str) -> None:
        if (operation, name) == ("read", first):
            place.inner.delete(first)

    place.fault = vanish
    assert Store.open(place, new).config == store.config
    assert keys.check(place.inner.read(place.inner.names("keys/")[0])) == "hkdf"


def test_a_bad_sector_under_a_key_does_not_lock_out_the_others() -> None:
    place = FaultyBackend(MemoryBackend())
    old, new = Secret.key_file(bytes(32)), Secret.key_file(b"n" * 32)
    store = new_store(place, old)
    (bad,) = place.inner.names("keys/")
    good = store.add_key(new)

    def bad_sector(operation: str, name: str) -> None:
        if (operation, name) == ("read", bad):
            raise OSError(errno.EIO, "Input/output error", name)

    place.fault = bad_sector
    assert Store.open(place, new).key_names() == {bad: "damaged", good: "key file"}
    with pytest.raises(StoreDamaged, match=f"{bad} is no valid key"):
        Store.open(place, old)


def test_a_key_file_is_read_only_once(tmp_path: Path) -> None:
    """`gpucr copy --key-file <(...)`: the key of both stores comes out of a pipe."""
    secret = Secret.key_file(b"k" * 32)
    for name in ("from", "to"):
        init_store(tmp_path / name, key=secret)
    end, start = os.pipe()
    try:
        os.write(start, b"k" * 32)
        os.close(start)
        arguments = [str(tmp_path / "from"), str(tmp_path / "to"), "--quiet", "--key-file", f"/dev/fd/{end}"]
        result = CliRunner().invoke(copy_command, arguments)
    finally:
        os.close(end)
    assert result.exception is None, result.exception


# --- places ------------------------------------------------------------------------------------------------------


class _SmallDisk(MemoryBackend):
    """Takes so many blocks of 4 KiB."""

    blocks = 1 << 30

    def create(self, name: str, parts: Buffer | Sequence[Buffer]) -> None:
        super().create(name, parts)
        if sum(-(-len(data) // 4096) for data, _ in self.objects.values()) > self.blocks:
            self.delete(name)
            raise OSError(errno.ENOSPC, "No space left on device", name)

    def is_full_now(self) -> None:
        self.blocks = sum(-(-len(data) // 4096) for data, _ in self.objects.values())


def test_a_prune_makes_room_on_a_full_disk() -> None:
    backend = _SmallDisk()
    store = new_store(backend)
    dumped = [dump(store, {"a": content(number)}) for number in range(1, 6)]
    backend.is_full_now()
    with pytest.raises(StoreError, match="takes no more data: No space left on device") as caught:
        dump(store, {})
    assert caught.value.code == "GPUCR-NO-SPACE"
    report = prune(store, PruneRules(keep_last=1, grace_s=0.0))
    assert (report.removed, report.kept) == (tuple(dumped[:4]), (dumped[4],))
    assert report.retired_packs == 4
    assert prune(store, AT_ONCE).deleted_packs == 4
    assert restore(store, dump(store, {"a": content(9)})) == {"a": content(9)}


def test_on_a_full_disk_a_wrong_clock_removes_nothing_by_age(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = _SmallDisk()
    store = new_store(backend)
    old = dump(store, {"a": content(1)})
    backend.clock_s += 3600
    young = [dump(store, {"a": content(number)}) for number in (2, 3)]
    backend.is_full_now()
    monkeypatch.setattr(time, "time", lambda: 4e9)
    with pytest.raises(StoreError, match="No space left"):
        prune(store, PruneRules(keep_within_s=1800.0, grace_s=0.0))
    assert snapshots.list_all(store).intact() == tuple(young), "the oldest alone, which made too little room"
    assert old.id not in str(backend.names())


def test_on_a_full_disk_nothing_is_removed_if_a_kept_snapshot_lacks_a_piece() -> None:
    backend = _SmallDisk()
    store = new_store(backend)
    old, kept = dump(store, {"a": content(1)}), dump(store, {"a": content(2)})
    place = retired.complete_index(store).find(kept.areas[0].listed[0].id)
    assert place is not None
    backend.delete(pack_name(place.pack_id))
    backend.is_full_now()
    with pytest.raises(StoreDamaged, match="nothing was removed"):
        prune(store, PruneRules(keep_last=1, grace_s=0.0))
    assert restore(store, old) == {"a": content(1)}


def test_a_prune_that_can_free_nothing_says_what_to_do() -> None:
    backend = _SmallDisk()
    store = new_store(backend)
    kept = dump(store, {"a": content(1)})
    backend.is_full_now()
    with pytest.raises(StoreError, match="No space left") as caught:
        prune(store, AT_ONCE)
    assert caught.value.code == "GPUCR-NO-SPACE"
    assert "by other means" in (caught.value.hint or "")
    assert restore(store, kept) == {"a": content(1)}


def test_a_full_disk_at_the_commit_is_reported() -> None:
    """Not even the tombstone that would settle it finds room."""
    place = FaultyBackend(MemoryBackend(), lambda operation, name: "full" if name.startswith("snapshots/") else None)
    new_store(place.inner)
    with pytest.raises(StoreError, match=r"not known whether .* was completed: at that moment .* No space left"):
        dump(Store.open(place), {"a": content(1)})
    assert snapshots.list_all(Store.open(place.inner)).snapshots == ()


@pytest.mark.parametrize("fails_at", ["keys", config.NAME])
def test_creating_a_store_works_again_after_a_full_disk(
    fails_at: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    secret, link = Secret.key_file(bytes(32)), os.link

    def full(source: Path, target: Path) -> None:
        if fails_at in str(target):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        link(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(os, "link", full)
        with pytest.raises(StoreError, match="takes no more data"):
            init_store(tmp_path / "store", key=secret)
        assert list(tmp_path.iterdir()) == [], "nothing of it stays"
        (tmp_path / "store").mkdir(mode=0o700)
        with pytest.raises(StoreError, match="takes no more data"):
            init_store(tmp_path / "store", key=secret)
        assert list(tmp_path.rglob("*")) == [tmp_path / "store"], "the folder was there before"
    store = init_store(tmp_path / "store", key=secret)
    assert list_snapshots(store.backend.url, key=secret).snapshots == ()


@pytest.mark.parametrize("refused", [errno.EPERM, errno.EOPNOTSUPP])
def test_a_file_system_without_hard_links_is_reported(
    refused: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def no_links(source: object, target: object) -> None:
        raise OSError(refused, os.strerror(refused), str(target))

    monkeypatch.setattr(os, "link", no_links)
    with pytest.raises(StoreError, match="its file system has no hard links, which a store needs"):
        init_store(tmp_path / "store")
    assert list(tmp_path.iterdir()) == []


def test_a_prune_leaves_a_slow_writers_packs_alone(tmp_path: Path) -> None:
    """It is alive, but one of its packs has not grown for longer than a dead writer's would be kept."""
    store = new_store(LocalBackend(tmp_path))
    incoming = tmp_path / INCOMING_NAME
    with WriteSession.begin(store, compress="none", refresh_s=NEVER_S) as session:
        refs = session.writer.add_all(content(1))
        (filled,) = incoming.iterdir()
        session._registration.refresh()
        now_s = time.time()
        (begun,) = (path for path in (tmp_path / "writers").iterdir() if "-" not in path.name)
        _age(begun, now_s - 3 * 3600)
        _age(filled, now_s - 2 * 3600)
        prune(store, PruneRules())
        dumped = session.commit(name=None, manifest=b"{}", areas=[session.area("a", refs)])
    assert restore(store, dumped) == {"a": content(1)}
    left = incoming / "left-behind"
    left.touch()
    _age(left, time.time() - 2 * 3600)
    prune(store, PruneRules())
    assert not left.exists()


def _age(path: Path, at_s: float) -> None:
    os.utime(path, (at_s, at_s))

from __future__ import annotations

import gc
import json
import os
import re
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpucr.cli.prune import command
from gpucr.errors import StoreDamaged, Unsupported
from gpucr.operations.stores import init_store
from gpucr.store import index as indexes
from gpucr.store import retired, snapshots, writers
from gpucr.store.keys import Secret
from gpucr.store.local import LocalBackend
from gpucr.store.opened import Store
from gpucr.store.prune import PruneReport, prune
from gpucr.store.retention import PruneRules
from gpucr.store.session import WriteSession
from gpucr.store.stored_snapshot import StoredSnapshot
from gpucr.store.verify import verify
from tests.command import parsed
from tests.store.dumps import NEVER_S, PIECE_BYTES, content, dump, new_store, restore
from tests.store.memory import FaultyBackend, Killed, MemoryBackend

AT_ONCE = PruneRules(grace_s=0.0)


def _prune_all(store: Store, **rules: float) -> PruneReport:
    """Prune until nothing changes any more; the last report that deleted something."""
    last = PruneReport()
    for _ in range(3):
        report = prune(store, PruneRules(grace_s=0.0, **rules))  # type: ignore[arg-type]
        last = report if report.deleted_packs or report.removed else last
    return last


def test_a_store_is_closed_as_soon_as_nobody_uses_it(tmp_path: Path) -> None:
    """Not when garbage is collected: its file system would stay busy until then."""
    (tmp_path / "store").mkdir(mode=0o700)
    gc.disable()
    try:
        store = new_store(LocalBackend(tmp_path / "store"), None, pack_bytes=8 * PIECE_BYTES)
        dump(store, {"a": content(1, 2, 3)}, "old")
        dump(store, {"a": content(3)}, "new")
        assert prune(store, PruneRules(keep_last=1, grace_s=0.0, repack_below=0.9)).repacked_bytes > 0
        del store
        opened = [os.path.realpath(path) for path in Path("/proc/self/fd").iterdir()]
        assert [path for path in opened if path.startswith(str(tmp_path))] == []
    finally:
        gc.enable()


def test_unneeded_data_is_deleted_and_needed_data_kept(secret: Secret | None) -> None:
    backend = MemoryBackend()
    store = new_store(backend, secret, pack_bytes=PIECE_BYTES)
    old = dump(store, {"a": content(1, 2, 3)}, "old")
    new = dump(store, {"a": content(2, 3, 4)}, "new")
    report = prune(store, PruneRules(keep_last=1, grace_s=0.0))
    assert (report.removed, report.kept) == ((old,), (new,))
    assert (report.retired_packs, report.deleted_packs) == (1, 0)
    before = len(backend.names("packs/"))
    report = prune(store, AT_ONCE)
    assert (report.retired_packs, report.deleted_packs) == (0, 1)
    assert report.deleted_bytes > PIECE_BYTES
    assert len(backend.names("packs/")) == before - 1
    assert backend.names("retired/") == backend.names("writers/") == []
    assert restore(Store.open(backend, secret), new) == {"a": content(2, 3, 4)}


def test_long_lists_are_needed_too() -> None:
    backend = MemoryBackend()
    store = new_store(backend)
    areas = {"device/7": content(*range(1, 300))}
    kept = dump(store, areas)
    dump(store, {"device/7": content(*range(500, 600))})
    snapshots.remove(store, snapshots.find(store, "latest").id)
    assert _prune_all(store).deleted_packs > 0
    assert restore(store, kept) == areas


@pytest.mark.parametrize("dry_run", [True, False])
@pytest.mark.parametrize(
    "rules",
    [{"keep_last": 0}, {"keep_within_s": 0.0}, {"keep_daily": 0, "keep_weekly": 0}, {"keep_last": 0, "names": ("a*",)}],
)
def test_the_last_snapshot_stays_where_one_must(rules: dict[str, Any], dry_run: bool) -> None:
    backend = MemoryBackend()
    store = new_store(backend)
    for name in ("a", "b"):
        dump(store, {"device/7": content(1, 2)}, name)
    before = dict(backend.objects)
    with pytest.raises(Unsupported, match="no rule keeps any of the") as refused:
        prune(store, PruneRules(**rules), keep_one=True, dry_run=dry_run)
    assert refused.value.code == "GPUCR-NOTHING-KEPT"
    assert backend.objects == before
    prune(store, PruneRules(names=("c*",), keep_last=0), keep_one=True, dry_run=dry_run)  # there is none
    prune(store, PruneRules(**rules, per_name=True), keep_one=True, dry_run=dry_run)  # which keeps the latest
    assert len(snapshots.list_all(store).snapshots) == 2


def test_an_empty_store_keeps_only_its_configuration(secret: Secret | None) -> None:
    backend = MemoryBackend()
    store = new_store(backend, secret)
    dump(store, {"a": content(*range(1, 200))})
    _prune_all(store, keep_last=0)
    assert [name for name in backend.names() if not name.startswith("keys/")] == ["gpucr-store.json"]


def test_keep_within_uses_the_stores_clock() -> None:
    backend = MemoryBackend()
    store = new_store(backend)
    dump(store, {}, "old")
    backend.clock_s += 1000
    young = dump(store, {}, "young")
    assert prune(store, PruneRules(keep_within_s=500)).kept == (young,)
    assert prune(store, PruneRules(keep_last=0, keep_within_s=500)).kept == (young,)
    backend.clock_s += 1000
    assert prune(store, PruneRules(keep_last=1, keep_within_s=500)).kept == (young,)
    assert prune(store, PruneRules(keep_within_s=500)).removed == (young,)


def test_without_rules_all_snapshots_are_kept() -> None:
    store = new_store(MemoryBackend())
    both = (dump(store, {}, "a"), dump(store, {}, "b"))
    assert prune(store, PruneRules()).kept == both


def test_a_dry_run_reports_the_same_and_changes_nothing() -> None:
    backend = MemoryBackend()
    store = new_store(backend, pack_bytes=PIECE_BYTES)
    dump(store, {"a": content(1, 2)})
    dump(store, {"a": content(2, 3)})
    rules = PruneRules(keep_last=1, grace_s=0.0)
    before = dict(backend.objects)
    planned = prune(store, rules, dry_run=True)
    assert backend.objects == before
    done = prune(store, rules)
    assert replace(done, later=()) == replace(planned, later=())
    assert [space.size_bytes for space in done.later] == [space.size_bytes for space in planned.later]
    before = dict(backend.objects)
    planned = prune(store, rules, dry_run=True)
    assert backend.objects == before
    assert planned.deleted_packs == 1
    done = prune(store, rules)
    assert (done.deleted_packs, done.deleted_bytes) == (planned.deleted_packs, planned.deleted_bytes)


def test_a_retired_pack_stays_for_the_grace_period() -> None:
    backend = MemoryBackend()
    store = new_store(backend)
    dump(store, {"a": content(1)})
    rules = PruneRules(keep_last=0, grace_s=1000.0)
    prune(store, rules)
    report = prune(store, rules)
    assert (report.waiting_packs, report.deleted_packs) == (1, 0)
    assert report.waiting_bytes > 0
    backend.clock_s += 1000
    report = prune(store, rules)
    assert (report.waiting_packs, report.deleted_packs) == (0, 1)


def test_it_reports_when_space_is_freed(secret: Secret | None) -> None:
    backend = MemoryBackend()
    store = new_store(backend, secret)
    gone = dump(store, {"a": content(1, 2, 3)})
    snapshots.remove(store, gone.id)
    rules = PruneRules(grace_s=100.0)
    with WriteSession.begin(store, refresh_s=NEVER_S):
        (planned,) = prune(store, rules, dry_run=True).later
        (now,) = prune(store, rules).later
    assert planned.size_bytes == now.size_bytes
    assert now.writers == 1
    (size_bytes,) = {backend.size(name) for name in backend.names("packs/")}
    assert now.size_bytes == size_bytes
    (waiting,) = prune(store, rules).later
    assert (waiting.size_bytes, waiting.writers) == (size_bytes, 0)
    assert waiting.after_s is not None
    backend.clock_s = waiting.after_s - 60
    assert prune(store, rules).deleted_bytes == 0
    backend.clock_s = waiting.after_s
    report = prune(store, rules)
    assert (report.deleted_bytes, report.later) == (size_bytes, ())


def test_it_reports_space_that_is_not_freed(secret: Secret | None) -> None:
    """A pack in which something was damaged, and that holds what is nowhere else."""
    backend = MemoryBackend()
    store = new_store(backend, secret)
    dump(store, {"a": content(1, 2)})
    (name,) = backend.names("packs/")
    retired.retire(store, [bytes.fromhex(name.rpartition("/")[2])])
    for _ in range(2):
        (space,) = prune(store, AT_ONCE).later
        assert (space.size_bytes, space.after_s) == (backend.size(name), None)


def test_the_command_reports_when_space_is_freed(tmp_path: Path) -> None:
    store = init_store(tmp_path / "store")
    gone = dump(store, {"a": content(1, 2, 3)})
    snapshots.remove(store, gone.id)
    said = CliRunner().invoke(command, [store.backend.url]).output
    assert re.search(
        r"^0 kept; 0 B deleted\n[\d.]+ KiB is freed by a prune after \d{4}-\d\d-\d\d \d\d:\d\d:\d\dZ\n$", said
    )
    (later,) = parsed(CliRunner().invoke(command, [store.backend.url, "--json"]).output)["later"]
    assert later["size_bytes"] > 0
    assert later["writers"] == 0
    day_s = 24 * 3600
    assert abs(datetime.fromisoformat(later["after"]).timestamp() - time.time() - day_s) < day_s / 2


def test_a_pack_a_live_writer_reuses_stays() -> None:
    backend = MemoryBackend()
    store = new_store(backend)
    dump(store, {"a": content(1)})
    with WriteSession.begin(store, compress="none", refresh_s=NEVER_S) as session:
        refs = session.writer.add_all(content(1))
        assert session.writer.counts.known_bytes == PIECE_BYTES
        for _ in range(3):
            assert prune(store, PruneRules(keep_last=0, grace_s=0.0)).deleted_packs == 0
        made = session.commit(name=None, manifest=b"", areas=[session.area("a", refs)])
    _prune_all(store)
    assert restore(store, made) == {"a": content(1)}


def test_a_live_writers_data_is_not_retired() -> None:
    backend = MemoryBackend()
    store = new_store(backend)
    with WriteSession.begin(store, compress="none", refresh_s=NEVER_S) as session:
        refs = session.writer.add_all(content(1))
        session.writer.flush()
        assert prune(store, AT_ONCE).retired_packs == 0
        session.commit(name=None, manifest=b"", areas=[session.area("a", refs)])
    assert prune(store, AT_ONCE).retired_packs == 0


def test_a_dead_writer_is_ended_and_its_leftovers_are_deleted() -> None:
    backend = MemoryBackend()
    store = new_store(backend)
    faulty = FaultyBackend(
        backend, lambda operation, name: "kill" if (operation, name[:9]) == ("create", "snapshots") else None
    )
    with pytest.raises(Killed):
        dump(Store.open(faulty), {"a": content(1)})
    assert len(backend.names("packs/")) == 1
    assert prune(store, AT_ONCE).dead_writers == ()
    assert len(backend.names("writers/")) == 1, "it may be alive for all that is known"
    backend.clock_s += 3601
    (dead,) = prune(store, AT_ONCE).dead_writers
    assert [info.name for info in snapshots.list_all(store).tombstones] == [f"snapshots/{dead}"]
    _prune_all(store)
    assert backend.names("packs/") == backend.names("index/") == backend.names("writers/") == []
    backend.clock_s += 31 * 24 * 3600
    prune(store, AT_ONCE)
    assert backend.names("snapshots/") == []


def test_a_heartbeat_keeps_a_writer_alive() -> None:
    backend = MemoryBackend()
    store = new_store(backend)
    registration = writers.Registration.register(store, refresh_s=NEVER_S)
    for _ in range(3):
        backend.clock_s += 3000
        registration.refresh()
        assert prune(store, AT_ONCE).dead_writers == ()
    (seen,) = writers.seen(backend).values()
    assert seen.seen_s - seen.since_s > 9000
    assert len(seen.records) == 2, "the first and the latest"
    registration.end()
    assert backend.names("writers/") == []


def test_a_pack_missing_from_the_index_is_not_lost() -> None:
    backend = MemoryBackend()
    store = new_store(backend)
    kept = dump(store, {"a": content(1)})
    for name in backend.names("index/"):
        backend.delete(name)
    assert _prune_all(store) == PruneReport()
    assert restore(store, kept) == {"a": content(1)}


def test_an_index_that_lists_missing_packs_is_not_trusted() -> None:
    backend = MemoryBackend()
    store = new_store(backend, pack_bytes=PIECE_BYTES)
    dump(store, {"a": content(1, 2, 3)})
    dump(store, {"a": content(3)})
    for _ in range(2):
        report = prune(store, PruneRules(keep_last=1, grace_s=0.0))
    assert report.deleted_packs == 2
    assert indexes.load(store).pieces == 3, "one object reports all three"
    assert restore(store, dump(store, {"a": content(1, 2, 3)})) == {"a": content(1, 2, 3)}


def test_a_damaged_store_is_not_pruned(secret: Secret | None) -> None:
    backend = MemoryBackend()
    store = new_store(backend, secret, pack_bytes=PIECE_BYTES)
    old, kept = dump(store, {"a": content(1)}, "old"), dump(store, {"a": content(2)}, "kept")
    place = retired.complete_index(store).find(kept.areas[0].listed[0].id)
    assert place is not None
    backend.delete(next(name for name in backend.names("packs/") if place.pack_id.hex() in name))
    packs = backend.names("packs/")
    with pytest.raises(StoreDamaged, match=r"kept \(.*\) lacks the piece .*; nothing was removed"):
        prune(store, PruneRules(keep_last=1, grace_s=0.0))
    assert backend.names("packs/") == packs
    assert restore(store, old) == {"a": content(1)}, "the only one that can be restored"
    snapshots.remove(store, kept.id)
    assert prune(store, PruneRules(keep_last=1)).kept == (old,)
    _prune_all(store, keep_last=0)
    assert backend.names("packs/") == []


def test_an_unreadable_snapshot_stops_a_prune() -> None:
    backend = MemoryBackend()
    store = new_store(backend)
    kept = dump(store, {"a": content(1)})
    backend.objects[f"snapshots/{kept.id}"] = (b"damaged", 0.0)
    with pytest.raises(StoreDamaged, match=kept.id):
        prune(store, AT_ONCE)
    assert len(backend.names("packs/")) == 1


def test_an_unneeded_pack_with_an_unreadable_footer_is_deleted() -> None:
    backend = MemoryBackend()
    store = new_store(backend)
    backend.create("packs/ab/ab" + 15 * "00", b"no pack at all")
    kept = dump(store, {"a": content(1)})
    assert _prune_all(store).deleted_packs == 1
    assert restore(store, kept) == {"a": content(1)}


def test_repack_empties_mostly_unneeded_packs(secret: Secret | None) -> None:
    backend = MemoryBackend()
    store = new_store(backend, secret, pack_bytes=256 * PIECE_BYTES)
    dump(store, {"a": content(*range(1, 40))})
    kept = dump(store, {"a": content(5, 6)})
    assert prune(store, PruneRules(keep_last=1, grace_s=0.0)).retired_packs == 0
    planned = prune(store, PruneRules(repack_below=0.5, grace_s=0.0), dry_run=True)
    report = prune(store, PruneRules(repack_below=0.5, grace_s=0.0))
    assert report.retired_packs == planned.retired_packs == 1
    assert 0 < report.repacked_bytes < report.retired_bytes / 5
    assert prune(store, AT_ONCE).deleted_packs == 1
    assert sum(len(backend.objects[name][0]) for name in backend.names("packs/")) < 10 * PIECE_BYTES
    assert restore(Store.open(backend, secret), kept) == {"a": content(5, 6)}
    assert _prune_all(store, repack_below=0.5) == PruneReport()


def test_an_interrupted_prune_is_completed_by_the_next(secret: Secret | None) -> None:
    """Killed before each of its steps, with other packs to retire, to delete and to repack at once."""
    step = 0
    while True:
        backend = MemoryBackend()
        store = new_store(backend, secret, pack_bytes=4 * PIECE_BYTES)
        dump(store, {"a": content(1, 2, 3, 4, 5)}, "first")
        prune(store, PruneRules(keep_last=0, grace_s=0.0))
        dump(store, {"a": content(11, 12, 13, 14)}, "second")
        dump(store, {"a": content(6, 7, 8)}, "third")
        kept = dump(store, {"a": content(11, 1, 21)}, "kept")
        count = 0

        def fault(operation: str, name: str, step: int = step) -> str | None:
            nonlocal count
            count += 1
            return "kill" if count > step else None

        rules = PruneRules(keep_last=1, repack_below=0.5, grace_s=0.0)
        died = False
        try:
            prune(Store.open(FaultyBackend(backend, fault), secret), rules)
        except Killed:
            died = True
        assert restore(store, kept) == {"a": content(11, 1, 21)}
        backend.clock_s += 7200
        for _ in range(3):
            prune(store, rules)
        assert restore(store, kept) == {"a": content(11, 1, 21)}
        used = sum(len(backend.objects[name][0]) for name in backend.names("packs/"))
        assert used <= 12 * PIECE_BYTES, "all that is not needed is gone"
        assert backend.names("retired/") == backend.names("writers/") == []
        if not died:
            break
        step += 1
    assert step > 30


@pytest.mark.parametrize("moment", ["packs/", "index/"])
def test_an_index_of_packs_being_published_is_not_taken_for_stale(moment: str) -> None:
    """A writer publishes a pack and its index right before the prune lists one of them."""
    backend = MemoryBackend()
    store = new_store(backend)
    made: list[StoredSnapshot] = []

    def fault(operation: str, name: str) -> str | None:
        if (operation, name) == ("list", moment) and not made:
            made.append(dump(store, {"a": content(1)}))
        return None

    prune(Store.open(FaultyBackend(backend, fault)), AT_ONCE)
    assert len(made) == 1
    assert len(backend.names("index/")) == 1
    assert indexes.load(store).pieces == 1


@given(
    st.binary(max_size=80)
    | st.recursive(st.none() | st.text("0123456789abcdef"), st.lists).map(lambda x: json.dumps(x).encode())
)
def test_arbitrary_bytes_are_a_batch_or_refused(body: bytes) -> None:
    store = new_store(MemoryBackend())
    name = f"retired/{'0' * 32}.packs"
    store.backend.create(name, store.seal(name, body))
    damaged: dict[str, StoreDamaged] = {}
    found = retired.batches(store, damaged.__setitem__)
    assert all(len(pack_id) == 16 for batch in found for pack_id in batch.packs)
    assert [each.packs_name for each in found] + list(damaged) == [name]


def test_a_hundred_snapshots_take_few_requests() -> None:
    """Nobody opens every pack to list, and nobody opens a pack twice."""
    backend = FaultyBackend(MemoryBackend())
    store = new_store(backend)
    for number in range(100):
        dump(store, {"device/7": content(*range(1, 100), 1000 + number), "images/a": b"a"}, str(number))
    packs = len(retired.existing_packs(store))

    def requests() -> int:
        count = len(backend.calls)
        backend.calls.clear()
        return count

    requests()
    assert len(snapshots.list_all(store).intact()) == 100
    assert requests() == 1 + 100
    assert verify(store).problems == {}
    assert requests() <= 10 + 100 + 100 + 2 * packs + 100  # snapshots, index, size and footer of packs, long lists
    prune(store, PruneRules(keep_last=10, grace_s=0.0))
    assert requests() <= 30 + 100 + 90 + 100 + 10  # read, removed, index, long lists
    pruned = prune(store, PruneRules(grace_s=0.0))
    assert pruned.deleted_packs == 89, "the first one has what all share"
    assert (
        requests() <= 30 + 10 + 100 + 10 + 2 * pruned.deleted_packs
    )  # also index objects, which are deleted with packs
    assert len(retired.existing_packs(store)) == packs - 89
    for snapshot in snapshots.list_all(store).intact():
        assert restore(store, snapshot)["device/7"] == content(*range(1, 100), 1000 + int(snapshot.name or ""))

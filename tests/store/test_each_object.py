"""Every object of a store emptied, truncated, extended or replaced: it is reported, or nothing needs it."""

from __future__ import annotations

import contextlib
import itertools
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from gpucr.cli.ls import command as ls
from gpucr.cli.verify import command as verify_command
from gpucr.errors import GpucrError, StoreDamaged, WrongKey
from gpucr.operations.stores import init_store, list_snapshots, verify_snapshots
from gpucr.store import config, snapshots, writers
from gpucr.store.keys import Secret
from gpucr.store.local import LocalBackend
from gpucr.store.opened import Store
from gpucr.store.prune import prune
from gpucr.store.retention import PruneRules
from tests.store.dumps import content, dump, restore
from tests.storm import sample

AREAS = {"a": content(*range(1, 101))}
_KINDS = [
    "config",
    "keys",
    "packs",
    "index",
    "snapshots",
    "retired/*.packs",
    "retired/*.writers",
    "writers",
    "tombstone",
]
_HAS_NO_MEANING = {"writers"}
"""Of these only the names and the times count."""


_made: dict[bool, Path] = {}
"""Stores to copy: one with encryption, one without."""


@pytest.fixture
def root(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, secret: Secret | None) -> Path:
    """A store with two snapshots, a third one that was removed and retired, a writer at work, and a tombstone."""
    is_encrypted = secret is not None
    if is_encrypted not in _made:
        _made[is_encrypted] = _make(tmp_path_factory.mktemp("made") / "store", secret)
    return shutil.copytree(_made[is_encrypted], tmp_path / "store", symlinks=True)


def _make(root: Path, secret: Secret | None) -> Path:
    store = init_store(root, key=secret)
    dump(store, AREAS, "one")
    gone = dump(store, {"b": content(*range(200, 230))}, "gone")
    dump(store, AREAS | {"c": content(300, 301)}, "two")
    if secret is not None:
        store.add_key(Secret.key_file(b"o" * 32))
    snapshots.remove(store, gone.id)
    dead = writers.Registration.register(store)
    (seen,) = writers.seen(store.backend).values()
    writers.end_dead(store, seen)
    dead.end()
    prune(store, PruneRules())
    writers.Registration.register(store).abandon()
    return root


def _objects(root: Path, kind: str) -> list[Path]:
    if kind == "config":
        return [root / config.NAME]
    if kind in ("tombstone", "snapshots"):
        store = root / "snapshots"
        small = [path for path in store.iterdir() if path.stat().st_size < 300]
        return small if kind == "tombstone" else [path for path in store.iterdir() if path not in small]
    folder, _, pattern = kind.partition("/")
    found = [path for path in (root / folder).rglob(pattern or "*") if path.is_file()]
    return sorted(found)


def _emptied(path: Path, root: Path) -> None:
    path.write_bytes(b"")


def _zeroed(path: Path, root: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def _halved(path: Path, root: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _grown(path: Path, root: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def _flipped(path: Path, root: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1
    path.write_bytes(data)


def _replaced(path: Path, root: Path) -> None:
    """By the largest other object of the store."""
    others = (each for each in root.rglob("*") if each.is_file() and each != path)
    shutil.copyfile(max(others, key=lambda each: each.stat().st_size), path)


def _exchanged(path: Path, root: Path) -> None:
    """By another one of its kind."""
    for other in sorted(path.parent.iterdir() if path.parent.name != root.name else ()):
        if other != path and other.is_file() and other.read_bytes() != path.read_bytes():
            shutil.copyfile(other, path)
            return
    _replaced(path, root)


_CHANGES = [_emptied, _zeroed, _halved, _grown, _flipped, _replaced, _exchanged]


@pytest.mark.parametrize(("kind", "change"), sample(list(itertools.product(_KINDS, _CHANGES)), 6))
def test_damage_is_reported_wherever_it_is(
    root: Path, kind: str, change: Callable[[Path, Path], None], secret: Secret | None
) -> None:
    if kind == "keys" and secret is None:
        pytest.skip("a store without encryption has no keys")
    found = _objects(root, kind)
    assert found, "the store has one of each kind"
    for path in found:
        whole = path.read_bytes()
        change(path, root)
        if (kind, change) == ("keys", _exchanged):
            kind = "writers"  # a copy of another key of this store is a valid one
        _judge(root, path, kind, secret)
        path.write_bytes(whole)
    assert verify_snapshots(root, deep=True, key=secret).problems == {}


def _judge(root: Path, path: Path, kind: str, secret: Secret | None) -> None:
    with contextlib.suppress(StoreDamaged, WrongKey):  # configuration; a key, if no other one opens the store
        store = Store.open(LocalBackend(root), secret)
        problems = verify_snapshots(root, deep=True, key=secret).problems
        if kind not in _HAS_NO_MEANING:
            # A pack's padding, and what lies behind its end, are no data; what a dead pack holds nobody needs.
            assert problems or (kind == "packs" and _all_come_back(store)), path
        if kind == "snapshots":
            assert list_snapshots(root, key=secret).damaged.keys() == {path.name}
            with pytest.raises(StoreDamaged, match=path.name):
                snapshots.find(store, "latest")
        for snapshot in snapshots.list_all(store).snapshots:
            with contextlib.suppress(StoreDamaged):
                assert restore(store, snapshot).items() >= AREAS.items()
        with contextlib.suppress(GpucrError):
            after = dump(store, AREAS, "after")
            try:
                assert restore(store, after) == AREAS
            finally:  # the next object is looked at in the same store
                snapshots.remove(store, after.id)


def _all_come_back(store: Store) -> bool:
    found = [restore(store, each) for each in snapshots.list_all(store).intact()]
    return len(found) == 2 and all(each.items() >= AREAS.items() for each in found)


def test_an_empty_snapshot_object_is_not_a_tombstone(root: Path, secret: Secret | None) -> None:
    """As a file system leaves a file after a power failure."""
    store = Store.open(LocalBackend(root), secret)
    two = snapshots.find(store, "two")
    (root / "snapshots" / two.id).write_bytes(b"")
    for wanted in ("latest", two.id[:8]):
        with pytest.raises(StoreDamaged, match=f"{two.id} is cut short"):
            snapshots.find(store, wanted)
    with pytest.raises(StoreDamaged, match=f"no snapshot 'two' can be found .* damaged: .*{two.id} is cut short"):
        snapshots.find(store, "two")
    assert list(verify_snapshots(root, key=secret).problems) == [two.id]
    with pytest.raises(StoreDamaged, match=two.id):
        prune(store, PruneRules(keep_last=1))


def test_the_commands_report_an_empty_snapshot_object(tmp_path: Path) -> None:
    store = init_store(tmp_path / "store")
    bad = dump(store, AREAS, "bad")
    (tmp_path / "store/snapshots" / bad.id).write_bytes(b"")
    for command in (ls, verify_command):
        result = CliRunner().invoke(command, [str(tmp_path / "store")])
        assert isinstance(result.exception, GpucrError)
        assert bad.id in result.output


def test_a_tombstone_is_neither_a_snapshot_nor_damage(root: Path, secret: Secret | None) -> None:
    store = Store.open(LocalBackend(root), secret)
    listing = snapshots.list_all(store)
    assert [each.name for each in listing.intact()] == ["one", "two"]
    (tombstone,) = listing.tombstones
    assert writers.snapshot_id_of(tombstone.name) not in listing.stored_s
    with pytest.raises(GpucrError, match="holds no snapshot"):
        snapshots.load(store, tombstone.name.rpartition("/")[2])

"""Stores that a group shares: real users, real modes, and who may delete what."""

from __future__ import annotations

import json
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import gpucr
from gpucr.errors import GpucrError, InvalidRequest, StoreDamaged, StoreError
from gpucr.snapshot.location import find_target
from gpucr.store import copy, prune, sharing, snapshots, verify
from gpucr.store.keys import Secret
from gpucr.store.local import INCOMING_NAME, LocalBackend
from gpucr.store.opened import Store
from gpucr.store.retention import PruneRules
from gpucr.supervise.start import require_store
from tests.store.dumps import content, dump, restore

pytestmark = pytest.mark.root

GROUP, GID = "daemon", 1
ALICE, BOB, STRANGER = 4101, 4102, 4103
AREAS = {"device/7": content(1, 2, 3)}


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that every user can reach, and root alone can write."""
    folder = Path(tempfile.mkdtemp(prefix="gpucr-shared-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def shared(place: Path) -> Path:
    """A store that a group shares."""
    gpucr.init_store(place / "store", shared_with_group=GROUP)
    private = gpucr.init_store(place / "warm")  # what is imported late is imported before anybody is not root
    restore(private, dump(private, AREAS))
    return place / "store"


def as_user(uid: int, action: Callable[[], object], *, umask: int = 0o077) -> str:
    """What an action returns, done by a user; of an error its code and message. Only Alice and Bob are in the group."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([GID] if uid in (ALICE, BOB) else [])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            os.umask(umask)
            try:
                said = str(action())
            except GpucrError as e:
                said = f"{e.code}: {e.message}"
            except OSError as e:
                said = f"{type(e).__name__}: {e}"
            os.write(write, json.dumps(said).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as answer:
        text = answer.read()
    os.waitpid(pid, 0)
    return str(json.loads(text))


def opened(path: Path, secret: Secret | None = None) -> Store:
    return Store.open(LocalBackend(path), secret)


def dumped_by(uid: int, path: Path, umask: int = 0o077) -> str:
    """The id of a snapshot that this user has stored."""
    found = as_user(uid, lambda: dump(opened(path), AREAS, "train").id, umask=umask)
    assert len(found) == 32, found
    return found


def modes(path: Path) -> set[tuple[str, int, int]]:
    """Kind, group and mode of all that is there."""
    found = [(each, each.lstat()) for each in (path, *path.rglob("*"))]
    return {("folder" if each.is_dir() else "file", at.st_gid, stat.S_IMODE(at.st_mode)) for each, at in found}


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_modes_are_explicit_whatever_the_umask(shared: Path, umask: int) -> None:
    for uid in (ALICE, BOB):
        dumped_by(uid, shared, umask)
    assert modes(shared) == {("folder", GID, 0o3770), ("file", GID, 0o640)}
    assert {each.stat().st_uid for each in shared.rglob("*") if each.is_dir()} == {0}
    assert not os.listdir(shared / INCOMING_NAME)


def test_members_use_each_others_snapshots_and_share_pieces(shared: Path) -> None:
    first = dumped_by(ALICE, shared)
    before = sum(each.stat().st_size for each in shared.glob("packs/*/*"))
    dumped_by(BOB, shared)
    assert sum(each.stat().st_size for each in shared.glob("packs/*/*")) == before, "Bob stored no piece again"

    def look() -> object:
        store = opened(shared)
        found = snapshots.find(store, first)
        assert restore(store, found) == AREAS
        assert not verify.verify(store, deep=True).problems
        return len(snapshots.list_all(store).snapshots)

    assert as_user(BOB, look) == "2"


def test_nobody_outside_the_group_sees_anything(shared: Path) -> None:
    dumped_by(ALICE, shared)
    assert "Permission denied" in as_user(STRANGER, lambda: list(gpucr.list_snapshots(shared).snapshots))
    assert "Permission denied" in as_user(STRANGER, lambda: os.listdir(shared))


def test_each_member_removes_his_own_snapshots_only(shared: Path) -> None:
    alices, bobs = dumped_by(ALICE, shared), dumped_by(BOB, shared)
    said = as_user(BOB, lambda: gpucr.remove_snapshot(f"{shared}#{alices}"))
    assert said.startswith("GPUCR-STORE: ")
    assert "only root may delete what another member of the group has stored" in said
    assert as_user(BOB, lambda: gpucr.remove_snapshot(f"{shared}#{bobs}").id) == bobs
    assert [each.id for each in gpucr.list_snapshots(shared).snapshots] == [alices]
    gpucr.remove_snapshot(f"{shared}#{alices}")
    assert not gpucr.list_snapshots(shared).snapshots


def test_root_alone_prunes(shared: Path) -> None:
    ids = [dumped_by(uid, shared) for uid in (ALICE, BOB, ALICE)]
    rules = PruneRules(keep_last=1)
    before = sorted(shared.rglob("*"))
    said = as_user(ALICE, lambda: prune.prune(opened(shared), rules))
    assert said.endswith("is shared by a group: only root prunes it")
    assert as_user(ALICE, lambda: len(prune.prune(opened(shared), rules, dry_run=True).removed)) == "2"
    assert sorted(shared.rglob("*")) == before
    report = prune.prune(opened(shared), rules)
    assert [each.id for each in report.removed] == ids[:2]
    found = opened(shared)
    assert as_user(BOB, lambda: restore(found, snapshots.find(found, "latest")) == AREAS) == "True"


def test_what_root_keeps_or_runs_does_not_come_from_there(shared: Path, place: Path) -> None:
    snapshot = dumped_by(ALICE, shared)
    private = opened(place / "warm")
    for use in (
        lambda: find_target(f"{shared}#mine", compress="auto", encrypt=False, trust_store=False, key=None),
        lambda: copy.copy(opened(shared), snapshots.find(opened(shared), snapshot), private),
        lambda: copy.copy(private, snapshots.find(private, "latest"), opened(shared)),
        lambda: require_store(str(shared), None),
    ):
        with pytest.raises(StoreError, match="could run as root") as refused:
            use()
        assert "sudo -u" in (refused.value.hint or "")
    gpucr.init_store(place / "bobs")
    for each in (place / "bobs", *(place / "bobs").rglob("*")):
        os.chown(each, BOB, BOB)
    found = snapshots.find(opened(shared), snapshot)
    assert as_user(BOB, lambda: copy.copy(opened(shared), found, opened(place / "bobs")).name) == "train"


def test_members_cannot_touch_what_is_others(shared: Path) -> None:
    dumped_by(ALICE, shared)
    pack = next(shared.glob("packs/*/*"))

    def attack() -> object:
        failed = []
        for act in (
            pack.unlink,
            lambda: pack.rename(pack.with_name("x")),
            lambda: pack.write_bytes(b""),
            lambda: pack.parent.rename(shared / "packs/zz"),
            lambda: pack.parent.chmod(0o777),
            lambda: shared.chmod(0o777),
            (shared / "gpucr-store.json").unlink,
        ):
            try:
                act()
            except OSError:
                failed.append(1)
        return len(failed)

    assert as_user(BOB, attack) == "7"
    assert not verify.verify(opened(shared), deep=True).problems


def test_folders_and_links_of_members_are_passed_over(shared: Path, place: Path) -> None:
    dumped_by(ALICE, shared)
    (place / "victim").write_text("kept")

    def attack() -> None:
        (shared / "index/mine").mkdir()
        (shared / "index/mine/deadbeef").write_bytes(b"not an index")
        (shared / f"snapshots/{'0' * 32}").symlink_to(place / "victim")

    assert as_user(BOB, attack) == "None"
    backend = LocalBackend(shared)
    names = {info.name for info in backend.list()}
    assert "index/mine/deadbeef" not in names
    assert f"snapshots/{'0' * 32}" not in names
    with pytest.raises(OSError, match="symbolic link"):
        backend.read(f"snapshots/{'0' * 32}")
    prune.prune(opened(shared), PruneRules(keep_last=1))
    assert (place / "victim").read_text() == "kept"


def test_a_file_that_others_can_write_is_refused(shared: Path) -> None:
    snapshot = dumped_by(ALICE, shared)
    file = shared / f"snapshots/{snapshot}"
    file.chmod(0o660)
    with pytest.raises(StoreDamaged, match="did not come there from a member"):
        snapshots.find(opened(shared), snapshot)
    file.chmod(0o640)
    os.chown(file, STRANGER, STRANGER)
    with pytest.raises(StoreDamaged, match=f"gid {STRANGER}"):
        snapshots.find(opened(shared), snapshot)


def test_it_is_not_shared_where_the_mark_is_not_roots(place: Path) -> None:
    """Who makes a folder that looks like one makes nobody else believe in it."""
    gpucr.init_store(place / "store", shared_with_group=GROUP)
    os.chown(place / "store", ALICE, GID)
    (place / "store").chmod(0o3770)
    said = as_user(BOB, lambda: gpucr.list_snapshots(place / "store"))
    assert said.startswith("GPUCR-STORE: ")
    assert "others can write it" in said


def test_encrypted(place: Path) -> None:
    secret = Secret.key_file(bytes(range(32)))
    gpucr.init_store(place / "store", key=secret, shared_with_group=GROUP)
    found = as_user(ALICE, lambda: dump(opened(place / "store", secret), AREAS, "train").id)
    read = as_user(BOB, lambda: restore(s := opened(place / "store", secret), snapshots.find(s, found)) == AREAS)
    assert read == "True"
    assert modes(place / "store") == {("folder", GID, 0o3770), ("file", GID, 0o640)}


def test_only_root_shares_and_only_with_a_group_that_there_is(place: Path) -> None:
    os.chown(place, ALICE, ALICE)
    said = as_user(ALICE, lambda: gpucr.init_store(place / "a", shared_with_group=GROUP))
    assert said.startswith("GPUCR-NOT-PERMITTED: only root can share a store")
    with pytest.raises(InvalidRequest, match="no group 'nosuchgroup'"):
        gpucr.init_store(place / "a", shared_with_group="nosuchgroup")
    with pytest.raises(InvalidRequest, match="only a store in a folder has a group"):
        gpucr.init_store("s3://bucket/prefix", shared_with_group=GROUP)
    assert not (place / "a").exists()


def test_a_folder_of_somebody_else_is_not_shared(place: Path) -> None:
    (place / "a").mkdir(mode=0o755)
    os.chown(place / "a", ALICE, ALICE)
    with pytest.raises(StoreError, match="not an empty folder of root's"):
        gpucr.init_store(place / "a", shared_with_group=GROUP)
    assert os.listdir(place / "a") == []
    assert (place / "a").stat().st_uid == ALICE


def test_nothing_stays_where_it_cannot_be_made(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "there").mkdir(mode=0o755)

    def full(self: LocalBackend, name: str, parts: object) -> None:
        raise OSError(28, "No space left on device", name)

    monkeypatch.setattr(LocalBackend, "create", full)
    for name in ("there", "new"):
        with pytest.raises(StoreError, match="No space left"):
            gpucr.init_store(place / name, shared_with_group=GROUP)
    assert os.listdir(place) == ["there"]
    assert os.listdir(place / "there") == []
    assert stat.S_IMODE((place / "there").stat().st_mode) == 0o700


def test_all_folders_are_made_in_advance(shared: Path) -> None:
    """A member who made one could delete in it what others store."""
    made = {str(each.relative_to(shared)) for each in shared.rglob("*") if each.is_dir()}
    assert made == set(sharing.FOLDERS)
    assert len([name for name in made if name.startswith("packs/")]) == 256

"""Stores that a group shares: real users, real modes, and who may delete what."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import gpucr
from gpucr.errors import InvalidRequest, StoreDamaged, StoreError
from gpucr.snapshot.location import find_target
from gpucr.store import copy, prune, sharing, snapshots, verify
from gpucr.store.keys import Secret
from gpucr.store.local import INCOMING_NAME, LocalBackend
from gpucr.store.opened import Store
from gpucr.store.retention import PruneRules
from gpucr.supervise.start import require_store
from tests.command import python
from tests.conftest import skip_or_fail
from tests.store.dumps import content, dump

pytestmark = [pytest.mark.root, pytest.mark.in_turn]

GROUP, GID = "daemon", 1
MODES = {("folder", GID, 0o3770), ("folder", GID, 0o3750), ("file", GID, 0o640)}
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
    return place / "store"


_AS_USER = """
import os, sys
from pathlib import Path
import numpy
import gpucr
from gpucr.errors import GpucrError
from gpucr.store import copy, prune, snapshots, verify
from gpucr.store.keys import Secret
from gpucr.store.local import LocalBackend

from gpucr.store.opened import Store
from gpucr.store.retention import PruneRules
from tests.store.dumps import content, dump, new_store, restore
from tests.store.memory import MemoryBackend

def opened(path, secret=None):
    return Store.open(LocalBackend(path), secret)

AREAS = {"device/7": content(1, 2, 3)}
uid, group, umask, action, *paths = sys.argv[1:]
shared, *others = map(Path, paths)
for name in gpucr.__all__:  # what is imported late is imported before anybody is not root
    getattr(gpucr, name)
for secret in (Secret.key_file(bytes(32)), None):
    warm = new_store(MemoryBackend(), secret)
    found = dump(warm, AREAS)
    restore(warm, found)
    copy.copy(warm, found, new_store(MemoryBackend()))
os.setgroups([int(group)] if group else [])
os.setresgid(*[int(uid)] * 3)
os.setresuid(*[int(uid)] * 3)
os.umask(int(umask))
try:
    exec(action)
except GpucrError as e:
    said = f"{e.code}: {e.message}"
except OSError as e:
    said = f"{type(e).__name__}: {e}"
print(said)
"""


def as_user(uid: int, action: str, *paths: Path, umask: int = 0o077) -> str:
    """What a user's code names `said`; of an error its code and message. Only Alice and Bob are in the group.

    The first path is `shared` there, the rest are `others`.
    """
    if unreadable := [each for each in Path(gpucr.__file__).parents if not each.stat().st_mode & stat.S_IXOTH]:
        skip_or_fail("root", f"other users cannot read gpucr here: they may not enter {unreadable[-1]}")
    done = python(_AS_USER, uid, GID if uid in (ALICE, BOB) else "", umask, action, *paths)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def opened(path: Path, secret: Secret | None = None) -> Store:
    return Store.open(LocalBackend(path), secret)


def dumped_by(uid: int, path: Path, umask: int = 0o077) -> str:
    """The id of a snapshot that this user has stored."""
    found = as_user(uid, "said = dump(opened(shared), AREAS, 'train').id", path, umask=umask)
    assert len(found) == 32, found
    return found


def modes(path: Path) -> set[tuple[str, int, int]]:
    """Kind, group and mode of all that is there."""
    found = [(each, each.lstat()) for each in (path, *path.rglob("*"))]
    return {("folder" if each.is_dir() else "file", at.st_gid, stat.S_IMODE(at.st_mode)) for each, at in found}


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_modes_are_explicit_under_any_umask(shared: Path, umask: int) -> None:
    for uid in (ALICE, BOB):
        dumped_by(uid, shared, umask)
    assert modes(shared) == MODES
    assert {each.stat().st_uid for each in shared.rglob("*") if each.is_dir()} == {0}
    assert not os.listdir(shared / INCOMING_NAME)


def test_members_use_each_others_snapshots_and_share_pieces(shared: Path) -> None:
    first = dumped_by(ALICE, shared)
    before = sum(each.stat().st_size for each in shared.glob("packs/*/*"))
    dumped_by(BOB, shared)
    assert sum(each.stat().st_size for each in shared.glob("packs/*/*")) == before, "Bob stored no piece again"

    look = f"""
store = opened(shared)
same = restore(store, snapshots.find(store, {first!r})) == AREAS
said = same, verify.verify(store, deep=True).problems, len(snapshots.list_all(store).snapshots)
"""
    assert as_user(BOB, look, shared) == "(True, {}, 2)"


def test_nobody_outside_the_group_sees_anything(shared: Path) -> None:
    dumped_by(ALICE, shared)
    assert "Permission denied" in as_user(STRANGER, "said = gpucr.list_snapshots(shared)", shared)
    assert "Permission denied" in as_user(STRANGER, "said = os.listdir(shared)", shared)


def test_members_remove_only_their_own_snapshots(shared: Path) -> None:
    alices, bobs = dumped_by(ALICE, shared), dumped_by(BOB, shared)
    remove = "said = gpucr.remove_snapshot(f'{shared}#%s').id"
    said = as_user(BOB, remove % alices, shared)
    assert said.startswith("GPUCR-STORE: ")
    assert "only root may delete what another member of the group has stored" in said
    assert as_user(BOB, remove % bobs, shared) == bobs
    assert [each.id for each in gpucr.list_snapshots(shared).snapshots] == [alices]
    gpucr.remove_snapshot(f"{shared}#{alices}")
    assert not gpucr.list_snapshots(shared).snapshots


def test_only_root_prunes(shared: Path) -> None:
    ids = [dumped_by(uid, shared) for uid in (ALICE, BOB, ALICE)]
    before = sorted(shared.rglob("*"))
    said = as_user(ALICE, "said = prune.prune(opened(shared), PruneRules(keep_last=1))", shared)
    assert said.endswith("is shared by a group: only root prunes it")
    dry = "said = len(prune.prune(opened(shared), PruneRules(keep_last=1), dry_run=True).removed)"
    assert as_user(ALICE, dry, shared) == "2"
    assert sorted(shared.rglob("*")) == before
    report = prune.prune(opened(shared), PruneRules(keep_last=1))
    assert [each.id for each in report.removed] == ids[:2]
    latest = "store = opened(shared); said = restore(store, snapshots.find(store, 'latest')) == AREAS"
    assert as_user(BOB, latest, shared) == "True"


def test_root_neither_stores_nor_runs_what_members_wrote(shared: Path, place: Path) -> None:
    snapshot = dumped_by(ALICE, shared)
    private = gpucr.init_store(place / "private")
    dump(private, AREAS)
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
    find = f"store = opened(shared); found = snapshots.find(store, {snapshot!r})"
    own = f"{find}; said = copy.copy(store, found, opened(others[0])).name"
    assert as_user(BOB, own, shared, place / "bobs") == "train"


def test_members_cannot_touch_each_others_files(shared: Path) -> None:
    dumped_by(ALICE, shared)
    pack = next(shared.glob("packs/*/*"))

    attack = """
pack, said = others[0], 0
for act in (
    pack.unlink,
    lambda: pack.rename(pack.with_name("x")),
    (shared / f"retired/{'0' * 32}.packs").touch,
    (shared / f"keys/{'0' * 16}.json").touch,
    (shared / "packs/zz").mkdir,
    (shared / "new").touch,
    lambda: pack.write_bytes(b""),
    lambda: pack.parent.rename(shared / "packs/zz"),
    lambda: pack.parent.chmod(0o777),
    lambda: shared.chmod(0o777),
    (shared / "gpucr-store.json").unlink,
):
    try:
        act()
    except OSError:
        said += 1
"""
    assert as_user(BOB, attack, shared, pack) == "11"
    assert not verify.verify(opened(shared), deep=True).problems


def test_folders_and_links_of_members_are_skipped(shared: Path, place: Path) -> None:
    dumped_by(ALICE, shared)
    (place / "victim").write_text("kept")

    attack = """
(shared / "index/mine").mkdir()
(shared / "index/mine/deadbeef").write_bytes(b"not an index")
said = (shared / f"snapshots/{'0' * 32}").symlink_to(others[0])
"""
    assert as_user(BOB, attack, shared, place / "victim") == "None"
    backend = LocalBackend(shared)
    names = {info.name for info in backend.list()}
    assert "index/mine/deadbeef" not in names
    assert f"snapshots/{'0' * 32}" not in names
    with pytest.raises(OSError, match="symbolic link"):
        backend.read(f"snapshots/{'0' * 32}")
    prune.prune(opened(shared), PruneRules(keep_last=1))
    assert (place / "victim").read_text() == "kept"


def test_a_file_writable_by_others_is_refused(shared: Path) -> None:
    snapshot = dumped_by(ALICE, shared)
    file = shared / f"snapshots/{snapshot}"
    file.chmod(0o660)
    with pytest.raises(StoreDamaged, match="did not come there from a member"):
        snapshots.find(opened(shared), snapshot)
    file.chmod(0o640)
    os.chown(file, STRANGER, STRANGER)
    with pytest.raises(StoreDamaged, match=f"gid {STRANGER}"):
        snapshots.find(opened(shared), snapshot)


def test_a_store_is_shared_only_if_its_mark_is_roots(place: Path) -> None:
    """Who makes a folder that looks like one makes nobody else believe in it."""
    gpucr.init_store(place / "store", shared_with_group=GROUP)
    os.chown(place / "store", ALICE, GID)
    (place / "store").chmod(0o3750)
    said = as_user(BOB, "said = gpucr.list_snapshots(shared)", place / "store")
    assert said.startswith("GPUCR-STORE: ")
    assert "others can write it" in said


def test_encrypted(place: Path) -> None:
    gpucr.init_store(place / "store", key=Secret.key_file(bytes(range(32))), shared_with_group=GROUP)
    store = "store = opened(shared, Secret.key_file(bytes(range(32))))\n"
    found = as_user(ALICE, f"{store}said = dump(store, AREAS, 'train').id", place / "store")
    read = f"{store}said = restore(store, snapshots.find(store, {found!r})) == AREAS"
    assert as_user(BOB, read, place / "store") == "True"
    assert modes(place / "store") == MODES


def test_only_root_shares_and_only_with_an_existing_group(place: Path) -> None:
    os.chown(place, ALICE, ALICE)
    said = as_user(ALICE, f"said = gpucr.init_store(shared, shared_with_group={GROUP!r})", place / "a")
    assert said.startswith("GPUCR-NOT-PERMITTED: only root can share a store")
    with pytest.raises(InvalidRequest, match="no group 'nosuchgroup'"):
        gpucr.init_store(place / "a", shared_with_group="nosuchgroup")
    with pytest.raises(InvalidRequest, match="only a store in a folder has a group"):
        gpucr.init_store("s3://bucket/prefix", shared_with_group=GROUP)
    assert not (place / "a").exists()


def test_another_users_folder_is_not_shared(place: Path) -> None:
    (place / "a").mkdir(mode=0o755)
    os.chown(place / "a", ALICE, ALICE)
    with pytest.raises(StoreError, match="not an empty folder of root's"):
        gpucr.init_store(place / "a", shared_with_group=GROUP)
    assert os.listdir(place / "a") == []
    assert (place / "a").stat().st_uid == ALICE


def test_a_failed_creation_leaves_nothing(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_all_folders_are_created_in_advance(shared: Path) -> None:
    """A member who made one could delete in it what others store."""
    made = {str(each.relative_to(shared)) for each in shared.rglob("*") if each.is_dir()}
    assert made == set(sharing.FOLDERS)
    assert len([name for name in made if name.startswith("packs/")]) == 256

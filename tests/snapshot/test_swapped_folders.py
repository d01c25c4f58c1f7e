"""A snapshot below another user's folder: regardless of what that user swaps in, nothing else is read or changed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from gpucr.criu import images
from gpucr.errors import SnapshotDamaged, SnapshotError, SnapshotExists
from gpucr.model import DevicePart
from gpucr.snapshot.device import folder_sink
from gpucr.snapshot.folder import MANIFEST_NAME, Snapshot, UnfinishedSnapshot
from gpucr.snapshot.origin import FolderSource
from gpucr.undo.interrupts import Interrupts
from gpucr.undo.protection import Protection
from gpucr.undo.steps import Meter
from tests.children import NOBODY_UID
from tests.conftest import skip_or_fail
from tests.criu.test_images import OUTSIDE, image
from tests.snapshot import samples

Contents = dict[str, bytes | None]


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A folder of another user's."""
    if os.geteuid() != 0:
        skip_or_fail("root", "only root gives folders to other users")
    folder = tmp_path / "theirs"
    folder.mkdir()
    os.chown(folder, NOBODY_UID, NOBODY_UID)
    return folder


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """Another snapshot of root's."""
    memory = b"v" * 4096
    return samples.committed_with_device_data(tmp_path / "victim", memory, piece_bytes=4096).path


def _contents(folder: Path) -> Contents:
    return {str(path): path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}


def _link(victim: Path, place: Path) -> None:
    place.symlink_to(victim)


def _copy(victim: Path, place: Path) -> None:
    shutil.copytree(victim, place)
    for path in (place, *place.rglob("*")):
        os.chown(path, NOBODY_UID, NOBODY_UID)


@pytest.fixture(params=[_link, _copy], ids=["a link", "a folder of theirs"])
def swap(request: pytest.FixtureRequest, victim: Path) -> Callable[[Path], None]:
    """Puts something else instead of a snapshot, whose folder gets another name."""

    def swap_for_victim(place: Path) -> None:
        place.rename(place.with_name(f"{place.name}.aside"))
        request.param(victim, place)

    return swap_for_victim


# --- one that is read ----------------------------------------------------------------------------------------------


def test_an_opened_folder_is_read_to_the_end(theirs: Path, swap: Callable[[Path], None]) -> None:
    made = samples.committed_with_device_data(theirs / "a", b"a" * 8192, piece_bytes=4096)
    opened = Snapshot.open(theirs / "a")
    swap(theirs / "a")
    opened.verify()
    source = FolderSource(opened)
    assert source.provide(Protection(), Interrupts(), Meter("verify")) == sum(f.size_bytes for f in made.manifest.files)
    with source.openers[0]("core-1.img") as stream:
        assert stream.read() == samples.IMAGES["core-1.img"]
    (folder,) = source.image_folders
    (folder / images.NAME).write_bytes(image(*OUTSIDE))
    with images.changed_images(folder, {images.NAME: images.FilesImage.read(folder).encode()}) as changed:
        assert (changed / "core-1.img").read_bytes() == samples.IMAGES["core-1.img"]
        assert changed.resolve().parent == theirs / "a.aside"


def test_damage_is_reported_under_the_folders_current_path(theirs: Path, swap: Callable[[Path], None]) -> None:
    samples.committed(theirs / "a")
    opened = Snapshot.open(theirs / "a")
    (theirs / "a" / "images" / "core-1.img").unlink()
    swap(theirs / "a")
    with pytest.raises(SnapshotDamaged, match=r"core-1\.img is missing") as damaged:
        opened.verify()
    assert damaged.value.path == str(theirs / "a.aside" / "images" / "core-1.img")


def test_another_users_replacement_is_not_opened(theirs: Path, swap: Callable[[Path], None]) -> None:
    samples.committed(theirs / "a")
    swap(theirs / "a")
    with pytest.raises(SnapshotError, match=r"can be written by others|a link that another user can change") as refused:
        Snapshot.open(theirs / "a")
    assert refused.value.code in ("GPUCR-UNTRUSTED-SNAPSHOT", "GPUCR-UNTRUSTED-PATH")


# --- one that is made ----------------------------------------------------------------------------------------------


def test_a_dump_into_a_swapped_folder_commits_nothing(theirs: Path, victim: Path, swap: Callable[[Path], None]) -> None:
    before = _contents(victim)
    unfinished = UnfinishedSnapshot(theirs / "a")
    unfinished.create()
    swap(theirs / "a")
    swapped = _contents(theirs / "a")
    (unfinished.images / "core-1.img").write_bytes(b"of the job")
    sink = folder_sink.FolderSink()
    sink.folder = unfinished.device
    sink.add(DevicePart(1), 4096)
    sink.close()
    assert (theirs / "a.aside" / "device").is_dir()
    with pytest.raises(SnapshotError, match="another folder is at") as refused:
        unfinished.commit(samples.manifest())
    assert refused.value.code == "GPUCR-UNTRUSTED-PATH"
    assert not unfinished.is_committed
    unfinished.discard()
    assert list((theirs / "a.aside").iterdir()) == []
    assert _contents(theirs / "a") == swapped
    assert _contents(victim) == before


def test_a_guard_removes_only_its_own_folder(theirs: Path, victim: Path, swap: Callable[[Path], None]) -> None:
    before = _contents(victim)
    unfinished = UnfinishedSnapshot(theirs / "a")
    unfinished.create()
    (unfinished.images / "core-1.img").write_bytes(b"of the job")
    swap(theirs / "a")
    left = UnfinishedSnapshot.left_behind(theirs / "a", None, unfinished.held.fd)
    assert not left.is_committed
    left.discard()
    assert list((theirs / "a.aside").iterdir()) == []
    assert _contents(victim) == before


def test_a_folder_swapped_right_after_creation_is_not_used(
    theirs: Path, victim: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even for another snapshot of root's, which the owner of the folder above can move there."""
    before = _contents(victim)
    make = os.mkdir

    def swapped(path: str, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        make(path, mode, dir_fd=dir_fd)
        monkeypatch.undo()
        (theirs / "a").rename(theirs / "a.aside")
        victim.rename(theirs / "a")

    monkeypatch.setattr(os, "mkdir", swapped)
    unfinished = UnfinishedSnapshot(theirs / "a")
    with pytest.raises((SnapshotError, SnapshotExists)):
        unfinished.create()
    unfinished.discard()
    (theirs / "a").rename(victim)
    assert _contents(victim) == before


def test_a_swapped_existing_folder_keeps_its_mode(theirs: Path, swap: Callable[[Path], None]) -> None:
    (theirs / "a").mkdir(mode=0o750)
    (theirs / "a").chmod(0o750)
    unfinished = UnfinishedSnapshot(theirs / "a")
    unfinished.create()
    swap(theirs / "a")
    unfinished.discard()
    assert (theirs / "a.aside").stat().st_mode & 0o777 == 0o750
    assert (theirs / "a" / MANIFEST_NAME).exists()

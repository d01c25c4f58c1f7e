"""Working folders: nothing of them stays, whoever was killed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpucr.errors import SnapshotError
from gpucr.snapshot.working_folder import PREFIX, WorkingFolder, remove


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return tmp_path


def age(path: Path) -> None:
    os.utime(path, (0, 0))


def test_it_is_private_and_removed_with_all_that_is_in_it(place: Path) -> None:
    folder = WorkingFolder(1, 0)
    folder.create()
    assert [path.name for path in place.iterdir()] == [folder.path.name]
    assert folder.path.stat().st_mode & 0o777 == 0o700
    folder.snapshot.mkdir()
    (folder.snapshot / "image").write_bytes(b"secret")
    folder.remove()
    folder.remove()
    assert list(place.iterdir()) == []


def test_what_one_that_was_killed_left_is_removed_by_the_next(place: Path) -> None:
    left, fresh, other = (place / f"{PREFIX}{name}" for name in ("left", "fresh", "other"))
    for path in (left, fresh, other):
        path.mkdir()
        (path / "image").write_bytes(b"secret")
    age(left)
    age(other)
    if os.geteuid() == 0:
        os.chown(other, 12345, 12345)
    else:
        other.rename(place / "other")
    at_work = WorkingFolder(1, 0)
    at_work.create()
    age(at_work.path)
    folder = WorkingFolder(1, 0)
    folder.create()
    assert not left.exists()
    assert at_work.path.exists(), "it is locked"
    assert fresh.exists(), "a guard may need it"
    assert other.exists() or os.geteuid() != 0, "it is another user's"
    for each in (folder, at_work):
        each.remove()


def test_no_folder_can_be_made(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = WorkingFolder(1, 0)
    place.rename(place.with_name("elsewhere"))
    with pytest.raises(SnapshotError, match="cannot be made"):
        folder.create()


def test_nothing_else_is_removed(place: Path) -> None:
    with pytest.raises(ValueError, match="no working folder"):
        remove(place)
    assert place.exists()


def test_one_whose_maker_was_killed_before_it_was_locked(place: Path) -> None:
    """By its guard, and by a later gpucr."""
    for number in range(2):
        (place / f".gpucr-work-{number}").mkdir(mode=0o700)
    remove(place / "gpucr-work-0")
    assert [path.name for path in place.iterdir()] == [".gpucr-work-1"]
    os.utime(place / ".gpucr-work-1", (0, 0))
    folder = WorkingFolder(1, 0)
    folder.create()
    assert list(place.iterdir()) == [folder.path]
    folder.remove()

"""Working folders never stay behind, whichever process is killed."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from gpucr.errors import SnapshotError
from gpucr.linux import locks
from gpucr.privileged.folders import private_folder
from gpucr.snapshot.working_folder import PREFIX, WorkingFolder, remove


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return tmp_path


def age(path: Path) -> None:
    os.utime(path, (0, 0))


def test_it_is_private_and_removed_with_its_contents(place: Path) -> None:
    folder = WorkingFolder(1, 0)
    folder.create()
    assert [path.name for path in place.iterdir()] == [folder.path.name]
    assert folder.path.stat().st_mode & 0o777 == 0o700
    folder.snapshot.mkdir()
    (folder.snapshot / "image").write_bytes(b"secret")
    folder.remove()
    folder.remove()
    assert list(place.iterdir()) == []


def test_leftovers_of_a_killed_gpucr_are_removed(place: Path) -> None:
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


def test_no_folder_can_be_created(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = WorkingFolder(1, 0)
    place.rename(place.with_name("elsewhere"))
    with pytest.raises(SnapshotError, match="cannot be made"):
        folder.create()


def test_nothing_else_is_removed(place: Path) -> None:
    with pytest.raises(ValueError, match="no working folder"):
        remove(place)
    assert place.exists()


def test_a_folder_whose_gpucr_was_killed_before_locking_it(place: Path) -> None:
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


@contextlib.contextmanager
def for_a_store(place: Path) -> Iterator[None]:
    folder = WorkingFolder(1, 0)
    folder.create()
    yield
    folder.remove()


@pytest.mark.parametrize("made", [for_a_store, private_folder])
def test_another_gpucr_checks_the_folder_before_it_is_locked(
    made: Callable[[Path], AbstractContextManager[object]], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gpucr that searches for leftovers locks it briefly."""
    place.chmod(0o700)
    open_it = os.open
    looks: list[threading.Timer] = []

    def opened(path: str | Path, flags: int, *rest: Any, **keywords: Any) -> int:
        fd = open_it(path, flags, *rest, **keywords)
        if not looks and (PREFIX in str(path) or "at-work-" in str(path)):
            looker = open_it(path, os.O_RDONLY)
            locks.lock(looker)
            looks.append(threading.Timer(0.05, os.close, [looker]))
            looks[0].start()
        return fd

    monkeypatch.setattr(os, "open", opened)
    with made(place):
        assert len(looks) == 1
    looks[0].join()
    assert list(place.iterdir()) == []

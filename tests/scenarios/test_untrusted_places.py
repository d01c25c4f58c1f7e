"""gpucr trusts, and passes to other programs, only paths that nobody else can change; and images can disappear."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import gpucr
from gpucr.containers import by_runtime
from gpucr.criu import images
from gpucr.errors import SnapshotError
from gpucr.linux.private_folders import runtime_folder, state_folder
from gpucr.snapshot.working_folder import WorkingFolder
from gpucr.undo.events import OnProgress, Progress
from tests.children import NOBODY_UID
from tests.conftest import skip_or_fail
from tests.counter import CounterFactory
from tests.criu.test_images import OUTSIDE, image


def _everybodys(folder: Path) -> None:
    folder.chmod(0o777)


def _anothers(folder: Path) -> None:
    if os.geteuid() != 0:
        skip_or_fail("root", "only root gives folders to other users")
    os.chown(folder, NOBODY_UID, NOBODY_UID)


@pytest.fixture(params=[_everybodys, _anothers], ids=["every user's", "another user's"])
def unsafe(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder in which another user can replace things."""
    folder = tmp_path / "unsafe"
    folder.mkdir()
    request.param(folder)
    return folder


@pytest.fixture
def unsafe_temporaries(unsafe: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """It is the folder for temporary files."""
    monkeypatch.setenv("TMPDIR", str(unsafe))
    monkeypatch.setattr("tempfile.tempdir", None)
    return unsafe


@pytest.mark.parametrize("variable", ["XDG_STATE_HOME", "HOME"])
def test_a_state_folder(unsafe: Path, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setenv(variable, str(unsafe))
    with pytest.raises(PermissionError, match="can change"):
        state_folder()
    assert list(unsafe.iterdir()) == []


def test_a_runtime_folder(unsafe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(unsafe))
    if os.geteuid() == 0:
        assert runtime_folder() == Path("/run/gpucr"), "root's does not depend on the environment"
        return
    with pytest.raises(PermissionError, match="can change"):
        runtime_folder()


def test_a_working_folder(unsafe_temporaries: Path) -> None:
    with pytest.raises(SnapshotError, match="cannot be made") as refused:
        WorkingFolder(1, 0).create()
    assert "TMPDIR" in (refused.value.hint or "")
    assert list(unsafe_temporaries.iterdir()) == []


def test_the_folder_for_changed_images(
    unsafe_temporaries: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "snapshot" / "images"
    folder.mkdir(parents=True)
    (folder / images.NAME).write_bytes(image(*OUTSIDE))

    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(30, "read-only")

    monkeypatch.setattr(os, "link", refuse)
    with (
        pytest.raises(PermissionError, match="can change"),
        images.changed_images(folder, {images.NAME: images.FilesImage.read(folder).encode()}),
    ):
        pytest.fail("it was made")
    assert list(unsafe_temporaries.iterdir()) == []


@pytest.mark.parametrize("place", [".", "below"])
def test_a_container_is_not_restored_from_an_untrusted_folder(unsafe: Path, place: str) -> None:
    with pytest.raises(SnapshotError, match="is not used") as refused:
        by_runtime.restore_container(unsafe / place)
    assert refused.value.code == "GPUCR-UNTRUSTED-PATH"


@pytest.mark.criu
@pytest.mark.parametrize("phase", ["keeper", "criu"])
def test_images_removed_during_a_restore(
    counter: CounterFactory, tmp_path: Path, phase: str, remove_at: Callable[[str, Path], OnProgress]
) -> None:
    """They have been verified by then."""
    job, place = counter("--mib", "1"), tmp_path / "s"
    gpucr.dump(job.pid, place)
    job.reap()
    shutil.copytree(place, tmp_path / "copy")
    with pytest.raises(gpucr.GpucrError) as failed:
        gpucr.restore(place, on_progress=remove_at(phase, place / "images"))
    assert failed.value.exit_code == gpucr.SnapshotError.exit_code, str(failed.value)
    gpucr.restore(tmp_path / "copy")
    assert job.ask() == 101


@pytest.mark.criu
def test_images_removed_during_a_dump(
    counter: CounterFactory, tmp_path: Path, remove_at: Callable[[str, Path], OnProgress]
) -> None:
    job, place = counter("--mib", "1"), tmp_path / "s"
    with pytest.raises(gpucr.SnapshotError, match="cannot be opened"):
        gpucr.dump(job.pid, place, on_progress=remove_at("dump", place / "images"))
    assert job.ask() == 101


@pytest.fixture
def remove_at() -> Callable[[str, Path], OnProgress]:
    """A listener that removes a folder when a phase begins."""

    def make(phase: str, folder: Path) -> OnProgress:
        def listener(progress: Progress) -> None:
            if (progress.event, progress.phase) == ("begin", phase):
                shutil.rmtree(folder)

        return listener

    return make

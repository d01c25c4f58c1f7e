"""The GPU part as plain files, for containerd."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpucr.containers import plain_files
from gpucr.errors import SnapshotError

FILES = {"gpucr/manifest.json": b"{}", "gpucr/device/13.0": b"a", "gpucr/device/13.1": b"b", "inventory.img": b"c"}


@pytest.fixture
def images(tmp_path: Path) -> Path:
    (tmp_path / "gpucr" / "device").mkdir(parents=True)
    for name, data in FILES.items():
        (tmp_path / name).write_bytes(data)
    return tmp_path


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_scattered_and_gathered(images: Path) -> None:
    for _ in range(2):  # the script may be configured twice
        plain_files.scatter(images)
    assert content(images) == {
        "gpucr.manifest.json": b"{}", "gpucr.device.13.0": b"a", "gpucr.device.13.1": b"b", "inventory.img": b"c",
    }  # fmt: skip
    assert not [path for path in images.iterdir() if path.is_dir()]
    plain_files.gather(images)
    assert content(images) == FILES
    plain_files.gather(images)
    assert content(images) == FILES


def test_an_interrupted_gathering_is_resumed(images: Path) -> None:
    plain_files.scatter(images)
    (images / "gpucr" / "device").mkdir(parents=True)
    (images / "gpucr.device.13.0").rename(images / "gpucr" / "device" / "13.0")
    plain_files.gather(images)
    assert content(images) == FILES


def test_a_file_that_cannot_be_moved_is_an_error(images: Path) -> None:
    plain_files.scatter(images)
    (images / "gpucr").write_text("in the way")
    with pytest.raises(SnapshotError, match="cannot be moved: File exists"):
        plain_files.gather(images)


def test_used_only_by_containerd(tmp_path: Path) -> None:
    assert plain_files.are_wanted(Path("/tmp/ctrd-checkpoint123"))
    assert plain_files.are_wanted(Path("/run/user/0/ctd-checkpoint123"))
    assert not plain_files.are_wanted(tmp_path)

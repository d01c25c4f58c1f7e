"""Whether a GPU part belongs to the images beside it, after any interruption of gpucr or the machine."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from gpucr.containers.dump import clear_target
from gpucr.errors import SnapshotError, SnapshotUnfinished, Unsupported
from gpucr.snapshot.gpu_part import GpuPart, claimed

OLD, NEW = b"old", b"new"


@pytest.fixture
def images(tmp_path: Path) -> Path:
    folder = tmp_path / "images"
    folder.mkdir()
    return folder


def write_part(images: Path, data: bytes, *, is_complete: bool = True) -> None:
    (images / "gpucr" / "device").mkdir(parents=True)
    (images / "gpucr" / "device" / "13.0").write_bytes(data)
    if is_complete:
        (images / "gpucr" / "manifest.json").write_bytes(data)


def what_a_restore_finds(images: Path) -> bytes | str | None:
    """The data of the part; "refused"; None: a container without GPU state."""
    part = GpuPart(images)
    part.recover()
    try:
        part.require_finished()
    except SnapshotUnfinished:
        return "refused"
    if not part.path.exists():
        return None
    if not part.is_complete:
        return "refused"  # as every folder without a manifest
    assert {path.name for path in images.iterdir()} == {"gpucr"}
    data = (part.path / "manifest.json").read_bytes()
    assert (part.path / "device" / "13.0").read_bytes() == data
    return data


class Killed(BaseException):
    """Here the process is no more: what would tidy up after it does not run."""


STEPS = ("aside", "part", "begin", "criu", "commit", "finish", "end")


def dump(images: Path, killed_after: str | None = None, *, fails_after: str | None = None) -> bool:
    """A dump into this folder. Returns whether CRIU has begun to write."""
    part, wrote = GpuPart(images), False
    clear_target(images, may_replace=True)

    def reached(step: str) -> None:
        if step == killed_after:
            raise Killed
        if step == fails_after:
            raise RuntimeError(step)

    aside = part.older_aside()
    aside.__enter__()
    try:
        reached("aside")
        write_part(images, NEW, is_complete=False)
        reached("part")
        part.begin()
        reached("begin")
        wrote = True
        reached("criu")
        (part.path / "manifest.json").write_bytes(NEW)
        reached("commit")
        part.finish()
        reached("finish")
    except Killed:
        return wrote
    except RuntimeError:
        if not part.is_complete:
            (part.path / "device" / "13.0").unlink(missing_ok=True)
            with contextlib.suppress(FileNotFoundError):
                (part.path / "device").rmdir()
                part.path.rmdir()
    aside.__exit__(None, None, None)
    return wrote


@pytest.mark.parametrize("older", [True, False], ids=["over an older one", "into a new folder"])
@pytest.mark.parametrize("kind", ["killed_after", "fails_after"])
@pytest.mark.parametrize("step", STEPS)
def test_every_end_of_a_dump(step: str, kind: str, older: bool, images: Path) -> None:
    if older:
        write_part(images, OLD)
    wrote = dump(images, **{kind: step})
    found = what_a_restore_finds(images)
    if (images / "gpucr" / "manifest.json").exists() and found == NEW:
        assert wrote
        assert step in ("commit", "finish", "end")
    elif wrote or step == "begin":
        assert found == "refused", "the images are overwritten, or may be"
    else:
        assert found == (OLD if older else "refused" if (step, kind) == ("part", "killed_after") else None)

    assert dump(images)
    assert what_a_restore_finds(images) == NEW


def test_images_without_gpu_state(images: Path) -> None:
    part = GpuPart(images)
    part.begin_without()
    part.finish_without()
    assert list(images.iterdir()) == [], "nothing is touched where nothing was"
    for older in (True, False):
        if older:
            write_part(images, OLD)
        else:
            part.begin()  # a dump with GPU state that failed
        part.begin_without()
        assert what_a_restore_finds(images) == "refused"
        part.finish_without()
        assert list(images.iterdir()) == []
        assert what_a_restore_finds(images) is None


def test_a_dump_without_gpu_state_removes_only_its_own_mark(images: Path) -> None:
    part = GpuPart(images)
    part.begin()
    with pytest.raises(SnapshotUnfinished):
        part.finish_without()
    assert what_a_restore_finds(images) == "refused"


def test_a_folder_has_one_writer(images: Path) -> None:
    with claimed(images) as claim:
        copy = os.dup(claim)
    with pytest.raises(Unsupported, match="another checkpoint is being written"), claimed(images):
        pass
    GpuPart(images, copy).finish()
    with claimed(images):
        pass


def test_a_mark_is_ignored_where_the_part_is_complete(images: Path) -> None:
    write_part(images, NEW)
    GpuPart(images).begin()
    assert what_a_restore_finds(images) == NEW


def test_a_folder_that_cannot_be_changed_is_reported(images: Path) -> None:
    write_part(images, OLD)
    (images / "gpucr.older").write_text("in the way")
    with pytest.raises(SnapshotError, match="cannot be put back: Not a directory"):
        GpuPart(images).recover()
    with pytest.raises(SnapshotError, match=r"the GPU part in .*/gone cannot be replaced: No such file or directory"):
        GpuPart(images / "gone").begin()

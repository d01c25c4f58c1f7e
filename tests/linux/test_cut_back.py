"""gpucr.linux.cut_back: nothing of a file is ever lost, and no other file is ever touched."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from gpucr.linux.cut_back import CutOff, cut_back, put_back
from tests.conftest import skip_or_fail

LARGE = os.urandom(3 << 20)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path.resolve() / "log"
    path.write_bytes(LARGE)
    path.chmod(0o640)
    return path


def test_cut_back_and_restored(log: Path) -> None:
    if os.geteuid() == 0:
        os.chown(log, 12, 34)
    cut = cut_back(log, 1000, stamp="20250102T030405")
    kept_as = log.with_name("log.gpucr-20250102T030405")
    assert cut == CutOff(str(log), 1000, len(LARGE), str(kept_as))
    assert log.read_bytes() == LARGE[:1000]
    assert kept_as.read_bytes() == LARGE[1000:]
    before, kept = log.stat(), kept_as.stat()
    assert (kept.st_mode, kept.st_uid, kept.st_gid) == (before.st_mode, before.st_uid, before.st_gid)
    put_back(cut)
    assert log.read_bytes() == LARGE
    assert not kept_as.exists()


def test_a_cut_that_never_happened_is_undone(log: Path) -> None:
    """Whoever is told of it before may be asked to undo it at any time."""
    told: list[CutOff] = []
    with pytest.raises(InterruptedError):
        cut_back(log, 1000, stamp="s", about_to=lambda cut: _raise_after(told.append, cut))
    put_back(told[0])
    assert log.read_bytes() == LARGE
    Path(told[0].kept_as).write_bytes(LARGE[1000:2000])  # killed while it was copied
    put_back(told[0])
    assert log.read_bytes() == LARGE
    assert [path.name for path in log.parent.iterdir()] == ["log"]


def _raise_after(note: Callable[[CutOff], None], cut: CutOff) -> None:
    note(cut)
    raise InterruptedError


def test_a_saved_tail_is_never_overwritten(log: Path) -> None:
    cuts = [cut_back(log, size, stamp="s") for size in (3000, 2000, 1000)]
    assert [Path(cut.kept_as).name for cut in cuts] == ["log.gpucr-s", "log.gpucr-s-1", "log.gpucr-s-2"]
    assert log.read_bytes() + b"".join(Path(cut.kept_as).read_bytes() for cut in reversed(cuts)) == LARGE


def test_a_file_written_to_meanwhile_is_left_alone(log: Path) -> None:
    cut = cut_back(log, 1000, stamp="s")
    with log.open("ab") as file:
        file.write(b"new")
    with pytest.raises(OSError, match=r"its old end is in .*log\.gpucr-s"):
        put_back(cut)
    assert log.read_bytes() == LARGE[:1000] + b"new"
    assert Path(cut.kept_as).read_bytes() == LARGE[1000:]


def test_a_shorter_file(log: Path) -> None:
    with pytest.raises(OSError, match="no plain file of that size"):
        cut_back(log, len(LARGE) + 1, stamp="s")
    assert [path.name for path in log.parent.iterdir()] == ["log"]


def test_a_file_is_never_a_symbolic_link(log: Path) -> None:
    log.with_name("link").symlink_to(log)
    with pytest.raises(OSError, match="symbolic links"):
        cut_back(log.with_name("link"), 1000, stamp="s")
    assert log.read_bytes() == LARGE


def test_other_users_links_are_not_followed(log: Path) -> None:
    if os.geteuid() != 0:
        skip_or_fail("root", "only root gives folders to other users")
    theirs = log.with_name("theirs")
    theirs.mkdir()
    (theirs / "folder").symlink_to(log.parent)
    os.chown(theirs, 12, 34)
    with pytest.raises(OSError, match="a link that another user can change"):
        cut_back(theirs / "folder" / "log", 1000, stamp="s")
    assert log.read_bytes() == LARGE
    os.chown(theirs, 0, 0)
    assert Path(cut_back(theirs / "folder" / "log", 1000, stamp="s").kept_as).read_bytes() == LARGE[1000:]


def test_a_full_disk_truncates_nothing(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        cut_back(log, 1000, stamp="s")
    monkeypatch.undo()
    assert log.read_bytes() == LARGE
    assert [path.name for path in log.parent.iterdir()] == ["log"]


def test_an_append_only_file_is_left_alone(log: Path) -> None:
    import fcntl

    if os.geteuid() != 0:
        skip_or_fail("root", "only root sets the flag")
    get_flags, set_flags, append = 0x80086601, 0x40086602, 0x20  # FS_IOC_GETFLAGS, FS_IOC_SETFLAGS, FS_APPEND_FL
    with log.open("rb") as file:
        flags = bytearray(8)
        try:
            fcntl.ioctl(file, get_flags, flags)
            # All other flags stay: ext4 takes a change of theirs for a request of its own, and may refuse it midway.
            fcntl.ioctl(file, set_flags, (int.from_bytes(flags, "little") | append).to_bytes(8, "little"))
        except OSError:
            pytest.skip("this file system, or these privileges, have no append-only files")
        try:
            with pytest.raises(PermissionError):
                cut_back(log, 1000, stamp="s")
        finally:
            fcntl.ioctl(file, set_flags, bytes(flags))
    assert log.read_bytes() == LARGE
    assert [path.name for path in log.parent.iterdir()] == ["log"]

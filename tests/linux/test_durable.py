"""gpucr.linux.durable and gpucr.linux.locks: a file exists completely or not at all; a lock has one holder."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from gpucr.linux import durable, locks


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


@pytest.mark.parametrize("temporary", [None, ".new"])
def test_a_file_is_created_and_replaced(temporary: str | None, tmp_path: Path) -> None:
    path = tmp_path / "file"
    for data in (b"one", b"", b"three" * 100_000):
        durable.write(path, data, temporary=temporary)
        assert path.read_bytes() == data
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    durable.write(path, b"", mode=0o755, owner=(os.geteuid(), os.getegid()), temporary=temporary)
    assert stat.S_IMODE(path.stat().st_mode) == 0o755
    assert names(tmp_path) == ["file"]


def test_a_leftover_of_a_killed_process_is_replaced(tmp_path: Path) -> None:
    (tmp_path / ".new").write_text("half of it")
    durable.write(tmp_path / "file", b"all", temporary=".new")
    assert (names(tmp_path), (tmp_path / "file").read_bytes()) == (["file"], b"all")


def test_no_link_is_followed(tmp_path: Path) -> None:
    for name in ("file", ".new"):
        (tmp_path / name).symlink_to(tmp_path / "elsewhere")
    durable.write(tmp_path / "file", b"data", temporary=".new")
    assert names(tmp_path) == ["file"]
    assert not (tmp_path / "file").is_symlink()


@pytest.mark.parametrize("fails", ["fsync", "rename", "fchmod"])
@pytest.mark.parametrize("temporary", [None, ".new"])
def test_the_old_file_stays_when_writing_fails(
    fails: str, temporary: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    durable.write(tmp_path / "file", b"old")

    def full(*arguments: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, fails, full)
    with pytest.raises(OSError, match="No space left"):
        durable.write(tmp_path / "file", b"new", temporary=temporary)
    assert (names(tmp_path), (tmp_path / "file").read_bytes()) == (["file"], b"old")


def test_data_is_synced_before_its_name_and_the_name_before_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def noted(name: str, call: Callable[..., None]) -> Callable[..., None]:
        def run(*arguments: object, **options: object) -> None:
            is_folder = name == "fsync" and stat.S_ISDIR(os.fstat(arguments[0]).st_mode)  # type: ignore[arg-type]
            done.append(f"{name} of the folder" if is_folder else name)
            call(*arguments, **options)

        return run

    for name in ("fsync", "rename"):
        monkeypatch.setattr(os, name, noted(name, getattr(os, name)))
    durable.write(tmp_path / "file", b"data")
    assert done == ["fsync", "rename", "fsync of the folder"]


def test_only_one_holds_the_lock(tmp_path: Path) -> None:
    first, second = (os.open(tmp_path, os.O_RDONLY) for _ in range(2))
    try:
        locks.lock(first)
        for wait_s in (0.0, 0.02, -1.0):
            with pytest.raises(BlockingIOError):
                locks.lock(second, wait_s=wait_s)
        locks.unlock(first)
        locks.lock(second, wait_s=None)
        copy = os.dup(second)
        os.close(second)
        with pytest.raises(BlockingIOError):
            locks.lock(first)
        os.close(copy)
        second = os.open(tmp_path, os.O_RDONLY)
        locks.lock(first)
    finally:
        os.close(first)
        os.close(second)

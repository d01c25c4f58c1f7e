"""gpucr.linux.trusted_paths: no name that another user can change leads root elsewhere."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from gpucr.linux import trusted_paths
from tests.conftest import skip_or_fail

OTHER = 65534


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder that only root can change. Its tests need root, to give folders to another user."""
    if os.geteuid() != 0:
        skip_or_fail("root", "only root gives folders to other users")
    return tmp_path.resolve()


def _theirs(path: Path) -> Path:
    path.mkdir()
    os.chown(path, OTHER, OTHER)
    return path


def _shared(path: Path, mode: int) -> Path:
    path.mkdir()
    path.chmod(mode)
    return path


@pytest.fixture(params=["theirs", "shared", "by a group"])
def unsafe(place: Path, request: pytest.FixtureRequest) -> Path:
    """A folder in which another user can replace what is there."""
    if request.param == "theirs":
        return _theirs(place / "unsafe")
    folder = _shared(place / "unsafe", 0o777 if request.param == "shared" else 0o775)
    os.chown(folder, 0, 12)
    return folder


# --- links -------------------------------------------------------------------------------------------------------


def test_roots_links_are_followed_everywhere(place: Path) -> None:
    (place / "real" / "inner").mkdir(parents=True)
    (place / "real" / "inner" / "file").write_text("x")
    (place / "absolute").symlink_to(place / "real")
    (place / "real" / "relative").symlink_to("../absolute/./inner")
    (place / "real" / "inner" / "link").symlink_to("file")
    fd = trusted_paths.open_file(place / "absolute" / "relative" / "link", os.O_RDONLY)
    assert os.read(fd, 2) == b"x"
    os.close(fd)
    with trusted_paths.opened_folder(place / "absolute" / ".." / "real") as folder:
        assert set(os.listdir(folder)) == {"inner", "relative"}


def test_links_others_can_change_are_not_followed(place: Path, unsafe: Path) -> None:
    (place / "victim").mkdir()
    (unsafe / "link").symlink_to(place / "victim")
    inner = unsafe / "roots"
    inner.mkdir()
    (inner / "link").symlink_to(place / "victim")  # made by root, but `roots` can be another folder at any time
    for path in (unsafe / "link", unsafe / "link" / "x", inner / "link", inner / ".." / ".." / "victim"):
        with pytest.raises(OSError, match="link that another user can change") as refused:
            os.close(trusted_paths.open_file(path, os.O_WRONLY | os.O_CREAT))
        assert refused.value.filename == str(path)
        with pytest.raises(OSError, match="link that another user can change"):
            trusted_paths.make_folder_for(path / "made", mode=0o755, uid=OTHER, gid=OTHER)
    assert list((place / "victim").iterdir()) == []


def test_in_a_sticky_folder_only_roots_links_are_followed(place: Path) -> None:
    sticky = _shared(place / "tmp", 0o1777)
    (place / "victim").mkdir()
    for name, owner in (("roots", 0), ("theirs", OTHER)):
        (sticky / name).symlink_to(place / "victim")
        os.lchown(sticky / name, owner, owner)
    with trusted_paths.opened_folder(sticky / "roots"):
        pass
    with pytest.raises(OSError, match="link that another user can change"):
        trusted_paths.open_folder(sticky / "theirs")


def test_a_link_cycle_ends(place: Path) -> None:
    (place / "a").symlink_to("b")
    (place / "b").symlink_to("a")
    with pytest.raises(OSError, match="leads through"):
        trusted_paths.open_folder(place / "a")


def test_relative_and_empty_paths(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "inner").mkdir()
    monkeypatch.chdir(place / "inner")
    for path, same in (("..", place), (".", place / "inner"), ("../inner/", place / "inner"), ("/", Path("/"))):
        with trusted_paths.opened_folder(path) as folder:
            assert os.path.samestat(os.fstat(folder), same.stat())


# --- making ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("umask", [0, 0o022, 0o777])
def test_created_folders_have_the_requested_mode(place: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        trusted_paths.make_private(place / "a" / "b" / "c")
        trusted_paths.make_folder_for(place / "theirs", mode=0o751, uid=OTHER, gid=12)
        os.close(trusted_paths.open_file(place / "file", os.O_WRONLY | os.O_CREAT, 0o640))
    finally:
        os.umask(before)
    for made in (place / "a", place / "a" / "b", place / "a" / "b" / "c"):
        assert stat.S_IMODE(made.stat().st_mode) == 0o700
    status = (place / "theirs").stat()
    assert (stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid) == (0o751, OTHER, 12)
    assert stat.S_IMODE((place / "file").stat().st_mode) == 0o640


def test_an_existing_file_keeps_its_mode(place: Path) -> None:
    (place / "file").touch(mode=0o604)
    os.close(trusted_paths.open_file(place / "file", os.O_WRONLY | os.O_CREAT))
    assert stat.S_IMODE((place / "file").stat().st_mode) == 0o604
    with pytest.raises(FileExistsError):
        trusted_paths.open_file(place / "file", os.O_WRONLY | os.O_CREAT | os.O_EXCL)


def test_private_folders_are_not_created_where_others_can_replace_them(unsafe: Path) -> None:
    with pytest.raises(PermissionError, match="can change"):
        trusted_paths.make_private(unsafe / "a" / "b")
    assert list(unsafe.iterdir()) == []


def test_a_folder_swapped_for_one_of_roots_stays_roots(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = _theirs(place / "home")
    (home / "roots").mkdir(mode=0o700)
    (home / "roots" / "secret").touch()
    make = os.mkdir

    def swapped(path: str, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        make(path, mode, dir_fd=dir_fd)
        (home / "made").rename(home / "aside")
        (home / "roots").rename(home / "made")

    monkeypatch.setattr(os, "mkdir", swapped)
    with pytest.raises(OSError, match="another folder was put there"):
        trusted_paths.make_folder_for(home / "made", mode=0o755, uid=OTHER, gid=OTHER)
    assert (home / "made").stat().st_uid == 0


def test_only_an_empty_folder_is_removed(place: Path) -> None:
    home = _theirs(place / "home")
    (home / "full" / "x").mkdir(parents=True)
    (home / "empty").mkdir()
    trusted_paths.remove_empty_folder(home / "empty")
    with pytest.raises(OSError, match="not empty"):
        trusted_paths.remove_empty_folder(home / "full")
    assert [path.name for path in home.iterdir()] == ["full"]


# --- what is believed --------------------------------------------------------------------------------------------


def test_paths_only_we_can_change_are_trusted(place: Path) -> None:
    (place / "folder").mkdir()
    (place / "folder" / "file").touch(mode=0o755)
    (place / "link").symlink_to("folder/file")
    for path in (place / "folder" / "file", place / "link", place / "missing" / "more"):
        trusted_paths.require_ours(path)


def test_paths_others_can_change_are_not_trusted(place: Path, unsafe: Path) -> None:
    (unsafe / "file").touch()
    theirs = place / "file"
    theirs.touch()
    os.chown(theirs, OTHER, OTHER)
    (place / "open").touch()
    (place / "open").chmod(0o666)
    (place / "link").symlink_to(unsafe / "file")
    for path in (unsafe, unsafe / "file", theirs, place / "open", place / "link"):
        with pytest.raises(PermissionError, match="can change"):
            trusted_paths.require_ours(path)


def test_a_folder_is_trusted_only_with_all_its_entries(place: Path) -> None:
    folder = place / "libraries"
    (folder / "deeper").mkdir(parents=True)
    for name in ("a", "b"):
        (folder / name).touch(mode=0o644)
    (folder / "link").symlink_to("a")
    (folder / "to nothing").symlink_to("missing")
    os.chown(folder / "deeper", OTHER, OTHER)
    with pytest.raises(PermissionError, match="uid 65534 can change 'deeper'"):
        trusted_paths.require_all_ours(folder)
    os.chown(folder / "deeper", 0, 0)
    trusted_paths.require_all_ours(folder)
    (folder / "b").chmod(0o666)
    with pytest.raises(PermissionError, match=r"every user .* can change 'b'"):
        trusted_paths.require_all_ours(folder)
    (folder / "b").chmod(0o644)
    target = _theirs(place / "theirs") / "library"
    target.touch()
    (folder / "to theirs").symlink_to(target)
    with pytest.raises(PermissionError, match="uid 65534 can change 'library'"):
        trusted_paths.require_all_ours(folder)
    (folder / "to theirs").unlink()
    folder.chmod(0o777)
    with pytest.raises(PermissionError, match="every user"):
        trusted_paths.require_all_ours(folder)

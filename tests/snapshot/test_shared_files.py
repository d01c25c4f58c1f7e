"""gpucr.snapshot.shared_files: shared memory is saved and restored, and replaced files are put back on failure."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpucr.snapshot import shared_files
from gpucr.snapshot.manifest import SharedFileRecord
from gpucr.snapshot.shared_files import SharedFiles, names_in_use, remove_remaps, save
from tests.conftest import skip_or_fail

MIB = 1 << 20
CONTENT = bytes(MIB) + b"middle" + bytes(3 * MIB) + b"end"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder like /dev/shm with a file of three names in two folders, and an empty one."""
    folder = tmp_path / "root"
    (folder / "sub" / "sub").mkdir(parents=True)
    (folder / "file").write_bytes(CONTENT)
    (folder / "file").chmod(0o1640)
    if os.geteuid() == 0:
        os.chown(folder / "file", 12, 34)
    os.utime(folder / "file", ns=(5, 1_700_000_000_123_456_789))
    (folder / "other").hardlink_to(folder / "file")
    (folder / "sub" / "sub" / "third").hardlink_to(folder / "file")
    (folder / "empty").touch()
    (folder / "link").symlink_to(folder / "file")
    os.mkfifo(folder / "fifo")
    return folder


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    (tmp_path / "snapshot").mkdir()
    return tmp_path / "snapshot"


def tree(folder: Path) -> dict[str, object]:
    """What can be seen of a folder but inodes: content, owner, mode, time of change, and which names are one file."""
    found: dict[str, object] = {}
    first: dict[int, str] = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        name = str(path.relative_to(folder))
        content = path.read_bytes() if stat.S_ISREG(status.st_mode) else None
        same_as = first.setdefault(status.st_ino, name)
        modified_ns = status.st_mtime_ns if content is not None else 0
        found[name] = (content, status.st_mode, status.st_uid, status.st_gid, modified_ns, same_as)
    return found


def test_all_files_are_saved_without_their_zeros(root: Path, snapshot: Path) -> None:
    records = {record.names: record for record in save(root, snapshot)}
    assert set(records) == {("file", "other", "sub/sub/third"), ("empty",)}
    record = records["file", "other", "sub/sub/third"]
    status = (root / "file").stat()
    assert (record.size_bytes, record.mode, record.uid, record.gid, record.modified_ns) == (
        len(CONTENT), 0o1640, status.st_uid, status.st_gid, 1_700_000_000_123_456_789,
    )  # fmt: skip
    stored = snapshot / record.stored
    assert stored.read_bytes() == CONTENT
    assert stored.stat().st_blocks * 512 <= 2 * MIB + 8192
    assert stat.S_IMODE(stored.stat().st_mode) == 0o600
    assert stat.S_IMODE(stored.parent.stat().st_mode) == 0o700


def test_files_created_by_others_meanwhile_are_left_alone(root: Path, snapshot: Path) -> None:
    files = SharedFiles(root, snapshot, save(root, snapshot))
    files.put_back()
    (root / "new").write_bytes(b"another one's")
    (root / "new").rename(root / "other")
    (root / "file").write_bytes(b"the restored job's")
    files.undo()
    assert (root / "other").read_bytes() == b"another one's"
    assert (root / "file").read_bytes() == CONTENT


def test_only_requested_files(root: Path, snapshot: Path) -> None:
    (record,) = save(root, snapshot, inodes={(root / "empty").stat().st_ino})
    assert record.names == ("empty",)
    assert [path.name for path in (snapshot / "shared").iterdir()] == ["0"]


def test_nothing_to_save_makes_no_folder(root: Path, snapshot: Path) -> None:
    assert save(root, snapshot, inodes=set()) == ()
    assert not list(snapshot.iterdir())


def test_restored_into_an_empty_folder_and_removed_again(root: Path, snapshot: Path, tmp_path: Path) -> None:
    records = save(root, snapshot)
    (tmp_path / "new").mkdir()
    files = SharedFiles(tmp_path / "new", snapshot, records)
    assert files.put_back() == len(CONTENT)
    there, here = tree(root), tree(tmp_path / "new")
    for name in ("file", "other", "sub/sub/third", "empty"):
        assert here[name] == there[name]
    assert len(here) == 6, "the four names and the two folders"
    files.undo()
    assert tree(tmp_path / "new") == {}


def test_existing_files_are_replaced_and_put_back(root: Path, snapshot: Path) -> None:
    records = save(root, snapshot)
    (root / "file").unlink()
    (root / "file").write_bytes(b"someone else's")
    (root / "file").chmod(0o604)
    os.utime(root / "file", ns=(7, 8))
    (root / "empty").unlink()
    before = tree(root)
    files = SharedFiles(root, snapshot, records)
    files.put_back()
    assert (root / "file").read_bytes() == CONTENT
    assert (root / "file").samefile(root / "other")
    assert (root / "empty").exists()
    files.undo()
    after = tree(root)
    # Two names that were one file hold the same content again, in a file each.
    for found in (before, after):
        for name in ("other", "sub/sub/third"):
            found[name] = found[name][:5]  # type: ignore[index]
    assert after == before


def test_a_link_in_the_way_is_not_followed(root: Path, snapshot: Path, tmp_path: Path) -> None:
    records = save(root, snapshot)
    target = tmp_path / "target"
    target.write_text("not ours")
    (root / "file").unlink()
    (root / "file").symlink_to(target)
    files = SharedFiles(root, snapshot, records)
    with pytest.raises(OSError, match="symbolic links"):
        files.put_back()
    files.undo()
    assert target.read_text() == "not ours"
    assert (root / "file").is_symlink()


def test_a_folder_that_became_a_link_is_not_entered(root: Path, snapshot: Path, tmp_path: Path) -> None:
    records = save(root, snapshot)
    (root / "sub" / "sub" / "third").unlink()
    (root / "sub" / "sub").rmdir()
    (tmp_path / "elsewhere").mkdir()
    (root / "sub" / "sub").symlink_to(tmp_path / "elsewhere")
    files = SharedFiles(root, snapshot, records)
    with pytest.raises(OSError):  # noqa: PT011 - ENOTDIR or ELOOP
        files.put_back()
    files.undo()
    assert not list((tmp_path / "elsewhere").iterdir())


def test_another_kind_of_file_has_the_name(root: Path, snapshot: Path) -> None:
    records = save(root, snapshot)
    (root / "empty").unlink()
    (root / "empty").mkdir()
    files = SharedFiles(root, snapshot, records)
    with pytest.raises(OSError, match="something else has the name"):
        files.put_back()
    files.undo()
    assert (root / "empty").is_dir()
    assert (root / "file").read_bytes() == CONTENT


def test_no_room(root: Path, snapshot: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = save(root, snapshot)
    before = tree(root)

    def full(*arguments: object) -> int:
        raise OSError(28, "No space left on device")

    files = SharedFiles(root, snapshot, records)
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        files.put_back()
    monkeypatch.undo()
    files.undo()
    assert set(tree(root)) == set(before)
    assert (root / "file").read_bytes() == CONTENT


def test_names_that_are_in_use(root: Path) -> None:
    record = SharedFileRecord(("file", "none", "file/none"), 0, 0, 0, 0, 0, "shared/0")
    status = (root / "file").stat()
    assert names_in_use(root, [record]) == {"file": (status.st_dev, status.st_ino)}


def test_only_crius_own_names_are_removed(root: Path) -> None:
    names = ("link_remap.7", "sub/link_remap.12", "my.link_remap.7", "link_remap.x")
    for name in names:
        (root / name).touch()
    remove_remaps(root, [SharedFileRecord((*names, "link_remap.9"), 0, 0, 0, 0, 0, "shared/0")])
    assert [name for name in names if (root / name).exists()] == ["my.link_remap.7", "link_remap.x"]


def test_a_nested_file_system_is_left_alone(root: Path, snapshot: Path) -> None:
    if os.geteuid() != 0:
        skip_or_fail("root", "only root mounts")
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    (root / "mounted").mkdir()
    if libc.mount(b"tmpfs", os.fsencode(root / "mounted"), b"tmpfs", 0, b"size=1m") != 0:
        pytest.skip("mounting is refused here")
    try:
        (root / "mounted" / "file").write_bytes(b"x")
        names = {name for record in save(root, snapshot) for name in record.names}
    finally:
        libc.umount2(os.fsencode(root / "mounted"), 2)
    assert names == {"file", "other", "sub/sub/third", "empty"}


def test_a_file_is_created_with_its_recorded_size(root: Path, snapshot: Path) -> None:
    (record,) = save(root, snapshot, inodes={(root / "file").stat().st_ino})
    shared_files.SharedFiles(root, snapshot, [replace(record, names=("new",), size_bytes=MIB + 3)]).put_back()
    assert (root / "new").read_bytes() == CONTENT[: MIB + 3]


@pytest.mark.parametrize("number", [errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.ELOOP])
def test_unreadable_folders_of_others_are_skipped(
    root: Path, snapshot: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Removed or moved while they are listed, or a FUSE file system, into which not even root may look."""
    (root / "others" / "inner").mkdir(parents=True)
    real_open = os.open

    def open_or_fail(path: str | Path, *arguments: int, dir_fd: int | None = None) -> int:
        if path == "others":
            raise OSError(number, os.strerror(number))
        return real_open(path, *arguments, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", open_or_fail)
    names = {name for record in save(root, snapshot) for name in record.names}
    assert names == {"file", "other", "sub/sub/third", "empty"}


def test_folders_nested_deeper_than_a_path_allows(root: Path, snapshot: Path) -> None:
    fd = os.open(root, os.O_RDONLY)
    for _ in range(30):
        os.mkdir("d" * 200, dir_fd=fd)
        inner = os.open("d" * 200, os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = inner
    os.close(os.open("deep", os.O_CREAT | os.O_WRONLY, dir_fd=fd))
    os.close(fd)
    names = {name for record in save(root, snapshot) for name in record.names}
    assert {"file", "other", "sub/sub/third", "empty"} < names
    assert any(name.endswith("/deep") for name in names)


def test_a_folder_that_becomes_a_link_is_not_followed(root: Path, snapshot: Path, tmp_path: Path) -> None:
    """Root copies nothing from outside, whoever swaps a folder between the listing and the copy."""
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "third").write_bytes(b"not for the snapshot")
    (root / "sub" / "sub" / "third").rename(root / "sub" / "sub" / "kept")
    (root / "moved").symlink_to(tmp_path / "secret")
    with pytest.raises(OSError, match=r"Not a directory|Too many levels"):
        shared_files._save_one(root, snapshot, "0", ["moved/third"])


def test_running_out_of_descriptors_is_an_error(root: Path, snapshot: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "dup", fail)
    with pytest.raises(OSError, match="Too many open files"):
        save(root, snapshot)

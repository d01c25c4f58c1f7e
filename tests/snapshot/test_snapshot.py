"""gpucr.snapshot.folder and files: private, committed atomically, checked when opened, removed completely."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpucr.errors import InvalidRequest, SnapshotDamaged, SnapshotError, SnapshotExists, SnapshotUnfinished
from gpucr.snapshot import files
from gpucr.snapshot import manifest as manifests
from gpucr.snapshot.folder import MANIFEST_NAME, Snapshot, UnfinishedSnapshot, check_target, completed
from gpucr.snapshot.manifest import FileRecord
from tests.children import NOBODY_UID
from tests.conftest import skip_or_fail
from tests.snapshot import samples
from tests.snapshot.small_disk import run_with_own_mounts

PIECE_BYTES = 1000
PAGES = "images/pages-1.img"
_ROOT = Path(__file__).parents[2]  # where `tests` can be imported from


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces so small that an image has several of them."""
    monkeypatch.setattr(files, "PIECE_BYTES", PIECE_BYTES)
    monkeypatch.setattr(files, "_BLOCK_BYTES", 300)


@pytest.fixture
def snapshot(tmp_path: Path) -> Snapshot:
    return samples.committed(tmp_path / "snap")


@pytest.fixture
def with_device(tmp_path: Path) -> Snapshot:
    """A snapshot whose device memory is beside CRIU's images: three pages, the second of them zero."""
    memory = b"a" * 4096 + bytes(4096) + b"b" * 4096
    return samples.committed_with_device_data(tmp_path / "snap", memory, piece_bytes=4096)


@pytest.fixture
def tree_of(tmp_path: Path) -> Callable[[], dict[str, tuple[int, bytes | None]]]:
    """Everything below tmp_path: mode and content of each path."""

    def look() -> dict[str, tuple[int, bytes | None]]:
        return {
            str(path.relative_to(tmp_path)): (path.lstat().st_mode, path.read_bytes() if path.is_file() else None)
            for path in [tmp_path, *tmp_path.rglob("*")]
        }

    return look


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


# --- made and committed ----------------------------------------------------------------------------------------


def test_a_committed_snapshot_opens_unchanged_and_verifies(snapshot: Snapshot) -> None:
    opened = Snapshot.open(snapshot.path)
    assert opened == snapshot
    opened.verify()
    assert [file.path for file in opened.manifest.files] == sorted(f"images/{name}" for name in samples.IMAGES)
    assert opened.manifest.size_bytes == sum(map(len, samples.IMAGES.values()))
    by_path = {file.path: file for file in opened.manifest.files}
    assert len(by_path[PAGES].sha256) == 6
    assert by_path["images/empty.img"].sha256 == ()
    assert replace(opened.manifest, files=()) == samples.manifest()


def test_files_are_private_under_any_umask(tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        made = samples.committed(tmp_path / "snap")
    finally:
        os.umask(umask)
    assert mode_of(made.path) == mode_of(made.images) == 0o700
    assert {mode_of(path) for path in [made.path / MANIFEST_NAME, *made.images.iterdir()]} == {0o600}


def test_an_existing_empty_folder_is_used_and_made_private(tmp_path: Path) -> None:
    folder = tmp_path / "snap"
    folder.mkdir(mode=0o755)
    assert mode_of(samples.committed(folder).path) == 0o700


def test_no_temporary_files_remain(snapshot: Snapshot) -> None:
    assert sorted(path.name for path in snapshot.path.iterdir()) == ["images", MANIFEST_NAME]


def test_the_manifest_is_written_last(tmp_path: Path) -> None:
    unfinished = UnfinishedSnapshot(tmp_path / "snap")
    unfinished.create()
    assert not unfinished.is_committed
    with pytest.raises(SnapshotUnfinished, match="its dump was never finished"):
        Snapshot.open(unfinished.path)
    unfinished.commit(samples.manifest())
    assert unfinished.is_committed


@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_a_process_killed_during_the_commit_leaves_no_snapshot(call: str, tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from tests.snapshot import samples\n"
        f"os.{call} = lambda *a, **k: os.kill(os.getpid(), signal.SIGKILL)\n"
        "samples.committed(Path(sys.argv[1]))"
    )
    folder = tmp_path / "snap"
    done = subprocess.run([sys.executable, "-c", code, folder], check=False, timeout=60, cwd=_ROOT)
    assert done.returncode == -signal.SIGKILL
    assert (folder / "images/pages-1.img").exists(), "it was killed before it had begun"
    with pytest.raises(SnapshotUnfinished):
        Snapshot.open(folder)


# --- device memory ---------------------------------------------------------------------------------------------


def test_device_memory_is_part_of_the_snapshot(with_device: Snapshot) -> None:
    opened = Snapshot.open(with_device.path)
    assert opened == with_device
    opened.verify()
    assert {path.name for path in opened.path.iterdir()} == {"images", "device", MANIFEST_NAME}
    assert opened.manifest.size_bytes == sum(map(len, samples.IMAGES.values())) + 2 * 4096
    assert all(file.path.startswith("images/") for file in opened.manifest.files), "it is hashed once, by its writer"


def test_damaged_device_memory_is_named(with_device: Snapshot) -> None:
    file = with_device.path / "device" / "100.2"
    file.write_bytes(b"b" * 4095 + b"c")
    error = _refused(with_device, r"device/100.2, .*process 100, differs .* between bytes 0 and 4096$")
    assert error.path == str(file)


def test_missing_device_memory(with_device: Snapshot) -> None:
    shutil.rmtree(with_device.device)
    _refused(with_device, "device.*is missing")


@pytest.mark.parametrize("name", ["device", "device/100.0"])
def test_device_memory_writable_by_others_is_refused(name: str, with_device: Snapshot) -> None:
    (with_device.path / name).chmod(0o702)
    with pytest.raises(SnapshotError, match=f"{name} can be written by others"):
        Snapshot.open(with_device.path)
    (with_device.path / name).chmod(0o700)
    _give_to_nobody(with_device.path / name)
    with pytest.raises(SnapshotError, match=f"{name} can be written by others.*uid {NOBODY_UID}"):
        Snapshot.open(with_device.path)


def test_device_memory_named_in_the_manifest_must_exist(tmp_path: Path) -> None:
    unfinished = UnfinishedSnapshot(tmp_path / "snap")
    unfinished.create()
    draft = samples.manifest(device_data=samples.write_device_data(unfinished.device, b"a" * 8192, 4096))
    os.truncate(unfinished.device / "100.1", 0)
    with pytest.raises(SnapshotDamaged, match=r"device/100\.1 has 0 bytes where 4096 were written"):
        unfinished.commit(draft)
    shutil.rmtree(unfinished.device)
    with pytest.raises(SnapshotDamaged, match=r"device.* is missing"):
        unfinished.commit(draft)
    assert not unfinished.is_committed


def test_a_manifest_that_is_too_large_is_not_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifests, "MAX_MANIFEST_BYTES", 1000)
    with pytest.raises(SnapshotError, match="it would be larger than 1000 bytes"):
        samples.committed(tmp_path / "snap")
    with pytest.raises(SnapshotUnfinished):
        Snapshot.open(tmp_path / "snap")


# --- targets ---------------------------------------------------------------------------------------------------


def _file(path: Path) -> None:
    path.write_text("kept")


def _full(path: Path) -> None:
    path.mkdir()
    (path / "precious").write_text("kept")


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (_file, SnapshotExists, "exists and is not a folder"),
        (os.mkfifo, SnapshotExists, "exists and is not a folder"),
        (_full, SnapshotExists, "is not empty; nothing is ever overwritten"),
        (lambda path: path.symlink_to("nowhere"), SnapshotExists, "exists and is not a folder"),
        (lambda path: path.symlink_to(path.parent), SnapshotExists, "exists and is not a folder"),
        (lambda path: path.symlink_to(path), SnapshotExists, "exists and is not a folder"),
    ],
)
def test_a_taken_target(
    make: Callable[[Path], None], error: type[Exception], says: str, tmp_path: Path,
    tree_of: Callable[[], object],
) -> None:  # fmt: skip
    make(tmp_path / "snap")
    before = tree_of()
    with pytest.raises(error, match=says):
        check_target(tmp_path / "snap")
    unfinished = UnfinishedSnapshot(tmp_path / "snap")
    with pytest.raises(error, match=says):
        unfinished.create()
    unfinished.discard()
    assert tree_of() == before


def test_a_target_in_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="does not exist") as caught:
        check_target(tmp_path / "a" / "b")
    assert f"mkdir -p {tmp_path / 'a'}" in (caught.value.hint or "")


def test_a_target_with_an_overlong_name(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match="File name too long"):
        check_target(tmp_path / ("x" * 300))


def test_a_target_of_another_user(tmp_path: Path) -> None:
    (tmp_path / "snap").mkdir()
    _give_to_nobody(tmp_path / "snap")
    with pytest.raises(SnapshotError, match=f"belongs to uid {NOBODY_UID}"):
        check_target(tmp_path / "snap")


# --- discarded -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("existed", [False, True])
@pytest.mark.parametrize("until", ["create", "images", "device", "commit"])
def test_discard_removes_exactly_what_was_created(
    until: str, tmp_path: Path, tree_of: Callable[[], object], *, existed: bool
) -> None:
    if existed:
        (tmp_path / "snap").mkdir(mode=0o750)
    before = tree_of()
    unfinished = UnfinishedSnapshot(tmp_path / "snap")
    unfinished.create()
    if until != "create":
        (unfinished.images / "pages-1.img").write_bytes(b"data")
        (unfinished.images / "folder").mkdir()
    if until == "device":
        samples.write_device_data(unfinished.device, b"a" * 8192, 4096)
    if until == "commit":
        unfinished.commit(samples.manifest(device_data=samples.write_device_data(unfinished.device, b"a" * 4096, 4096)))
    unfinished.discard()
    assert tree_of() == before


def test_discard_before_create_does_nothing(tmp_path: Path, tree_of: Callable[[], object]) -> None:
    before = tree_of()
    UnfinishedSnapshot(tmp_path / "snap").discard()
    assert tree_of() == before


def test_the_undo_of_a_second_dump_does_not_touch_the_first(snapshot: Snapshot) -> None:
    second = UnfinishedSnapshot(snapshot.path)
    with pytest.raises(SnapshotExists):
        second.create()
    second.discard()
    Snapshot.open(snapshot.path).verify()


def test_two_dumps_into_one_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = UnfinishedSnapshot(tmp_path / "snap"), UnfinishedSnapshot(tmp_path / "snap")
    first.create()
    monkeypatch.setattr("gpucr.snapshot.folder.check_target", lambda path: None)  # second looked before first's create
    with pytest.raises(SnapshotError):
        second.create()
    second.discard()
    first.commit(samples.manifest())
    Snapshot.open(first.path).verify()


# --- a full disk -----------------------------------------------------------------------------------------------

_ON_A_SMALL_DISK = """
import subprocess, sys
from pathlib import Path
from gpucr.errors import SnapshotError
from gpucr.snapshot.folder import UnfinishedSnapshot
from tests.snapshot import samples
disk = Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", disk], check=True)
unfinished = UnfinishedSnapshot(disk / "snap")
unfinished.create()
with (unfinished.images / "pages-1.img").open("wb", buffering=0) as image:
    try:
        while True:
            image.write(bytes(4096))
    except OSError as e:
        full = e.errno
try:
    unfinished.commit(samples.manifest())
except SnapshotError as e:
    print(full, e.exit_code, type(e).__name__, e.message, "|", e.hint)
print(unfinished.is_committed)
unfinished.discard()
print(list(disk.iterdir()))
"""


def test_a_full_disk_is_a_clear_error_and_leaves_nothing(tmp_path: Path) -> None:
    done = run_with_own_mounts(_ON_A_SMALL_DISK, tmp_path)
    assert done.stderr == ""
    said, committed, left = done.stdout.splitlines()
    assert said == (
        f"28 5 SnapshotError the snapshot {tmp_path}/snap could not be completed: No space left on device | "
        "free space on that disk, or name a folder on another one with --to"
    )
    assert (committed, left) == ("False", "[]")


@pytest.mark.parametrize(
    ("number", "code", "hint"),
    [
        (errno.ENOSPC, "GPUCR-NO-SPACE", "make room"),
        (errno.EDQUOT, "GPUCR-NO-SPACE", "make room"),
        (errno.EMFILE, "GPUCR-SNAPSHOT", "raise the limit of open files (ulimit -n)"),
    ],
)
def test_only_a_full_disk_is_reported_as_full(number: int, code: str, hint: str) -> None:
    with pytest.raises(SnapshotError, match="could not be completed") as caught, completed("x", hint="make room"):
        raise OSError(number, os.strerror(number), "x/a")
    assert (caught.value.code, caught.value.hint, caught.value.path) == (code, hint, "x/a")


# --- opened with suspicion -------------------------------------------------------------------------------------


def test_not_a_folder(tmp_path: Path) -> None:
    _file(tmp_path / "file")
    for name in ("file", "missing"):
        with pytest.raises(InvalidRequest, match="is not a folder"):
            Snapshot.open(tmp_path / name)


def test_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(SnapshotUnfinished) as caught:
        Snapshot.open(tmp_path)
    assert caught.value.path == str(tmp_path / MANIFEST_NAME)


def test_a_manifest_damaged_anywhere_is_refused_or_equal(snapshot: Snapshot) -> None:
    file = snapshot.path / MANIFEST_NAME
    data = file.read_bytes()
    for position in range(0, len(data), 53):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[position] ^= 1 << bit
            file.write_bytes(damaged)
            try:
                opened: Snapshot | None = Snapshot.open(snapshot.path)
            except SnapshotDamaged:
                opened = None
            assert opened in (None, snapshot), f"bit {bit} of byte {position}"


@pytest.mark.parametrize("version", [0, 2, 6, "x", None])
def test_a_snapshot_of_another_format_version(version: object, snapshot: Snapshot) -> None:
    file = snapshot.path / MANIFEST_NAME
    outer = json.loads(file.read_bytes())
    outer["manifest"]["format_version"] = version
    file.write_text(json.dumps(outer))
    with pytest.raises(SnapshotDamaged, match="; this gpucr reads 1") as caught:
        Snapshot.open(snapshot.path)
    assert caught.value.hint is not None
    assert "another format version needs the gpucr that wrote it" in caught.value.hint


@pytest.mark.parametrize("length", [0, 1, 100, -2])
def test_a_truncated_manifest(length: int, snapshot: Snapshot) -> None:
    file = snapshot.path / MANIFEST_NAME
    file.write_bytes(file.read_bytes()[:length])
    with pytest.raises(SnapshotDamaged, match="is not a valid manifest"):
        Snapshot.open(snapshot.path)


def test_a_manifest_that_is_too_large(snapshot: Snapshot) -> None:
    with (snapshot.path / MANIFEST_NAME).open("r+b") as stream:
        stream.truncate(manifests.MAX_MANIFEST_BYTES + 1)
    with pytest.raises(SnapshotDamaged, match="it is larger than"):
        Snapshot.open(snapshot.path)


def _make_device(path: Path) -> None:
    if os.geteuid() != 0:
        skip_or_fail("root", "only root can make a device")
    os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))  # /dev/zero


_SUBSTITUTES: dict[str, Callable[[Path], None]] = {
    "fifo": lambda path: os.mkfifo(path, 0o600),
    "folder": lambda path: path.mkdir(0o700),
    "symlink": lambda path: path.symlink_to("/etc/passwd"),
    "dangling symlink": lambda path: path.symlink_to("nowhere"),
    "device": _make_device,
}


@pytest.mark.timeout(30)
@pytest.mark.parametrize("kind", _SUBSTITUTES)
def test_another_kind_of_file_instead_of_the_manifest(kind: str, snapshot: Snapshot) -> None:
    (snapshot.path / MANIFEST_NAME).unlink()
    _SUBSTITUTES[kind](snapshot.path / MANIFEST_NAME)
    with pytest.raises(SnapshotDamaged):
        Snapshot.open(snapshot.path)


@pytest.mark.parametrize("name", [".", "images", MANIFEST_NAME, PAGES])
@pytest.mark.parametrize("mode", [0o770, 0o702])
def test_a_snapshot_writable_by_others_is_refused(name: str, mode: int, snapshot: Snapshot) -> None:
    (snapshot.path / name).chmod(mode)
    with pytest.raises(SnapshotError, match="can be written by others") as caught:
        Snapshot.open(snapshot.path)
    assert not isinstance(caught.value, SnapshotDamaged)
    assert "chmod" in (caught.value.hint or "")


@pytest.mark.parametrize("name", [".", "images", MANIFEST_NAME, PAGES])
def test_a_snapshot_readable_by_others_is_accepted(name: str, snapshot: Snapshot) -> None:
    (snapshot.path / name).chmod(0o755)
    assert Snapshot.open(snapshot.path) == snapshot


@pytest.mark.parametrize("name", [".", "images", MANIFEST_NAME, PAGES])
def test_another_users_snapshot_is_refused(name: str, snapshot: Snapshot) -> None:
    _give_to_nobody(snapshot.path / name)
    with pytest.raises(SnapshotError, match=f"can be written by others.*uid {NOBODY_UID}"):
        Snapshot.open(snapshot.path)


def test_another_users_private_snapshot_is_denied_and_not_called_damaged() -> None:
    if os.geteuid() != 0:
        skip_or_fail("root", "only root can become another user")
    code = (
        "import os, sys; from gpucr.snapshot.folder import Snapshot\n"
        f"os.setgroups([]); os.setgid({NOBODY_UID}); os.setuid({NOBODY_UID})\n"
        "try: Snapshot.open(sys.argv[1])\n"
        "except Exception as e: print(type(e).__name__, e)"
    )
    with tempfile.TemporaryDirectory() as name:  # pytest's own temporary folders are not readable by others
        folder = Path(name)
        folder.chmod(0o711)
        snapshot = samples.committed(folder / "snap")
        done = subprocess.run([sys.executable, "-c", code, snapshot.path], capture_output=True, text=True, check=True)
        assert done.stdout == f"SnapshotError {snapshot.path / MANIFEST_NAME}: permission denied for uid {NOBODY_UID}\n"


def _give_to_nobody(path: Path) -> None:
    if os.geteuid() != 0:
        skip_or_fail("root", "only root can give files away")
    os.chown(path, NOBODY_UID, NOBODY_UID)


# --- verified --------------------------------------------------------------------------------------------------


def _refused(snapshot: Snapshot, says: str) -> SnapshotDamaged:
    with pytest.raises(SnapshotDamaged, match=says) as caught:
        Snapshot.open(snapshot.path).verify()
    return caught.value


@pytest.mark.parametrize("position", [0, 999, 1000, 3500, 5999])
def test_a_flipped_bit_is_named_by_file_and_range(position: int, snapshot: Snapshot) -> None:
    file = snapshot.path / PAGES
    data = bytearray(file.read_bytes())
    data[position] ^= 0x10
    file.write_bytes(data)
    start = position // PIECE_BYTES * PIECE_BYTES
    error = _refused(snapshot, f"{PAGES} differs from what was written, between bytes {start} and {start + 1000}$")
    assert error.path == str(file)


def test_the_last_range_ends_with_the_file(snapshot: Snapshot) -> None:
    (snapshot.path / "images/core-1.img").write_bytes(b"Registers")
    _refused(snapshot, "images/core-1.img differs .* between bytes 0 and 9$")


def test_two_swapped_pieces(snapshot: Snapshot) -> None:
    unfinished = UnfinishedSnapshot(snapshot.path.parent / "other")
    unfinished.create()
    (unfinished.images / "a.img").write_bytes(bytes(1000) + b"x" * 1000)
    made = unfinished.commit(samples.manifest())
    (made.images / "a.img").write_bytes(b"x" * 1000 + bytes(1000))
    _refused(made, "between bytes 0 and 1000")


@pytest.mark.parametrize(("size", "name"), [(5999, PAGES), (6001, PAGES), (0, PAGES), (1, "images/empty.img")])
def test_a_file_of_another_size(size: int, name: str, snapshot: Snapshot) -> None:
    was = (snapshot.path / name).stat().st_size
    os.truncate(snapshot.path / name, size)
    _refused(snapshot, f"{name} has {size} bytes where {was} were written")


def test_a_missing_file(snapshot: Snapshot) -> None:
    (snapshot.path / PAGES).unlink()
    assert _refused(snapshot, f"{PAGES} is missing").path == str(snapshot.path / PAGES)


def test_missing_images(snapshot: Snapshot) -> None:
    shutil.rmtree(snapshot.images)
    _refused(snapshot, "is missing")


@pytest.mark.timeout(30)
@pytest.mark.parametrize("kind", _SUBSTITUTES)
def test_another_kind_of_file_instead_of_an_image(kind: str, snapshot: Snapshot) -> None:
    (snapshot.path / PAGES).unlink()
    _SUBSTITUTES[kind](snapshot.path / PAGES)
    _refused(snapshot, f"{PAGES} is not a plain file")


def test_images_behind_a_symbolic_link(snapshot: Snapshot) -> None:
    elsewhere = snapshot.path.parent / "elsewhere"
    snapshot.images.rename(elsewhere)
    snapshot.images.symlink_to(elsewhere)
    _refused(snapshot, "leads through a symbolic link")


@pytest.mark.parametrize("change", [lambda digests: digests[:-1], lambda digests: [*digests, "00"], lambda _: []])
def test_too_few_or_too_many_digests(change: Callable[[list[str]], list[str]], snapshot: Snapshot) -> None:
    records = [
        replace(file, sha256=tuple(change(list(file.sha256)))) if file.path == PAGES else file
        for file in snapshot.manifest.files
    ]
    forged = replace(snapshot.manifest, files=tuple(records))
    (snapshot.path / MANIFEST_NAME).write_bytes(manifests.encode(forged))
    _refused(snapshot, f"too few or too many digests for {PAGES}")


def test_an_impossibly_large_recorded_size(snapshot: Snapshot) -> None:
    huge = replace(snapshot.manifest.files[0], size_bytes=2**64 - 1)
    forged = replace(snapshot.manifest, files=(huge,))
    (snapshot.path / MANIFEST_NAME).write_bytes(manifests.encode(forged))
    _refused(snapshot, "where 18446744073709551615 were written")


def test_a_file_that_shrinks_while_it_is_read(snapshot: Snapshot, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = files._check_shape

    def shrink_after_the_check(folder: Path, file: FileRecord) -> None:
        shape(folder, file)
        os.truncate(folder / file.path, 0)

    monkeypatch.setattr(files, "_check_shape", shrink_after_the_check)
    _refused(snapshot, "differs from what was written")


def test_a_file_that_vanishes_while_it_is_read(snapshot: Snapshot, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = files._check_shape

    def remove_after_the_check(folder: Path, file: FileRecord) -> None:
        shape(folder, file)
        (folder / file.path).unlink()

    monkeypatch.setattr(files, "_check_shape", remove_after_the_check)
    _refused(snapshot, "cannot be read: No such file")


def test_hashing_in_pieces_equals_hashing_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = os.urandom(2500)
    (tmp_path / "file").write_bytes(data)
    many = files.record(tmp_path, ["file"])[0]
    monkeypatch.setattr(files, "PIECE_BYTES", 1 << 20)
    whole = files.record(tmp_path, ["file"])[0]
    seen = subprocess.run(["sha256sum", tmp_path / "file"], capture_output=True, text=True, check=True).stdout.split()
    assert whole.sha256 == (seen[0],)
    assert len(many.sha256) == 3


def test_files_are_made_durable_while_they_are_hashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "images").mkdir()
    paths = [f"images/{number:02}" for number in range(20)]
    for number, path in enumerate(paths):
        (tmp_path / path).write_bytes(path.encode() * 100 * number)  # one is empty
    synced: list[str] = []

    def note(fd: int) -> None:
        synced.append(os.path.relpath(os.readlink(f"/proc/self/fd/{fd}"), tmp_path))

    monkeypatch.setattr(os, "fsync", note)
    assert files.record_and_sync(tmp_path, paths) == files.record(tmp_path, paths)
    assert sorted(synced) == [".", "images", *paths]
    assert set(synced[-2:]) == {".", "images"}, "names last"


def test_of_a_large_file_nothing_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "PIECE_BYTES", 1 << 12)
    for number in range(5):
        (tmp_path / f"{number}").write_bytes(os.urandom(40_000 + number))
    names = [f"{number}" for number in range(5)]
    assert files.record_and_sync(tmp_path, names) == files.record(tmp_path, names)
    files.verify(tmp_path, files.record(tmp_path, names))


def test_without_more_threads_it_is_done_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(5):
        (tmp_path / f"{number}").write_bytes(b"data")

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert len(files.record_and_sync(tmp_path, [f"{number}" for number in range(5)])) == 5


def test_a_failed_sync_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"data")

    def fail(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match=f"Input/output error: '{tmp_path}/file'"):
        files.record_and_sync(tmp_path, ["file"])
    assert "images" not in {thread.name for thread in threading.enumerate()}


def test_a_snapshot_can_be_moved(snapshot: Snapshot, tmp_path: Path) -> None:
    moved = snapshot.path.rename(tmp_path / "moved")
    Snapshot.open(moved).verify()
    assert str(tmp_path).encode() not in (moved / MANIFEST_NAME).read_bytes()


# --- a dump that is killed before it has put anything into its folder ---


def test_an_empty_images_folder_does_not_block_the_next_dump(tmp_path: Path) -> None:
    (tmp_path / "s" / "images").mkdir(parents=True)
    check_target(tmp_path / "s")
    unfinished = UnfinishedSnapshot(tmp_path / "s")
    unfinished.create()
    assert os.listdir(tmp_path / "s") == ["images"]
    unfinished.discard()
    assert os.listdir(tmp_path / "s") == []


@pytest.mark.parametrize("name", ["images/pages-1.img", "other", "device/1.0"])
def test_a_nonempty_folder_blocks_the_next_dump(tmp_path: Path, name: str) -> None:
    (tmp_path / "s" / "images").mkdir(parents=True)
    (tmp_path / "s" / name).parent.mkdir(exist_ok=True)
    (tmp_path / "s" / name).touch()
    for look in (check_target, lambda path: UnfinishedSnapshot(path).create()):
        with pytest.raises(SnapshotExists, match="is not empty"):
            look(tmp_path / "s")
    assert (tmp_path / "s" / name).exists()


def test_a_link_blocks_the_next_dump(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "images").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SnapshotExists, match="is not empty"):
        UnfinishedSnapshot(tmp_path / "s").create()
    assert (tmp_path / "elsewhere").exists()


def test_the_folder_of_a_running_dump_is_taken(tmp_path: Path) -> None:
    first, second = UnfinishedSnapshot(tmp_path / "s"), UnfinishedSnapshot(tmp_path / "s")
    first.create()
    with pytest.raises(SnapshotExists, match="another dump is at work in"):
        second.create()
    second.discard()
    assert os.listdir(tmp_path / "s") == ["images"]
    first.discard()
    assert not (tmp_path / "s").exists()
    second.create()
    second.discard()


def test_the_guard_knows_the_folder_before_anything_is_in_it(tmp_path: Path) -> None:
    seen: list[list[str]] = []
    unfinished = UnfinishedSnapshot(tmp_path / "s")
    unfinished.create(lambda: seen.append(os.listdir(unfinished.held.fd)))
    assert seen == [[]]
    unfinished.discard()

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpucr.store.backend import Exists, Missing, check_name
from gpucr.store.local import INCOMING_NAME, LocalBackend
from gpucr.store.memory import AlignedBuffer


@pytest.fixture
def backend(tmp_path: Path) -> LocalBackend:
    (tmp_path / "store").mkdir(mode=0o700)
    return LocalBackend(tmp_path / "store")


def test_objects_are_created_once_read_listed_and_deleted(backend: LocalBackend) -> None:
    backend.create("packs/ab/x", [b"01", bytearray(b"234"), memoryview(b"56789")])
    with pytest.raises(Exists, match="packs/ab/x"):
        backend.create("packs/ab/x", b"other")
    backend.create("empty", b"")
    assert backend.read("packs/ab/x") == b"0123456789"
    assert [(info.name, info.size_bytes) for info in backend.list()] == [("empty", 0), ("packs/ab/x", 10)]
    assert [info.name for info in backend.list("packs/")] == ["packs/ab/x"]
    assert [info.name for info in backend.list("packs/a")] == ["packs/ab/x"]
    assert list(backend.list("nothing/")) == list(backend.list("packs/b")) == []
    assert backend.size("packs/ab/x") == 10
    backend.delete("packs/ab/x")
    backend.delete("packs/ab/x")
    for use in (backend.read, backend.size):
        with pytest.raises(Missing, match="packs/ab/x"):
            use("packs/ab/x")
    with pytest.raises(Missing):
        backend.read("empty/x")
    assert os.listdir(backend.root / INCOMING_NAME) == []


@pytest.mark.parametrize(("offset", "length"), [(0, 10), (3, 4), (3, None), (8, 10), (10, 1), (99, 4), (99, None)])
def test_ranges(backend: LocalBackend, offset: int, length: int | None) -> None:
    data = b"0123456789"
    backend.create("x", data)
    wanted = data[offset:] if length is None else data[offset : offset + length]
    assert backend.read("x", offset, length) == wanted
    buffer = bytearray(length or 10)
    assert backend.read_into("x", offset, memoryview(buffer)) == len(wanted)
    assert buffer[: len(wanted)] == wanted


def test_everything_is_private(backend: LocalBackend) -> None:
    backend.create("packs/ab/x", b"")
    for path in (backend.root / "packs", backend.root / "packs/ab", backend.root / INCOMING_NAME):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert stat.S_IMODE((backend.root / "packs/ab/x").stat().st_mode) == 0o600


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    parts=st.lists(
        st.tuples(st.sampled_from([0, 1, 4095, 4096, 65536, 65537, 1 << 20, (1 << 20) + 4096]), st.booleans()),
        max_size=8,
    )
)
def test_a_sink_accepts_buffers_of_every_size_and_alignment(
    backend: LocalBackend, parts: list[tuple[int, bool]]
) -> None:
    aligned = AlignedBuffer(2 << 20)
    sink = backend.open_new("x")
    wanted = b""
    for number, (size_bytes, is_aligned) in enumerate(parts):
        data = os.urandom(1)[:size_bytes] * min(size_bytes, 1) + bytes([number + 1]) * max(0, size_bytes - 1)
        buffer = aligned.view[:size_bytes] if is_aligned else memoryview(bytearray(size_bytes))
        buffer[:] = data
        sink.write(buffer)
        buffer[:] = bytes(size_bytes)  # it is ours again
        wanted += data
        assert sink.size_bytes == len(wanted)
    sink.publish()
    try:
        assert backend.read("x") == wanted
        whole = AlignedBuffer(16 << 20)
        assert backend.read_into("x", 0, whole.view) == len(wanted)
        assert whole.view[: len(wanted)] == wanted
    finally:
        backend.delete("x")


def test_of_many_concurrent_creates_one_succeeds(backend: LocalBackend) -> None:
    barrier = threading.Barrier(8)

    def create(number: int) -> bool:
        barrier.wait()
        try:
            backend.create("a/b", b"%d" % number)
        except Exists:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(create, range(8)))
    assert results.count(True) == 1
    assert backend.read("a/b") == b"%d" % results.index(True)


def test_objects_are_invisible_before_publishing_and_after_discarding(backend: LocalBackend) -> None:
    sink = backend.open_new("packs/x")
    sink.write(bytes(5 << 20))
    assert list(backend.list()) == []
    sink.discard()
    sink.discard()
    assert list(backend.list()) == []
    assert os.listdir(backend.root / INCOMING_NAME) == []


@pytest.mark.parametrize("name", ["", "/x", "../x", "a/../b", "a//b", "a/", ".x", "a/.x", "a\0", "a b", "x" * 600, "é"])
def test_names_that_escape_the_store(backend: LocalBackend, name: str) -> None:
    uses: list[Callable[[str], object]] = [
        check_name,
        backend.read,
        backend.size,
        backend.delete,
        backend.open_new,
        lambda name: backend.create(name, b""),
    ]
    for use in uses:
        with pytest.raises(ValueError, match="cannot be the name"):
            use(name)


def test_a_link_that_succeeded_although_nfs_reported_eexist(
    backend: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = os.link

    def made_twice(source: Path, target: Path) -> None:
        link(source, target)
        raise FileExistsError(errno.EEXIST, "File exists", str(target))

    monkeypatch.setattr(os, "link", made_twice)
    backend.create("x", b"data")
    assert backend.read("x") == b"data"


@pytest.mark.parametrize("call", ["fsync", "link", "pwritev", "ftruncate"])
def test_a_failing_disk_leaves_nothing_behind(
    backend: LocalBackend, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, full)
    with pytest.raises(OSError, match="No space left"):
        backend.create("packs/x", b"data")
    monkeypatch.undo()
    assert list(backend.list()) == []
    assert os.listdir(backend.root / INCOMING_NAME) == []


def test_old_leftovers_of_a_dead_writer_are_removed(backend: LocalBackend) -> None:
    dead, alive = backend.open_new("packs/dead"), backend.open_new("packs/alive")
    for entry in os.scandir(backend.root / INCOMING_NAME):
        os.utime(entry.path, (0, 0))
    alive.write(bytes(8 << 20))
    assert backend.sweep(3600) == 1
    alive.publish()
    with pytest.raises(FileNotFoundError):
        dead.publish()
    assert [info.name for info in backend.list()] == ["packs/alive"]
    assert backend.sweep(0) == 0


def test_only_objects_are_listed(backend: LocalBackend) -> None:
    backend.create("packs/ok", b"")
    (backend.root / "packs/.hidden").touch()
    (backend.root / "packs/a b").touch()
    (backend.root / "packs/link").symlink_to("ok")
    assert [info.name for info in backend.list()] == ["packs/ok"]


def test_only_regular_files_are_read(backend: LocalBackend) -> None:
    backend.create("packs/ok", b"")
    (backend.root / "packs/link").symlink_to("ok")
    os.mkfifo(backend.root / "packs/pipe", 0o600)
    for name in ("packs/link", "packs/pipe", "packs"):
        with pytest.raises(OSError, match=r"symbolic|plain file|Is a directory"):
            backend.read(name)


def test_a_folder_or_file_writable_by_others_is_refused(backend: LocalBackend) -> None:
    backend.create("x", b"data")
    (backend.root / "x").chmod(0o620)
    with pytest.raises(PermissionError, match="others can write"):
        backend.read("x")
    backend.root.chmod(0o770)
    with pytest.raises(PermissionError, match="mode 0770"):
        LocalBackend(backend.root)


def test_a_folder_swapped_in_is_neither_read_nor_changed(backend: LocalBackend, tmp_path: Path) -> None:
    """The owner of the parent folder can put one there at any time."""
    backend.create("a/x", b"mine")
    backend.root.rename(tmp_path / "aside")
    backend.root.mkdir()
    LocalBackend(backend.root).create("a/x", b"theirs")
    assert backend.read("a/x") == b"mine"
    backend.create("b/y", b"new")
    backend.delete("a/x")
    assert [info.name for info in backend.list()] == ["b/y"]
    assert (tmp_path / "aside" / "b" / "y").read_bytes() == b"new"
    assert [info.name for info in LocalBackend(backend.root).list()] == ["a/x"]


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        LocalBackend(tmp_path / "missing")
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        LocalBackend(tmp_path / "file")


def test_a_power_failure_at_any_moment(backend: LocalBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Content is on disk before its name, and the name before success is reported; likewise for removals."""
    order: list[str] = []

    def noted(function: Callable[..., None], what: Callable[..., str]) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            function(*arguments)
            order.append(what(*arguments))

        return call

    monkeypatch.setattr(os, "link", noted(os.link, lambda *paths: "link"))
    monkeypatch.setattr(os, "fsync", noted(os.fsync, lambda fd: os.readlink(f"/proc/self/fd/{fd}")))
    backend.create("packs/ab/new", b"data")
    folders = [str(backend.root / name) for name in ("", "packs", "packs/ab")]
    before, after = order[: order.index("link")], order[order.index("link") + 1 :]
    assert any(Path(path).parent == backend.root / INCOMING_NAME for path in before)
    assert set(folders[:2]) <= set(before), "the folders on the way to it"
    assert after == folders[2:]
    order.clear()
    backend.delete("packs/ab/new")
    assert order == folders[2:]

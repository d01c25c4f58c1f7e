"""gpucr.snapshot.device: the final content is restored; damage, full disks and cancellation are reported."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import hashlib
import os
import random
import resource
import shutil
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from gpucr.errors import SnapshotDamaged, SnapshotError
from gpucr.gpu_state.source import Destination, FileDestination, FileSource
from gpucr.model import DevicePart, StagedExtent
from gpucr.quantities import format_bytes
from gpucr.snapshot.device import DeviceReader, DeviceWriter, FolderPieces, FolderSink, check_shape, verify
from gpucr.snapshot.device.crew import Crew, PieceBuffer
from gpucr.snapshot.device.folder_pieces import OnlyChecked
from gpucr.snapshot.device.stripes import STRIPES, Layout
from gpucr.snapshot.manifest import DeviceData
from tests.counter import wait_until
from tests.snapshot.small_disk import run_with_own_mounts

PAGE = 4096
PIECE = 4 * PAGE
PART = DevicePart(42)
LIMIT_S = 30.0
_ROOT = Path(__file__).parents[2]  # where `tests` can be imported from

MakeStaging = Callable[..., int]


@pytest.fixture
def staging() -> Iterator[MakeStaging]:
    """Make files without a name that hold these bytes, or this many zeros."""
    made: list[int] = []

    def make(content: bytes | int) -> int:
        fd = os.memfd_create("staging", os.MFD_ALLOW_SEALING)
        made.append(fd)
        os.ftruncate(fd, content if isinstance(content, int) else len(content))
        if isinstance(content, bytes):
            os.pwrite(fd, content, 0)
        return fd

    yield make
    for fd in made:
        os.close(fd)


@pytest.fixture(autouse=True)
def nothing_stays_open() -> Iterator[None]:
    """Every test ends all threads and closes all files, also those that fail on purpose."""
    gc.disable()  # a collection would close what earlier tests left in cycles, and one before each test takes 0.05 s
    before = len(os.listdir("/proc/self/fd"))
    yield
    gc.enable()
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("device-")] == []
    assert len(os.listdir("/proc/self/fd")) <= before


def some_memory(size_bytes: int, *, seed: int = 1, zero_share: float = 0.3) -> bytes:
    """Random bytes in which some pieces are zero."""
    chance = random.Random(seed)  # noqa: S311 - the same for every run
    pieces = [
        bytes(PIECE) if chance.random() < zero_share else chance.randbytes(PIECE)
        for _ in range(0, size_bytes, PIECE)
    ]  # fmt: skip
    return b"".join(pieces)[:size_bytes]


def digests_of(memory: bytes) -> tuple[str | None, ...]:
    pieces = [memory[start : start + PIECE] for start in range(0, len(memory), PIECE)]
    return tuple(hashlib.sha256(piece).hexdigest() if any(piece) else None for piece in pieces)


def writer_of(folder: Path, sources: Sequence[FileSource] = (), **options: Any) -> DeviceWriter:
    sink = FolderSink(folder, piece_bytes=options.pop("piece_bytes", PIECE))
    return DeviceWriter(sink, sources, **{"threads": 4, **options})


def saved(folder: Path, fds: dict[DevicePart, int], **options: Any) -> dict[DevicePart, DeviceData]:
    """Save these staging files in one go."""
    writer = writer_of(folder, [FileSource(part, fd, os.fstat(fd).st_size) for part, fd in fds.items()], **options)
    try:
        writer.start()
        for part in fds:
            writer.complete(part)
        assert writer.wait(LIMIT_S)
        writer.sync()
        return {part: writer.device_data(part, ()) for part in fds}
    finally:
        writer.cancel()


class Watched:
    """A destination that reports every piece: before it is taken, in the thread that brings it."""

    def __init__(self, inner: Destination, on_piece: Callable[[memoryview], object]) -> None:
        self.part, self.size_bytes, self.is_zeroed = inner.part, inner.size_bytes, inner.is_zeroed
        self._inner = inner
        self._on_piece = on_piece

    def write_from(self, position: int, data: memoryview) -> None:
        self._inner.write_from(position, data)
        self._on_piece(data)


def reader_of(
    folder: Path, data: dict[DevicePart, DeviceData], destinations: Sequence[Destination], threads: int = 4
) -> DeviceReader:
    return DeviceReader(FolderPieces(folder, data, threads=threads), destinations)


def load(folder: Path, data: dict[DevicePart, DeviceData], destinations: Sequence[Destination]) -> None:
    reader = reader_of(folder, data, destinations)
    try:
        reader.start()
        assert reader.wait(LIMIT_S)
    finally:
        reader.cancel()


def loaded(folder: Path, data: DeviceData, staging: MakeStaging) -> bytes:
    fd = staging(data.size_bytes)
    load(folder, {PART: data}, [FileDestination(PART, fd, data.size_bytes)])
    return os.pread(fd, data.size_bytes + 1, 0)


# --- there and back --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zero_share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("size_bytes", [0, PAGE, PIECE, PIECE + PAGE, 7 * PIECE, 33 * PIECE + 3 * PAGE])
def test_saved_data_is_restored(size_bytes: int, zero_share: float, staging: MakeStaging, tmp_path: Path) -> None:
    memory = some_memory(size_bytes, zero_share=zero_share)
    data = saved(tmp_path / "device", {PART: staging(memory)})[PART]
    assert (data.size_bytes, data.sha256) == (size_bytes, digests_of(memory))
    assert loaded(tmp_path / "device", data, staging) == memory
    verify(tmp_path / "device", {PART: data})
    check_shape(tmp_path / "device", {PART: data})


def test_several_processes_of_different_sizes(staging: MakeStaging, tmp_path: Path) -> None:
    memories = {DevicePart(pid): some_memory(pid * 3 * PAGE, seed=pid) for pid in range(1, 41)}
    data = saved(tmp_path / "device", {part: staging(memory) for part, memory in memories.items()})
    destinations = [FileDestination(part, staging(each.size_bytes), each.size_bytes) for part, each in data.items()]
    load(tmp_path / "device", data, destinations)
    for destination in destinations:
        assert os.pread(destination.fd, 1 << 20, 0) == memories[destination.part]


def test_each_piece_is_where_the_format_says(staging: MakeStaging, tmp_path: Path) -> None:
    memory = some_memory(19 * PIECE + PAGE)
    data = saved(tmp_path / "device", {PART: staging(memory)})[PART]
    files = [(tmp_path / "device" / f"{PART}.{number}").read_bytes() for number in range(data.stripes)]
    assert len(list((tmp_path / "device").iterdir())) == data.stripes == STRIPES
    together = bytearray()
    for number in range(len(data.sha256)):
        offset = number // data.stripes * PIECE
        together += files[number % data.stripes][offset : offset + PIECE]
    assert together == memory
    assert sum(map(len, files)) == len(memory), "the files have bytes that no piece has"


def test_zeros_are_neither_written_nor_read(staging: MakeStaging, tmp_path: Path) -> None:
    fd = staging(bytes(64 * PIECE))
    writer = writer_of(tmp_path / "device", [FileSource(PART, fd, 64 * PIECE)])
    writer.start()
    writer.complete(PART)
    assert writer.wait(LIMIT_S)
    writer.sync()
    assert (writer.seen_bytes, writer.written_bytes) == (64 * PIECE, 0)
    assert sum(path.stat().st_blocks for path in (tmp_path / "device").iterdir()) == 0
    data = writer.device_data(PART, ())
    assert data.stored_bytes == 0
    destination = staging(64 * PIECE)
    load(tmp_path / "device", {PART: data}, [FileDestination(PART, destination, 64 * PIECE)])
    assert os.fstat(destination).st_blocks == 0


def test_bytes_are_counted(staging: MakeStaging, tmp_path: Path) -> None:
    memory = some_memory(30 * PIECE + PAGE)
    seen: list[int] = []
    data = saved(tmp_path / "device", {PART: staging(memory)}, on_bytes=seen.append)[PART]
    assert sum(seen) == len(memory)
    read: list[int] = []
    destination = Watched(
        FileDestination(PART, staging(len(memory)), len(memory)), lambda piece: read.append(len(piece))
    )
    load(tmp_path / "device", {PART: data}, [destination])
    assert sum(read) == data.stored_bytes < len(memory)


def test_files_are_private_under_any_umask(staging: MakeStaging, tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        saved(tmp_path / "device", {PART: staging(b"x" * PAGE)})
    finally:
        os.umask(umask)
    assert stat.S_IMODE((tmp_path / "device").stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "device").iterdir()} == {0o600}


def test_without_processes_there_is_no_folder(tmp_path: Path) -> None:
    assert saved(tmp_path / "device", {}) == {}
    load(tmp_path / "device", {}, [])
    verify(tmp_path / "device", {})
    assert list(tmp_path.iterdir()) == []


def test_the_record_has_the_extents(staging: MakeStaging, tmp_path: Path) -> None:
    writer = writer_of(tmp_path / "device", [FileSource(PART, staging(PAGE), PAGE)])
    writer.start()
    writer.complete(PART)
    assert writer.wait(LIMIT_S)
    writer.sync()
    extent = StagedExtent(0x7F0000000000, PAGE, 0)
    assert writer.device_data(PART, [extent]) == DeviceData((extent,), PAGE, PIECE, STRIPES, (None,))


@pytest.mark.parametrize("seed", range(20))
def test_the_layout_covers_every_piece_once(seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311 - the same for every run
    layout = Layout(chance.randrange(200) * PAGE, PAGE << chance.randrange(4), chance.randrange(1, 20))
    places: dict[tuple[int, int], int] = {}
    for piece in range(layout.pieces):
        places[layout.place(piece)] = layout.length(piece)
    assert len(places) == layout.pieces
    assert sum(places.values()) == layout.size_bytes
    for stripe in range(layout.stripes):
        ends = [offset + length for (of, offset), length in places.items() if of == stripe]
        assert layout.stripe_bytes(stripe) == max(ends, default=0)
    assert sum(map(layout.stripe_bytes, range(layout.stripes))) == layout.size_bytes


# --- saving while the source is being filled --------------------------------------------------------------------


@pytest.fixture
def filling(staging: MakeStaging, tmp_path: Path) -> Iterator[tuple[DeviceWriter, int, bytearray]]:
    """A started writer, the source of 20 pieces that it saves, and what the source holds."""
    memory = bytearray(some_memory(20 * PIECE))
    memory[3 * PIECE : 4 * PIECE] = bytes(PIECE)
    memory[5 * PIECE : 6 * PIECE] = b"x" * PIECE
    fd = staging(bytes(memory))
    writer = writer_of(tmp_path / "device", [FileSource(PART, fd, len(memory))])
    writer.start()
    yield writer, fd, memory
    writer.cancel()


def wait_seen(writer: DeviceWriter, size_bytes: int) -> None:
    wait_until(lambda: writer.seen_bytes >= size_bytes, "the pieces below the frontier are saved", timeout_s=LIMIT_S)


def put(fd: int, memory: bytearray, position: int, data: bytes) -> None:
    memory[position : position + len(data)] = data
    os.pwrite(fd, data, position)


def finished(writer: DeviceWriter, tmp_path: Path, staging: MakeStaging) -> bytes:
    writer.complete(PART)
    assert writer.wait(LIMIT_S)
    writer.sync()
    data = writer.device_data(PART, ())
    memory = loaded(tmp_path / "device", data, staging)
    assert data.sha256 == digests_of(memory)
    return memory


def test_only_whole_pieces_below_the_frontier_are_saved_early(
    filling: tuple[DeviceWriter, int, bytearray], tmp_path: Path, staging: MakeStaging
) -> None:
    writer, fd, memory = filling
    writer.advance(PART, 10 * PIECE + PAGE)
    writer.advance(PART, 2 * PIECE)  # an older sample that comes late
    wait_seen(writer, 10 * PIECE)
    assert not writer.wait(0)
    put(fd, memory, 10 * PIECE, os.urandom(10 * PIECE))
    assert finished(writer, tmp_path, staging) == memory
    assert (writer.rewritten_pieces, writer.seen_bytes) == (0, 20 * PIECE), "a piece above the frontier was read"


def test_reaching_the_frontier_at_the_end_does_not_finish(
    filling: tuple[DeviceWriter, int, bytearray], tmp_path: Path, staging: MakeStaging
) -> None:
    writer, fd, memory = filling
    writer.advance(PART, 20 * PIECE)
    wait_seen(writer, 20 * PIECE)
    assert not writer.wait(0), "everything is saved, but nothing is final"
    put(fd, memory, 19 * PIECE, b"the last word")
    assert finished(writer, tmp_path, staging) == memory


@pytest.mark.parametrize(
    ("position", "new", "rewritten"),
    [
        (0, b"changed", 1),
        (PIECE - 1, b"changed", 2),
        (3 * PIECE, b"no longer zero", 1),
        (5 * PIECE, bytes(PIECE), 1),
        (5 * PIECE, b"x" * PIECE, 0),
    ],
)
def test_data_changed_after_it_was_saved_is_saved_again(
    position: int, new: bytes, rewritten: int, filling: tuple[DeviceWriter, int, bytearray], tmp_path: Path,
    staging: MakeStaging,
) -> None:  # fmt: skip
    writer, fd, memory = filling
    writer.advance(PART, 15 * PIECE)
    wait_seen(writer, 15 * PIECE)
    put(fd, memory, position, new)
    assert finished(writer, tmp_path, staging) == memory
    assert writer.rewritten_pieces == rewritten
    stored = b"".join((tmp_path / "device" / f"{PART}.{number}").read_bytes() for number in range(STRIPES))
    assert (b"x" * PIECE in stored) == (b"x" * PIECE in memory), "what was there before must not stay on the disk"


def test_a_source_written_while_it_is_read(
    filling: tuple[DeviceWriter, int, bytearray], tmp_path: Path, staging: MakeStaging
) -> None:
    writer, fd, memory = filling
    chance = random.Random(7)  # noqa: S311 - the same for every run
    for piece in range(1, 21):
        writer.advance(PART, piece * PIECE)
        for _ in range(30):
            put(fd, memory, chance.randrange(20 * PIECE - 64), chance.randbytes(64))
    assert finished(writer, tmp_path, staging) == memory


def test_a_piece_in_progress_when_the_writer_finishes(staging: MakeStaging, tmp_path: Path) -> None:
    memory = bytearray(os.urandom(4 * PIECE))
    fd = staging(bytes(memory))
    held, go_on = threading.Event(), threading.Event()

    def hold(_: int) -> None:
        held.set()
        assert go_on.wait(LIMIT_S)

    writer = writer_of(tmp_path / "device", [FileSource(PART, fd, len(memory))], threads=1, on_bytes=hold)
    try:
        writer.start()
        writer.advance(PART, PIECE)
        assert held.wait(LIMIT_S)  # piece 0 is read and written, but not yet counted as saved
        put(fd, memory, 0, b"changed")
        writer.complete(PART)
        assert not writer.wait(0)
        go_on.set()
        assert writer.wait(LIMIT_S)
        writer.sync()
        assert writer.rewritten_pieces == 1
        assert loaded(tmp_path / "device", writer.device_data(PART, ()), staging) == memory
    finally:
        go_on.set()
        writer.cancel()


def test_a_process_added_later(
    filling: tuple[DeviceWriter, int, bytearray], tmp_path: Path, staging: MakeStaging
) -> None:
    writer, _, memory = filling
    late = some_memory(3 * PIECE + PAGE, seed=9)
    writer.advance(PART, 5 * PIECE)
    writer.add(FileSource(DevicePart(43), staging(late), len(late)))
    writer.complete(DevicePart(43))
    assert not writer.wait(0)
    assert finished(writer, tmp_path, staging) == memory
    assert writer.device_data(DevicePart(43), ()).sha256 == digests_of(late)


def test_a_growing_source(staging: MakeStaging, tmp_path: Path) -> None:
    memory = bytearray(os.urandom(21 * PIECE))
    fd = staging(bytes(memory))
    writer = writer_of(tmp_path / "device", [FileSource(PART, fd, 2 * PIECE + PAGE)])
    try:
        writer.start()
        writer.advance(PART, 2 * PIECE + PAGE)
        wait_seen(writer, 2 * PIECE)
        put(fd, memory, 2 * PIECE, b"what would differ if the last piece were read before it is full")
        writer.grow(FileSource(PART, fd, 20 * PIECE + PAGE))
        writer.advance(PART, 30 * PIECE)
        wait_seen(writer, 20 * PIECE)
        for size_bytes in (20 * PIECE, 20 * PIECE + PAGE + 1, 22 * PIECE):
            with pytest.raises(ValueError, match=f"process {PART.pid}"):
                writer.grow(FileSource(PART, fd, size_bytes))
        assert finished(writer, tmp_path, staging) == memory[: 20 * PIECE + PAGE]
        assert (writer.seen_bytes, writer.rewritten_pieces) == (20 * PIECE + PAGE, 0)
        with pytest.raises(ValueError, match="final size"):
            writer.grow(FileSource(PART, fd, 21 * PIECE))
    finally:
        writer.cancel()


def test_a_source_cannot_grow_after_the_writer_has_finished(filling: tuple[DeviceWriter, int, bytearray]) -> None:
    writer, fd, memory = filling
    os.ftruncate(fd, len(memory) + PIECE)
    writer.cancel()
    with pytest.raises(RuntimeError, match="has ended"):
        writer.grow(FileSource(PART, fd, len(memory) + PIECE))


@pytest.mark.parametrize("call", [lambda writer: writer.sync(), lambda writer: writer.device_data(PART, ())])
def test_a_piece_is_reported_saved_only_once_it_is(
    call: Callable[[DeviceWriter], object], filling: tuple[DeviceWriter, int, bytearray]
) -> None:
    writer = filling[0]
    writer.advance(PART, 20 * PIECE)
    wait_seen(writer, 20 * PIECE)
    with pytest.raises(RuntimeError, match="not everything is final"):
        call(writer)


# --- sources and folders that cannot be -------------------------------------------------------------------------


@pytest.mark.parametrize("size_bytes", [PAGE - 1, PAGE + 512, -PAGE, 3 * PAGE])
def test_a_source_of_an_impossible_size(size_bytes: int, staging: MakeStaging, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"process {PART.pid}"):
        writer_of(tmp_path / "device", [FileSource(PART, staging(2 * PAGE), size_bytes)])
    assert not (tmp_path / "device").exists()


def test_a_process_named_twice(staging: MakeStaging, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="being saved already"):
        writer_of(tmp_path / "device", [FileSource(PART, staging(PAGE), PAGE), FileSource(PART, staging(PAGE), PAGE)])


def test_an_existing_device_folder(staging: MakeStaging, tmp_path: Path) -> None:
    (tmp_path / "device").mkdir()
    with pytest.raises(SnapshotError, match="File exists"):
        writer_of(tmp_path / "device", [FileSource(PART, staging(PAGE), PAGE)])


def test_a_foreign_file_in_the_device_folder(staging: MakeStaging, tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("kept")
    writer = writer_of(tmp_path / "device", [FileSource(DevicePart(1), staging(PAGE), PAGE)])
    (tmp_path / "device" / f"{PART}.0").symlink_to(tmp_path / "victim")
    with pytest.raises(SnapshotError, match="File exists"):
        writer.add(FileSource(PART, staging(PAGE), PAGE))
    writer.cancel()
    assert (tmp_path / "victim").read_text() == "kept"


def test_a_shrinking_source(staging: MakeStaging, tmp_path: Path) -> None:
    fd = staging(some_memory(4 * PIECE))
    writer = writer_of(tmp_path / "device", [FileSource(PART, fd, 4 * PIECE)])
    os.ftruncate(fd, 3 * PIECE + 100)
    writer.start()
    writer.complete(PART)
    with pytest.raises(SnapshotError, match=f"process {PART.pid} ends at byte {3 * PIECE + 100}, not at {4 * PIECE}"):
        writer.wait(LIMIT_S)
    writer.cancel()


# --- disks that fail -------------------------------------------------------------------------------------------

_ON_A_SMALL_DISK = """
import os, subprocess, sys
from pathlib import Path
from gpucr.errors import SnapshotError
from gpucr.gpu_state.source import FileSource
from gpucr.snapshot.device import DeviceWriter, FolderSink
disk = Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", disk], check=True)
staging = os.memfd_create("staging")
os.write(staging, os.urandom(4 << 20))
before = len(os.listdir("/proc/self/fd"))
writer = DeviceWriter(FolderSink(disk / "device", piece_bytes=65536), [FileSource(42, staging, 4 << 20)], threads=4)
writer.start()
writer.complete(42)
for call in (lambda: writer.wait(60), writer.sync, lambda: writer.device_data(42, ())):
    try:
        call()
    except SnapshotError as e:
        print(e.exit_code, type(e).__name__, e.message, "|", e.hint)
writer.cancel()
print(len(os.listdir("/proc/self/fd")) - before)
"""


def test_a_full_disk_is_a_clear_error_and_leaves_nothing_open(tmp_path: Path) -> None:
    done = run_with_own_mounts(_ON_A_SMALL_DISK, tmp_path)
    assert done.stderr == ""
    said = (
        f"5 SnapshotError device memory cannot be written to {tmp_path}/device: No space left on device | "
        "free space on that disk, or name a folder on another one with --to"
    )
    assert done.stdout.splitlines() == [said] * 3 + ["0"]


def test_a_failing_disk_ends_all_threads(staging: MakeStaging, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    writer = writer_of(tmp_path / "device", [FileSource(PART, staging(some_memory(9 * PIECE)), 9 * PIECE)])
    monkeypatch.setattr(os, "pwritev", fail)
    writer.start()
    writer.complete(PART)
    with pytest.raises(SnapshotError, match=r"written to .*/device: Input/output error") as caught:
        writer.wait(LIMIT_S)
    assert Path(caught.value.path).parent == tmp_path / "device"
    assert "dmesg" in (caught.value.hint or "")
    with pytest.raises(SnapshotError, match="Input/output error"):
        writer.add(FileSource(DevicePart(43), staging(PAGE), PAGE))
    assert not list((tmp_path / "device").glob("43.*")), "the sink was not asked: a thread may be closing it"
    writer.cancel()


def test_a_sync_that_fails_cannot_be_repeated(
    filling: tuple[DeviceWriter, int, bytearray], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    writer = filling[0]
    writer.complete(PART)
    assert writer.wait(LIMIT_S)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(SnapshotError, match="Input/output error"):
            writer.sync()
    with pytest.raises(RuntimeError, match="has ended"):
        writer.sync()


def test_a_cancelled_write_is_not_reported_durable(filling: tuple[DeviceWriter, int, bytearray]) -> None:
    writer = filling[0]
    writer.complete(PART)
    assert writer.wait(LIMIT_S)
    writer.cancel()
    with pytest.raises(RuntimeError, match="has ended"):
        writer.sync()


def test_files_and_folders_are_synced(staging: MakeStaging, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: set[str] = set()
    real = os.fsync

    def note(fd: int) -> None:
        synced.add(os.readlink(f"/proc/self/fd/{fd}"))
        real(fd)

    monkeypatch.setattr(os, "fsync", note)
    saved(tmp_path / "device", {DevicePart(pid): staging(some_memory(20 * PIECE)) for pid in (1, 2)})
    folders = {str(tmp_path), str(tmp_path / "device")}
    assert synced == folders | {str(tmp_path / "device" / f"{pid}.{n}") for pid in (1, 2) for n in range(STRIPES)}


@pytest.mark.parametrize("refused", ["when it is switched on", "at the first transfer", "after a part"])
def test_file_systems_without_direct_io(
    refused: str, staging: MakeStaging, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real calls, behind a file system that is stricter than the one here."""
    real_fcntl = fcntl.fcntl
    refusals: list[int] = []

    def strict_fcntl(fd: int, command: int, value: int = 0) -> int:
        if refused == "when it is switched on" and command == fcntl.F_SETFL and value & os.O_DIRECT:
            refusals.append(fd)
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_fcntl(fd, command, value)

    def strict(real: Callable[..., int]) -> Callable[..., int]:
        def call(fd: int, buffers: list[memoryview], offset: int) -> int:
            is_direct = real_fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT
            if is_direct and (refused == "at the first transfer" or offset % PAGE):
                refusals.append(fd)
                raise OSError(errno.EINVAL, "Invalid argument")
            return real(fd, [buffers[0][:5120] if refused == "after a part" else buffers[0]], offset)

        return call

    monkeypatch.setattr(fcntl, "fcntl", strict_fcntl)
    monkeypatch.setattr(os, "pwritev", strict(os.pwritev))
    monkeypatch.setattr(os, "preadv", strict(os.preadv))
    memory = some_memory(40 * PIECE + PAGE)
    data = saved(tmp_path / "device", {PART: staging(memory)}, threads=16)[PART]
    assert loaded(tmp_path / "device", data, staging) == memory
    assert refusals or refused == "after a part"  # there the disk itself may refuse a part of a page


def test_a_fork_does_not_inherit_the_buffers() -> None:
    """Where it does, older kernels may put what O_DIRECT reads into the child's copy of a page."""
    buffer = PieceBuffer(PIECE)
    blocks = Path("/proc/self/smaps").read_text().split("VmFlags:")
    start = f"{buffer._address:x}-"
    number = next(number for number, block in enumerate(blocks) if f"\n{start}" in block)
    assert "dc" in blocks[number + 1].splitlines()[0].split()


# --- cancelled -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("until", ["made", "started", "advanced", "completed", "waited", "synced"])
def test_a_writer_can_be_cancelled_at_any_time(until: str, staging: MakeStaging, tmp_path: Path) -> None:
    writer = writer_of(tmp_path / "device", [FileSource(PART, staging(some_memory(50 * PIECE)), 50 * PIECE)])
    steps: dict[str, Callable[[], object]] = {
        "made": lambda: None,
        "started": writer.start,
        "advanced": lambda: writer.advance(PART, 25 * PIECE),
        "completed": lambda: writer.complete(PART),
        "waited": lambda: writer.wait(LIMIT_S),
        "synced": writer.sync,
    }
    for name, step in steps.items():
        step()
        if name == until:
            break
    writer.cancel()
    writer.cancel()
    if until in ("made", "started", "advanced"):
        assert not writer.wait(LIMIT_S), "a cancelled writer has not written everything"
    with pytest.raises(RuntimeError, match="has ended"):
        writer.add(FileSource(DevicePart(43), staging(PAGE), PAGE))
    shutil.rmtree(tmp_path / "device")


def test_cancelling_releases_waiters(filling: tuple[DeviceWriter, int, bytearray]) -> None:
    writer = filling[0]
    answers: list[bool] = []
    waiter = threading.Thread(target=lambda: answers.append(writer.wait(LIMIT_S)))
    waiter.start()
    writer.cancel()
    waiter.join(LIMIT_S)
    assert answers == [False]


def test_a_callback_may_cancel(staging: MakeStaging, tmp_path: Path) -> None:
    made: list[DeviceWriter] = []
    source = FileSource(PART, staging(some_memory(50 * PIECE)), 50 * PIECE)
    made.append(writer_of(tmp_path / "device", [source], on_bytes=lambda _: made[0].cancel()))
    made[0].start()
    made[0].complete(PART)
    assert not made[0].wait(LIMIT_S)
    made[0].cancel()


def test_a_callback_that_fails_is_not_lost(staging: MakeStaging, tmp_path: Path) -> None:
    def fail(_: int) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        saved(tmp_path / "device", {PART: staging(some_memory(5 * PIECE))}, on_bytes=fail)


def test_large_pieces_have_few_buffers(staging: MakeStaging, tmp_path: Path) -> None:
    writer = writer_of(tmp_path / "device", [FileSource(PART, staging(PAGE), PAGE)], threads=8, piece_bytes=256 << 20)
    writer.start()
    names = [thread.name for thread in threading.enumerate() if thread.name.startswith("device-writer")]
    writer.cancel()
    assert len(names) == 2


# --- read in ascending order ------------------------------------------------------------------------------------


def test_the_prefix_grows_piece_by_piece(staging: MakeStaging, tmp_path: Path) -> None:
    """One thread, which stops in front of every stored piece that it has in place and has not yet reported."""
    memory = bytearray(os.urandom(5 * PIECE + PAGE))
    memory[PIECE : 3 * PIECE] = bytes(2 * PIECE)
    data = saved(tmp_path / "device", {PART: staging(bytes(memory))})[PART]
    fd = staging(data.size_bytes)
    turn, go_on = threading.Semaphore(0), threading.Semaphore(0)

    def pause(_: memoryview) -> None:
        turn.release()
        assert go_on.acquire(timeout=LIMIT_S)

    destination = Watched(FileDestination(PART, fd, data.size_bytes), pause)
    reader = reader_of(tmp_path / "device", {PART: data}, [destination], threads=1)
    try:
        assert reader.loaded(PART) == 0
        assert not reader.wait_for(PART, 1, 0)
        reader.start()
        for finished_before, finished_after in ((0, 3), (3, 4), (4, 5), (5, 6)):
            assert turn.acquire(timeout=LIMIT_S)
            assert reader.loaded(PART) == finished_before * PIECE
            go_on.release()
            assert reader.wait_for(PART, min(finished_after * PIECE, data.size_bytes), LIMIT_S)
            length = reader.loaded(PART)
            assert os.pread(fd, length, 0) == memory[:length]
        assert reader.wait_for(PART, 1 << 40, LIMIT_S), "more than there is means: all of it"
        assert reader.wait(LIMIT_S)
        assert reader.loaded(PART) == data.size_bytes
    finally:
        go_on.release(10)
        reader.cancel()


def test_several_processes_take_turns(staging: MakeStaging, tmp_path: Path) -> None:
    parts = [DevicePart(pid) for pid in (1, 2, 3)]
    data = saved(tmp_path / "device", {part: staging(os.urandom(4 * PIECE)) for part in parts})
    progress: list[tuple[int, ...]] = []

    def look(_: memoryview) -> None:
        progress.append(tuple(reader.loaded(part) // PIECE for part in parts))

    destinations = [Watched(OnlyChecked(part, 4 * PIECE), look) for part in parts]
    reader = reader_of(tmp_path / "device", data, destinations, threads=1)
    reader.start()
    assert reader.wait(LIMIT_S)
    reader.cancel()
    assert all(max(each) - min(each) <= 1 for each in progress), "one process ran ahead of the others"
    assert len(progress) == 12


def test_the_drivers_part_is_read_before_outer_ones(staging: MakeStaging, tmp_path: Path) -> None:
    above = DevicePart(42, 1)
    data = saved(tmp_path / "device", {each: staging(os.urandom(4 * PIECE)) for each in (above, PART)})
    assert {path.name for path in (tmp_path / "device").iterdir()} >= {"42.0", "42-1.0"}
    order: list[DevicePart] = []

    def noting(part: DevicePart) -> Watched:
        return Watched(OnlyChecked(part, 4 * PIECE), lambda _: order.append(part))

    destinations = [noting(above), noting(PART)]
    reader = reader_of(tmp_path / "device", data, destinations, threads=1)
    reader.start()
    assert reader.wait(LIMIT_S)
    reader.cancel()
    assert order == [PART] * 4 + [above] * 4


def test_a_destination_that_is_not_zeroed_gets_its_zeros(staging: MakeStaging, tmp_path: Path) -> None:
    memory = some_memory(9 * PIECE)
    data = saved(tmp_path / "device", {PART: staging(memory)})[PART]
    dirty = bytearray(b"x" * len(memory))

    class Memory(OnlyChecked, frozen=True):
        def write_from(self, position: int, data: memoryview) -> None:
            dirty[position : position + len(data)] = data

    load(tmp_path / "device", {PART: data}, [Memory(PART, len(memory))])
    assert dirty == memory


@pytest.mark.parametrize("until", ["made", "started"])
def test_a_reader_can_be_cancelled(until: str, staging: MakeStaging, tmp_path: Path) -> None:
    data = saved(tmp_path / "device", {PART: staging(os.urandom(9 * PIECE))})[PART]
    begun = threading.Event()

    def cancel_at_the_first_piece(_: memoryview) -> None:
        reader.cancel()
        begun.set()

    destination = Watched(OnlyChecked(PART, data.size_bytes), cancel_at_the_first_piece)
    reader = reader_of(tmp_path / "device", {PART: data}, [destination], threads=2)
    if until == "started":
        reader.start()
        assert begun.wait(LIMIT_S)
    reader.cancel()
    reader.cancel()
    assert not reader.wait_for(PART, data.size_bytes, LIMIT_S)


def test_a_thread_may_stop_the_others_before_its_start_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = threading.Event()
    start = threading.Thread.start

    def start_and_wait(thread: threading.Thread) -> None:
        start(thread)
        if thread.name.startswith("crew"):
            assert stopped.wait(LIMIT_S)

    order: list[str] = []

    def work(_: int, __: PieceBuffer) -> None:
        crew.stop()
        order.append("worked")
        stopped.set()

    jobs = [1]
    crew = Crew("crew", 1, take=lambda _: jobs.pop() if jobs else None, work=work, close=lambda: order.append("closed"))
    monkeypatch.setattr(threading.Thread, "start", start_and_wait)
    crew.start(PIECE)
    crew.stop()
    crew.check()
    assert order == ["worked", "closed"]


# --- damaged snapshots -----------------------------------------------------------------------------------------


@pytest.fixture
def stored(staging: MakeStaging, tmp_path: Path) -> tuple[Path, DeviceData]:
    """The folder with 20 pieces and a page of process 42; piece 1 is zero."""
    memory = bytearray(some_memory(20 * PIECE + PAGE, zero_share=0))
    memory[PIECE : 2 * PIECE] = bytes(PIECE)
    return tmp_path / "device", saved(tmp_path / "device", {PART: staging(bytes(memory))})[PART]


def refused(stored: tuple[Path, DeviceData], staging: MakeStaging, says: str, name: str) -> None:
    """Loading and verifying both refuse, and name the file."""
    folder, data = stored
    fd = staging(data.size_bytes)
    attempts: list[Callable[[], None]] = [
        lambda: load(folder, {PART: data}, [FileDestination(PART, fd, data.size_bytes)]),
        lambda: verify(folder, {PART: data}),
    ]
    for attempt in attempts:
        with pytest.raises(SnapshotDamaged, match=says) as caught:
            attempt()
        assert caught.value.path == str(folder.parent / name)
        assert caught.value.hint


@pytest.mark.parametrize("position", [0, PIECE - 1, PIECE, 2 * PIECE + 5])
@pytest.mark.parametrize("number", [0, 4])
def test_a_flipped_bit(number: int, position: int, stored: tuple[Path, DeviceData], staging: MakeStaging) -> None:
    file = stored[0] / f"{PART}.{number}"
    content = bytearray(file.read_bytes())
    content[position] ^= 0x10
    file.write_bytes(content)
    start = position // PIECE * PIECE
    end = min(start + PIECE, len(content))
    says = f"of process {PART}, differs from what was written, between bytes {start} and {end}$"
    refused(stored, staging, f"^device/{PART}.{number}, .*{says}", f"device/{PART}.{number}")


def test_a_damaged_piece_never_reaches_the_staging_file(stored: tuple[Path, DeviceData], staging: MakeStaging) -> None:
    folder, data = stored
    (folder / f"{PART}.0").write_bytes(os.urandom((folder / f"{PART}.0").stat().st_size))
    fd = staging(data.size_bytes)
    with pytest.raises(SnapshotDamaged):
        load(folder, {PART: data}, [FileDestination(PART, fd, data.size_bytes)])
    assert not any(os.pread(fd, PIECE, 0))


def test_two_swapped_pieces(stored: tuple[Path, DeviceData], staging: MakeStaging) -> None:
    file = stored[0] / f"{PART}.2"
    content = file.read_bytes()
    file.write_bytes(content[PIECE : 2 * PIECE] + content[:PIECE] + content[2 * PIECE :])
    refused(stored, staging, "differs from what was written", f"device/{PART}.2")


@pytest.mark.parametrize("place", [0, PIECE - 1])
def test_bytes_in_a_hole_are_harmless_damage(stored: tuple[Path, DeviceData], staging: MakeStaging, place: int) -> None:
    """A restore does not read them, since the manifest says that the piece is zero; a check reports them."""
    folder, data = stored
    verify(folder, {PART: data})
    with (folder / f"{PART}.1").open("r+b") as file:
        file.seek(place)
        file.write(b"x")
    assert not any(loaded(folder, data, staging)[PIECE : 2 * PIECE])
    with pytest.raises(SnapshotDamaged, match=f"^device/{PART}.1, .* differs .* between bytes 0 and {PIECE}$"):
        verify(folder, {PART: data})


@pytest.mark.parametrize("change", [-1, 1, -PIECE, PIECE, -(1 << 40)])
def test_a_stripe_of_another_size(change: int, stored: tuple[Path, DeviceData], staging: MakeStaging) -> None:
    file = stored[0] / f"{PART}.3"
    size = file.stat().st_size
    os.truncate(file, max(0, size + change))
    refused(stored, staging, f"has {max(0, size + change)} bytes where {size} were written", f"device/{PART}.3")
    with pytest.raises(SnapshotDamaged, match="bytes where"):
        check_shape(stored[0], {PART: stored[1]})


def test_a_stripe_shrinks_while_it_is_read(stored: tuple[Path, DeviceData]) -> None:
    folder, data = stored
    reader = reader_of(folder, {PART: data}, [OnlyChecked(PART, data.size_bytes)])
    os.truncate(folder / f"{PART}.3", PIECE + 100)
    reader.start()
    with pytest.raises(SnapshotDamaged, match=f"^device/{PART}.3, .*, ends before byte ({2 * PIECE}|{3 * PIECE})$"):
        reader.wait(LIMIT_S)
    reader.cancel()


def test_an_unreadable_stripe(stored: tuple[Path, DeviceData], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(SnapshotDamaged, match=f"device/{PART}.*cannot be read: Input/output error"):
        verify(stored[0], {PART: stored[1]})


_SUBSTITUTES: dict[str, tuple[Callable[[Path], object], str]] = {
    "nothing": (lambda path: path, "is missing"),
    "fifo": (os.mkfifo, "is not a plain file"),
    "folder": (lambda path: path.mkdir(), "is not a plain file"),
    "symlink": (lambda path: path.symlink_to("/etc/passwd"), "is a symbolic link"),
    "dangling symlink": (lambda path: path.symlink_to("nowhere"), "is a symbolic link"),
}


@pytest.mark.timeout(30)
@pytest.mark.parametrize("kind", _SUBSTITUTES)
def test_another_kind_of_file_instead_of_a_stripe(
    kind: str, stored: tuple[Path, DeviceData], staging: MakeStaging
) -> None:
    make, says = _SUBSTITUTES[kind]
    file = stored[0] / f"{PART}.5"
    file.unlink()
    make(file)
    refused(stored, staging, f"device/{PART}.5.*{says}", f"device/{PART}.5")


@pytest.mark.parametrize("kind", _SUBSTITUTES)
def test_another_kind_of_file_instead_of_the_folder(
    kind: str, stored: tuple[Path, DeviceData], staging: MakeStaging
) -> None:
    folder = stored[0]
    folder.rename(folder.parent / "elsewhere")
    _SUBSTITUTES[kind][0](folder)
    refused(stored, staging, "device", f"device/{PART}.0" if kind == "folder" else "device")


def test_a_link_to_the_real_folder(stored: tuple[Path, DeviceData], staging: MakeStaging) -> None:
    folder = stored[0]
    folder.rename(folder.parent / "elsewhere")
    folder.symlink_to("elsewhere")
    refused(stored, staging, "is a symbolic link", "device")


def test_the_open_file_limit_is_not_damage(stored: tuple[Path, DeviceData]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 200), hard))
        with contextlib.suppress(OSError):  # until there is none left
            while True:
                taken.append(os.dup(0))
        for _ in range(3):
            os.close(taken.pop())
        with pytest.raises(SnapshotError, match="Too many open files") as caught:
            verify(stored[0], {PART: stored[1]})
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert not isinstance(caught.value, SnapshotDamaged)
    assert "ulimit -n" in (caught.value.hint or "")


# --- destinations that cannot be -------------------------------------------------------------------------------


def test_a_destination_too_short(stored: tuple[Path, DeviceData], staging: MakeStaging) -> None:
    folder, data = stored
    with pytest.raises(ValueError, match="shorter than its device memory"):
        FileDestination(PART, staging(data.size_bytes - 1), data.size_bytes)
    with (
        contextlib.closing(FolderPieces(folder, {PART: data})) as pieces,
        pytest.raises(ValueError, match="shorter than"),
    ):
        DeviceReader(pieces, [OnlyChecked(PART, data.size_bytes - 1)])


def test_a_destination_that_accepts_nothing(stored: tuple[Path, DeviceData], staging: MakeStaging) -> None:
    folder, data = stored
    fd = staging(data.size_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    with pytest.raises(SnapshotError, match=f"process {PART.pid} cannot be put into host memory") as caught:
        load(folder, {PART: data}, [FileDestination(PART, fd, data.size_bytes)])
    assert not isinstance(caught.value, SnapshotDamaged)
    assert format_bytes(data.size_bytes) in (caught.value.hint or "")


def test_few_threads_work_while_others_need_the_processors(staging: MakeStaging, tmp_path: Path) -> None:
    memory = some_memory(16 * PIECE, zero_share=0.0)
    workers: set[str] = set()
    writer = writer_of(tmp_path / "device", on_bytes=lambda size_bytes: workers.add(threading.current_thread().name))
    try:
        writer.limit_threads(0)
        writer.add(FileSource(PART, staging(memory), len(memory)))
        writer.start()
        writer.complete(PART)
        assert not writer.wait(0.1)
        assert workers == set()
        writer.limit_threads(1)
        assert writer.wait(LIMIT_S)
        assert workers == {"device-writer-0"}
        writer.limit_threads(None)
        writer.sync()
        assert writer.device_data(PART, ()).sha256 == digests_of(memory)
    finally:
        writer.cancel()

"""DeviceWriter in a first pass: what it saved counts only where the memory that stands still is the same."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from blake3 import blake3

from gpucr.errors import SnapshotError
from gpucr.gpu_state.source import Gone
from gpucr.model import DevicePart
from gpucr.snapshot.device import DeviceWriter, FolderPieces, FolderSink
from gpucr.snapshot.device.reader import Piece
from gpucr.snapshot.device.sink import ZERO
from gpucr.snapshot.manifest import DeviceData

PAGE = 4096
PIECE = 4 * PAGE
PART = DevicePart(42, 1)
LIMIT_S = 30.0


def digests_of(memory: bytes | bytearray) -> list[bytes | None]:
    pieces = [memory[at : at + PIECE] for at in range(0, len(memory), PIECE)]
    return [blake3(bytes(piece)).digest() if any(piece) else ZERO for piece in pieces]


class Changing:
    """A source that says the digest of what it gave."""

    def __init__(self, memory: bytes, *, is_gone: bool = False, names: bool = True) -> None:
        self.part, self.size_bytes = PART, len(memory)
        self.memory = bytearray(memory)
        self.read: list[int] = []
        self._is_gone = is_gone
        self._names = names

    def read_into(self, position: int, data: memoryview) -> bytes | None:
        if self._is_gone:
            raise Gone
        self.read.append(position // PIECE)
        data[:] = self.memory[position : position + len(data)]
        return digests_of(bytes(data))[0] if self._names else None


def some_memory(pieces: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(pieces * PIECE)  # noqa: S311


def writer_to(folder: Path) -> DeviceWriter:
    made = DeviceWriter(FolderSink(folder / "device", piece_bytes=PIECE), threads=4)
    made.start()
    return made


def early(writer: DeviceWriter, source: Changing, *, reads: bool = True) -> None:
    writer.add(source)
    writer.look(PART, digests_of(source.memory))
    writer.begin_early(PART, range(len(digests_of(source.memory))), reads=reads)
    assert writer.wait_early(LIMIT_S)


def finished(writer: DeviceWriter, source: Changing) -> DeviceData:
    """The memory stands still, and its digests are known."""
    writer.add(source)
    writer.look(PART, digests_of(source.memory))
    writer.complete(PART)
    assert writer.wait(LIMIT_S)
    writer.sync()
    return writer.device_data(PART, ())


def restored(folder: Path, data: DeviceData) -> bytes:
    pieces = FolderPieces(folder / "device", {PART: data})
    starts, whole = pieces.starts(PART), bytearray(data.size_bytes)

    def deliver(number: int, found: bytes | bytearray | memoryview | None) -> None:
        if found is not None:
            whole[starts[number] : starts[number + 1]] = found

    pieces.stream([Piece(PART, number) for number in range(len(starts) - 1)], deliver)
    pieces.close()
    return bytes(whole)


def test_only_what_differs_is_read_again(tmp_path: Path) -> None:
    writer, memory = writer_to(tmp_path), some_memory(20)
    early(writer, Changing(memory))
    still = Changing(memory[: 3 * PIECE] + some_memory(1, 2) + memory[4 * PIECE :])
    data = finished(writer, still)
    assert still.read == [3]
    assert restored(tmp_path, data) == still.memory
    assert (writer.rewritten_pieces, writer.again_bytes) == (1, PIECE)
    assert [each and bytes.fromhex(each) for each in data.blake3] == digests_of(still.memory)


def test_memory_changes_twice_between_looks(tmp_path: Path) -> None:
    """A when it is looked at, B while it is copied, A when it stands still."""
    writer, memory = writer_to(tmp_path), some_memory(8)
    source = Changing(memory)
    writer.add(source)
    writer.look(PART, digests_of(memory))
    source.memory[:] = some_memory(8, 2)
    writer.begin_early(PART, range(8), reads=True)
    assert writer.wait_early(LIMIT_S)
    still = Changing(memory)
    data = finished(writer, still)
    assert sorted(still.read) == list(range(8))
    assert restored(tmp_path, data) == memory


@pytest.mark.parametrize("pieces", [0, 3, 9, 10, 11, 17])
@pytest.mark.parametrize("pages", [0, 1])
def test_the_size_is_another_one_at_the_end(tmp_path: Path, pieces: int, pages: int) -> None:
    writer, memory = writer_to(tmp_path), some_memory(10) + bytes(2 * PAGE)
    early(writer, Changing(memory))
    still = Changing((some_memory(20, 1))[: pieces * PIECE] + bytes(pages * PAGE))
    data = finished(writer, still)
    assert data.size_bytes == len(still.memory)
    assert restored(tmp_path, data) == still.memory


def test_zeros_come_and_go(tmp_path: Path) -> None:
    writer, memory = writer_to(tmp_path), some_memory(2) + bytes(2 * PIECE)
    source = Changing(memory)
    early(writer, source)
    assert sorted(source.read) == [0, 1]
    still = Changing(some_memory(1) + bytes(PIECE) + some_memory(1, 3) + bytes(PIECE))
    data = finished(writer, still)
    assert sorted(still.read) == [1, 2]
    assert restored(tmp_path, data) == still.memory


def test_without_digests_all_is_read_again(tmp_path: Path) -> None:
    writer, memory = writer_to(tmp_path), some_memory(6)
    early(writer, Changing(memory, names=False))
    still = Changing(memory)
    writer.add(still)
    assert writer.differing(PART) == list(range(6))
    writer.complete(PART)
    assert writer.wait(LIMIT_S)
    assert sorted(still.read) == list(range(6))
    writer.cancel()


def test_a_source_that_is_gone_is_saved_later(tmp_path: Path) -> None:
    writer, memory = writer_to(tmp_path), some_memory(40)
    early(writer, Changing(memory, is_gone=True))
    still = Changing(memory)
    assert restored(tmp_path, finished(writer, still)) == memory
    assert sorted(still.read) == list(range(40))


def test_nothing_is_read_where_only_what_is_known_is_wanted(tmp_path: Path) -> None:
    writer, source = writer_to(tmp_path), Changing(some_memory(5) + bytes(PIECE))
    early(writer, source, reads=False)
    assert source.read == []
    assert writer.differing(PART) == [0, 1, 2, 3, 4], "the zeros are known"
    writer.cancel()


def test_a_first_pass_gives_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpucr.snapshot.device.writer._FEW", 4)
    writer, source = writer_to(tmp_path), Changing(some_memory(200))
    writer.add(source)
    writer.look(PART, digests_of(source.memory))
    source.memory[:] = some_memory(200, 2)
    writer.begin_early(PART, range(200), reads=True)
    assert writer.wait_early(LIMIT_S)
    assert len(source.read) < 20
    writer.cancel()


class _Named(FolderSink):
    names_are_digests = True


def test_other_bytes_than_their_digest_says(tmp_path: Path) -> None:
    """The sink names them by SHA-256 here: no name is the digest."""
    writer = DeviceWriter(_Named(tmp_path / "device", piece_bytes=PIECE), threads=2)
    writer.start()
    source = Changing(some_memory(1))
    writer.add(source)
    writer.look(PART, digests_of(source.memory))
    writer.complete(PART)
    with pytest.raises(SnapshotError, match="has other bytes here than on its GPU"):
        writer.wait(LIMIT_S)
    writer.cancel()


def test_digests_that_do_not_fit(tmp_path: Path) -> None:
    writer, source = writer_to(tmp_path), Changing(some_memory(3))
    writer.add(source)
    with pytest.raises(ValueError, match="2 digests of 3 pieces"):
        writer.look(PART, [None, None])
    writer.complete(PART)
    with pytest.raises(ValueError, match="is being saved already"):
        writer.add(Changing(some_memory(3)))
    writer.cancel()


def test_a_process_that_frees_all_it_had_before_the_freeze_needs_nothing_more(tmp_path: Path) -> None:
    writer = writer_to(tmp_path)
    early(writer, Changing(some_memory(5)))
    writer.add(Changing(b""))
    assert writer.wait(LIMIT_S)
    writer.sync()
    assert {each.stat().st_size for each in (tmp_path / "device").iterdir()} == {0}


def test_a_process_that_ends_before_the_freeze_needs_nothing_more(tmp_path: Path) -> None:
    writer = writer_to(tmp_path)
    early(writer, Changing(some_memory(5)))
    assert writer.wait(LIMIT_S)
    writer.sync()
    assert {each.stat().st_size for each in (tmp_path / "device").iterdir()} == {0}


def test_memory_present_at_the_freeze_is_waited_for(tmp_path: Path) -> None:
    writer, source = writer_to(tmp_path), Changing(some_memory(5))
    early(writer, source)
    writer.add(Changing(bytes(source.memory)))
    assert not writer.wait(0)
    writer.complete(PART)
    assert writer.wait(LIMIT_S)
    writer.cancel()

"""Device memory into a store while it is being filled, and out of it in the order in which it is needed."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpucr.errors import StoreDamaged
from gpucr.gpu_state.source import FileDestination, FileSource
from gpucr.model import DevicePart, StagedExtent
from gpucr.snapshot.device import DeviceReader, DeviceWriter
from gpucr.snapshot.store_destination import StoreSink
from gpucr.snapshot.store_origin import StorePieces
from gpucr.store import snapshots
from gpucr.store.local import LocalBackend
from gpucr.store.opened import Store
from gpucr.store.session import WriteSession
from gpucr.store.stored_snapshot import StoredSnapshot
from tests.counter import wait_until
from tests.store.dumps import new_store

PIECE = 4096
LIMIT_S = 30.0
THREE, FOUR, FIVE, SEVEN = map(DevicePart, (3, 4, 5, 7))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    (tmp_path / "store").mkdir(mode=0o700)
    return new_store(LocalBackend(tmp_path / "store"))


@pytest.fixture
def session(store: Store) -> Iterator[WriteSession]:
    with WriteSession.begin(store, compress="none") as begun:
        yield begun


def staging(content: bytes | int) -> int:
    fd = os.memfd_create("staging")
    os.ftruncate(fd, content if isinstance(content, int) else len(content))
    if isinstance(content, bytes):
        os.pwrite(fd, content, 0)
    return fd


def sink_of(store: Store, session: WriteSession) -> StoreSink:
    sink = StoreSink(store)
    sink.session.set(session)
    return sink


def saved(store: Store, memories: dict[DevicePart, bytes]) -> StoredSnapshot:
    with WriteSession.begin(store, compress="none") as session:
        sink = sink_of(store, session)
        fds = {part: staging(memory) for part, memory in memories.items()}
        writer = DeviceWriter(sink, [FileSource(part, fd, len(memories[part])) for part, fd in fds.items()], threads=2)
        try:
            writer.start()
            for part in fds:
                writer.complete(part)
            assert writer.wait(LIMIT_S)
            for part in fds:
                writer.device_data(part, ())
        finally:
            writer.cancel()
            for fd in fds.values():
                os.close(fd)
        return session.commit(name=None, manifest=b"{}", areas=sink.areas)


def test_data_changed_after_an_early_save_is_saved_again(store: Store, session: WriteSession) -> None:
    memory = bytearray(os.urandom(8 * PIECE))
    memory[2 * PIECE : 3 * PIECE] = bytes(PIECE)
    fd = staging(bytes(memory))
    sink = sink_of(store, session)
    writer = DeviceWriter(sink, [FileSource(SEVEN, fd, len(memory))], threads=2)
    try:
        writer.start()
        writer.advance(SEVEN, 5 * PIECE)
        wait_until(lambda: writer.seen_bytes == 5 * PIECE, "the first pieces to be saved")
        counts = session.writer.counts
        memory[PIECE : 2 * PIECE] = bytes(PIECE)
        memory[2 * PIECE : 3 * PIECE] = os.urandom(PIECE)
        os.pwrite(fd, memory, 0)
        writer.complete(SEVEN)
        assert writer.wait(LIMIT_S)
        writer.sync()
        assert writer.rewritten_pieces == 2
        seen = session.writer.counts.seen_bytes - counts.seen_bytes
        assert seen == (3 + 2) * PIECE, "what is as it was counts once"
        extent = StagedExtent(0x7F0000000000, len(memory), 0)
        data = writer.device_data(SEVEN, [extent])
    finally:
        writer.cancel()
        os.close(fd)
    assert (data.extents, data.size_bytes, data.piece_bytes) == ((extent,), len(memory), PIECE)
    assert data.store_bytes == data.stored_bytes == 7 * PIECE
    stored = session.commit(name=None, manifest=b"{}", areas=sink.areas)
    reader = snapshots.open_reader(store, stored)
    assert reader.read_all(stored.area("device/7").pieces(reader)) == memory


def reader_of(store: Store, stored: StoredSnapshot, fds: dict[DevicePart, int]) -> DeviceReader:
    reader = snapshots.open_reader(store, stored)
    areas = {part: stored.area(f"device/{part}") for part in fds}
    destinations = [FileDestination(part, fd, areas[part].size_bytes) for part, fd in fds.items()]
    return DeviceReader(StorePieces(reader, {part: area.pieces(reader) for part, area in areas.items()}), destinations)


def test_all_processes_are_filled_in_parallel(store: Store) -> None:
    memories = {pid: os.urandom(count * PIECE) for pid, count in ((THREE, 40), (FOUR, 1), (FIVE, 100))}
    stored = saved(store, memories)
    fds = {pid: staging(len(memory)) for pid, memory in memories.items()}
    reader = reader_of(store, stored, fds)
    assert reader._order[:5] == [(THREE, 0), (FOUR, 0), (FIVE, 0), (THREE, 1), (FIVE, 1)]
    reader.start()
    try:
        assert reader.wait_for(FOUR, PIECE, LIMIT_S)
        for pid, memory in memories.items():
            assert reader.wait_for(pid, len(memory) + 1, LIMIT_S)
            assert reader.loaded(pid) == len(memory)
            assert os.pread(fds[pid], len(memory) + 1, 0) == memory
        assert reader.loaded_bytes == sum(map(len, memories.values()))
    finally:
        reader.cancel()
        for fd in fds.values():
            os.close(fd)


def test_zeros_stay_holes(store: Store) -> None:
    memory = bytes(64 * PIECE) + os.urandom(PIECE)
    stored = saved(store, {THREE: memory})
    fd = staging(len(memory))
    reader = reader_of(store, stored, {THREE: fd})
    reader.start()
    assert reader.wait_for(THREE, len(memory), LIMIT_S)
    reader.cancel()
    assert os.lseek(fd, 0, os.SEEK_DATA) == 64 * PIECE
    os.close(fd)


def test_cancelling_releases_every_waiter(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = saved(store, {THREE: os.urandom(8 * PIECE)})
    fd = staging(8 * PIECE)
    reader = reader_of(store, stored, {THREE: fd})
    entered, go_on = threading.Event(), threading.Event()
    deliver = reader._deliver

    def slow(number: int, data: object) -> None:
        entered.set()
        assert go_on.wait(LIMIT_S)
        deliver(number, data)  # type: ignore[arg-type]

    monkeypatch.setattr(reader, "_deliver", slow)
    reader.start()
    assert entered.wait(LIMIT_S)
    assert not reader.wait_for(THREE, PIECE, 0.01), "out of time"
    reader._is_cancelled = True
    go_on.set()
    reader.cancel()
    assert not reader.wait_for(THREE, 8 * PIECE), "cancelled"
    os.close(fd)


def test_damage_reaches_the_waiter(store: Store, tmp_path: Path) -> None:
    stored = saved(store, {THREE: os.urandom(8 * PIECE)})
    for pack in (tmp_path / "store" / "packs").glob("*/*"):
        data = bytearray(pack.read_bytes())
        data[5] ^= 1  # of its first piece: how many follow depends on how the writers shared the work
        pack.chmod(0o600)
        pack.write_bytes(data)
    fd = staging(8 * PIECE)
    reader = reader_of(store, stored, {THREE: fd})
    reader.start()
    with pytest.raises(StoreDamaged):
        reader.wait_for(THREE, 8 * PIECE, LIMIT_S)
    with pytest.raises(StoreDamaged):
        reader.wait_for(THREE, PIECE, LIMIT_S)
    reader.cancel()
    os.close(fd)

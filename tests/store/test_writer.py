"""gpucr.store.writer and reader: every piece is stored once and read back, and a dying writer loses nothing."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpucr.errors import StoreDamaged, StoreError
from gpucr.store import index, lanes, pack, reader
from gpucr.store.backend import Buffer
from gpucr.store.codec import COMPRESS, Compress
from gpucr.store.crypto import PackCipher
from gpucr.store.keys import Secret
from gpucr.store.local import LocalBackend
from gpucr.store.memory import AlignedBuffer
from gpucr.store.opened import Store
from gpucr.store.pieces import ZERO_ID, PieceRef
from gpucr.store.reader import StoreReader
from gpucr.store.writer import StoreWriter
from tests.store.memory import FaultyBackend, Killed, MemoryBackend

PIECE, PACK = 16 << 10, 128 << 10
KEY = Secret.key_file(b"k" * 32)


def noise(count: int, seed: int = 0, size: int = PIECE) -> list[bytes]:
    """Pieces that are all different and cannot be compressed."""
    numbers = np.random.default_rng(seed)
    return [numbers.bytes(size) for _ in range(count)]


def mixed(seed: int = 0) -> list[bytes]:
    """Pieces of many kinds and lengths."""
    weights = np.random.default_rng(seed).normal(0, 0.02, PIECE).astype("<f4").tobytes()
    return [
        *noise(5, seed), bytes(PIECE), bytes(17), b"x", b"\0\1", *noise(3, seed + 1, 1001), weights[:PIECE],
        weights[PIECE : 2 * PIECE], b"text " * 3000, *noise(2, seed), bytes(PIECE),
    ]  # fmt: skip


def new_store(place: Any = None, secret: Secret | None = None) -> Store:
    return Store.create(place or MemoryBackend(), secret=secret, piece_bytes=PIECE, pack_bytes=PACK)


def write(store: Store, data: Iterable[Buffer], **options: Any) -> list[PieceRef]:
    """Store these with a new writer that knows what is there."""
    writer = StoreWriter(store, index.load(store), **options)
    refs = [writer.add(each) for each in data]
    writer.flush()
    return refs


def read(store: Store, refs: Sequence[PieceRef], **options: Any) -> list[bytes]:
    """Read these with a new reader."""
    into = [memoryview(bytearray(b"?" * ref.length)) for ref in refs]
    StoreReader(store, index.load(store), **options).read(refs, into)
    return [bytes(each) for each in into]


@pytest.fixture(params=["memory", "folder"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if request.param == "memory":
        return MemoryBackend()
    tmp_path.chmod(0o700)
    return LocalBackend(tmp_path)


# --- there and back ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compress", COMPRESS)
def test_everything_is_read_back(place: Any, secret: Secret | None, compress: Compress) -> None:
    store = new_store(place, secret)
    refs = write(store, mixed(), compress=compress)
    again = Store.open(place, secret)
    assert read(again, refs) == mixed()
    own = StoreReader(again, index.load(again))
    assert [bytes(own.fetch(ref)) for ref in refs] == mixed()
    assert own.read_all(refs) == b"".join(mixed())


def test_counts_are_consistent() -> None:
    store = new_store()
    writer = StoreWriter(store, index.load(store), compress="fast")
    text = b"text " * 3000
    for piece in (bytes(PIECE), text, text, *noise(2)):
        writer.add(piece)
    writer.flush()
    counts = writer.counts
    assert counts.seen_bytes == 3 * PIECE + 2 * len(text)
    assert (counts.zero_bytes, counts.known_bytes) == (PIECE, len(text))
    assert 0.9 * len(text) < counts.compressed_saved_bytes < len(text)
    packs = [info.size_bytes for info in store.backend.list("packs/")]
    assert counts.written_bytes == sum(packs)
    assert 2 * PIECE < counts.written_bytes < 3 * PIECE + 4096


def test_a_second_writer_stores_nothing_again(secret: Secret | None) -> None:
    store = new_store(secret=secret)
    first = write(store, noise(20))
    before = dict(store.backend.objects)  # type: ignore[attr-defined]
    writer = StoreWriter(store, index.load(store))
    assert [writer.add(piece) for piece in noise(20)] == first
    writer.flush()
    assert (writer.counts.known_bytes, writer.counts.written_bytes) == (20 * PIECE, 0)
    assert writer.counts.checked_bytes == 20 * PIECE
    assert store.backend.objects == before  # type: ignore[attr-defined]


def test_zeros_are_not_stored() -> None:
    store = new_store()
    refs = write(store, [bytes(PIECE), bytes(1)])
    assert refs == [PieceRef(ZERO_ID, PIECE), PieceRef(ZERO_ID, 1)]
    assert [info.name for info in store.backend.list()] == ["gpucr-store.json"]
    assert read(store, refs) == [bytes(PIECE), bytes(1)]


def test_lists_and_objects_of_any_length(secret: Secret | None) -> None:
    store = new_store(secret=secret)
    writer = StoreWriter(store, index.load(store))
    data = b"".join(noise(5)) + b"end"
    refs = writer.add_all(data)
    assert [ref.length for ref in refs] == [PIECE] * 5 + [3]
    whole = refs * 200
    listed = writer.add_list(whole)
    writer.flush()
    own = StoreReader(store, index.load(store))
    assert len(listed) == -(-(16 + len(whole) * 40) // PIECE) > 1
    assert own.read_list(listed) == whole
    with pytest.raises(StoreDamaged, match="has a list of pieces that is not valid"):
        own.read_list(refs)


@pytest.mark.parametrize("data", [b"", bytes(PIECE + 1)])
def test_pieces_of_a_wrong_length(data: bytes) -> None:
    with pytest.raises(ValueError, match="a piece of"):
        StoreWriter(new_store(), index.Index()).add(data)


def test_buffers_of_a_wrong_length() -> None:
    store = new_store()
    refs = write(store, noise(1))
    with pytest.raises(ValueError, match="not as long as the pieces"):
        StoreReader(store, index.load(store)).read(refs, [memoryview(bytearray(5))])


def test_the_callers_buffer_can_be_reused(place: Any) -> None:
    """Also where it goes straight to the disk: it is used for the next piece at once."""
    store = new_store(place)
    writer = StoreWriter(store, index.load(store), compress="none")
    buffer = AlignedBuffer(PIECE)
    refs = []
    for piece in noise(20):
        buffer.view[:] = piece
        refs.append(writer.add(buffer.view))
    writer.flush()
    assert read(store, refs) == noise(20)


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(st.binary(max_size=40), st.integers(1, 500), st.sampled_from(["random", "repeat"])), max_size=30
    ),
    st.sampled_from(COMPRESS),
    st.sampled_from([None, KEY]),
    st.integers(1, 4),
)
def test_any_pieces_are_read_back(
    parts: list[tuple[bytes, int, str]], compress: Compress, secret: Secret | None, lane_count: int
) -> None:
    data = [
        (unit * count)[:PIECE] if kind == "repeat" and unit else np.random.default_rng(list(unit)).bytes(count)
        for unit, count, kind in parts
    ]
    store = new_store(secret=secret)
    writer = StoreWriter(store, index.Index(), compress=compress, lanes=lane_count)
    refs = [writer.add(each) for each in data]
    middle = len(data) // 2
    writer.flush()
    refs += [writer.add(each) for each in data[:middle]]
    writer.flush()
    assert read(store, refs) == data + data[:middle]
    rebuilt = [index.read_footer(store, contents.pack_id) for contents in index.load(store).packs]
    assert rebuilt == list(index.load(store).packs)


_WITHOUT_LIBRARIES = """
import os, sys
for name in ("blake3", "zstandard", "numpy", "cryptography"):
    sys.modules[name] = None
from gpucr.errors import BrokenInstall
from gpucr.store import index
from gpucr.store.keys import Secret
from gpucr.store.local import LocalBackend
from gpucr.store.opened import Store
from gpucr.store.reader import StoreReader
from gpucr.store.writer import StoreWriter
store = Store.create(LocalBackend(sys.argv[1]))
writer = StoreWriter(store, index.load(store), compress="none")
refs = writer.add_all(os.urandom(3 << 20))
writer.flush()
print(store.config.hash, len(StoreReader(store, index.load(store)).read_all(refs)))
secret = Secret.key_file(bytes(32))
for needs in (lambda: StoreWriter(store, index.Index()), lambda: store.create(store.backend, secret=secret)):
    try:
        needs()
    except BrokenInstall as e:
        print(e.message.partition(" needs ")[0])
"""


def test_features_without_optional_libraries(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    command = [sys.executable, "-c", _WITHOUT_LIBRARIES, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"sha256 {3 << 20}", "compression in a store", "an encrypted store"]


# --- many threads ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compress", ["auto", "none"])
def test_many_threads(place: Any, secret: Secret | None, compress: Compress) -> None:
    store = new_store(place, secret)
    writer = StoreWriter(store, index.load(store), compress=compress)
    data = noise(60) + mixed() * 3 + noise(60)
    with ThreadPoolExecutor(8) as pool:
        refs = list(pool.map(writer.add, data))
    writer.flush()
    assert read(store, refs, threads=6) == data
    found = index.load(store)
    assert found.pieces == sum(len(contents.entries) // 48 for contents in found.packs), "one of them is there twice"
    assert found.pieces == len({ref for ref in refs if not ref.is_zero})


def test_full_packs_are_closed() -> None:
    store = new_store()
    write(store, noise(40), compress="none")
    sizes = [info.size_bytes for info in store.backend.list("packs/")]
    assert len(sizes) == 5
    assert all(PACK < size <= PACK + PIECE + 2 * 4096 for size in sizes)


def test_a_pack_holds_a_limited_number_of_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "MAX_ENTRIES", 4)
    store = new_store()
    refs = write(store, noise(10, size=100))
    assert sorted(len(contents.entries) // 48 for contents in index.load(store).packs) == [2, 4, 4]
    assert read(store, refs) == noise(10, size=100)


def test_no_nonce_is_used_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over several writers, threads, pieces and footers, also when a piece is stored again."""
    used: list[tuple[int, int]] = []
    lock = threading.Lock()
    encrypt = PackCipher.encrypt

    def noted(cipher: PackCipher, block: int, data: Buffer, bound: bytes, into: memoryview) -> None:
        with lock:
            used.append((id(cipher), block))
        kept.append(cipher)
        encrypt(cipher, block, data, bound, into)

    kept: list[PackCipher] = []
    monkeypatch.setattr(PackCipher, "encrypt", noted)
    store = new_store(secret=KEY)
    for seed in (1, 1, 2):
        writer = StoreWriter(store, index.Index())
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(writer.add, noise(40, seed) + mixed(seed)))
        writer.flush()
    assert len(used) > 120
    assert len(set(used)) == len(used)


def test_equal_contents_give_different_bytes_in_two_stores() -> None:
    """Same key file, same content: neither names nor ciphertext tell that."""
    stores = [new_store(secret=KEY) for _ in range(2)]
    refs = [write(store, noise(3)) for store in stores]
    assert not set(refs[0]) & set(refs[1])
    blocks = [
        {data[at : at + 16] for name, (data, _) in store.backend.objects.items() if name.startswith("packs/")  # type: ignore[attr-defined]
         for at in range(0, len(data) - 8192, 16)}
        for store in stores
    ]  # fmt: skip
    assert not (blocks[0] & blocks[1]) - {bytes(16)}


# --- reading -----------------------------------------------------------------------------------------------------


def test_adjacent_pieces_are_one_request() -> None:
    place = FaultyBackend(MemoryBackend())
    store = new_store(place)
    refs = write(store, noise(30), compress="none", lanes=3)
    place.calls.clear()
    assert read(store, refs) == noise(30)
    packs = len(index.load(store).packs)
    reads = [name for operation, name in place.calls if operation == "read" and name.startswith("packs/")]
    assert len(reads) == packs < 6


def test_request_sizes_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "RANGE_BYTES", 3 * PIECE)
    monkeypatch.setattr(reader, "_WINDOW_BYTES", 4 * PIECE)
    place = FaultyBackend(MemoryBackend())
    store = new_store(place)
    refs = write(store, noise(24), compress="none", lanes=1)
    place.calls.clear()
    assert read(store, refs) == noise(24)
    reads = [name for operation, name in place.calls if operation == "read" and name.startswith("packs/")]
    assert len(reads) >= 12


def test_a_piece_larger_than_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "RANGE_BYTES", 4096)
    store = new_store()
    refs = write(store, noise(4))
    assert read(store, refs) == noise(4)


def test_pieces_arrive_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_WINDOW_BYTES", 8 * PIECE)
    store = new_store()
    refs = write(store, noise(64), compress="none")
    shuffled = refs[::-1]
    order: list[int] = []
    StoreReader(store, index.load(store), threads=1).stream(shuffled, lambda number, data: order.append(number))
    assert sorted(order) == list(range(64))
    assert all(abs(at - number) < 8 for at, number in enumerate(order))


def test_zeros_are_delivered_as_none() -> None:
    store = new_store()
    refs = write(store, [bytes(PIECE), b"x", bytes(5)])
    found: dict[int, bytes | None] = {}

    def deliver(number: int, data: Buffer | None) -> None:
        found[number] = None if data is None else bytes(data)

    StoreReader(store, index.load(store)).stream(refs, deliver)
    assert found == {0: None, 1: b"x", 2: None}


def test_nothing_is_read_needlessly() -> None:
    store = new_store()
    StoreReader(store, index.load(store)).stream([], lambda number, data: pytest.fail("nothing was asked for"))


class Stop(Exception):
    pass


def test_an_error_in_the_receiver_ends_the_read() -> None:
    store = new_store()
    refs = write(store, noise(200), compress="none")
    seen: list[int] = []

    def deliver(number: int, data: Buffer | None) -> None:
        seen.append(number)
        raise Stop

    before = threading.active_count()
    with pytest.raises(Stop):
        StoreReader(store, index.load(store), threads=4).stream(refs, deliver)
    assert len(seen) <= 4
    assert threading.active_count() == before


# --- damage ------------------------------------------------------------------------------------------------------


def damaged_pack(store: Store, change: str) -> str:
    """Damage the only pack in its first piece."""
    objects = store.backend.objects  # type: ignore[attr-defined]
    (name,) = store.backend.names("packs/")  # type: ignore[attr-defined]
    data, at = objects[name]
    if change == "missing":
        del objects[name]
    else:
        flipped = data[:1000] + bytes([data[1000] ^ 1]) + data[1001:]
        objects[name] = (data[:5000] if change == "cut" else flipped, at)
    return str(name)


@pytest.mark.parametrize("compress", ["none", "fast"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("cut", "is cut short: it ends before byte"),
        ("flip", "differs from what was written, between bytes 0 and"),
        ("missing", "is missing"),
    ],
)
def test_each_damage_has_its_message(change: str, message: str, compress: Compress, secret: Secret | None) -> None:
    store = new_store(secret=secret)
    weights = np.random.default_rng(1).normal(0, 0.02, PIECE // 4).astype("<f4").tobytes()
    refs = write(store, [weights], compress=compress)
    name = damaged_pack(store, change)
    with pytest.raises(StoreDamaged, match=f"memory:/{name} {message}") as caught:
        read(store, refs)
    assert caught.value.hint
    assert caught.value.path == f"memory:/{name}"
    with pytest.raises(StoreDamaged, match=message):
        StoreReader(store, index.load(store)).fetch(refs[0])


@settings(max_examples=60)
@given(st.data(), st.sampled_from([None, KEY]))
def test_a_flipped_bit_in_a_piece_never_yields_other_data(data: st.DataObject, secret: Secret | None) -> None:
    store = new_store(secret=secret)
    content = [b"text " * 3000, noise(1)[0]]
    refs = write(store, content, compress="fast", lanes=1)
    objects = store.backend.objects  # type: ignore[attr-defined]
    (name,) = store.backend.names("packs/")  # type: ignore[attr-defined]
    whole, at = objects[name]
    place = index.load(store).find(refs[data.draw(st.integers(0, 1))].id)
    assert place is not None
    where = place.offset + data.draw(st.integers(0, place.stored_length - 1))
    objects[name] = (whole[:where] + bytes([whole[where] ^ 1 << data.draw(st.integers(0, 7))]) + whole[where + 1 :], at)
    try:
        found = read(store, refs)
    except StoreDamaged as e:
        message = e.message
    else:
        # A frame of Zstandard has a bit that means nothing; without encryption the name is of the content alone.
        assert (found, secret) == (content, None)
        return
    assert "differs from what was written" in message


def test_pieces_of_a_pack_cannot_be_swapped() -> None:
    """Whoever writes to an encrypted store can put ciphertext elsewhere, and nothing more."""
    store = new_store(secret=KEY)
    refs = write(store, noise(2), compress="none", lanes=1)
    objects = store.backend.objects  # type: ignore[attr-defined]
    (name,) = store.backend.names("packs/")  # type: ignore[attr-defined]
    whole, at = objects[name]
    length = pack.padded(PIECE + 16)
    objects[name] = (whole[length : 2 * length] + whole[:length] + whole[2 * length :], at)
    with pytest.raises(StoreDamaged, match="differs from what was written"):
        read(store, refs)


def test_a_piece_nobody_has() -> None:
    store = new_store()
    (ref,) = write(store, noise(1))
    with pytest.raises(StoreDamaged, match=f"lacks the piece {'01' * 32}"):
        read(store, [PieceRef(b"\1" * 32, 5)])
    with pytest.raises(StoreDamaged, match=f"has {PIECE} bytes for a piece of 5"):
        read(store, [PieceRef(ref.id, 5)])


def test_a_store_that_fails_while_reading() -> None:
    place = FaultyBackend(MemoryBackend())
    store = new_store(place)
    refs = write(store, noise(40))
    place.fault = lambda operation, name: "before" if operation == "read" and name.startswith("packs/") else None
    with pytest.raises(StoreError, match="cannot be used: Connection reset by peer"):
        read(store, refs)
    place.fault = lambda operation, name: "short" if operation == "read" and name.startswith("packs/") else None
    with pytest.raises(StoreDamaged, match="is cut short"):
        read(store, refs)


# --- a writer that fails or dies ----------------------------------------------------------------------------------


def _add_and_flush(writer: StoreWriter, data: Iterable[Buffer]) -> None:
    for piece in data:
        writer.add(piece)
    writer.flush()


@pytest.mark.parametrize("kind", ["before", "after", "full"])
@pytest.mark.parametrize("what", ["packs/", "index/"])
def test_an_error_is_final(kind: str, what: str) -> None:
    place = FaultyBackend(MemoryBackend())
    store = new_store(place)
    place.fault = lambda operation, name: kind if operation == "create" and name.startswith(what) else None
    writer = StoreWriter(store, index.load(store))
    message = "takes no more data: No space left" if kind == "full" else "cannot be used: Connection reset"
    with pytest.raises(StoreError, match=message) as first:
        _add_and_flush(writer, noise(30))
    place.fault = lambda operation, name: None
    for call in (writer.flush, lambda: writer.add(b"more")):
        with pytest.raises(StoreError) as again:
            call()
        assert again.value is first.value
    writer.discard()
    writer.discard()


def test_an_error_in_one_thread_stops_all() -> None:
    place = FaultyBackend(MemoryBackend())
    store = new_store(place)
    writer = StoreWriter(store, index.load(store))
    place.fault = lambda operation, name: "full" if name.startswith("packs/") else None
    with ThreadPoolExecutor(8) as pool:
        done = [pool.submit(writer.add, piece) for piece in noise(200)]
    assert any(isinstance(each.exception(), StoreError) for each in done)
    with pytest.raises(StoreError, match="No space left"):
        writer.flush()
    writer.discard()
    assert index.load(store).pieces == 0


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a real file system with a limit: what is committed stays, and the rest leaves no files."""
    store = new_store(LocalBackend(tmp_path))
    kept = write(store, noise(3))
    writev = os.pwritev
    left = [300_000]

    def limited(fd: int, data: list[memoryview], offset: int) -> int:
        left[0] -= len(data[0])
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return writev(fd, data, offset)

    monkeypatch.setattr(os, "pwritev", limited)
    writer = StoreWriter(store, index.load(store))
    with pytest.raises(StoreError, match="takes no more data: No space left on device") as caught:
        _add_and_flush(writer, noise(100, seed=5))
    assert "prune" in (caught.value.hint or "")
    writer.discard()
    monkeypatch.undo()
    assert not list((tmp_path / ".incoming").iterdir())
    assert read(Store.open(LocalBackend(tmp_path)), kept) == noise(3)


@pytest.mark.parametrize("kind", ["kill", "kill-after"])
def test_a_writer_dies_at_any_step(kind: str, secret: Secret | None) -> None:
    """What was flushed before is all there; the next writer stores what it needs, and the store is sound."""
    step = 0
    while True:
        place = FaultyBackend(MemoryBackend())
        store = new_store(place, secret)
        kept = write(store, noise(10))
        calls = 0

        def fault(operation: str, name: str, at: int = step) -> str | None:
            nonlocal calls
            if operation != "create":
                return None
            calls += 1
            return kind if calls == at + 1 else None

        place.fault = fault
        try:
            write(store, noise(30, seed=9), compress="none")
            break
        except Killed:
            pass
        survivor = Store.open(place.inner, secret)
        assert read(survivor, kept) == noise(10)
        again = write(survivor, noise(30, seed=9))
        assert read(survivor, again) == noise(30, seed=9)
        for info in survivor.backend.list("packs/"):
            pack_id = pack.pack_id_of(info.name)
            assert pack_id is not None
            assert index.read_footer(survivor, pack_id).size_bytes == info.size_bytes
        step += 1
    assert step >= 4, "three packs and an index"


def test_a_discarded_writer() -> None:
    store = new_store()
    writer = StoreWriter(store, index.load(store))
    for piece in noise(12):
        writer.add(piece)
    writer.discard()
    assert index.load(store).pieces == 0
    for call in (writer.flush, lambda: writer.add(b"more")):
        with pytest.raises(StoreError, match="the writer has ended"):
            call()

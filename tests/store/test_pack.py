"""gpucr.store.pack and index: a pack describes itself, the index repeats that, and neither trusts its input."""

from __future__ import annotations

import hashlib
import os
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpucr.errors import StoreDamaged, StoreError
from gpucr.store import index, pack
from gpucr.store.crypto import Changed, CutShort, KeyRing, PackCipher
from gpucr.store.index import Index
from gpucr.store.keys import Secret
from gpucr.store.opened import Store
from gpucr.store.pack import BLOCK_BYTES, TRAILER_BYTES, Entry, PackContents
from gpucr.store.pieces import ZERO_ID
from tests.store.memory import FaultyBackend, MemoryBackend

PACK_ID = bytes(range(16))
RING = KeyRing(b"m" * 32, b"i" * 16)
CIPHERS = [None, RING.pack(PACK_ID)]
ciphers = pytest.mark.parametrize("cipher", CIPHERS, ids=["plain", "encrypted"])


def entry(number: int, block: int, stored: int = 100, raw: int = 200, encoding: int = 1) -> Entry:
    return Entry(hashlib.sha256(b"%d" % number).digest(), block, stored, raw, encoding)


ENTRIES = [entry(1, 0), entry(2, 1, 8192), entry(3, 5, 4097)]
ENTRIES_END = 7 * BLOCK_BYTES


def packed(entries: list[Entry], cipher: PackCipher | None, end: int = ENTRIES_END) -> bytes:
    """A pack with these entries, whose pieces are noise."""
    return os.urandom(end) + pack.encode_end(PACK_ID, end, pack.pack_entries(entries), cipher)


def contents_of(whole: bytes, cipher: PackCipher | None, pack_id: bytes = PACK_ID) -> PackContents:
    """What another reader would do."""
    trailer = pack.decode_trailer(whole[-TRAILER_BYTES:], pack_id, len(whole))
    footer = whole[trailer.footer_offset :][: trailer.footer_length]
    return pack.decode_footer(footer, trailer, len(whole), cipher)


def stored(whole: bytes, secret: Secret | None = None) -> Store:
    """A store with this pack alone."""
    place = MemoryBackend()
    store = Store.create(place, secret=secret)
    place.create(pack.pack_name(PACK_ID), whole)
    return store


# --- packs -------------------------------------------------------------------------------------------------------


@ciphers
@given(st.lists(st.tuples(st.integers(1, 3 * BLOCK_BYTES), st.integers(1, 1 << 20)), max_size=100))
def test_a_pack_lists_its_contents(cipher: PackCipher | None, sizes: list[tuple[int, int]]) -> None:
    entries, block = list[Entry](), 0
    for number, (length, raw) in enumerate(sizes):
        entries.append(entry(number, block, length, raw))
        block += pack.padded(length) // BLOCK_BYTES
    end = pack.encode_end(PACK_ID, block * BLOCK_BYTES, pack.pack_entries(entries), cipher)
    whole = bytes(block * BLOCK_BYTES) + end
    assert len(whole) % BLOCK_BYTES == 0
    found = contents_of(whole, cipher)
    assert list(pack.iter_entries(found.entries)) == entries
    assert (found.pack_id, found.size_bytes) == (PACK_ID, len(whole))


def test_an_encrypted_footer_hides_the_names() -> None:
    whole = packed(ENTRIES, CIPHERS[1])
    assert not any(each.id in whole for each in ENTRIES)
    assert all(each.id in packed(ENTRIES, None) for each in ENTRIES)


@ciphers
@given(st.data())
def test_a_truncated_pack_is_reported_as_truncated(cipher: PackCipher | None, data: st.DataObject) -> None:
    whole = packed(ENTRIES, cipher)
    with pytest.raises(CutShort):
        contents_of(whole[: data.draw(st.integers(0, len(whole) - 1))], cipher)


@ciphers
@given(st.data())
def test_a_footer_with_a_flipped_bit(cipher: PackCipher | None, data: st.DataObject) -> None:
    whole = bytearray(packed(ENTRIES, cipher))
    length = len(pack.pack_entries(ENTRIES)) + (16 if cipher else 0)
    places = [*range(ENTRIES_END, ENTRIES_END + length), *range(len(whole) - TRAILER_BYTES, len(whole))]
    whole[data.draw(st.sampled_from(places))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises((Changed, CutShort)):  # without its magic, a trailer is missing
        contents_of(bytes(whole), cipher)


@given(st.binary(min_size=TRAILER_BYTES, max_size=300), st.integers(0, 1 << 40))
def test_arbitrary_bytes_are_no_trailer(data: bytes, size_bytes: int) -> None:
    for tail in (data[-TRAILER_BYTES:], b"GPUCRPAK\1\0\0\0" + data[-TRAILER_BYTES + 12 :]):
        with pytest.raises((Changed, CutShort)):
            pack.decode_trailer(tail, PACK_ID, size_bytes)


def test_another_pack_under_its_name() -> None:
    with pytest.raises(Changed, match=f"it is the pack {PACK_ID.hex()}"):
        contents_of(packed(ENTRIES, None), None, b"x" * 16)


def test_a_pack_of_another_kind_of_store() -> None:
    with pytest.raises(Changed, match="encrypted and its store is not"):
        contents_of(packed(ENTRIES, CIPHERS[1]), None)
    with pytest.raises(Changed, match="encrypted and its store is not"):
        contents_of(packed(ENTRIES, None), CIPHERS[1])


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([entry(1, 1), entry(2, 0)], "overlap"),
        ([entry(1, 0, 5000), entry(2, 1)], "overlap"),
        ([entry(1, 0, 0)], "0 bytes for 200"),
        ([entry(1, 0, 100, 0)], "100 bytes for 0"),
        ([entry(1, 0, 100, (64 << 20) + 1)], "for 67108865"),
        ([entry(1, 0, (64 << 20) + 17)], "67108881 bytes"),
        ([Entry(ZERO_ID, 0, 1, 1, 0)], "not stored"),
        ([entry(1, 7)], "end at byte 32768, and it has 28672"),
    ],
)
def test_impossible_entries(entries: list[Entry], message: str) -> None:
    with pytest.raises(Changed, match=message):
        contents_of(packed(entries, None), None)


def test_truncated_entries() -> None:
    with pytest.raises(Changed, match="no whole number"):
        pack.check_entries(bytes(47), 1 << 30)


@given(st.binary(max_size=16))
def test_names_of_packs(data: bytes) -> None:
    assert pack.pack_id_of(data.hex()) is None
    if len(data) == 16:
        assert pack.pack_id_of(pack.pack_name(data)) == data
        assert pack.pack_id_of(pack.pack_name(data).upper()) is None
    for name in ("", "packs/", "packs/00/zz", f"packs/zz/{PACK_ID.hex()}", f"index/00/{PACK_ID.hex()}"):
        assert pack.pack_id_of(name) is None


# --- the index ---------------------------------------------------------------------------------------------------


def contents(number: int, entries: list[Entry]) -> PackContents:
    return PackContents(bytes([number]) * 16, 1 << 20, pack.pack_entries(entries))


@given(st.lists(st.integers(0, 20), max_size=8))
def test_an_index_round_trip(counts: list[int]) -> None:
    packs = [contents(n, [entry(100 * n + i, i) for i in range(count)]) for n, count in enumerate(counts)]
    assert index.decode(index.encode(packs)) == packs


@given(st.binary(max_size=300).flatmap(lambda tail: st.sampled_from([tail, b"GPUCRIX1" + tail])))
def test_any_bytes_are_an_index_or_refused(data: bytes) -> None:
    try:
        found = index.decode(data)
    except Changed:
        return
    assert index.decode(index.encode(found)) == found


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "an index of 0 bytes"),
        (struct.pack("<8sI4x", b"GPUCRIX2", 0), "begins with"),
        (struct.pack("<8sI4x", b"GPUCRIX1", 0xFFFFFFFF), "claims 4294967295 packs and holds 0"),
        (struct.pack("<8sI4x16sQI4x", b"GPUCRIX1", 1, PACK_ID, 1, 0xFFFFFFFF), "claims 4294967295 pieces"),
        (struct.pack("<8sI4x16sQI4x", b"GPUCRIX1", 1, PACK_ID, 1, 2) + bytes(48), "claims 2 pieces"),
        (struct.pack("<8sI4x", b"GPUCRIX1", 0) + b"x", "longer"),
    ],
)
def test_an_index_that_claims_too_much(data: bytes, message: str) -> None:
    with pytest.raises(Changed, match=message):
        index.decode(data)


def test_the_location_of_a_piece() -> None:
    found = Index()
    found.add(contents(1, ENTRIES))
    found.add(contents(2, [entry(3, 0), entry(4, 2)]))
    found.add(contents(2, [entry(5, 0)]))
    assert found.pieces == 4
    assert [len(each.entries) // 48 for each in found.packs] == [3, 2]
    for each in ENTRIES:
        assert found.find(each.id) == (b"\1" * 16, *each[1:])
    place = found.find(entry(4, 0).id)
    assert place is not None
    assert (place.pack_id, place.offset, place.end) == (b"\2" * 16, 2 * BLOCK_BYTES, 3 * BLOCK_BYTES)
    assert found.find(entry(5, 0).id) is None
    assert found.pack(b"\2" * 16) is not None
    assert found.pack(b"\3" * 16) is None


def test_the_index_of_a_store(secret: Secret | None) -> None:
    store = Store.create(MemoryBackend(), secret=secret)
    assert index.load(store).pieces == 0
    index.publish(store, [contents(1, ENTRIES)])
    index.publish(store, [contents(2, [entry(4, 0)]), contents(1, ENTRIES)])
    assert index.load(store).pieces == 4
    assert index.load(store, without=[b"\1" * 16]).pieces == 1
    assert len(list(index.load_objects(store))) == 2


def test_many_pieces_make_several_index_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "_ENTRIES_AN_OBJECT", 4)
    store = Store.create(MemoryBackend())
    names = index.publish(store, [contents(n, [entry(10 * n + i, i) for i in range(3)]) for n in range(5)])
    assert len(names) == 5
    assert index.load(store).pieces == 15
    assert index.publish(store, []) == []


def test_an_index_object_replaced_by_a_concurrent_prune() -> None:
    place = FaultyBackend(MemoryBackend())
    store = Store.create(place)
    first, second = (index.publish(store, [contents(n, [entry(n, 0)])])[0] for n in (1, 2))

    def vanish(operation: str, name: str) -> None:
        if (operation, name) == ("read", first):
            place.inner.delete(first)

    place.fault = vanish
    assert [name for name, _ in index.load_objects(store)] == [second]


@pytest.mark.parametrize("kind", ["truncated", "flipped", "too large"])
def test_a_damaged_index_object(kind: str, secret: Secret | None, monkeypatch: pytest.MonkeyPatch) -> None:
    place = MemoryBackend()
    store = Store.create(place, secret=secret)
    (name,) = index.publish(store, [contents(1, ENTRIES)])
    data, at = place.objects[name]
    broken = {"truncated": data[:-1], "flipped": data[:70] + bytes([data[70] ^ 1]) + data[71:], "too large": data}
    place.objects[name] = (broken[kind], at)
    if kind == "too large":
        monkeypatch.setattr(index, "MAX_INDEX_BYTES", len(data) - 1)
    message = {"truncated": "is cut short", "flipped": "is not what was written", "too large": "is larger than"}[kind]
    with pytest.raises(StoreDamaged, match=f"memory:/{name} {message}"):
        index.load(store)


def test_a_sealed_object_that_is_not_an_index() -> None:
    store = Store.create(MemoryBackend())
    store.backend.create("index/a", store.seal("index/a", b"something else entirely"))
    with pytest.raises(StoreDamaged, match="memory:/index/a is not valid: it begins with"):
        index.load(store)


# --- footers of a store ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 3, 3000])
def test_the_contents_of_a_pack_in_a_store(count: int, secret: Secret | None) -> None:
    place = MemoryBackend()
    store = Store.create(place, secret=secret)
    entries = [entry(number, number) for number in range(count)]
    cipher = store.keys.pack(PACK_ID) if store.keys else None
    end = count * BLOCK_BYTES
    place.create(
        pack.pack_name(PACK_ID), bytes(end) + pack.encode_end(PACK_ID, end, pack.pack_entries(entries), cipher)
    )
    assert list(pack.iter_entries(index.read_footer(store, PACK_ID).entries)) == entries


def test_unreadable_packs() -> None:
    name = pack.pack_name(PACK_ID)
    whole = packed(ENTRIES, None)
    for broken, message in (
        (whole[:-5], "is cut short"),
        (whole[:ENTRIES_END] + b"x" + whole[ENTRIES_END + 1 :], "is not what was written: its footer differs"),
    ):
        with pytest.raises(StoreDamaged, match=f"memory:/{name} {message}"):
            index.read_footer(stored(broken), PACK_ID)
    with pytest.raises(StoreDamaged, match=f"memory:/{name} is missing"):
        index.read_footer(Store.create(MemoryBackend()), PACK_ID)
    place = FaultyBackend(MemoryBackend())
    store = Store.create(place)
    place.fault = lambda operation, found: "before" if found == name else None
    with pytest.raises(StoreError, match="cannot be used: Connection reset by peer"):
        index.read_footer(store, PACK_ID)

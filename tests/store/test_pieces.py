"""gpucr.store.pieces, codec and transform: stored data round-trips, and nothing else is accepted as it."""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import struct
import sys
from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpucr import extras
from gpucr.errors import BrokenInstall
from gpucr.linux.buffers import copy
from gpucr.store import codec, pieces, transform
from gpucr.store.codec import COMPRESS, Choice, Codec, Compress, Encoding
from gpucr.store.crypto import Changed
from gpucr.store.memory import AlignedBuffer, is_direct
from gpucr.store.pace import Pace
from gpucr.store.pieces import ZERO_ID, PieceListError, PieceRef

refs = st.builds(PieceRef, st.binary(min_size=32, max_size=32), st.integers(1, pieces.MAX_PIECE_BYTES))


def floats(count: int, width: int, seed: int = 1) -> bytes:
    """Numbers like weights: float32, or their upper halves (bfloat16)."""
    numbers = np.random.default_rng(seed).normal(0, 0.02, count).astype("<f4").view("<u4")
    return bytes((numbers >> (32 - 8 * width)).astype(f"<u{width}").tobytes())


# --- names -----------------------------------------------------------------------------------------------------


def test_names_are_the_plain_digests() -> None:
    assert pieces.digest_function("sha256", None)(b"abc") == hashlib.sha256(b"abc").digest()
    # The first test vector of BLAKE3 for no input at all.
    empty = "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"
    assert pieces.digest_function("blake3", None)(b"").hex() == empty


def test_a_key_changes_the_names() -> None:
    names = {pieces.digest_function("blake3", key)(b"abc") for key in (None, bytes(32), b"k" * 32)}
    assert len(names) == 3


@pytest.mark.parametrize(("hash_name", "key"), [("sha256", bytes(32)), ("md5", None)])
def test_an_unavailable_hash(hash_name: str, key: bytes | None) -> None:
    with pytest.raises(ValueError, match=hash_name):
        pieces.digest_function(hash_name, key)


def test_a_missing_library_is_reported() -> None:
    with pytest.raises(BrokenInstall, match="trying it needs the Python package gpucr_lacks_this") as caught:
        extras.load("gpucr_lacks_this.part", "trying it")
    assert caught.value.hint == f"install it beside gpucr: {sys.executable} -m pip install 'gpucr_lacks_this'"
    assert not extras.is_installed("gpucr_lacks_this")


@pytest.mark.parametrize("length", [0, 1, 2, 3, 4095, 4096, 100_001])
@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_only_zeros_are_found(length: int, kind: type) -> None:
    zeros = bytearray(length)
    assert pieces.is_zero(kind(zeros))
    for place in {0, length // 3, length // 2, length - 2, length - 1} & set(range(length)):
        zeros[place] = 1
        assert not pieces.is_zero(kind(zeros)), place
        zeros[place] = 0


# --- lists -----------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(refs, st.integers(1, 5)), max_size=20))
def test_a_list_round_trip(runs: list[tuple[PieceRef, int]]) -> None:
    whole = [ref for ref, count in runs for _ in range(count)]
    assert pieces.decode_list(pieces.encode_list(whole)) == whole


def test_a_terabyte_of_zeros_is_a_short_list() -> None:
    whole = [PieceRef(ZERO_ID, 4 << 20)] * (1 << 18)
    assert len(pieces.encode_list(whole)) < 100
    assert pieces.decode_list(pieces.encode_list(whole)) == whole


@given(st.binary(max_size=200) | st.builds(lambda tail: b"GPUCRPL1" + tail, st.binary(max_size=200)))
def test_any_bytes_are_a_list_or_refused(data: bytes) -> None:
    try:
        found = pieces.decode_list(data)
    except PieceListError:
        return
    assert pieces.decode_list(pieces.encode_list(found)) == found


@given(st.lists(refs, min_size=1, max_size=5), st.data())
def test_a_damaged_list_never_yields_lengths_it_does_not_declare(whole: list[PieceRef], data: st.DataObject) -> None:
    encoded = bytearray(pieces.encode_list(whole))
    encoded[data.draw(st.integers(0, len(encoded) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        found = pieces.decode_list(encoded)
    except PieceListError:
        return
    assert len(found) == struct.unpack_from("<Q", encoded, 8)[0]
    assert all(0 < ref.length <= pieces.MAX_PIECE_BYTES for ref in found)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ((b"GPUCRPL1", 2, 1, 1), "claims 2"),
        ((b"GPUCRPL1", 1, 1, 2), "more than the 1"),
        ((b"GPUCRPL1", 1, 1, 0), "empty run"),
        ((b"GPUCRPL1", 1, 0, 1), "0 bytes"),
        ((b"GPUCRPL1", 1, pieces.MAX_PIECE_BYTES + 1, 1), "bytes"),
        ((b"GPUCRPL1", 1 << 40, 1, 0xFFFFFFFF), "claims"),
        ((b"GPUCRPL2", 1, 1, 1), "begins with"),
    ],
)
def test_lists_that_claim_too_much(fields: tuple[bytes, int, int, int], message: str) -> None:
    magic, total, length, count = fields
    with pytest.raises(PieceListError, match=message):
        pieces.decode_list(struct.pack("<8sQ32sII", magic, total, b"x" * 32, length, count))


# --- byte planes and codecs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", transform.WIDTHS)
@given(data=st.binary(max_size=400))
def test_planes_round_trip(width: int, data: bytes) -> None:
    data = data[: len(data) // width * width]
    planes = bytes(transform.split(data, width))
    assert planes == b"".join(data[plane::width] for plane in range(width))
    assert bytes(transform.join(planes, width)) == data


@pytest.mark.parametrize("compress", COMPRESS)
@pytest.mark.parametrize("encoding", Encoding)
@given(st.binary(min_size=1, max_size=300), st.integers(1, 200))
def test_encoded_data_round_trip(compress: Compress, encoding: Encoding, unit: bytes, count: int) -> None:
    data = memoryview((unit * count) + bytes(-len(unit) * count % 4))
    if compress == "none":
        encoding = Encoding.RAW
    used, stored = Codec(compress).encode(data, encoding)
    assert used in (encoding, Encoding.RAW)
    assert len(stored) <= len(data)
    assert bytes(codec.decode(stored, used, len(data))) == data


_TEXT = b"".join(b"step %d: loss %f\n" % (step, 3 / (step + 1)) for step in range(20_000))


@pytest.mark.parametrize(
    ("data", "encoding", "most"),
    [
        (floats(1 << 18, 2), Encoding.PLANES2, 0.70),
        (floats(1 << 18, 4), Encoding.PLANES4, 0.86),
        (_TEXT, Encoding.ZSTD, 0.4),
        (np.random.default_rng(7).bytes(300_000), Encoding.RAW, 1.0),
    ],
    ids=["bf16", "fp32", "text", "random"],
)
@pytest.mark.parametrize("compress", ["auto", "fast", "strong"])
def test_a_sample_predicts_whether_compression_pays(
    data: bytes, encoding: Encoding, most: float, compress: Compress
) -> None:
    own = Codec(compress)
    choice = own.choose(memoryview(data))
    assert choice.encoding is encoding
    used, stored = own.encode(memoryview(data), choice.encoding)
    assert used is encoding
    assert len(stored) <= most * len(data)
    assert abs(1 - len(stored) / len(data) - choice.saved) < 0.25


def test_no_codec_is_tried_unless_requested() -> None:
    assert Codec("none").choose(memoryview(_TEXT)) == Choice(Encoding.RAW, 0.0)


def test_a_short_piece_still_fills_a_block() -> None:
    assert Codec("strong").choose(memoryview(bytes(range(256)) * 16)).encoding is Encoding.RAW


@pytest.mark.parametrize("length", [5000, 16 << 10, (16 << 10) + 1, 50_003])
def test_samples_of_every_length(length: int) -> None:
    data = memoryview((b"abcd" * length)[:length])
    used, stored = Codec("fast").encode(data, Codec("fast").choose(data).encoding)
    assert used is Encoding.ZSTD
    assert bytes(codec.decode(stored, used, length)) == data


def _stored(data: bytes) -> bytes:
    return cast(bytes, Codec("fast").encode(memoryview(data), Encoding.ZSTD)[1])


@pytest.mark.parametrize(
    ("stored", "encoding", "raw_length", "message"),
    [
        (b"abc", Encoding.RAW, 4, "3 bytes are stored of a piece of 4"),
        (b"abc", 9, 3, "encoding 9"),
        (b"abc", Encoding.ZSTD, 3, "cannot be read"),
        (_stored(bytes(1 << 16)), Encoding.ZSTD, 1 << 15, "does not claim 32768 bytes"),
        (_stored(bytes(1 << 16))[:-3], Encoding.ZSTD, 1 << 16, "cannot be read"),
        (_stored(bytes(65538)), Encoding.PLANES4, 65538, "65538 bytes"),
    ],
)
def test_data_no_codec_wrote(stored: bytes, encoding: int, raw_length: int, message: str) -> None:
    with pytest.raises(Changed, match=message):
        codec.decode(stored, encoding, raw_length)


@given(st.binary(max_size=100), st.sampled_from([1, 2, 3, 4, 255]), st.integers(1, 1 << 20))
def test_any_bytes_are_decoded_or_refused(stored: bytes, encoding: int, raw_length: int) -> None:
    with contextlib.suppress(Changed):
        assert len(codec.decode(stored, encoding, raw_length)) == raw_length


@given(st.data())
def test_a_flipped_bit_never_changes_the_length(data: st.DataObject) -> None:
    piece = _TEXT[:20_000]
    stored = bytearray(_stored(piece))
    stored[data.draw(st.integers(0, len(stored) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with contextlib.suppress(Changed):
        assert len(codec.decode(bytes(stored), Encoding.ZSTD, len(piece))) == len(piece)


# --- auto ------------------------------------------------------------------------------------------------------


def test_auto_compresses_while_writing_is_the_bottleneck() -> None:
    pace, choice = Pace(), Choice(Encoding.PLANES2, 0.3)
    pace.written(1 << 20, 0.010)
    assert [pace.pays(choice) for _ in range(3)] == [True, False, False], "one finds out"
    for _ in range(100):
        pace.compressed(Encoding.PLANES2, 1 << 20, 0.001)
        pace.written(1 << 20, 0.010)
    assert all(pace.pays(choice) for _ in range(50))
    for _ in range(200):
        pace.written(1 << 20, 0.001)
    answers = [pace.pays(choice) for _ in range(256)]
    assert answers.count(True) == 2, "now and then, to see whether that has changed"


# --- memory ----------------------------------------------------------------------------------------------------


def test_aligned_memory() -> None:
    buffer = AlignedBuffer(3 * mmap.PAGESIZE)
    assert is_direct(buffer.view, mmap.PAGESIZE)
    assert is_direct(buffer.view[mmap.PAGESIZE :], mmap.PAGESIZE)
    assert not is_direct(buffer.view[1 : mmap.PAGESIZE + 1], mmap.PAGESIZE)
    assert not is_direct(buffer.view[:100], mmap.PAGESIZE)
    assert not is_direct(buffer.view[:0], mmap.PAGESIZE)
    assert not is_direct(memoryview(bytes(mmap.PAGESIZE)), mmap.PAGESIZE)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, lambda data: memoryview(bytearray(data))])
def test_copies(kind: type) -> None:
    data = os.urandom(1000)
    into = bytearray(1001)
    copy(memoryview(into), kind(data))
    assert into == data + b"\0"
    with pytest.raises(ValueError, match="1001 bytes do not fit into 1000"):
        copy(memoryview(into)[:1000], bytes(1001))
    copy(memoryview(into), kind(b""))
    assert into == data + b"\0"

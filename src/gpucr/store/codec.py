"""How a piece is stored: raw, or compressed by Zstandard, whole or in byte planes.

A sample of 16 KiB decides. Numbers in byte planes get parameters that find (nearly) no matches and leave everything to
the entropy coder: smaller and more than twice as fast as level 1 (ADR 20).
"""

from __future__ import annotations

import threading
from enum import IntEnum
from typing import Any, Literal, NamedTuple, get_args

from gpucr import extras
from gpucr.store import transform
from gpucr.store.backend import Buffer
from gpucr.store.crypto import Changed

Compress = Literal["auto", "none", "fast", "strong"]
COMPRESS: tuple[Compress, ...] = get_args(Compress)


class Encoding(IntEnum):
    """How a piece is stored. The numbers are part of the format."""

    RAW = 0
    ZSTD = 1
    PLANES2 = 2
    PLANES4 = 3

    @property
    def width(self) -> int:
        """The size of a number in bytes if the piece is in byte planes; otherwise 1."""
        return {Encoding.PLANES2: 2, Encoding.PLANES4: 4}.get(self, 1)


class Choice(NamedTuple):
    """The encoding that a sample suggests, and the expected saving (0 to 1)."""

    encoding: Encoding
    saved: float


_LEAST_SAVED = {"auto": 0.08, "fast": 0.03, "strong": 0.02}
_LEVELS = {"auto": 1, "fast": 1, "strong": 9}
_SMALLEST_BYTES = 4096
"""Shorter pieces fill one block of a pack anyway."""
_SPOTS, _SPOT_BYTES = 4, 4096
_PURPOSE = "compression in a store"
_NUMBERS = 0.95
_MATCHED = 0.9
"""Sampled spots hold fewer matches than the whole piece: so prefer matches if they come this close to the planes."""


class Codec:
    """Compresses as ``compress`` says. Thread-safe; each thread has its own Zstandard contexts."""

    def __init__(self, compress: Compress) -> None:
        self.compress = compress
        self._own = threading.local()
        self._zstd: Any = extras.load("zstandard", _PURPOSE) if compress != "none" else None

    def choose(self, data: memoryview) -> Choice:
        """The encoding that a sample of the piece suggests."""
        if self._zstd is None or len(data) <= _SMALLEST_BYTES:
            return Choice(Encoding.RAW, 0.0)
        sample = _sample(data)
        best = Choice(Encoding.ZSTD, 1 - len(self._compressor(Encoding.ZSTD).compress(sample)) / len(sample))
        if len(data) % 4 == 0 and self._has_numbers(sample):
            for choice in _planes(sample):
                if choice.saved * _MATCHED > best.saved:
                    best = choice
        return best if best.saved >= _LEAST_SAVED[self.compress] else Choice(Encoding.RAW, 0.0)

    def encode(self, data: memoryview, encoding: Encoding) -> tuple[Encoding, Buffer]:
        """The encoded piece; raw if encoding would save less than a 4 KiB block."""
        if encoding is Encoding.RAW:
            return encoding, data
        planes = transform.split(data, encoding.width) if encoding.width > 1 else data
        stored: bytes = self._compressor(encoding).compress(planes)
        return (encoding, stored) if len(stored) + _SMALLEST_BYTES <= len(data) else (Encoding.RAW, data)

    def _has_numbers(self, sample: bytes) -> bool:
        """Whether every fourth byte, an exponent if these are numbers, can be compressed: 10 µs, the planes take 60."""
        tops = sample[3::4]
        return len(self._compressor(Encoding.PLANES4).compress(tops)) < _NUMBERS * len(tops)

    def _compressor(self, encoding: Encoding) -> Any:
        kind = "matches" if encoding is Encoding.ZSTD else "entropy"
        found = getattr(self._own, kind, None)
        if found is None:
            found = self._new_compressor(kind)
            setattr(self._own, kind, found)
        return found

    def _new_compressor(self, kind: str) -> Any:
        zstd = self._zstd
        if kind == "matches":
            return zstd.ZstdCompressor(level=_LEVELS[self.compress])
        parameters = zstd.ZstdCompressionParameters(
            window_log=17, hash_log=6, chain_log=6, search_log=1, min_match=7, target_length=0,
            strategy=zstd.STRATEGY_FAST,
        )  # fmt: skip
        return zstd.ZstdCompressor(compression_params=parameters)


def decode(stored: Buffer, encoding: int, raw_length: int) -> Buffer:
    """The piece. Raises Changed if it is not `Codec.encode`'s output for this many bytes."""
    if encoding == Encoding.RAW:
        if len(stored) != raw_length:
            raise Changed(f"{len(stored)} bytes are stored of a piece of {raw_length}")
        return stored
    if encoding not in (Encoding.ZSTD, Encoding.PLANES2, Encoding.PLANES4):
        raise Changed(f"encoding {encoding} is not one that this gpucr knows")
    zstd = extras.load("zstandard", _PURPOSE)
    try:
        # The size that a frame claims is allocated before anything is checked.
        if zstd.get_frame_parameters(stored).content_size != raw_length:
            raise Changed(f"the compressed piece does not claim {raw_length} bytes")
        data: bytes = _decompressor(zstd).decompress(stored, max_output_size=raw_length)
    except zstd.ZstdError as e:
        raise Changed(f"the compressed piece cannot be read: {e}") from e
    width = Encoding(encoding).width
    if len(data) != raw_length or raw_length % width:
        raise Changed(f"the compressed piece has {len(data)} bytes, not {raw_length}")
    return transform.join(data, width) if width > 1 else data


_own = threading.local()


def _decompressor(zstd: Any) -> Any:
    """One per thread: Zstandard contexts must not be shared."""
    if not hasattr(_own, "decompressor"):
        _own.decompressor = zstd.ZstdDecompressor()
    return _own.decompressor


def _sample(data: memoryview) -> bytes:
    if len(data) <= _SPOTS * _SPOT_BYTES:
        return bytes(data[: len(data) // 4 * 4])
    # At multiples of 4, so that the bytes of a number keep their places.
    step = (len(data) - _SPOT_BYTES) // (_SPOTS - 1) // 4 * 4
    return b"".join(data[spot * step : spot * step + _SPOT_BYTES] for spot in range(_SPOTS))


def _planes(sample: bytes) -> list[Choice]:
    counts = transform.histograms(sample)
    by_two = counts[:2] + counts[2:]
    return [
        Choice(encoding, 1 - transform.entropy_bytes(alphabets) / len(sample))
        for encoding, alphabets in ((Encoding.PLANES2, by_two), (Encoding.PLANES4, counts))
    ]

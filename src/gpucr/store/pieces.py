"""Pieces: the unit of deduplication. Their names, and snapshots' lists of them.

A piece is named by a digest of its content. In an encrypted store the digest is keyed, so a name does not confirm a
guess of the content. Pieces of zeros are not stored: a reference to one has the name `ZERO_ID`.
"""

from __future__ import annotations

import ctypes
import hashlib
import struct
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from typing import NamedTuple

from gpucr import extras
from gpucr.linux import libc
from gpucr.store.backend import Buffer

ID_BYTES = 32
ZERO_ID = bytes(ID_BYTES)
MAX_PIECE_BYTES = 64 << 20
MAX_LIST_PIECES = 1 << 26
"""256 TiB in pieces of 4 MiB."""

HASHES = ("blake3", "sha256")


Digest = Callable[[Buffer], bytes]

_LIST = struct.Struct("<8sQ")
_RUN = struct.Struct(f"<{ID_BYTES}sII")
_LIST_MAGIC = b"GPUCRPL1"


class PieceRef(NamedTuple):
    """A reference to a piece: its name and its length in bytes."""

    id: bytes
    length: int

    @property
    def is_zero(self) -> bool:
        """Whether it is all zeros, and so not stored."""
        return self.id == ZERO_ID


class PieceListError(ValueError):
    """The bytes are not a list of pieces. The message says why; the caller adds the origin."""


def digest_function(hash_name: str, key: bytes | None) -> Digest:
    """The function that names pieces: BLAKE3, keyed if there is a key, or SHA-256.

    Raises BrokenInstall if the library for it is missing.
    """
    if hash_name == "sha256" and key is None:
        return lambda buffer: hashlib.sha256(buffer).digest()
    if hash_name != "blake3":
        raise ValueError(f"no such hash, or none with a key: {hash_name!r}")
    blake3 = extras.load("blake3", "a store with BLAKE3 names").blake3
    if key is None:
        return lambda buffer: bytes(blake3(buffer).digest())
    return lambda buffer: bytes(blake3(buffer, key=key).digest())


def is_zero(buffer: Buffer) -> bool:
    """Whether all bytes are zero (True for an empty buffer)."""
    view = memoryview(buffer)
    if not view:
        return True
    # Most data differs in one of these, which saves checking the rest.
    if view[0] or view[-1] or view[len(view) // 2]:
        return False
    if view.readonly:
        return view.tobytes().count(0) == len(view)
    address = ctypes.addressof(ctypes.c_char.from_buffer(view))
    # Compare the buffer with itself shifted by one byte: memcmp stops at the first difference, and runs without the
    # GIL.
    return libc.memcmp(address, address + 1, len(view) - 1) == 0


def encode_list(refs: Iterable[PieceRef]) -> bytes:
    """A list of pieces as bytes, run-length encoded."""
    runs: list[bytes] = []
    total = 0
    for ref, same in groupby(refs):
        count = sum(1 for _ in same)
        total += count
        runs.append(_RUN.pack(ref.id, ref.length, count))
    if total > MAX_LIST_PIECES:
        raise ValueError(f"a list of {total} pieces is more than {MAX_LIST_PIECES}")
    return _LIST.pack(_LIST_MAGIC, total) + b"".join(runs)


def decode_list(data: Buffer, most: int = MAX_LIST_PIECES) -> list[PieceRef]:
    """The pieces of a list.

    Raises PieceListError for anything that `encode_list` cannot have written, and for too many.
    """
    if len(data) < _LIST.size or (len(data) - _LIST.size) % _RUN.size:
        raise PieceListError(f"{len(data)} bytes are no list of pieces")
    magic, total = _LIST.unpack_from(data)
    if magic != _LIST_MAGIC:
        raise PieceListError(f"it begins with {magic!r}, not {_LIST_MAGIC!r}")
    if total > most:
        raise PieceListError(f"it claims {total} pieces, more than {most}")
    refs: list[PieceRef] = []
    for piece_id, length, count in _RUN.iter_unpack(memoryview(data)[_LIST.size :]):
        if not 0 < length <= MAX_PIECE_BYTES:
            raise PieceListError(f"a piece has {length} bytes")
        if not 0 < count <= total - len(refs):
            raise PieceListError(f"it holds more than the {total} pieces that it claims, or an empty run")
        refs.extend([PieceRef(piece_id, length)] * count)
    if len(refs) != total:
        raise PieceListError(f"it holds {len(refs)} pieces and claims {total}")
    return refs


def cut(buffer: Buffer, piece_bytes: int) -> Iterator[memoryview]:
    """The buffer in pieces of this size; the last one may be shorter."""
    view = memoryview(buffer)
    for start in range(0, len(view), piece_bytes):
        yield view[start : start + piece_bytes]

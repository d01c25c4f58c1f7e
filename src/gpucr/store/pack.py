"""Packs: many pieces in one self-describing object, written once.

::

    piece, zeros up to a multiple of 4096 piece, zeros ... footer (encrypted if the store is): one entry of 48 bytes for
    each piece, in the order of their offsets zeros up to a multiple of 4096, less the trailer trailer, 64 bytes

    entry    piece id (32), first block (u32), stored length (u32), raw length (u32), encoding (u8), zeros (3)
    trailer  "GPUCRPAK", version (u16), flags (u16: 1 encrypted), entries (u32), pack id (16), first block of the footer
             (u32), stored length of the footer (u32), zeros (8), the first 16 bytes of the SHA-256 of the stored footer
             followed by the trailer up to here

Numbers are little-endian. A block is 4096 bytes: everything starts at one, so that it can be written and read past the
page cache; its number is also the nonce of what is encrypted there.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from msgspec import Struct

from gpucr.store.backend import Buffer
from gpucr.store.crypto import TAG_BYTES, Changed, CutShort, PackCipher
from gpucr.store.pieces import ID_BYTES, MAX_PIECE_BYTES, ZERO_ID

PREFIX = "packs/"
BLOCK_BYTES = 4096
PACK_ID_BYTES = 16
ENTRY_BYTES = 48
TRAILER_BYTES = 64
MAX_STORED_BYTES = MAX_PIECE_BYTES + TAG_BYTES
"""A piece that does not compress is stored raw."""
MAX_ENTRIES = 1 << 20

_ENTRY = struct.Struct(f"<{ID_BYTES}sIIIB3x")
_TRAILER = struct.Struct(f"<8sHHI{PACK_ID_BYTES}sII8x")
_DIGEST_BYTES = TRAILER_BYTES - _TRAILER.size
_MAGIC = b"GPUCRPAK"
_VERSION = 1
_ENCRYPTED = 1
_BOUND = struct.Struct(f"<{ID_BYTES}sIB")


class Place(NamedTuple):
    """Where a piece is. ``block`` is its first block in the pack, the lengths are in bytes."""

    pack_id: bytes
    block: int
    stored_length: int
    raw_length: int
    encoding: int

    @property
    def offset(self) -> int:
        """The offset of its first byte in the pack."""
        return self.block * BLOCK_BYTES

    @property
    def end(self) -> int:
        """The offset of the first block after it."""
        return self.offset + padded(self.stored_length)


class Entry(NamedTuple):
    """One piece of a pack, as footers and the index have it."""

    id: bytes
    block: int
    stored_length: int
    raw_length: int
    encoding: int


class PackContents(Struct, frozen=True):
    """A pack's content. ``entries`` are packed: 48 bytes per piece, see `iter_entries`."""

    pack_id: bytes
    size_bytes: int
    entries: bytes

    @property
    def name(self) -> str:
        """The name of the object."""
        return pack_name(self.pack_id)


def new_pack_id() -> bytes:
    """A unique name: 128 random bits."""
    return os.urandom(PACK_ID_BYTES)


def pack_name(pack_id: bytes) -> str:
    """The name of the pack's object."""
    text = pack_id.hex()
    return f"{PREFIX}{text[:2]}/{text}"


def pack_id_of(name: str) -> bytes | None:
    """The pack of this object name; None: not a pack."""
    text = name.rpartition("/")[2]
    try:
        pack_id = bytes.fromhex(text)
    except ValueError:
        return None
    return pack_id if len(pack_id) == PACK_ID_BYTES and pack_name(pack_id) == name else None


def padded(length: int) -> int:
    """The length in whole blocks, in bytes."""
    return -(-length // BLOCK_BYTES) * BLOCK_BYTES


def bound(piece_id: bytes, raw_length: int, encoding: int) -> bytes:
    """Additional authenticated data of an encrypted piece."""
    return _BOUND.pack(piece_id, raw_length, encoding)


def pack_entries(entries: Iterable[Entry]) -> bytes:
    """The entries as footers and the index have them."""
    return b"".join(_ENTRY.pack(*entry) for entry in entries)


def iter_entries(entries: Buffer) -> Iterator[Entry]:
    """The entries of a footer or an index that `check_entries` has passed."""
    return map(Entry._make, _ENTRY.iter_unpack(entries))


def check_entries(entries: Buffer, size_bytes: int) -> None:
    """Raise Changed if the entries cannot be those of a pack of this size."""
    if len(entries) % ENTRY_BYTES or len(entries) > MAX_ENTRIES * ENTRY_BYTES:
        raise Changed(f"its {len(entries)} bytes of entries are no whole number of them, or too many")
    position = 0
    for entry in iter_entries(entries):
        if entry.block * BLOCK_BYTES < position:
            raise Changed("two of its pieces overlap")
        if not (0 < entry.raw_length <= MAX_PIECE_BYTES and 0 < entry.stored_length <= MAX_STORED_BYTES):
            raise Changed(f"one of its pieces has {entry.stored_length} bytes for {entry.raw_length}")
        if entry.id == ZERO_ID:
            raise Changed("one of its pieces has the name of those that are not stored")
        position = entry.block * BLOCK_BYTES + padded(entry.stored_length)
    if position > size_bytes:
        raise Changed(f"its pieces end at byte {position}, and it has {size_bytes}")


def encode_end(pack_id: bytes, offset: int, entries: bytes, cipher: PackCipher | None) -> bytes:
    """Footer and trailer of a pack whose pieces end at this offset: whole blocks."""
    block, footer = offset // BLOCK_BYTES, entries
    if cipher is not None:
        sealed = bytearray(len(entries) + TAG_BYTES)
        cipher.encrypt(block, entries, pack_id, memoryview(sealed))
        footer = bytes(sealed)
    count = len(entries) // ENTRY_BYTES
    fields = _TRAILER.pack(_MAGIC, _VERSION, _ENCRYPTED if cipher else 0, count, pack_id, block, len(footer))
    trailer = fields + hashlib.sha256(footer + fields).digest()[:_DIGEST_BYTES]
    return footer + bytes(padded(len(footer) + TRAILER_BYTES) - len(footer) - TRAILER_BYTES) + trailer


class Trailer(Struct, frozen=True):
    """The last 64 bytes of a pack. ``footer_offset`` and ``footer_length`` say where its footer is."""

    pack_id: bytes
    encrypted: bool
    count: int
    footer_offset: int
    footer_length: int
    fields: bytes
    digest: bytes


def decode_trailer(data: Buffer, pack_id: bytes, size_bytes: int) -> Trailer:
    """The trailer of this pack, which has this many bytes. Raises CutShort if there is none, Changed for a bad one."""
    if len(data) < TRAILER_BYTES or size_bytes < TRAILER_BYTES or bytes(data[:8]) != _MAGIC:
        raise CutShort(f"it has {size_bytes} bytes, and its end is missing")
    fields = bytes(data[: _TRAILER.size])
    _, version, flags, count, found_id, block, length = _TRAILER.unpack(fields)
    if version != _VERSION:
        raise Changed(f"it has version {version} of the format; this gpucr reads version {_VERSION}")
    if found_id != pack_id:
        raise Changed(f"it is the pack {found_id.hex()}")
    encrypted = bool(flags & _ENCRYPTED)
    offset = block * BLOCK_BYTES
    if flags & ~_ENCRYPTED or count > MAX_ENTRIES or length != count * ENTRY_BYTES + encrypted * TAG_BYTES:
        raise Changed("its trailer is not valid")
    if offset + padded(length + TRAILER_BYTES) != size_bytes:
        raise Changed(f"its footer ends elsewhere than at its {size_bytes} bytes")
    return Trailer(pack_id, encrypted, count, offset, length, fields, bytes(data[_TRAILER.size : TRAILER_BYTES]))


def decode_footer(footer: Buffer, trailer: Trailer, size_bytes: int, cipher: PackCipher | None) -> PackContents:
    """The pack's contents. Raises CutShort, Changed."""
    if len(footer) < trailer.footer_length:
        raise CutShort("it ends in its footer")
    digest = hashlib.sha256(footer)
    digest.update(trailer.fields)
    if digest.digest()[:_DIGEST_BYTES] != trailer.digest:
        raise Changed("its footer differs from its digest")
    if trailer.encrypted != (cipher is not None):
        raise Changed("it is encrypted and its store is not, or the other way round")
    entries = bytes(footer)
    if cipher is not None:
        entries = cipher.decrypt(trailer.footer_offset // BLOCK_BYTES, footer, trailer.pack_id)
    check_entries(entries, trailer.footer_offset)
    return PackContents(trailer.pack_id, size_bytes, entries)

"""Encryption of encrypted stores, and integrity of all stores.

All keys come from one random master key of 32 bytes, by HKDF-SHA256 with the store's id as salt and a purpose as info,
so no key serves two purposes. Data uses AES-256-GCM. Each pack has its own key, and the nonce of an item is the number
of its first 4 KiB block: packs are never rewritten and their names are random, so no pair of key and nonce occurs
twice. Sealed objects (index, snapshots, ...) have a key for each name, and a random nonce.

Without encryption a sealed object still has its digest: a flipped bit is found in both kinds of store.
"""

from __future__ import annotations

import hashlib
import os
import struct
from functools import lru_cache
from typing import Any

from gpucr import extras
from gpucr.store.backend import Buffer

KEY_BYTES = 32
TAG_BYTES = 16
NONCE_BYTES = 12

_SEALED_MAGIC = b"GPUCROBJ"
_VERSION = 1
_ENCRYPTED = 1
_HEADER = struct.Struct(f"<8sHHIQ{NONCE_BYTES}s12x")
_DIGEST_BYTES = 32
SEALED_OVERHEAD_BYTES = _HEADER.size + _DIGEST_BYTES + TAG_BYTES
_PURPOSE = "an encrypted store"


class CutShort(ValueError):
    """The bytes are truncated."""


class Changed(ValueError):
    """The bytes differ from what was written."""


class KeyRing:
    """The keys of one encrypted store, all made from its master key."""

    def __init__(self, master: bytes, store_id: bytes) -> None:
        self._master = master
        self._store_id = store_id
        self._hashes = extras.load("cryptography.hazmat.primitives.hashes", _PURPOSE)
        self._hkdf = extras.load("cryptography.hazmat.primitives.kdf.hkdf", _PURPOSE).HKDF
        self._aead = extras.load("cryptography.hazmat.primitives.ciphers.aead", _PURPOSE).AESGCM
        self.pack = lru_cache(maxsize=256)(self._pack)

    @property
    def master(self) -> bytes:
        """The master key: to wrap it for another key file or passphrase."""
        return self._master

    def derive(self, purpose: bytes) -> bytes:
        """A key of 32 bytes for this purpose (RFC 5869, HKDF-SHA256)."""
        hkdf = self._hkdf(self._hashes.SHA256(), KEY_BYTES, salt=self._store_id, info=b"gpucr-store 1: " + purpose)
        return bytes(hkdf.derive(self._master))

    def _pack(self, pack_id: bytes) -> PackCipher:
        return PackCipher(self._aead(self.derive(b"pack " + pack_id)))

    def sealed(self, name: str) -> Any:
        """The AEAD for the sealed object of this name."""
        return self._aead(self.derive(b"object " + name.encode()))


class PackCipher:
    """AES-256-GCM with the key of one pack. Thread-safe."""

    def __init__(self, aead: Any) -> None:
        self._aead = aead

    def encrypt(self, block: int, data: Buffer, bound: bytes, into: memoryview) -> None:
        """Encrypt the item at this 4 KiB block into a buffer, 16 bytes longer than the data for the tag.

        ``bound`` is authenticated with it, and not written.
        """
        self._aead.encrypt_into(_nonce(block), data, bound, into)

    def decrypt(self, block: int, stored: Buffer, bound: bytes) -> bytes:
        """The data. Raises Changed if it was not encrypted for this place with ``bound``."""
        try:
            return bytes(self._aead.decrypt(_nonce(block), stored, bound))
        except _invalid_tag() as e:
            raise Changed("it differs from what was encrypted") from e


def _nonce(block: int) -> bytes:
    return block.to_bytes(NONCE_BYTES, "big")


def _invalid_tag() -> type[Exception]:
    found: type[Exception] = extras.load("cryptography.exceptions", _PURPOSE).InvalidTag
    return found


def seal(name: str, data: Buffer, keys: KeyRing | None) -> bytes:
    """The bytes of a small object: with its digest, bound to its name, encrypted if there are keys."""
    nonce = os.urandom(NONCE_BYTES) if keys else bytes(NONCE_BYTES)
    stored_bytes = len(data) + (TAG_BYTES if keys else 0)
    header = _HEADER.pack(_SEALED_MAGIC, _VERSION, _ENCRYPTED if keys else 0, 0, stored_bytes, nonce)
    body = bytes(keys.sealed(name).encrypt(nonce, data, header)) if keys else bytes(data)
    return header + body + _digest(name, header, body)


def unseal(name: str, sealed: Buffer, keys: KeyRing | None) -> bytes:
    """The inverse of `seal`. Raises CutShort if the end is missing, Changed for everything else."""
    view = memoryview(sealed)
    if len(view) < _HEADER.size:
        raise CutShort(f"it has {len(view)} bytes, less than its header")
    header, rest = view[: _HEADER.size], view[_HEADER.size :]
    magic, version, flags, reserved, stored_bytes, nonce = _HEADER.unpack(header)
    if magic != _SEALED_MAGIC or flags & ~_ENCRYPTED or reserved:
        raise Changed("it does not begin as a sealed object does")
    if version != _VERSION:
        raise Changed(f"it has version {version} of the format; this gpucr reads version {_VERSION}")
    if len(rest) < stored_bytes + _DIGEST_BYTES:
        raise CutShort(f"it has {len(view)} bytes of {_HEADER.size + stored_bytes + _DIGEST_BYTES}")
    if len(rest) > stored_bytes + _DIGEST_BYTES:
        raise Changed("it is longer than what was written")
    body, digest = rest[:stored_bytes], rest[stored_bytes:]
    if _digest(name, header, body) != digest:
        raise Changed("it differs from its digest")
    if bool(flags & _ENCRYPTED) != (keys is not None):
        # Somebody who can write to the store must not be able to forge objects.
        raise Changed("it is not encrypted, in a store that is" if keys else "it is encrypted, in a store that is not")
    if keys is None:
        return bytes(body)
    try:
        return bytes(keys.sealed(name).decrypt(nonce, body, header))
    except _invalid_tag() as e:
        raise Changed("it was not encrypted with the key of this store, or not under this name") from e


def _digest(name: str, header: Buffer, body: Buffer) -> bytes:
    digest = hashlib.sha256(header)
    digest.update(name.encode() + b"\0")
    digest.update(body)
    return digest.digest()

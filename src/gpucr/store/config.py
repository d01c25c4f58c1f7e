"""``gpucr-store.json``: a store's parameters, fixed when it is made.

::

    {"store": {"format": "gpucr-store", "version": 1, "id": HEX, "hash": "blake3" or "sha256",
               "piece_bytes": ..., "pack_bytes": ..., "cipher": "aes-256-gcm" or null},
     "sha256": HEX, "mac": HEX or null}

``sha256`` is the digest of the inner object in canonical form (sorted keys, no spaces). ``mac`` is its HMAC-SHA256 in
an encrypted store, so that nobody without the key can change it.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from gpucr import records
from gpucr.records import Record, RecordError
from gpucr.store.pieces import HASHES, MAX_PIECE_BYTES

NAME = "gpucr-store.json"
FORMAT, VERSION = "gpucr-store", 1
MAX_CONFIG_BYTES = 64 << 10

PIECE_BYTES = 2 << 20
"""The driver's allocation unit of device memory: data that moves by an allocation keeps its pieces."""
PACK_BYTES = 60 << 20
"""With its last piece and its footer still below 64 MiB: one conditional request of an object store."""
_MIN_PIECE_BYTES = 4096
_MAX_PACK_BYTES = 1 << 32
_ID_BYTES = 16


class StoreConfig(Record, frozen=True):
    """A store's fixed parameters.

    ``id`` in hexadecimal. ``piece_bytes`` is the size into which data is cut (a power of two), ``pack_bytes`` the size
    at which a pack is closed. Raises RecordError for values that a reader would refuse.
    """

    id: Annotated[str, Meta(pattern=r"\A[0-9a-f]{32}\Z")]
    hash: str
    piece_bytes: int = PIECE_BYTES
    pack_bytes: int = PACK_BYTES
    cipher: Literal["aes-256-gcm"] | None = None
    format: str = FORMAT
    version: int = VERSION

    def __post_init__(self) -> None:
        piece, pack = self.piece_bytes, self.pack_bytes
        if self.hash not in HASHES:
            raise RecordError(f"its hash is {self.hash!r}, which this gpucr does not know")
        if self.encrypted and self.hash != "blake3":
            raise RecordError("an encrypted store names its pieces by BLAKE3")
        if not _MIN_PIECE_BYTES <= piece <= MAX_PIECE_BYTES or piece & (piece - 1):
            raise RecordError(f"pieces of {piece} bytes: no power of two from {_MIN_PIECE_BYTES} to {MAX_PIECE_BYTES}")
        if not piece <= pack <= _MAX_PACK_BYTES:
            raise RecordError(f"packs of {pack} bytes do not fit pieces of {piece}")

    @property
    def store_id(self) -> bytes:
        """Its id."""
        return bytes.fromhex(self.id)

    @property
    def encrypted(self) -> bool:
        """Whether it has a cipher."""
        return self.cipher is not None

    @classmethod
    def new(cls, hash_name: str, *, encrypted: bool, piece_bytes: int, pack_bytes: int) -> StoreConfig:
        """The configuration of a new store. Raises RecordError for values that a reader would refuse."""
        return cls(
            os.urandom(_ID_BYTES).hex(), hash_name, piece_bytes, pack_bytes, "aes-256-gcm" if encrypted else None
        )


class _Sealed(Record, frozen=True):
    store: dict[str, Any]
    sha256: str
    mac: str | None


def encode(config: StoreConfig, mac_key: bytes | None) -> bytes:
    """The bytes of ``gpucr-store.json``."""
    canonical = _canonical(config)
    mac = hmac.new(mac_key, canonical, "sha256").hexdigest() if mac_key else None
    return records.encode(_Sealed(msgspec.to_builtins(config), hashlib.sha256(canonical).hexdigest(), mac))


def decode(data: bytes) -> tuple[StoreConfig, str | None]:
    """The configuration, and the code to give to `check_mac` when there is a key. Raises RecordError."""
    if len(data) > MAX_CONFIG_BYTES:
        raise RecordError(f"it is larger than {MAX_CONFIG_BYTES} bytes")
    outer = records.decode(data, _Sealed)
    config = records.convert(records.of_format(outer.store, format=FORMAT, version=VERSION), StoreConfig)
    if hashlib.sha256(_canonical(config)).hexdigest() != outer.sha256:
        raise RecordError("it differs from its own digest")
    if not (outer.mac is not None and outer.mac.isascii() if config.encrypted else outer.mac is None):
        raise RecordError("its `mac` does not fit its `cipher`")
    return config, outer.mac


def check_mac(config: StoreConfig, mac: str | None, mac_key: bytes) -> None:
    """Raise RecordError if somebody without the key has changed the configuration."""
    expected = hmac.new(mac_key, _canonical(config), "sha256").hexdigest()
    if mac is None or not hmac.compare_digest(mac, expected):
        raise RecordError("it was changed without the key")


def _canonical(config: StoreConfig) -> bytes:
    return json.dumps(msgspec.to_builtins(config), sort_keys=True, separators=(",", ":")).encode()

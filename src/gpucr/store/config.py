"""``gpucr-store.json``: what is decided once for a store, when it is made.

::

    {"store": {"format": "gpucr-store", "version": 1, "id": HEX, "hash": "blake3" or "sha256",
               "piece_bytes": ..., "pack_bytes": ..., "cipher": "aes-256-gcm" or null},
     "sha256": HEX, "mac": HEX or null}

``sha256`` is the digest of the inner object in canonical form (sorted keys, no spaces). ``mac`` is its HMAC-SHA256 in
an encrypted store, so that who writes to the store cannot change what was decided.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpucr.store.pieces import HASHES, MAX_PIECE_BYTES

NAME = "gpucr-store.json"
FORMAT, VERSION = "gpucr-store", 1
CIPHER = "aes-256-gcm"
MAX_CONFIG_BYTES = 64 << 10

PIECE_BYTES = 2 << 20
"""The unit in which the driver hands out device memory: what moves by an allocation keeps its pieces."""
PACK_BYTES = 60 << 20
"""With its last piece and its footer still below 64 MiB: one conditional request of an object store."""
_MIN_PIECE_BYTES = 4096
_MAX_PACK_BYTES = 1 << 32
_ID_BYTES = 16


class ConfigError(ValueError):
    """The bytes are no valid configuration of a store. The message says why; the caller knows where they come from."""


@dataclass(frozen=True)
class StoreConfig:
    """What is decided once for a store.

    ``piece_bytes`` is the size into which data is cut (a power of two), ``pack_bytes`` the size at which a pack is
    closed.
    """

    store_id: bytes
    hash: str
    piece_bytes: int = PIECE_BYTES
    pack_bytes: int = PACK_BYTES
    encrypted: bool = False

    @classmethod
    def new(cls, hash_name: str, *, encrypted: bool, piece_bytes: int, pack_bytes: int) -> StoreConfig:
        """The configuration of a store that is being made. Raises ConfigError for what a reader would refuse."""
        config = cls(os.urandom(_ID_BYTES), hash_name, piece_bytes, pack_bytes, encrypted)
        _check(config)
        return config

    def members(self) -> dict[str, Any]:
        """The inner object."""
        return {
            "format": FORMAT, "version": VERSION, "id": self.store_id.hex(), "hash": self.hash,
            "piece_bytes": self.piece_bytes, "pack_bytes": self.pack_bytes,
            "cipher": CIPHER if self.encrypted else None,
        }  # fmt: skip


def encode(config: StoreConfig, mac_key: bytes | None) -> bytes:
    """The bytes of ``gpucr-store.json``."""
    members = config.members()
    canonical = _canonical(members)
    mac = hmac.new(mac_key, canonical, "sha256").hexdigest() if mac_key else None
    body = {"store": members, "sha256": hashlib.sha256(canonical).hexdigest(), "mac": mac}
    return json.dumps(body, indent=1).encode() + b"\n"


def decode(data: bytes) -> tuple[StoreConfig, str | None]:
    """The configuration, and the code to give to `check_mac` when there is a key. Raises ConfigError."""
    if len(data) > MAX_CONFIG_BYTES:
        raise ConfigError(f"it is larger than {MAX_CONFIG_BYTES} bytes")
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as e:
        raise ConfigError(f"it is not JSON: {e}") from e
    members = body.get("store") if isinstance(body, dict) else None
    if not isinstance(members, dict) or members.get("format") != FORMAT:
        raise ConfigError("it does not describe a store")
    if members.get("version") != VERSION:
        raise ConfigError(f"it has version {members.get('version')!r}; this gpucr reads version {VERSION}")
    config = _config(members)
    # Its own members alone: a digest of others would hide that this gpucr does not know them.
    if members != config.members() or hashlib.sha256(_canonical(members)).hexdigest() != body.get("sha256"):
        raise ConfigError("it differs from its own digest")
    mac = body.get("mac")
    if not (isinstance(mac, str) and mac.isascii() if config.encrypted else mac is None):
        raise ConfigError("its 'mac' does not fit its 'cipher'")
    return config, mac


def check_mac(config: StoreConfig, mac: str | None, mac_key: bytes) -> None:
    """Raise ConfigError where somebody without the key has changed the configuration."""
    expected = hmac.new(mac_key, _canonical(config.members()), "sha256").hexdigest()
    if mac is None or not hmac.compare_digest(mac, expected):
        raise ConfigError("it was changed by somebody who does not have the key")


def _canonical(members: Mapping[str, Any]) -> bytes:
    return json.dumps(members, sort_keys=True, separators=(",", ":")).encode()


def _config(members: Mapping[str, Any]) -> StoreConfig:
    store_id, hash_name, cipher = members.get("id"), members.get("hash"), members.get("cipher")
    piece_bytes, pack_bytes = _size(members, "piece_bytes"), _size(members, "pack_bytes")
    if not isinstance(store_id, str) or len(store_id) != 2 * _ID_BYTES or not isinstance(hash_name, str):
        raise ConfigError("its 'id' or its 'hash' is no text of the right length")
    try:
        found_id = bytes.fromhex(store_id)
    except ValueError as e:
        raise ConfigError("its 'id' is no hexadecimal number") from e
    if cipher not in (None, CIPHER):
        raise ConfigError(f"its cipher is {cipher!r}, which this gpucr does not know")
    config = StoreConfig(found_id, hash_name, piece_bytes, pack_bytes, cipher is not None)
    _check(config)
    return config


def _size(members: Mapping[str, Any], name: str) -> int:
    size = members.get(name)
    if not isinstance(size, int) or isinstance(size, bool):
        raise ConfigError(f"its {name!r} is no number")
    return size


def _check(config: StoreConfig) -> None:
    piece, pack = config.piece_bytes, config.pack_bytes
    if config.hash not in HASHES:
        raise ConfigError(f"its hash is {config.hash!r}, which this gpucr does not know")
    if config.encrypted and config.hash != "blake3":
        raise ConfigError("an encrypted store names its pieces by BLAKE3")
    if not _MIN_PIECE_BYTES <= piece <= MAX_PIECE_BYTES or piece & (piece - 1):
        raise ConfigError(f"pieces of {piece} bytes: no power of two from {_MIN_PIECE_BYTES} to {MAX_PIECE_BYTES}")
    if not piece <= pack <= _MAX_PACK_BYTES:
        raise ConfigError(f"packs of {pack} bytes do not fit pieces of {piece}")

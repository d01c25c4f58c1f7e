"""Key objects: the master key of an encrypted store, wrapped for one key file or one passphrase.

A store can have several, and each opens it. Rotation adds one and removes another without touching the data.

A key object is JSON::

    {"format": "gpucr-store-key", "version": 1, "kdf": "scrypt" or "hkdf", "log2_n": ..., "r": ..., "p": ...,
     "salt": HEX, "nonce": HEX, "wrapped": HEX, "sha256": HEX}

A passphrase goes through scrypt (RFC 7914); a key file, which is random already, through HKDF-SHA256. The derived key
encrypts the master key with AES-256-GCM; the store's id and all members before ``nonce`` are authenticated with it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from gpucr import extras, records
from gpucr.errors import InvalidRequest, Unsupported
from gpucr.records import Count, Record, RecordError
from gpucr.store.crypto import KEY_BYTES, NONCE_BYTES, TAG_BYTES

FORMAT, VERSION = "gpucr-store-key", 1
MIN_KEY_FILE_BYTES, MAX_KEY_FILE_BYTES = 32, 1 << 20
MAX_KEY_OBJECT_BYTES = 64 << 10
_SALT_BYTES = 32
_LOG2_N, _R, _P = 17, 8, 1
"""128 MiB, about 0.3 s: a guess costs the same."""
_PURPOSE = "an encrypted store"


class Secret(Struct, frozen=True):
    """The secret of an encrypted store: the content of a key file, or a passphrase. Never shown."""

    kind: str
    value: bytes

    @classmethod
    def key_file(cls, content: bytes) -> Secret:
        """The content of a key file: at least 32 random bytes. Raises InvalidRequest."""
        if not MIN_KEY_FILE_BYTES <= len(content) <= MAX_KEY_FILE_BYTES:
            raise InvalidRequest(
                f"a key file of {len(content)} bytes cannot be used",
                hint=f"make one of {MIN_KEY_FILE_BYTES} random bytes: (umask 077; head -c 32 /dev/urandom > FILE)",
            )
        return cls("hkdf", content)

    @classmethod
    def in_file(cls, path: str | os.PathLike[str]) -> Secret:
        """The key in this file. Raises InvalidRequest."""
        try:
            with open(path, "rb") as stream:
                content = stream.read(MAX_KEY_FILE_BYTES + 1)
        except OSError as e:
            hint = "put it back, or name another one"
            raise InvalidRequest(f"the key file {os.fspath(path)} cannot be read: {e.strerror}", hint=hint) from e
        return cls.key_file(content)

    @classmethod
    def passphrase(cls, text: str) -> Secret:
        """A passphrase. Raises InvalidRequest for an empty one."""
        if not text:
            raise InvalidRequest("the passphrase is empty", hint="give one of several words")
        return cls("scrypt", text.encode(errors="surrogateescape"))

    def __repr__(self) -> str:
        return f"Secret({self.kind!r}, ...)"


class _KeyObject(Record, frozen=True):
    kdf: str
    salt: Annotated[str, Meta(pattern=rf"\A[0-9a-f]{{{2 * _SALT_BYTES}}}\Z")]
    log2_n: Count = 0
    r: Count = 0
    p: Count = 0
    nonce: Annotated[str, Meta(pattern=rf"\A[0-9a-f]{{{2 * NONCE_BYTES}}}\Z")] = ""
    wrapped: Annotated[str, Meta(pattern=rf"\A[0-9a-f]{{{2 * (KEY_BYTES + TAG_BYTES)}}}\Z")] = ""
    format: str = FORMAT
    version: int = VERSION

    def bound_to(self, store_id: bytes) -> bytes:
        """Data authenticated together with the wrapped key."""
        members = msgspec.to_builtins(self)
        return store_id + _canonical({name: members[name] for name in members if name not in ("nonce", "wrapped")})

    def key_of(self, secret: Secret) -> bytes:
        salt = bytes.fromhex(self.salt)
        if self.kdf == "scrypt":
            kdf = extras.load("cryptography.hazmat.primitives.kdf.scrypt", _PURPOSE)
            try:
                derived = kdf.Scrypt(salt, KEY_BYTES, 1 << self.log2_n, self.r, self.p).derive(secret.value)
            except MemoryError as e:
                raise Unsupported(
                    f"there is too little memory for the passphrase, which takes {128 * self.r << self.log2_n} bytes",
                    hint="end other programs, raise the memory limit (ulimit -v), or use a key file",
                ) from e
        else:
            kdf = extras.load("cryptography.hazmat.primitives.kdf.hkdf", _PURPOSE)
            hashes = extras.load("cryptography.hazmat.primitives.hashes", _PURPOSE)
            derived = kdf.HKDF(hashes.SHA256(), KEY_BYTES, salt, b"gpucr-store 1: key file").derive(secret.value)
        return bytes(derived)


def wrap(master: bytes, secret: Secret, store_id: bytes) -> bytes:
    """The bytes of a new key object with which this secret opens the store."""
    cost = (_LOG2_N, _R, _P) if secret.kind == "scrypt" else ()
    key = _KeyObject(secret.kind, os.urandom(_SALT_BYTES).hex(), *cost)
    nonce = os.urandom(NONCE_BYTES)
    wrapped = _aead(key.key_of(secret)).encrypt(nonce, master, key.bound_to(store_id))
    members = msgspec.to_builtins(replace(key, nonce=nonce.hex(), wrapped=wrapped.hex()))
    return records.encode(members | {"sha256": _digest(members)})


def unwrap(data: bytes, secret: Secret, store_id: bytes) -> bytes | None:
    """The master key; None: this object is for another secret. Raises RecordError for damage."""
    key = _decode(data)
    if key.kdf != secret.kind:
        return None
    invalid_tag: type[Exception] = extras.load("cryptography.exceptions", _PURPOSE).InvalidTag
    nonce, wrapped = bytes.fromhex(key.nonce), bytes.fromhex(key.wrapped)
    try:
        return bytes(_aead(key.key_of(secret)).decrypt(nonce, wrapped, key.bound_to(store_id)))
    except invalid_tag:
        return None


def check(data: bytes) -> str:
    """The kind of key object: ``scrypt`` (a passphrase) or ``hkdf`` (a key file). Raises RecordError."""
    return _decode(data).kdf


def _aead(key: bytes) -> Any:
    return extras.load("cryptography.hazmat.primitives.ciphers.aead", _PURPOSE).AESGCM(key)


def _canonical(members: Mapping[str, Any]) -> bytes:
    return json.dumps(members, sort_keys=True, separators=(",", ":")).encode()


def _digest(members: Mapping[str, Any]) -> str:
    return hashlib.sha256(_canonical(members)).hexdigest()


def _decode(data: bytes) -> _KeyObject:
    if len(data) > MAX_KEY_OBJECT_BYTES:
        raise RecordError(f"it is larger than {MAX_KEY_OBJECT_BYTES} bytes")
    members = records.of_format(records.read_json(data), format=FORMAT, version=VERSION)
    digest = members.pop("sha256", None)
    key = records.convert(members, _KeyObject)
    if _digest(members) != digest:
        raise RecordError("it differs from its own digest")
    _check_cost(key)
    return key


def _check_cost(key: _KeyObject) -> None:
    """A writer of the store must not be able to make readers run out of memory or time."""
    if key.kdf == "hkdf":
        if key.log2_n or key.r or key.p:
            raise RecordError("it has a cost where there is none")
    elif key.kdf != "scrypt":
        raise RecordError(f"its key derivation is {key.kdf!r}, which this gpucr does not know")
    elif (key.log2_n, key.r, key.p) != (_LOG2_N, _R, _P):
        raise RecordError(f"its scrypt parameters are {key.log2_n}, {key.r}, {key.p}, not {_LOG2_N}, {_R}, {_P}")

"""Key objects: the master key of an encrypted store, wrapped for one key file or one passphrase.

A store has any number of them, and each opens it. Rotation adds one and removes another; the data is not touched.

A key object is JSON::

    {"format": "gpucr-store-key", "version": 1, "kdf": "scrypt" or "hkdf", "log2_n": ..., "r": ..., "p": ...,
     "salt": HEX, "nonce": HEX, "wrapped": HEX, "sha256": HEX}

A passphrase goes through scrypt (RFC 7914); a key file, which is random already, through HKDF-SHA256. The key that
comes out encrypts the master key with AES-256-GCM; the store's id and all members before ``nonce`` are authenticated
with it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpucr.errors import InvalidRequest, Unsupported
from gpucr.store import extra
from gpucr.store.crypto import KEY_BYTES, NONCE_BYTES, TAG_BYTES

FORMAT, VERSION = "gpucr-store-key", 1
MIN_KEY_FILE_BYTES, MAX_KEY_FILE_BYTES = 32, 1 << 20
MAX_KEY_OBJECT_BYTES = 64 << 10
_SALT_BYTES = 32
_LOG2_N, _R, _P = 17, 8, 1
"""128 MiB, about 0.3 s: a guess costs the same."""
_PURPOSE = "an encrypted store"


class KeyObjectError(ValueError):
    """The bytes are no key object. The message says why; the caller knows where they come from."""


@dataclass(frozen=True)
class Secret:
    """What opens an encrypted store: the content of a key file, or a passphrase. Never shown."""

    kind: str
    value: bytes

    @classmethod
    def key_file(cls, content: bytes) -> Secret:
        """The content of a key file: at least 32 random bytes. Raises InvalidRequest."""
        if not MIN_KEY_FILE_BYTES <= len(content) <= MAX_KEY_FILE_BYTES:
            raise InvalidRequest(
                f"a key file of {len(content)} bytes cannot be used",
                hint=f"make one of {MIN_KEY_FILE_BYTES} random bytes: head -c 32 /dev/urandom > FILE",
            )
        return cls("hkdf", content)

    @classmethod
    def passphrase(cls, text: str) -> Secret:
        """A passphrase. Raises InvalidRequest for an empty one."""
        if not text:
            raise InvalidRequest("the passphrase is empty", hint="give one of several words")
        return cls("scrypt", text.encode(errors="surrogateescape"))

    def __repr__(self) -> str:
        return f"Secret({self.kind!r}, ...)"


@dataclass(frozen=True)
class _Parameters:
    kdf: str
    salt: bytes
    log2_n: int = 0
    r: int = 0
    p: int = 0

    def members(self) -> dict[str, Any]:
        return {"format": FORMAT, "version": VERSION, "kdf": self.kdf, "log2_n": self.log2_n, "r": self.r, "p": self.p,
                "salt": self.salt.hex()}  # fmt: skip

    def key_of(self, secret: Secret) -> bytes:
        if self.kdf == "scrypt":
            kdf = extra.load("cryptography.hazmat.primitives.kdf.scrypt", _PURPOSE)
            try:
                derived = kdf.Scrypt(self.salt, KEY_BYTES, 1 << self.log2_n, self.r, self.p).derive(secret.value)
            except MemoryError as e:
                raise Unsupported(
                    f"there is too little memory for the passphrase, which takes {128 * self.r << self.log2_n} bytes",
                    hint="end other programs, raise the memory limit (ulimit -v), or use a key file",
                ) from e
        else:
            kdf = extra.load("cryptography.hazmat.primitives.kdf.hkdf", _PURPOSE)
            hashes = extra.load("cryptography.hazmat.primitives.hashes", _PURPOSE)
            derived = kdf.HKDF(hashes.SHA256(), KEY_BYTES, self.salt, b"gpucr-store 1: key file").derive(secret.value)
        return bytes(derived)


def wrap(master: bytes, secret: Secret, store_id: bytes) -> bytes:
    """The bytes of a new key object with which this secret opens the store."""
    salt = os.urandom(_SALT_BYTES)
    scrypt = secret.kind == "scrypt"
    parameters = _Parameters(secret.kind, salt, _LOG2_N, _R, _P) if scrypt else _Parameters(secret.kind, salt)
    nonce = os.urandom(NONCE_BYTES)
    members = parameters.members()
    wrapped = _aead(parameters.key_of(secret)).encrypt(nonce, master, _bound(store_id, members))
    members |= {"nonce": nonce.hex(), "wrapped": wrapped.hex()}
    return json.dumps(members | {"sha256": _digest(members)}, indent=1).encode() + b"\n"


def unwrap(data: bytes, secret: Secret, store_id: bytes) -> bytes | None:
    """The master key; None: this object is for another secret. Raises KeyObjectError for damage."""
    parameters, nonce, wrapped = _decode(data)
    if parameters.kdf != secret.kind:
        return None
    invalid_tag: type[Exception] = extra.load("cryptography.exceptions", _PURPOSE).InvalidTag
    try:
        bound = _bound(store_id, parameters.members())
        return bytes(_aead(parameters.key_of(secret)).decrypt(nonce, wrapped, bound))
    except invalid_tag:
        return None


def check(data: bytes) -> str:
    """What the key object is for: ``scrypt`` (a passphrase) or ``hkdf`` (a key file). Raises KeyObjectError."""
    return _decode(data)[0].kdf


def _aead(key: bytes) -> Any:
    return extra.load("cryptography.hazmat.primitives.ciphers.aead", _PURPOSE).AESGCM(key)


def _bound(store_id: bytes, members: Mapping[str, Any]) -> bytes:
    return store_id + _canonical(members)


def _canonical(members: Mapping[str, Any]) -> bytes:
    return json.dumps(members, sort_keys=True, separators=(",", ":")).encode()


def _digest(members: Mapping[str, Any]) -> str:
    return hashlib.sha256(_canonical(members)).hexdigest()


def _decode(data: bytes) -> tuple[_Parameters, bytes, bytes]:
    if len(data) > MAX_KEY_OBJECT_BYTES:
        raise KeyObjectError(f"it is larger than {MAX_KEY_OBJECT_BYTES} bytes")
    try:
        members = json.loads(data)
    except (ValueError, RecursionError) as e:
        raise KeyObjectError(f"it is not JSON: {e}") from e
    if not isinstance(members, dict) or members.get("format") != FORMAT:
        raise KeyObjectError("it is not a key of a store")
    if members.get("version") != VERSION:
        raise KeyObjectError(f"it has version {members.get('version')!r}; this gpucr reads version {VERSION}")
    digest = members.pop("sha256", None)
    if any(isinstance(value, dict | list) for value in members.values()) or _digest(members) != digest:
        raise KeyObjectError("it differs from its own digest")
    parameters = _Parameters(
        _text(members, "kdf"),
        _bytes(members, "salt", _SALT_BYTES),
        *(_number(members, name) for name in ("log2_n", "r", "p")),
    )
    _check_cost(parameters)
    if members.keys() - parameters.members().keys() != {"nonce", "wrapped"}:
        raise KeyObjectError("it has a member too many")
    return parameters, _bytes(members, "nonce", NONCE_BYTES), _bytes(members, "wrapped", KEY_BYTES + TAG_BYTES)


def _check_cost(parameters: _Parameters) -> None:
    """Whoever can write to the store must not be able to make its readers run out of memory or time."""
    log2_n, r, p = parameters.log2_n, parameters.r, parameters.p
    if parameters.kdf == "hkdf":
        if log2_n or r or p:
            raise KeyObjectError("it has a cost where there is none")
    elif parameters.kdf != "scrypt":
        raise KeyObjectError(f"its key derivation is {parameters.kdf!r}, which this gpucr does not know")
    elif (log2_n, r, p) != (_LOG2_N, _R, _P):
        raise KeyObjectError(f"its scrypt parameters are {log2_n}, {r}, {p}, not {_LOG2_N}, {_R}, {_P}")


def _text(members: Mapping[str, Any], name: str) -> str:
    value = members.get(name)
    if not isinstance(value, str):
        raise KeyObjectError(f"its {name!r} is no text")
    return value


def _number(members: Mapping[str, Any], name: str) -> int:
    value = members.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 31:
        raise KeyObjectError(f"its {name!r} is no number in range")
    return value


def _bytes(members: Mapping[str, Any], name: str, length: int) -> bytes:
    text = _text(members, name)
    try:
        value = bytes.fromhex(text)
    except ValueError as e:
        raise KeyObjectError(f"its {name!r} is no hexadecimal number") from e
    if len(value) != length or value.hex() != text:
        raise KeyObjectError(f"its {name!r} has not {length} bytes")
    return value

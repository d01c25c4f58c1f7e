"""An opened store: its place, parameters and keys."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from gpucr import extras
from gpucr.errors import StoreDamaged, StoreError, WrongKey
from gpucr.records import RecordError
from gpucr.store import config as configuration
from gpucr.store import crypto, keys, pieces
from gpucr.store.backend import Backend, Buffer, Exists, Missing
from gpucr.store.config import StoreConfig
from gpucr.store.crypto import KeyRing
from gpucr.store.keys import Secret
from gpucr.store.local import LocalBackend

KEYS_PREFIX = "keys/"
HINT_DAMAGED = "the disk, a copy or somebody damaged it: use another snapshot, or another copy of the store"
_MASTER_BYTES = 32
_PLAIN_MANIFEST = "manifest.json"
_MAX_KEYS = 64
_MAX_PASSPHRASES = 8
"""Each one takes 0.3 s to try, even a forged one."""
NO_SPACE = "GPUCR-NO-SPACE"
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_BAD_DISK = (errno.EIO, errno.EUCLEAN, errno.EBADMSG)
_BAD_FILE = (*_BAD_DISK, errno.EINVAL, errno.ELOOP, errno.EPERM)
"""Errors of a single unreadable object: a bad sector, a broken file system, something else in its place."""


@dataclass(frozen=True)
class Store:
    """An opened store. Thread-safe.

    ``opened_with``: the name of the key object that opened it, if it is encrypted.
    """

    backend: Backend
    config: StoreConfig
    keys: KeyRing | None = field(repr=False)
    digest: pieces.Digest = field(repr=False, compare=False)
    opened_with: str | None = field(default=None, compare=False)

    @classmethod
    def create(
        cls,
        backend: Backend,
        *,
        secret: Secret | None = None,
        piece_bytes: int = configuration.PIECE_BYTES,
        pack_bytes: int = configuration.PACK_BYTES,
        hash_name: str | None = None,
    ) -> Store:
        """Make a store in an empty place; encrypted if there is a secret. Nothing is overwritten.

        Its pieces are named by BLAKE3 if installed, otherwise by SHA-256. Raises StoreError if there is a store already
        or the place does not work.
        """
        if hash_name is None:
            hash_name = "blake3" if secret is not None or extras.is_installed("blake3") else "sha256"
        try:
            made = StoreConfig.new(
                hash_name, encrypted=secret is not None, piece_bytes=piece_bytes, pack_bytes=pack_bytes
            )
        except RecordError as e:
            raise StoreError(f"such a store cannot be made: {e}", path=backend.url) from e
        ring = KeyRing(os.urandom(_MASTER_BYTES), made.store_id) if secret is not None else None
        store = cls(backend, made, ring, _digest(made, ring))
        try:
            # A key added to a different store opens nothing there, but looks as if it did.
            _require_no_store(backend)
            if secret is not None:
                store = replace(store, opened_with=store.add_key(secret))
            # Last, and only once: this makes it a store.
            try:
                backend.create(configuration.NAME, configuration.encode(made, _mac_key(ring) if ring else None))
            except Exists as e:  # somebody else has made one meanwhile
                _withdraw_key(store)
                raise _store_exists(backend) from e
            except OSError:
                # A failed request may still reach an object store, which would then have no key.
                if isinstance(backend, LocalBackend):
                    with contextlib.suppress(OSError):
                        _withdraw_key(store)
                raise
        except OSError as e:
            raise store.not_usable(e) from e
        return store

    @classmethod
    def open(cls, backend: Backend, secret: Secret | None = None) -> Store:
        """Open an existing store.

        Raises WrongKey if it is encrypted and the secret does not open it, StoreDamaged if its configuration or a key
        is damaged, and StoreError if there is none, if it is not encrypted although there is a secret, or if the place
        does not work.
        """
        name = configuration.NAME
        try:
            data = backend.read(name, 0, configuration.MAX_CONFIG_BYTES + 1)
        except Missing as e:
            hint = f"make one first (`gpucr store init {backend.url}`), or correct the name"
            message = f"there is no store at {backend.url}"
            if isinstance(backend, LocalBackend) and os.path.exists(f"{backend.url}/{_PLAIN_MANIFEST}"):
                hint = f"`gpucr inspect {backend.url}` shows it; make a store in another folder: gpucr store init STORE"
                message = f"{backend.url} is the folder of a plain snapshot, not a store"
            raise StoreError(message, path=backend.url, hint=hint, code="GPUCR-NO-STORE") from e
        except OSError as e:
            raise _not_usable(backend, e) from e
        opened_with: str | None = None
        ring: KeyRing | None = None
        try:
            found, mac = configuration.decode(data)
            unlocked = _unlock(backend, found, secret)
            if unlocked is not None:
                opened_with, ring = unlocked
                configuration.check_mac(found, mac, _mac_key(ring))
        except RecordError as e:
            path = f"{backend.url}/{name}"
            raise StoreDamaged(f"{path} is not valid: {e}", path=path, hint=HINT_DAMAGED) from e
        return cls(backend, found, ring, _digest(found, ring), opened_with)

    @property
    def digest_key(self) -> bytes | None:
        """The key of its pieces' names; None: they have none."""
        return _digest_key(self.keys)

    def path(self, name: str) -> str:
        """An object's name in messages."""
        return f"{self.backend.url}/{name}"

    def not_usable(self, error: OSError) -> StoreError:
        """A place's error for the user."""
        return _not_usable(self.backend, error)

    def unreadable(self, name: str, error: OSError) -> StoreError:
        """An error from reading this object: damage if only this object is bad."""
        if error.errno in _BAD_FILE:
            return self.damaged(name, f"cannot be read: {error.strerror}")
        return self.not_usable(error)

    def damaged(self, name: str, what: str) -> StoreDamaged:
        """The error for a damaged object; ``what`` continues the sentence after its name."""
        return StoreDamaged(f"{self.path(name)} {what}", path=self.path(name), hint=HINT_DAMAGED)

    # --- small objects ---------------------------------------------------------------------------------------

    def seal(self, name: str, data: Buffer) -> bytes:
        """The bytes to store under this name: with a digest, encrypted if the store is."""
        return crypto.seal(name, data, self.keys)

    def unseal(self, name: str, sealed: Buffer) -> bytes:
        """The inverse of `seal`. Raises StoreDamaged."""
        try:
            return crypto.unseal(name, sealed, self.keys)
        except crypto.CutShort as e:
            raise self.damaged(name, f"is cut short: {e}") from e
        except crypto.Changed as e:
            raise self.damaged(name, f"is not what was written: {e}") from e

    # --- keys ------------------------------------------------------------------------------------------------

    def add_key(self, secret: Secret) -> str:
        """Let another secret open the store. Returns its key object's name.

        Raises StoreError, also for one too many.
        """
        if self.keys is None:
            raise _not_encrypted(self.backend, "only an encrypted store has keys")
        name = f"{KEYS_PREFIX}{os.urandom(8).hex()}.json"
        try:
            self._require_room_for_key(secret, 1)
            self.backend.create(name, keys.wrap(self.keys.master, secret, self.config.store_id))
            try:
                self._require_room_for_key(secret, 0)
            except StoreError:  # others have added keys at the same time
                self.backend.delete(name)
                raise
        except OSError as e:
            raise self.not_usable(e) from e
        return name

    def _require_room_for_key(self, secret: Secret, more: int) -> None:
        """With too many keys nobody could open the store: a store flooded with keys is refused."""
        names = [found.name for found in self.backend.list(KEYS_PREFIX)]
        kinds = [_kind(_key_object(self.backend, name)) for name in names] if secret.kind == "scrypt" else []
        passphrases = kinds.count("passphrase")
        for count, most, what in ((len(names), _MAX_KEYS, "keys"), (passphrases, _MAX_PASSPHRASES, "passphrases")):
            if count + more > most:
                message = f"the store {self.backend.url} has {count} {what}, and cannot have more"
                raise StoreError(message, path=self.path(KEYS_PREFIX), hint="remove one that nobody needs first")

    def key_names(self) -> dict[str, str]:
        """The key objects, each with its kind: ``passphrase``, ``key file``, or ``damaged``.

        Raises StoreError, also for a store that is not encrypted.
        """
        if self.keys is None:
            raise _not_encrypted(self.backend, "it has no keys, and none can be added: make another one with --encrypt")
        return {name: _kind(data) for name, data in _key_objects(self.backend)}

    def damaged_keys(self) -> dict[str, str]:
        """The unusable key objects, each with its problem. Raises StoreError."""
        if self.keys is None:
            return {}
        remedy = "remove it and add a new one with `gpucr store keys`"
        return {
            name: f"{self.path(name)} is no valid key: {error}; {remedy}"
            for name, data in _key_objects(self.backend)
            if (error := _key_error(data)) is not None
        }

    def remove_key(self, name: str) -> None:
        """Remove a key. Raises StoreError for the last one, and if there is no such key.

        The key that opened the store cannot be removed: the others may not open anything. A user of a removed key may
        have kept the master key: then only a new store helps.
        """
        names = self.key_names()
        if name not in names:
            hint = f"`gpucr store keys {self.backend.url}` lists them"
            raise StoreError(
                f"the store {self.backend.url} has no key {_key_id(name)}", path=self.path(name), hint=hint
            )
        if not any(kind != "damaged" for other, kind in names.items() if other != name):
            hint = "add another key first"
            message = f"{_key_id(name)} is the only key of the store {self.backend.url}"
            raise StoreError(message, path=self.path(name), hint=hint)
        if name == self.opened_with:
            raise self._not_removed(name, "is the one to remove")
        if self.opened_with is None or self.opened_with not in names:
            raise self._not_removed(name, "was removed meanwhile")
        try:
            removed = _key_object(self.backend, name)
            self.backend.delete(name)
            try:
                self.backend.size(self.opened_with)
            except Missing:  # a process that opened it with the other key has removed this one at the same time
                self.backend.create(name, removed)
                raise self._not_removed(name, "was removed meanwhile") from None
        except OSError as e:
            raise self.not_usable(e) from e

    def _not_removed(self, name: str, why: str) -> StoreError:
        message = f"only {self.opened_with} is known to open the store {self.backend.url}, and it {why}"
        hint = "open the store with a key that is to stay, and remove this one then"
        return StoreError(message, path=self.path(name), hint=hint)


def _require_no_store(backend: Backend) -> None:
    with contextlib.suppress(Missing):
        backend.size(configuration.NAME)
        raise _store_exists(backend)


def _withdraw_key(store: Store) -> None:
    if store.opened_with is not None:
        store.backend.delete(store.opened_with)


def _store_exists(backend: Backend) -> StoreError:
    hint = "use that one, or name another place"
    message = f"there is a store at {backend.url} already"
    return StoreError(message, path=backend.url, hint=hint, code="GPUCR-STORE-EXISTS")


def _digest(config: StoreConfig, ring: KeyRing | None) -> pieces.Digest:
    return pieces.digest_function(config.hash, _digest_key(ring))


def _digest_key(ring: KeyRing | None) -> bytes | None:
    return ring.derive(b"piece names") if ring is not None else None


def _mac_key(ring: KeyRing) -> bytes:
    return ring.derive(b"configuration")


def _not_encrypted(backend: Backend, hint: str) -> StoreError:
    message = f"the store {backend.url} is not encrypted"
    return StoreError(message, path=backend.url, hint=hint, code="GPUCR-NOT-ENCRYPTED")


def _not_usable(backend: Backend, error: OSError) -> StoreError:
    what = f"{error.strerror or error}"
    if error.errno in DISK_FULL:
        hint = "free space there (`gpucr prune` removes what no snapshot needs), or name another store"
        message = f"the store {backend.url} takes no more data: {what}"
        return StoreError(message, path=backend.url, hint=hint, code=NO_SPACE)
    return StoreError(
        f"the store {backend.url} cannot be used: {what}{f' ({error.filename})' if error.filename else ''}",
        path=backend.url,
        hint="check free space, permissions and the connection to it",
    )


def _unlock(backend: Backend, config: StoreConfig, secret: Secret | None) -> tuple[str, KeyRing] | None:
    """The key object that the secret opens, and the derived keys; None: the store is not encrypted."""
    if not config.encrypted:
        if secret is not None:
            # Do not accept it: a writer could have replaced our store by an unencrypted one.
            raise _not_encrypted(backend, "omit the key if you mean a plain store")
        return None
    if secret is None:
        hint = "give its key with --key-file FILE or GPUCR_KEY_FILE, or its passphrase in GPUCR_PASSPHRASE"
        raise WrongKey(f"the store {backend.url} is encrypted, and no key was given", path=backend.url, hint=hint)
    found = list(_key_objects(backend))
    if secret.kind == "scrypt":
        _require_few_passphrases(backend, [data for _, data in found])
    damaged: tuple[str, RecordError] | None = None
    for name, data in found:
        try:
            master = keys.unwrap(data, secret, config.store_id)
        except RecordError as e:
            damaged = (name, e)
            continue
        if master is not None:
            return name, KeyRing(master, config.store_id)
    if damaged is not None:
        path = f"{backend.url}/{damaged[0]}"
        hint = "if that is not the key that was meant, give another key file or passphrase of this store"
        raise StoreDamaged(f"{path} is no valid key: {damaged[1]}", path=path, hint=hint) from damaged[1]
    kind = "passphrase" if secret.kind == "scrypt" else "key file"
    hint = "give one that it was made with"
    raise WrongKey(f"this {kind} does not open the store {backend.url}", path=backend.url, hint=hint)


def _key_id(name: str) -> str:
    return name.removeprefix(KEYS_PREFIX).removesuffix(".json")


def _require_few_passphrases(backend: Backend, key_objects: Sequence[bytes]) -> None:
    count = sum(_kind(data) == "passphrase" for data in key_objects)
    if count > _MAX_PASSPHRASES:
        raise StoreDamaged(
            f"the store {backend.url} has {count} keys for passphrases, more than {_MAX_PASSPHRASES}",
            path=f"{backend.url}/{KEYS_PREFIX}",
            hint="others added them: delete those that are not yours, or open the store with a key file",
        )


def _key_objects(backend: Backend) -> Iterator[tuple[str, bytes]]:
    try:
        names = [found.name for found in backend.list(KEYS_PREFIX)]
        if not names or len(names) > _MAX_KEYS:
            raise StoreDamaged(
                f"the store {backend.url} has {len(names)} keys, not 1 to {_MAX_KEYS}",
                path=f"{backend.url}/{KEYS_PREFIX}",
                hint=HINT_DAMAGED,
            )
        for name in names:
            with contextlib.suppress(Missing):  # removed meanwhile: another one replaces it
                yield name, _key_object(backend, name)
    except OSError as e:
        raise _not_usable(backend, e) from e


def _key_object(backend: Backend, name: str) -> bytes:
    """The bytes; none if the disk is bad, which is no valid key: another one may open the store."""
    try:
        return backend.read(name, 0, keys.MAX_KEY_OBJECT_BYTES + 1)
    except OSError as e:
        if e.errno not in _BAD_DISK:
            raise
        return b""


def _key_error(key_object: bytes) -> RecordError | None:
    try:
        keys.check(key_object)
    except RecordError as e:
        return e
    return None


def _kind(key_object: bytes) -> str:
    try:
        return {"scrypt": "passphrase", "hkdf": "key file"}[keys.check(key_object)]
    except RecordError:
        return "damaged"

"""Sets: snapshots of the parts of one job, one per node, that exist together or not at all.

The parts are snapshots like any other, each with its `SetPart`. ``sets/ID`` is a sealed object, written once and last:
with it the set is complete, and only then can its parts be restored. A tombstone in its place means that the set was
given up and will never be complete. Both are creates of one name, so exactly one of them happens. So nodes that have
lost contact still agree.

``sets/secret`` has random bytes, which whoever can read the store knows, by which nodes of a job know each other.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Annotated

from msgspec import Meta, Struct

from gpucr import records
from gpucr.errors import StoreError
from gpucr.records import Record, RecordError
from gpucr.store import writers
from gpucr.store.backend import Exists, Missing
from gpucr.store.crypto import SEALED_OVERHEAD_BYTES
from gpucr.store.opened import Store
from gpucr.store.stored_snapshot import MAX_NODES, NAME, SHORT_ID, StoredSnapshot

SETS_PREFIX = "sets/"
FORMAT, VERSION = "gpucr-stored-set", 1
_MAX_BYTES = 1 << 20
_SECRET = f"{SETS_PREFIX}secret"
_SECRET_BYTES = 32
_OBJECT = re.compile(r"sets/([0-9a-f]{32})")


class StoredSet(Struct, frozen=True):
    """A complete set. ``snapshot_ids`` are those of its parts, in the order of their nodes."""

    id: str
    name: str
    snapshot_ids: tuple[str, ...]

    @property
    def label(self) -> str:
        """Its name in messages."""
        return f"{self.name} ({self.id[:SHORT_ID]})"


class _Body(Record, frozen=True):
    name: Annotated[str, Meta(pattern=rf"\A{NAME.pattern}\Z")]
    snapshot_ids: Annotated[
        tuple[Annotated[str, Meta(pattern=r"\A[0-9a-f]{32}\Z")], ...], Meta(min_length=1, max_length=MAX_NODES)
    ]
    format: str = FORMAT
    version: int = VERSION

    def __post_init__(self) -> None:
        if len(set(self.snapshot_ids)) != len(self.snapshot_ids):
            raise RecordError("it names a snapshot twice")


def new_id() -> str:
    """A unique id."""
    return os.urandom(16).hex()


def complete(store: Store, made: StoredSet) -> bool:
    """Make the set complete. False: it was given up before. Raises StoreError if that is unknown."""
    name = _object(made.id)
    sealed = store.seal(name, encode(made))
    try:
        store.backend.create(name, sealed)
    except Exists:
        return _decided(store, made.id) == made
    except OSError:
        # It may have been created, or still be: check what is there.
        return abandon(store, made.id) == made
    return True


def abandon(store: Store, set_id: str) -> StoredSet | None:
    """Give the set up for good. Returns it if it was already complete, and stays so.

    Raises StoreError if the outcome is unknown.
    """
    try:
        writers.put_tombstone(store, _object(set_id))
    except Exists:
        return _decided(store, set_id)
    except OSError as e:
        raise _not_known(store, set_id, store.not_usable(e)) from e
    return None


def _decided(store: Store, set_id: str) -> StoredSet | None:
    try:
        return _read(store, set_id)
    except StoreError as e:
        raise _not_known(store, set_id, e) from e


def _not_known(store: Store, set_id: str, why: StoreError) -> StoreError:
    return StoreError(
        f"it is not known whether the set {set_id} was completed: {why.message}",
        path=store.path(_object(set_id)),
        hint="list the store when it works again: gpucr ls shows which sets are not complete",
    )


def find(store: Store, set_id: str) -> StoredSet | None:
    """The set, if it is complete. Raises StoreDamaged, StoreError."""
    return _read(store, set_id)


def is_abandoned(store: Store, set_id: str) -> bool:
    """Whether it was given up. Raises StoreDamaged, StoreError."""
    body = _body(store, set_id)
    return body is not None and writers.is_tombstone(body)


def of_snapshots(store: Store, found: Iterable[StoredSnapshot]) -> Mapping[str, StoredSet]:
    """The complete sets of these snapshots, by id. Raises StoreDamaged, StoreError."""
    ids = {each.part.set_id for each in found if each.part is not None}
    sets = {set_id: _read(store, set_id) for set_id in sorted(ids)}
    return {set_id: made for set_id, made in sets.items() if made is not None}


def is_part(snapshot: StoredSnapshot, sets: Mapping[str, StoredSet]) -> bool:
    """Whether the snapshot is the part of a complete set that it claims to be."""
    part = snapshot.part
    made = sets.get(part.set_id) if part is not None else None
    return (
        part is not None
        and made is not None
        and len(made.snapshot_ids) == part.node_count
        and made.snapshot_ids[part.node] == snapshot.id
    )


def require_complete(store: Store, snapshot: StoredSnapshot) -> None:
    """Raise StoreError for a part of an incomplete set: the other parts may have kept running."""
    part = snapshot.part
    if part is None or is_part(snapshot, of_snapshots(store, [snapshot])):
        return
    raise StoreError(
        f"the snapshot {snapshot.label} is the part of node {part.node} in a set of {part.node_count} that is not "
        "complete: the other nodes did not all save theirs, and their parts of the job ran on",
        path=store.path(writers.snapshot_object(snapshot.id)),
        hint="restore a complete set; gpucr ls shows which are",
        code="GPUCR-SET-UNFINISHED",
    )


def remove(store: Store, set_id: str) -> None:
    """Remove its completion object: then none of its parts can be restored. Raises StoreError."""
    try:
        store.backend.delete(_object(set_id))
    except OSError as e:
        raise store.not_usable(e) from e


def all_ids(store: Store) -> Mapping[str, float]:
    """The ids of all sets that were completed or given up, and when, by the store's clock. Raises StoreError."""
    try:
        found = list(store.backend.list(SETS_PREFIX))
    except OSError as e:
        raise store.not_usable(e) from e
    return {match.group(1): info.modified_s for info in found if (match := _OBJECT.fullmatch(info.name))}


def make_secret(store: Store) -> bytes:
    """The secret in this store, which is made if there is none. Raises StoreError, StoreDamaged."""
    try:
        store.backend.create(_SECRET, store.seal(_SECRET, os.urandom(_SECRET_BYTES)))
    except Exists:
        pass
    except OSError as e:
        raise store.not_usable(e) from e
    found = find_secret(store)
    if found is None:
        raise StoreError(
            f"the store {store.backend.url} lost an object that it had just taken: {_SECRET}", path=store.path(_SECRET)
        )
    return found


def find_secret(store: Store) -> bytes | None:
    """The secret in this store, if there is one. Raises StoreError, StoreDamaged."""
    try:
        sealed = store.backend.read(_SECRET, 0, _SECRET_BYTES + SEALED_OVERHEAD_BYTES + 1)
    except Missing:
        return None
    except OSError as e:
        raise store.unreadable(_SECRET, e) from e
    found = store.unseal(_SECRET, sealed)
    if len(found) != _SECRET_BYTES:
        raise store.damaged(_SECRET, f"has {len(found)} bytes, not {_SECRET_BYTES}")
    return found


def encode(made: StoredSet) -> bytes:
    """The content of its object, before it is sealed."""
    return records.encode(_Body(made.name, made.snapshot_ids))


def decode(set_id: str, data: bytes) -> StoredSet:
    """The inverse of `encode`. Raises RecordError."""
    members = records.of_format(records.read_json(data), format=FORMAT, version=VERSION)
    body = records.convert(members, _Body)
    return StoredSet(set_id, body.name, body.snapshot_ids)


def _object(set_id: str) -> str:
    return f"{SETS_PREFIX}{set_id}"


def _read(store: Store, set_id: str) -> StoredSet | None:
    body = _body(store, set_id)
    if body is None or writers.is_tombstone(body):
        return None
    try:
        return decode(set_id, body)
    except RecordError as e:
        raise store.damaged(_object(set_id), f"is no valid set: {e}") from e


def _body(store: Store, set_id: str) -> bytes | None:
    name = _object(set_id)
    try:
        sealed = store.backend.read(name, 0, _MAX_BYTES + SEALED_OVERHEAD_BYTES + 1)
    except Missing:
        return None
    except OSError as e:
        raise store.unreadable(name, e) from e
    if len(sealed) > _MAX_BYTES + SEALED_OVERHEAD_BYTES:
        raise store.damaged(name, f"is larger than {_MAX_BYTES} bytes")
    return store.unseal(name, sealed)

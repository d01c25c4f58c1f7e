"""The snapshots of a store: what each one holds, and how one is found.

``snapshots/ID`` is a sealed object (see crypto.py), written last: with it the snapshot exists. It holds JSON::

    {"format": "gpucr-stored-snapshot", "version": 1, "name": TEXT or null, "created": TEXT, "host": TEXT,
     "counters": {TEXT: NUMBER}, "manifest": BASE64 of zlib,
     "areas": [{"name": TEXT, "size_bytes": NUMBER, "pieces": BASE64 of a list of pieces, "is_long": BOOLEAN}]}

An area is one file or one process's device memory. Where ``is_long`` is true, ``pieces`` lists the pieces that hold the
list of its pieces, one after the other. An empty object is a tombstone: no snapshot, and there never will be one (see
writers.py).
"""

from __future__ import annotations

import base64
import binascii
import json
import platform
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from gpucr.errors import InvalidRequest, StoreDamaged, StoreError
from gpucr.store import pieces, retired, writers
from gpucr.store.backend import Missing, ObjectInfo, together
from gpucr.store.crypto import SEALED_OVERHEAD_BYTES
from gpucr.store.opened import Store
from gpucr.store.pack import PREFIX as PACKS_PREFIX
from gpucr.store.pieces import PieceListError, PieceRef
from gpucr.store.reader import StoreReader
from gpucr.store.writer import StoreWriter
from gpucr.store.writers import Registration, snapshot_id_of

FORMAT, VERSION = "gpucr-stored-snapshot", 1
LATEST = "latest"
MAX_SNAPSHOT_BYTES = 256 << 20
MAX_MANIFEST_BYTES = 64 << 20
_INLINE_PIECES = 64
_SHORT_ID = 8
_READERS = 8
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True)
class Area:
    """One file, or the device memory of one process. ``listed`` are its pieces, or where ``is_long`` their list's."""

    name: str
    size_bytes: int
    listed: tuple[PieceRef, ...]
    is_long: bool = False

    def pieces(self, reader: StoreReader) -> Sequence[PieceRef]:
        """Its pieces in their order. Raises StoreDamaged."""
        if not self.is_long:
            return self.listed
        refs = reader.read_list(self.listed)
        found = sum(ref.length for ref in refs)
        if found != self.size_bytes:
            what = f"has a list of pieces for {self.name} that are {found} bytes, not {self.size_bytes}"
            raise reader.store.damaged(PACKS_PREFIX, what)
        return refs


@dataclass(frozen=True)
class StoredSnapshot:
    """A committed snapshot. ``created`` is in UTC by the clock of the store where it was made (ISO 8601).

    ``manifest`` is whatever the one who dumped put there. ``counters`` say what the dump read and wrote, in bytes.
    """

    id: str
    name: str | None
    created: str
    host: str
    manifest: bytes
    areas: tuple[Area, ...]
    counters: Mapping[str, int] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        """The size of everything in it, as it was before it was stored."""
        return sum(area.size_bytes for area in self.areas)

    @property
    def created_s(self) -> float:
        """`created` in seconds since 1970."""
        return datetime.fromisoformat(self.created).timestamp()

    @property
    def label(self) -> str:
        """How it is called in messages."""
        return f"{self.name} ({self.id[:_SHORT_ID]})" if self.name else self.id[:_SHORT_ID]

    def area(self, name: str) -> Area:
        """The area of this name. Raises KeyError."""
        return {area.name: area for area in self.areas}[name]


class _Invalid(ValueError):
    """A snapshot object says what cannot be."""


def check_name(name: str) -> None:
    """Raise InvalidRequest for a name that a snapshot cannot have: it would be taken for something else."""
    if not _NAME.fullmatch(name) or name == LATEST or re.fullmatch(r"[0-9a-f]{8,32}", name):
        raise InvalidRequest(
            f"{name!r} cannot be the name of a snapshot",
            hint="up to 100 letters, digits and . _ - ; not 'latest', and not like an id (8 or more of 0-9 a-f)",
        )


def make_area(name: str, refs: Sequence[PieceRef], writer: StoreWriter) -> Area:
    """An area of these pieces. A long list of them is stored as pieces itself, so that equal parts are stored once."""
    size_bytes = sum(ref.length for ref in refs)
    if len(refs) <= _INLINE_PIECES:
        return Area(name, size_bytes, tuple(refs))
    return Area(name, size_bytes, tuple(writer.add_list(refs)), is_long=True)


def commit(
    store: Store,
    registration: Registration,
    *,
    name: str | None,
    manifest: bytes,
    areas: Iterable[Area],
    counters: Mapping[str, int] | None = None,
    created: str | None = None,
    host: str | None = None,
) -> StoredSnapshot:
    """Make the snapshot exist; nothing of it may change afterwards. The registration is ended.

    All pieces of the areas are durable (`StoreWriter.flush`). ``created`` and ``host`` are those of a copy's source.
    The name has passed `check_name`. Raises StoreError where it cannot be completed.
    """
    now = datetime.fromtimestamp(registration.clock_s, timezone.utc).isoformat(timespec="milliseconds")
    snapshot = StoredSnapshot(
        registration.snapshot_id,
        name,
        created or now,
        host or platform.node(),
        manifest,
        tuple(areas),
        dict(counters or {}),
    )
    data = encode(snapshot)
    if len(data) > MAX_SNAPSHOT_BYTES or len(manifest) > MAX_MANIFEST_BYTES:
        registration.end()
        path = store.path(registration.snapshot_name)
        raise StoreError(
            "the snapshot cannot be completed: it names more files and processes than one snapshot can",
            path=path,
            hint="dump the job in parts",
        )
    writers.commit(store, registration, data)
    return snapshot


def load(store: Store, snapshot_id: str) -> StoredSnapshot:
    """The snapshot with this id. Raises StoreError where there is none, StoreDamaged where it is not intact."""
    name = writers.snapshot_object(snapshot_id)
    try:
        sealed = store.backend.read(name, 0, MAX_SNAPSHOT_BYTES + SEALED_OVERHEAD_BYTES)
    except Missing as e:
        raise _no_such(store, snapshot_id) from e
    except OSError as e:
        raise store.unreadable(name, e) from e
    if not sealed:
        raise _no_such(store, snapshot_id)
    try:
        return decode(snapshot_id, store.unseal(name, sealed))
    except _Invalid as e:
        raise store.damaged(name, f"is no valid snapshot: {e}") from e


def committed(store: Store) -> Sequence[ObjectInfo]:
    """The objects of all snapshots, without tombstones. Raises OSError."""
    found = store.backend.list(writers.SNAPSHOTS_PREFIX)
    return [info for info in found if info.size_bytes and snapshot_id_of(info.name)]


def tombstones(store: Store) -> Sequence[ObjectInfo]:
    """The tombstones of writers that died. Raises OSError."""
    found = store.backend.list(writers.SNAPSHOTS_PREFIX)
    return [info for info in found if not info.size_bytes and snapshot_id_of(info.name)]


@dataclass(frozen=True)
class Listing:
    """The snapshots of a store, oldest first, and those that cannot be read, by id.

    ``stored_s``: when each of all of them was put into this store, by the clock of the store.
    """

    snapshots: tuple[StoredSnapshot, ...]
    damaged: Mapping[str, StoreDamaged]
    stored_s: Mapping[str, float]

    def intact(self) -> tuple[StoredSnapshot, ...]:
        """All snapshots. Raises StoreDamaged where one cannot be read."""
        for snapshot_id, error in self.damaged.items():
            hint = f"get it back from another copy of the store, or remove it: gpucr rm STORE#{snapshot_id[:_SHORT_ID]}"
            raise StoreDamaged(error.message, path=error.path, hint=hint) from error
        return self.snapshots

    def latest(self, name: str | None = None) -> StoredSnapshot:
        """The latest of at least one, or of at least one of this name.

        Raises StoreDamaged where one that cannot be read may be later: its name is not known.
        """
        found = [each for each in self.snapshots if name is None or each.name == name][-1]
        for snapshot_id, error in self.damaged.items():
            if self.stored_s[snapshot_id] >= self.stored_s[found.id]:
                hint = "name another snapshot by its id: gpucr ls lists them"
                raise StoreDamaged(error.message, path=error.path, hint=hint) from error
        return found


def list_all(store: Store) -> Listing:
    """All snapshots. One that is removed meanwhile is passed over. Raises StoreError."""
    try:
        infos = committed(store)
    except OSError as e:
        raise store.not_usable(e) from e
    found: list[StoredSnapshot] = []
    damaged: dict[str, StoreDamaged] = {}
    with ThreadPoolExecutor(_READERS, "snapshots") as pool:
        for group in together(infos, MAX_SNAPSHOT_BYTES // 4):
            for info, result in zip(group, pool.map(lambda each: _load_listed(store, each), group), strict=True):
                if isinstance(result, StoredSnapshot):
                    found.append(result)
                elif result is not None:
                    damaged[_id_in(info)] = result
    stored_s = {_id_in(info): info.modified_s for info in infos}
    return Listing(tuple(sorted(found, key=lambda each: (each.created_s, each.id))), damaged, stored_s)


def _id_in(info: ObjectInfo) -> str:
    return info.name.rpartition("/")[2]


def _load_listed(store: Store, info: ObjectInfo) -> StoredSnapshot | StoreDamaged | None:
    snapshot_id = _id_in(info)
    if info.size_bytes > MAX_SNAPSHOT_BYTES + SEALED_OVERHEAD_BYTES:
        return store.damaged(info.name, f"is larger than {MAX_SNAPSHOT_BYTES} bytes")
    try:
        return load(store, snapshot_id)
    except StoreDamaged as e:
        return e
    except StoreError as e:
        if isinstance(e.__cause__, Missing):
            return None
        raise


def find(store: Store, wanted: str | None) -> StoredSnapshot:
    """The snapshot that is meant: a name (the latest of that name), an id or its first 8 or more digits, ``latest``.

    None: the only one. Raises InvalidRequest where none or several are meant, StoreDamaged, StoreError.
    """
    listing = list_all(store)
    found, url = listing.snapshots, store.backend.url
    if not found:
        listing.intact()
        raise InvalidRequest(f"the store {url} holds no snapshot", hint="dump into it first")
    count = len(found) + len(listing.damaged)
    if wanted is None and count > 1:
        raise InvalidRequest(f"the store {url} holds {count} snapshots", hint=f"name one: {url}#latest, {url}#NAME")
    if wanted is None or wanted == LATEST:
        return listing.latest()
    if any(snapshot.name == wanted for snapshot in found):
        return listing.latest(wanted)
    meant = [snapshot for snapshot in found if snapshot.id.startswith(wanted)] if len(wanted) >= _SHORT_ID else []
    if len(meant) == 1:
        return meant[0]
    for snapshot_id, error in listing.damaged.items():
        if not meant and len(wanted) >= _SHORT_ID and snapshot_id.startswith(wanted):
            raise error
    what = f"{len(meant)} snapshots whose id begins with" if meant else "no snapshot"
    raise InvalidRequest(f"the store {url} holds {what} {wanted!r}", hint=f"list what it holds: gpucr ls {url}")


def find_to_remove(store: Store, wanted: str) -> StoredSnapshot:
    """What `find` finds; also one that cannot be read, by its id: of that only id and time are known.

    Raises InvalidRequest, StoreDamaged, StoreError.
    """
    try:
        return find(store, wanted)
    except StoreDamaged:
        listing = list_all(store)
        meant = [each for each in listing.damaged if each.startswith(wanted)] if len(wanted) >= _SHORT_ID else []
        if len(meant) != 1:
            raise
        stored = datetime.fromtimestamp(listing.stored_s[meant[0]], timezone.utc)
        return StoredSnapshot(meant[0], None, stored.isoformat(timespec="milliseconds"), "", b"", ())


def remove(store: Store, snapshot_id: str) -> None:
    """Remove a snapshot. Its pieces stay until a prune finds that nothing else needs them. Raises StoreError."""
    try:
        store.backend.delete(writers.snapshot_object(snapshot_id))
    except OSError as e:
        raise store.not_usable(e) from e


def live_pieces(snapshot: StoredSnapshot, reader: StoreReader) -> Iterable[PieceRef]:
    """All pieces that a snapshot needs, also those of its lists, less those of zeros. Raises StoreDamaged."""
    for area in snapshot.areas:
        yield from (ref for ref in area.listed if not ref.is_zero)
        if area.is_long:
            yield from (ref for ref in area.pieces(reader) if not ref.is_zero)


def open_reader(store: Store, snapshot: StoredSnapshot) -> StoreReader:
    """A reader that knows where everything is that the snapshot needs.

    Footers of packs are read only where no index tells of a piece. Raises StoreDamaged where a piece is nowhere, and
    StoreError.
    """
    try:
        return _complete_reader(store, snapshot, footers=False)
    except StoreDamaged:
        return _complete_reader(store, snapshot, footers=True)


def _complete_reader(store: Store, snapshot: StoredSnapshot, *, footers: bool) -> StoreReader:
    index = retired.whole_index(store, footers=footers)
    reader = StoreReader(store, index)
    for ref in live_pieces(snapshot, reader):
        if index.find(ref.id) is None:
            what = f"lacks the piece {ref.id.hex()}, which the snapshot {snapshot.label} needs"
            raise store.damaged(PACKS_PREFIX, what)
    return reader


def encode(snapshot: StoredSnapshot) -> bytes:
    """The content of a snapshot object, before it is sealed."""
    areas = [
        {
            "name": area.name,
            "size_bytes": area.size_bytes,
            "pieces": base64.b64encode(pieces.encode_list(area.listed)).decode(),
            "is_long": area.is_long,
        }
        for area in snapshot.areas
    ]
    body = {
        "format": FORMAT,
        "version": VERSION,
        "name": snapshot.name,
        "created": snapshot.created,
        "host": snapshot.host,
        "counters": dict(snapshot.counters),
        "manifest": base64.b64encode(zlib.compress(snapshot.manifest)).decode(),
        "areas": areas,
    }
    return json.dumps(body).encode()


def decode(snapshot_id: str, data: bytes) -> StoredSnapshot:
    """What `encode` was given. Raises ValueError for anything that it does not write."""
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as e:
        raise _Invalid(f"it is not JSON: {e}") from e
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise _Invalid("it does not describe a snapshot")
    if body.get("version") != VERSION:
        raise _Invalid(f"it has version {body.get('version')!r}; this gpucr reads version {VERSION}")
    areas = tuple(_area(item) for item in _get(body, "areas", list))
    if len({area.name for area in areas}) != len(areas):
        raise _Invalid("two areas have the same name")
    counters = _get(body, "counters", dict)
    if any(type(value) is not int or value < 0 for value in counters.values()):
        raise _Invalid("one of its counters is no number")
    name = None if body.get("name") is None else _get(body, "name", str)
    if name is not None and not _NAME.fullmatch(name):
        raise _Invalid("its name is none that a snapshot can have")
    return StoredSnapshot(
        snapshot_id,
        name,
        _date(_get(body, "created", str)),
        _get(body, "host", str),
        _decompressed(_base64(_get(body, "manifest", str))),
        areas,
        counters,
    )


def _area(item: Any) -> Area:
    if not isinstance(item, dict):
        raise _Invalid("one of its areas is no object")
    name, size_bytes, is_long = _get(item, "name", str), _get(item, "size_bytes", int), _get(item, "is_long", bool)
    if not name or "\0" in name or not 0 <= size_bytes < 1 << 63:
        raise _Invalid("one of its areas has no valid name or size")
    try:
        listed = tuple(pieces.decode_list(_base64(_get(item, "pieces", str))))
    except PieceListError as e:
        raise _Invalid(f"the list of the pieces of {name!r} is not valid: {e}") from e
    found = sum(ref.length for ref in listed)
    if not is_long and found != size_bytes:
        raise _Invalid(f"the pieces of {name!r} have {found} bytes, not {size_bytes}")
    return Area(name, size_bytes, listed, is_long)


def _get(item: Mapping[str, Any], key: str, kind: type) -> Any:
    value = item.get(key)
    if type(value) is not kind:
        raise _Invalid(f"{key!r} is missing, or not of type {kind.__name__}")
    return value


def _date(text: str) -> str:
    try:
        if datetime.fromisoformat(text).tzinfo is None:
            raise _Invalid("'created' has no time zone")
    except ValueError as e:
        raise _Invalid(f"'created' is no date: {e}") from e
    return text


def _base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as e:
        raise _Invalid(f"it is not in base 64: {e}") from e


def _decompressed(data: bytes) -> bytes:
    unpacker = zlib.decompressobj()
    try:
        manifest = unpacker.decompress(data, MAX_MANIFEST_BYTES)
    except zlib.error as e:
        raise _Invalid(f"its manifest cannot be decompressed: {e}") from e
    if not unpacker.eof or unpacker.unused_data:
        raise _Invalid(f"its manifest is cut short, or larger than {MAX_MANIFEST_BYTES} bytes")
    return manifest


def _no_such(store: Store, snapshot_id: str) -> StoreError:
    path = store.path(writers.snapshot_object(snapshot_id))
    return StoreError(f"the store {store.backend.url} holds no snapshot {snapshot_id}", path=path)

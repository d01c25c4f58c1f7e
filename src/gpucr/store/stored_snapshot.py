"""The content of a snapshot object: encode and decode.

::

    {"format": "gpucr-stored-snapshot", "version": 1, "name": TEXT or null, "created": TEXT, "host": TEXT,
     "counters": {TEXT: NUMBER}, "part": {"set_id": HEX, "node": NUMBER, "node_count": NUMBER} or null,
     "manifest": BASE64 of zlib,
     "areas": [{"name": TEXT, "size_bytes": NUMBER, "pieces": BASE64 of a list of pieces, "is_long": BOOLEAN}]}

An area is one file or one process's device memory. If ``is_long`` is true, ``pieces`` lists the pieces that hold the
list of its pieces.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Annotated

from msgspec import Meta, Struct, field

from gpucr import records
from gpucr.records import Record, RecordError
from gpucr.store import pieces
from gpucr.store.pack import PREFIX as PACKS_PREFIX
from gpucr.store.pieces import PieceListError, PieceRef
from gpucr.store.reader import StoreReader

FORMAT, VERSION = "gpucr-stored-snapshot", 1
MAX_MANIFEST_BYTES = 64 << 20
MAX_LISTED_PIECES = 1 << 24
"""For all areas together, except lists stored as pieces: a run of one piece takes 40 bytes here."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
SHORT_ID = 8
MAX_NODES = 1 << 12
_Bytes = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


class Area(Struct, frozen=True):
    """One file, or the device memory of one process. ``listed``: its pieces or, if ``is_long``, those of their list."""

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


class SetPart(Record, frozen=True):
    """A snapshot's place in a set of several nodes (sets.py): node number ``node`` of ``node_count``, from 0."""

    set_id: str
    node: int
    node_count: int

    def __post_init__(self) -> None:
        if not 0 <= self.node < self.node_count <= MAX_NODES:
            raise RecordError(f"there is no node {self.node} of {self.node_count}")
        if not re.fullmatch(r"[0-9a-f]{32}", self.set_id):
            raise RecordError(f"{self.set_id!r} is not the id of a set")


class StoredSnapshot(Struct, frozen=True):
    """A committed snapshot. ``created`` is in UTC by the store's clock (ISO 8601).

    ``manifest`` comes from the dump. ``counters``: what the dump read and wrote, in bytes. ``part``: which part of a
    set it is; None: independent.
    """

    id: str
    name: str | None
    created: str
    host: str
    manifest: bytes
    areas: tuple[Area, ...]
    counters: Mapping[str, int] = field(default_factory=dict)
    part: SetPart | None = None

    @property
    def size_bytes(self) -> int:
        """The original size of everything in it."""
        return sum(area.size_bytes for area in self.areas)

    @property
    def created_s(self) -> float:
        """`created` in seconds since 1970."""
        return datetime.fromisoformat(self.created).timestamp()

    @property
    def label(self) -> str:
        """Its name in messages."""
        return f"{self.name} ({self.id[:SHORT_ID]})" if self.name else self.id[:SHORT_ID]

    def area(self, name: str) -> Area:
        """The area of this name. Raises KeyError."""
        return {area.name: area for area in self.areas}[name]


def encode(snapshot: StoredSnapshot) -> bytes:
    """The content of a snapshot object, before it is sealed."""
    body = _Body(
        name=snapshot.name,
        created=snapshot.created,
        host=snapshot.host,
        counters=dict(snapshot.counters),
        part=snapshot.part,
        manifest=zlib.compress(snapshot.manifest),
        areas=tuple(_Area(a.name, a.size_bytes, pieces.encode_list(a.listed), a.is_long) for a in snapshot.areas),
    )
    return records.encode(body)


def decode(snapshot_id: str, data: bytes) -> StoredSnapshot:
    """The inverse of `encode`. Raises RecordError for anything that it cannot have written."""
    body = records.convert(records.of_format(records.read_json(data), format=FORMAT, version=VERSION), _Body)
    manifest, areas = _decompressed(body.manifest), tuple(_areas(body.areas))
    return StoredSnapshot(snapshot_id, body.name, body.created, body.host, manifest, areas, body.counters, body.part)


class _Area(Record, frozen=True):
    name: Annotated[str, Meta(pattern=r"\A[^\0]+\Z")]
    size_bytes: _Bytes
    pieces: bytes
    is_long: bool


class _Body(Record, frozen=True):
    name: Annotated[str, Meta(pattern=rf"\A{NAME.pattern}\Z")] | None
    created: str
    host: str
    counters: Mapping[str, _Bytes]
    part: SetPart | None
    manifest: bytes
    areas: tuple[_Area, ...]
    format: str = FORMAT
    version: int = VERSION

    def __post_init__(self) -> None:
        if datetime.fromisoformat(self.created).tzinfo is None:
            raise RecordError("`created` has no time zone")
        if len({area.name for area in self.areas}) != len(self.areas):
            raise RecordError("two areas have the same name")


def _areas(items: Sequence[_Area]) -> Iterator[Area]:
    left = MAX_LISTED_PIECES
    for item in items:
        try:
            listed = tuple(pieces.decode_list(item.pieces, left))
        except PieceListError as e:
            raise RecordError(f"the list of the pieces of {item.name!r} is not valid: {e}") from e
        left -= len(listed)
        found = sum(ref.length for ref in listed)
        if not item.is_long and found != item.size_bytes:
            raise RecordError(f"the pieces of {item.name!r} have {found} bytes, not {item.size_bytes}")
        yield Area(item.name, item.size_bytes, listed, item.is_long)


def _decompressed(data: bytes) -> bytes:
    unpacker = zlib.decompressobj()
    try:
        manifest = unpacker.decompress(data, MAX_MANIFEST_BYTES)
    except zlib.error as e:
        raise RecordError(f"its manifest cannot be decompressed: {e}") from e
    if not unpacker.eof or unpacker.unused_data:
        raise RecordError(f"its manifest is cut short, or larger than {MAX_MANIFEST_BYTES} bytes")
    return manifest

"""What the object of a snapshot holds: made into bytes and read back.

::

    {"format": "gpucr-stored-snapshot", "version": 1, "name": TEXT or null, "created": TEXT, "host": TEXT,
     "counters": {TEXT: NUMBER}, "manifest": BASE64 of zlib,
     "areas": [{"name": TEXT, "size_bytes": NUMBER, "pieces": BASE64 of a list of pieces, "is_long": BOOLEAN}]}

An area is one file or one process's device memory. Where ``is_long`` is true, ``pieces`` lists the pieces that hold the
list of its pieces, one after the other.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from gpucr.store import pieces
from gpucr.store.pack import PREFIX as PACKS_PREFIX
from gpucr.store.pieces import PieceListError, PieceRef
from gpucr.store.reader import StoreReader

FORMAT, VERSION = "gpucr-stored-snapshot", 1
MAX_MANIFEST_BYTES = 64 << 20
MAX_LISTED_PIECES = 1 << 24
"""In all areas together, lists that are pieces themselves not counted: a run of one piece takes 40 bytes here."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
SHORT_ID = 8


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
        return f"{self.name} ({self.id[:SHORT_ID]})" if self.name else self.id[:SHORT_ID]

    def area(self, name: str) -> Area:
        """The area of this name. Raises KeyError."""
        return {area.name: area for area in self.areas}[name]


class InvalidSnapshot(ValueError):
    """A snapshot object says what cannot be."""


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
        raise InvalidSnapshot(f"it is not JSON: {e}") from e
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise InvalidSnapshot("it does not describe a snapshot")
    if body.get("version") != VERSION:
        raise InvalidSnapshot(f"it has version {body.get('version')!r}; this gpucr reads version {VERSION}")
    areas = tuple(_areas(_get(body, "areas", list)))
    if len({area.name for area in areas}) != len(areas):
        raise InvalidSnapshot("two areas have the same name")
    counters = _get(body, "counters", dict)
    if any(type(value) is not int or not 0 <= value < 1 << 63 for value in counters.values()):
        raise InvalidSnapshot("one of its counters is no number in range")
    name = None if body.get("name") is None else _get(body, "name", str)
    if name is not None and not NAME.fullmatch(name):
        raise InvalidSnapshot("its name is none that a snapshot can have")
    return StoredSnapshot(
        snapshot_id,
        name,
        _date(_get(body, "created", str)),
        _get(body, "host", str),
        _decompressed(_base64(_get(body, "manifest", str))),
        areas,
        counters,
    )


def _areas(items: Sequence[Any]) -> Iterator[Area]:
    left = MAX_LISTED_PIECES
    for item in items:
        area = _area(item, left)
        left -= len(area.listed)
        yield area


def _area(item: Any, most_pieces: int) -> Area:
    if not isinstance(item, dict):
        raise InvalidSnapshot("one of its areas is no object")
    name, size_bytes, is_long = _get(item, "name", str), _get(item, "size_bytes", int), _get(item, "is_long", bool)
    if not name or "\0" in name or not 0 <= size_bytes < 1 << 63:
        raise InvalidSnapshot("one of its areas has no valid name or size")
    try:
        listed = tuple(pieces.decode_list(_base64(_get(item, "pieces", str)), most_pieces))
    except PieceListError as e:
        raise InvalidSnapshot(f"the list of the pieces of {name!r} is not valid: {e}") from e
    found = sum(ref.length for ref in listed)
    if not is_long and found != size_bytes:
        raise InvalidSnapshot(f"the pieces of {name!r} have {found} bytes, not {size_bytes}")
    return Area(name, size_bytes, listed, is_long)


def _get(item: Mapping[str, Any], key: str, kind: type) -> Any:
    value = item.get(key)
    if type(value) is not kind:
        raise InvalidSnapshot(f"{key!r} is missing, or not of type {kind.__name__}")
    return value


def _date(text: str) -> str:
    try:
        if datetime.fromisoformat(text).tzinfo is None:
            raise InvalidSnapshot("'created' has no time zone")
    except ValueError as e:
        raise InvalidSnapshot(f"'created' is no date: {e}") from e
    return text


def _base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as e:
        raise InvalidSnapshot(f"it is not in base 64: {e}") from e


def _decompressed(data: bytes) -> bytes:
    unpacker = zlib.decompressobj()
    try:
        manifest = unpacker.decompress(data, MAX_MANIFEST_BYTES)
    except zlib.error as e:
        raise InvalidSnapshot(f"its manifest cannot be decompressed: {e}") from e
    if not unpacker.eof or unpacker.unused_data:
        raise InvalidSnapshot(f"its manifest is cut short, or larger than {MAX_MANIFEST_BYTES} bytes")
    return manifest

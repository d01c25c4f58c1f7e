"""The index: which pack has which piece, in few objects, so that opening a store reads little.

A writer that has published its packs publishes one index object (more only for very many pieces) that repeats their
footers. Packs missing from the index are found through their footers. An index object is sealed (see crypto.py) and
holds::

    "GPUCRIX1", packs (u32), zeros (4)
    for each pack: pack id (16), size in bytes (u64), entries (u32), zeros (4), then its entries as in its footer
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from gpucr.errors import StoreDamaged
from gpucr.store.backend import Buffer, Missing, ObjectInfo, together
from gpucr.store.crypto import Changed, CutShort
from gpucr.store.opened import Store
from gpucr.store.pack import (
    ENTRY_BYTES,
    MAX_ENTRIES,
    PACK_ID_BYTES,
    TRAILER_BYTES,
    PackContents,
    Place,
    check_entries,
    decode_footer,
    decode_trailer,
    iter_entries,
    pack_name,
)
from gpucr.store.pieces import ID_BYTES

PREFIX = "index/"
MAX_INDEX_BYTES = 128 << 20
_ENTRIES_AN_OBJECT = 1 << 20
_READERS = 8
_END_BYTES = 64 << 10
"""Read from the end of a pack at once: its trailer, and the footer of 1300 pieces."""

_HEADER = struct.Struct("<8sI4x")
_PACK = struct.Struct(f"<{PACK_ID_BYTES}sQI4x")
_MAGIC = b"GPUCRIX1"
_PLACE = struct.Struct(f"<{ID_BYTES}xIIIB3x")


class Index:
    """Where every piece is. Built by one thread; then `find` is thread-safe."""

    def __init__(self) -> None:
        self._packs: dict[bytes, PackContents] = {}
        self._numbers: list[PackContents] = []
        # Pack number and entry number in one integer: 200 bytes of memory per piece instead of 500.
        self._pieces: dict[bytes, int] = {}
        self._copies: dict[bytes, list[int]] = {}

    def add(self, contents: PackContents) -> None:
        """Add a pack. For a piece in several packs, the first added wins."""
        if contents.pack_id in self._packs:
            return
        base = len(self._numbers) * MAX_ENTRIES
        self._packs[contents.pack_id] = contents
        self._numbers.append(contents)
        for number, entry in enumerate(iter_entries(contents.entries)):
            if self._pieces.setdefault(entry.id, base + number) != base + number:
                self._copies.setdefault(entry.id, []).append(base + number)

    def find(self, piece_id: bytes) -> Place | None:
        """Where the piece is; None: in no pack that the index knows."""
        found = self._pieces.get(piece_id)
        return None if found is None else self._place(found)

    def places(self, piece_id: bytes) -> Sequence[Place]:
        """Every place of the piece, starting with `find`'s."""
        first = self.find(piece_id)
        return () if first is None else (first, *map(self._place, self._copies.get(piece_id, ())))

    def _place(self, found: int) -> Place:
        pack, number = divmod(found, MAX_ENTRIES)
        contents = self._numbers[pack]
        return Place(contents.pack_id, *_PLACE.unpack_from(contents.entries, number * ENTRY_BYTES))

    def pack(self, pack_id: bytes) -> PackContents | None:
        """The content of this pack; None: not in the index."""
        return self._packs.get(pack_id)

    @property
    def packs(self) -> Collection[PackContents]:
        """All packs."""
        return self._packs.values()

    @property
    def pieces(self) -> int:
        """The number of different pieces."""
        return len(self._pieces)


def load(store: Store, *, without: Collection[bytes] = ()) -> Index:
    """The index of a store without the packs ``without``: pieces only in those are not found.

    Raises StoreDamaged, StoreError. An index object that disappears meanwhile was replaced by a prune.
    """
    excluded = frozenset(without)
    index = Index()
    for _, packs in load_objects(store):
        for contents in packs:
            if contents.pack_id not in excluded:
                index.add(contents)
    return index


def load_objects(
    store: Store, on_damaged: Callable[[str, StoreDamaged], None] | None = None
) -> Iterator[tuple[str, list[PackContents]]]:
    """Every index object with the packs that it lists.

    ``on_damaged`` gets the name of each unreadable one: the packs' footers have the same data. Raises StoreError, and
    without it StoreDamaged.
    """
    try:
        found = list(store.backend.list(PREFIX))
    except OSError as e:
        raise store.not_usable(e) from e
    with ThreadPoolExecutor(_READERS, "index") as pool:
        for group in together(found, MAX_INDEX_BYTES):
            for info, sealed in zip(group, pool.map(lambda each: _read_object(store, each), group), strict=True):
                try:
                    if isinstance(sealed, StoreDamaged):
                        raise sealed
                    if sealed is not None:
                        yield info.name, _decode_object(store, info.name, sealed)
                except StoreDamaged as e:
                    if on_damaged is None:
                        raise
                    on_damaged(info.name, e)


def publish(store: Store, packs: Iterable[PackContents]) -> list[str]:
    """Write index objects for these published packs. Returns their names. Raises OSError."""
    names: list[str] = []
    for group in _groups(packs):
        name = f"{PREFIX}{os.urandom(16).hex()}"
        store.backend.create(name, store.seal(name, encode(group)))
        names.append(name)
    return names


def read_footer(store: Store, pack_id: bytes) -> PackContents:
    """A pack's content according to its footer. Raises StoreDamaged, StoreError."""
    name = pack_name(pack_id)
    try:
        size_bytes = store.backend.size(name)
        start = max(0, size_bytes - _END_BYTES)
        end = store.backend.read(name, start)
        trailer = decode_trailer(end[-TRAILER_BYTES:], pack_id, size_bytes)
        if trailer.footer_offset >= start:
            footer = end[trailer.footer_offset - start :][: trailer.footer_length]
        else:
            footer = store.backend.read(name, trailer.footer_offset, trailer.footer_length)
        return decode_footer(footer, trailer, size_bytes, store.keys.pack(pack_id) if store.keys else None)
    except Missing as e:
        raise store.damaged(name, "is missing") from e
    except OSError as e:
        raise store.unreadable(name, e) from e
    except CutShort as e:
        raise store.damaged(name, f"is cut short: {e}") from e
    except Changed as e:
        raise store.damaged(name, f"is not what was written: {e}") from e


def encode(packs: Collection[PackContents]) -> bytes:
    """The bytes of an index object before sealing."""
    parts = [_HEADER.pack(_MAGIC, len(packs))]
    for contents in packs:
        parts.append(_PACK.pack(contents.pack_id, contents.size_bytes, len(contents.entries) // ENTRY_BYTES))
        parts.append(contents.entries)
    return b"".join(parts)


def decode(data: Buffer) -> list[PackContents]:
    """The packs of an index object. Raises Changed for anything that `encode` cannot have written."""
    view = memoryview(data)
    if len(view) < _HEADER.size:
        raise Changed(f"an index of {len(view)} bytes")
    magic, count = _HEADER.unpack_from(view)
    if magic != _MAGIC:
        raise Changed(f"it begins with {magic!r}, not {_MAGIC!r}")
    packs: list[PackContents] = []
    position = _HEADER.size
    for _ in range(count):
        if len(view) - position < _PACK.size:
            raise Changed(f"it claims {count} packs and holds {len(packs)}")
        pack_id, size_bytes, entries = _PACK.unpack_from(view, position)
        position += _PACK.size
        if entries > MAX_ENTRIES or len(view) - position < entries * ENTRY_BYTES:
            raise Changed(f"it claims {entries} pieces where it has not so many")
        contents = PackContents(pack_id, size_bytes, bytes(view[position : position + entries * ENTRY_BYTES]))
        check_entries(contents.entries, size_bytes)
        position += entries * ENTRY_BYTES
        packs.append(contents)
    if position != len(view):
        raise Changed("it is longer than what it claims to hold")
    return packs


def _read_object(store: Store, info: ObjectInfo) -> bytes | StoreDamaged | None:
    if info.size_bytes > MAX_INDEX_BYTES:
        return store.damaged(info.name, f"is larger than {MAX_INDEX_BYTES} bytes")
    try:
        return store.backend.read(info.name, 0, MAX_INDEX_BYTES + 1)
    except Missing:
        return None
    except OSError as e:
        error = store.unreadable(info.name, e)
        if isinstance(error, StoreDamaged):
            return error
        raise error from e


def _decode_object(store: Store, name: str, sealed: bytes) -> list[PackContents]:
    try:
        return decode(store.unseal(name, sealed))
    except Changed as e:
        raise store.damaged(name, f"is not valid: {e}") from e


def _groups(packs: Iterable[PackContents]) -> Iterator[list[PackContents]]:
    group: list[PackContents] = []
    entries = 0
    for contents in packs:
        count = len(contents.entries) // ENTRY_BYTES
        if group and entries + count > _ENTRIES_AN_OBJECT:
            yield group
            group, entries = [], 0
        group.append(contents)
        entries += count
    if group:
        yield group

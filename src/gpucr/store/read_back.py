"""What was read of a store and found right: by whom, when, and why.

An object ``read/ID`` says it, created when the reading is over. A dump relies on a piece without reading it if one
of them is young enough. A crash leaves no such object, or a whole one. It counts only in the place where the reading
was done: a copy of a store's folder has files that nobody has read. And not in a store that a group shares: there a
member could write one about what nobody has read.

What is promised: so long ago, or less, these bytes could be read from this place and were what their name says. Not
that they can be read today: a disk that fails in between shows only at the next reading, or at the restore.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Sequence
from typing import Annotated, Literal

from msgspec import Meta

from gpucr import records
from gpucr.errors import StoreDamaged
from gpucr.records import Count, Moment, Record, RecordError, Text
from gpucr.store import sharing
from gpucr.store.backend import Missing, ObjectInfo
from gpucr.store.opened import Store
from gpucr.store.pack import PACK_ID_BYTES, Place

PREFIX = "read/"
KEPT_S = 90 * 24 * 3600.0
"""A prune removes older records: nobody relies on so old a reading."""

_MAX_BYTES = 64 << 20
_AHEAD_S = 300.0
"""A clock may be so far ahead; what was read later than that is no time at all."""

_MOST_READ = 1024
"""A writer reads so many records, the youngest ones: of what others say it reads the data."""

_JOINED_FROM = 8

Why = Literal["dump", "copy", "verify", "joined"]
PackId = Annotated[str, Meta(pattern=rf"\A[0-9a-f]{{{2 * PACK_ID_BYTES}}}\Z")]
Key = tuple[bytes, int]
"""A piece's pack, and its first block there."""


class ReadBack(Record, frozen=True):
    """One reading. ``began``: when, by the reader's clock. ``packs``: the first blocks of the pieces, by pack."""

    began: Moment
    place: Text
    host: Text
    why: Why
    packs: dict[PackId, tuple[Count, ...]]


def key_of(place: Place) -> Key:
    """What identifies it in these records."""
    return place.pack_id, place.block


def note(store: Store, places: Iterable[Place], *, why: Why, began_s: float) -> None:
    """Record that these were read since then, and found right. Does nothing where it would not count, or cannot.

    Nothing else depends on it: a place that takes no object has its pieces read again.
    """
    packs: dict[str, list[int]] = {}
    for place in places:
        packs.setdefault(place.pack_id.hex(), []).append(place.block)
    if not packs or sharing.is_shared(store.backend):
        return
    blocks = {pack: tuple(sorted(found)) for pack, found in packs.items()}
    _create(store, ReadBack(began_s, store.backend.identity, platform.node(), why, blocks))


def _create(store: Store, made: ReadBack) -> bool:
    name, data = f"{PREFIX}{os.urandom(16).hex()}", records.encode(made)
    if len(data) > _MAX_BYTES:
        return False
    try:
        store.backend.create(name, store.seal(name, data))
    except OSError:
        return False
    return True


def recent(store: Store, within_s: float, now_s: float) -> frozenset[Key]:
    """The pieces that were read within this time, by the store's clock. Raises OSError.

    The earlier of both clocks counts: the reader's when it began, and the store's when the record came. A record that
    is damaged does not.
    """
    found: set[Key] = set()
    if within_s <= 0 or sharing.is_shared(store.backend):
        return frozenset()
    listed = [info for info in store.backend.list(PREFIX) if now_s - info.modified_s <= within_s]
    for info in sorted(listed, key=lambda each: -each.modified_s)[:_MOST_READ]:
        made = _read(store, info)
        if made is None or made.place != store.backend.identity:
            continue
        read_s = min(made.began, info.modified_s)
        if -_AHEAD_S <= now_s - read_s <= within_s:
            found.update((bytes.fromhex(pack), block) for pack, blocks in made.packs.items() for block in blocks)
    return frozenset(found)


def decode(body: bytes) -> ReadBack:
    """The inverse of `records.encode`. Raises RecordError."""
    return records.decode(body, ReadBack)


def _read(store: Store, info: ObjectInfo) -> ReadBack | None:
    if info.size_bytes > _MAX_BYTES + 4096:
        return None
    try:
        return decode(store.unseal(info.name, store.backend.read(info.name)))
    except (StoreDamaged, RecordError, Missing):
        return None


def tidy(store: Store, now_s: float) -> None:
    """Remove records that nobody relies on, and join many that are of one hour and place. Raises OSError."""
    by_hour: dict[int, list[ObjectInfo]] = {}
    for info in list(store.backend.list(PREFIX)):
        if now_s - info.modified_s > KEPT_S:
            store.backend.delete(info.name)
        else:
            by_hour.setdefault(int(info.modified_s // 3600), []).append(info)
    for infos in by_hour.values():
        if len(infos) >= _JOINED_FROM:
            _join(store, infos)


def _join(store: Store, infos: Sequence[ObjectInfo]) -> None:
    """What they say together counts from the earliest of their times: never for longer than it did."""
    read = [(info, made) for info in infos if (made := _read(store, info)) is not None]
    for place in {made.place for _, made in read}:
        here = [(info, made) for info, made in read if made.place == place]
        blocks: dict[str, set[int]] = {}
        for _, made in here:
            for pack, found in made.packs.items():
                blocks.setdefault(pack, set()).update(found)
        began_s = min(min(made.began, info.modified_s) for info, made in here)
        packs = {pack: tuple(sorted(found)) for pack, found in blocks.items()}
        if len(here) > 1 and _create(store, ReadBack(began_s, place, platform.node(), "joined", packs)):
            for info, _ in here:
                store.backend.delete(info.name)

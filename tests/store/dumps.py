"""Snapshots of made-up content: a dump into a store without a job."""

from __future__ import annotations

from collections.abc import Mapping

from gpucr.store import snapshots
from gpucr.store.backend import Backend
from gpucr.store.keys import Secret
from gpucr.store.opened import Store
from gpucr.store.session import WriteSession
from gpucr.store.stored_snapshot import SetPart, StoredSnapshot

PIECE_BYTES = 4096
MANIFEST = b'{"what": "the manifest"}'
NEVER_S = 1e6
"""A sign of life that does not come while a test runs."""


def new_store(backend: Backend, secret: Secret | None = None, *, pack_bytes: int = 8 * PIECE_BYTES) -> Store:
    return Store.create(backend, secret=secret, piece_bytes=PIECE_BYTES, pack_bytes=pack_bytes)


def piece(number: int) -> bytes:
    """A piece that differs from those of all other numbers; 0 is all zero."""
    return number.to_bytes(8, "little") * (PIECE_BYTES // 8)


def content(*numbers: int) -> bytes:
    return b"".join(piece(number) for number in numbers)


def dump(
    store: Store, areas: Mapping[str, bytes], name: str | None = None, part: SetPart | None = None
) -> StoredSnapshot:
    """Store these areas as a snapshot."""
    with WriteSession.begin(store, compress="none", refresh_s=NEVER_S) as session:
        made = [session.area(area, session.writer.add_all(data)) for area, data in areas.items()]
        return session.commit(name=name, manifest=MANIFEST, areas=made, part=part)


def restore(store: Store, snapshot: StoredSnapshot) -> dict[str, bytes]:
    """The areas of a snapshot as they were dumped."""
    reader = snapshots.open_reader(store, snapshot)
    return {area.name: reader.read_all(area.pieces(reader)) for area in snapshot.areas}
